"""Trackers of runs: the process that hands a run on, and the run at Weights & Biases."""
