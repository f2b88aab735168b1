"""A sweep: the axes with their values, `wb.sweep`, which plans and starts it, and the handle that reads its results.

It lives in its own directory and under its own supervisor, so that every kernel can find it again.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import heapq
import html
import itertools
import json
import math
import os
import re
import statistics
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import yaml

from workbench.base.arguments import checked_arguments
from workbench.base.display import html_table, text_table
from workbench.base.errors import InvalidArgument, InvalidExperiment, PlanInfeasible, UnknownParameter, suggestion
from workbench.base.units import duration, is_count
from workbench.base.user_code import UserFunction, innermost, source_of, telling_name
from workbench.cost.hardware import Cluster
from workbench.cost.profile import Profile
from workbench.data import UserData
from workbench.experiment import GROUPS, PATHS, Experiment, json_value
from workbench.measure.calibration import local_cluster
from workbench.models import Pretrained, UserModel
from workbench.planning.plan import Plan
from workbench.planning.planner import plan_profiled, profile
from workbench.planning.request import divisors
from workbench.planning.runnable import check_runnable, facts_for
from workbench.runs.registry import ProgressReporter
from workbench.runs.run import Run
from workbench.strategy import Choices
from workbench.sweeps.queue import (
    POLL_S,
    START_S,
    Entry,
    Queue,
    configuration_key,
    find_queue,
    label_text,
    new_queue,
    plan_key,
    profile_key,
    start_queue,
)
from workbench.sweeps.rules import HELD_OUT, PRUNERS, TRAINING, Diverged, Rule, diverged, rule_from_json, why_none

# The axes: values of an experiment with those to try, checked by building every experiment of the grid.

OTHERWISE = {
    "seed": "Give the number of seeds: seeds=3",
    "name": "Runs of a sweep are named after their values",
    "tags": "Give the tags to the experiment",
    "project": "Give the project to the experiment",
    "tracking": "Give the tracking to the experiment",
}
"""Values of an experiment that are no axes, and what to do instead."""
LARGEST_GRID = 10_000
Choice = Mapping[str, int]
"""Position of the chosen value on each axis, by the axis' name."""


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of a sweep with their values, of one experiment."""

    experiment: Experiment
    values: Mapping[str, Sequence[Any]]

    def __post_init__(self) -> None:
        for name, values in self.values.items():
            if name not in PATHS and name not in GROUPS:
                planned = f"It is a choice of the plan: wb.grid(experiment, {name}={values!r})."
                hint = planned if name in Choices.__annotations__ else suggestion(name, {*PATHS, *GROUPS})
                raise UnknownParameter(f"Experiment has no parameter {name!r} to sweep. {hint}")
            if name in OTHERWISE:
                raise InvalidExperiment(f"{name} is no axis of a sweep. {OTHERWISE[name]}.")
            if isinstance(values, str | bytes) or not isinstance(values, Sequence):
                meant = values.tolist() if hasattr(values, "tolist") else values
                with contextlib.suppress(ValueError, SyntaxError):  # "1e-3, 1e-4" was meant as two numbers
                    meant = ast.literal_eval(f"[{values}]") if isinstance(values, str) else meant
                meant = list(meant) if isinstance(meant, list | set | frozenset) else [meant]
                raise InvalidExperiment(f"{name}={values!r} is not a list of values. Write {name}={meant}.")
            if not len(values):
                raise InvalidExperiment(f"{name}=[] has no value. Give at least one, or leave the axis out.")
        if not self.values:
            raise InvalidExperiment("A sweep needs an axis. Give one, such as learning_rate=[1e-4, 3e-4].")
        named = {name: tuple(_named(name, value) for value in values) for name, values in self.values.items()}
        object.__setattr__(self, "values", named)
        size = len(list(itertools.islice(self.choices(), LARGEST_GRID + 1)))
        if size > LARGEST_GRID:
            raise InvalidExperiment(f"The axes have more than {LARGEST_GRID:,} combinations. Give fewer values.")
        for choice in self.choices():
            self.experiment_of(choice)
        for name, values in self.values.items():
            written = [json.dumps(value, sort_keys=True, default=str) for value in self.json_values(name)]
            twice = [value for value, text in zip(values, written, strict=True) if written.count(text) > 1]
            if twice:
                raise InvalidExperiment(f"{name} has the value {twice[0]!r} more than once. Give each value once.")

    def choices(self) -> Iterator[dict[str, int]]:
        """Return every combination of values, the last axis first."""
        ranges = (range(len(values)) for values in self.values.values())
        return (dict(zip(self.values, positions, strict=True)) for positions in itertools.product(*ranges))

    def experiment_of(self, choice: Choice, **changes: Any) -> Experiment:
        """Return the experiment with the chosen values and `changes`; raises `InvalidExperiment` for bad values."""
        chosen = {name: self.values[name][position] for name, position in choice.items()}
        return self.experiment.replace(**chosen, **changes)

    def json_values(self, name: str) -> list[Any]:
        """Return the values of an axis as `Experiment.to_json` writes them."""
        first = dict.fromkeys(self.values, 0)
        one_axis = ({**first, name: position} for position in range(len(self.values[name])))
        given = zip(one_axis, self.values[name], strict=True)
        return [json_value(self.experiment_of(choice), name, value) for choice, value in given]


def _named(axis: str, value: Any) -> Any:
    """Return a value of an axis; a function or class of the user gets a name that tells it from others of its code."""
    if not isinstance(innermost(value), FunctionType | type):
        return value
    name = telling_name(value)
    if axis == "model":
        return UserModel(value, name)
    return UserData(value, name) if axis in ("data", "eval_data") else UserFunction(value, name, source_of(value))


# The start: plans are made for one run on all devices and for several side by side, and the fastest packing is taken.

SAMPLERS = ("grid", "random", "tpe")
AHEAD = 1
"""Runs of a grid sweep that wait in the device queue behind those that train, so that no device waits for a start."""
MOST_RUNS_PER_GPU = 16


@checked_arguments
def sweep(
    experiment: Experiment,
    *,
    seeds: int = 1,
    sampler: str = "grid",
    trials: int | None = None,
    stop: Rule = None,
    runs_per_gpu: int = 1,
    directory: str | os.PathLike[str] | None = None,
    **axes: Sequence[Any],
) -> Sweep:
    """Train an experiment with other values of some of its fields, each with several seeds, in processes of their own.

    Every experiment is built and every plan is made before a process starts. The planner chooses between one run on all
    devices and several side by side by the predicted time of the whole sweep; `sweep.why` says which and why. A sweep
    outlives this process; `wb.sweeps.load_sweep` finds it again, and its `resume()` goes on with what is missing.

    Args:
        experiment: what to train.
        seeds: number of seeds of each configuration, from the experiment's own seed on.
        sampler: `grid` trains every combination; `random` and `tpe` (Optuna's) choose `trials` of them.
        trials: number of configurations that `random` and `tpe` choose.
        stop: rule that ends hopeless runs: `wb.sweeps.diverged(above=6.5, after=500)`, `"median"`, which compares with
            the runs that have finished and therefore stops none before three have, or `"halving"`.
        runs_per_gpu: number of runs that train on a GPU at the same time, each with that part of its memory. Small
            models leave most of a GPU idle; their steps take longer side by side, the sweep less. With more than one, a
            run is divided over as few GPUs as its memory allows.
        directory: the sweep's directory; by default `<name>-sweep-<time>` in `$WORKBENCH_RUNS` or `./runs`.
        axes: values to try for fields of the experiment, such as `learning_rate=[1e-4, 3e-4]`.

    Raises `UnknownParameter` for an axis that is no field, `InvalidExperiment` for values that cannot train, and what
    `wb.launch` raises.

    Examples:
        >>> sweep = wb.sweep(experiment, learning_rate=[1e-3, 3e-3]).wait()
        >>> len(sweep.results())
        2
    """
    grid = Axes(experiment, dict(axes))
    _check_options(grid, seeds, sampler, trials, stop, runs_per_gpu)
    choices = list(grid.choices())
    asked = [grid.experiment_of(choice) for choice in choices]
    needed: dict[str, tuple[Choice, Experiment]] = {}
    for choice, chosen in zip(choices, asked, strict=True):
        if isinstance(chosen.model, Pretrained):
            chosen.model.check_weights()
        chosen.reading.check()
        needed.setdefault(plan_key(choice), (choice, chosen))
    for _, chosen in needed.values():
        chosen.reading.prepare()
    asked = [chosen.resolved() for chosen in asked]
    seed_list = [experiment.seed + offset for offset in range(seeds)]
    count = len(choices) if trials is None else trials
    runs = [
        (plan_key(choice), chosen.total_steps)
        for _ in seed_list
        for choice, chosen in zip(choices[:count], asked, strict=False)
    ]
    experiments = {key: chosen for key, (_, chosen) in needed.items()}
    profiled_as = {key: profile_key(choice) for key, (choice, _) in needed.items()}
    packed, why = choose_packing(experiments, runs, local_cluster(), profiled_as, runs_per_gpu)
    for key, plan in packed.plans.items():
        check_runnable(experiments[key], plan, facts_for(experiments[key], plan), progress=True)
    folder = new_queue(directory, f"{experiment.name}-sweep", Sweep.SETTINGS)
    settings = {
        "experiment": experiment.resolved().to_json(),
        "counted": {
            configuration_key(choice): chosen.steps
            for choice, chosen in zip(choices, asked, strict=True)
            if chosen.epochs is not None
        },
        "axes": {name: grid.json_values(name) for name in grid.values},
        "seeds": seed_list,
        "sampler": sampler,
        "trials": trials,
        "stop": dict(vars(stop)) if isinstance(stop, Diverged) else stop,
        "packing": {name: getattr(packed, name) for name in ("side_by_side", "devices_each", "share")} | {"why": why},
        "ahead": AHEAD if sampler == "grid" else 0,
    }
    entries = [Entry(0, choice, seed) for seed in seed_list for choice in choices] if sampler == "grid" else []
    plans = (packed.plans[plan_key(choice)] for choice in choices)
    start_queue(folder, settings, entries, zip(choices, asked, plans, strict=True))
    return Sweep(folder.path)


def _check_options(grid: Axes, seeds: Any, sampler: Any, trials: Any, stop: Any, runs_per_gpu: Any) -> None:
    if stop is not None and not isinstance(stop, Diverged) and stop not in PRUNERS:
        raise InvalidExperiment(
            f"stop={stop!r} is no rule. Give wb.sweeps.diverged(above=6.5, after=500), 'median', 'halving' or None.",
            parameter="stop",
        )
    if not is_count(seeds) or seeds > LARGEST_GRID:
        raise InvalidExperiment(f"seeds={seeds!r} is not a number of seeds. Give 1 to {LARGEST_GRID:,}.")
    if not is_count(runs_per_gpu) or runs_per_gpu > MOST_RUNS_PER_GPU:
        raise InvalidExperiment(
            f"runs_per_gpu={runs_per_gpu!r} is not a number of runs on one GPU. Give 1 to {MOST_RUNS_PER_GPU}."
        )
    if sampler not in SAMPLERS:
        raise InvalidExperiment(f"sampler={sampler!r} is not one of {', '.join(SAMPLERS)}. Give one of them.")
    size = sum(1 for _ in grid.choices())
    if sampler == "grid" and trials is not None:
        raise InvalidExperiment(
            f"trials={trials!r} is given, but a grid trains all {size} combinations. Leave trials out, or choose "
            "sampler='random'."
        )
    if sampler != "grid" and not (is_count(trials) and trials <= size):
        raise InvalidExperiment(
            f"sampler={sampler!r} with trials={trials!r} cannot choose among {size} combinations. Give trials from 1 "
            f"to {size}."
        )


@dataclass(frozen=True)
class Packing:
    """The number of runs side by side, their plans, and the predicted time of the whole sweep."""

    side_by_side: int
    devices_each: int
    runs_per_gpu: int
    plans: Mapping[str, Plan]
    """Plan by the key of `directory.plan_key`."""
    seconds: float
    """Seconds that the runs take when each has its devices to itself."""
    longest_s: float
    """Seconds that the longest run takes then."""

    @property
    def share(self) -> float:
        """The part of a device that a run takes in the device queue, where all CPU processes are one device."""
        on_cpu = next(iter(self.plans.values())).cluster.device.type == "cpu"
        return 1 / (self.side_by_side if on_cpu else self.runs_per_gpu)

    def describe(self, runs: int) -> str:
        """Return words such as `"4 runs, 2 side by side on 1 device each, take 3 min"`."""
        each = f"{self.devices_each} device{'s' * (self.devices_each > 1)}"
        apart = self.side_by_side // self.runs_per_gpu
        if apart == 1:
            return f"{runs} runs one after another on {each} take {duration(self.seconds)}"
        return f"{runs} runs, {apart} side by side on {each} each, take {duration(self.seconds)}"


def choose_packing(
    experiments: Mapping[str, Experiment],
    runs: Sequence[tuple[str, int]],
    cluster: Cluster,
    profiled_as: Mapping[str, str],
    runs_per_gpu: int = 1,
) -> tuple[Packing, str]:
    """Return the packing with the shortest predicted time, and the sentence that says why.

    Args:
        experiments: one experiment for each plan that is needed, by its key.
        runs: key and steps of each run of the sweep, in the order in which they start.
        cluster: the devices that the sweep may use.
        profiled_as: a text by the key of each plan, equal for experiments whose models cost the same.
        runs_per_gpu: number of runs that train on each GPU at the same time, each with that part of its memory. A run
            that shares GPUs is divided over as few as its memory allows, because it leaves part of even one GPU idle.

    Raises `PlanInfeasible` if no plan fits even on all devices, and `InvalidExperiment` for several runs on each GPU
    where there is none.
    """
    if runs_per_gpu > 1 and cluster.device.type == "cpu":
        raise InvalidExperiment(
            f"runs_per_gpu={runs_per_gpu} is given, and this machine has no GPU. Leave it out: on CPUs, as many runs "
            "train side by side as the planner finds best."
        )
    profiles: dict[str, Profile] = {}
    for key, experiment in experiments.items():
        if profiled_as[key] not in profiles:
            profiles[profiled_as[key]] = profile(experiment, cluster)
    asked = {key: (experiment, profiles[profiled_as[key]]) for key, experiment in experiments.items()}
    options, counts = [], divisors(cluster.gpus)
    refusals: dict[int, PlanInfeasible] = {}
    for each in counts if runs_per_gpu > 1 else reversed(counts):
        try:
            options.append(_packing(asked, runs, cluster, each, runs_per_gpu))
        except PlanInfeasible as error:
            refusals[each] = error
        if options and runs_per_gpu > 1:
            break
    if not options:
        raise refusals[cluster.gpus]
    best = min(options, key=lambda option: option.seconds)  # of equals, the one with fewer runs side by side
    others = [f"{option.describe(len(runs))}" for option in options if option is not best]
    beside = f"; {'; '.join(others)}" if others else ""
    missing = len(refusals)
    tight = f"; {missing} other division{'s' * (missing > 1)} would not fit in memory" if missing else ""
    shortest = duration(max(best.longest_s, best.seconds / runs_per_gpu))
    shared = (
        f" Up to {runs_per_gpu} runs share each GPU, which takes between {shortest} and that time: how far they slow "
        "each other down is not predicted."
    )
    start = f"with {duration(START_S[cluster.device.type])} to start each run"
    why = f"Predicted time on {cluster.describe()}, {start}: {best.describe(len(runs))}{beside}{tight}."
    return best, why + shared * (runs_per_gpu > 1)


def _packing(
    asked: Mapping[str, tuple[Experiment, Profile]],
    runs: Sequence[tuple[str, int]],
    cluster: Cluster,
    each: int,
    runs_per_gpu: int,
) -> Packing:
    # `Cluster.resized` would give a CPU process the cores of the others, which run beside it here.
    part = replace(cluster, gpus=each, gpus_per_node=min(each, cluster.gpus_per_node))
    device = cluster.device
    limit = None if runs_per_gpu == 1 else max(1, device.memory_bytes // runs_per_gpu - device.reserved_bytes)
    plans = {key: plan_profiled(experiment, costs, part, limit) for key, (experiment, costs) in asked.items()}
    slots, longest_s = [0.0] * (cluster.gpus // each), 0.0
    for key, steps in runs:
        evaluation, predicted = asked[key][0].evaluation, plans[key].prediction
        evaluations = 0 if evaluation is None else 1 + math.ceil(steps / evaluation.every)  # one is before training
        run_s = START_S[device.type] + steps * predicted.step_ms / 1e3 + evaluations * predicted.evaluation_s
        heapq.heapreplace(slots, slots[0] + run_s)
        longest_s = max(longest_s, run_s)
    return Packing(len(slots) * runs_per_gpu, each, runs_per_gpu, plans, max(slots), longest_s)


# The YAML file of `workbench sweep`: an experiment, axes, and how to sweep them.

KEYS = ("experiment", "set", "axes", "seeds", "sampler", "trials", "stop", "runs_per_gpu", "directory")
"""Keys of the file. `set` and `axes` hold fields of the experiment; the others are arguments of `wb.sweep`."""


class _Loader(yaml.SafeLoader):
    """A loader of plain values that reads 1e-4 as a number, as YAML 1.2 does, and refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} stands twice", node.start_mark)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_sweep_file(path: Path) -> dict[str, Any]:
    """Return the keys of a file that are given; raises `InvalidExperiment` in a sentence for a file that is wrong.

    `set` and `axes` are mappings, and `axes` is not empty; `stop` is what `wb.sweep` takes.
    """
    try:
        value = yaml.load(path.read_text(), _Loader)
    except OSError as error:
        raise InvalidExperiment(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark is not None else ""
        words = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InvalidExperiment(f"{path} is not YAML: {words}{place}.") from None
    if not isinstance(value, dict) or not value.keys() >= {"experiment", "axes"}:
        raise InvalidExperiment(
            f"{path} describes no sweep. Give it the keys experiment (a model such as bert-large) and axes (fields of "
            "the experiment with lists of values)."
        )
    for key in value:
        if key not in KEYS:
            raise UnknownParameter(f"{path} has the key {key!r}. {suggestion(str(key), KEYS)}")
    if not isinstance(value["experiment"], str):
        raise InvalidExperiment(
            f"{path}: experiment is {value['experiment']!r}. Write a model, such as bert-large, or the name of a JSON "
            "file."
        )
    for key in ("set", "axes"):
        if not isinstance(value.get(key, {}), dict):
            raise InvalidExperiment(f"{path}: {key} is {value[key]!r}. Write one field of the experiment in each line.")
        value[key] = {str(name): item for name, item in value.get(key, {}).items()}
    if isinstance(stop := value.get("stop"), dict):  # `wb.sweep` checks any other
        if not stop.keys() <= {"above", "after"} or "above" not in stop:
            raise InvalidExperiment(
                f"{path}: stop is {stop!r}. Write stop: {{above: 6.5, after: 500}} or stop: median."
            )
        value["stop"] = diverged(**stop)
    return value


# The handle: it works from any kernel, because everything that it says stands in the directory.


@dataclass(frozen=True)
class Configuration:
    """One configuration of a sweep: its values, and the runs of its seeds."""

    index: int
    """Position of the configuration in the order in which the sweep trains them."""
    values: dict[str, Any]
    """Value on each axis."""
    runs: tuple[Run, ...]
    """The runs that were launched, in order of their seeds."""
    finished: tuple[Run, ...]
    """Runs that trained to their end."""
    at_work: tuple[Run, ...]
    """Launched runs whose end the sweep has not noted: they wait for a device, or train."""
    states: tuple[str, ...]
    """State of the run of each seed; `waiting` before its launch."""
    objectives: tuple[float, ...]
    """Objective of each finished run."""

    @property
    def mean(self) -> float | None:
        """Mean objective over the finished seeds; None before one has finished."""
        return statistics.fmean(self.objectives) if self.objectives else None

    @property
    def spread(self) -> float | None:
        """Standard deviation of the objective over the seeds; None for fewer than two."""
        return statistics.stdev(self.objectives) if len(self.objectives) > 1 else None


class Sweep(Queue):
    """Many runs of one experiment, read from the sweep's directory; it works from any kernel."""

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Return the values of each axis, as JSON."""
        axes: dict[str, list[Any]] = self.directory.settings["axes"]
        return axes

    @property
    def num_runs(self) -> int:
        """Return the number of runs of the sweep, with those that its sampler will add."""
        settings = self.directory.settings
        return max(len(self.directory.queue()), (settings["trials"] or 0) * len(settings["seeds"]))

    @property
    def objective(self) -> str:
        """Return the number that is compared, in words."""
        return HELD_OUT if self.evaluates else TRAINING

    @property
    def evaluates(self) -> bool:
        """Return True if the objective is the held-out loss."""
        return bool(self.directory.settings["experiment"].get("evaluation"))

    def rows(self) -> list[Configuration]:
        """Return a row for each configuration, the best first; those without a finished run keep their order."""
        groups: dict[str, list[Entry]] = {}
        for entry in self.directory.queue():
            groups.setdefault(configuration_key(entry.choices), []).append(entry)
        rows = [self._row(index, entries) for index, entries in enumerate(groups.values())]
        return sorted(rows, key=lambda row: float("inf") if row.mean is None else row.mean)

    def _row(self, index: int, entries: list[Entry]) -> Configuration:
        ended = {entry.index: self.directory.result(entry) for entry in entries}
        launched = {entry.index: Run(path) for entry in entries if (path := self.directory.run(entry)).exists()}
        states, objectives = [], []
        for entry in entries:
            result, run = ended[entry.index], launched.get(entry.index)
            states.append(result.state if result else run.status.state if run else "waiting")
            if result and result.objective is not None:
                objectives.append(result.objective)
        complete = {at for at, result in ended.items() if result and result.state == "finished"}
        return Configuration(
            index,
            self.directory.labels(entries[0]),
            runs=tuple(launched.values()),
            finished=tuple(run for at, run in launched.items() if at in complete),
            at_work=tuple(run for at, run in launched.items() if ended[at] is None),
            states=tuple(states),
            objectives=tuple(objectives),
        )

    @checked_arguments
    def best(self, count: int = 1) -> list[Run]:
        """Return the runs, with every seed, of the `count` configurations whose mean objective is lowest."""
        if count < 1:
            raise InvalidArgument(f"count={count} is no number of configurations. Give at least 1.")
        ranked = [row for row in self.rows() if row.mean is not None]
        return [run for row in ranked[:count] for run in row.runs]

    @property
    def saved(self) -> str:
        """Return what the early-stopping rule saved, in words; where it stopped no run, why not."""
        results = [result for _, result in self.results()]
        ended = [result for result in results if result.state == "stopped early"]
        if not ended:
            rule = rule_from_json(self.directory.settings["stop"])
            return f"No run was stopped early{why_none(rule, sum(result.state == 'finished' for result in results))}."
        steps, seconds = sum(result.saved_steps for result in ended), sum(result.saved_s for result in ended)
        return (
            f"{len(ended)} run{'s were' if len(ended) > 1 else ' was'} stopped early, which saved {steps:,} steps "
            f"({duration(seconds)} of training)."
        )

    def __repr__(self) -> str:
        return "\n".join([self.headline(), text_table(self.cells(self.rows())), self.footline()])

    def _repr_html_(self) -> str:
        head, *body = self.cells(self.rows())
        table = html_table(head, body)
        return f"<p><b>{html.escape(self.headline())}</b></p>{table}<p>{html.escape(self.footline())}</p>"

    def headline(self) -> str:
        """Return how far the sweep has come, in words."""
        return f"Sweep {self.name}: {len(self.results())} of {self.num_runs} runs have ended, {self.state}"

    def footline(self) -> str:
        """Return what is compared, how the runs share the devices, and what early stopping saved."""
        return f"Objective: {self.objective}. {self.why} {self.saved}"

    def cells(self, rows: Sequence[Configuration]) -> list[tuple[str, ...]]:
        """Return a table of rows as text, with a line of titles first."""
        cells = [(*self.axes, "objective", "± over seeds", "runs")]
        for row in rows:
            mean = "not finite" * bool(row.finished) if row.mean is None else f"{row.mean:.4g}"
            spread = "" if row.spread is None else f"{row.spread:.2g}"
            counts = {state: row.states.count(state) for state in dict.fromkeys(row.states)}
            states = ", ".join(f"{count} {state}" for state, count in counts.items())
            cells.append((*map(label_text, row.values.values()), mean, spread, states))
        return cells


@checked_arguments
def load_sweep(path: Sweep | str | os.PathLike[str]) -> Sweep:
    """Return the sweep in the directory `path`, or of that name under the runs folder; raises `RunNotFound`."""
    return path if isinstance(path, Sweep) else Sweep(find_queue(path, Sweep.SETTINGS, "sweep"))


def follow(sweep: Sweep, every_s: float = 5.0) -> Iterator[str]:
    """Yield a line when a run changes its state or ends, and every `every_s` seconds for runs that make steps.

    Ends when the supervisor of the sweep has left.
    """
    reporter, ended = ProgressReporter(every_s), len(sweep.results())
    while True:
        alive = sweep.alive  # asked before the last look at the runs
        yield from reporter.lines(sweep.runs)
        if len(sweep.results()) > ended:
            ended = len(sweep.results())
            best = sweep.rows()[0]
            values = ", ".join(f"{name} {label_text(value)}" for name, value in best.values.items())
            yield sweep.headline() + ("" if best.mean is None else f"; best so far {best.mean:.4g} with {values}")
        if not alive:
            return
        time.sleep(POLL_S)
