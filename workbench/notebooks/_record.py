"""What an executed notebook keeps of its runs in its metadata: enough to run it again and compare the curves."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.notebooks._verdict import LossCurve
from workbench.runs import Run, runs
from workbench.runs.records.environment import environment

FORMAT = 1
KEY = "workbench"
PRIVATE = ("command", "directory", "executable", "host")
"""Of an environment: what a colleague has no use for."""


@dataclass(frozen=True)
class RecordedRun:
    """One run of the notebook, as it was."""

    name: str
    experiment: Mapping[str, Any]
    plan: Mapping[str, Any]
    data_fingerprint: str | None
    state: str
    curve: LossCurve

    @staticmethod
    def of(run: Run) -> RecordedRun:
        plan = {key: value for key, value in run.plan.to_json().items() if key != "candidates"}
        fingerprint = run.environment.get("data_fingerprint")
        return RecordedRun(run.name, run.experiment, plan, fingerprint, run.status.state, LossCurve.of(run))

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "curve": self.curve.to_json()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> RecordedRun:
        return RecordedRun(**{**value, "curve": LossCurve.from_json(value["curve"])})


@dataclass(frozen=True)
class Record:
    """When, where and on what a notebook was executed, and its runs in the order of their launch."""

    time: float
    environment: Mapping[str, Any]
    runs: tuple[RecordedRun, ...]

    @staticmethod
    def of(notebook_runs: Sequence[Run]) -> Record:
        facts = notebook_runs[0].environment if notebook_runs else environment()
        kept = {key: value for key, value in facts.items() if key not in (*PRIVATE, "data_fingerprint")}
        return Record(time.time(), kept, tuple(map(RecordedRun.of, notebook_runs)))

    def to_json(self) -> dict[str, Any]:
        described = {"format": FORMAT, "time": self.time, "environment": dict(self.environment)}
        return {**described, "runs": [run.to_json() for run in self.runs]}


def read_record(notebook: Any, name: str) -> Record:
    """The record in a notebook's metadata. Raises `WorkbenchError` where there is none, or one that is not ours."""
    value = notebook.metadata.get(KEY)
    if not value or not value.get("runs"):
        raise WorkbenchError(
            f"{name} holds no record of a run, so that there is nothing to compare a second run with. Execute it with "
            "`workbench execute`, or share it with `workbench share` from where its runs are.",
            notebook=name,
        )
    if value.get("format") != FORMAT:
        raise WorkbenchError(
            f"{name} was recorded in format {value.get('format')}, and this Workbench reads format {FORMAT}. Use the "
            "version that wrote it, which the notebook's metadata name.",
            notebook=name,
        )
    return Record(value["time"], value["environment"], tuple(map(RecordedRun.from_json, value["runs"])))


def add_record(path: Path, notebook_runs: Sequence[Run]) -> None:
    """Write the record of these runs into a notebook's metadata."""
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    notebook.metadata[KEY] = nbformat.from_dict(Record.of(notebook_runs).to_json())
    nbformat.write(notebook, path)


def runs_shown_in(notebook: Any, root: Path | None = None) -> list[Run]:
    """The runs whose names appear in the notebook's outputs, oldest first: for one that was executed by hand."""
    text = "\n".join(_texts(output) for cell in notebook.cells for output in cell.get("outputs", ()))
    known = reversed(list(runs(root)))
    return [run for run in known if re.search(rf"(?<![\w-]){re.escape(run.name)}(?![\w-])", text)]


def _texts(value: Any) -> str:
    if isinstance(value, str):
        return value
    parts: Iterable[Any] = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return "\n".join(_texts(part) for part in parts)
