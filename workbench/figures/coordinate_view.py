"""The coordinate check as a figure: activation sizes over the first steps against the width of the model."""

from __future__ import annotations

import numpy as np
from plotly.colors import sample_colorscale

from workbench.analysis.coordinates import CoordinateCheck, drift
from workbench.execution.activation_sizes import CHANGE, HIDDEN, READ_OUT, STREAM
from workbench.figures import theme
from workbench.figures.figure import Figure, subplots


def coordinate_check(check: CoordinateCheck) -> Figure:
    """Draw sizes of activations, of their changes, and of the logits over the width or depth, a line for each step.

    With a rule under which learning does not depend on the size of the model, the lines of the upper rows are level.
    """
    columns = {"With the rule": check.with_rule, "Without it": check.without}
    activations = STREAM if check.axis == "depth" else HIDDEN
    rows = (activations, CHANGE.format(activations), READ_OUT)
    titles = [f"{title}: {part}, drift {drift(sizes, part):+.2f}" for part in rows for title, sizes in columns.items()]
    figure = subplots(3, 2, subplot_titles=titles, shared_xaxes=True, shared_yaxes=True, vertical_spacing=0.08)
    steps = len(next(iter(check.with_rule.values())))
    colors = sample_colorscale("Viridis", np.linspace(0, 0.9, steps).tolist())
    for row, part in enumerate(rows, start=1):
        for column, sizes in enumerate(columns.values(), start=1):
            for step in range(steps):
                if part not in next(iter(sizes.values()))[step]:
                    continue  # Nothing has changed before the first step.
                y = [of_steps[step][part] for of_steps in sizes.values()]
                named = {"legendgroup": str(step), "showlegend": row == column == 1}
                trace = theme.curve(list(sizes), y, f"step {step}", colors[step], **named)
                figure.add_trace(trace.update(mode="lines+markers"), row=row, col=column)
            figure.update_xaxes(type="log", tickvals=list(sizes), row=row, col=column)
    figure.update_xaxes(title_text=check.axis.capitalize(), row=3)
    figure.update_yaxes(type="log", tickformat=theme.LOG_TICKS)
    figure.update_yaxes(title_text="Mean magnitude", col=1)
    subtitle = f"Drift is the exponent of the {check.axis} after the last step; 0 is level"
    title = theme.title(f"Coordinate check: activation sizes over the {check.axis}", subtitle)
    return figure.laid_out(height=860, title=title, margin={"t": 110})
