"""Comparison of a user-defined dataset with that of the start of the run, by a rank: only ranks execute its code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.data import data_fingerprint
from workbench.errors import DataError
from workbench.experiment import Experiment
from workbench.rundir import RunDir, read_json, read_object, write_json


def check_user_data(run: RunDir, experiment: Experiment) -> None:
    """Raise `DataError` if a user-defined dataset gives other samples than when the run was started.

    The first and last samples of the training are compared. A dataset whose samples differ from one reading to the next
    cannot be compared, and neither can one that raises. An experiment that names other data asks for the change. Does
    nothing if no dataset is user-defined.
    """
    read = {name: data for name in ("data", "eval_data") if (data := getattr(experiment, name)) is not None}
    if not any(data.is_user_defined for data in read.values()):
        return
    names = {name: data.to_json() for name, data in read.items()}
    source = run
    if run.resume.exists():
        source = RunDir(Path(read_json(run.resume)["checkpoint"]).parent.parent)
        recorded = read_object(source.user_data)
        accepted = read_object(run.environment).get("accepted_changed_data")
        if recorded.get("names") == json.loads(json.dumps(names)) and not accepted:
            _compare(source, experiment, recorded)
            if source.path.resolve() == run.path.resolve():
                return
    write_json(
        run.user_data, {"names": names, "steps": experiment.total_steps, "fingerprint": _fingerprint(experiment)}
    )


def _compare(source: RunDir, experiment: Experiment, recorded: dict[str, Any]) -> None:
    """Raise `DataError` unless the samples are those recorded, as far as both are known."""
    before = recorded["fingerprint"]
    found = None if before is None else _fingerprint(experiment.replace(steps=recorded["steps"]))
    if found is not None and found != before:
        name = experiment.data.name
        raise DataError(
            f"{name} gives other samples than when {source.path.name} was started: its first and last samples have the "
            f"fingerprint {found[:12]} instead of {before[:12]}. Restore what it reads, or continue with the new "
            "samples: run.resume(accept_changed_data=True)."
        )


def _fingerprint(experiment: Experiment) -> str | None:
    """Return the fingerprint of the data, or None if two readings differ."""
    first, second = (data_fingerprint(experiment) for _ in range(2))
    return first if first == second else None
