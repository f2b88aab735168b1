"""Runs: launching without blocking the kernel, the handle of a run, its records, tracking, and the registry.

The public names stand in `__init__.pyi`; each is imported when it is first used.
"""

from workbench.base.errors import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
