"""Trackers of runs: the process that hands a run on, and the services that it hands it to, one file each."""
