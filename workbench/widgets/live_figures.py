"""The two figures of a dashboard; they compute and send again only what has changed since the last update."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import ipywidgets as widgets
import numpy as np

from workbench.analysis.curve import Curve, shared_axes
from workbench.columns import AxisUnit
from workbench.figures import theme
from workbench.figures.curves_view import (
    curve_traces,
    hover_title,
    loss_layout,
    mark_key,
    settled_range,
)
from workbench.figures.figure import Figure
from workbench.figures.panels_view import PANEL_POINTS, Window, panel, panel_names, panels
from workbench.figures.prepared_curve import TRACE_ROLES, Preparation, PreparedCurve, map_in_threads, points_per_trace
from workbench.widgets.live_widget import respond_while_busy
from workbench.widgets.plot import GrowingPlot, growing_plot
from workbench.widgets.run_reader import Snapshot

PANELS_S = 1.0
"""Seconds between two updates of the panels, whose rates and memory change slowly."""
LIVE_POINTS = 6_000
"""Number of points in the raw traces of all runs together that a browser redraws smoothly while the user drags."""
CHANGING = ("x", "y", "customdata")
"""Fields of a panel's traces that change as a run goes on."""
ZOOMED_ROLES = ("raw", "line")
"""Traces that have other points in another part of the x axis."""
WIDTH_STEP = 1.02
"""Factor by which the smoothing width must grow before the averages of all runs are computed again."""


class CurveSettings(NamedTuple):
    """The user's choice of how a dashboard draws its curves."""

    x: str
    """Name of the x axis, one of `workbench.analysis.curve.X_AXES`."""
    smoothing: float
    """Width of the average as a share of the longest run; 0 shows raw values only."""
    log_x: bool = False
    log_y: bool = False


def shared_axis(curves: Sequence[Curve], wanted: str) -> tuple[str, AxisUnit]:
    """Return the wanted x axis with its unit, or the step axis if a run did not record the wanted one."""
    axes = shared_axes(curves)
    name = wanted if wanted in axes else "step"
    return name, axes[name]


class CurveCache:
    """The prepared curves of all runs; those of a run that has not changed are kept."""

    def __init__(self) -> None:
        self._cached: dict[tuple[str, int], tuple[Any, PreparedCurve]] = {}

    def prepare(
        self, snapshots: Sequence[Snapshot], y: str, x: str, unit: AxisUnit, smoothing: float, max_points: int
    ) -> list[PreparedCurve]:
        """Return column `y` of every run over the axis `x`; an unchanged run gets the same object as before."""
        curves = [snapshot.curve for snapshot in snapshots]
        preparation = Preparation.of(curves, smoothing, {x: unit.scale}, max_points)
        if preparation.width > 0:
            width = WIDTH_STEP ** math.ceil(math.log(preparation.width, WIDTH_STEP))
            preparation = replace(preparation, width=width)
        shared = (x, unit.scale, preparation.width, preparation.along, preparation.held_out)
        states = [(len(s.history), s.step, s.marks, len(s.evaluations or ()), *shared) for s in snapshots]
        changed = [index for index, state in enumerate(states) if self._cached.get((y, index), (None,))[0] != state]
        fresh = map_in_threads(lambda index: preparation.prepare(curves[index], index, y), changed)
        for index, curve in zip(changed, fresh, strict=True):
            self._cached[y, index] = (states[index], curve)
        return [self._cached[y, index][1] for index in range(len(curves))]


class LiveLossFigure:
    """The loss curves of all runs; `on_zoom` is called when the user looks at another part or point of the x axis."""

    def __init__(self, snapshots: Sequence[Snapshot], settings: CurveSettings, on_zoom: Callable[[], None]) -> None:
        self._cache = CurveCache()
        self._latest: list[PreparedCurve] = []
        curves = [snapshot.curve for snapshot in snapshots]
        x, unit = shared_axis(curves, settings.x)
        self._x_title = unit.title
        self._layout = loss_layout(curves, x).layout
        self._layout.update(margin={"t": 36, "b": 40}, height=400, autosize=True)  # plotly's buttons need the top
        prepared, smooth = self._prepare(snapshots, x, unit, settings.smoothing), settings.smoothing > 0
        top = _upper_end(prepared, settings.log_y)
        self._traces = curve_traces(prepared, x, "loss", smooth=smooth, complete=True, top=top)
        self._shown: list[tuple[PreparedCurve, Window, bool]] = [(curve, None, smooth) for curve in prepared]
        self.widget = growing_plot(self._layout, self._traces)
        self._x = x
        self.widget.observe(lambda _: on_zoom(), names=("visible", "hovered"))
        respond_while_busy(self.widget)

    @property
    def figure(self) -> Figure:
        """The curves as they were last drawn."""
        return Figure(self._traces, self._layout)

    @property
    def window(self) -> Window:
        """The part of the x axis that the user zoomed into, in the axis' unit; None is the whole axis."""
        if self.widget.visible is None:
            return None
        low, high = sorted(self.widget.visible)
        return (10**low, 10**high) if self._layout.xaxis.type == "log" else (low, high)

    def hovered_step(self, index: int) -> float:
        """Return the step of a run under the pointer; infinity before the pointer was over the figure."""
        position, curve = self.widget.hovered, self._latest[index]
        if position is None:
            return math.inf
        before = int(np.searchsorted(curve.x[self._x], position, side="right"))
        return float(curve.step[before - 1]) if before else 0.0

    def draw(self, snapshots: Sequence[Snapshot], settings: CurveSettings) -> None:
        """Update every run's curve, with points chosen for the visible part of the x axis."""
        x, unit = shared_axis([snapshot.curve for snapshot in snapshots], settings.x)
        if unit.title != self._x_title or (self._layout.xaxis.type == "log") != settings.log_x:
            self.widget.visible = None
        window = self.window
        whole = self._prepare(snapshots, x, unit, settings.smoothing)
        top = _upper_end(whole, settings.log_y)
        smooth = settings.smoothing > 0
        visible = [curve.focused(x, window, _live_points(len(whole))) for curve in whole]
        before, self._shown = self._shown, [(curve, window, smooth) for curve in whole]
        grown = [old is not new or was != smooth for (old, _, was), new in zip(before, whole, strict=True)]
        made = TRACE_ROLES if any(grown) else ZOOMED_ROLES
        fresh = iter(curve_traces(visible, x, "loss", smooth=smooth, complete=True, top=top, roles=made))
        redrawn = {}
        for at, old in enumerate(self._traces):
            if old.meta in made:
                self._traces[at] = next(fresh)
                run = at // len(TRACE_ROLES)
                moved = ZOOMED_ROLES if before[run][1] != window else ("end",)  # labels leave those of others room
                if grown[run] or old.meta in moved:
                    redrawn[at] = self._traces[at]
        self._update_layout(unit.title, settings)
        legend = self._layout.legend
        if legend.orientation is None and window is None:
            preferred = theme.corner_of(legend)  # the legend moves only if a curve has come to run through it
            place = theme.place_legend(self._traces, log_x=settings.log_x, log_y=settings.log_y, preferred=preferred)
            legend.update(place)
        self._x = x
        self.widget.tells_hover = any(len(snapshot.texts) for snapshot in snapshots)
        self.widget.redraw(self._layout, redrawn)

    def _update_layout(self, x_title: str, settings: CurveSettings) -> None:
        """Set titles and types of the axes; plotly.js keeps a zoom as long as `uirevision` stays the same."""
        self._x_title = x_title
        self._layout.xaxis.update(
            title={"text": x_title},
            unifiedhovertitle={"text": hover_title(x_title)},
            type="log" if settings.log_x else "linear",
            tickformat=theme.LOG_TICKS if settings.log_x else None,
            uirevision=f"{x_title}, {settings.log_x}",
        )
        y_type = "log" if settings.log_y else "linear"
        y_range = settled_range(self._latest, settings.log_y)
        ticks = theme.LOG_TICKS if settings.log_y else None
        look = {"range": y_range, "autorange": y_range is None, "tickformat": ticks}
        self._layout.yaxis.update(type=y_type, uirevision=f"{x_title}, {settings.log_y}", **look)

    def static_figure(self, snapshots: Sequence[Snapshot], settings: CurveSettings) -> Figure:
        """Return a new figure with the whole curves as they were last drawn."""
        curves = [snapshot.curve for snapshot in snapshots]
        x, _ = shared_axis(curves, settings.x)
        figure = loss_layout(curves, x)
        y_range, top = settled_range(self._latest, settings.log_y), _upper_end(self._latest, settings.log_y)
        figure.add_traces(curve_traces(self._latest, x, "loss", smooth=settings.smoothing > 0, top=top))
        figure.layout.legend = self._layout.legend
        figure.update_layout(yaxis={"type": "log" if settings.log_y else "linear", "range": y_range})
        figure.update_xaxes(type="log" if settings.log_x else "linear", tickformat=self._layout.xaxis.tickformat)
        return figure

    @property
    def key(self) -> str | None:
        """The explanation of the symbols on the curves; None if there are none."""
        return mark_key(self._latest)

    def _prepare(self, snapshots: Sequence[Snapshot], x: str, unit: AxisUnit, smoothing: float) -> list[PreparedCurve]:
        points = _live_points(len(snapshots))
        self._latest = self._cache.prepare(snapshots, "loss", x, unit, smoothing, points)
        return self._latest


def _upper_end(curves: Sequence[PreparedCurve], log_y: bool) -> float | None:
    """Return the value at the upper end of a linear y axis that leaves curves out; None if it leaves none out."""
    y_range = None if log_y else settled_range(curves, False)
    return None if y_range is None else y_range[1]


def _live_points(num_runs: int) -> int:
    """Return the largest number of points of each raw trace."""
    return min(points_per_trace(num_runs), max(600, LIVE_POINTS // max(1, num_runs)))


class LivePanelsFigure:
    """Speed, gradient norm, learning rate, utilisation and memory of all runs; rebuilt when a panel is added."""

    def __init__(self) -> None:
        self.box = widgets.VBox()
        self._cache = CurveCache()
        self._names: list[str] = []
        self._state: Any = None
        self._drawn_at = -PANELS_S
        self.figure: Figure | None = None
        self._widget: GrowingPlot | None = None

    def draw(self, snapshots: Sequence[Snapshot], settings: CurveSettings, window: Window, now: bool) -> None:
        """Update every panel, but no more often than every `PANELS_S` seconds unless `now` is true."""
        sizes = ((len(s.history), len(s.memory), len(s.utilization or ()), len(s.evaluations or ())) for s in snapshots)
        state = (settings.x, settings.smoothing, settings.log_x, window, *sizes)
        if state == self._state or not (now or time.monotonic() - self._drawn_at >= PANELS_S):
            return
        self._state, self._drawn_at = state, time.monotonic()
        curves, peaks = [s.curve for s in snapshots], [s.memory for s in snapshots]
        usage = [s.utilization for s in snapshots]
        names = panel_names(curves, peaks, usage)
        x, unit = shared_axis(curves, settings.x)

        def prepare(name: str) -> list[PreparedCurve]:
            return self._cache.prepare(snapshots, name, x, unit, settings.smoothing, PANEL_POINTS)

        if names != self._names or self._widget is None:
            self._rebuild(names, panels(curves, peaks, x, settings.smoothing, names, window, usage, prepare))
        if self.figure is None or self._widget is None:
            return
        preparation = Preparation.of(curves, settings.smoothing, {x: unit.scale}, PANEL_POINTS)
        made = (panel(name, curves, peaks, usage, x, preparation, window, prepare)[0] for name in names)
        for trace, fresh in zip(self.figure.data, itertools.chain.from_iterable(made), strict=True):
            for field in CHANGING:
                if fresh[field] is not None:
                    trace[field] = fresh[field]
        for position, name in enumerate(names):
            if name != "memory":
                axis = self.figure.layout[f"xaxis{position + 1 if position else ''}"]
                _update_axis(axis, unit.title, settings.log_x, window)
        self._widget.redraw(self.figure.layout, dict(enumerate(self.figure.data)))

    def _rebuild(self, names: list[str], figure: Figure) -> None:
        self._names = names
        old, self._widget, self.figure = self._widget, None, None
        if names:
            self.figure, self._widget = figure, growing_plot(figure.layout, figure.data, displayModeBar=False)
            respond_while_busy(self._widget)
        self.box.children = (self._widget,) if self._widget is not None else ()
        if old is not None:
            old.close()


def _update_axis(axis: Any, title: str, log_x: bool, window: Window) -> None:
    if axis.title.text:
        axis.title.text = title
    axis.type = "log" if log_x else "linear"
    axis.tickformat = theme.LOG_TICKS if log_x else None
    if window is None:
        axis.autorange = True
    else:
        axis.range = [math.log10(max(end, 1e-12)) for end in window] if log_x else list(window)
