"""Measurements of this machine, of the links between its devices, and of a model's blocks.

The public names stand in `__init__.pyi`; each is imported when it is first used.
"""

from workbench.base.errors import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
