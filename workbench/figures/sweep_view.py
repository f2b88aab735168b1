"""Figures of a sweep: the objective over two axes, and mean curves with a band over the seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.errors import UnknownParameter, suggestion
from workbench.figures import theme
from workbench.figures.axes import X_AXES, check_axis
from workbench.sweeps.sweep import Row, Sweep

BAND_POINTS = 300
"""Points of a mean curve."""


def heat_map(sweep: Sweep, x: str | None = None, y: str | None = None) -> go.Figure:
    """Draw the mean objective of a sweep over two of its axes; other axes show the best of their values.

    Args:
        sweep: the sweep, at work or complete. A cell without a finished run is empty.
        x: axis along the width; by default the first.
        y: axis along the height; by default the second, if there is one.

    Raises `UnknownParameter` for an axis that the sweep lacks.
    """
    axes = list(sweep.axes)
    x = x or next(name for name in axes if name != y)
    y = y or next((name for name in axes if name != x), None)
    for name in (x, y):
        if name is not None and name not in axes:
            raise UnknownParameter(f"The sweep has no axis {name!r}. {suggestion(name, axes)}", parameter=name)
    rows = sweep.rows()
    columns, lines = _values(rows, x), [""] if y is None else _values(rows, y)
    grid = np.full((len(lines), len(columns)), np.nan)
    for row in reversed(rows):  # the best comes last and is kept
        if row.mean is not None:
            line = 0 if y is None else lines.index(str(row.values[y]))
            grid[line, columns.index(str(row.values[x]))] = row.mean
    words = [["" if np.isnan(value) else f"{value:.4g}" for value in line] for line in grid]
    figure = go.Figure(
        go.Heatmap(
            x=columns,
            y=lines,
            z=grid,
            text=words,
            texttemplate="%{text}",
            colorscale="Viridis",
            reversescale=True,
            xgap=2,
            ygap=2,
            colorbar={"title": {"text": "objective"}},
            hovertemplate=f"{theme.text(x)} %{{x}}<br>{theme.text(y or '')} %{{y}}<br>%{{text}}<extra></extra>",
        )
    )
    figure.update_xaxes(type="category", title_text=theme.text(x), showgrid=False)
    figure.update_yaxes(type="category", title_text=theme.text(y or ""), showgrid=False)
    main = theme.title(theme.text(sweep.name), theme.text(f"{sweep.objective}, mean over the seeds; lower is better"))
    figure.update_layout(template=theme.TEMPLATE, height=200 + 60 * max(3, len(lines)), title=main)
    return figure


def seed_bands(sweep: Sweep, x: str = "tokens") -> go.Figure:
    """Draw the mean loss curve of each configuration of a sweep, with a band from its lowest to its highest seed.

    `x` is the x axis: `step`, `tokens`, `samples`, `time`, `flops` or `gpu_hours`. A curve ends where the first of its
    seeds does. Raises `UnknownParameter` for another axis.
    """
    check_axis(x)
    figure = go.Figure()
    curves = [(row, _mean_curve(row, X_AXES[x].column)) for row in sweep.rows()]
    longest = max((float(curve[0][-1]) for _, curve in curves if curve is not None), default=1.0)
    scale, x_title = X_AXES[x].unit(longest)
    for index, (row, curve) in enumerate(curves):
        if curve is not None:
            figure.add_traces(_band(_name(row.values), curve, scale, index))
    figure.update_xaxes(title_text=x_title, rangemode="tozero")
    figure.update_yaxes(title_text="Training loss")
    main = theme.title(theme.text(sweep.name), "Mean over the seeds; the band holds every seed")
    figure.update_layout(template=theme.TEMPLATE, height=460, title=main, hovermode="x unified")
    return figure


def _values(rows: Sequence[Row], axis: str) -> list[str]:
    """Return the values of an axis as text, numbers in rising order."""
    found = {row.values[axis] for row in rows}
    numbers = all(isinstance(value, int | float) for value in found)
    return [str(value) for value in (sorted(found) if numbers else sorted(found, key=str))]


def _name(values: Mapping[str, Any]) -> str:
    return theme.text(theme.short(", ".join(f"{name} {value}" for name, value in values.items())))


def _mean_curve(row: Row, column: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Return positions, mean, lowest and highest loss over the seeds; None before each has two steps."""
    histories = [run.history() for run in row.runs]
    if not histories or min(map(len, histories)) < 2:
        return None
    first = max(float(history[column][0]) for history in histories)
    last = min(float(history[column][-1]) for history in histories)
    grid = np.linspace(first, max(first, last), BAND_POINTS)
    losses = np.array([np.interp(grid, history[column], history.loss) for history in histories])
    return grid, losses.mean(axis=0), losses.min(axis=0), losses.max(axis=0)


def _band(name: str, curve: tuple[Any, Any, Any, Any], scale: float, index: int) -> list[go.Scatter]:
    grid, mean, low, high = curve
    color, x = theme.series_color(index), grid / scale
    fill = f"rgba({', '.join(map(str, theme.rgb(color)))}, 0.2)"
    shared = {"legendgroup": str(index), "name": name}
    return [
        go.Scatter(
            x=np.concatenate([x, x[::-1]]),
            y=np.concatenate([high, low[::-1]]),
            fill="toself",
            fillcolor=fill,
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
            meta="band",
            **shared,
        ),
        go.Scatter(
            x=x, y=mean, mode="lines", line={"color": color, "width": 2, "dash": theme.series_dash(index)}, **shared
        ),
    ]
