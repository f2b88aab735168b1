"""Figures are pure: values in, a `plotly.graph_objects.Figure` out; no file is read, nothing is kept.

Importing this package imports plotly; `import workbench` does not.
"""

from workbench.analysis.curve import Curve, Mark
from workbench.figures.contrast_view import contrast, differences, show_contrast
from workbench.figures.curves_view import loss_curves
from workbench.figures.measured_step import measured_timeline, timelines
from workbench.figures.pages import notebook_to_html, save_html, save_png
from workbench.figures.panels_view import panels
from workbench.figures.partition_view import BlockView, partition
from workbench.figures.plan_view import plan_html, plan_mimebundle, show_plan
from workbench.figures.prediction_view import prediction
from workbench.figures.timeline_view import timeline

__all__ = [
    "BlockView",
    "Curve",
    "Mark",
    "contrast",
    "differences",
    "loss_curves",
    "measured_timeline",
    "notebook_to_html",
    "panels",
    "partition",
    "plan_html",
    "plan_mimebundle",
    "prediction",
    "save_html",
    "save_png",
    "show_contrast",
    "show_plan",
    "timeline",
    "timelines",
]
