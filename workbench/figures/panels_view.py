"""Small multiples beside the loss: speed, wait for data, gradient norm, learning rate, and the state of the devices."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.analysis.curve import Array, Curve, column, evaluations_of, metrics_of, shared_axes
from workbench.analysis.smoothing import SMOOTHING
from workbench.columns import COLUMNS
from workbench.figures import theme, utilization_view
from workbench.figures.figure import Figure, subplots
from workbench.figures.prepared_curve import Preparation, PreparedCurve
from workbench.units import GIB, gib

PANELS = {name: column.panel for name, column in COLUMNS.items() if column.panel is not None}
"""Panels of one column each; the experiments' metrics, utilisation and memory come after them."""
MAX_COLUMNS = 3
ROW_PX = 150
GAP_PX = 64
"""Height between two rows of panels: tick labels and the title of the next row."""
TITLE_LETTERS = 13
"""Letters of a line of a panel's title, which beside two others fits into a window of 500 pixels."""
PANEL_POINTS = 400
"""Largest number of points of one trace: a panel is a third of a page wide."""

Peaks = Sequence[Mapping[int, Mapping[str, Any]]]
"""The latest `memory` event of each rank, one mapping per run."""
Window = tuple[float, float] | None
"""Visible part of the x axis in the axis' unit; None is the whole axis."""


def panel_names(curves: Sequence[Curve], peaks: Peaks = (), usage: utilization_view.Usage = ()) -> list[str]:
    """Return the panels that have something to show: a column that no run recorded, or a small wait, has no panel."""
    names = [
        name for name, panel in PANELS.items() if any(_shows(column(curve, name), panel.least) for curve in curves)
    ]
    names += metrics_of(curves)
    names += ["utilization"] if utilization_view.has_samples(usage) else []
    return [*names, "memory"] if any(peaks) else names


def _shows(values: Array, least: float | None) -> bool:
    known = np.isfinite(values)
    if least is None or not known[1:].any():
        return bool(known.any()) and least is None
    return bool(values[1:][known[1:]].mean() >= least)


def panels(
    curves: Sequence[Curve],
    peaks: Peaks = (),
    x: str = "tokens",
    smoothing: float = SMOOTHING,
    names: Sequence[str] | None = None,
    window: Window = None,
    usage: utilization_view.Usage = (),
    prepare: Callable[[str], Sequence[PreparedCurve]] | None = None,
) -> Figure:
    """Draw small multiples over the training of all runs, in the runs' colours, and the peak memory of each rank.

    Raw values of a rate are drawn pale, their moving average in front.

    Args:
        curves: the runs.
        peaks: each run's latest `memory` event by rank, one mapping per curve.
        x: name of the x axis; steps if a run did not record that axis.
        smoothing: width of the moving average as a share of the longest run.
        names: panels to draw; by default those with something to show (`panel_names`).
        window: visible part of the x axis.
        usage: utilisation of each run's devices, one per curve.
        prepare: function that returns the prepared curves of a column, for a caller that has cached them.
    """
    names = panel_names(curves, peaks, usage) if names is None else names
    axes = shared_axes(curves)
    x = x if x in axes else "step"
    preparation = Preparation.of(curves, smoothing, {x: axes[x].scale}, PANEL_POINTS)
    columns = 2 if len(names) == 4 else min(MAX_COLUMNS, max(1, len(names)))
    rows = max(1, math.ceil(len(names) / columns))
    metrics = metrics_of(curves)
    titles = {
        **{name: panel.title or COLUMNS[name].label for name, panel in PANELS.items()},
        **{name: theme.text(name) for name in metrics},
        "utilization": utilization_view.utilization_title(usage),
        "memory": "Peak memory (GiB)",
    }
    figure = subplots(
        rows=rows,
        cols=columns,
        subplot_titles=["<br>".join(textwrap.wrap(titles[name], TITLE_LETTERS)) for name in names],
        horizontal_spacing=0.1,  # in a narrow window tick labels of the next panel stand there
        vertical_spacing=GAP_PX / (rows * (ROW_PX + GAP_PX) - GAP_PX),
    )
    for position, name in enumerate(names):
        row, col = position // columns + 1, position % columns + 1
        is_lowest = position + columns >= len(names)
        x_title = axes[x].title if is_lowest else None
        x_axis: dict[str, Any] = {"title_text": x_title, "rangemode": "tozero", "range": window}
        if name == "memory":
            num_ranks = max(map(len, peaks), default=0)
            x_axis = {"title_text": "rank", "showgrid": False, "dtick": 1 if num_ranks <= 8 else None}
        traces, y_axis = panel(name, curves, peaks, usage, x, preparation, window, prepare)
        figure.add_traces(traces, rows=row, cols=col)
        figure.update_xaxes(row=row, col=col, **x_axis)
        figure.update_yaxes(row=row, col=col, **y_axis)
    return _laid_out(figure, rows)


def panel(
    name: str,
    curves: Sequence[Curve],
    peaks: Peaks,
    usage: utilization_view.Usage,
    x: str,
    preparation: Preparation,
    window: Window,
    prepare: Callable[[str], Sequence[PreparedCurve]] | None,
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the traces of a panel and the layout of its y axis; the arguments are those of `panels`."""
    if name == "memory":
        return memory_traces(curves, peaks), {"rangemode": "tozero"}
    if name == "utilization":
        traces = utilization_view.utilization_traces(curves, usage, x, preparation, window)
        return traces, {"range": [0, 105], "nticks": 6}
    if name in metrics_of(curves):
        return metric_traces(curves, name, x, preparation, window), {"nticks": 6}
    prepared = prepare(name) if prepare else preparation.prepare_all(curves, name)
    traces = rate_traces(prepared, name, x, preparation.width > 0, window)
    return traces, {"rangemode": "tozero", **_rate_axis(prepared, name)}


def _laid_out(figure: Figure, rows: int) -> Figure:
    figure.update_annotations(font={"size": theme.FONT_PX, "color": theme.MUTED})
    return figure.laid_out(
        height=rows * (ROW_PX + GAP_PX) + 36,
        autosize=True,
        margin={"t": 52, "b": 44, "r": 64},
        showlegend=False,
        hovermode="closest",
        barmode="group",
        bargap=0.35,
        uirevision="keep",
    )


def _rate_axis(curves: Sequence[PreparedCurve], name: str) -> dict[str, Any]:
    """Return the y axis of a rate; ticks on a logarithmic axis depend on how many decades it spans."""
    options: dict[str, Any] = {"exponentformat": "e", "nticks": 6, "tickformat": PANELS[name].tick_format}
    if not PANELS[name].logarithmic:
        return {"type": "linear", **options}
    values = np.concatenate([np.empty(0), *(curve.raw[curve.raw_index] for curve in curves)])  # holds their extremes
    known = values[np.isfinite(values) & (values > 0)]
    decades = math.log10(known.max() / known.min()) if len(known) else 0.0
    return {"type": "log", "dtick": "D2" if decades < 2.5 else 1, **options}


def rate_traces(
    curves: Sequence[PreparedCurve], name: str, x: str, smooth: bool, window: Window = None
) -> list[go.Scatter]:
    """Return two traces per run, raw values and moving average of one column; empty ones for a run without it."""
    factor, traces = PANELS[name].scale if name in PANELS else 1.0, []
    for whole in curves:
        curve = whole.focused(x, window, PANEL_POINTS)
        raw, line = curve.raw_index if smooth else curve.raw_index[:0], curve.line_index
        spread = {"x": curve.x[x][raw], "y": factor * curve.raw[raw]}
        mean = {"x": curve.x[x][line], "y": factor * (curve.line if smooth else curve.raw)[line]}
        traces += utilization_view.spread_and_mean(whole, spread, mean, "%{y:.4~g}")
    return traces


def metric_traces(
    curves: Sequence[Curve], name: str, x: str, preparation: Preparation, window: Window = None
) -> list[go.Scatter]:
    """Return two traces per run, of which the first is empty: a metric has one value per evaluation, not averaged."""
    held_out = [
        Curve(curve.name, {} if found is None else found.columns, curve.color or theme.series_color(index))
        for index, curve in enumerate(curves)
        for found in [evaluations_of(curve)]
    ]
    prepared = replace(preparation, width=0.0).prepare_all(held_out, name)
    marker = {"size": 5, "symbol": "diamond"}
    return [
        trace.update(mode="lines+markers", marker={"color": trace.line.color, **marker})
        for trace in rate_traces(prepared, name, x, False, window)
    ]


def memory_traces(curves: Sequence[Curve], peaks: Peaks) -> list[go.Bar | go.Scatter]:
    """Return the bars of each run's ranks and, as one trace, the smallest limit of each rank's devices."""
    bars: list[go.Bar | go.Scatter] = []
    limits: dict[int, float] = {}
    for index, (curve, run_peaks) in enumerate(zip(curves, peaks, strict=True)):
        ranks = sorted(run_peaks)
        for rank in ranks:
            if limit := run_peaks[rank].get("limit_bytes"):
                limits[rank] = min(limits.get(rank, math.inf), float(limit))
        y = [float(run_peaks[rank].get("peak_bytes") or 0) / GIB for rank in ranks]
        words = [[_describe_peak(run_peaks[rank]), str(run_peaks[rank].get("device") or "")] for rank in ranks]
        look = {
            "name": theme.text(curve.name),
            "marker": {"color": curve.color or theme.series_color(index)},
            "meta": "memory",
        }
        hover = f"{look['name']}, rank %{{x}}: %{{customdata[0]}}<br>%{{customdata[1]}}<extra></extra>"
        bars.append(go.Bar(x=ranks, y=y, customdata=words, hovertemplate=hover, **look))
    positions = [position for rank in sorted(limits) for position in (rank - 0.46, rank + 0.46, None)]
    heights = [height for _, limit in sorted(limits.items()) for height in (limit / GIB, limit / GIB, None)]
    hover = "limit %{y:.1f} GiB<extra></extra>"
    return [*bars, theme.curve(positions, heights, "limit", theme.ALERT, meta="limit", hovertemplate=hover)]


def _describe_peak(event: Mapping[str, Any]) -> str:
    """Write a rank's peak and what else is known, such as `"61.2 GiB of 139.8 GiB (44%), 70.1 GiB reserved"`."""
    used, limit, reserved = float(event.get("peak_bytes") or 0), event.get("limit_bytes"), event.get("reserved_bytes")
    words = f"{gib(used)} of {gib(limit)} ({used / limit:.0%})" if limit else gib(used)
    return f"{words}, {gib(reserved)} reserved" if reserved else words
