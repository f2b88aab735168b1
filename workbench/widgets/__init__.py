"""Widgets that need a running kernel, and the reader of runs behind them, which JupyterLab's server uses too.

The public names stand in `__init__.pyi`; each is imported, with ipywidgets, when it is first used.
"""

from workbench.base.errors import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
