"""The runs of a folder as a table that keeps itself up to date, with a button to attach to, stop or resume each."""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets

from workbench.figures import theme
from workbench.runs.run import HEADER, Run, RunTable, runs
from workbench.widgets.dashboard import live
from workbench.widgets.rows import Resume, badge, fixed, heard_while_busy
from workbench.widgets.saved import Shown, hides_its_twin

REFRESH_S = 1.0
FOLLOW_S = 1800.0
"""So long after the last run has ended, a plain table takes the place: a saved notebook cannot show buttons."""
SAVED_S = 30.0
"""Between two copies of the table for a notebook that is saved now."""
SHOWN = 20
"""Runs with a row of their own; older ones are counted below."""
WIDTHS_PX = (230, 84, 120, 70, 80, 70, 100, 90, 110)
"""Of the table's columns, those of `HEADER`."""
STATE = HEADER.index("state")


class LiveTable(widgets.VBox):
    """Follows a `RunTable`: runs that start appear, each row has its buttons; `close()` ends it, the runs go on."""

    def __init__(self, table: RunTable, resume: Resume | None = None, refresh_s: float = REFRESH_S) -> None:
        self._table, self._resume, self._refresh_s = table, resume, refresh_s
        self._closed = threading.Event()
        self._rows: dict[str, _Row] = {}
        self._head = widgets.HBox(
            [*(_cell(f"<b>{name}</b>", width) for name, width in zip(HEADER, WIDTHS_PX, strict=True)), hides_its_twin()]
        )
        self._more = widgets.HTML()
        self._attached = widgets.VBox()
        self._shown: tuple[widgets.Widget, ...] = ()
        super().__init__(layout={"overflow": "auto"})
        self._showings: list[Shown] = []
        self._save_at = 0.0
        self._refresh()
        self._thread = threading.Thread(target=self._follow, name="workbench-runs", daemon=True)
        self._thread.start()

    @property
    def following(self) -> bool:
        """Whether the table still updates itself."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop following and take the table off the page; the runs go on."""
        self._closed.set()
        super().close()

    def attach(self, run: Run) -> None:
        """Show the run's dashboard below the table, in place of another's."""
        for child in self._attached.children:
            child.close()
        self._attached.children = (live(run, resume=self._resume),)

    def _follow(self) -> None:
        """The thread's whole life. It must not print: output of a thread lands in whichever cell runs."""
        ended_at: float | None = None
        while not self._closed.wait(self._refresh_s):
            try:
                self._refresh()
                if not all(run.status.final for run in self._table.runs[:SHOWN]):
                    ended_at = None
                elif ended_at is None:
                    ended_at = time.monotonic()
                elif time.monotonic() - ended_at > FOLLOW_S:
                    self.leave_plain_table()
            except Exception as error:  # the table must not look alive when it is not
                self._more.value = f"The table stopped updating ({html.escape(str(error))}); call runs again."
                return

    def _refresh(self) -> None:
        self._table = runs(self._table.root)
        shown = self._table.runs[:SHOWN]
        for run in shown:
            if run.name not in self._rows:
                self._rows[run.name] = _Row(run, self._resume, self.attach)
        rows = [self._rows[run.name] for run in shown]
        for row in rows:
            row.refresh()
        older = len(self._table) - len(shown)
        self._more.value = f"<small>and {older} older in {html.escape(str(self._table.root))}</small>" if older else ""
        children = (self._head, *(row.box for row in rows), self._more, self._attached)
        if self._shown != children:
            self.children = self._shown = children
        if time.monotonic() >= self._save_at:
            self._save_at = time.monotonic() + SAVED_S
            for showing in self._showings:
                showing.update(self._table._repr_html_())

    def _ipython_display_(self) -> None:
        self._showings.append(Shown(self, self._table._repr_html_()))

    def leave_plain_table(self) -> None:
        """Put a plain table in the widget's place, which a saved notebook keeps; the table follows no more."""
        self._closed.set()
        for showing in self._showings:
            showing.leave(self._table._repr_html_())


class _Row:
    """One run: a handle of its own, its cells and its buttons."""

    def __init__(self, run: Run, resume: Resume | None, attach: Any) -> None:
        self._run, self._resume, self._attach = run, resume, attach
        self._cells = [_cell("", width) for width in WIDTHS_PX]
        self._open = widgets.Button(description="Attach", layout=fixed(74), tooltip="Show its curves below")
        self._act = widgets.Button(description="Stop", layout=fixed(84))
        self._open.on_click(lambda _: self._attach(self._run))
        self._act.on_click(self._pressed)
        heard_while_busy(self._open, self._act)
        self._busy_until = 0.0
        self._last: Sequence[str] = ()
        self.box = widgets.HBox([*self._cells, self._open, self._act], layout={"align_items": "center"})

    def refresh(self) -> None:
        if self._last and self._last[STATE] in ("finished",):
            return
        status = self._run.status
        [cells] = RunTable(self._run.path.parent, (self._run,)).cells()
        for index, (cell, value) in enumerate(zip(self._cells, cells, strict=True)):
            cell.value = badge(value) if index == STATE else _clipped(value, WIDTHS_PX[index])
        self._last = cells
        if time.monotonic() > self._busy_until:
            self._offer(status.final)

    def _offer(self, final: bool) -> None:
        resumable = final and self._resume is not None and self._last[STATE] != "finished" and self._run.checkpoints
        self._act.description = "Resume" if resumable else "Stop"
        self._act.disabled = final and not resumable
        self._act.layout.visibility = "hidden" if self._act.disabled else "visible"

    def _pressed(self, _: Any) -> None:
        act, self._act.disabled = self._act.description, True
        self._busy_until = time.monotonic() + 5.0
        self._act.description = "…"
        threading.Thread(target=self._do, args=(act,), name="workbench-run", daemon=True).start()

    def _do(self, act: str) -> None:
        try:
            if act == "Stop":
                self._run.stop()
            elif act == "Resume" and self._resume is not None:
                self._resume(self._run)
        except Exception as error:  # the user reads why, in the row
            words = html.escape((str(error).strip().splitlines() or [type(error).__name__])[0])
            self._cells[-1].value = f'<span title="{words}" style="color:{theme.ALERT}">not resumed</span>'
            self._busy_until = time.monotonic() + 30.0


def _cell(value: str, width_px: int) -> widgets.HTML:
    return widgets.HTML(value, layout={**fixed(width_px), "margin": "0 4px 0 0"})


def _clipped(value: str, width_px: int) -> str:
    text = html.escape(value)
    style = (
        f"display:block;width:{width_px - 8}px;overflow:hidden;text-overflow:ellipsis;white-space:nowrap;font-size:12px"
    )
    return f'<span title="{text}" style="{style}">{text}</span>'
