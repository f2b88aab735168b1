"""Live views of runs, of sweeps and of measured grids: curves that grow in place, tables, and a button for each run.

They hold nothing that cannot be read again: after a restart of the kernel, show them again.
"""

from __future__ import annotations

import html
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
from IPython.display import HTML, display

from workbench.analysis.curve import SMOOTHING, X_AXES, Look, check_axis, check_smoothing
from workbench.base.arguments import checked_arguments
from workbench.base.display import Html, html_table
from workbench.base.errors import first_line
from workbench.base.units import time_left
from workbench.figures import theme
from workbench.figures.curves_view import loss_curves
from workbench.figures.figure import Figure, mimebundle, picture_html
from workbench.figures.norms_view import draw_norms
from workbench.figures.prepared_curve import map_in_threads
from workbench.figures.sweep_view import (
    Losses,
    axes_of_heat_map,
    draw_heat_map,
    draw_seed_bands,
    predictions,
    read_losses,
)
from workbench.record.history import table_html
from workbench.record.norms import NormsTail
from workbench.record.rundir import runs_root
from workbench.runs.registry import FewRuns, distinct_names, load_runs
from workbench.runs.run import Run
from workbench.runs.status import STOPPING, state_in_words
from workbench.sweeps.grid import MeasuredGrid
from workbench.sweeps.queue import groups_of, stop_queue_of
from workbench.sweeps.sweep import Configuration, Sweep
from workbench.widgets.live_widget import (
    HIDE_ROWS,
    ONE_LINE,
    ROWS_CLASS,
    WIDGET_CLASS,
    CurveSettings,
    LiveLossFigure,
    LivePanelsFigure,
    LiveWidget,
    Plot,
    close_widgets,
    respond_while_busy,
    shared_axis,
)
from workbench.widgets.run_reader import STATE_COLORS, Fold, RunReader, Snapshot, folds_of, state_color, with_looks

# One run as a row of a dashboard: state, progress, a button that stops or resumes the run, and facts.

TRACK = "var(--jp-layout-color2, #EEEEEE)"
"""Colour of what a run still has to do."""
NAME_END = 12
"""Letters at the end of a name that are never cut: long names of runs mostly differ there."""


class DashboardRow:
    """Badge, name, progress bar, button and facts of one run.

    The button stops a run that trains, and resumes a run that ended early with a checkpoint; `on_resumed` is called
    when the run trains again.
    """

    def __init__(self, reader: RunReader, on_resumed: Callable[[], None] | None = None, name_px: int = 210) -> None:
        self._reader, self._on_resumed = reader, on_resumed
        self._busy = ""
        self._name_px = name_px
        self._head = widgets.HTML()
        self._facts = widgets.HTML(layout={"flex": "1 1 280px", "min_width": "0", "margin": "0 0 0 4px"})
        self.button = widgets.Button(description="Stop", icon="stop", layout=fixed_width(110))
        self.button.on_click(self._on_click)
        respond_while_busy(self.button)
        self.box = widgets.HBox(
            (self._head, self.button, self._facts),  # in a narrow window the facts wrap, and the button stays
            layout={"align_items": "center", "flex_flow": "row wrap"},
        )

    @property
    def offers_resume(self) -> bool:
        """True if the button resumes the run."""
        return bool(self.button.description == "Resume")

    def show(self, snapshot: Snapshot) -> None:
        """Update the row."""
        state = snapshot.status.state
        names, done = (snapshot.name, self._reader.name), [(STATE_COLORS[state], snapshot.progress)]
        self._head.value = head_html(swatch_of(snapshot), _state_of(snapshot), names, done, self._name_px)
        if self._busy == "Stopping …" and snapshot.status.final:
            self._busy = ""
        self._tell(STOPPING if self._busy == "Stopping …" else _describe(snapshot))
        if self._busy:
            return
        if not snapshot.status.final:
            self._set_button("Stop", "stop", f"Stop {self._reader.name}: write a checkpoint and end it")
        elif snapshot.resumable:
            self._set_button("Resume", "play", f"Resume {self._reader.name} from its last checkpoint")
        else:
            self._set_button(state.capitalize(), disabled=True)

    def _tell(self, words: str) -> None:
        facts = html.escape(words)
        self._facts.value = f'<span title="{facts}" style="{ONE_LINE};font-size:12px">{facts}</span>'

    def _set_button(self, description: str, icon: str = "", tooltip: str = "", disabled: bool = False) -> None:
        self.button.description, self.button.icon = description, icon
        self.button.tooltip, self.button.disabled = tooltip, disabled

    def _on_click(self, _: Any) -> None:
        if self.button.description == "Stop":
            self._become_busy("Stopping …")
            self._tell(STOPPING)
            self._reader.run.stop()
        elif self.offers_resume:
            self._become_busy("Resuming …")
            threading.Thread(target=self._resume, name="workbench-resume", daemon=True).start()

    def _become_busy(self, label: str) -> None:
        self._busy = label
        self._set_button(label, disabled=True)

    def _resume(self) -> None:
        try:
            self._reader.run.resume()
        except Exception as error:  # the row shows the reason: nobody sees what a thread raises
            message = html.escape(first_line(error))
            self._facts.value = f'<span style="color:{theme.ALERT};font-size:12px">{message}</span>'
            self._busy = ""
            self._set_button("Not resumed", tooltip=str(error), disabled=True)
            return
        self._busy = ""
        if self._on_resumed is not None:
            self._on_resumed()


def _describe(snapshot: Snapshot) -> str:
    """Return the run's facts, and its message unless badge and facts already say the same."""
    status = snapshot.status
    repeats = status.state in ("failed", "finished") or status.message.startswith("Stopped at step")
    return snapshot.facts if repeats or not status.message else f"{snapshot.facts} · {status.message}"


def head_html(mark: str, state: str, names: tuple[str, str], done: Sequence[tuple[str, float]], name_px: int) -> str:
    """Return mark, state, name and progress of a row as one piece of HTML: each widget costs some milliseconds.

    `names` are the shown one and the whole one, and `done` has colours with their shares of the bar.
    """
    shown, whole = names
    start, end = (html.escape(part) for part in (shown[:-NAME_END], shown[-NAME_END:]))
    look = f'title="{html.escape(whole)}" style="display:flex;white-space:pre;flex:0 0 {name_px}px;font-size:12px"'
    told = f'aria-label="steps of {html.escape(whole)}" aria-valuemin="0" aria-valuemax="100"'
    bar = f'role="progressbar" {told} aria-valuenow="{100 * sum(share for _, share in done):.0f}"'
    parts = "".join(f'<div style="width:{share:.1%};height:100%;background:{color}"></div>' for color, share in done)
    return (
        '<div style="display:flex;flex-wrap:wrap;align-items:center;gap:4px 8px;line-height:1.7">'
        f'{mark}<span style="flex:0 0 80px">{badge(state)}</span>'
        f'<b {look}><span style="{ONE_LINE}">{start}</span><span>{end}</span></b>'
        f'<span {bar} style="display:flex;flex:0 0 100px;height:14px;background:{TRACK}">{parts}</span></div>'
    )


SURE_S = 5.0
"""Seconds in which a second click stops all runs of a group."""


class GroupRow:
    """Runs of a sweep, of a grid, or seeds, as one row: an arrow that opens it, their states, their best, one button.

    The button stops all that train, after a second click, and no further run of their queue begins.
    """

    def __init__(self, runs: Sequence[Run], on_arrow: Callable[[], None], name_px: int) -> None:
        self._runs, self._name_px = runs, name_px
        self._asked_at: float | None = None
        self._training = 0
        self._head = widgets.HTML()
        self._facts = widgets.HTML(layout={"flex": "1 1 280px", "min_width": "0", "margin": "0 0 0 4px"})
        self.arrow = widgets.Button(layout={**fixed_width(28), "padding": "0"})
        self.arrow.on_click(lambda _: on_arrow())
        self.button = widgets.Button(icon="stop", layout=fixed_width(110))
        self.button.on_click(self._on_click)
        respond_while_busy(self.arrow, self.button)
        self.box = widgets.HBox(
            (self.arrow, self._head, self.button, self._facts),
            layout={"align_items": "center", "flex_flow": "row wrap", "flex": "0 0 auto"},
        )

    def show(self, fold: Fold, snapshots: Sequence[Snapshot], is_open: bool) -> None:
        """Update the row from the snapshots of its runs."""
        many_runs = f"{len(snapshots)} runs of {fold.group.name}"
        self.arrow.icon = "caret-down" if is_open else "caret-right"
        self.arrow.tooltip = f"{'Fold' if is_open else 'Show'} the {many_runs}"
        done = _done(snapshots)
        name = (fold.group.name, fold.group.name)
        mark = "<span style='width:12px'></span>" if is_open else swatch_of(snapshots[0])
        self._head.value = head_html(mark, _most_urgent(snapshots), name, done, self._name_px)
        facts = html.escape(_describe_fold(fold, snapshots))
        self._facts.value = f'<span title="{facts}" style="{ONE_LINE};font-size:12px">{facts}</span>'
        self._training = training = sum(not snapshot.status.final for snapshot in snapshots)
        self.button.disabled = not training
        self.button.description = f"Stop {training}?" if self._is_asked else "Stop all" if training else "Ended"
        self.button.icon = "stop" if training else ""
        self.button.tooltip = f"{self.button.description} {many_runs}: write checkpoints and end them"

    @property
    def _is_asked(self) -> bool:
        return self._asked_at is not None and time.monotonic() - self._asked_at < SURE_S

    def _on_click(self, _: Any) -> None:
        if not self._is_asked:
            self._asked_at = time.monotonic()
            self.button.description = f"Stop {self._training}?"
            return
        self._asked_at = None
        self.button.description, self.button.disabled = "Stopping …", True
        for run in self._runs:
            stop_queue_of(run)
            if not run.status.final:
                run.stop()


def _done(snapshots: Sequence[Snapshot]) -> list[tuple[str, float]]:
    """Return the colours of the states of some runs, each with its share of all their steps that are done."""
    shares: dict[str, float] = {}
    for snapshot in snapshots:
        color = state_color(_state_of(snapshot))
        shares[color] = shares.get(color, 0.0) + snapshot.progress / len(snapshots)
    return sorted(shares.items(), key=lambda pair: list(STATE_COLORS.values()).index(pair[0]), reverse=True)


def _most_urgent(snapshots: Sequence[Snapshot]) -> str:
    """Return in words the state of a run that trains, else of one that failed, else of the first."""
    at_work = next((each for each in snapshots if not each.status.final), None)
    failed = next((each for each in snapshots if each.status.state == "failed"), None)
    return _state_of(at_work or failed or snapshots[0])


def _describe_fold(fold: Fold, snapshots: Sequence[Snapshot]) -> str:
    """Return in words the time that the last of some runs needs, what is best of them, and their states."""
    left = max((each.eta_s or -1 for each in snapshots), default=-1)
    states = Counter(_state_of(snapshot).rpartition(", ")[2] for snapshot in snapshots)
    counted = ", ".join(f"{number} {state}" for state, number in states.most_common())
    kind = "seeds" if fold.group.of == "seeds" else f"runs of a {fold.group.of}"
    parts = [f"{time_left(left)} left" if left >= 0 else "", fold.words, f"{len(snapshots)} {kind}: {counted}"]
    return " · ".join(filter(None, parts))


def fixed_width(width_px: int) -> dict[str, str]:
    """Return the layout of a control that keeps its width in a row."""
    return {"width": f"{width_px}px", "flex": "0 0 auto"}


def swatch(index: int) -> str:
    """Return a small mark in a run's colour as HTML; runs of equal colours have marks of different shapes."""
    color, again = theme.series_color(index), index // len(theme.PALETTE)
    look = f"border-radius:{2 if again % 4 < 2 else 6}px;border:3px solid {color}"
    fill = color if again % 2 == 0 else "white"
    size = "display:inline-block;box-sizing:border-box;width:12px;height:12px"
    return f"<span style='{size};background:{fill};{look}'></span>"


def swatch_of(snapshot: Snapshot) -> str:
    """Return the mark of a run, in the colour that its curves have."""
    return swatch(snapshot.look.index if snapshot.look is not None else 0)


def _state_of(snapshot: Snapshot) -> str:
    loss = float(snapshot.history.last("loss")[0]) if len(snapshot.history) else None
    return state_in_words(snapshot.status.state, snapshot.step, loss)


def badge(state: str) -> str:
    """Return a state in words as a coloured pill, which is red and says `not finite` for such a loss."""
    pill = f"background:{state_color(state)};color:white;border-radius:8px;padding:1px 8px;white-space:nowrap"
    look = f"{pill};font-size:11px;font-weight:600"
    return f'<span title="{html.escape(state)}" style="{look}">{html.escape(state.rpartition(", ")[2])}</span>'


def name_width(names: Sequence[str]) -> int:
    """Return the width in pixels of the longest name in bold, between 90 and 320."""
    return min(320, max(90, 16 + round(7.6 * max(map(len, names), default=0))))


def rows_html(snapshots: Sequence[Snapshot], full_names: Sequence[str], folds: Sequence[Fold] = ()) -> str:
    """Return the rows of all runs as static HTML, those of a fold below its own; a full name shows on hover."""
    lines = [
        (
            Html(swatch_of(snapshot)),
            Html(badge(_state_of(snapshot))),
            Html(f"<b title='{html.escape(name)}'>{html.escape(snapshot.name)}</b>"),
            _describe(snapshot),
        )
        for snapshot, name in zip(snapshots, full_names, strict=True)
    ]
    of = {index: fold for fold in folds for index in fold.members}
    look = "text-align:left;padding:2px 12px 2px 0"
    parts = []
    for _, together in itertools.groupby(in_rows(range(len(snapshots)), of), lambda index: id(of.get(index))):
        indices = list(together)
        table = html_table((), [lines[index] for index in indices], look, attributes='style="margin:0 0 4px 0"')
        if (fold := of.get(indices[0])) is not None:
            own = [snapshots[index] for index in indices]
            head = f"{swatch_of(own[0])} {badge(_most_urgent(own))} <b>{html.escape(fold.group.name)}</b> "
            said = head + html.escape(_describe_fold(fold, own))
            table = f"<details><summary>{said}</summary>{table}</details>"
        parts.append(table)
    return f'<div class="{ROWS_CLASS}" style="font-size:12px">{"".join(parts)}</div>{failures_html(snapshots)}'


def in_rows(indices: Iterable[int], of: Mapping[int, Fold]) -> list[int]:
    """Return runs in the order of their rows: those of a fold stand together, where its first is."""
    ordered = (of[index].members if index in of else (index,) for index in indices)
    return list(dict.fromkeys(itertools.chain.from_iterable(ordered)))


def failures_html(snapshots: Sequence[Snapshot]) -> str:
    """Return the errors of the failed runs as HTML; empty if none failed."""
    failures = "".join(f"<div>{snapshot.failure_html}</div>" for snapshot in snapshots if snapshot.failure is not None)
    return failures and f'<div style="border-left:3px solid {theme.ALERT};padding:4px 10px">{failures}</div>'


REFRESH_S = 0.1
"""Seconds between two drawings of what the runs write."""
MOST_MAPS = 4
"""Largest number of runs whose norms by layer are drawn."""
AT_ONCE_POINTS = 1_000_000
"""Number of steps of all runs together up to which panels are drawn with the curves; else they come a moment later."""
LIST_PX = 480
"""Largest height of the rows, so that the curves of many runs are not far below them."""
PANELS_AFTER_ZOOM_S = 0.3
"""Seconds by which the panels follow a zoom later than the curves: the page draws one thing at a time."""


class Live(LiveWidget):
    """A dashboard, as `live` returns it. `close()` ends it; the runs go on."""

    def __init__(self, runs: Sequence[Run], labels: Sequence[str], settings: CurveSettings) -> None:
        folder = runs_root()
        places = [run.name if run.path.parent == folder else str(run.path) for run in runs]
        super().__init__(REFRESH_S, f"wb.live({places})")
        self._runs, self._labels = runs, labels
        self._readers = [RunReader(run.path) for run in runs]
        self._groups = groups_of(runs)
        ids = {group.id for group in self._groups if group is not None}
        self._open = ids if len(runs) <= theme.MAX_INSIDE else set[str]()
        """Groups whose runs have rows and colours of their own."""
        self._snapshots = map_in_threads(self._read, range(len(runs)))
        self._drawn_state: tuple[Any, ...] | None = None
        self._arranged: frozenset[str] | None = None
        self._zoomed_at: float | None = None
        self._remaining: widgets.VBox | None = None
        self._name_px = name_width([*labels, *(group.name for group in self._groups if group is not None)])
        self._rows: dict[int, DashboardRow] = {}
        self._group_rows: dict[str, GroupRow] = {}
        self._list = widgets.VBox(layout={"max_height": f"{LIST_PX}px", "overflow": "auto"})
        self._controls = Controls(settings, self.wake)
        self._key, self._texts, self._failures = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._curves = widgets.VBox()
        self._arrange()
        self._panels = LivePanelsFigure()
        self._norms = NormsMaps(runs, self._labels)
        self._refresh(with_panels=sum(len(snapshot.history) for snapshot in self._snapshots) <= AT_ONCE_POINTS)
        above = (self._list, self._controls.box, self.hider, self.note, self._curves, self._key, self._texts)
        self.children = (*above, self._panels.box, self._norms.box, self._failures)
        self.follow()

    @property
    def figure(self) -> Figure:
        """The loss curves as they were last drawn."""
        return self._loss.figure

    def _read(self, index: int) -> Snapshot:
        return replace(self._readers[index].read(), name=self._labels[index])

    def has_news(self) -> bool:
        """Return True if a run has written events, or if the panels have yet to follow a zoom."""
        return self._panels_are_due() or any(reader.has_grown() for reader in self._readers)

    def is_over(self) -> bool:
        """Return True if all runs have ended."""
        return all(run.status.final for run in self._runs)

    def _panels_are_due(self) -> bool:
        return self._zoomed_at is not None and time.monotonic() - self._zoomed_at >= PANELS_AFTER_ZOOM_S

    def update(self) -> bool:
        """Read and draw what the runs have written; return True if all have ended."""
        self._snapshots = [
            last if last.status.final and not self._readers[index].has_grown() else self._read(index)
            for index, last in enumerate(self._snapshots)
        ]
        self._arrange()
        self._refresh()
        return self._all_ended()

    def _all_ended(self) -> bool:
        return all(snapshot.status.final for snapshot in self._snapshots)

    def _arrange(self) -> None:
        """Fold the runs of groups that are not open; draw the curves anew if other groups are open than before."""
        is_open = frozenset(self._open)
        self._folds = folds_of(self._snapshots, self._groups)
        self._snapshots = with_looks(self._snapshots, [each for each in self._folds if each.group.id not in is_open])
        if is_open != self._arranged:
            self._arranged, self._drawn_state = is_open, None
            self._loss = LiveLossFigure(self._snapshots, self._controls.settings, self.wake)
            old, self._curves.children = self._curves.children, (self._loss.widget,)
            close_widgets(list(old))

    def _show_rows(self) -> None:
        of, boxes = {index: fold for fold in self._folds for index in fold.members}, []
        for index in in_rows(range(len(self._runs)), of):
            fold = of.get(index)
            if fold is not None and index == fold.members[0]:
                boxes.append(self._show_group(fold))
            if fold is None or fold.group.id in self._open:
                if index not in self._rows:
                    row = DashboardRow(self._readers[index], self._follow_again, self._name_px)
                    row.box.layout.margin, row.box.layout.flex = "0" if fold is None else "0 0 0 32px", "0 0 auto"
                    self._rows[index] = row
                snapshot = self._snapshots[index]
                if fold is not None and len(fold.settings) > 1 and index in fold.settings.get(fold.best or (), ()):
                    snapshot = replace(snapshot, name=f"★ {snapshot.name}")
                self._rows[index].show(snapshot)
                boxes.append(self._rows[index].box)
        if list(self._list.children) != boxes:
            self._list.children = boxes

    def _show_group(self, fold: Fold) -> widgets.HBox:
        if fold.group.id not in self._group_rows:
            runs = [self._runs[index] for index in fold.members]
            self._group_rows[fold.group.id] = GroupRow(runs, partial(self._toggle, fold.group.id), self._name_px)
        row = self._group_rows[fold.group.id]
        row.show(fold, [self._snapshots[index] for index in fold.members], fold.group.id in self._open)
        return row.box

    def _toggle(self, group: str) -> None:
        self._open = self._open ^ {group}
        if self.following:
            self.wake()
        else:
            self._show_rows()

    def _refresh(self, with_panels: bool = True) -> None:
        self._show_rows()
        self._failures.value = failures_html(self._snapshots)
        settings = self._controls.settings
        points = tuple((len(s.history), s.step, s.marks, s.look) for s in self._snapshots)
        before, window = self._drawn_state, self._loss.window
        if (settings, window, points) != before:
            self._loss.draw(self._snapshots, settings)
            key = self._loss.key
            look = f"color:{theme.MUTED_CSS};display:block;margin-left:64px;line-height:1.5"
            self._key.value = f'<small style="{look}">{key or ""}</small>'
            self._key.layout.display = None if key else "none"
        self._norms.draw()
        self._texts.value = samples_at(self._snapshots, self._loss.hovered_step)
        if before is not None and window != before[1]:
            self._zoomed_at = time.monotonic()
        if with_panels and (self._all_ended() or self._zoomed_at is None or self._panels_are_due()):
            self._zoomed_at = None
            now = before is None or settings != before[0] or self._all_ended()
            self._panels.draw(self._snapshots, settings, self._loss.window, now)
        self._drawn_state = (settings, self._loss.window, points)  # drawing over another axis ends a zoom

    def twin(self) -> tuple[Any, ...]:
        """Return the rows of the runs with their curves and panels."""
        names = [reader.name for reader in self._readers]
        rows = rows_html(self._snapshots, names, self._folds) + samples_table(self._snapshots)
        if not self._in_a_hurry:
            rows += self._norms.pictures()
        settings = self._controls.settings
        panels = None if self._panels.figure is None else self.bundle(self._panels.figure)
        if not self._all_ended():
            if not any(snapshot.step for snapshot in self._snapshots):
                return (rows,)
            figure = self._loss.static_figure(self._snapshots, settings)
            figure.update_layout(title=theme.title("Loss of each run", "as it stood when the notebook was saved"))
            figure.update_layout(margin={"t": 78}, height=figure.layout.height + 54)
            return rows, self.bundle(figure), panels
        curves = [snapshot.curve for snapshot in self._snapshots]
        x, _ = shared_axis(curves, settings.x)
        loss = loss_curves(curves, x, settings.smoothing, log_y=settings.log_y, log_x=settings.log_x)
        return rows, self.bundle(loss), panels

    def remains(self) -> dict[str, Any]:
        """Return the rows with their buttons where a run can be resumed, and for a page without a kernel its call."""
        pairs = zip(self._snapshots, self._readers, strict=True)
        names = [reader.name for snapshot, reader in pairs if snapshot.resumable]
        if not names:
            return super().remains()
        if self._remaining is None:
            self._remaining = widgets.VBox([self._list, widgets.HTML(HIDE_ROWS, layout={"display": "none"})])
            self._remaining.add_class(f"{WIDGET_CLASS}-rows")
        calls = "".join(f"<div><code>wb.load_run({html.escape(repr(name))}).resume()</code></div>" for name in names)
        said = f"{calls}continues from the last checkpoint."
        return {**self._remaining._repr_mimebundle_(), "text/html": said}

    def _follow_again(self) -> None:
        """Show and update the dashboard again after a run was resumed, if it had ended."""
        if not self.following:
            self._snapshots = [self._read(index) for index in range(len(self._readers))]
            self._arrange()
            self._refresh()
            self.twins.restore()
        self.follow()


class Controls:
    """The controls for x axis, smoothing and logarithmic axes; each use of one calls `on_change`."""

    def __init__(self, settings: CurveSettings, on_change: Callable[[], None]) -> None:
        names = [(axis.label, name) for name, axis in X_AXES.items()]
        self._x = widgets.Dropdown(options=names, value=settings.x, description="x axis", layout=fixed_width(220))
        ends = {"min": 0.0, "max": 0.1, "step": 0.005, "readout_format": ".1%", "continuous_update": False}
        look = {"description": "smoothing", "layout": fixed_width(300)}
        self._smoothing = widgets.FloatSlider(value=settings.smoothing, **ends, **look)
        self._log_x = widgets.ToggleButton(
            value=settings.log_x, description="log x", tooltip="log x: a logarithmic x axis", layout=fixed_width(80)
        )
        self._log_y = widgets.ToggleButton(
            value=settings.log_y,
            description="log loss",
            tooltip="log loss: a logarithmic y axis",
            layout=fixed_width(80),
        )
        controls = (self._x, self._smoothing, self._log_x, self._log_y)
        for control in controls:
            control.observe(lambda _: on_change(), names="value")
        respond_while_busy(*controls)
        self.box = widgets.HBox(controls, layout={"flex_flow": "row wrap"})

    @property
    def settings(self) -> CurveSettings:
        """The settings that the controls show."""
        return CurveSettings(self._x.value, self._smoothing.value, self._log_x.value, self._log_y.value)


@checked_arguments
def live(runs: FewRuns, x: str = "tokens", smoothing: float = SMOOTHING) -> Live:
    """Return a dashboard that follows runs while they train, whichever kernel launched them.

    Show it as the last line of a cell. When all runs have ended, plain figures replace it; a saved notebook keeps them.

    Args:
        runs: one run or several, as handles, names or directories.
        x: the x axis that is shown first: `step`, `tokens`, `samples`, `time`, `flops` or `gpu_hours`.
        smoothing: width of the moving average as a share of the longest run.

    Raises `UnknownParameter` for an x axis that does not exist, and `InvalidArgument` without a run.

    Examples:
        >>> dashboard = wb.live(runs, x="step")
        >>> dashboard.close()
    """
    check_axis(x)
    check_smoothing(smoothing)
    followed = load_runs(runs)
    return Live(followed, distinct_names(followed), CurveSettings(x, smoothing))


def samples_at(snapshots: Sequence[Snapshot], step_of: Callable[[int], float]) -> str:
    """Return the last samples of each run up to a step, which `step_of` gives by the index of the run; as HTML."""
    parts = []
    for index, snapshot in enumerate(snapshots):
        if snapshot.look is not None and snapshot.look.folded and not snapshot.look.best:
            continue
        written = snapshot.texts.at(step_of(index)) or next(iter(snapshot.texts), None)
        if written is not None:
            parts.append(_titled(snapshot.name, len(snapshots), table_html([written])))
    note = (
        f"<small style='color:{theme.MUTED_CSS}'>point at the curves to read what was written at another step</small>"
    )
    return "".join([*parts, note]) if parts else ""


def samples_table(snapshots: Sequence[Snapshot]) -> str:
    """Return the samples of each run at a few of its steps, for a page without a kernel; as HTML."""
    shown = [(snapshot.name, snapshot.texts) for snapshot in snapshots if len(snapshot.texts)]
    return "".join(_titled(name, len(snapshots), texts._repr_html_()) for name, texts in shown)


def _titled(name: str, runs: int, table: str) -> str:
    return f"<b>{html.escape(name)}</b>{table}" if runs > 1 else table


class NormsMaps:
    """The maps of norms by layer of the runs that record them, each drawn anew when its run has recorded a step."""

    def __init__(self, runs: Sequence[Run], labels: Sequence[str]) -> None:
        recording = [(run, label) for run, label in zip(runs, labels, strict=True) if run.records_norms]
        self._runs = [(NormsTail(run.directory.events), label) for run, label in recording[:MOST_MAPS]]
        self._plots = [Plot(layout={"display": "none"}) for _ in self._runs]
        self._figures: list[Figure | None] = [None] * len(self._runs)
        self._drawn = [0] * len(self._runs)
        self.box = widgets.VBox(self._plots)

    def draw(self) -> None:
        """Draw what was recorded since the last call."""
        for at, (tail, label) in enumerate(self._runs):
            found = tail.read()
            last = int(found.step[-1]) if len(found) else 0
            if last != self._drawn[at]:
                self._drawn[at] = last
                self._figures[at] = draw_norms(found, label) if last else None
                self._plots[at].layout.display = None if last else "none"
                if (figure := self._figures[at]) is not None:
                    self._plots[at].show(figure)

    def pictures(self) -> str:
        """Return the maps as pictures in HTML, for a page without a kernel."""
        return "".join(picture_html(figure) for figure in self._figures if figure is not None)


# Sweeps and measured grids while their runs train have tables, figures, and a button for each run at work.

SWEEP_S, GRID_S = 0.5, 1.0
"""Seconds between two looks at the directory of a sweep, and of a grid."""
MAX_ROWS = 50
"""Largest number of configurations in the table; the best come first."""


class LiveSweep(LiveWidget):
    """A sweep that updates itself until it has ended. `close()` removes it from the page; the sweep goes on."""

    def __init__(self, sweep: Sweep, refresh_s: float = SWEEP_S) -> None:
        super().__init__(refresh_s, f"wb.sweeps.load_sweep({str(sweep.path)!r})")
        self._sweep = sweep
        self._readers: dict[tuple[Path, int], tuple[RunReader, DashboardRow]] = {}
        self._ended: set[Path] = set()
        self._losses: dict[Path, Losses] = {}
        self._rows: Sequence[Configuration] = ()
        self._head, self._foot = widgets.HTML(), widgets.HTML()
        self._at_work = widgets.VBox()
        self._table = widgets.HTML(layout={"flex": "1 1 360px", "margin": "0 16px 0 0"})
        self._heat_map, self._curves = Plot(layout={"flex": "1 1 460px", "min_width": "0"}), Plot()
        results = widgets.HBox((self._table, self._heat_map), layout={"flex_flow": "row wrap"})
        self.children = (self._head, self._at_work, self._curves, results, self._foot, self.note, self.hider)
        self.update()
        self.follow()

    def update(self) -> bool:
        """Read the sweep's directory and draw what it holds; return True if the sweep has ended."""
        ended = self.is_over()  # asked before the last look at the results
        self._rows = self._sweep.rows()
        for row in self._rows:
            for run in row.runs:
                if run not in row.at_work and run.path not in self._ended:
                    self._losses[run.path] = read_losses(run)
                    self._ended.add(run.path)
        at_work = [(row, run) for row in self._rows for run in row.at_work if run.directory.experiment.exists()]
        self._ended.difference_update(run.path for _, run in at_work)  # `resume` goes on with runs that had ended
        boxes = [self._read(row, run) for row, run in at_work]
        boxes = [box for box in boxes if box.layout.display != "none"]
        if list(self._at_work.children) != boxes:
            self._at_work.children = boxes
        self._head.value = f"<b>{html.escape(self._sweep.headline())}</b>"
        self._foot.value = _small(self._sweep.footline())
        self._table.value = sweep_table(self._sweep, self._rows)
        heat_map, curves = self._figures()
        self._heat_map.layout.display = "none" if len(self._rows) < 2 else None  # one cell compares nothing
        self._heat_map.show(heat_map)
        self._curves.show(curves)
        return ended

    def is_over(self) -> bool:
        """Return True if the sweep has ended."""
        return not self._sweep.alive

    def _read(self, row: Configuration, run: Run) -> widgets.HBox:
        """Read a run at work, and return its row with the button that stops it.

        A run that was set aside and begun again has another reader. One that has ended, but whose end the sweep has not
        noted, has no button.
        """
        key = run.path, run.path.stat().st_ino
        if key not in self._readers:
            reader, width_px = RunReader(run.path), name_width([_name(each, run) for each in self._rows])
            self._readers[key] = reader, DashboardRow(reader, name_px=width_px)  # rows have one width
        reader, shown = self._readers[key]
        snapshot = replace(reader.read(), name=_name(row, run), look=Look(row.index))
        shown.show(snapshot)
        shown.box.layout.display = "none" if snapshot.status.final else None
        assert snapshot.evaluations is not None
        self._losses[run.path] = snapshot.history, snapshot.evaluations
        return shown.box

    def _figures(self) -> tuple[go.Figure, go.Figure]:
        return sweep_figures(self._sweep, self._rows, lambda run: self._losses.get(run.path) or read_losses(run))

    def twin(self) -> tuple[Any, ...]:
        """Return the table, the heat map and the curves."""
        figures = self._figures()[len(self._rows) < 2 :]
        return sweep_html(self._sweep, self._rows), *map(self.bundle, figures)


def _name(row: Configuration, run: Run) -> str:
    """Return the values of a configuration, and the seed of a run, in words."""
    return ", ".join(f"{name} {value}" for name, value in {**row.values, "seed": run.config["seed"]}.items())


def sweep_figures(sweep: Sweep, rows: Sequence[Configuration], read: Any = read_losses) -> tuple[go.Figure, go.Figure]:
    """Return the heat map of a sweep and its curves."""
    x, y = axes_of_heat_map(list(sweep.axes))
    return draw_heat_map(sweep, rows, x, y), draw_seed_bands(sweep, rows, read)


def sweep_html(sweep: Sweep, rows: Sequence[Configuration]) -> str:
    """Return state, table and notes of a sweep as HTML."""
    head = f"<b>{html.escape(sweep.headline())}</b>"
    return f"<div>{head}{sweep_table(sweep, rows)}{_small(sweep.footline())}</div>"


def sweep_table(sweep: Sweep, rows: Sequence[Configuration]) -> str:
    """Return the best configurations as an HTML table, each with the colour of its curve."""
    head, *cells = sweep.cells(rows[:MAX_ROWS])
    keys = [Html(swatch(row.index)) for row in rows]
    lines = [(key, *texts) for key, texts in zip(keys, cells, strict=False)]
    look = "style='margin:4px 0;font-size:12px;white-space:nowrap'"
    table = html_table(("", *head), lines, "text-align:left;padding:1px 12px 1px 0", attributes=look)
    more = _small(f"and {len(rows) - MAX_ROWS} other configurations") if len(rows) > MAX_ROWS else ""
    return f"<div style='max-height:360px;overflow:auto;line-height:1.4'>{table}{more}</div>"


def _small(text: str) -> str:
    return f"<div style='font-size:12px;line-height:1.5'>{html.escape(text)}</div>"


class LiveGrid(LiveWidget):
    """A measured grid that fills as its cells end. `close()` removes it from the page; the measurement goes on."""

    def __init__(self, measured: MeasuredGrid) -> None:
        super().__init__(GRID_S, f"wb.sweeps.load_grid({str(measured.path)!r})")
        self._measured = measured
        self._words, self._plot = widgets.HTML(), Plot()
        self._seen: tuple[int, int] | None = None
        self.children = (self._plot, self._words, self.note, self.hider)
        self.update()
        self.follow()

    def update(self) -> bool:
        """Draw the grid when a cell has begun or ended; return True if the measurement has ended."""
        ended = self.is_over()  # asked before the last look at the results
        seen = len(self._measured.runs), len(self._measured.results())
        if seen != self._seen or ended:  # other looks would take time from the steps that are measured
            self._seen = seen
            self._words.value = self._measured._repr_html_()
            self._plot.show(predictions(self._measured))
        return ended

    def is_over(self) -> bool:
        """Return True if the measurement has ended."""
        return not self._measured.alive

    def twin(self) -> tuple[Any, ...]:
        """Return the table and the figure."""
        return self._words.value, self.bundle(predictions(self._measured))


def show_queue(queue: Sweep | MeasuredGrid) -> None:
    """Display a queue in a notebook: a widget that updates itself while the queue is at work, else plain outputs."""
    if queue.alive:
        (LiveSweep(queue) if isinstance(queue, Sweep) else LiveGrid(queue))._ipython_display_()
        return
    if isinstance(queue, Sweep):
        rows = queue.rows()
        page, shown = sweep_html(queue, rows), [*sweep_figures(queue, rows)][len(rows) < 2 :]
    else:
        page, shown = queue._repr_html_(), [predictions(queue)]
    display(HTML(page))
    for figure in shown:
        display(mimebundle(figure), raw=True)
