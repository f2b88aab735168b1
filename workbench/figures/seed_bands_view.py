"""Curves of a sweep: the mean of each configuration over its seeds, with a band from the lowest to the highest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.analysis.curve import X_AXES, Array, check_axis, finite_points
from workbench.arguments import checked_arguments
from workbench.errors import UnknownParameter, suggestion
from workbench.figures import theme
from workbench.figures.curves_view import robust_range
from workbench.figures.figure import Figure
from workbench.figures.legend_placement import LETTERS_INSIDE
from workbench.runs.records.history import Evaluations, History, read_tail
from workbench.runs.run import Run
from workbench.sweeps.sweep import Row, Sweep

POINTS = 300
"""Largest number of points of a curve."""
AXES_LETTERS = 18
"""Letters of a line of the legend's title, beside which a narrow figure has room for the curves."""
MAX_CONFIGURATIONS = 24
"""Largest number of configurations with a curve."""
LOSSES = {"loss": "Training loss", "eval_loss": "Held-out loss"}
"""Title of the y axis by the name that `y=` takes."""
Losses = tuple[History, Evaluations]
"""Training losses and held-out losses of one run."""
Line = tuple[Array, Array]
"""Positions and losses of one run."""


@checked_arguments
def seed_bands(sweep: Sweep, x: str = "tokens", y: str | None = None) -> Figure:
    """Draw the mean loss curve of each configuration of a sweep, with a band from its lowest to its highest seed.

    The mean is over the finished runs, up to the end of the shortest. Other runs are thin lines in the colour of
    their configuration. Of more than 24 configurations, those at work and the best are drawn.

    Args:
        sweep: the sweep, at work or complete.
        x: x axis: `step`, `tokens`, `samples`, `time`, `flops` or `gpu_hours`.
        y: `loss` or `eval_loss`; by default the held-out loss if the experiment evaluates.

    Raises `UnknownParameter` for another axis.
    """
    check_axis(x)
    return draw_seed_bands(sweep, sweep.rows(), read_losses, x, y)


def read_losses(run: Run) -> Losses:
    """Return the losses of a run."""
    tail = read_tail(run.directory.events)
    return tail.read(), tail.evaluations


def draw_seed_bands(
    sweep: Sweep,
    rows: Sequence[Row],
    read: Callable[[Run], Losses] = read_losses,
    x: str = "tokens",
    y: str | None = None,
) -> Figure:
    """Draw the figure of `seed_bands` from rows of the sweep and a function that returns the losses of a run."""
    y = y or ("eval_loss" if sweep.evaluates else "loss")
    if y not in LOSSES:
        raise UnknownParameter(f"y={y!r} is not a loss. {suggestion(y, LOSSES)}")
    shown = sorted(rows, key=lambda row: not row.at_work)[:MAX_CONFIGURATIONS]
    shown = [row for row in rows if row in shown]
    lines = {run.path: _line(read(run), X_AXES[x].column, y) for row in shown for run in row.runs}
    longest = max((float(line[0][-1]) for line in lines.values() if len(line[0])), default=1.0)
    scale, x_title = X_AXES[x].unit(longest)
    figure = Figure()
    for row in shown:
        finished = [lines[run.path] for run in row.finished if len(lines[run.path][0]) > 1]
        others = [lines[run.path] for run in row.runs if run not in row.finished and len(lines[run.path][0]) > 1]
        figure.add_traces(_traces(row, finished, others, scale))
    figure.update_xaxes(title_text=x_title, rangemode="tozero")
    y_range = robust_range([line[1] for line in lines.values() if len(line[1])])
    beyond = sum(bool(len(loss)) and float(loss.max()) > (y_range or (0, np.inf))[1] for _, loss in lines.values())
    figure.update_yaxes(title_text=LOSSES[y], range=y_range)
    left_out = f"; {beyond} of {len(lines)} runs leave the axis" if beyond else ""
    left_out += f"; {len(rows) - len(shown)} configurations are left out" if len(rows) > len(shown) else ""
    words = f"Mean over the finished seeds, whose band holds them all; thin lines: other runs{left_out}"
    main = theme.title(theme.text(sweep.name), words)
    axes = theme.broken(theme.text(" · ".join(sweep.axes)), AXES_LETTERS)
    legend = {"title": {"text": axes, "font": {"size": theme.FONT_PX}}}
    return figure.laid_out(height=460, title=main, hovermode="x unified", margin={"t": 84}, legend=legend)


def _line(losses: Losses, column: str, y: str) -> Line:
    """Return the finite points of a run's curve; of more than `POINTS`, averages of neighbours."""
    table: Any = losses[1] if y == "eval_loss" else losses[0]
    return finite_points(table[column], table[y], POINTS)


def _traces(row: Row, finished: Sequence[Line], others: Sequence[Line], scale: float) -> list[go.Scatter]:
    """Return the band and the mean of the finished runs of a configuration, and its other runs as thin lines."""
    color = theme.series_color(row.index)
    values = theme.short(" · ".join(map(str, row.values.values())), LETTERS_INSIDE)
    words = theme.text(values)  # the legend's title names the axes
    shared = {"legendgroup": str(row.index), "name": words}
    look = {**shared, "color": color, "dash": theme.series_dash(row.index)}
    traces = []
    if finished:
        x, mean, low, high = _mean(finished)
        traces.append(theme.band(x / scale, low, high, color, **shared))
        traces.append(theme.curve(x / scale, mean, meta="mean", **look))
    for at, (x, loss) in enumerate(others):
        quiet = {"hoverinfo": "skip", "showlegend": not finished and at == 0, "meta": "other"}
        traces.append(theme.curve(x / scale, loss, width=1, **quiet, **look))
    return traces


def _mean(lines: Sequence[Line]) -> tuple[Array, Array, Array, Array]:
    """Return positions, and mean, lowest and highest loss over the runs, where all of them have been."""
    first, last = max(float(x[0]) for x, _ in lines), min(float(x[-1]) for x, _ in lines)
    places = np.unique(np.concatenate([x for x, _ in lines]))
    grid = places[(places >= first) & (places <= last)]
    if len(grid) > POINTS:
        grid = np.linspace(first, last, POINTS)
    losses = np.array([np.interp(grid, x, loss) for x, loss in lines])
    return grid, losses.mean(axis=0), losses.min(axis=0), losses.max(axis=0)
