"""The coordinate check as a figure: activation sizes over the first steps against the width of the model."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from workbench.analysis.coordinates import HIDDEN, READ_OUT, CoordinateCheck, activation_size, drift
from workbench.figures import theme
from workbench.figures.figure import Figure, subplots


def coordinate_check(check: CoordinateCheck) -> Figure:
    """Draw the sizes of hidden activations and logits over the width, a line for each of the first steps.

    With a rule under which learning does not depend on the width, the lines of the hidden activations are level.
    """
    columns = {"With the rule": check.with_rule, "Without it": check.without}
    titles = [
        f"{title}: {part}, drift {drift(sizes, part):+.2f}"
        for part in (HIDDEN, READ_OUT)
        for title, sizes in columns.items()
    ]
    figure = subplots(2, 2, subplot_titles=titles, shared_xaxes=True, vertical_spacing=0.12)
    steps = len(next(iter(check.with_rule.values())))
    colors = sample_colorscale("Viridis", np.linspace(0, 0.9, steps).tolist())
    for row, part in enumerate((HIDDEN, READ_OUT), start=1):
        for column, sizes in enumerate(columns.values(), start=1):
            widths = sorted(sizes)
            for step in range(steps):
                trace = go.Scatter(
                    x=widths,
                    y=[activation_size(sizes[width][step], part) for width in widths],
                    mode="lines+markers",
                    line={"color": colors[step], "width": 2},
                    name=f"step {step}",
                    legendgroup=str(step),
                    showlegend=row == column == 1,
                )
                figure.add_trace(trace, row=row, col=column)
            figure.update_xaxes(
                type="log", tickvals=widths, title_text="Width" if row == 2 else None, row=row, col=column
            )
    figure.update_xaxes(title_text="Width", row=2)
    figure.update_yaxes(type="log", title_text="Mean magnitude", col=1)
    figure.update_yaxes(type="log", col=2)
    subtitle = "Drift is the exponent of the width after the last step; 0 is level"
    title = theme.title("Coordinate check: activation sizes over the width", subtitle)
    return figure.laid_out(height=640, title=title)
