"""Sharing of an executed notebook: a page that is interactive offline, and a notebook that shows without a kernel."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.arguments import checked_arguments
from workbench.errors import WorkbenchError
from workbench.figures.figure import (
    PLOTLY_MIME,
    WIDGET_MIME,
    add_pictures,
    harmless_html,
    harmless_markdown,
    notebook_to_html,
    read_notebook,
    runs_something,
    written,
)
from workbench.notebooks.executing import KEY, Record, check_not_overwritten, runs_shown_in
from workbench.runs.registry import Runs, load_runs
from workbench.secrets import MASK, masked_json, secrets

PathLike = str | os.PathLike[str]
MAX_BYTES = 5_000_000
"""Largest size of a shared notebook: mail and code hosts take no more, or do not render it."""


SHOWN = frozenset(
    {PLOTLY_MIME, "text/plain", "text/latex", "application/json", "image/png", "image/jpeg", "image/gif", "image/webp"}
)
"""Types of outputs that hold nothing to run."""
CLEANED = frozenset({"text/html", "text/markdown"})
"""Types of outputs that are sanitised."""


@dataclass(frozen=True)
class Shared:
    """The two files of a shared notebook, and notes for the person who sends them."""

    notebook: Path
    page: Path
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([str(self.notebook), str(self.page), *self.notes])


@checked_arguments
def share(notebook: PathLike, to: PathLike = "shared", *, runs: Runs | None = None) -> Shared:
    """Make an HTML page that is interactive offline, and a notebook under 5 MB that shows without a kernel.

    Both go into the folder `to`. The notebook keeps what `wb.reproduce` needs of its runs: the record that `workbench
    execute` made, else one of `runs`, by default of the runs whose names its outputs show. Secrets become `***`, as far
    as their names or their form tell, and scripts in texts and outputs are removed. Raises `WorkbenchError` if `to`
    holds the notebook itself.

    Examples:
        >>> shared = wb.share("curves.ipynb", to="shared")
        >>> shared.page.name
        'curves.html'
    """
    notebook, to = Path(notebook).expanduser(), Path(to).expanduser()
    check_not_overwritten(notebook, to, "share")
    target = (to / notebook.name).absolute()
    value = read_notebook(notebook)
    notes = _add_missing_record(value, runs)
    _remove_widgets(value)
    reason = add_pictures(value)
    if reason:
        notes.append(f"Figures that only a browser draws have no picture beside them. {reason}")
    notes += _remove_scripts(value)
    notes += _shrink(value)
    text = _notebook_text(masked_json(value))  # before JSON escapes the quotes and line ends of a secret
    for secret in secrets():  # in names
        text = text.replace(secret, MASK)
    page = notebook_to_html(written(target, text.encode()), target.with_suffix(".html"))
    return Shared(target, page, tuple(notes))


def _add_missing_record(notebook: Any, runs: Runs | None) -> list[str]:
    """Add a record to a notebook that has none, or one of `runs`; return a note if there is no run to record."""
    import nbformat

    known = notebook.metadata.get(KEY)
    if isinstance(known, Mapping) and known.get("runs") and runs is None:
        return []
    recorded = runs_shown_in(notebook) if runs is None else load_runs(runs)
    notebook.metadata[KEY] = nbformat.from_dict(Record.of(recorded).to_json())
    if recorded:
        return []
    return ["No run of this notebook was found here, so it cannot be reproduced. Name its runs with --run."]


def _remove_widgets(notebook: Any) -> None:
    from workbench.widgets.live_widget import HIDE_DEAD_WIDGET

    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if WIDGET_MIME in output.get("data", {}):
                del output["data"][WIDGET_MIME]
            if "text/html" in output.get("data", {}):
                output["data"]["text/html"] = "".join(output["data"]["text/html"]).replace(HIDE_DEAD_WIDGET, "")
        if "outputs" in cell:
            cell["outputs"] = [o for o in cell["outputs"] if "data" not in o or _shows_something(o["data"])]


def _shows_something(data: Any) -> bool:
    """Return False for what is left of a widget: nothing, or the name of its class."""
    shown = {mime: value for mime, value in data.items() if value not in ("", [], [""])}
    text = "".join(shown.pop("text/plain", ""))
    return bool(shown) or (not text.startswith(("FigureWidget(", "VBox(", "HBox(", "Output(")) and text != "")


def _shrink(notebook: Any) -> list[str]:
    """Remove outputs, the largest first, until the notebook is smaller than `MAX_BYTES`; return a note for each."""
    notes = []
    while (size := len(_notebook_text(notebook))) > MAX_BYTES:
        outputs = [
            (len(json.dumps(content)), output["data"], mime)
            for cell in notebook.cells
            for output in cell.get("outputs", ())
            for mime, content in output.get("data", {}).items()
            if mime != "text/plain"
        ]
        if not outputs:
            raise WorkbenchError(
                f"The notebook's text alone is {size:,} bytes, and {MAX_BYTES:,} may be shared. Clear the outputs that "
                "print so much."
            )
        num_bytes, data, mime = max(outputs, key=lambda output: output[0])
        del data[mime]
        data.setdefault("text/plain", "(left out: too large)")
        what = "an interactive figure (its picture stays)" if mime == PLOTLY_MIME else f"an output of type {mime}"
        notes.append(f"Left out {what} of {num_bytes / 1e6:.1f} MB.")
    return notes


def _notebook_text(notebook: Any) -> str:
    import nbformat

    return str(nbformat.writes(notebook))


def _remove_scripts(notebook: Any) -> list[str]:
    """Remove what a browser would run from texts and outputs; return a note if there was any."""
    removed = 0
    for cell in notebook.cells:
        for name, attachment in list(cell.get("attachments", {}).items()):
            if not all(mime.startswith("image/") for mime in attachment):
                del cell.attachments[name]
                removed += 1
        if cell.cell_type != "code":
            before = cell.source
            cell.source = harmless_markdown(before)
            removed += cell.source != before
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            for mime in [mime for mime in data if mime not in SHOWN and mime not in CLEANED]:
                del data[mime]
                removed += 1
            for mime in CLEANED & data.keys():
                before = "".join(data[mime])
                data[mime] = harmless_html(before) if mime == "text/html" else harmless_markdown(before)
                removed += runs_something(before) if mime == "text/html" else data[mime] != before
    return [f"Removed from {removed} places what a browser would run, or no viewer shows."] if removed else []
