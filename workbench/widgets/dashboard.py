"""The live dashboard: curves that grow in place, one row of facts and a stop button for every run.

One daemon thread reads the runs' directories and is the only writer of the figure; the controls only
leave a wish and wake it. It ends when every run has, or when the dashboard is closed. A dashboard holds
nothing that matters: after a kernel restart, call `live` again.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import ipywidgets as widgets
import plotly.graph_objects as go
from IPython.display import display

from workbench.errors import UnknownParameter, suggestion
from workbench.figures import theme
from workbench.figures._curves import hover_title, loss_curves, traces_of
from workbench.figures._series import SMOOTHING, X_AXES, Curve, axes_of, draw
from workbench.figures.export import mimebundle
from workbench.widgets.watch import Snapshot, Watch

REFRESH_S = 0.5

STATE_COLORS = {
    "queued": "#6B7280",
    "starting": "#9A6B00",
    "running": "#0072B2",
    "finished": "#00785A",
    "stopped": "#5B6472",
    "failed": theme.ALERT,
}


class RunLike(Protocol):
    """A handle with the directory that it reads."""

    @property
    def path(self) -> Path: ...


class Live(widgets.VBox):
    """What `live` returns: a widget. `close()` ends it; the runs go on."""

    def __init__(self, runs: Sequence[RunLike], x: str, smoothing: float, refresh_s: float) -> None:
        self._watches = [Watch(Path(run.path)) for run in runs]
        self._snapshots: list[Snapshot] = [watch.read() for watch in self._watches]
        self._refresh_s = refresh_s
        self._wake, self._closed, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._handles: list[Any] = []
        self._drawn_as: tuple[Any, ...] | None = None
        self._heading = ""
        self._rows = [RunRow(watch) for watch in self._watches]
        self._x = widgets.Dropdown(
            options=[(axis.label, name) for name, axis in X_AXES.items()], value=x, description="x axis"
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
        self._log = widgets.ToggleButton(value=False, description="log loss", layout={"width": "90px"})
        for control in (self._x, self._smoothing, self._log):
            control.observe(lambda _: self._wake.set(), names="value")
        heard_while_busy(self._x, self._smoothing, self._log)
        self._figure = go.FigureWidget(_first_figure(self._snapshots, x, smoothing))
        self._figure._config = {"responsive": True, "displaylogo": False}  # plotly's own way to set a widget's config
        self._note = widgets.HTML()
        super().__init__(
            children=(
                *(row.box for row in self._rows),
                widgets.HBox((self._x, self._smoothing, self._log)),
                self._figure,
                self._note,
            ),
        )
        self._refresh()
        self._thread = threading.Thread(target=self._follow, name="workbench-live", daemon=True)
        self._thread.start()

    @property
    def figure(self) -> go.FigureWidget:
        return self._figure

    @property
    def following(self) -> bool:
        """Whether the dashboard still updates itself."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop following and take the dashboard off the page; the runs go on."""
        self._closed.set()
        self._wake.set()
        super().close()

    def _follow(self) -> None:
        """The thread's whole life. It must not print: output of a thread lands in whichever cell runs."""
        try:
            while not self._closed.is_set():
                self._wake.wait(self._refresh_s)
                self._wake.clear()
                if self._closed.is_set():
                    return
                self._snapshots = [
                    last if last.status.final else watch.read()
                    for watch, last in zip(self._watches, self._snapshots, strict=True)
                ]
                self._refresh()
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
        self._note.value = _failures(self._snapshots)
        wish = (self._x.value, self._smoothing.value, self._log.value)
        state = (wish, *(len(snapshot.history) for snapshot in self._snapshots))
        if state != self._drawn_as:
            self._draw(*wish)
            self._drawn_as = state

    def _draw(self, x: str, smoothing: float, log: bool) -> None:
        curves = [snapshot.curve for snapshot in self._snapshots]
        axes = axes_of(curves)
        x = x if x in axes else "step"
        scale, heading = axes[x]
        fresh = _traces(curves, x, scale, smoothing)
        with self._figure.batch_update():
            for trace, source in zip(self._figure.data, fresh, strict=True):
                _refill(trace, source)
            if heading != self._heading:
                self._figure.layout.xaxis.update(
                    title={"text": heading}, unifiedhovertitle={"text": hover_title(heading)}, autorange=True
                )
            if (self._figure.layout.yaxis.type == "log") != log:
                self._figure.layout.yaxis.update(type="log" if log else "linear", autorange=True)
        self._heading = heading

    def _ipython_display_(self) -> None:
        self._handles.append(display(self._bundle(), raw=True, display_id=True))
        if self._ended.is_set():  # the runs were over before the dashboard was shown
            self._leave_plain_figure()

    def _bundle(self) -> dict[str, Any]:
        """The widget, and beside it what shows where no kernel runs: a saved notebook, papermill, GitHub."""
        return {**self._repr_mimebundle_(), "text/html": _static_html(self._snapshots)}

    def _leave_plain_figure(self) -> None:
        """Put a plain figure in the widget's place: a saved notebook then shows the curves without a kernel."""
        figure = final_figure(self._snapshots, self._x.value, self._smoothing.value, self._log.value)
        bundle = {**mimebundle(figure), "text/html": _static_html(self._snapshots)}
        for handle in self._handles:
            handle.update(bundle, raw=True)


class RunRow:
    """Badge, name, progress bar, facts and stop button of one run."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._badge = widgets.HTML(layout={"width": "76px"})
        self._name = widgets.HTML(layout={"width": "180px"})
        self._bar = widgets.FloatProgress(value=0.0, min=0.0, max=1.0, layout={"width": "130px"})
        self._facts = widgets.HTML(layout={"flex": "1 1 0", "margin": "0 0 0 10px"})
        self._stop = widgets.Button(
            description="Stop", icon="stop", tooltip="Write a checkpoint and end this run", layout={"width": "100px"}
        )
        self._stop.on_click(self._ask_to_stop)
        heard_while_busy(self._stop)
        self.box = widgets.HBox(
            (self._badge, self._name, self._bar, self._facts, self._stop), layout={"align_items": "center"}
        )

    def _ask_to_stop(self, _: Any) -> None:
        self._stop.disabled = True
        self._stop.description = "Stopping …"
        self._watch.stop()

    def show(self, snapshot: Snapshot) -> None:
        state = snapshot.status.state
        self._badge.value = badge(state)
        self._name.value = f'<b title="{html.escape(snapshot.name)}">{html.escape(snapshot.name)}</b>'
        self._bar.value = snapshot.progress
        self._bar.style.bar_color = STATE_COLORS[state]
        message = f" · {snapshot.status.message}" if snapshot.status.message and state != "failed" else ""
        self._facts.value = f'<span style="font-size:12px">{html.escape(snapshot.facts + message)}</span>'
        if snapshot.status.final:
            self._stop.disabled = True
            self._stop.description = state.capitalize()


def heard_while_busy(*controls: widgets.Widget) -> None:
    """Let controls be used while a cell runs; their callbacks then run in another thread than the cell's.

    JupyterLab addresses a widget's messages to a subshell of the kernel for that very reason, and ipykernel
    7.1 to 7.3 deliver them there. 7.4 delivers them to the loop that last published for the widget: the main
    one, which is busy. Where it does so, the address that JupyterLab wrote is restored.
    """
    for control in controls:
        if hasattr(control.comm, "_reply_subshell_for"):
            control.comm._reply_subshell_for = lambda _data, address: address


def live(
    runs: RunLike | Iterable[RunLike], x: str = "tokens", smoothing: float = SMOOTHING, refresh_s: float = REFRESH_S
) -> Live:
    """A dashboard that follows the runs while they train, whichever kernel launched them.

    `x` is the first x axis shown: `step`, `tokens`, `time`, `flops` or `gpu_hours`; `refresh_s` the seconds
    between updates. Show the result as the last line of a cell. When all runs have ended the widget gives
    way to a plain figure, which a saved notebook keeps.

    Raises `UnknownParameter` for an x axis that does not exist.
    """
    if x not in X_AXES:
        raise UnknownParameter(f"x={x!r} is not an axis. {suggestion(x, X_AXES)}", parameter="x", value=x)
    chosen = list(runs) if isinstance(runs, Iterable) else [runs]
    return Live(chosen, x, smoothing, refresh_s)


def final_figure(snapshots: Sequence[Snapshot], x: str, smoothing: float, log: bool) -> go.Figure:
    """The curves as `compare` draws them, with how each run ended under the title."""
    curves = [snapshot.curve for snapshot in snapshots]
    figure = loss_curves(curves, x=x if x in axes_of(curves) else "step", smoothing=smoothing, log_y=log)
    lines = [theme.text(_ending(snapshot)) for snapshot in snapshots]
    figure.update_layout(title={"subtitle": {"text": "<br>".join(lines)}}, margin={"t": 100 + 18 * len(lines)})
    figure.update_layout(height=480 + 18 * len(lines))
    return figure


def _ending(snapshot: Snapshot) -> str:
    """`"scaled: stopped, step 812 of 2,000 · loss 4.31 · 82.1 k tokens/s · Stopped at step 812."`"""
    why = str(snapshot.failure).splitlines()[0] if snapshot.failure else snapshot.status.message
    return f"{snapshot.name}: {snapshot.status.state}, {snapshot.facts}" + (f" · {why}" if why else "")


def badge(state: str) -> str:
    return (
        f'<span style="background:{STATE_COLORS[state]};color:white;border-radius:8px;padding:1px 8px;'
        f'font-size:11px;font-weight:600">{html.escape(state)}</span>'
    )


def _first_figure(snapshots: Sequence[Snapshot], x: str, smoothing: float) -> go.Figure:
    """Every part that each run's curve can have, also those without a point yet: updates never add a trace."""
    curves = [snapshot.curve for snapshot in snapshots]
    axes = axes_of(curves)
    x = x if x in axes else "step"
    figure = loss_curves(curves, x=x)
    figure.update_layout(title={"text": None}, margin={"t": 16}, height=420, autosize=True)
    figure.layout.updatemenus, figure.layout.annotations, figure.data = (), (), ()
    figure.add_traces(_traces(curves, x, axes[x][0], smoothing))
    return figure


def _traces(curves: Sequence[Curve], x: str, scale: float, smoothing: float) -> list[go.Scatter]:
    return traces_of(draw(curves, "loss", smoothing, {x: scale}), x, "loss", smooth=smoothing > 0, complete=True)


def _refill(trace: go.Scatter, source: go.Scatter) -> None:
    """Take over what changes as a run goes on; what stays is not sent again."""
    trace.x, trace.y = source.x, source.y
    if source.meta == "line":
        trace.customdata, trace.mode, trace.hovertemplate = source.customdata, source.mode, source.hovertemplate
    if source.meta == "end":
        trace.text, trace.mode, trace.textposition = source.text, source.mode, source.textposition


def _failures(snapshots: Sequence[Snapshot]) -> str:
    found = [snapshot.failure_html for snapshot in snapshots if snapshot.failure is not None]
    if not found:
        return ""
    lines = "".join(f"<div>{text}</div>" for text in found)
    return f'<div style="border-left:3px solid {theme.ALERT};padding:4px 10px">{lines}</div>'


def _static_html(snapshots: Sequence[Snapshot]) -> str:
    """The same rows without a widget, as they stood when this was written."""
    rows = "".join(
        f"<tr><td style='text-align:left'>{badge(s.status.state)}</td>"
        f"<td style='text-align:left'><b>{html.escape(s.name)}</b></td>"
        f"<td style='text-align:left'>{html.escape(s.facts)}</td></tr>"
        for s in snapshots
    )
    return f"<table>{rows}</table>{_failures(snapshots)}"
