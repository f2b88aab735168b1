"""Widgets: what needs a kernel to move. Importing this package imports ipywidgets and plotly."""

from workbench.widgets.dashboard import Live, live

__all__ = ["Live", "live"]
