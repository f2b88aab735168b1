"""The ground floor: errors, display, units, tensors, checked arguments, this host, secrets and user-defined code."""
