"""`wb.sweep`: checks the axes, plans, writes the sweep's directory, and starts its supervisor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.arguments import checked_arguments
from workbench.errors import InvalidExperiment, RunExists
from workbench.experiment import Experiment
from workbench.planning import from_experiment
from workbench.rundir import write_json
from workbench.runs.launching import processes
from workbench.runs.launching.run_directory import new_directory, user_code
from workbench.sweeps import placement
from workbench.sweeps.axes import LARGEST_GRID, Axes
from workbench.sweeps.directory import Entry, SweepDir, plan_key, profile_key
from workbench.sweeps.rules import Rule, check_rule, rule_to_json
from workbench.sweeps.sweep import Sweep, start_supervisor
from workbench.units import is_count

SAMPLERS = ("grid", "random", "tpe")


@checked_arguments
def sweep(
    experiment: Experiment,
    *,
    seeds: int = 1,
    sampler: str = "grid",
    trials: int | None = None,
    stop: Rule = None,
    directory: str | os.PathLike[str] | None = None,
    **axes: Sequence[Any],
) -> Sweep:
    """Train an experiment with other values of some of its fields, each with several seeds, in processes of their own.

    Every experiment is built and every plan is made before a process starts. The planner chooses between one run on all
    devices and several side by side by the predicted time of the whole sweep; `sweep.why` says which and why. A sweep
    outlives this process; `wb.load_sweep` finds it again, and its `resume()` goes on with what is missing.

    Args:
        experiment: what to train.
        seeds: number of seeds of each configuration, from the experiment's own seed on.
        sampler: `grid` trains every combination; `random` and `tpe` (Optuna's) choose `trials` of them.
        trials: number of configurations that `random` and `tpe` choose.
        stop: rule that ends hopeless runs: `wb.diverged(above=6.5, after=500)`, `"median"` or `"halving"`.
        directory: the sweep's directory; by default `<name>-sweep-<time>` in `$WORKBENCH_RUNS` or `./runs`.
        axes: values to try for fields of the experiment, such as `learning_rate=[1e-4, 3e-4]`.

    Raises `UnknownParameter` for an axis that is no field, `InvalidExperiment` for values that cannot train, and what
    `wb.launch` raises.
    """
    grid = Axes(experiment, dict(axes))
    check_rule(stop)
    _check_numbers(grid, seeds, sampler, trials)
    choices = list(grid.choices())
    planned: dict[str, dict[str, int]] = {}
    for choice in choices:
        chosen = grid.experiment_of(choice)
        chosen.data.check(chosen)
        planned.setdefault(plan_key(choice), choice)
    for choice in planned.values():
        chosen = grid.experiment_of(choice)
        chosen.data.prepare(chosen)
    seed_list = [experiment.seed + offset for offset in range(seeds)]
    count = len(choices) if trials is None else trials
    runs = [(plan_key(choice), grid.experiment_of(choice).steps) for _ in seed_list for choice in choices[:count]]
    experiments = {key: grid.experiment_of(choice) for key, choice in planned.items()}
    profiled_as = {key: profile_key(choice) for key, choice in planned.items()}
    placed, why = placement.choose(experiments, runs, _cluster(), profiled_as)
    for key, plan in placed.plans.items():
        from_experiment.check_optimizer(experiments[key], plan)
        from_experiment.check_between_steps(experiments[key], plan)
    folder = SweepDir(_new_folder(experiment, directory))
    for key, plan in placed.plans.items():
        (folder.path / "plans").mkdir(exist_ok=True)
        plan.save(folder.plan_file(planned[key]))
    _write_code(folder, grid)
    grid_queue = [Entry(0, choice, seed) for seed in seed_list for choice in choices]
    folder.write_queue(grid_queue if sampler == "grid" else [])
    settings = {
        "experiment": experiment.to_json(),
        "axes": {name: grid.json_values(name) for name in grid.values},
        "seeds": seed_list,
        "sampler": sampler,
        "trials": trials,
        "stop": rule_to_json(stop),
        "placement": {"side_by_side": placed.side_by_side, "devices_each": placed.devices_each, "why": why},
        "worker": processes.WORKER,
    }
    write_json(folder.settings_file, settings)
    start_supervisor(folder)
    return Sweep(folder.path)


def _cluster() -> Any:
    from workbench.measure.local_cluster import local_cluster

    return local_cluster()


def _check_numbers(grid: Axes, seeds: Any, sampler: Any, trials: Any) -> None:
    if not is_count(seeds) or seeds > LARGEST_GRID:
        raise InvalidExperiment(f"seeds={seeds!r} is not a number of seeds. Give 1 to {LARGEST_GRID:,}.")
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


def _new_folder(experiment: Experiment, directory: str | os.PathLike[str] | None) -> Path:
    if directory is None:
        return new_directory(f"{experiment.name}-sweep")
    path = Path(directory).expanduser().absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunExists(f"{path} is not empty. Choose another directory, or go on with wb.load_sweep(path).resume().")
    path.mkdir(parents=True, exist_ok=True)
    return path


def _write_code(folder: SweepDir, grid: Axes) -> None:
    """Write the user's own model, dataset and functions once for each combination of axes that hold them."""
    for choice in grid.choices():
        code = folder.code_folder(choice)
        if not code.exists():
            code.mkdir(parents=True)
            for name, content in user_code(grid.experiment_of(choice)).items():
                (code / name).write_bytes(content)
