"""Small multiples beside the loss: speed, wait for data, gradient norm, learning rate, and the state of the devices."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.analysis.curve import (
    SMOOTHING,
    X_AXES,
    Array,
    Curve,
    Look,
    column,
    evaluations_of,
    metrics_of,
    scalars_of,
    shared_axes,
    where_logged,
)
from workbench.base.units import GIB, gib
from workbench.figures import theme
from workbench.figures.figure import Figure, subplots
from workbench.figures.prepared_curve import Preparation, PreparedCurve, decimated
from workbench.record.columns import COLUMNS
from workbench.record.history import Utilization

MIN_DEVICE_POINTS = 50
"""Smallest number of points of one device's line if many devices share the points of a trace."""
DEVICE_NAMES = {"cuda": "GPU", "cpu": "CPU"}
MAX_NAMED = 8
"""Largest number of devices in a hover text; of more devices it gives the least and the most busy."""
Usage = Sequence[Utilization | None]
"""Samples of each run; None for a run without samples."""
PANELS = {name: column.panel for name, column in COLUMNS.items() if column.panel is not None}
"""Panels of one column each; logged scalars, metrics, utilisation and memory come after them."""
MAX_COLUMNS = 3
ROW_PX = 150
GAP_PX = 64
"""Height between two rows of panels: tick labels and the title of the next row."""
TITLE_LETTERS = 13
"""Letters of a line of a panel's title, which beside two others fits into a window of 500 pixels."""
GROUP_GAP = 0.35
"""Distance of the bars of two ranks, as a share of that of the ranks."""
PANEL_POINTS = 400
"""Largest number of points of one trace: a panel is a third of a page wide."""
Peaks = Sequence[Mapping[int, Mapping[str, Any]]]
"""The latest `memory` event of each rank, one mapping per run."""
Window = tuple[float, float] | None
"""Visible part of the x axis in the axis' unit; None is the whole axis."""


def utilization_traces(
    curves: Sequence[Curve], usage: Usage, x: str, preparation: Preparation, window: tuple[float, float] | None
) -> list[go.Scatter]:
    """Return two traces per run: first every device's line, pale, of all runs, then moving averages over the devices.

    Samples are placed on the x axis by their time between the run's steps. Samples from before its first step or after
    its last step are left out.
    """
    pairs = []
    smooth, max_points = preparation.width > 0, preparation.max_points
    for index, (curve, samples) in enumerate(zip(curves, usage, strict=True)):
        placed = _PlacedSamples(curve, samples, {X_AXES[x].column, preparation.along, "step", "tokens"})
        share = replace(curve, columns=placed.columns, evaluations=None)
        mean = preparation.prepare(share, index, "share").focused(x, window, max_points)
        line = mean.line_index
        shows_each = smooth and not mean.is_quiet
        each_x, each_y = placed.devices(mean.x[x], window, max_points) if shows_each else (np.empty(0), np.empty(0))
        heights = (mean.line if smooth else mean.raw)[line]
        pair = spread_and_mean(
            mean,
            {"x": each_x, "y": 100 * each_y},
            {"x": mean.x[x][line], "y": 100 * heights},
            "%{y:.3~g} %<br>%{customdata}",
        )
        pair[1].update(customdata=[placed.describe(moment) for moment in line], meta="utilization")
        pairs.append(pair)
    return [trace for role in zip(*pairs, strict=True) for trace in role]


def spread_and_mean(
    curve: PreparedCurve, spread: Mapping[str, Array], mean: Mapping[str, Array], hover: str
) -> list[go.Scatter]:
    """Return two traces of one run in a panel: its values, pale, and in front their average with a hover text."""
    name = theme.text(curve.name)
    behind = {"color": theme.pale(curve.color, 0.7), "width": 1, "hoverinfo": "skip", "meta": "raw"}
    front = {"color": curve.color, "width": 1 if curve.is_quiet else 1.8, "dash": curve.dash, "meta": "line"}
    front |= {"zorder": 1} if curve.look.best else {}
    words = f"{name}: {hover}<extra></extra>"
    return [
        theme.curve(**spread, name=name, **behind),
        theme.curve(**mean, name=name, hovertemplate=words, **front),
    ]


class _PlacedSamples:
    """A run's samples along its training: one row per moment, one column per device."""

    def __init__(self, curve: Curve, samples: Utilization | None, names: set[str]) -> None:
        steps_at = column(curve, "time")
        self._names = () if samples is None else samples.names
        moments = np.empty(0)
        self._share = self._used = np.empty((0, len(self._names)))
        if samples is not None and len(steps_at) and len(samples.time):
            inside = (samples.time >= steps_at[0]) & (samples.time <= steps_at[-1])
            moments, row = np.unique(samples.time[inside], return_inverse=True)
            shape, device = (len(moments), len(self._names)), samples.device[inside].astype(np.int64)
            self._share, self._used = np.full(shape, np.nan), np.full(shape, np.nan)
            self._share[row, device], self._used[row, device] = samples.share[inside], samples.used_bytes[inside]
        rising = np.maximum.accumulate(steps_at) if len(moments) else steps_at
        self.columns = {name: np.full(len(moments), np.nan) for name in names}  # NaN where it was not recorded
        for name in names if len(moments) else ():
            if len(values := column(curve, name)) == len(rising):
                self.columns[name] = np.interp(moments, rising, values)
        known = np.isfinite(self._share)
        counts = known.sum(axis=1)
        total = np.where(known, self._share, 0.0).sum(axis=1)
        self.columns["share"] = np.divide(total, counts, out=np.full(len(moments), np.nan), where=counts > 0)

    def devices(self, x: Array, window: tuple[float, float] | None, max_points: int) -> tuple[Array, Array]:
        """Return x and share of every device's line, with a gap between one device and the next."""
        first, end = 0, len(x)
        if window is not None:
            low, high = np.searchsorted(x, window)
            first, end = max(0, int(low) - 1), int(high) + 1
        xs, ys = [], []
        for share in self._share.T:
            known = np.flatnonzero(np.isfinite(share[first:end])) + first
            shown = known[decimated(share[known], max(MIN_DEVICE_POINTS, max_points // len(self._names)))]
            xs += [x[shown], [np.nan]]
            ys += [share[shown], [np.nan]]
        return np.concatenate([np.empty(0), *xs[:-1]]), np.concatenate([np.empty(0), *ys[:-1]])

    def describe(self, moment: int) -> str:
        """Return the hover text of a moment, such as `"GPU 0 93%, 61.2 GiB · GPU 1 91%, 61.2 GiB"`."""
        share, used = self._share[moment], self._used[moment]
        known = [int(device) for device in np.argsort(share) if np.isfinite(share[device])]
        chosen = sorted(known) if len(known) <= MAX_NAMED else [known[0], known[-1]]
        words = [
            f"{self._names[device]} {share[device]:.0%}"
            + (f", {gib(used[device])}" if np.isfinite(used[device]) else "")
            for device in chosen
        ]
        return theme.text(" · ".join(words))


def panel_names(curves: Sequence[Curve], peaks: Peaks = (), usage: Usage = ()) -> list[str]:
    """Return the panels that have something to show: a column that no run recorded, or a small wait, has no panel."""
    names = []
    for name, panel in PANELS.items():
        for values in (column(curve, name) for curve in curves):
            known = np.isfinite(values)
            later = values[1:][known[1:]]  # the first step waits for what is made only once
            if known.any() if panel.least is None else len(later) and later.mean() >= panel.least:
                names.append(name)
                break
    names += [*scalars_of(curves), *metrics_of(curves)]
    names += ["utilization"] if any(samples is not None and len(samples.time) for samples in usage) else []
    return [*names, "memory"] if any(peaks) else names


def panels(
    curves: Sequence[Curve],
    peaks: Peaks = (),
    x: str = "tokens",
    smoothing: float = SMOOTHING,
    names: Sequence[str] | None = None,
    window: Window = None,
    usage: Usage = (),
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
    own = (*scalars_of(curves), *metrics_of(curves))
    types = {samples.device_type for samples in usage if samples is not None and len(samples.time)}
    device = DEVICE_NAMES.get(types.pop(), "Device") if len(types) == 1 else "Device"
    titles = {
        **{name: panel.title or COLUMNS[name].label for name, panel in PANELS.items()},
        **{name: theme.text(name) for name in own},
        "utilization": "CPU use by the run (%)" if device == "CPU" else f"{device} use (%)",
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
            x_axis = {"title_text": rank_title(peaks), "showgrid": False, "dtick": 1 if num_ranks <= 8 else None}
        traces, y_axis = panel(name, curves, peaks, usage, x, preparation, window, prepare)
        figure.add_traces(traces, rows=row, cols=col)
        figure.update_xaxes(row=row, col=col, **x_axis)
        figure.update_yaxes(row=row, col=col, **y_axis)
    figure.update_annotations(font={"size": theme.FONT_PX, "color": theme.MUTED})
    return figure.laid_out(
        height=rows * (ROW_PX + GAP_PX) + 36,
        autosize=True,
        margin={"t": 52, "b": 44, "r": 64},
        showlegend=False,
        hovermode="closest",
        barmode="overlay",
        uirevision="keep",
    )


def panel(
    name: str,
    curves: Sequence[Curve],
    peaks: Peaks,
    usage: Usage,
    x: str,
    preparation: Preparation,
    window: Window,
    prepare: Callable[[str], Sequence[PreparedCurve]] | None,
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the traces of a panel and the layout of its y axis; the arguments are those of `panels`."""
    if name == "memory":
        return memory_traces(curves, peaks), {"rangemode": "tozero"}
    if name == "utilization":
        traces = utilization_traces(curves, usage, x, preparation, window)
        return traces, {"range": [0, 105], "nticks": 6}
    if name in metrics_of(curves):
        # A metric has one value per evaluation, which is not averaged; the first trace of each run is empty.
        held_out = [evaluations_of(curve) or Curve(curve.name, {}, look=curve.look) for curve in curves]
        metrics = replace(preparation, width=0.0).prepare_all(held_out, name)
        traces = rate_traces(metrics, name, x, False, window)
        for trace in traces:
            trace.update(mode="lines+markers", marker={"color": trace.line.color, "size": 5, "symbol": "diamond"})
        return traces, {"nticks": 6}
    if name in scalars_of(curves):
        prepared: Sequence[PreparedCurve] = preparation.prepare_all([where_logged(c, name) for c in curves], name)
        return rate_traces(prepared, name, x, preparation.width > 0, window), {"nticks": 6}
    prepared = prepare(name) if prepare else preparation.prepare_all(curves, name)
    traces, look = rate_traces(prepared, name, x, preparation.width > 0, window), PANELS[name]
    axis: dict[str, Any] = {"exponentformat": "e", "tickformat": look.tick_format, "rangemode": "tozero"}
    if look.logarithmic:  # so few that plotly.js writes 1, 2 and 5 from a decade on, and round values below
        return traces, {"type": "log", "nticks": 3, **axis}
    return traces, {"type": "linear", "nticks": 6, **axis}


def rate_traces(
    curves: Sequence[PreparedCurve], name: str, x: str, smooth: bool, window: Window = None
) -> list[go.Scatter]:
    """Return two traces per run: first the raw values of one column of all runs, then moving averages.

    Those of a run without the column are empty.
    """
    factor, pairs = PANELS[name].scale if name in PANELS else 1.0, []
    for whole in curves:
        curve = whole.focused(x, window, PANEL_POINTS)
        raw = curve.raw_index if smooth and not curve.is_quiet else curve.raw_index[:0]
        line = curve.line_index
        spread = {"x": curve.x[x][raw], "y": factor * curve.raw[raw]}
        mean = {"x": curve.x[x][line], "y": factor * (curve.line if smooth else curve.raw)[line]}
        pairs.append(spread_and_mean(whole, spread, mean, "%{y:.4~g}"))
    return [trace for role in zip(*pairs, strict=True) for trace in role]


def memory_traces(curves: Sequence[Curve], peaks: Peaks) -> list[go.Bar | go.Scatter]:
    """Return the bars of each run's ranks and, as one trace, the limit of each bar's device."""
    traces: list[go.Bar | go.Scatter] = []
    width = (1 - GROUP_GAP) / max(1, len(curves))
    limits: list[tuple[float | None, float | None]] = []  # ends of lines, with a gap between two
    for index, (curve, run_peaks) in enumerate(zip(curves, peaks, strict=True)):
        ranks, y, words = sorted(run_peaks), [], []
        offset = index * width - (1 - GROUP_GAP) / 2
        for rank in ranks:
            event = run_peaks[rank]
            used, limit = float(event.get("peak_bytes") or 0), event.get("limit_bytes")
            if limit:
                left, height = rank + offset, float(limit) / GIB
                limits += [(left, height), (left + width, height), (None, None)]
            y.append(used / GIB)
            # Such as "61.2 GiB of 139.8 GiB (44%), 70.1 GiB reserved".
            said = f"{gib(used)} of {gib(limit)} ({used / limit:.0%})" if limit else gib(used)
            reserved = event.get("reserved_bytes")
            words.append([f"{said}, {gib(reserved)} reserved" if reserved else said, str(event.get("device") or "")])
        look = {
            "name": theme.text(curve.name),
            "marker": {"color": theme.series_color((curve.look or Look(index)).index)},
            "meta": "memory",
            "width": width,
            "offset": offset,  # plotly.js leaves no room for a rank that a run lacks, so that its limit would be astray
        }
        hover = f"{look['name']}, rank %{{x}}: %{{customdata[0]}}<br>%{{customdata[1]}}<extra></extra>"
        traces.append(go.Bar(x=ranks, y=y, customdata=words, hovertemplate=hover, **look))
    places, heights = zip(*limits, strict=True) if limits else ((), ())
    hover = "limit %{y:.1f} GiB<extra></extra>"
    return [*traces, theme.curve(places, heights, "limit", theme.ALERT, meta="limit", hovertemplate=hover)]


def rank_title(peaks: Peaks) -> str:
    """Return the title of the axis of ranks, which says what the line above the bars is."""
    has_limit = any(event.get("limit_bytes") for run_peaks in peaks for event in run_peaks.values())
    return f"rank · <span style='color:{theme.ALERT}'>━ limit</span>" if has_limit else "rank"
