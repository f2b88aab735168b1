"""The text that models write, beside their curves: at the step under the pointer, or as a table of several steps."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

from workbench.figures import theme
from workbench.runs.records.text_samples import table_html
from workbench.widgets.run_reader import Snapshot


def samples_at(snapshots: Sequence[Snapshot], step_of: Callable[[int], float]) -> str:
    """Return the last samples of each run up to a step, which `step_of` gives by the index of the run; as HTML."""
    parts = []
    for index, snapshot in enumerate(snapshots):
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
