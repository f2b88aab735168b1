"""The optimisers of an experiment over sharded parameters, their parameter groups and learning-rate schedules."""
