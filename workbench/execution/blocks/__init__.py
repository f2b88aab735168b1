"""A captured block made to run."""
