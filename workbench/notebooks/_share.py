"""A notebook to send to somebody: one page that is interactive offline, one notebook that shows without a kernel."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.figures.pages import PLOTLY_MIME, WIDGET_MIME, add_pictures, notebook_to_html, read_notebook
from workbench.notebooks._record import KEY, Record, runs_shown_in
from workbench.runs import Run
from workbench.runs.records.environment import masked, secrets

LARGEST_BYTES = 5_000_000


@dataclass(frozen=True)
class Shared:
    """The two files, and what their reader should know about them."""

    notebook: Path
    page: Path
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([str(self.notebook), str(self.page), *self.notes])


def share(notebook: Path, to: Path, runs: Sequence[Run] | None = None) -> Shared:
    """Write `<name>.ipynb` (under 5 MB, with a picture beside each figure) and `<name>.html` into the folder `to`.

    What its runs were is kept in the notebook for `reproduce`: recorded by `workbench execute`, or else read now from
    `runs` (by default those that the notebook's outputs name). Values of environment variables that are named like
    secrets are replaced by `***`. Raises `WorkbenchError` rather than overwrite the notebook itself.
    """
    target = (to / notebook.name).absolute()
    if target.resolve() == notebook.resolve():
        raise WorkbenchError(f"{notebook} would be overwritten. Give another folder: workbench share … --to FOLDER.")
    value = read_notebook(notebook)
    notes = [*_recorded(value, runs)]
    _drop_widgets(value)
    _, trouble = add_pictures(value)
    if trouble:
        notes.append(f"Figures other than curves have a table beside them instead of a picture. {trouble}")
    notes += _fit(value)
    _write(value, target)
    page = notebook_to_html(target, target.with_suffix(".html"))
    return Shared(target, page, tuple(notes))


def _recorded(notebook: Any, runs: Sequence[Run] | None) -> list[str]:
    """Add the record where there is none; says if it has no runs."""
    import nbformat

    if notebook.metadata.get(KEY, {}).get("runs") and runs is None:
        return []
    found = runs_shown_in(notebook) if runs is None else list(runs)
    notebook.metadata[KEY] = nbformat.from_dict(Record.of(found).to_json())
    if found:
        return []
    return ["No run of it was found here, so it cannot be reproduced: name them with --run, or set WORKBENCH_RUNS."]


def _drop_widgets(notebook: Any) -> None:
    from workbench.widgets.saved import HIDE_DEAD_WIDGET

    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if WIDGET_MIME in output.get("data", {}):
                del output["data"][WIDGET_MIME]
            if "text/html" in output.get("data", {}):
                output["data"]["text/html"] = "".join(output["data"]["text/html"]).replace(HIDE_DEAD_WIDGET, "")
        if "outputs" in cell:
            cell["outputs"] = [o for o in cell["outputs"] if "data" not in o or _says(o["data"])]


def _says(data: Any) -> bool:
    """Whether an output shows anything: what is left of a widget is nothing, or the name of its class."""
    shown = {mime: value for mime, value in data.items() if value not in ("", [], [""])}
    words = "".join(shown.pop("text/plain", ""))
    return bool(shown) or not words.startswith(("FigureWidget(", "VBox(", "HBox(", "Output(")) and words != ""


def _fit(notebook: Any) -> list[str]:
    """Leave out, the largest first, what makes the notebook larger than 5 MB: figures keep their pictures."""
    dropped = []
    while (size := len(_text(notebook))) > LARGEST_BYTES:
        parts = [
            (len(json.dumps(content)), output["data"], mime)
            for cell in notebook.cells
            for output in cell.get("outputs", ())
            for mime, content in output.get("data", {}).items()
            if mime != "text/plain"
        ]
        if not parts:
            raise WorkbenchError(f"The notebook's text alone is {size:,} bytes; clear the outputs that print so much.")
        bytes_, data, mime = max(parts, key=lambda part: part[0])
        del data[mime]
        data.setdefault("text/plain", "(left out: too large)")
        what = "an interactive figure (its picture stays)" if mime == PLOTLY_MIME else f"an output of type {mime}"
        dropped.append(f"Left out {what} of {bytes_ / 1e6:.1f} MB.")
    return dropped


def _text(notebook: Any) -> str:
    import nbformat

    return str(nbformat.writes(notebook))


def _write(notebook: Any, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(masked(_text(_without(secrets(), notebook))), encoding="utf-8")


def _without(hidden: Sequence[str], value: Any) -> Any:
    """`masked` in each text by itself: JSON will escape the quotes and line ends of a secret that has some."""
    if isinstance(value, dict):
        return type(value)({key: _without(hidden, content) for key, content in value.items()})
    if isinstance(value, list):
        return [_without(hidden, content) for content in value]
    if isinstance(value, str):
        for secret in hidden:
            value = value.replace(secret, "***")
    return value
