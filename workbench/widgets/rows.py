"""One run as a row of a dashboard: state, progress, facts, and a button that stops or resumes it."""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets

from workbench.figures import theme
from workbench.runs.run import Run
from workbench.widgets.watch import Snapshot, Watch

STATE_COLORS = {
    "queued": "#6B7280",
    "starting": "#9A6B00",
    "running": "#0072B2",
    "finished": "#00785A",
    "stopped": "#5B6472",
    "failed": theme.ALERT,
}

Resume = Callable[[Run], Any]
"""Continues a run from its last checkpoint, in the same directory; `wb.resume` is one."""


ONE_LINE = "display:block;overflow:hidden;text-overflow:ellipsis;white-space:nowrap"


class RunRow:
    """Badge, name, progress bar, facts and button of one run.

    The button stops a run that trains and, where `resume` is given, resumes one that ended early with a
    checkpoint; `resumed` is called once it goes on.
    """

    def __init__(
        self,
        watch: Watch,
        color: str,
        resume: Resume | None = None,
        resumed: Callable[[], None] | None = None,
        name_px: int = 210,
    ) -> None:
        self._watch, self._resume, self._resumed = watch, resume, resumed
        self._busy = ""
        self._key = widgets.HTML(f'<span style="{swatch(color)}"></span>', layout=fixed(22))
        self._badge = widgets.HTML(layout=fixed(76))
        self._name = widgets.HTML(layout=fixed(name_px))
        self._bar = widgets.FloatProgress(value=0.0, min=0.0, max=1.0, layout=fixed(100))
        self._facts = widgets.HTML(layout={"flex": "1 1 280px", "min_width": "0", "margin": "0 0 0 10px"})
        self.button = widgets.Button(description="Stop", icon="stop", layout=fixed(110))
        self.button.on_click(self._pressed)
        heard_while_busy(self.button)
        self.box = widgets.HBox(
            (self._key, self._badge, self._name, self._bar, self._facts, self.button),
            layout={"align_items": "center", "flex_flow": "row wrap"},  # in a narrow window the facts go below
        )

    @property
    def name(self) -> str:
        return self._watch.name

    @property
    def offers_resume(self) -> bool:
        """Whether the button resumes the run."""
        return bool(self.button.description == "Resume")

    def show(self, snapshot: Snapshot) -> None:
        """Bring the row up to date."""
        state = snapshot.status.state
        self._badge.value = badge(state)
        name = html.escape(snapshot.name)
        self._name.value = f'<b title="{html.escape(self._watch.name)}" style="{ONE_LINE};font-size:12px">{name}</b>'
        self._bar.value = snapshot.progress
        self._bar.style.bar_color = STATE_COLORS[state]
        facts = html.escape(" · ".join(filter(None, (snapshot.facts, _news(snapshot)))))
        self._facts.value = f'<span title="{facts}" style="{ONE_LINE};font-size:12px">{facts}</span>'
        self._offer(snapshot)

    def _offer(self, snapshot: Snapshot) -> None:
        """What the button does now."""
        state, final = snapshot.status.state, snapshot.status.final
        if self._busy == "Stopping …" and final:
            self._busy = ""
        if self._busy:
            return
        if not final:
            self._set_button("Stop", "stop", "Write a checkpoint and end this run")
        elif snapshot.resumable and self._resume is not None:
            self._set_button("Resume", "play", "Continue from the last checkpoint")
        else:
            self._set_button(state.capitalize(), "", "", disabled=True)

    def _set_button(self, description: str, icon: str, tooltip: str, disabled: bool = False) -> None:
        self.button.description, self.button.icon = description, icon
        self.button.tooltip, self.button.disabled = tooltip, disabled

    def _pressed(self, _: Any) -> None:
        if self.button.description == "Stop":
            self._become_busy("Stopping …")
            self._watch.stop()
        elif self.button.description == "Resume":
            self._become_busy("Resuming …")
            threading.Thread(target=self._go_on, name="workbench-resume", daemon=True).start()

    def _become_busy(self, word: str) -> None:
        self._busy = word
        self._set_button(word, "", "", disabled=True)

    def _go_on(self) -> None:
        assert self._resume is not None
        try:
            self._resume(self._watch.run)
        except Exception as error:  # the user reads why, where the button was
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._facts.value = f'<span style="color:{theme.ALERT};font-size:12px">{html.escape(lines[0])}</span>'
            self._busy = ""
            self._set_button("Not resumed", "", str(error), disabled=True)
            return
        self._busy = ""
        if self._resumed is not None:
            self._resumed()


def _news(snapshot: Snapshot) -> str:
    """What the run says of its state, unless the rest of the row says it too."""
    message = snapshot.status.message
    known = snapshot.status.state in ("failed", "finished") or message.startswith("Stopped at step")
    return "" if known else message


def heard_while_busy(*controls: widgets.Widget) -> None:
    """Let controls be used while a cell runs; their callbacks then run in another thread than the cell's.

    JupyterLab addresses a widget's messages to a subshell of the kernel for that very reason, and ipykernel
    7.1 to 7.3 deliver them there. 7.4 delivers them to the loop that last published for the widget: the main
    one, which is busy. Where it does so, the address that JupyterLab wrote is restored.
    """
    for control in controls:
        if hasattr(control.comm, "_reply_subshell_for"):
            control.comm._reply_subshell_for = lambda _data, address: address


def fixed(width_px: int) -> dict[str, str]:
    """The layout of a control that keeps its width in a row."""
    return {"width": f"{width_px}px", "flex": "0 0 auto"}


def swatch(color: str) -> str:
    """Style of a small square in a run's colour."""
    return f"display:inline-block;width:11px;height:11px;border-radius:2px;background:{color}"


def badge(state: str) -> str:
    """A state as a coloured pill."""
    return (
        f'<span style="background:{STATE_COLORS[state]};color:white;border-radius:8px;padding:1px 8px;'
        f'font-size:11px;font-weight:600">{html.escape(state)}</span>'
    )


def name_width(names: Sequence[str]) -> int:
    """Pixels for the longest of these names in bold, within reason."""
    return min(320, max(90, 16 + round(7.6 * max(map(len, names), default=0))))


def rows_html(snapshots: Sequence[Snapshot], full_names: Sequence[str] | None = None) -> str:
    """The same rows without a widget, as they stood when this was written; `full_names` show on hover."""
    cell = 'style="text-align:left;padding:2px 12px 2px 0"'
    rows = "".join(
        f"<tr><td {cell}><span style='{swatch(theme.series_color(index))}'></span></td>"
        f"<td {cell}>{badge(shot.status.state)}</td>"
        f"<td {cell} title='{html.escape(name)}'><b>{html.escape(shot.name)}</b></td>"
        f"<td {cell}>{html.escape(' · '.join(filter(None, (shot.facts, _news(shot)))))}</td></tr>"
        for index, (shot, name) in enumerate(zip(snapshots, full_names or [s.name for s in snapshots], strict=True))
    )
    return f'<table style="margin:0 0 4px 0;font-size:12px">{rows}</table>{failures_html(snapshots)}'


def failures_html(snapshots: Sequence[Snapshot]) -> str:
    """The failed runs' own errors, or nothing."""
    found = [snapshot.failure_html for snapshot in snapshots if snapshot.failure is not None]
    if not found:
        return ""
    lines = "".join(f"<div>{text}</div>" for text in found)
    return f'<div style="border-left:3px solid {theme.ALERT};padding:4px 10px">{lines}</div>'
