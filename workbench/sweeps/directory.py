"""The directory of a run queue, the only contract between a notebook and the queue's supervisor.

sweep.json           what fills the queue: experiment, axes, seeds, sampler, rule and packing, written once; a grid of
                     plans writes grid.json
queue.json           the runs to train, as (choice on each axis, seed); a sampler appends to it
optuna.jsonl         Optuna's journal: the state of the sampler and of the pruner
plans/<key>.json     plan of the runs whose choices on the axes that change a plan have this key
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
"""Settings of a queue whose axes are fields of the experiment, and of one whose axes are choices of the plan."""


@dataclass(frozen=True)
class Entry:
    """One run of a queue: its position, its choice on each axis, and its seed."""

    index: int
    choice: Mapping[str, int]
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
            raise RunNotFound(f"There is no sweep and no grid at {self.path}.", path=str(self.path)) from None
        return [Entry(index, **entry) for index, entry in enumerate(entries)]

    def write_queue(self, entries: list[Entry]) -> None:
        write_json(self.queue_file, [{"choice": dict(entry.choice), "seed": entry.seed} for entry in entries])

    def values(self, entry: Entry) -> dict[str, Any]:
        """Return the value of a run on each axis, as JSON."""
        return {name: self.settings["axes"][name][position] for name, position in entry.choice.items()}

    def labels(self, entry: Entry) -> dict[str, Any]:
        """Return the values of a run on each axis, as plain values or short texts."""
        return {name: label(value) for name, value in self.values(entry).items()}

    def experiment(self, entry: Entry) -> Experiment:
        """Return the experiment of a run; the user's own code is only named in it."""
        chosen = self.values(entry) if self.settings_file.name == SWEEP else {}
        named = {"name": self.path.name, "seed": entry.seed}  # runs of one name are a group on W&B
        experiment = Experiment.from_json(self.settings["experiment"]).replace(**chosen, **named)
        return counted(experiment, self.settings.get("counted", {}).get(configuration_key(entry.choice)))

    def run(self, entry: Entry) -> Path:
        """Return the directory of a run."""
        words = "-".join(f"{name}={value}" for name, value in (*self.labels(entry).items(), ("seed", entry.seed)))
        return self.path / "runs" / f"{entry.index:04d}-{re.sub(r'[^A-Za-z0-9.=_+-]+', '_', words)[:120]}"

    def plan_file(self, choice: Mapping[str, int]) -> Path:
        return self.path / "plans" / f"{plan_key(choice)}.json"

    def plan(self, entry: Entry) -> Plan:
        return Plan.load(self.plan_file(entry.choice))

    def code_folder(self, choice: Mapping[str, int]) -> Path:
        return self.path / "code" / _key(choice, {name for name in choice if name in USER_PARTS})

    def code(self, entry: Entry) -> dict[str, bytes]:
        """Return the files of `code/` for a run."""
        return {file.name: file.read_bytes() for file in self.code_folder(entry.choice).glob("*")}

    def result_file(self, entry: Entry) -> Path:
        return self.path / "results" / f"{entry.index:04d}.json"

    def result(self, entry: Entry) -> Result | None:
        try:
            return Result(**read_json(self.result_file(entry)))
        except FileNotFoundError:
            return None

    def write_result(self, entry: Entry, result: Result) -> None:
        write_json(self.result_file(entry), asdict(result))


def plan_key(choice: Mapping[str, int]) -> str:
    """Return the name of the plan of a choice: its positions on the axes that change a plan."""
    return _key(choice, choice.keys() - PLAN_FREE)


def profile_key(choice: Mapping[str, int]) -> str:
    """Return a text that is equal for choices whose models cost the same: a batch changes the plan only."""
    return _key(choice, choice.keys() - PLAN_FREE - {"global_batch"})


def _key(choice: Mapping[str, int], names: set[str]) -> str:
    return "-".join(f"{name}.{choice[name]}" for name in sorted(names)) or "all"


def configuration_key(choice: Mapping[str, int]) -> str:
    """Return a text that is equal for the runs that differ in their seed only."""
    return json.dumps(dict(choice), sort_keys=True)
