"""What stands beside the loss while runs train: speed, MFU, gradient norm, learning rate, devices, memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.figures import theme
from workbench.figures._devices import Usage, has_samples, utilization_title, utilization_traces
from workbench.figures._memory import latest_by_rank
from workbench.figures._series import (
    SMOOTHING,
    Array,
    CurveLike,
    DrawnCurve,
    at_once,
    axes_of,
    color_of,
    column,
    drawn,
    smoothing_axis,
)
from workbench.figures._series import smoothing_width as width_of
from workbench.units import GIB, gib

PANELS = {
    "tokens_per_s": "Tokens/s",
    "mfu": "MFU (%)",
    "grad_norm": "Gradient norm",
    "learning_rate": "Learning rate",
}
"""Columns with a panel of their own; those of the devices' utilisation and memory come last."""
LOGARITHMIC = ("grad_norm",)
SCALES = {"mfu": 100.0}
TICK_FORMATS = {"tokens_per_s": "~s", "grad_norm": ".2~g"}
MAX_COLUMNS = 3
ROW_PX = 150
GAP_PX = 52
"""Between two rows of panels: tick labels and the title of the next."""
PANEL_POINTS = 400
"""Points of one trace: a panel is a third of a page wide."""

Peaks = Sequence[Mapping[int, Mapping[str, Any]]]
"""For each run, the latest `memory` event of each rank."""


def panel_names(curves: Sequence[CurveLike], peaks: Peaks = (), usage: Usage = ()) -> list[str]:
    """The panels that have something to show: what no run recorded has none."""
    found = [name for name in PANELS if any(np.isfinite(column(curve, name)).any() for curve in curves)]
    found += ["utilization"] if has_samples(usage) else []
    return [*found, "memory"] if any(peaks) else found


def panels(
    curves: Sequence[CurveLike],
    peaks: Peaks = (),
    x: str = "tokens",
    smoothing: float = SMOOTHING,
    names: Sequence[str] | None = None,
    window: tuple[float, float] | None = None,
    usage: Usage = (),
    curves_of: Callable[[str], Sequence[DrawnCurve]] | None = None,
) -> go.Figure:
    """Small multiples over training of all runs, in the runs' colours, and the memory of each rank at its peak.

    `peaks` holds a run's `memory` events by rank (`latest_by_rank`), one mapping a curve; `usage` says of each run
    how busy its devices were; `names` chooses panels (default: those with something to show); `window` is the part
    of the x axis that is visible, in the axis' own unit; `curves_of` gives the drawn curves of a column where they are
    known already. The spread of a rate is drawn pale, its moving average in front.
    """
    names = panel_names(curves, peaks, usage) if names is None else names
    axes = axes_of(curves)
    x = x if x in axes else "step"
    columns = 2 if len(names) == 4 else min(MAX_COLUMNS, max(1, len(names)))
    rows = max(1, math.ceil(len(names) / columns))
    figure = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[_title(name, usage) for name in names],
        horizontal_spacing=0.06,
        vertical_spacing=GAP_PX / (rows * (ROW_PX + GAP_PX) - GAP_PX),
    )
    scale, heading = axes[x]
    for position, name in enumerate(names):
        place = {"row": position // columns + 1, "col": position % columns + 1}
        if name == "memory":
            figure.add_traces(memory_traces(curves, peaks), rows=place["row"], cols=place["col"])
            figure.update_xaxes(title_text="rank", showgrid=False, dtick=1 if _ranks(peaks) <= 8 else None, **place)
            figure.update_yaxes(rangemode="tozero", **place)
        elif name == "utilization":
            traces = utilization_traces(curves, usage, x, scale, smoothing, window, PANEL_POINTS)
            figure.add_traces(traces, rows=place["row"], cols=place["col"])
            lowest = heading if position + columns >= len(names) else None
            figure.update_xaxes(title_text=lowest, rangemode="tozero", range=window, **place)
            figure.update_yaxes(range=[0, 105], nticks=6, **place)
        else:
            found = curves_of(name) if curves_of else _drawn(curves, name, x, scale, smoothing)
            traces = rate_traces(found, name, x, smoothing > 0, window)
            figure.add_traces(traces, rows=place["row"], cols=place["col"])
            lowest = heading if position + columns >= len(names) else None
            figure.update_xaxes(title_text=lowest, rangemode="tozero", range=window, **place)
            kind = "log" if name in LOGARITHMIC else "linear"
            figure.update_yaxes(type=kind, rangemode="tozero", exponentformat="e", nticks=6, **place)
            figure.update_yaxes(tickformat=TICK_FORMATS.get(name), **place)
            if kind == "log":
                figure.update_yaxes(dtick="D2" if _decades(curves, name) < 2.5 else 1, **place)
    figure.update_annotations(font={"size": theme.FONT_PX, "color": theme.MUTED})
    figure.update_layout(
        template=theme.TEMPLATE,
        height=rows * (ROW_PX + GAP_PX) + 24,
        autosize=True,
        margin={"t": 28, "b": 44, "r": 64},
        showlegend=False,
        hovermode="closest",
        barmode="group",
        bargap=0.35,
        uirevision="keep",
    )
    return figure


def _drawn(curves: Sequence[CurveLike], name: str, x: str, scale: float, smoothing: float) -> list[DrawnCurve]:
    width, along = width_of(curves, smoothing), smoothing_axis(curves)
    return at_once(
        lambda index: drawn(curves[index], index, name, width, along, {x: scale}, PANEL_POINTS), range(len(curves))
    )


def _title(name: str, usage: Usage) -> str:
    if name == "utilization":
        return utilization_title(usage)
    return PANELS.get(name, "Peak memory of each rank (GiB)")


def _decades(curves: Sequence[CurveLike], name: str) -> float:
    """Orders of magnitude between the smallest and the largest positive value."""
    lowest, highest = math.inf, 0.0
    for curve in curves:
        values = column(curve, name)
        known = values[np.isfinite(values) & (values > 0)]
        if len(known):
            lowest, highest = min(lowest, float(known.min())), max(highest, float(known.max()))
    return math.log10(highest / lowest) if highest else 0.0


def rate_traces(
    curves: Sequence[DrawnCurve], name: str, x: str, smooth: bool, window: tuple[float, float] | None = None
) -> list[go.Scatter]:
    """Spread and moving average of one column, two traces a run, empty for a run that has not recorded it."""
    traces = []
    points = iter(rate_points(curves, name, x, smooth, window))
    for curve in curves:
        traces += [
            go.Scatter(
                **next(points),
                mode="lines",
                line={"color": theme.pale(curve.color, 0.7), "width": 1},
                hoverinfo="skip",
                zorder=0,
                meta="raw",
            ),
            go.Scatter(
                **next(points),
                mode="lines",
                line={"color": curve.color, "width": 1.8, "dash": curve.dash},
                hovertemplate=f"{theme.text(curve.name)}: %{{y:.4~g}}<extra></extra>",
                zorder=1,
                meta="line",
            ),
        ]
    return traces


def rate_points(
    curves: Sequence[DrawnCurve], name: str, x: str, smooth: bool, window: tuple[float, float] | None = None
) -> list[dict[str, Array]]:
    """`x` and `y` of each of `rate_traces`: all that changes of them as a run goes on."""
    unit = SCALES.get(name, 1.0)
    points = []
    for curve in curves:
        found = curve.focused(x, window, PANEL_POINTS)
        raw, line = found.raw_index if smooth else found.raw_index[:0], found.line_index
        heights = found.line if smooth else found.raw
        points += [
            {"x": found.x[x][raw], "y": unit * found.raw[raw]},
            {"x": found.x[x][line], "y": unit * heights[line]},
        ]
    return points


def memory_traces(curves: Sequence[CurveLike], peaks: Peaks) -> list[go.Bar | go.Scatter]:
    """Bars of each run's ranks and, as one trace, what each device may use."""
    bars: list[go.Bar | go.Scatter] = []
    limits: dict[int, float] = {}
    for index, (curve, of_run) in enumerate(zip(curves, peaks, strict=True)):
        by_rank = latest_by_rank(of_run)
        ranks = sorted(by_rank)
        used = [float(by_rank[rank].get("peak_bytes") or 0) for rank in ranks]
        for rank in ranks:
            limit = by_rank[rank].get("limit_bytes")
            if limit:
                limits[rank] = min(limits.get(rank, math.inf), float(limit))
        bars.append(
            go.Bar(
                x=ranks,
                y=[size / GIB for size in used],
                marker={"color": color_of(curve, index)},
                customdata=[[_of(by_rank[rank]), str(by_rank[rank].get("device") or "")] for rank in ranks],
                hovertemplate=(
                    f"{theme.text(curve.name)}, rank %{{x}}: %{{customdata[0]}}<br>%{{customdata[1]}}<extra></extra>"
                ),
                meta="memory",
            )
        )
    ends: list[float | None] = []
    heights: list[float | None] = []
    for rank, limit in sorted(limits.items()):
        ends += [rank - 0.46, rank + 0.46, None]
        heights += [limit / GIB, limit / GIB, None]
    limit_line = go.Scatter(
        x=ends,
        y=heights,
        mode="lines",
        line={"color": theme.ALERT, "width": 2},
        hovertemplate="limit %{y:.1f} GiB<extra></extra>",
        meta="limit",
    )
    return [*bars, limit_line]


def _of(event: Mapping[str, Any]) -> str:
    """`"61.2 GiB of 139.8 GiB (44%)"`, as far as known."""
    used, limit = float(event.get("peak_bytes") or 0), event.get("limit_bytes")
    return f"{gib(used)} of {gib(limit)} ({used / limit:.0%})" if limit else gib(used)


def _ranks(peaks: Peaks) -> int:
    return max((len(of_run) for of_run in peaks), default=0)
