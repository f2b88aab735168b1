"""Checkpoints: written, checked, read under another plan, exported."""
