"""Starting a run: `launch` on this machine, and `prepare` for nodes that are elsewhere."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from workbench.arguments import checked_arguments
from workbench.data import Prepared, data_fingerprint
from workbench.errors import InvalidArgument, PlanMismatch
from workbench.experiment import Experiment
from workbench.planning import from_experiment
from workbench.planning.data_supply import supply_of
from workbench.planning.from_experiment import check_signature
from workbench.planning.plan import Plan
from workbench.runs.launching import launcher
from workbench.runs.registry import OneRun
from workbench.runs.run import Run

PathLike = str | os.PathLike[str]
MOST_WORKERS = 1024
"""Largest number of processes that `tokenize` starts."""


@checked_arguments
def launch(
    experiment: Experiment, plan: Plan | None = None, *, directory: PathLike | None = None, progress: bool = True
) -> Run:
    """Start a training in processes of its own, and return its `Run` at once.

    The experiment and the plan are checked before a process starts. A corpus that was never tokenised is tokenised
    here. Runs that need the same devices queue. A run outlives this process; `wb.load_run` finds it again.

    Args:
        experiment: what to train.
        plan: how to divide a step; by default the fastest plan for this machine.
        directory: the run directory; by default `<name>-<time>` in `$WORKBENCH_RUNS` or `./runs`.
        progress: show a progress bar while a corpus is tokenised.

    Raises `PlanMismatch` for a plan of another model, `PlanInfeasible` if no plan fits, `CaptureError` if the model
    cannot be captured, and `DataError` if the data cannot feed it.
    """
    experiment.data.check(experiment)
    chosen = _recorded_plan(experiment) or (from_experiment.plan(experiment) if plan is None else plan)
    facts = _check_and_prepare(experiment, chosen, progress)
    return Run(launcher.launch(experiment, chosen, directory=directory, facts=facts))


def _recorded_plan(experiment: Experiment) -> Plan | None:
    """Return the plan that `workbench reproduce` gives this run of a notebook, if it fits the model; else None."""
    recorded = launcher.replayed_plan(experiment)
    try:
        if recorded is not None:
            check_signature(experiment, recorded)
    except PlanMismatch:
        return None
    return recorded


@checked_arguments
def prepare(
    experiment: Experiment,
    plan: Plan,
    *,
    directory: PathLike | None = None,
    resume: OneRun | None = None,
    progress: bool = True,
) -> Run:
    """Write the run directory as `launch` does and start nothing, for a plan whose nodes are elsewhere.

    `run.slurm()` makes a job file of it; `torchrun` and `accelerate launch` start it too. `resume` continues another
    run or a checkpoint. The directory and `$WORKBENCH_HOME` must be on a file system that every node sees. The other
    arguments and the errors are those of `launch`.
    """
    experiment.data.check(experiment)
    facts = _check_and_prepare(experiment, plan, progress)
    continued = None if resume is None else resume.path if isinstance(resume, Run) else Path(resume).expanduser()
    return Run(launcher.prepare(experiment, plan, directory=directory, resume=continued, facts=facts))


def _check_and_prepare(experiment: Experiment, plan: Plan, progress: bool) -> dict[str, Any]:
    """Check that the plan is for the experiment, prepare the data, and return facts for the run's environment."""
    check_signature(experiment, plan)
    from_experiment.check_optimizer(experiment, plan)
    from_experiment.check_sparsity(experiment, plan)
    supply = supply_of(experiment.data.prepare(experiment, progress=progress), plan)
    if supply is not None and not supply.keeps_up:
        warnings.warn(repr(supply), stacklevel=3)
    from_experiment.check_between_steps(experiment, plan)
    return {"data_fingerprint": data_fingerprint(experiment)}


@checked_arguments
def tokenize(experiment: Experiment, *, workers: int | None = None, progress: bool = True) -> Prepared:
    """Tokenise the text of an experiment now rather than when it is launched; nothing is done twice.

    `workers` is the number of processes, one per core by default. Work that was killed goes on where it stopped. Raises
    `DataError` for data that cannot feed the experiment.
    """
    if workers is not None and not 1 <= workers <= MOST_WORKERS:
        raise InvalidArgument(f"workers={workers} lies outside 1 to {MOST_WORKERS:,}.", parameter="workers")
    experiment.data.check(experiment)
    return experiment.data.prepare(experiment, progress=progress, workers=workers)
