"""The difference of two or more curves with its band, and where they cross."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from workbench.figures import theme
from workbench.figures._curves import MOST_INSIDE
from workbench.figures._legend import legend_place
from workbench.figures._series import X_AXES
from workbench.figures.comparison import SURE, Difference

NAME_CHARACTERS, AXIS_CHARACTERS = 32, 18
"""Of a run's name, in a sentence, which has two of them, and along the axis."""


def differences(found: Sequence[Difference], title: str | None = None) -> go.Figure:
    """Smoothed loss of each run minus the first one's: below zero, it is the lower of the two.

    The band holds 90 % of the resamples (`workbench.figures.comparison`); a diamond marks where two curves last
    cross, its bar the interval of that point.
    """
    found = [_shortly_named(item) for item in found]
    figure = go.Figure()
    axis = X_AXES[found[0].axis]
    scale, heading = axis.unit(max(float(item.x[-1]) for item in found))
    figure.add_hline(y=0, line={"color": theme.AXIS, "width": 1.5})
    for index, item in enumerate(found, start=1):
        for trace in _traces(item, index, scale):
            figure.add_trace(trace)
    first = theme.text(theme.short(found[0].names[1], AXIS_CHARACTERS))
    shown = _settled_range(found)
    figure.update_yaxes(range=shown, title_text=f"Loss minus that of {first}")
    figure.update_xaxes(title_text=heading, rangemode="tozero")
    lines = [theme.text(item.describe()) for item in found]
    figure.update_layout(
        template=theme.TEMPLATE,
        height=360 + 18 * len(lines),
        title=theme.title(theme.text(title or "Difference in loss"), "<br>".join(lines)),
        margin={"t": 66 + 18 * len(lines)},
        hovermode="x unified",
        legend={
            "tracegroupgap": 0,
            **({"x": 1.01, "y": 0.99} if len(found) > MOST_INSIDE else legend_place(figure.data, y_range=shown)),
        },
    )
    return figure


def _shortly_named(item: Difference) -> Difference:
    first, second = (theme.short(name, NAME_CHARACTERS) for name in item.names)
    return replace(item, names=(first, second))


def _traces(item: Difference, index: int, scale: float) -> list[go.Scatter]:
    name, color, x = theme.text(item.names[0]), theme.series_color(index), item.x / scale
    band = go.Scatter(
        x=np.concatenate([x, x[::-1]]),
        y=np.concatenate([item.high, item.low[::-1]]),
        fill="toself",
        fillcolor=f"rgba({', '.join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))}, 0.2)",
        line={"width": 0},
        hoverinfo="skip",
        showlegend=False,
        legendgroup=str(index),
        meta="band",
    )
    line = go.Scatter(
        x=x,
        y=item.value,
        mode="lines",
        line={"color": color, "width": 2, "dash": theme.series_dash(index)},
        name=name,
        legendgroup=str(index),
        customdata=np.column_stack([item.low, item.high]),
        hovertemplate="%{y:+.3f} (%{customdata[0]:+.3f} to %{customdata[1]:+.3f})",
        meta="difference",
    )
    if item.crossover is None:
        return [band, line]
    at = item.crossover
    crossing = go.Scatter(
        x=[at.value / scale],
        y=[0.0],
        mode="markers",
        marker={"symbol": "diamond", "size": 10, "color": color, "line": {"color": "white", "width": 1}},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [max(0.0, at.high - at.value) / scale],
            "arrayminus": [max(0.0, at.value - at.low) / scale],
            "color": color,
            "thickness": 2,
            "width": 6,
        },
        name=name,
        legendgroup=str(index),
        showlegend=False,
        hovertemplate=f"they last cross here ({SURE:.0%}: {at.low / scale:.4g} to {at.high / scale:.4g})",
        meta="crossover",
    )
    return [band, line, crossing]


def _settled_range(found: Sequence[Difference]) -> list[float]:
    """What the curves do after the steep first twentieth; that would leave nothing of the rest to see."""
    edges = np.concatenate([np.concatenate([item.low, item.high])[_late(item)] for item in found])
    low, high = min(0.0, float(edges.min())), max(0.0, float(edges.max()))
    room = 0.12 * ((high - low) or 1.0)
    return [low - room, high + room]


def _late(item: Difference) -> NDArray[np.bool_]:
    late = item.x >= item.x[0] + 0.05 * (item.x[-1] - item.x[0])
    return np.tile(late, 2)
