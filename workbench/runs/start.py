"""Starting a run: `launch` on this machine, and `prepare` for nodes that are elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

from workbench.arguments import checked_arguments
from workbench.data import Prepared
from workbench.errors import InvalidArgument
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.planning.planner import plan as make_plan
from workbench.planning.runnable import captured_model
from workbench.runs.launching import launcher
from workbench.runs.launching.run_directory import Attempt
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

    Examples:
        >>> run = wb.launch(experiment.replace(seed=2))
        >>> run.wait().status.state
        'finished'
        >>> len(run.history())
        40
    """
    experiment.data.check(experiment)
    chosen = _recorded_plan(experiment) or plan or make_plan(experiment)
    attempt = Attempt(experiment, chosen, directory)
    return Run(launcher.launch(attempt, captured_model(experiment, chosen), progress=progress))


def _recorded_plan(experiment: Experiment) -> Plan | None:
    """Return the plan that `workbench reproduce` gives this run of a notebook, if it fits the model; else None."""
    recorded = launcher.replayed_plan(experiment)
    captured = None if recorded is None else captured_model(experiment, recorded)
    return recorded if captured is not None and recorded and captured.signature == recorded.signature else None


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
    continued = None if resume is None else resume.path if isinstance(resume, Run) else Path(resume).expanduser()
    attempt = Attempt(experiment, plan, directory, continued)
    return Run(launcher.prepare(attempt, captured_model(experiment, plan), progress=progress))


@checked_arguments
def debug(
    experiment: Experiment,
    plan: Plan | None = None,
    *,
    directory: PathLike | None = None,
    resume: OneRun | None = None,
    progress: bool = True,
) -> Run:
    """Train in this process, for debugging, and return the `Run` when the training has ended.

    The model is called as it is with the first samples, then captured and trained. A breakpoint in it stops here, what
    it prints appears here, and an exception is raised here with its own traceback, so that `%debug` opens it. Rank 0 is
    this process; the other ranks of a plan are processes of their own. The run directory is that of `launch`, and the
    figures in it have the same values to the last bit. Nobody supervises the run: it does not queue for its devices,
    and an interrupt ends it without a checkpoint.

    The arguments are those of `prepare`; `plan` is by default the fastest plan for one device of this machine. Raises
    what `launch` raises, what the training raises, and `WorkbenchError` in a process that has a process group or an
    `Accelerator`.

    Examples:
        >>> run = wb.runs.debug(experiment.replace(steps=2))
        >>> run.status.state
        'finished'
    """
    from workbench.execution.in_process import check_free, train_here
    from workbench.measure.calibration import local_cluster

    check_free()
    chosen = plan or make_plan(experiment, local_cluster(1))
    run = prepare(experiment, chosen, directory=directory, resume=resume, progress=progress)
    train_here(run.path, chosen.world, chosen.cluster.device.type)
    return run


@checked_arguments
def tokenize(experiment: Experiment, *, workers: int | None = None, progress: bool = True) -> Prepared:
    """Tokenise the text of an experiment now rather than when it is launched; nothing is done twice.

    `workers` is the number of processes, one per core by default. Work that was killed goes on where it stopped. Raises
    `DataError` for data that cannot feed the experiment.
    """
    if workers is not None and not 1 <= workers <= MOST_WORKERS:
        raise InvalidArgument(f"workers={workers} lies outside 1 to {MOST_WORKERS:,}.")
    experiment.data.check(experiment)
    return experiment.data.prepare(experiment, progress=progress, workers=workers)
