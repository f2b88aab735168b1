"""Figures of a contrast: differences of curves with their bands, and differences of configurations over their seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.analysis.contrast import Contrast, Difference
from workbench.analysis.curve import X_AXES
from workbench.analysis.noise import CONFIDENCE
from workbench.analysis.seed_contrast import SeedContrast, SeedDifference
from workbench.figures import theme
from workbench.figures.figure import Figure
from workbench.figures.legend_placement import fits_inside, height_below, place_legend

NAME_LETTERS = 20
"""Letters of a line of a name beside its differences."""
NAME_CHARACTERS, AXIS_CHARACTERS = 32, 18
"""Largest number of characters of a run's name in a sentence, which holds two names, and in the y axis' title."""


def contrast(compared: Contrast | SeedContrast) -> Figure:
    """Draw what `wb.contrast` computed: the difference of each run, or configuration, to the first."""
    if compared.incomparable:
        return _not_compared(compared.incomparable)
    return seed_differences(compared) if isinstance(compared, SeedContrast) else differences(compared.differences)


def _not_compared(why: str) -> Figure:
    """Return a figure that holds nothing but why the losses do not compare."""
    figure = Figure()
    for update in (figure.update_xaxes, figure.update_yaxes):
        update(showticklabels=False, showgrid=False, zeroline=False, showline=False, range=[0, 1])
    return figure.laid_out(height=110, title=theme.title("No difference in loss", theme.text(why)), margin={"t": 84})


def show_contrast(compared: Contrast | SeedContrast) -> None:
    """Show a contrast in a notebook: its figure and its tables."""
    from IPython.display import HTML, display

    if compared.differences or compared.incomparable:
        display(contrast(compared))
    display(HTML(compared.to_html()))


def differences(items: Sequence[Difference]) -> Figure:
    """Draw the smoothed loss of each run minus that of the first: below zero, the run is the lower of the two.

    The band is the 90 % interval of the noise along the curves (`workbench.analysis.noise`). A bar at the end reaches
    as far as seeds alone part two runs, if that is known. A diamond marks where two curves last cross; its bar is the
    interval of that point.
    """
    items = [
        replace(item, names=(theme.short(item.names[0], NAME_CHARACTERS), theme.short(item.names[1], NAME_CHARACTERS)))
        for item in items
    ]
    figure = Figure()
    scale, x_title = X_AXES[items[0].axis].unit(max(float(item.x[-1]) for item in items))
    figure.add_hline(y=0, line={"color": theme.AXIS, "width": 1.5})
    for index, item in enumerate(items, start=1):
        figure.add_traces(_difference_traces(item, index, scale))
    first = theme.text(theme.short(items[0].names[1], AXIS_CHARACTERS))
    y_range = _settled_range(items)
    minuend = f" of {theme.text(theme.short(items[0].names[0], AXIS_CHARACTERS))}" if len(items) == 1 else ""
    figure.update_yaxes(range=y_range, title_text=f"{items[0].loss}{minuend}<br>minus that of {first}")
    figure.update_xaxes(title_text=x_title, rangemode="tozero")
    lines = [*(theme.text(item.verdict) for item in items), theme.text(_marks_in_words(items))]
    names = [item.names[0] for item in items]
    inside, below = fits_inside(names), height_below(names)
    return figure.laid_out(
        height=390 if inside else 338 + below,
        title=theme.title(f"Difference in {items[0].loss.lower()}", "<br>".join(lines)),
        margin={"t": 92} if inside else {"t": 92, "b": below},
        hovermode="x unified",
        legend={
            "tracegroupgap": 0,
            **(place_legend(figure.data, y_range=y_range) if inside else theme.LEGEND_BELOW),
        },
    )


def _marks_in_words(items: Sequence[Difference]) -> str:
    """Return what the marks of differences mean, and which side of zero is better."""
    words = [f"above zero: {items[0].names[1]} is lower, so better"]
    if any(" ± " in item.verdict for item in items):
        words.append(f"± and band: {CONFIDENCE:.0%} of the noise along the curves, not between seeds")
    if any(item.margin is not None for item in items):
        words.append("bar at the end: how far seeds alone part two runs")
    if any(item.crossover is not None for item in items):
        words.append("diamond: where the curves last cross")
    return "; ".join(words)


def _difference_traces(item: Difference, index: int, scale: float) -> list[go.Scatter]:
    name, color, x = theme.text(item.names[0]), theme.series_color(index), item.x / scale
    band = theme.band(x, item.low, item.high, color, legendgroup=str(index))
    known = bool((item.high - item.low > 0).any())  # no interval of zero width is written
    hover = "%{y:+.3f}" + known * " (%{customdata[0]:+.3f} to %{customdata[1]:+.3f})"
    words = {"customdata": np.column_stack([item.low, item.high]), "hovertemplate": hover, "meta": "difference"}
    line = theme.curve(x, item.value, name, color, theme.series_dash(index), legendgroup=str(index), **words)
    traces = [band, line]
    shared = {"mode": "markers", "name": name, "legendgroup": str(index), "showlegend": False}
    if item.margin is not None:
        end = go.Scatter(
            x=[x[-1]],
            y=[item.value[-1]],
            marker={"size": 7, "color": color},
            error_y=_bar(color, item.margin),
            hovertemplate=f"seeds alone part two runs by up to {item.margin:.2g} ({CONFIDENCE:.0%})",
            meta="scatter",
            **shared,
        )
        traces.append(end)
    if item.crossover is None:
        return traces
    at = item.crossover
    crossing = go.Scatter(
        x=[at.value / scale],
        y=[0.0],
        marker={"symbol": "diamond", "size": 10, "color": color, "line": {"color": "white", "width": 1}},
        error_x=_bar(color, max(0.0, at.high - at.value) / scale, max(0.0, at.value - at.low) / scale),
        hovertemplate=f"they last cross here ({CONFIDENCE:.0%}: {at.low / scale:.4g} to {at.high / scale:.4g})",
        meta="crossover",
        **shared,
    )
    return [*traces, crossing]


def _bar(color: str, up: float, down: float | None = None) -> dict[str, Any]:
    """Return an error bar, which reaches as far down as up by default."""
    sides = {} if down is None else {"symmetric": False, "arrayminus": [down]}
    return {"type": "data", "array": [up], "color": color, "thickness": 2, "width": 6, **sides}


def _settled_range(items: Sequence[Difference]) -> list[float]:
    """Return the y range of the bands after the first twentieth, whose steep fall would flatten all the rest."""
    settled = [item.x >= item.x[0] + 0.05 * (item.x[-1] - item.x[0]) for item in items]
    edges = [
        edge[late] for item, late in zip(items, settled, strict=True) for edge in (item.value, item.low, item.high)
    ]
    ends = [item.value[-1] + np.array([-1.0, 1.0]) * (item.margin or 0.0) for item in items]
    values = np.concatenate([*edges, *ends, [0.0]])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    room = 0.12 * ((high - low) or 1.0)
    return [low - room, high + room]


def seed_differences(contrast: SeedContrast) -> Figure:
    """Draw each difference as a point with its interval; an interval that crosses the line at zero is pale.

    Runs of one model have the same difference at equal tokens and at equal FLOPs, which is one row.
    """
    figure = Figure()
    figure.add_vline(x=0, line={"color": theme.AXIS, "width": 1.5})
    same = dict[tuple[Any, ...], list[SeedDifference]]()
    for item in contrast.differences:
        same.setdefault((item.names, f"{item.value:.6g}", f"{item.margin:.6g}"), []).append(item)
    axes = [", ".join(X_AXES[item.axis].label for item in items) for items in same.values()]
    colors = {axis: theme.series_color(index) for index, axis in enumerate(dict.fromkeys(axes))}
    rows = sorted(zip(axes, same.values(), strict=True), key=lambda row: list(colors).index(row[0]))
    for axis, items in rows:
        shade = colors[axis] if items[0].distinguishable else theme.pale(colors[axis])
        figure.add_scatter(
            x=[items[0].value],
            y=[[theme.broken(theme.text(theme.short(items[0].names[0])), NAME_LETTERS)], [f"equal {axis}"]],
            error_x=_bar(shade, items[0].margin if items[0].scatter else 0.0),
            mode="markers",
            marker={"color": shade, "size": 9},
            hovertemplate="<br>".join(theme.text(item.describe()) for item in items) + "<extra></extra>",
            showlegend=False,
        )
    first = theme.text(theme.short(contrast.differences[0].names[1]))
    figure.update_xaxes(title_text=f"{contrast.loss} minus that of<br>{theme.broken(first, 2 * NAME_LETTERS)}")
    figure.update_yaxes(type="multicategory", autorange="reversed")
    fewest, most = (pick(number for item in contrast.differences for number in item.seeds) for pick in (min, max))
    seeds = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    is_loss = contrast.differences[0].metric is None
    side = "left of zero: lower, so better" if is_loss else "right of zero: higher"
    words = f"{side}; {CONFIDENCE:.0%} intervals over {seeds} seeds; pale: too close to call"
    lines = max(str(trace.y[0]).count("<br>") + 1 for trace in figure.data)
    return figure.laid_out(
        height=188 + max(34, 18 * (lines + 1)) * len(rows),
        title=theme.title(f"Difference in {contrast.loss.lower()}", words),
        margin={"t": 84},
    )
