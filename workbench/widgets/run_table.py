"""The runs of a folder as a table that updates itself, with buttons that open, stop or resume each run."""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets

from workbench.figures import theme
from workbench.runs.registry import HEADER, RunTable, list_runs
from workbench.runs.run import Run
from workbench.widgets.dashboard import live
from workbench.widgets.live_widget import LiveWidget
from workbench.widgets.run_row import ONE_LINE, badge, first_line, fixed_width, respond_while_busy

REFRESH_S = 1.0
"""Seconds between two updates of the table."""
FOLLOW_S = 1800.0
"""Seconds after the end of the last run at which a plain table replaces the widget."""
MAX_ROWS = 20
"""Largest number of runs with a row of their own; older runs are counted below."""
BUSY_S, ERROR_S = 5.0, 30.0
"""Seconds for which a pressed button, or the error that it met, stays on show."""
WIDTHS_PX = (230, 84, 120, 70, 80, 70, 100, 90, 110)
"""Widths of the columns in `HEADER`, in pixels."""
STATE = HEADER.index("state")


class LiveTable(LiveWidget):
    """The runs of a folder: runs that start appear, and each row has its buttons. `close()` leaves the runs alone."""

    def __init__(self, table: RunTable, refresh_s: float = REFRESH_S) -> None:
        super().__init__(refresh_s, layout={"overflow": "auto"})
        self._table = table
        self._rows: dict[str, _TableRow] = {}
        titles = [_cell(f"<b>{name}</b>", width) for name, width in zip(HEADER, WIDTHS_PX, strict=True)]
        self._head = widgets.HBox([*titles, self.hider])
        self._older = widgets.HTML()
        self._attached = widgets.VBox()
        self._shown: tuple[widgets.Widget, ...] = ()
        self._ended_at: float | None = None
        self.update()
        self.follow()

    def attach(self, run: Run) -> None:
        """Show the run's dashboard below the table, in place of another run's."""
        for child in self._attached.children:
            child.close()
        self._attached.children = (live(run),)

    def update(self) -> bool:
        """Read the folder; return True `FOLLOW_S` seconds after the end of the last run."""
        self._table = list_runs(self._table.root)
        newest = self._table.runs[:MAX_ROWS]
        for run in newest:
            if run.name not in self._rows:
                self._rows[run.name] = _TableRow(run, self.attach)
            self._rows[run.name].refresh()
        older = len(self._table) - len(newest)
        self._older.value = f"<small>and {older} older in {html.escape(str(self._table.root))}</small>" if older else ""
        boxes = [self._rows[run.name].box for run in newest]
        children = (self._head, *boxes, self.note, self._older, self._attached)
        if self._shown != children:
            self.children = self._shown = children
        if not all(run.status.final for run in newest):
            self._ended_at = None
            return False
        self._ended_at = self._ended_at or time.monotonic()
        return time.monotonic() - self._ended_at > FOLLOW_S

    def twin(self) -> tuple[Any, ...]:
        """Return the table as plain HTML."""
        return (self._table._repr_html_(),)


class _TableRow:
    """One run: its cells and its two buttons."""

    def __init__(self, run: Run, attach: Callable[[Run], None]) -> None:
        self._run = run
        self._cells = [_cell("", width) for width in WIDTHS_PX]
        self._attach = widgets.Button(description="Attach", layout=fixed_width(74), tooltip="Show its curves below")
        self._button = widgets.Button(description="Stop", layout=fixed_width(84))
        self._attach.on_click(lambda _: attach(run))
        self._button.on_click(self._on_click)
        respond_while_busy(self._attach, self._button)
        self._busy_until = 0.0
        self._values: Sequence[str] = ()
        self.box = widgets.HBox([*self._cells, self._attach, self._button], layout={"align_items": "center"})

    def refresh(self) -> None:
        """Update the cells and the button; a finished run no longer changes."""
        if self._values and self._values[STATE].startswith("finished"):
            return
        final = self._run.status.final
        [self._values] = RunTable(self._run.path.parent, (self._run,)).cells()
        for index, (cell, value) in enumerate(zip(self._cells, self._values, strict=True)):
            cell.value = badge(value) if index == STATE else _clipped(value, WIDTHS_PX[index])
        if time.monotonic() > self._busy_until:
            resumable = final and not self._values[STATE].startswith("finished") and bool(self._run.checkpoints)
            self._button.description = "Resume" if resumable else "Stop"
            self._button.disabled = final and not resumable
            self._button.layout.visibility = "hidden" if self._button.disabled else "visible"

    def _on_click(self, _: Any) -> None:
        action = self._run.stop if self._button.description == "Stop" else self._run.resume
        self._button.disabled, self._button.description = True, "…"
        self._busy_until = time.monotonic() + BUSY_S
        threading.Thread(target=self._do, args=(action,), name="workbench-run", daemon=True).start()

    def _do(self, action: Callable[[], Run]) -> None:
        try:
            action()
        except Exception as error:  # the row shows the reason: nobody sees what a thread raises
            reason = html.escape(first_line(error))
            self._cells[-1].value = f'<span title="{reason}" style="color:{theme.ALERT}">refused</span>'
            self._busy_until = time.monotonic() + ERROR_S


def _cell(value: str, width_px: int) -> widgets.HTML:
    return widgets.HTML(value, layout={**fixed_width(width_px), "margin": "0 4px 0 0"})


def _clipped(value: str, width_px: int) -> str:
    text = html.escape(value)
    return f'<span title="{text}" style="{ONE_LINE};width:{width_px - 8}px;font-size:12px">{text}</span>'
