"""The record of an executed notebook's runs, kept in its metadata: enough to run it again and compare the curves."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError, in_words
from workbench.notebooks.verdict import LossCurve
from workbench.runs.records.environment import environment
from workbench.runs.registry import list_runs
from workbench.runs.run import Run

FORMAT = 1
"""Version of the record's format."""
KEY = "workbench"
"""Name of the record in the notebook's metadata."""
PRIVATE = ("command", "directory", "executable", "host")
"""Facts of an environment that are left out, because they describe only the machine of the author."""


@dataclass(frozen=True)
class RecordedRun:
    """One run of the notebook: what it trained, how, and its loss curve."""

    name: str
    experiment: Mapping[str, Any]
    plan: Mapping[str, Any]
    data_fingerprint: str | None
    state: str
    curve: LossCurve

    @staticmethod
    def of(run: Run) -> RecordedRun:
        """Return the record of a run."""
        plan = {key: value for key, value in run.plan.to_json().items() if key != "candidates"}
        fingerprint = run.environment.get("data_fingerprint")
        return RecordedRun(run.name, run.config, plan, fingerprint, run.status.state, LossCurve.of(run))

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON."""
        return {**vars(self), "curve": self.curve.to_json()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> RecordedRun:
        """Return the record that `to_json` wrote."""
        return RecordedRun(**{**value, "curve": LossCurve.from_json(value["curve"])})


@dataclass(frozen=True)
class Record:
    """The time and the environment of a notebook's execution, and its runs in the order of their launch."""

    time: float
    environment: Mapping[str, Any]
    runs: tuple[RecordedRun, ...]

    @staticmethod
    def of(notebook_runs: Sequence[Run]) -> Record:
        """Return the record of a notebook that launched these runs."""
        machine = notebook_runs[0].environment if notebook_runs else environment()
        public = {key: value for key, value in machine.items() if key not in (*PRIVATE, "data_fingerprint")}
        return Record(time.time(), public, tuple(map(RecordedRun.of, notebook_runs)))

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON."""
        described = {"format": FORMAT, "time": self.time, "environment": dict(self.environment)}
        return {**described, "runs": [run.to_json() for run in self.runs]}


def recorded_in(notebook: Any, name: str) -> Record:
    """Return the record in a notebook's metadata; raises `WorkbenchError` if there is none or its format is unknown."""
    value = notebook.metadata.get(KEY)
    if not isinstance(value, Mapping) or not value.get("runs"):
        raise WorkbenchError(
            f"{name} holds no record of a run, so there is nothing to compare a second run with. Execute it with "
            "`workbench execute`, or share it with `workbench share` on the machine that has its runs."
        )
    if value.get("format") != FORMAT:
        raise WorkbenchError(
            f"{name} was recorded in format {value.get('format')}, and this Workbench reads format {FORMAT}. Use the "
            "version that wrote it; the notebook's metadata name it."
        )
    try:
        return Record(
            float(value["time"]), dict(value["environment"]), tuple(map(RecordedRun.from_json, value["runs"]))
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, WorkbenchError):
            raise
        raise WorkbenchError(
            f"The record in {name} is damaged ({in_words(error)}). Share the notebook again."
        ) from None


def add_record(path: Path, notebook_runs: Sequence[Run]) -> None:
    """Write the record of these runs into a notebook's metadata; papermill's paths of this machine become names."""
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    papermill = notebook.metadata.get("papermill", {})
    papermill |= {name: Path(papermill[name]).name for name in ("input_path", "output_path") if papermill.get(name)}
    notebook.metadata[KEY] = nbformat.from_dict(Record.of(notebook_runs).to_json())
    nbformat.write(notebook, path)


def runs_shown_in(notebook: Any) -> list[Run]:
    """Return the runs whose names appear in the notebook's outputs, oldest first."""
    text = "\n".join(_texts(output) for cell in notebook.cells for output in cell.get("outputs", ()))
    oldest_first = reversed(list(list_runs(archived=True)))
    return [run for run in oldest_first if re.search(rf"(?<![\w-]){re.escape(run.name)}(?![\w-])", text)]


def _texts(value: Any) -> str:
    """Return every text inside a JSON value."""
    if isinstance(value, str):
        return value
    parts: Iterable[Any] = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return "\n".join(_texts(part) for part in parts)
