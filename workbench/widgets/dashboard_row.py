"""One run as a row of a dashboard: state, progress, a button that stops or resumes the run, and facts."""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets

from workbench.errors import first_line
from workbench.figures import theme
from workbench.runs.status import state_in_words
from workbench.tables import Html, html_table
from workbench.widgets.live_widget import respond_while_busy
from workbench.widgets.run_reader import RunReader, Snapshot
from workbench.widgets.static_twin import ROWS_CLASS

STATE_COLORS = {
    "queued": "#6B7280",
    "starting": "#9A6B00",
    "running": "#0072B2",
    "stalled": "#A04000",
    "finished": "#00785A",
    "stopped": "#5B6472",
    "failed": theme.ALERT,
}
TRACK = "var(--jp-layout-color2, #EEEEEE)"
"""Colour of what a run still has to do."""
ONE_LINE = "display:block;overflow:hidden;text-overflow:ellipsis;white-space:nowrap"
"""CSS of a text that ends in an ellipsis where it does not fit."""


class DashboardRow:
    """Badge, name, progress bar, button and facts of one run.

    The button stops a run that trains, and resumes a run that ended early with a checkpoint; `on_resumed` is called
    when the run trains again.
    """

    def __init__(
        self, reader: RunReader, index: int, on_resumed: Callable[[], None] | None = None, name_px: int = 210
    ) -> None:
        self._reader, self._on_resumed = reader, on_resumed
        self._busy = ""
        self._swatch, self._name_px = swatch(index), name_px
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
    def name(self) -> str:
        """The name of the run."""
        return self._reader.name

    @property
    def offers_resume(self) -> bool:
        """True if the button resumes the run."""
        return bool(self.button.description == "Resume")

    def show(self, snapshot: Snapshot) -> None:
        """Update the row."""
        state = snapshot.status.state
        name = f'title="{html.escape(self.name)}" style="{ONE_LINE};flex:0 0 {self._name_px}px;font-size:12px"'
        done = f"width:{snapshot.progress:.1%};height:100%;background:{STATE_COLORS[state]}"
        self._head.value = (  # one widget, because each costs the kernel and the page some milliseconds
            '<div style="display:flex;flex-wrap:wrap;align-items:center;gap:4px 8px;line-height:1.7">'
            f'{self._swatch}<span style="flex:0 0 72px">{badge(_state_of(snapshot))}</span>'
            f"<b {name}>{html.escape(snapshot.name)}</b>"
            f'<span style="flex:0 0 100px;height:14px;background:{TRACK}"><div style="{done}"></div></span></div>'
        )
        facts = html.escape(_describe(snapshot))
        self._facts.value = f'<span title="{facts}" style="{ONE_LINE};font-size:12px">{facts}</span>'
        if self._busy == "Stopping …" and snapshot.status.final:
            self._busy = ""
        if self._busy:
            return
        if not snapshot.status.final:
            self._set_button("Stop", "stop", "Write a checkpoint and end this run")
        elif snapshot.resumable:
            self._set_button("Resume", "play", "Continue from the last checkpoint")
        else:
            self._set_button(state.capitalize(), disabled=True)

    def _set_button(self, description: str, icon: str = "", tooltip: str = "", disabled: bool = False) -> None:
        self.button.description, self.button.icon = description, icon
        self.button.tooltip, self.button.disabled = tooltip, disabled

    def _on_click(self, _: Any) -> None:
        if self.button.description == "Stop":
            self._become_busy("Stopping …")
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


def _state_of(snapshot: Snapshot) -> str:
    loss = float(snapshot.history.last("loss")[0]) if len(snapshot.history) else None
    return state_in_words(snapshot.status.state, snapshot.step, loss)


def badge(state: str) -> str:
    """Return a state in words as a coloured pill, which is red and says `not finite` for such a loss."""
    word = state.rpartition(", ")[2]
    return (
        f'<span title="{html.escape(state)}" style="background:{STATE_COLORS.get(word, theme.ALERT)};color:white;'
        f'border-radius:8px;padding:1px 8px;font-size:11px;font-weight:600">{html.escape(word)}</span>'
    )


def name_width(names: Sequence[str]) -> int:
    """Return the width in pixels of the longest name in bold, between 90 and 320."""
    return min(320, max(90, 16 + round(7.6 * max(map(len, names), default=0))))


def rows_html(snapshots: Sequence[Snapshot], full_names: Sequence[str]) -> str:
    """Return the rows of all runs as static HTML; a run's full name shows on hover."""
    rows = [
        (
            Html(swatch(index)),
            Html(badge(_state_of(snapshot))),
            Html(f"<b title='{html.escape(name)}'>{html.escape(snapshot.name)}</b>"),
            _describe(snapshot),
        )
        for index, (snapshot, name) in enumerate(zip(snapshots, full_names, strict=True))
    ]
    look = f'class="{ROWS_CLASS}" style="margin:0 0 4px 0;font-size:12px"'
    table = html_table((), rows, "text-align:left;padding:2px 12px 2px 0", attributes=look)
    return table + failures_html(snapshots)


def failures_html(snapshots: Sequence[Snapshot]) -> str:
    """Return the errors of the failed runs as HTML; empty if none failed."""
    failures = "".join(f"<div>{snapshot.failure_html}</div>" for snapshot in snapshots if snapshot.failure is not None)
    return failures and f'<div style="border-left:3px solid {theme.ALERT};padding:4px 10px">{failures}</div>'
