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
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import ipywidgets as widgets
import plotly.graph_objects as go
from IPython.display import display

from workbench.errors import RunNotFound, UnknownParameter, suggestion
from workbench.figures import theme
from workbench.figures._curves import loss_curves
from workbench.figures._series import SMOOTHING, X_AXES, at_once, axes_of
from workbench.figures.pages import mimebundle, pictured
from workbench.rundir import RunDir, read_json
from workbench.widgets.drawing import LossFigure, PanelsFigure
from workbench.widgets.rows import Resume, RunRow, failures_html, fixed, heard_while_busy, name_width, rows_html
from workbench.widgets.saved import NOTHING, Shown, hides_its_twin
from workbench.widgets.watch import Snapshot, Watch

REFRESH_S = 0.1
"""Between two looks at the runs' directories."""
REST = 3.0
"""After drawing for so long, rest at least this many times longer: the kernel has other work."""
PANELS_AFTER_ZOOM_S = 0.3
"""So much later than the curves the panels follow a zoom: the page draws one thing at a time."""
SAVED_S = 30.0
"""Between two pictures of what a notebook keeps that is saved while its runs train."""
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
        self._watches = at_once(lambda index: Watch(Path(runs[index].path)), range(len(runs)))
        self._labels = labels([Path(run.path) for run in runs])
        self._snapshots: list[Snapshot] = self._read_all()
        self._refresh_s, self._resume = refresh_s, resume
        self._wake, self._closed, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._showings: list[tuple[Shown, Any]] = []
        self._save_at = 0.0
        self._offer_ends: threading.Timer | None = None
        self._drawn_as: tuple[Any, ...] | None = None
        self._zoomed_at = -PANELS_AFTER_ZOOM_S
        width_px = name_width(self._labels)
        self._rows = [
            RunRow(watch, theme.series_color(index), resume, self._go_on, width_px)
            for index, watch in enumerate(self._watches)
        ]
        self._controls = Controls(x, smoothing, self._wake.set)
        self._key, self._note = widgets.HTML(), widgets.HTML()
        super().__init__(_view_count=0)  # 0: the page counts its views
        self._loss = LossFigure(self._snapshots, x, smoothing, self._wake.set)
        self._panels = PanelsFigure()
        self._refresh()
        self.children = (
            *(row.box for row in self._rows),
            self._controls.box,
            self._loss.widget,
            self._key,
            self._panels.box,
            self._note,
        )
        self._follow_in_thread()

    @property
    def figure(self) -> go.Figure:
        """The loss curves as they were last drawn."""
        return self._loss.figure

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

    def _read_all(self) -> list[Snapshot]:
        return [self._read(index) for index in range(len(self._watches))]

    def _read(self, index: int) -> Snapshot:
        return replace(self._watches[index].read(), name=self._labels[index])

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
                self._snapshots = [
                    last if last.status.final and not self._watches[index].grew else self._read(index)
                    for index, last in enumerate(self._snapshots)
                ]
                self._refresh()
                if started >= self._save_at:
                    self._keep_picture()
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
        if self._drawn_as is not None and state[1] != self._drawn_as[1]:
            self._zoomed_at = time.monotonic()
        if final or time.monotonic() - self._zoomed_at >= PANELS_AFTER_ZOOM_S:
            asked = self._drawn_as is None or wish != self._drawn_as[0]
            self._panels.draw(self._snapshots, x, smoothing, log_x, self._loss.window, now=asked or final)
        self._drawn_as = (wish, self._loss.window, points)

    def _ipython_display_(self) -> None:
        shown = Shown(self, self._states())
        offer = display(dict(NOTHING), raw=True, display_id=True) if self._resume is not None else None
        self._showings.append((shown, offer))
        if self._ended.is_set():  # the runs were over before the dashboard was shown
            self._leave_plain_figure()
        else:
            self._keep_picture()

    def _states(self) -> str:
        return rows_html(self._snapshots, [watch.name for watch in self._watches])

    def _picture(self) -> dict[str, Any] | None:
        """The curves as they stand on the screen, for a notebook that is saved now; None before the first step."""
        if not any(snapshot.step for snapshot in self._snapshots):
            return None
        x, smoothing, _, log_y = self._controls.wish
        figure = self._loss.plain(self._snapshots, x, smoothing > 0, log_y)
        figure.update_layout(title=theme.title("Loss of each run", "as it stood when the notebook was saved"))
        figure.update_layout(margin={"t": 64}, height=440)
        return pictured(figure)

    def _keep_picture(self) -> None:
        self._save_at = time.monotonic() + SAVED_S
        if self._showings:
            states, picture = self._states(), self._picture()
            for shown, _ in self._showings:
                shown.update(states, picture)

    def _leave_plain_figure(self) -> None:
        """Put plain figures in the widget's place: a saved notebook then shows the curves without a kernel.

        Below them stand the runs that can be resumed, for a while.
        """
        x, smoothing, _, log_y = self._controls.wish
        figure = final_figure(self._snapshots, x, smoothing, log_y)
        figures = [mimebundle(figure) if self._view_count else pictured(figure)]  # JupyterLab adds its own picture
        if self._panels.figure is not None:
            figures.append(mimebundle(self._panels.figure))
        rows = [row for row in self._rows if row.offers_resume]
        offer = self._offer_bundle(rows) if rows else None
        for shown, below in self._showings:
            shown.leave(self._states(), *figures)
            if offer is not None:
                below.update(offer, raw=True)
        if offer is not None and self._showings:
            self._offer_ends = threading.Timer(OFFER_S, self._withdraw_offer)
            self._offer_ends.daemon = True
            self._offer_ends.start()

    def _offer_bundle(self, rows: Sequence[RunRow]) -> dict[str, Any]:
        box = widgets.VBox([row.box for row in rows])
        return {**box._repr_mimebundle_(), "text/html": self._resume_words(rows)}

    def _withdraw_offer(self) -> None:
        words = self._resume_words([row for row in self._rows if row.offers_resume])
        for _, below in self._showings:
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
        self._snapshots = self._read_all()
        self._refresh()
        for shown, below in self._showings:
            below.update(dict(NOTHING), raw=True)
            shown.come_back()
        self._follow_in_thread()


class Controls:
    """X axis, smoothing and logarithmic axes; `changed` is called when the user turns to another."""

    def __init__(self, x: str, smoothing: float, changed: Any) -> None:
        self._x = widgets.Dropdown(
            options=[(axis.label, name) for name, axis in X_AXES.items()],
            value=x,
            description="x axis",
            layout=fixed(220),
        )
        self._smoothing = widgets.FloatSlider(
            value=smoothing,
            min=0.0,
            max=0.1,
            step=0.005,
            description="smoothing",
            readout_format=".1%",
            continuous_update=False,
            layout=fixed(300),
        )
        self._log_x = widgets.ToggleButton(value=False, description="log x", layout=fixed(80))
        self._log_y = widgets.ToggleButton(value=False, description="log loss", layout=fixed(80))
        controls = (self._x, self._smoothing, self._log_x, self._log_y)
        for control in controls:
            control.observe(lambda _: changed(), names="value")
        heard_while_busy(*controls)
        self.box = widgets.HBox((*controls, hides_its_twin()), layout={"flex_flow": "row wrap"})

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

    Raises `UnknownParameter` for an x axis that does not exist, `RunNotFound` without a run.
    """
    if x not in X_AXES:
        raise UnknownParameter(f"x={x!r} is not an axis. {suggestion(x, X_AXES)}", parameter="x", value=x)
    chosen = list(runs) if isinstance(runs, Iterable) else [runs]
    if not chosen:
        raise RunNotFound("There is no run to follow. Launch one, or name its folder: wb.live(wb.load_run(PATH)).")
    return Live(chosen, x, smoothing, refresh_s, resume)


def labels(paths: Sequence[Path]) -> list[str]:
    """The experiments' names where they tell the runs apart, else the runs' own."""
    names = [_experiment_name(path) or path.name for path in paths]
    return names if len(set(names)) == len(names) else [path.name for path in paths]


def _experiment_name(path: Path) -> str | None:
    try:
        return str(read_json(RunDir(path).experiment)["name"])
    except (OSError, ValueError, KeyError):
        return None


def final_figure(snapshots: Sequence[Snapshot], x: str, smoothing: float, log: bool) -> go.Figure:
    """The curves as `compare` draws them; how each run ended stands above, in a table."""
    curves = [snapshot.curve for snapshot in snapshots]
    return loss_curves(curves, x=x if x in axes_of(curves) else "step", smoothing=smoothing, log_y=log)
