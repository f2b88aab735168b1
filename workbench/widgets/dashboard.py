"""The live dashboard: curves that grow in place, and for every run its facts, its progress and a button.

One daemon thread reads the runs' directories and is the only writer of the figures; the controls only
leave a wish and wake it. It ends when every run has, or when the dashboard is closed. A dashboard holds
nothing that matters: after a kernel restart, call `live` again.
"""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import ipywidgets as widgets
import plotly.graph_objects as go
from IPython.display import display

from workbench.errors import UnknownParameter, suggestion
from workbench.figures import theme
from workbench.figures._curves import loss_curves
from workbench.figures._series import SMOOTHING, X_AXES, axes_of
from workbench.figures.export import mimebundle
from workbench.widgets.drawing import LossFigure, PanelsFigure
from workbench.widgets.rows import Resume, RunRow, failures_html, heard_while_busy, rows_html
from workbench.widgets.watch import Snapshot, Watch

REFRESH_S = 0.1
"""Between two looks at the runs' directories."""
FIT_AFTER_S = (0.7, 2.0, 5.0)
"""When figures that came back to the page take its width: the browser says nothing when they are there."""
REST = 3.0
"""After drawing for so long, rest at least this many times longer: the kernel has other work."""
OFFER_S = 1800.0
"""For so long after the last run has ended, a button offers to resume it. A saved notebook cannot show a button."""


class RunLike(Protocol):
    """A handle with the directory that it reads."""

    @property
    def path(self) -> Path: ...


class Live(widgets.VBox):
    """What `live` returns: a widget. `close()` ends it; the runs go on."""

    def __init__(
        self, runs: Sequence[RunLike], x: str, smoothing: float, refresh_s: float, resume: Resume | None = None
    ) -> None:
        self._watches = [Watch(Path(run.path)) for run in runs]
        self._snapshots: list[Snapshot] = [watch.read() for watch in self._watches]
        self._refresh_s, self._resume = refresh_s, resume
        self._wake, self._closed, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._handles: list[tuple[Any, Any]] = []
        self._offer_ends: threading.Timer | None = None
        self._drawn_as: tuple[Any, ...] | None = None
        self._fit_at: list[float] = []
        self._rows = [
            RunRow(watch, theme.series_color(index), resume, self._go_on) for index, watch in enumerate(self._watches)
        ]
        self._controls = Controls(x, smoothing, self._wake.set)
        self._key, self._note = widgets.HTML(), widgets.HTML()
        super().__init__()
        self._make_figures()
        self._follow_in_thread()

    @property
    def figure(self) -> go.FigureWidget:
        """The loss curves."""
        return self._loss.widget

    @property
    def following(self) -> bool:
        """Whether the dashboard still updates itself."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop following and take the dashboard off the page; the runs go on."""
        self._closed.set()
        self._wake.set()
        if self._offer_ends is not None:
            self._offer_ends.cancel()
        super().close()

    def _make_figures(self) -> None:
        """Figures that were never shown: one that has left the page and comes back is not kept up to date there."""
        x, smoothing, _, _ = self._controls.wish
        self._loss = LossFigure(self._snapshots, x, smoothing, self._wake.set)
        self._panels = PanelsFigure()
        self._drawn_as = None
        self._refresh()
        self.children = (
            *(row.box for row in self._rows),
            self._controls.box,
            self._loss.widget,
            self._key,
            self._panels.box,
            self._note,
        )

    def _follow_in_thread(self) -> None:
        self._thread = threading.Thread(target=self._follow, name="workbench-live", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        """The thread's whole life. It must not print: output of a thread lands in whichever cell runs."""
        rest_s = self._refresh_s
        try:
            while not self._closed.is_set():
                self._wake.wait(rest_s)
                self._wake.clear()
                if self._closed.is_set():
                    return
                started = time.monotonic()
                if self._fit_at and started >= self._fit_at[0]:
                    self._fit_at = self._fit_at[1:]
                    self._loss.fit()
                    self._panels.fit()
                self._snapshots = [
                    last if last.status.final and not watch.grew else watch.read()
                    for watch, last in zip(self._watches, self._snapshots, strict=True)
                ]
                self._refresh()
                rest_s = max(self._refresh_s, REST * (time.monotonic() - started))
                if all(snapshot.status.final for snapshot in self._snapshots):
                    self._ended.set()
                    self._leave_plain_figure()
                    return
        except Exception as error:  # a dashboard that dies silently looks like a run that hangs
            self._note.value = (
                f"<b>The dashboard stopped updating</b> ({html.escape(f'{type(error).__name__}: {error}')}). "
                "The runs go on; call live again."
            )

    def _refresh(self) -> None:
        for row, snapshot in zip(self._rows, self._snapshots, strict=True):
            row.show(snapshot)
        self._note.value = failures_html(self._snapshots)
        wish = self._controls.wish
        x, smoothing, log_x, log_y = wish
        final = all(snapshot.status.final for snapshot in self._snapshots)
        points = tuple((len(snapshot.history), snapshot.step, snapshot.marks) for snapshot in self._snapshots)
        state = (wish, self._loss.window, points)
        if state != self._drawn_as:
            self._loss.draw(self._snapshots, x, smoothing, log_x, log_y)
            key = self._loss.key
            self._key.value = f'<small style="color:{theme.MUTED};margin-left:64px">{key or ""}</small>'
            self._key.layout.display = None if key else "none"
        asked = self._drawn_as is None or state[:2] != self._drawn_as[:2]
        self._panels.draw(self._snapshots, x, smoothing, log_x, self._loss.window, now=asked or final)
        self._drawn_as = (wish, self._loss.window, points)

    def _ipython_display_(self) -> None:
        shown = display(self._bundle(), raw=True, display_id=True)
        nothing = {"text/html": "", "text/plain": ""}
        offer = display(nothing, raw=True, display_id=True) if self._resume is not None else None
        self._handles.append((shown, offer))
        if self._ended.is_set():  # the runs were over before the dashboard was shown
            self._leave_plain_figure()

    def _bundle(self) -> dict[str, Any]:
        """The widget, and beside it what shows where no kernel runs: a saved notebook, papermill, GitHub."""
        return {**self._repr_mimebundle_(), "text/html": rows_html(self._snapshots)}

    def _leave_plain_figure(self) -> None:
        """Put a plain figure in the widget's place: a saved notebook then shows the curves without a kernel.

        Below it stand the runs that can be resumed, for a while.
        """
        x, smoothing, _, log_y = self._controls.wish
        figure = final_figure(self._snapshots, x, smoothing, log_y)
        bundle = {**mimebundle(figure), "text/html": rows_html(self._snapshots)}
        rows = [row for row in self._rows if row.offers_resume]
        offer = self._offer_bundle(rows) if rows else None
        for shown, below in self._handles:
            shown.update(bundle, raw=True)
            if offer is not None:
                below.update(offer, raw=True)
        if offer is not None and self._handles:
            self._offer_ends = threading.Timer(OFFER_S, self._withdraw_offer)
            self._offer_ends.daemon = True
            self._offer_ends.start()

    def _offer_bundle(self, rows: Sequence[RunRow]) -> dict[str, Any]:
        box = widgets.VBox([row.box for row in rows])
        return {**box._repr_mimebundle_(), "text/html": self._resume_words(rows)}

    def _withdraw_offer(self) -> None:
        words = self._resume_words([row for row in self._rows if row.offers_resume])
        for _, below in self._handles:
            below.update({"text/html": words, "text/plain": ""}, raw=True)

    @staticmethod
    def _resume_words(rows: Sequence[RunRow]) -> str:
        calls = "".join(f"<div><code>wb.resume({html.escape(repr(row.name))})</code></div>" for row in rows)
        return f"{calls}continues from the last checkpoint." if rows else ""

    def _go_on(self) -> None:
        """A run was resumed: show the dashboard again, if it had given way."""
        if self.following:
            self._wake.set()
            return
        if self._offer_ends is not None:
            self._offer_ends.cancel()
        self._ended.clear()
        self._snapshots = [watch.read() for watch in self._watches]
        self._make_figures()
        for shown, below in self._handles:
            below.update({"text/html": "", "text/plain": ""}, raw=True)
            shown.update(self._bundle(), raw=True)
        self._fit_at = [time.monotonic() + wait_s for wait_s in FIT_AFTER_S]
        self._follow_in_thread()


class Controls:
    """X axis, smoothing and logarithmic axes; `changed` is called when the user turns to another."""

    def __init__(self, x: str, smoothing: float, changed: Any) -> None:
        self._x = widgets.Dropdown(
            options=[(axis.label, name) for name, axis in X_AXES.items()],
            value=x,
            description="x axis",
            layout={"width": "220px"},
        )
        self._smoothing = widgets.FloatSlider(
            value=smoothing,
            min=0.0,
            max=0.1,
            step=0.005,
            description="smoothing",
            readout_format=".1%",
            continuous_update=False,
        )
        self._log_x = widgets.ToggleButton(value=False, description="log x", layout={"width": "80px"})
        self._log_y = widgets.ToggleButton(value=False, description="log loss", layout={"width": "80px"})
        controls = (self._x, self._smoothing, self._log_x, self._log_y)
        for control in controls:
            control.observe(lambda _: changed(), names="value")
        heard_while_busy(*controls)
        self.box = widgets.HBox(controls)

    @property
    def wish(self) -> tuple[str, float, bool, bool]:
        """(x axis, smoothing, logarithmic x, logarithmic loss)."""
        return self._x.value, self._smoothing.value, self._log_x.value, self._log_y.value


def live(
    runs: RunLike | Iterable[RunLike],
    x: str = "tokens",
    smoothing: float = SMOOTHING,
    refresh_s: float = REFRESH_S,
    resume: Resume | None = None,
) -> Live:
    """A dashboard that follows the runs while they train, whichever kernel launched them.

    `x` is the first x axis shown: `step`, `tokens`, `time`, `flops` or `gpu_hours`; `refresh_s` the seconds
    between looks at the runs. `resume` is what a button calls to continue a run that ended early; without it
    there is no such button. Show the result as the last line of a cell. When all runs have ended the widget
    gives way to a plain figure, which a saved notebook keeps.

    Raises `UnknownParameter` for an x axis that does not exist.
    """
    if x not in X_AXES:
        raise UnknownParameter(f"x={x!r} is not an axis. {suggestion(x, X_AXES)}", parameter="x", value=x)
    chosen = list(runs) if isinstance(runs, Iterable) else [runs]
    return Live(chosen, x, smoothing, refresh_s, resume)


def final_figure(snapshots: Sequence[Snapshot], x: str, smoothing: float, log: bool) -> go.Figure:
    """The curves as `compare` draws them, with how each run ended under the title."""
    curves = [snapshot.curve for snapshot in snapshots]
    figure = loss_curves(curves, x=x if x in axes_of(curves) else "step", smoothing=smoothing, log_y=log)
    key = figure.layout.title.subtitle.text
    lines = [theme.text(_ending(snapshot)) for snapshot in snapshots] + ([key] if key else [])
    figure.update_layout(title={"subtitle": {"text": "<br>".join(lines)}}, margin={"t": 100 + 18 * len(lines)})
    figure.update_layout(height=480 + 18 * len(lines))
    return figure


def _ending(snapshot: Snapshot) -> str:
    """`"scaled: stopped, step 812 of 2,000 · loss 4.31 · 82.1 k tokens/s · Stopped at step 812."`"""
    why = str(snapshot.failure).splitlines()[0] if snapshot.failure else snapshot.status.message
    return f"{snapshot.name}: {snapshot.status.state}, {snapshot.facts}" + (f" · {why}" if why else "")
