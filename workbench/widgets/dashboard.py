"""The live dashboard: curves that grow in place, and for every run its facts, its progress and a button.

One daemon thread reads the run directories and is the only writer of the figures; the controls only wake it. The thread
ends when every run has ended or the dashboard is closed. A dashboard holds nothing that cannot be read again: after a
restart of the kernel, call `live` again.
"""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
from IPython.display import display

from workbench.analysis.axes import X_AXES, check_axis
from workbench.analysis.smoothing import SMOOTHING
from workbench.errors import RunNotFound
from workbench.figures import theme
from workbench.figures.curves_view import loss_curves
from workbench.figures.pages import mimebundle, mimebundle_with_picture
from workbench.figures.prepared_curve import map_in_threads
from workbench.runs.registry import distinct_names
from workbench.runs.run import Run
from workbench.widgets.live_figures import CurveSettings, LiveLossFigure, LivePanelsFigure, shared_axis
from workbench.widgets.run_reader import RunReader, Snapshot
from workbench.widgets.run_row import RunRow, failures_html, fixed_width, name_width, respond_while_busy, rows_html
from workbench.widgets.samples_view import samples_at, samples_table
from workbench.widgets.static_copy import EMPTY, STATIC_COPY_S, DisplayedWidget, copy_hider

REFRESH_S = 0.1
"""Seconds between two reads of the run directories."""
REST_FACTOR = 3.0
"""Smallest ratio of the thread's rest to the kernel's computation while it drew: the kernel has other work."""
UNSEEN_FACTOR = 10.0
"""Factor by which the time between two reads is longer while no page shows the dashboard, as in `workbench execute`."""
PANELS_AFTER_ZOOM_S = 0.3
"""Seconds by which the panels follow a zoom later than the curves: the page draws one thing at a time."""
RESUME_OFFER_S = 1800.0
"""Seconds after the end of the last run for which buttons offer to resume; a saved notebook cannot show a button."""


class Live(widgets.VBox):
    """A dashboard, as `live` returns it. `close()` ends it; the runs go on."""

    def __init__(self, runs: Sequence[Run], settings: CurveSettings, refresh_s: float) -> None:
        self._readers = map_in_threads(lambda index: RunReader(runs[index].path), range(len(runs)))
        self._labels = distinct_names(runs)
        self._snapshots = [self._read(index) for index in range(len(runs))]
        self._refresh_s = refresh_s
        self._wake, self._closed, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._displays: list[tuple[DisplayedWidget, Any]] = []
        self._next_copy_at = 0.0
        self._copying = threading.Lock()  # held while a copy for the saved notebook is written: the last one must stay
        self._offer_timer: threading.Timer | None = None
        self._drawn_state: tuple[Any, ...] | None = None
        self._zoomed_at = -PANELS_AFTER_ZOOM_S
        width_px = name_width(self._labels)
        self._rows = [
            RunRow(reader, theme.series_color(index), self._follow_again, width_px)
            for index, reader in enumerate(self._readers)
        ]
        self._controls = Controls(settings, self._wake.set)
        self._key, self._texts, self._note = widgets.HTML(), widgets.HTML(), widgets.HTML()
        super().__init__(_view_count=0)  # with a number instead of None the page counts the widget's views
        self.observe(lambda _: self._wake.set(), names="_view_count")
        self._loss = LiveLossFigure(self._snapshots, settings, self._wake.set)
        self._panels = LivePanelsFigure()
        self._refresh()
        boxes = [row.box for row in self._rows]
        curves = (self._loss.widget, self._key, self._texts)
        self.children = (*boxes, self._controls.box, *curves, self._panels.box, self._note)
        self._start_thread()

    @property
    def figure(self) -> go.Figure:
        """The loss curves as they were last drawn."""
        return self._loss.figure

    @property
    def following(self) -> bool:
        """True while the dashboard updates itself."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop updating and remove the dashboard from the page; the runs go on."""
        self._closed.set()
        self._wake.set()
        if self._offer_timer is not None:
            self._offer_timer.cancel()
        super().close()

    def _read(self, index: int) -> Snapshot:
        return replace(self._readers[index].read(), name=self._labels[index])

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._follow, name="workbench-live", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        """Update until all runs have ended. A thread must not print: its output lands in whichever cell runs."""
        rest_s = self._refresh_s
        try:
            while not self._closed.is_set():
                self._wake.wait(rest_s)
                self._wake.clear()
                if self._closed.is_set():
                    return
                started, computed = time.monotonic(), time.process_time()
                self._snapshots = [
                    last if last.status.final and not self._readers[index].has_grown() else self._read(index)
                    for index, last in enumerate(self._snapshots)
                ]
                self._refresh()
                if started >= self._next_copy_at:
                    with self._copying:
                        self._update_static_copy()
                # Waiting for a busy machine is no computation: to rest for it too would let the figures fall behind.
                work_s = min(time.monotonic() - started, time.process_time() - computed)
                rest_s = max(self._refresh_s * (1 if self._view_count else UNSEEN_FACTOR), REST_FACTOR * work_s)
                if self._all_ended():
                    with self._copying:
                        self._ended.set()
                        self._leave_static_copy()
                    return
        except Exception as error:  # a dashboard that stops without a word looks like a run that hangs
            self._note.value = (
                f"<b>The dashboard stopped updating</b> ({html.escape(f'{type(error).__name__}: {error}')}). "
                "The runs go on; call wb.live again."
            )

    def _all_ended(self) -> bool:
        return all(snapshot.status.final for snapshot in self._snapshots)

    def _refresh(self) -> None:
        for row, snapshot in zip(self._rows, self._snapshots, strict=True):
            row.show(snapshot)
        self._note.value = failures_html(self._snapshots)
        settings = self._controls.settings
        points = tuple((len(snapshot.history), snapshot.step, snapshot.marks) for snapshot in self._snapshots)
        before, window = self._drawn_state, self._loss.window
        if (settings, window, points) != before:
            self._loss.draw(self._snapshots, settings)
            key = self._loss.key
            self._key.value = f'<small style="color:{theme.MUTED};margin-left:64px">{key or ""}</small>'
            self._key.layout.display = None if key else "none"
        self._texts.value = samples_at(self._snapshots, self._loss.hovered_step)
        if before is not None and window != before[1]:
            self._zoomed_at = time.monotonic()
        if self._all_ended() or time.monotonic() - self._zoomed_at >= PANELS_AFTER_ZOOM_S:
            now = before is None or settings != before[0] or self._all_ended()
            self._panels.draw(self._snapshots, settings, self._loss.window, now)
        self._drawn_state = (settings, self._loss.window, points)  # drawing over another axis ends a zoom

    def _ipython_display_(self) -> None:
        shown = DisplayedWidget(self, self._rows_html())
        with self._copying:
            self._displays.append((shown, display(dict(EMPTY), raw=True, display_id=True)))
            if self._ended.is_set():  # the runs had ended before the dashboard was displayed
                self._leave_static_copy()
            else:
                self._update_static_copy()

    def _rows_html(self) -> str:
        return rows_html(self._snapshots, [reader.name for reader in self._readers]) + samples_table(self._snapshots)

    def _update_static_copy(self) -> None:
        self._next_copy_at = time.monotonic() + STATIC_COPY_S
        if not self._displays:
            return
        bundle = None
        if any(snapshot.step for snapshot in self._snapshots):
            figure = self._loss.static_figure(self._snapshots, self._controls.settings)
            figure.update_layout(title=theme.title("Loss of each run", "as it stood when the notebook was saved"))
            figure.update_layout(margin={"t": 64}, height=440)
            bundle = mimebundle_with_picture(figure)
        states = self._rows_html()
        for shown, _ in self._displays:
            shown.update(states, bundle)

    def _leave_static_copy(self) -> None:
        """Replace the widget by plain figures, which a saved notebook shows without a kernel.

        The rows of runs that can be resumed stay below them for `RESUME_OFFER_S` seconds.
        """
        settings = self._controls.settings
        curves = [snapshot.curve for snapshot in self._snapshots]
        x, _ = shared_axis(curves, settings.x)
        loss = loss_curves(curves, x=x, smoothing=settings.smoothing, log_y=settings.log_y)
        is_on_page = bool(self._view_count)  # JupyterLab then adds a picture by itself
        figures = [mimebundle(loss) if is_on_page else mimebundle_with_picture(loss)]
        if self._panels.figure is not None:
            figures.append(mimebundle(self._panels.figure))
        for shown, _ in self._displays:
            shown.leave_copy(self._rows_html(), *figures)
        rows = [row for row in self._rows if row.offers_resume]
        if not rows or not self._displays:
            return
        box = widgets.VBox([row.box for row in rows])
        offer = {**box._repr_mimebundle_(), "text/html": _resume_html(rows)}
        for _, below in self._displays:
            below.update(offer, raw=True)
        self._offer_timer = threading.Timer(RESUME_OFFER_S, self._withdraw_offer)
        self._offer_timer.daemon = True
        self._offer_timer.start()

    def _withdraw_offer(self) -> None:
        text = _resume_html([row for row in self._rows if row.offers_resume])
        for _, below in self._displays:
            below.update({"text/html": text, "text/plain": ""}, raw=True)

    def _follow_again(self) -> None:
        """Show and update the dashboard again after a run was resumed, if it had ended."""
        if self.following:
            self._wake.set()
            return
        if self._offer_timer is not None:
            self._offer_timer.cancel()
        self._ended.clear()
        self._snapshots = [self._read(index) for index in range(len(self._readers))]
        self._refresh()
        for shown, below in self._displays:
            below.update(dict(EMPTY), raw=True)
            shown.restore()
        self._start_thread()


def _resume_html(rows: Sequence[RunRow]) -> str:
    """Return the calls that continue these runs, for a page without buttons."""
    calls = "".join(f"<div><code>wb.load_run({html.escape(repr(row.name))}).resume()</code></div>" for row in rows)
    return f"{calls}continues from the last checkpoint." if rows else ""


class Controls:
    """The controls for x axis, smoothing and logarithmic axes; each use of one calls `on_change`."""

    def __init__(self, settings: CurveSettings, on_change: Callable[[], None]) -> None:
        self._x = widgets.Dropdown(
            options=[(axis.label, name) for name, axis in X_AXES.items()],
            value=settings.x,
            description="x axis",
            layout=fixed_width(220),
        )
        self._smoothing = widgets.FloatSlider(
            value=settings.smoothing,
            min=0.0,
            max=0.1,
            step=0.005,
            description="smoothing",
            readout_format=".1%",
            continuous_update=False,
            layout=fixed_width(300),
        )
        self._log_x = widgets.ToggleButton(value=settings.log_x, description="log x", layout=fixed_width(80))
        self._log_y = widgets.ToggleButton(value=settings.log_y, description="log loss", layout=fixed_width(80))
        controls = (self._x, self._smoothing, self._log_x, self._log_y)
        for control in controls:
            control.observe(lambda _: on_change(), names="value")
        respond_while_busy(*controls)
        self.box = widgets.HBox((*controls, copy_hider()), layout={"flex_flow": "row wrap"})

    @property
    def settings(self) -> CurveSettings:
        """The settings that the controls show."""
        return CurveSettings(self._x.value, self._smoothing.value, self._log_x.value, self._log_y.value)


def live(
    runs: Run | Iterable[Run], x: str = "tokens", smoothing: float = SMOOTHING, refresh_s: float = REFRESH_S
) -> Live:
    """Return a dashboard that follows runs while they train, whichever kernel launched them.

    Show it as the last line of a cell. When all runs have ended, plain figures replace it; a saved notebook keeps them.

    Args:
        runs: one run or several.
        x: the x axis that is shown first: `step`, `tokens`, `samples`, `time`, `flops` or `gpu_hours`.
        smoothing: width of the moving average as a share of the longest run.
        refresh_s: seconds between two reads of the run directories.

    Raises `UnknownParameter` for an x axis that does not exist, and `RunNotFound` if there is no run.
    """
    check_axis(x)
    chosen = list(runs) if isinstance(runs, Iterable) else [runs]
    if not chosen:
        raise RunNotFound("There is no run to follow. Launch one, or name its folder: wb.live(wb.load_run(PATH)).")
    return Live(chosen, CurveSettings(x, smoothing), refresh_s)
