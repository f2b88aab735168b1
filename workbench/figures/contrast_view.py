"""Views of a comparison: differences as a figure, standings and differing settings as tables."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.figures import theme
from workbench.figures.axes import X_AXES, check_axis
from workbench.figures.comparison import CONFIDENCE, Difference, Standing, difference, standings, with_unique_names
from workbench.figures.curve import CurveLike, column, evaluations_of
from workbench.figures.curves_view import MAX_INSIDE
from workbench.figures.legend_placement import place_legend
from workbench.figures.smoothing import SMOOTHING, check_smoothing

NAME_CHARACTERS, AXIS_CHARACTERS = 32, 18
"""Largest number of characters of a run's name in a sentence, which holds two names, and in the y axis' title."""
LEAST_EVALUATIONS = 5
"""Smallest number of held-out losses of each run from which they are compared in place of training losses."""
IGNORED_SETTINGS = (
    *("candidates", "prediction", "stages", "block_names", "signature", "flops_per_step"),
    *("time", "started", "command", "directory", "executable", "name", "run"),
)
"""Keys that are no settings: results of a search, facts that follow from the model, when and where a run started."""


@dataclass(frozen=True)
class Contrast:
    """Comparison of runs and of their settings; a notebook shows it as a figure and tables."""

    names: tuple[str, ...]
    standings: tuple[Standing, ...]
    differences: tuple[Difference, ...]
    """Difference of each other run to the first."""
    settings: tuple[tuple[str, tuple[str, ...]], ...]
    """Settings that differ, as (dotted name, one value per run), from experiments, plans and environments."""

    def __repr__(self) -> str:
        lines = [str(standing) for standing in self.standings]
        lines += [item.describe() for item in self.differences]
        lines += [f"{name}: {' | '.join(values)}" for name, values in self.settings]
        return "\n".join(lines)

    def figure(self) -> go.Figure:
        """Draw the differences."""
        return differences(self.differences)

    def _ipython_display_(self) -> None:
        from IPython.display import HTML, display

        if self.differences:
            display(self.figure())
        display(HTML(self.to_html()))

    def to_html(self) -> str:
        """Return standings and settings as HTML tables, every name escaped."""
        rows = [_table_row(("at equal", "", *self.names, "lowest"), "th")]
        for item in self.standings:
            verdict = item.best if item.sure else f"too close to call ({item.best} in {item.share:.0%})"
            intervals = (item.losses[name] for name in self.names)
            losses = (f"{loss.value:.4g} ± {(loss.high - loss.low) / 2:.2g}" for loss in intervals)
            axis = X_AXES[item.axis]
            rows.append(_table_row((axis.label, axis.describe(item.at), *losses, verdict), "td"))
        page = f"<table>{''.join(rows)}</table>"
        if not self.settings:
            return f"{page}<p>Their experiments, plans and environments agree.</p>"
        rows = [_table_row(("what differs", *self.names), "th")]
        rows += [_table_row((name, *values), "td") for name, values in self.settings]
        return f"{page}<table>{''.join(rows)}</table>"


def _table_row(cells: Sequence[str], tag: str) -> str:
    style = "text-align:left;vertical-align:top;padding:2px 10px"
    return f"<tr>{''.join(f'<{tag} style={style!r}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def contrast(
    curves: Sequence[CurveLike],
    described: Sequence[Mapping[str, Any]] = (),
    x: str = "tokens",
    smoothing: float = SMOOTHING,
) -> Contrast:
    """Compare runs at equal cost, each run with the first over `x`, and list the settings that differ.

    The held-out losses are compared if every run has at least `LEAST_EVALUATIONS` of them, else the training losses.

    `described` holds nested JSON for every run: its experiment, plan and environment.
    """
    check_axis(x)
    check_smoothing(smoothing)
    curves = with_unique_names(_comparable(curves))
    first, *others = curves
    return Contrast(
        tuple(curve.name for curve in curves),
        standings(curves, smoothing=smoothing),
        tuple(difference(other, first, x, smoothing) for other in others),
        setting_differences(described),
    )


def _comparable(curves: Sequence[CurveLike]) -> Sequence[CurveLike]:
    held_out = [evaluations_of(curve) for curve in curves]
    enough = [curve for curve in held_out if curve is not None and len(column(curve, "step")) >= LEAST_EVALUATIONS]
    return enough if len(enough) == len(curves) else curves


def setting_differences(described: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return every leaf of nested descriptions that is not equal in all of them, as (dotted name, values)."""
    flat = [_flattened(item) for item in described]
    rows = []
    for name in dict.fromkeys(name for item in flat for name in item):
        values = tuple(_describe_setting(item.get(name)) for item in flat)
        if len(set(values)) > 1:
            rows.append((name, values))
    return tuple(rows)


def _flattened(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, item in value.items():
        if key in IGNORED_SETTINGS:
            continue
        if isinstance(item, Mapping) and item:
            leaves |= _flattened(item, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = item
    return leaves


def _describe_setting(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 4:
        return f"{len(value)} items"
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def differences(items: Sequence[Difference]) -> go.Figure:
    """Draw the smoothed loss of each run minus that of the first: below zero, the run is the lower of the two.

    The band holds 90 % of the resamples (`workbench.figures.comparison`). A diamond marks where two curves last cross;
    its bar is the interval of that point.
    """
    items = [
        replace(item, names=(theme.short(item.names[0], NAME_CHARACTERS), theme.short(item.names[1], NAME_CHARACTERS)))
        for item in items
    ]
    figure = go.Figure()
    scale, x_title = X_AXES[items[0].axis].unit(max(float(item.x[-1]) for item in items))
    figure.add_hline(y=0, line={"color": theme.AXIS, "width": 1.5})
    for index, item in enumerate(items, start=1):
        figure.add_traces(_difference_traces(item, index, scale))
    first = theme.text(theme.short(items[0].names[1], AXIS_CHARACTERS))
    y_range = _settled_range(items)
    figure.update_yaxes(range=y_range, title_text=f"Loss minus that of {first}")
    figure.update_xaxes(title_text=x_title, rangemode="tozero")
    lines = [theme.text(item.describe()) for item in items]
    outside = {"x": 1.01, "y": 0.99}
    place = outside if len(items) > MAX_INSIDE else place_legend(figure.data, y_range=y_range)
    figure.update_layout(
        template=theme.TEMPLATE,
        height=360 + 18 * len(lines),
        title=theme.title("Difference in loss", "<br>".join(lines)),
        margin={"t": 66 + 18 * len(lines)},
        hovermode="x unified",
        legend={"tracegroupgap": 0, **place},
    )
    return figure


def _difference_traces(item: Difference, index: int, scale: float) -> list[go.Scatter]:
    name, color, x = theme.text(item.names[0]), theme.series_color(index), item.x / scale
    band = go.Scatter(
        x=np.concatenate([x, x[::-1]]),
        y=np.concatenate([item.high, item.low[::-1]]),
        fill="toself",
        fillcolor=f"rgba({', '.join(map(str, theme.rgb(color)))}, 0.2)",
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
        hovertemplate=f"they last cross here ({CONFIDENCE:.0%}: {at.low / scale:.4g} to {at.high / scale:.4g})",
        meta="crossover",
    )
    return [band, line, crossing]


def _settled_range(items: Sequence[Difference]) -> list[float]:
    """Return the y range of the bands after the first twentieth, whose steep fall would flatten all the rest."""
    settled = [item.x >= item.x[0] + 0.05 * (item.x[-1] - item.x[0]) for item in items]
    edges = [edge[late] for item, late in zip(items, settled, strict=True) for edge in (item.low, item.high)]
    values = np.concatenate(edges)
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    room = 0.12 * ((high - low) or 1.0)
    return [low - room, high + room]
