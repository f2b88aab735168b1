"""Figures are pure: values in, a `plotly.graph_objects.Figure` out. `run_views` and `sweep_view`
alone read the runs that they draw.

The public names stand in `__init__.pyi`; each is imported when it is first used.
"""

from workbench.base.errors import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
