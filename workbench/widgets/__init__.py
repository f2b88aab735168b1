"""Widgets that need a running kernel. Importing this package imports ipywidgets and plotly."""

from workbench.widgets.dashboard import Live, live
from workbench.widgets.live_queues import LiveSweep
from workbench.widgets.what_if import WhatIf

__all__ = ["Live", "LiveSweep", "WhatIf", "live"]
