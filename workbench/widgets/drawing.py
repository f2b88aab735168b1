"""The two figures of a dashboard, kept up to date: what has not changed is neither computed nor sent again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from workbench.figures._curves import MOST_INSIDE, hover_title, loss_layout, mark_key, traces_of, visible_points
from workbench.figures._devices import utilization_traces
from workbench.figures._legend import corner_of, legend_place
from workbench.figures._panels import PANEL_POINTS, memory_traces, panel_names, panels, rate_points
from workbench.figures._series import (
    PARTS,
    DrawnCurve,
    at_once,
    axes_of,
    drawn,
    points_each,
    smoothing_axis,
    smoothing_width,
)
from workbench.widgets.plot import GrowingPlot, growing
from workbench.widgets.rows import heard_while_busy
from workbench.widgets.watch import Snapshot

PANELS_S = 1.0
"""Between two drawings of the panels: rates and memory change slowly."""
LIVE_POINTS = 6_000
"""Of the raw traces of all runs together: what a browser draws anew without a pause while the user drags."""
WIDTH_STEP = 1.02
"""A run's smoothed line is computed anew when the width that all runs share has grown by so much."""

Window = tuple[float, float] | None


class Drawings:
    """Columns of all runs smoothed and thinned, from the last time where nothing changed."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], tuple[Any, DrawnCurve]] = {}

    def of(
        self, snapshots: Sequence[Snapshot], y: str, x: str, scale: float, smoothing: float, budget: int
    ) -> list[DrawnCurve]:
        """One column of every run; the very same object as before for a run that has not gone on."""
        curves = [snapshot.curve for snapshot in snapshots]
        width, along = smoothing_width(curves, smoothing), smoothing_axis(curves)
        if width > 0:
            width = WIDTH_STEP ** math.ceil(math.log(width, WIDTH_STEP))
        states = [(len(s.history), s.step, s.marks, x, scale, width, along) for s in snapshots]
        changed = [index for index, state in enumerate(states) if self._kept.get((y, index), (None,))[0] != state]
        fresh = at_once(lambda index: drawn(curves[index], index, y, width, along, {x: scale}, budget), changed)
        for index, curve in zip(changed, fresh, strict=True):
            self._kept[y, index] = (states[index], curve)
        return [self._kept[y, index][1] for index in range(len(curves))]


def live_points(num_runs: int) -> int:
    """Points of each raw trace where so many runs are followed."""
    return min(points_each(num_runs), max(600, LIVE_POINTS // max(1, num_runs)))


class LossFigure:
    """Loss of all runs; `draw` brings it up to date, `on_zoom` tells when the user looks at another part."""

    def __init__(self, snapshots: Sequence[Snapshot], x: str, smoothing: float, on_zoom: Callable[[], None]) -> None:
        self._drawings, self._latest = Drawings(), list[DrawnCurve]()
        self._shown: list[tuple[DrawnCurve | None, Window, bool]] = [(None, None, False)] * len(snapshots)
        curves = [snapshot.curve for snapshot in snapshots]
        axes = axes_of(curves)
        x = x if x in axes else "step"
        self.figure = loss_layout(curves, x)
        self.figure.update_layout(margin={"t": 36, "b": 40}, height=400, autosize=True)  # its buttons stand above it
        smooth = smoothing > 0
        self.figure.add_traces(
            traces_of(self._whole_curves(snapshots, x, axes[x][0], smoothing), x, "loss", smooth=smooth, complete=True)
        )
        self.widget = growing(self.figure)
        self.widget.observe(lambda _: on_zoom(), names="visible")
        heard_while_busy(self.widget)
        self._heading = axes[x][1]

    @property
    def window(self) -> Window:
        """The part of the x axis that the user zoomed into, in the axis' unit; None for the whole."""
        if self.widget.visible is None:
            return None
        low, high = sorted(self.widget.visible)
        return (10**low, 10**high) if self.figure.layout.xaxis.type == "log" else (low, high)

    def draw(self, snapshots: Sequence[Snapshot], x: str, smoothing: float, log_x: bool, log_y: bool) -> None:
        """Bring every run up to date, with points chosen for what is visible."""
        axes = axes_of([snapshot.curve for snapshot in snapshots])
        x = x if x in axes else "step"
        scale, heading = axes[x]
        moved = heading != self._heading or (self.figure.layout.xaxis.type == "log") != log_x
        if moved:
            self.widget.visible = None
        window = self.window
        budget = live_points(len(snapshots))
        whole = self._whole_curves(snapshots, x, scale, smoothing)
        visible = [curve.focused(x, window, budget) for curve in whole]
        smooth, kept, redrawn = smoothing > 0, self._shown, set[int]()
        changed = [kept[index][0] is not curve or kept[index][2] != smooth for index, curve in enumerate(whole)]
        fresh = traces_of(visible, x, "loss", smooth=smooth, complete=True) if any(changed) else []
        for index, curve in enumerate(whole):
            first, end = index * len(PARTS), (index + 1) * len(PARTS)
            if changed[index]:
                for trace, source in zip(self.figure.data[first:end], fresh[first:end], strict=True):
                    _refill(trace, source)
                redrawn.update(range(first, end))
            elif kept[index][1] != window:
                points = visible_points(visible[index], x, smooth)
                for number in range(first, end):
                    _set(self.figure.data[number], points.get(self.figure.data[number].meta, {}))
                redrawn.update(number for number in range(first, end) if self.figure.data[number].meta in points)
            elif fresh:  # where its label stands depends on the others
                _refill(self.figure.data[end - 1], fresh[end - 1])
                redrawn.add(end - 1)
            kept[index] = (curve, window, smooth)
        self._lay_out(heading, log_x, log_y)
        if len(whole) <= MOST_INSIDE and window is None:
            self.figure.layout.legend.update(self._legend(log_x, log_y))
        self.widget.show(self.figure, sorted(redrawn))

    def _lay_out(self, heading: str, log_x: bool, log_y: bool) -> None:
        """A zoom is kept while its axis stays what it is: `uirevision` says so to plotly.js."""
        self._heading = heading
        self.figure.layout.xaxis.update(
            title={"text": heading},
            unifiedhovertitle={"text": hover_title(heading)},
            type="log" if log_x else "linear",
            uirevision=f"{heading}, {log_x}",
        )
        self.figure.layout.yaxis.update(type="log" if log_y else "linear", uirevision=str(log_y))

    def _legend(self, log_x: bool, log_y: bool) -> dict[str, Any]:
        """Where it stands, unless a curve has come to run through it."""
        return legend_place(self.figure.data, log_x=log_x, log_y=log_y, held=corner_of(self.figure.layout.legend))

    def plain(self, snapshots: Sequence[Snapshot], x: str, smooth: bool, log_y: bool) -> go.Figure:
        """A figure of its own with the curves as they were last drawn, whole."""
        curves = [snapshot.curve for snapshot in snapshots]
        x = x if x in axes_of(curves) else "step"
        figure = loss_layout(curves, x)
        figure.add_traces(traces_of(self._latest, x, "loss", smooth=smooth))
        figure.layout.legend = self.figure.layout.legend
        return figure.update_layout(yaxis={"type": "log" if log_y else "linear"})

    @property
    def key(self) -> str | None:
        """What the symbols on the curves mean."""
        return mark_key(self._latest)

    def _whole_curves(self, snapshots: Sequence[Snapshot], x: str, scale: float, smoothing: float) -> list[DrawnCurve]:
        self._latest = self._drawings.of(snapshots, "loss", x, scale, smoothing, live_points(len(snapshots)))
        return self._latest


def _set(trace: go.Scatter, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        trace[name] = value


def _refill(trace: go.Scatter, source: go.Scatter) -> None:
    """Take over what changes as a run goes on; what stays is not sent again."""
    trace.x, trace.y = source.x, source.y
    if source.meta == "line":
        trace.customdata, trace.mode, trace.hovertemplate = source.customdata, source.mode, source.hovertemplate
    elif source.meta == "mark":
        trace.customdata, trace.marker = source.customdata, source.marker
    elif source.meta == "end":
        trace.text, trace.mode, trace.textposition = source.text, source.mode, source.textposition


class PanelsFigure:
    """Speed, gradient norm, learning rate and memory of all runs; made anew when a run brings another panel."""

    def __init__(self) -> None:
        self.box = widgets.VBox()
        self._drawings = Drawings()
        self._names: list[str] = []
        self._state: Any = None
        self._drawn_at = -PANELS_S
        self.figure: go.Figure | None = None
        self._widget: GrowingPlot | None = None

    def draw(
        self, snapshots: Sequence[Snapshot], x: str, smoothing: float, log_x: bool, window: Window, now: bool
    ) -> None:
        """Bring every panel up to date if it is time to, or at once with `now`."""
        grown = ((len(s.history), len(s.memory), len(s.utilization or ())) for s in snapshots)
        state = (x, smoothing, log_x, window, *grown)
        if state == self._state or not (now or time.monotonic() - self._drawn_at >= PANELS_S):
            return
        self._state, self._drawn_at = state, time.monotonic()
        curves, peaks = [s.curve for s in snapshots], [s.memory for s in snapshots]
        usage = [s.utilization for s in snapshots]
        names = panel_names(curves, peaks, usage)
        axes = axes_of(curves)
        x = x if x in axes else "step"
        scale, heading = axes[x]

        def drawn_curves(name: str) -> list[DrawnCurve]:
            return self._drawings.of(snapshots, name, x, scale, smoothing, PANEL_POINTS)

        if names != self._names or self._widget is None:
            self._rebuild(names, panels(curves, peaks, x, smoothing, names, window, usage, drawn_curves))
        if self.figure is None or self._widget is None:
            return
        fresh: list[Mapping[str, Any]] = []
        for name in names:
            if name == "memory":
                fresh += map(_points, memory_traces(curves, peaks))
            elif name == "utilization":
                fresh += map(_points, utilization_traces(curves, usage, x, scale, smoothing, window, PANEL_POINTS))
            else:
                fresh += rate_points(drawn_curves(name), name, x, smoothing > 0, window)
        for trace, fields in zip(self.figure.data, fresh, strict=True):
            _set(trace, fields)
        for position, name in enumerate(names):
            if name != "memory":
                _set_window(self.figure.layout[f"xaxis{position + 1 if position else ''}"], heading, log_x, window)
        self._widget.show(self.figure)

    def _rebuild(self, names: list[str], figure: go.Figure) -> None:
        self._names = names
        old, self._widget, self.figure = self._widget, None, None
        if names:
            self.figure, self._widget = figure, growing(figure, displayModeBar=False)
            heard_while_busy(self._widget)
        self.box.children = (self._widget,) if self._widget is not None else ()
        if old is not None:
            old.close()


def _points(trace: go.Bar | go.Scatter) -> dict[str, Any]:
    """The fields of a trace that change as a run goes on."""
    fields = {"x": trace.x, "y": trace.y}
    return {**fields, "customdata": trace.customdata} if trace.meta in ("memory", "utilization") else fields


def _set_window(axis: Any, heading: str, log_x: bool, window: Window) -> None:
    if axis.title.text:
        axis.title.text = heading
    axis.type = "log" if log_x else "linear"
    if window is None:
        axis.autorange = True
    else:
        low, high = window
        axis.range = [math.log10(max(low, 1e-12)), math.log10(max(high, 1e-12))] if log_x else [low, high]
