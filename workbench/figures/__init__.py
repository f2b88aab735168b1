"""Figures are pure: values in, a `plotly.graph_objects.Figure` out; no file is read, nothing is kept.

Importing this package imports plotly; `import workbench` does not.
"""

from workbench.figures.curves import Curve, loss_curves, throughput

__all__ = ["Curve", "loss_curves", "throughput"]
