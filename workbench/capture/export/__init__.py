"""The export of a model: what `torch.export` follows, what runs as the user's own code, and rewrites of its graph."""
