"""The directory of a run queue, the only contract between a notebook and the queue's supervisor.

sweep.json           what fills the queue: experiment, axes, seeds, sampler, rule and packing, written once; a grid of
                     plans writes grid.json, which has no axes
queue.json           the runs to train, as (choices, seed); a sampler appends to it
optuna.jsonl         Optuna's journal, where a sampler or a pruning rule has a state
plans/<key>.json     plan of the runs whose choices have this key, without those that change no plan
code/<key>/          the user's own model, dataset or functions, as in a run directory
runs/<run>/          the run directories
results/<index>.json how each run ended, and its objective
interrupted/         directories of runs that were killed before they wrote a checkpoint
supervisor.json      process record of the supervisor; supervisor.log what it printed
STOP                 asks the supervisor to stop the runs and leave
lock                 held by the supervisor
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from workbench.errors import RunNotFound
from workbench.experiment import USER_PARTS, Experiment, counted
from workbench.planning.plan import Plan
from workbench.rundir import read_json, write_json
from workbench.sweeps.axes import PLAN_FREE, label

SWEEP, GRID = "sweep.json", "grid.json"
"""Settings of a queue whose runs differ in fields of the experiment, and of one whose runs differ in their plan."""


@dataclass(frozen=True)
class Entry:
    """One run of a queue: its position, what it differs in from the others, and its seed."""

    index: int
    choices: Mapping[str, Any]
    """Position of the value on each axis of a sweep; value of each choice of the plan in a grid, which has no axes."""
    seed: int


@dataclass(frozen=True)
class Result:
    """The end of one run. `state` is finished, stopped early (by the rule), stopped (by hand) or failed."""

    state: str
    objective: float | None
    steps: int
    seconds: float
    """Training time of the run."""
    saved_steps: int = 0
    saved_s: float = 0.0
    """Steps that the rule spared, and their time at the speed of the run."""
    reason: str = ""
    gpu_hours: float = 0.0
    """Devices of the run times its training time."""
    ended: float = 0.0
    """Time at which the supervisor noted the end, in seconds since 1970."""


class QueueDir:
    """The names of everything inside one queue's directory, and the values of what was written once."""

    def __init__(self, path: Path, settings: str | None = None) -> None:
        self.path = path
        self.settings_file = path / (settings or (GRID if (path / GRID).exists() else SWEEP))
        self.queue_file, self.journal = path / "queue.json", path / "optuna.jsonl"
        self.stop_file, self.lock = path / "STOP", path / "lock"
        self.supervisor, self.log = path / "supervisor.json", path / "supervisor.log"

    @cached_property
    def settings(self) -> dict[str, Any]:
        value: dict[str, Any] = read_json(self.settings_file)
        return value

    def queue(self) -> list[Entry]:
        try:
            entries = read_json(self.queue_file)
        except FileNotFoundError:
            raise RunNotFound(f"There is no sweep and no grid at {self.path}.") from None
        return [Entry(index, **entry) for index, entry in enumerate(entries)]

    def write_queue(self, entries: list[Entry]) -> None:
        write_json(self.queue_file, [{"choices": dict(entry.choices), "seed": entry.seed} for entry in entries])

    def values(self, entry: Entry) -> dict[str, Any]:
        """Return the value of a run on each axis, or each choice of its plan where there are no axes, as JSON."""
        axes = self.settings.get("axes")
        return {name: value if axes is None else axes[name][value] for name, value in entry.choices.items()}

    def labels(self, entry: Entry) -> dict[str, Any]:
        """Return the values of a run as plain values or short texts."""
        return {name: label(value) for name, value in self.values(entry).items()}

    def experiment(self, entry: Entry) -> Experiment:
        """Return the experiment of a run; the user's own code is only named in it."""
        chosen = self.values(entry) if "axes" in self.settings else {}
        named = {"name": self.path.name, "seed": entry.seed}  # runs of one name are a group on W&B
        experiment = Experiment.from_json(self.settings["experiment"]).replace(**chosen, **named)
        return counted(experiment, self.settings.get("counted", {}).get(configuration_key(entry.choices)))

    def run(self, entry: Entry) -> Path:
        """Return the directory of a run."""
        words = "-".join(f"{name}={value}" for name, value in (*self.labels(entry).items(), ("seed", entry.seed)))
        return self.path / "runs" / f"{entry.index:04d}-{re.sub(r'[^A-Za-z0-9.=_+-]+', '_', words)[:120]}"

    def plan_file(self, choices: Mapping[str, Any]) -> Path:
        return self.path / "plans" / f"{plan_key(choices)}.json"

    def plan(self, entry: Entry) -> Plan:
        return Plan.load(self.plan_file(entry.choices))

    def code_folder(self, choices: Mapping[str, Any]) -> Path:
        return self.path / "code" / _key(choices, choices.keys() & set(USER_PARTS))

    def code(self, entry: Entry) -> dict[str, bytes]:
        """Return the files of `code/` for a run."""
        return {file.name: file.read_bytes() for file in self.code_folder(entry.choices).glob("*")}

    def result_file(self, entry: Entry) -> Path:
        return self.path / "results" / f"{entry.index:04d}.json"

    def result(self, entry: Entry) -> Result | None:
        try:
            return Result(**read_json(self.result_file(entry)))
        except FileNotFoundError:
            return None

    def write_result(self, entry: Entry, result: Result) -> None:
        write_json(self.result_file(entry), asdict(result))


def plan_key(choices: Mapping[str, Any]) -> str:
    """Return the name of the plan of a run with these choices: those that change a plan."""
    return _key(choices, choices.keys() - PLAN_FREE)


def profile_key(choices: Mapping[str, Any]) -> str:
    """Return a text that is equal for choices whose models cost the same: a batch changes the plan only."""
    return _key(choices, choices.keys() - PLAN_FREE - {"global_batch"})


def _key(choices: Mapping[str, Any], names: set[str]) -> str:
    return "-".join(f"{name}.{choices[name]}" for name in sorted(names)) or "all"


def configuration_key(choices: Mapping[str, Any]) -> str:
    """Return a text that is equal for the runs that differ in their seed only."""
    return json.dumps(dict(choices), sort_keys=True)
