"""The record of a run on disk, written and read: its directory, events, columns of a step, step table and history."""
