"""The ground floor: errors, display, units, tensors, checked arguments, this host, secrets and user-defined code."""

COMMANDS: dict[str, tuple[str, ...]] = {}
"""Commands by name, as arguments of `python -m`: the package fills them in for rooms that stand below what they run."""
