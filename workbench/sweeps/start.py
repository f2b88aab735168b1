"""`wb.sweep`: checks the axes, plans, writes the sweep's directory, and starts its supervisor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from workbench.arguments import checked_arguments
from workbench.errors import InvalidExperiment
from workbench.experiment import Experiment
from workbench.measure.local_cluster import local_cluster
from workbench.planning.runnable import captured_model, check_runnable
from workbench.sweeps import packing
from workbench.sweeps.axes import LARGEST_GRID, Axes, Choice
from workbench.sweeps.directory import Entry, configuration_key, plan_key, profile_key
from workbench.sweeps.queue import new_queue, start_queue
from workbench.sweeps.rules import Rule, check_rule, rule_to_json
from workbench.sweeps.sweep import Sweep
from workbench.units import is_count

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
            models leave most of a GPU idle; their steps take longer side by side, the sweep less.
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
    check_rule(stop)
    _check_numbers(grid, seeds, sampler, trials, runs_per_gpu)
    choices = list(grid.choices())
    asked = [grid.experiment_of(choice) for choice in choices]
    needed: dict[str, tuple[Choice, Experiment]] = {}
    for choice, chosen in zip(choices, asked, strict=True):
        chosen.data.check(chosen)
        needed.setdefault(plan_key(choice), (choice, chosen))
    for _, chosen in needed.values():
        chosen.data.prepare(chosen)
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
    packed, why = packing.choose(experiments, runs, local_cluster(), profiled_as, runs_per_gpu)
    for key, plan in packed.plans.items():
        check_runnable(experiments[key], plan, captured_model(experiments[key], plan), progress=True)
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
        "stop": rule_to_json(stop),
        "packing": {
            "side_by_side": packed.side_by_side,
            "devices_each": packed.devices_each,
            "share": packed.share,
            "why": why,
        },
        "ahead": AHEAD if sampler == "grid" else 0,
    }
    entries = [Entry(0, choice, seed) for seed in seed_list for choice in choices] if sampler == "grid" else []
    plans = (packed.plans[plan_key(choice)] for choice in choices)
    start_queue(folder, settings, entries, zip(choices, asked, plans, strict=True))
    return Sweep(folder.path)


def _check_numbers(grid: Axes, seeds: Any, sampler: Any, trials: Any, runs_per_gpu: Any) -> None:
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
