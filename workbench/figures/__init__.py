"""Figures are pure: values in, a `plotly.graph_objects.Figure` out; no file is read, nothing is kept.

Importing this package imports plotly; `import workbench` does not.
"""

from workbench.figures._curves import loss_curves, throughput
from workbench.figures._difference import differences
from workbench.figures._measured import measured_timeline, timelines
from workbench.figures._memory import memory
from workbench.figures._panels import panels
from workbench.figures._partition import BlockView, partition
from workbench.figures._prediction import prediction
from workbench.figures._series import Curve, Mark
from workbench.figures._timeline import timeline
from workbench.figures.comparison import Contrast, contrast, difference, standings
from workbench.figures.pages import notebook_to_html, save_html, save_png
from workbench.figures.plan_view import plan_html, plan_mimebundle, show_plan

__all__ = [
    "BlockView",
    "Contrast",
    "Curve",
    "Mark",
    "contrast",
    "difference",
    "differences",
    "loss_curves",
    "measured_timeline",
    "memory",
    "notebook_to_html",
    "panels",
    "partition",
    "plan_html",
    "plan_mimebundle",
    "prediction",
    "save_html",
    "save_png",
    "show_plan",
    "standings",
    "throughput",
    "timeline",
    "timelines",
]
