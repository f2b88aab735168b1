"""The functions of the public API that join several rooms. `workbench/__init__.pyi` lists the whole API."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.arguments import checked_arguments
from workbench.cost.cluster import Cluster
from workbench.data import data_fingerprint
from workbench.errors import DataError, InvalidArgument, InvalidExperiment, PlanMismatch
from workbench.experiment import Experiment
from workbench.planning import from_experiment
from workbench.planning.data_supply import DataSupply
from workbench.planning.data_supply import data_supply as supply_of
from workbench.planning.from_experiment import check_signature
from workbench.planning.plan import Plan
from workbench.rundir import read_json
from workbench.runs.launching import launcher
from workbench.runs.registry import distinct_names, load_run
from workbench.runs.run import Run

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from workbench.analysis.contrast import Contrast
    from workbench.analysis.curve import Curve
    from workbench.analysis.seed_contrast import SeedContrast
    from workbench.data import Prepared
    from workbench.notebooks import Reproduction, Shared
    from workbench.runs.records.summary import Summary
    from workbench.sweeps.sweep import Sweep
    from workbench.widgets import Live, WhatIf

PathLike = str | os.PathLike[str]
OneRun = Run | PathLike
"""A run, or its directory or name."""
Runs = OneRun | Iterable[OneRun]
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


@checked_arguments
def data_supply(experiment: Experiment, plan: Plan) -> DataSupply:
    """Say whether streamed text is tokenised as fast as a plan trains on it, and how many cores that takes.

    It compares the plan's predicted tokens per second with those that the cores of this machine make, measured on
    excerpts of the text. `launch` warns of a training that would wait. Raises `DataError` for data that are not
    streamed.
    """
    experiment.data.check(experiment)
    supply = supply_of(experiment.data.prepare(experiment), plan)
    if supply is None:
        raise DataError(
            f"{experiment.data.name} is not tokenised while it trains, so that training does not wait for it. Streamed "
            "text is wb.data.corpus(path, streaming=True).",
            data=experiment.data.name,
        )
    return supply


@checked_arguments
def compare(
    runs: Runs, x: str = "tokens", *, y: str = "loss", smoothing: float | None = None, title: str | None = None
) -> go.Figure:
    """Draw the curves of several runs in one figure, raw values behind their moving averages.

    Args:
        runs: the runs, as handles, names or directories.
        x: the x axis that is shown first: `step`, `tokens`, `samples`, `time`, `flops` or `gpu_hours`.
        y: the recorded column to draw: `loss` (with the held-out loss, where a run has one), `eval_loss`,
            `perplexity` of the held-out samples, `grad_norm`, ...
        smoothing: width of the moving average as a share of the longest run; by default 0.01.
        title: title of the figure.

    Raises `UnknownParameter` for an axis or a column that was not recorded.
    """
    from workbench.figures import loss_curves

    return loss_curves(_curves(_handles(runs)), x=x, y=y, title=title, **_given(smoothing=smoothing))


@checked_arguments
def contrast(runs: Runs | Sweep, x: str = "tokens", *, smoothing: float | None = None) -> Contrast | SeedContrast:
    """Return a comparison of runs at equal tokens, FLOPs, GPU-hours and time.

    It holds the difference of each run to the first over the axis `x`, with its confidence interval and the points
    where curves cross, and everything that differs in experiments, plans and environments. Arguments are those of
    `compare`.

    Runs that differ in their seed alone are one configuration. If each of several configurations has at least two
    seeds, the interval of the difference comes from the seeds instead (Welch's t), and a difference whose interval
    contains zero is called not distinguishable. Of a sweep, the configurations with two finished seeds are compared
    with the best.
    """
    from workbench.analysis.contrast import contrast as contrast_curves
    from workbench.analysis.seed_contrast import contrast_seeds, group_names, seed_groups
    from workbench.sweeps.sweep import Sweep

    handles = _handles(_finished(runs) if isinstance(runs, Sweep) else runs)
    described = [{"experiment": run.experiment, "plan": _plan_json(run)} for run in handles]
    groups, curves = seed_groups(described), _curves(handles)
    if len(groups) > 1 and all(len(group) > 1 for group in groups):
        names = group_names([described[group[0]] for group in groups])
        by_name = {name: [curves[at] for at in group] for name, group in zip(names, groups, strict=True)}
        return contrast_seeds(by_name, **_given(smoothing=smoothing))
    full = [{**facts, "environment": run.environment} for facts, run in zip(described, handles, strict=True)]
    return contrast_curves(curves, full, x, **_given(smoothing=smoothing))


def _finished(sweep: Sweep) -> list[Run]:
    """Return the finished runs of each configuration that has two of them, the best configuration first."""
    rows = [row for row in sweep.rows() if len(row.finished) > 1]
    if len(rows) < 2:
        raise InvalidExperiment(
            f"{len(rows)} of {len(sweep.rows())} configurations of {sweep.name} have two finished seeds, and a "
            "contrast needs two such configurations. Sweep with seeds=2 or more, or wait until more runs have finished."
        )
    return [run for row in rows for run in row.finished]


def _plan_json(run: Run) -> Any:
    return read_json(run.directory.plan) if run.directory.plan.exists() else {}


@checked_arguments
def partition(plan: Plan, experiment: Experiment) -> go.Figure:
    """Draw the experiment's model in the plan's stages, with names and shapes of the tensors between two stages."""
    from workbench.figures import partition as draw_partition

    check_signature(experiment, plan)
    graph = from_experiment.graph(experiment, plan.micro_batch)
    crossing = {
        stage.index: [graph.values[name] for name in graph.crossing(stage.end_block)] for stage in plan.stages[:-1]
    }
    return draw_partition(plan, crossing=crossing)


@checked_arguments
def timeline(run: OneRun | Plan) -> go.Figure:
    """Draw the schedule of one step: a plan's prediction, or a run's prediction above a step that it measured."""
    from workbench.figures import measured_timeline, timelines
    from workbench.figures import timeline as predicted_timeline

    if isinstance(run, Plan):
        return predicted_timeline(run)
    handle = load_run(run)
    measured = measured_timeline(handle.events())
    return predicted_timeline(handle.plan) if measured is None else timelines(handle.plan, measured)


@checked_arguments
def live(runs: Runs, x: str = "tokens") -> Live:
    """Return a dashboard whose curves grow in place, with state, speed and a button to stop or resume each run."""
    from workbench.widgets import live as live_dashboard

    return live_dashboard(_handles(runs), x=x)


@checked_arguments
def what_if(experiment: Experiment, cluster: Cluster | None = None) -> WhatIf:
    """Return sliders for GPUs, memory, global batch and micro-batch, with the figure of the plan that follows them.

    The model is captured and profiled once, for devices of `cluster`, by default of this machine.
    """
    from workbench.widgets import WhatIf

    profile, cluster = from_experiment.profile_and_cluster(experiment, cluster)
    return WhatIf(profile, cluster, experiment.global_batch, experiment.seq_len)


@checked_arguments
def show(run: OneRun) -> go.Figure:
    """Draw what was predicted for a run beside what it measured: step time, speed, memory, and one step's schedule."""
    from workbench.figures import measured_timeline, prediction
    from workbench.runs.records.summary import measurements

    handle = load_run(run)
    title = f"{handle.name}: predicted and measured"
    return prediction(handle.plan, measurements(handle), title, measured_timeline(handle.events()))


@checked_arguments
def summary(runs: Runs) -> Summary:
    """Return a table of runs: plans, tokens, final loss, speed, prediction beside measurement, and the machine."""
    from workbench.runs.records.summary import summary as summarise

    return summarise(_handles(runs))


@checked_arguments
def share(notebook: PathLike, to: PathLike = "shared", *, runs: Runs | None = None) -> Shared:
    """Make an HTML page that is interactive offline, and a notebook under 5 MB that shows without a kernel.

    Both go into the folder `to`. The notebook keeps what `wb.reproduce` needs of its runs: those that
    `workbench execute` recorded, else `runs`, else the runs whose names its outputs show.
    """
    from workbench.notebooks import share as share_notebook

    files = Path(notebook).expanduser(), Path(to).expanduser()
    return share_notebook(*files, None if runs is None else _handles(runs))


@checked_arguments
def reproduce(
    notebook: PathLike,
    to: PathLike = "reproduced",
    *,
    kernel: str | None = None,
    at_commit: bool = False,
    trust: bool = False,
) -> Reproduction:
    """Execute a shared notebook again and compare its curves with the recorded ones.

    Its cells run as you: without `trust=True` nothing is executed, and the error shows what would be.

    Its runs take the recorded plans, if this machine can run them. `at_commit=True` executes the code of the recorded
    git commit. Raises `WorkbenchError` for a notebook without a record.
    """
    from workbench.notebooks import reproduce as reproduce_notebook

    files = Path(notebook).expanduser(), Path(to).expanduser()
    return reproduce_notebook(*files, kernel=kernel, at_commit=at_commit, trust=trust)


@checked_arguments
def pareto(runs: Runs, published: bool = False) -> go.Figure:
    """Draw the held-out loss of finished runs against the FLOPs of their layers and, beside it, against their seconds.

    Runs that differ in their seed only are one mark, with a bar over the seeds. FLOPs are those of one sequence,
    forward and backward, without embeddings, head and absent blocks. `published` adds the figures of arXiv:2108.06277.

    Raises `InvalidExperiment` for runs without held-out losses, and for models and data of one's own.
    """
    from workbench.analysis.pareto import pareto_points
    from workbench.figures.pareto_view import pareto as draw

    return draw(pareto_points(_handles(runs)), published)


@checked_arguments
def pattern(run: OneRun) -> go.Figure:
    """Draw the pattern of a run's first sparse weight, with a slider over the updates."""
    from workbench.figures.pattern_view import pattern as draw

    handle = load_run(run)
    patterns = handle.patterns()
    if not len(patterns):
        raise InvalidArgument(f"{handle.name} has dense weights, or has not begun. Give a run with a sparsity.")
    return draw(patterns, handle.name)


@checked_arguments
def exploration(runs: Runs) -> go.Figure:
    """Draw the share of blocks that sparse runs have explored, and the prune ratio, over the steps."""
    from workbench.figures.pattern_view import exploration as draw

    handles = _handles(runs)
    named = dict(zip(distinct_names(handles), (run.patterns() for run in handles), strict=True))
    return draw({name: patterns for name, patterns in named.items() if len(patterns)})


def _handles(runs: Runs) -> list[Run]:
    several = [runs] if isinstance(runs, Run | str | os.PathLike) else list(runs)
    if not several:
        raise InvalidArgument("No run is given. Give at least one: its handle, its name or its directory.")
    return [load_run(run) for run in several]


def _curves(runs: Sequence[Run]) -> list[Curve]:
    from workbench.analysis.curve import Curve

    return [
        Curve(name, run.history(), evaluations=run.evaluations())
        for name, run in zip(distinct_names(runs), runs, strict=True)
    ]


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None, so that the called function's defaults hold for the others."""
    return {name: value for name, value in options.items() if value is not None}
