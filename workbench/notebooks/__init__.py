"""Notebooks: starting from a template, executing with parameters, sharing, and reproducing.

The public names stand in `__init__.pyi`; each is imported when it is first used.
"""

from workbench.base.errors import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
