"""A run queue: (experiment, plan) pairs in one directory under one supervisor, which outlives every kernel.

A sweep fills it with other values of the experiment, a grid with other choices of the plan. The directory is the only
contract between a notebook and the supervisor:

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

import contextlib
import hashlib
import json
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import psutil

from workbench.base.arguments import checked_arguments
from workbench.base.display import waiting
from workbench.base.errors import RunExists, RunNotFound, WorkbenchError
from workbench.base.machine import available_cores
from workbench.base.user_code import user_path
from workbench.data import from_json as data_from_json
from workbench.experiment import USER_PARTS, Experiment, counted
from workbench.planning.plan import Plan
from workbench.record.rundir import locked, process_alive, read_json, runs_root, write_json
from workbench.runs.launching import device_queue, fork_server, processes
from workbench.runs.launching.launcher import new_directory, user_code
from workbench.runs.launching.supervisor import worker_environment
from workbench.runs.registry import row_or_reason
from workbench.runs.run import Run
from workbench.sparsity import TYPES as SPARSITIES
from workbench.sparsity import from_json as sparsity_from_json

# The directory: the names of everything in it, and the values of what was written once.

PLAN_FREE = frozenset(
    {
        "learning_rate",
        "warmup_steps",
        "lr_schedule",
        "schedule_steps",
        "betas",
        "eps",
        "weight_decay",
        "steps",
        "log_every",
        "norms_every",
    }
    | {"rate_scale", "decay_scale", "eps_scale", "grad_norm_scale"}
    | {"epochs", "tokens", "checkpoint_every", "keep_checkpoints", "checkpoints", "stop_on_non_finite"}
    | {"spike_factor", "on_spike", "spike_window", "spike_limit"}
)
"""Values of an experiment that change no plan; runs that differ in no other value share one."""
SWEEP, GRID = "sweep.json", "grid.json"
"""Settings of a queue whose runs differ in fields of the experiment, and of one whose runs differ in their plan."""
START_S = {"cpu": 1.5, "cuda": 40.0}
"""Seconds of a run of a queue beside its steps, by the type of its devices: it starts, captures, builds and leaves.

On two idle cores, by the second launch of `benchmarks/cell_time.py`, since ranks are forked from a process that has
imported what they need; on two H200, by the cells of a grid of GPT-3 1.3B, which took 48 s for 5 s of steps. The runs
of a queue that have ended replace both (`share_done`).
"""


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
        labels = {**self.labels(entry), "seed": entry.seed}
        words = "-".join(f"{name}={label_text(value)}" for name, value in labels.items())
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


def label(value: Any) -> Any:
    """Return a value of an axis, as JSON, for tables and figures: itself if it is plain, else a short text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping) and value.get("type") in SPARSITIES:
        return sparsity_from_json(value).label
    if isinstance(value, Mapping) and value.get("type") == "mixture":
        return data_from_json(value).name
    if isinstance(value, Mapping):
        return str(value.get("name") or ", ".join(f"{key}={item}" for key, item in value.items()))
    return ", ".join(map(str, value)) if isinstance(value, Sequence) else str(value)


def label_text(value: Any) -> str:
    """Return a label as text, a float with six digits at most."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def first_plan(directory: QueueDir) -> Plan:
    return Plan.load(min(directory.plan_file({}).parent.iterdir()))


def ranks_environment(directory: QueueDir) -> dict[str, str]:
    """Return the environment of the ranks of the queue's first run, on all devices of this node."""
    plan = first_plan(directory)
    device_type = plan.cluster.device.type
    base = {**os.environ, **thread_limit(directory.settings["packing"], os.environ)}
    return worker_environment(base, plan.world, device_type, device_queue.node_devices(device_type))


def thread_limit(packing: Mapping[str, int | str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return `OMP_NUM_THREADS` such that runs side by side share the cores of the CPU, unless the user set it."""
    if packing["side_by_side"] == 1 or "OMP_NUM_THREADS" in environment:
        return {}
    processes = int(packing["side_by_side"]) * int(packing["devices_each"])
    return {"OMP_NUM_THREADS": str(max(1, available_cores() // processes))}


@cache
def _predicted_s(plan_file: Path) -> tuple[float, float]:
    """Return the seconds that a run of this plan takes to start, and those of a step."""
    plan = Plan.load(plan_file)
    return START_S[plan.cluster.device.type], plan.prediction.step_ms / 1e3


@dataclass(frozen=True)
class Progress:
    """The progress of one run of a queue."""

    asked: int
    """Steps that it is to make."""
    step_s: float
    """Predicted seconds of one."""
    steps: int
    """Steps that it has made."""
    seconds: float | None
    """Training time of a run that has ended."""
    started: float = 1.0
    """Part of its start that it has behind it: half while it was launched and has made no step."""


def share_done(runs: Sequence[Progress], start_s: float, spent_s: float, side_by_side: int = 1) -> float:
    """Return the part of the time of runs that has passed, by what the first of them show of the others.

    The predicted steps are multiplied by the pace of the runs that have ended. What is left of the time so far was
    spent on the starts of runs.

    Args:
        runs: all runs of a queue.
        start_s: predicted seconds of a run beside its steps, until one has ended.
        spent_s: seconds that have passed, times the number of runs side by side; infinite where that is unknown.
        side_by_side: this number.
    """
    ended = [(run.steps * run.step_s, run.seconds) for run in runs if run.seconds is not None]
    predicted_s, trained_s = (sum(each) for each in zip(*ended, strict=True)) if ended else (0.0, 0.0)
    pace = trained_s / predicted_s if predicted_s and trained_s else 1.0
    trained = [run.steps * run.step_s * pace if run.seconds is None else run.seconds for run in runs]
    if ended and math.isfinite(spent_s):
        start_s = max(0.0, spent_s - sum(trained)) / sum(run.started for run in runs)
    done = sum(trained) + start_s * sum(run.started for run in runs)
    left = [
        start_s * (1 - run.started) + max(0, run.asked - run.steps) * run.step_s * pace
        for run in runs
        if run.seconds is None
    ]
    # The last run may be alone, and the longest takes its time whatever else there is.
    left_s = max(sum(left), side_by_side * max(left)) if left else 0.0
    return done / (done + left_s) if done + left_s else 0.0


# The handle of a queue, and what fills and starts one.

POLL_S = 0.2
STARTS_S = 60.0
"""Seconds within which a started supervisor writes its record, on a busy machine."""


class Queue(ABC):
    """The handle of a queue, read from its directory; it works from any kernel."""

    SETTINGS: ClassVar[str] = SWEEP

    @checked_arguments
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.directory = QueueDir(Path(path).absolute(), self.SETTINGS)

    @property
    def path(self) -> Path:
        """Return the queue's directory."""
        return self.directory.path

    @property
    def name(self) -> str:
        """Return the name of the queue's directory."""
        return self.path.name

    @property
    def why(self) -> str:
        """Return why these runs are trained as they are: which cells, or how many runs side by side."""
        return str(self.directory.settings["packing"]["why"])

    @property
    def alive(self) -> bool:
        """Return True while the queue's supervisor is at work."""
        try:
            return process_alive(read_json(self.directory.supervisor))
        except (OSError, ValueError):
            return False

    @property
    def runs(self) -> list[Run]:
        """Return the runs that were launched, in order of launch."""
        return [Run(path) for entry in self.directory.queue() if (path := self.directory.run(entry)).exists()]

    @property
    def complete(self) -> bool:
        """Return True if every run of the queue has ended."""
        ended = [self.directory.result(entry) is not None for entry in self.directory.queue()]
        return all(ended) and len(ended) == self.num_runs

    @property
    def state(self) -> str:
        """Return `at work`, `complete`, or how to go on."""
        return "at work" if self.alive else "complete" if self.complete else "not at work; resume() goes on"

    def results(self) -> list[tuple[Entry, Result]]:
        """Return the runs that have ended, and how."""
        ended = [(entry, self.directory.result(entry)) for entry in self.directory.queue()]
        return [(entry, result) for entry, result in ended if result is not None]

    @property
    def num_runs(self) -> int:
        """Return the number of runs of the queue, with those that a sampler will add."""
        return len(self.directory.queue())

    def _share_done(self) -> float:
        queue, results = self.directory.queue(), {entry.index: result for entry, result in self.results()}
        began, runs = self.directory.supervisor.stat().st_mtime, list[Progress]()
        start_s, side_by_side = 0.0, int(self.directory.settings["packing"]["side_by_side"])
        spent_s = (time.time() - began) * side_by_side
        for entry in queue:
            start_s, step_s = _predicted_s(self.directory.plan_file(entry.choices))
            asked = self.directory.values(entry).get("steps") or self.directory.settings["experiment"]["steps"] or 0
            result, path = results.get(entry.index), self.directory.run(entry)
            if result is not None:
                runs.append(Progress(asked, step_s, result.steps, result.seconds))
            else:
                steps = row_or_reason(Run(path))["step"] if path.exists() else 0
                runs.append(Progress(asked, step_s, steps, None, 1.0 if steps else 0.5 * path.exists()))
        if any(result.ended < began for result in results.values()):
            spent_s = math.inf  # an earlier supervisor ended some
        return share_done(runs, start_s, spent_s, side_by_side) * len(queue) / self.num_runs if queue else 0.0

    def look(self) -> tuple[str, str]:
        """Return how far the queue has come, in words, and its table for a notebook."""
        words = f"{len(self.results())} of {self.num_runs} runs have ended"
        with contextlib.suppress(OSError, ValueError):  # without its supervisor or a plan, the share is unknown
            words += f", {self._share_done():.0%} of the work"
        return words, self._repr_html_()

    @abstractmethod
    def _repr_html_(self) -> str: ...

    @checked_arguments
    def wait(self, timeout: float | None = None) -> Self:
        """Block until every run has ended, or until `timeout` seconds have passed.

        Raises `WorkbenchError` if the supervisor vanished before the queue was complete.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with waiting(f"waiting for {self.name}", self.look):
            while self.alive:
                if deadline is not None and time.monotonic() > deadline:
                    return self
                time.sleep(POLL_S)
        if not self.complete and not self.directory.stop_file.exists():
            left = len(self.directory.queue()) - len(self.results())
            raise WorkbenchError(
                f"The supervisor of {self.name} vanished with {left} runs left; {self.directory.log} says what it "
                "printed. Go on with resume()."
            )
        return self

    @checked_arguments
    def stop(self, wait: bool = False) -> Self:
        """Ask the runs to write a checkpoint and leave; `resume` goes on with them. `wait` returns when they have."""
        if self.alive:
            self.directory.stop_file.touch()
        else:
            for run in self.runs:
                run.stop()
        return self.wait() if wait else self

    def resume(self) -> Self:
        """Go on with what is missing: runs that were interrupted or failed, and those that were never launched.

        A run with a checkpoint continues from it. Does nothing to a queue that is at work.
        """
        if self.alive and not self.directory.stop_file.exists():
            return self
        if self.alive:
            self.wait(timeout=STARTS_S)
        self.directory.stop_file.unlink(missing_ok=True)
        for entry, result in self.results():
            if result.state in ("failed", "stopped"):
                self.directory.result_file(entry).unlink()
        start_supervisor(self.directory)
        return self


def new_queue(directory: str | os.PathLike[str] | None, name: str, settings: str) -> QueueDir:
    """Return the empty directory of a new queue, called after `name` by default; raises `RunExists`."""
    if directory is None:
        return QueueDir(new_directory(name), settings)
    path = Path(directory).expanduser().absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        load = f"wb.load_{settings.removesuffix('.json')}(path)"
        raise RunExists(f"{path} is not empty. Choose another directory, or go on: {load}.resume().")
    path.mkdir(parents=True, exist_ok=True)
    return QueueDir(path, settings)


def start_queue(
    directory: QueueDir,
    settings: Mapping[str, Any],
    entries: list[Entry],
    pairs: Iterable[tuple[Mapping[str, Any], Experiment, Plan]],
) -> None:
    """Write a queue with its settings, and start its supervisor.

    `pairs` holds the experiment and the plan of all choices that an entry has, or that a sampler may add.
    """
    for choices, experiment, plan in pairs:
        file, code = directory.plan_file(choices), directory.code_folder(choices)
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            plan.save(file)
        if not code.exists():
            code.mkdir(parents=True)
            for name, content in user_code(experiment).items():
                (code / name).write_bytes(content)
    directory.write_queue(entries)
    write_json(directory.settings_file, {**settings, "worker": processes.WORKER})
    start_supervisor(directory)


def start_supervisor(directory: QueueDir) -> None:
    """Start the detached process that works through the queue, and wait until it has begun."""
    directory.supervisor.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(user_path())}
    ranks = fork_server.kind_of_ranks(ranks_environment(directory))
    command = ("workbench.sweeps.queue_supervisor", str(directory.path))
    start = fork_server.client().start
    pid = start(*command, log=directory.log, environment=environment, ranks=ranks, is_served=True)
    deadline = time.monotonic() + STARTS_S
    while not directory.supervisor.exists() and psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    with locked(directory.lock, wait=False) as is_free:
        if is_free and not directory.supervisor.exists():
            raise WorkbenchError(f"The supervisor of {directory.path.name} ended at once; {directory.log} says why.")


def find_queue(path: str | os.PathLike[str], settings: str, noun: str) -> Path:
    """Return the directory of a queue at `path`, or of that name under the runs folder; raises `RunNotFound`."""
    for candidate in (Path(path).expanduser(), runs_root() / path):
        with contextlib.suppress(OSError):  # a name that is too long
            if (candidate / settings).is_file():
                return candidate
    names = sorted(file.parent.name for file in runs_root().glob(f"*/{settings}"))
    hint = f"There are {', '.join(names[-5:])}." if names else f"There are none in {runs_root()} yet."
    raise RunNotFound(f"There is no {noun} {str(path)!r}. {hint}")


# Which runs belong together: in the sidebar they are one row, and in a dashboard one row and one colour.

NAMING = ("name", "seed", "tracking", "crc32_of_record")
"""Fields of an experiment in which the seeds of one recipe may differ."""


Setting = tuple[tuple[str, str], ...]
"""Labels of a run but for its seed, as pairs of a name and a value."""


class Group(NamedTuple):
    """The sweep, the grid, or the seeds of a recipe, that a run belongs to."""

    id: str
    name: str
    of: str
    """`sweep`, `grid` or `seeds`."""
    labels: Mapping[str, str]
    """Values by which its runs are told apart."""

    @property
    def setting(self) -> Setting:
        """The labels but for the seed: runs of equal settings differ in nothing else."""
        return tuple((name, value) for name, value in self.labels.items() if name != "seed")


def group_of(run: Run) -> Group | None:
    """Return the group of a run: that of its sweep or its grid, else of its recipe's seeds; None if it has no seed."""
    folder = run.path.parent.parent
    if (of := _queue_of(run.path.parent)) is not None:
        with contextlib.suppress(OSError):  # it is being made
            labels = _labels(folder, (folder / "queue.json").stat().st_mtime_ns).get(run.path.name, {})
            return Group(str(folder), folder.name, of, labels)
    config = run.config
    recipe = {name: value for name, value in config.items() if name not in NAMING}
    if "seed" not in config or not recipe:
        return None
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    name = str(config.get("name") or run.name)
    return Group(f"seeds {digest}", name, "seeds", {"seed": str(config["seed"])})


def groups_of(runs: Sequence[Run]) -> list[Group | None]:
    """Return the group of each run that shares it with another; None for all others, and for one that is given again.

    Runs of one recipe are a group only if their seeds differ. The sidebar, which hears of runs one by one, folds them
    by the same rule (`groupsOf` in `groups.js`).
    """
    found, given = list[Group | None](), set[Path]()
    for run in runs:
        try:
            found.append(None if run.path in given else group_of(run))
            given.add(run.path)
        except Exception:  # the files of a run may hold anything
            found.append(None)
    members: dict[str, dict[Path, str]] = {}
    for run, group in zip(runs, found, strict=True):
        if group is not None:
            members.setdefault(group.id, {})[run.path] = group.labels.get("seed", "")
    shared = {of for of, seeds in members.items() if len(set(seeds.values()) if of.startswith("seeds ") else seeds) > 1}
    return [group if group is not None and group.id in shared else None for group in found]


@lru_cache(512)
def _queue_of(runs: Path) -> str | None:
    """Return `sweep` or `grid` for the folder of the runs of one; None for any other folder."""
    kinds = {"sweep": SWEEP, "grid": GRID} if runs.name == "runs" else {}
    return next((of for of, settings in kinds.items() if (runs.parent / settings).exists()), None)


@lru_cache(32)
def _labels(folder: Path, _changed: int) -> dict[str, dict[str, str]]:
    """Return the labels of each run of a queue by the name of its directory; a queue grows, and is then read again."""
    directory = QueueDir(folder)
    return {
        directory.run(entry).name: {
            **{name: label_text(value) for name, value in directory.labels(entry).items()},
            "seed": str(entry.seed),
        }
        for entry in directory.queue()
    }


def stop_queue_of(run: Run) -> None:
    """Ask the queue that a run belongs to, if one is at work, to begin no further runs and to end those that train."""
    directory = QueueDir(run.path.parent.parent)
    with contextlib.suppress(OSError, ValueError):  # it has none, or was never at work
        if run.path.parent.name == "runs" and process_alive(read_json(directory.supervisor)):
            directory.stop_file.touch()
