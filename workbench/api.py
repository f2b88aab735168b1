"""The verbs of the workbench: each joins the rooms for one thing that a user does.

A notebook imports them as `wb.plan`, `wb.launch`, …; the shell's `workbench plan|run|…` call the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cost.cluster import Cluster
from workbench.errors import PlanMismatch, WorkbenchError, checked_keywords
from workbench.experiment import Experiment
from workbench.measure.local_cluster import local_cluster
from workbench.planning.plan import Plan
from workbench.rundir import read_json
from workbench.runs import Run, RunTable
from workbench.runs import launch as _launch
from workbench.runs import load_run as _load_run
from workbench.runs import runs as _runs
from workbench.runs.launching.launcher import replayed_plan
from workbench.runs.records.environment import data_fingerprint
from workbench.tensors import TensorSpec

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from workbench.capture import Graph
    from workbench.cost.profiles import Profile
    from workbench.figures import Contrast
    from workbench.measure.block_request import Request
    from workbench.measure.calibration import Calibration
    from workbench.notebooks import Reproduction, Shared
    from workbench.planning.plans import Plans
    from workbench.runs import Report
    from workbench.runs.records.summary import Summary
    from workbench.runs.tracking.wandb_run import Delivery
    from workbench.widgets import Live, WhatIf

PROBE_BATCH = 2
"""Samples at which a model is captured for planning; costs are linear in the micro-batch."""

Runs = Run | str | os.PathLike[str] | Sequence[Run | str | os.PathLike[str]]


@checked_keywords
def capture(experiment: Experiment, micro_batch: int = PROBE_BATCH) -> Graph:
    """The experiment's model as a graph of blocks, without weights; raises `CaptureError`."""
    from workbench.capture import build_meta
    from workbench.capture import capture as capture_model

    model = build_meta(experiment.model.build)
    return capture_model(model, _batch(experiment, micro_batch), name=experiment.model.name)


@checked_keywords
def profile(experiment: Experiment, cluster: Cluster | None = None) -> Profile:
    """What each block of the experiment's model costs on a cluster's device: what `plan` and `search` plan from.

    Where this machine has the cluster's GPU, every kind of block is measured on it (about a minute, once per model,
    device and torch version); elsewhere it is priced from the device's constants.
    """
    return _profiled(experiment, cluster)[0]


def _profiled(experiment: Experiment, cluster: Cluster | None) -> tuple[Profile, Cluster]:
    """See `profile`; and the cluster, which is this machine if none was given.

    The processes that measure start first, because they take as long as this one to import torch.
    """
    from workbench.measure.blocks import Probes, kept_blocks, measured_blocks, seems_kept, seems_measurable

    experiment.data.check(experiment)
    with ExitStack() as stack:
        early = cluster is None and seems_measurable() and not seems_kept(experiment.model.name)
        probes = stack.enter_context(Probes()) if early else None
        cluster = _cluster(cluster)
        request = _probe_request(experiment, cluster) if _is_here(cluster) else None
        if request is None:
            probes = None
            stack.close()
        elif probes is not None:
            probes.ask(request, cluster.device)
        costs = _counted(experiment, cluster)
        found = kept_blocks(costs, cluster) if cluster.device.type == "cuda" else ()
        if not found and request is not None:
            if probes is None:
                probes = stack.enter_context(Probes())
                probes.ask(request, cluster.device)
            found = measured_blocks(probes, costs, cluster, experiment.global_batch)
    if not found:
        return costs, cluster

    from workbench.cost.measured import with_measurements

    return with_measurements(costs, cluster.device, found), cluster


def _counted(experiment: Experiment, cluster: Cluster) -> Profile:
    """The experiment's model captured and priced, unmeasured."""
    from workbench.cost import profile as profile_graph

    graph = capture(experiment)
    return profile_graph(
        graph,
        cluster.device,
        resolved_precision(experiment, cluster),
        compiled=_compiled(experiment, cluster),
        labelled_share=_labelled_share(experiment, graph),
        deterministic=experiment.deterministic,
    )


def _labelled_share(experiment: Experiment, graph: Graph) -> float:
    """As the text promises, or as the user's own samples have it."""
    examples = experiment.data.examples(experiment)
    if examples is None:
        promised: float = experiment.data.labelled_share(experiment)
        return promised

    from workbench.execution.blocks.labelled_head import labelled_share

    return labelled_share(graph, examples)


def _is_here(cluster: Cluster) -> bool:
    """Whether this machine has the cluster's GPU."""
    from workbench.measure.local_cluster import local_gpu

    return cluster.device.type == "cuda" and local_gpu() == cluster.device.name


def _probe_request(experiment: Experiment, cluster: Cluster) -> Request:
    """What is asked of the processes that measure the model's blocks on this machine."""
    from workbench.measure.block_request import Request
    from workbench.measure.blocks import guesses

    return Request(
        experiment.model.name,
        experiment.model.build,
        dict(experiment.data.batch_specs(experiment)),
        experiment.model.vocab_size or getattr(experiment.data, "vocab_size", 0),
        experiment.data.labelled_share(experiment),
        resolved_precision(experiment, cluster),
        _compiled(experiment, cluster),
        experiment.deterministic,
        guesses(cluster, experiment.global_batch),
        experiment.data.examples(experiment),
    )


@checked_keywords
def calibrate(*, again: bool = False) -> Calibration:
    """Measure this machine once: matrix products, attention, memory, launches, the host, links between devices.

    Kept for this hardware and torch version, and used by `local_cluster()` from then on; `again` measures anew.
    `.save(path)` shares it, `Calibration.load(path).cluster(gpus=8)` plans for that machine elsewhere.
    """
    from workbench.measure.calibration import calibrate as measure

    return measure(again=again)


@checked_keywords
def plan(
    experiment: Experiment,
    cluster: Cluster | None = None,
    *,
    memory_limit_gib: float | None = None,
    pipeline: int | None = None,
    data: int | None = None,
    tensor: int | None = None,
    zero: int | None = None,
    micro_batch: int | None = None,
    recompute: str | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    offload_optimizer: bool | None = None,
    cuda_graphs: bool | None = None,
) -> Plan:
    """The fastest way to run a step that fits: by default on this machine. `wb.search` shows what else was weighed.

    `cluster` plans for another one (`Cluster.of("h200", gpus=256)`). `memory_limit_gib` caps what one device may
    use, in the plan and while it runs. Any of the degrees can be fixed; the rest is searched.

    Raises `PlanInfeasible` when nothing fits, `CaptureError` when the model cannot be captured, `DataError` when
    the data cannot feed it.
    """
    return search(
        experiment,
        cluster,
        memory_limit_gib=memory_limit_gib,
        pipeline=pipeline,
        data=data,
        tensor=tensor,
        zero=zero,
        micro_batch=micro_batch,
        recompute=recompute,
        schedule=schedule,
        chunks=chunks,
        offload_optimizer=offload_optimizer,
        cuda_graphs=cuda_graphs,
    ).best


@checked_keywords
def search(
    experiment: Experiment,
    cluster: Cluster | None = None,
    *,
    memory_limit_gib: float | None = None,
    pipeline: int | None = None,
    data: int | None = None,
    tensor: int | None = None,
    zero: int | None = None,
    micro_batch: int | None = None,
    recompute: str | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    offload_optimizer: bool | None = None,
    cuda_graphs: bool | None = None,
) -> Plans:
    """Every way to run a step that was weighed, as a table; `.best` is the plan that `wb.plan` gives.

    `pipeline` × `data` × `tensor` devices are used. `zero` (0 to 3) says what the replicas shard; `recompute` is
    `none`, `selective` or `full` activation checkpointing; `schedule` one of `gpipe`, `1f1b`, `interleaved`,
    `zero_bubble`, with `chunks` stages a pipeline rank. `cuda_graphs` says whether blocks are recorded and replayed,
    which pays where a host launches more slowly than its GPU runs; left out, it is weighed there. Arguments and errors
    as for `wb.plan`.
    """
    costs, cluster = _profiled(experiment, cluster)

    from workbench.planning import Request, weigh
    from workbench.planning.requests import memory_limit_bytes

    request = Request(
        experiment.global_batch,
        experiment.seq_len,
        cluster,
        memory_limit_bytes(memory_limit_gib),
        pipeline,
        data,
        tensor,
        zero,
        micro_batch,
        recompute,
        schedule,
        chunks,
        offload_optimizer,
        cuda_graphs,
    )
    return weigh(costs, costs.precision, request)


def _cluster(given: Cluster | None) -> Cluster:
    """This machine, if none was given; raises `PlanInfeasible` for what is no cluster."""
    from workbench.planning.requests import check_cluster

    if given is None:
        return local_cluster()
    check_cluster(given)
    return given


def resolved_precision(experiment: Experiment, cluster: Cluster) -> str:
    """`auto` is bf16 on GPUs and fp32 on CPUs."""
    if experiment.precision != "auto":
        return experiment.precision
    return "bf16" if cluster.device.type == "cuda" else "fp32"


def _compiled(experiment: Experiment, cluster: Cluster) -> bool:
    return cluster.device.type == "cuda" if experiment.compile is None else experiment.compile


def _batch(experiment: Experiment, micro_batch: int) -> dict[str, TensorSpec]:
    specs: Mapping[str, TensorSpec] = experiment.data.batch_specs(experiment)
    return {name: spec.batched(micro_batch) for name, spec in specs.items()}


@checked_keywords
def launch(
    experiment: Experiment,
    plan: Plan | None = None,
    *,
    directory: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Run:
    """Train in processes of their own and return at once; without a plan, plan for this machine first.

    Everything that can be wrong is checked before a process starts, and a corpus that was never tokenised is
    tokenised here, with a progress bar. Runs that need the same devices queue. The run outlives this kernel:
    `wb.load_run(path)` finds it again.
    """
    experiment.data.check(experiment)
    chosen = _replayed(experiment) or (globals()["plan"](experiment) if plan is None else plan)
    check_signature(experiment, chosen)
    experiment.data.prepare(experiment, progress=progress)
    return _launch(experiment, chosen, directory=directory, facts={"data_fingerprint": data_fingerprint(experiment)})


def _replayed(experiment: Experiment) -> Plan | None:
    """While `workbench reproduce` executes a notebook, the recorded plan, where it still fits the model."""
    recorded = replayed_plan(experiment)
    try:
        if recorded is not None:
            check_signature(experiment, recorded)
    except PlanMismatch:
        return None
    return recorded


def clone(run: Run | str | os.PathLike[str], plan: Plan | None = None, **changes: Any) -> Run:
    """Launch a run's experiment again with some fields changed: `wb.clone(run, learning_rate=1e-4)`.

    As `run.clone`, and plans anew where a change asks for that (model, data, batch, sequence length, precision).
    """
    handle = load_run(run)
    if plan is None and changes.keys() & PLANNED_FIELDS:
        experiment = load_experiment(handle, **changes)
        experiment.data.check(experiment)
        plan = globals()["plan"](experiment)
    return handle.clone(plan, **changes)


PLANNED_FIELDS = frozenset({"model", "data", "global_batch", "seq_len", "precision"})
"""Of an experiment: a plan that was made for other values does not fit."""


def sync(runs: Runs | None = None, *, root: str | os.PathLike[str] | None = None) -> list[Delivery]:
    """Upload to W&B what it does not have of `runs`; by default of all tracked runs that have ended.

    Uses what the runs left on disk and changes nothing of them. Raises `WorkbenchError` if nobody is logged in.
    """
    from workbench.runs.tracking import wandb_run as tracking

    if runs is not None:
        return [tracking.sync(run.directory) for run in _handles(runs)]
    waiting = [run for run in _runs(root) if run.status.final and tracking.pending(run.directory)]
    return [tracking.sync(run.directory) for run in waiting if not tracking.recording(run.directory)]


@checked_keywords
def prepare(
    experiment: Experiment,
    plan: Plan,
    *,
    directory: str | os.PathLike[str] | None = None,
    resume: Run | str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Run:
    """Write the run directory as `launch` does and start nothing: for the nodes of a plan that are not here.

    `wb.slurm(run)` makes a job file of it; `torchrun` and `accelerate launch` start it as well. `resume` continues
    another run or a checkpoint. The directory and `$WORKBENCH_HOME` must be where every node sees them.
    """
    from workbench.runs.launching.launcher import prepare as _prepare

    experiment.data.check(experiment)
    check_signature(experiment, plan)
    experiment.data.prepare(experiment, progress=progress)
    facts = {"data_fingerprint": data_fingerprint(experiment)}
    return _prepare(experiment, plan, directory=directory, resume=resume, facts=facts)


@checked_keywords
def slurm(
    run: Run | str | os.PathLike[str],
    *,
    time: str = "24:00:00",
    partition: str | None = None,
    account: str | None = None,
    cpus_per_node: int | None = None,
    options: Sequence[str] = (),
) -> str:
    """The text of a Slurm job file that trains a prepared or stopped run on its plan's nodes.

    `options` are further `#SBATCH` options. Submitted or requeued again, the job continues from the last good
    checkpoint. Raises `PlanInfeasible` where the plan's devices do not fill its nodes equally.
    """
    from workbench.runs.launching.multi_node import slurm as job_file

    return job_file(
        load_run(run),
        time=time,
        partition=partition,
        account=account,
        cpus_per_node=cpus_per_node,
        options=options,
    )


def check_signature(experiment: Experiment, plan: Plan) -> None:
    """Raise `PlanMismatch` unless the plan was made for this model and these batch fields."""
    from workbench.capture import build_meta, signature

    found = signature(build_meta(experiment.model.build), _batch(experiment, 1))
    if found != plan.signature:
        raise PlanMismatch(
            f"The plan was made for {plan.model} at sequence length {plan.seq_len} (signature {plan.signature}), and "
            f"this is {experiment.model.name} at {experiment.seq_len} ({found}). Plan again with wb.plan(experiment).",
            planned=plan.signature,
            found=found,
        )


@checked_keywords
def resume(run: Run | str | os.PathLike[str], plan: Plan | None = None, *, steps: int | None = None) -> Run:
    """Continue a stopped or failed run from its last checkpoint, in the same directory.

    `plan` may be another than the run's own: checkpoints do not depend on it. `steps` extends the training. A model or
    dataset of one's own is the code that the run kept, which is not loaded here. Raises `PlanMismatch` for a plan
    of another model.
    """
    handle = load_run(run)
    experiment = Experiment.from_json(read_json(handle.directory.experiment))
    if steps is not None:
        experiment = experiment.replace(steps=steps)
    chosen = handle.plan if plan is None else plan
    if not (experiment.model.is_custom or experiment.data.is_custom):
        check_signature(experiment, chosen)
    elif chosen.signature != handle.plan.signature:
        raise PlanMismatch(
            f"The plan was made for {chosen.model} (signature {chosen.signature}), and {handle.name} trains "
            f"{handle.plan.model} ({handle.plan.signature}). Plan the run's own experiment.",
            planned=chosen.signature,
            found=handle.plan.signature,
        )
    return _launch(experiment, chosen, resume=handle, code={}, facts=_kept_facts(handle, experiment))


def _kept_facts(run: Run, experiment: Experiment) -> dict[str, Any]:
    """What a run's environment says beside its machine, for its continuation; data of one's own is not read here."""
    then: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # nothing that a continuation needs
        then = run.environment
    known: dict[str, Any] = {name: then[name] for name in ("cloned_from", "data_fingerprint") if name in then}
    if not experiment.data.is_custom:
        known["data_fingerprint"] = data_fingerprint(experiment)
    elif experiment.steps != run.experiment["steps"]:
        known["data_fingerprint"] = None  # of other last samples
    return known


@checked_keywords
def export(
    run: Run | str | os.PathLike[str], to: str | os.PathLike[str], *, step: int | None = None
) -> tuple[Path, ...]:
    """Write a run's model as `safetensors` that `from_pretrained` loads; see `Run.export`."""
    return load_run(run).export(to, step)


def load_experiment(run: Run | str | os.PathLike[str], **changes: Any) -> Experiment:
    """The experiment of a run, with `changes`. A model or dataset of the user's own is never unpickled."""
    handle = load_run(run)
    experiment = Experiment.from_json(read_json(handle.directory.experiment)).replace(**changes)
    own = (experiment.model.is_custom and "model" not in changes, experiment.data.is_custom and "data" not in changes)
    if any(own):
        raise WorkbenchError(
            f"{handle.name} trains a model or dataset of your own, which is kept as code in "
            f"{handle.directory.code} and is not loaded from there. Build the Experiment again and launch it."
        )
    return experiment


def load_run(path: Run | str | os.PathLike[str]) -> Run:
    """A run by path, by name under the runs folder, or on W&B (`"wandb:entity/project/id"`); never unpickles."""
    return path if isinstance(path, Run) else _load_run(path)


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """A plan from the JSON that `plan.save(path)` or a run directory holds; raises `PlanMismatch` for another file."""
    file = Path(path).expanduser()
    file = file / "plan.json" if file.is_dir() else file
    try:
        value = read_json(file)
    except (OSError, ValueError) as error:
        raise PlanMismatch(f"{file} holds no plan ({error}). Write one there: plan.save(path).") from None
    return Plan.from_json(value)


def runs(root: str | os.PathLike[str] | None = None) -> RunTable:
    """All runs under `root` (default: `$WORKBENCH_RUNS` or `./runs`), newest first."""
    return _runs(root)


def stop(runs: Runs, *, wait: bool = False) -> list[Run]:
    """Ask runs to write a checkpoint and end."""
    handles = _handles(runs)
    ending = [run for run in handles if not run.status.final]
    for run in handles:
        run.stop()
    if wait:
        for run in ending:
            run.wait()
    return handles


def kill(runs: Runs) -> list[Run]:
    """End runs at once, without a checkpoint, and wait until they have left their devices."""
    handles = _handles(runs)
    ending = [run for run in handles if not run.status.final]
    for run in handles:
        run.kill(wait=False)
    for run in ending:
        run.wait()
    return handles


def wait(runs: Runs, *, timeout: float | None = None) -> list[Run]:
    """Block until all runs have ended; raises `RunFailed` with the first dead rank's own traceback.

    Interrupting this leaves the runs alive.
    """
    handles = _handles(runs)
    deadline = None if timeout is None else time.monotonic() + timeout
    for run in handles:
        run.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not run.status.final:  # interrupted, or out of time
            break
    return handles


@checked_keywords
def compare(
    runs: Runs, x: str = "tokens", *, y: str = "loss", smoothing: float | None = None, title: str | None = None
) -> go.Figure:
    """Curves of several runs in one figure, raw behind smoothed; x: step, tokens, time, flops, gpu_hours."""
    from workbench.figures import Curve, loss_curves

    handles = _handles(runs)
    curves = [Curve(label, run.history()) for label, run in zip(_labels(handles), handles, strict=True)]
    options: dict[str, Any] = {} if smoothing is None else {"smoothing": smoothing}
    return loss_curves(curves, x=x, y=y, title=title, **options)


@checked_keywords
def contrast(runs: Runs, x: str = "tokens", *, smoothing: float | None = None) -> Contrast:
    """Who is lower at equal tokens, FLOPs, GPU-hours and time; the difference to the first run over `x`, where the
    curves cross and how sure that is; and what differs in experiments, plans and environments.
    """
    from workbench.figures import Curve
    from workbench.figures import contrast as contrasted

    handles = _handles(runs)
    curves = [Curve(label, run.history()) for label, run in zip(_labels(handles), handles, strict=True)]
    options: dict[str, Any] = {} if smoothing is None else {"smoothing": smoothing}
    return contrasted(curves, [_described(run) for run in handles], x, **options)


def _described(run: Run) -> dict[str, Any]:
    plan = read_json(run.directory.plan) if run.directory.plan.exists() else {}
    return {"experiment": run.experiment, "plan": plan, "environment": run.environment}


def partition(plan: Plan, experiment: Experiment) -> go.Figure:
    """The experiment's model in the plan's stages, with the tensors that cross each cut: names and shapes on hover."""
    from workbench.figures import partition as drawn

    check_signature(experiment, plan)
    graph = capture(experiment, plan.micro_batch)
    crossing = {
        stage.index: [graph.values[name] for name in graph.crossing(stage.end_block)] for stage in plan.stages[:-1]
    }
    return drawn(plan, crossing=crossing)


def timeline(run: Run | str | os.PathLike[str] | Plan) -> go.Figure:
    """One step's schedule: of a plan as predicted; of a run the prediction above a step as it was measured."""
    from workbench.figures import measured_timeline, timelines
    from workbench.figures import timeline as planned

    if isinstance(run, Plan):
        return planned(run)
    handle = load_run(run)
    measured = measured_timeline(handle.events())
    return planned(handle.plan) if measured is None else timelines(handle.plan, measured)


def live(runs: Runs, x: str = "tokens") -> Live:
    """A dashboard whose curves grow in place, with state, speed and a button that stops or resumes each run."""
    from workbench.widgets import live as live_widget

    return live_widget(_handles(runs), x=x, resume=resume)


def what_if(experiment: Experiment, cluster: Cluster | None = None) -> WhatIf:
    """Sliders for GPUs, memory limit, global batch and micro-batch; partition and timeline follow them.

    By default from this machine. The model is captured and profiled once, here.
    """
    from workbench.widgets import WhatIf

    costs, cluster = _profiled(experiment, cluster)
    return WhatIf(costs, cluster, experiment.global_batch, experiment.seq_len)


def show(run: Run | str | os.PathLike[str]) -> go.Figure:
    """What was predicted for a run beside what it measured: step time, speed, memory of each device, and one step's
    timeline where the run recorded one."""
    from workbench.figures import measured_timeline, prediction
    from workbench.runs.records.summary import measurements

    handle = load_run(run)
    title = f"{handle.name}: predicted and measured"
    return prediction(handle.plan, measurements(handle), title, measured_timeline(handle.events()))


def summary(runs: Runs) -> Summary:
    """Several runs in one table: plans, tokens, final loss, speed, predicted beside measured; and the machine."""
    from workbench.runs.records.summary import summary as summarise

    return summarise(_handles(runs))


@checked_keywords
def share(
    notebook: str | os.PathLike[str], to: str | os.PathLike[str] = "shared", *, runs: Runs | None = None
) -> Shared:
    """Make of an executed notebook one HTML page that is interactive offline, and one notebook under 5 MB.

    Both go into the folder `to`. The notebook shows pictures without a kernel and keeps what `wb.reproduce` needs of
    its runs: those that `workbench execute` recorded, `runs`, or those whose names its outputs show.
    """
    from workbench.notebooks import share as share_notebook

    files = Path(notebook).expanduser(), Path(to).expanduser()
    return share_notebook(*files, None if runs is None else _handles(runs))


@checked_keywords
def reproduce(
    notebook: str | os.PathLike[str],
    to: str | os.PathLike[str] = "reproduced",
    *,
    kernel: str | None = None,
    at_commit: bool = False,
) -> Reproduction:
    """Execute a shared notebook again and say, curve against curve, whether it came out the same.

    Its runs take the plans that were recorded, where this machine can run them. `at_commit` executes it in a work
    tree of the recorded git commit. Raises `WorkbenchError` for a notebook without a record.
    """
    from workbench.notebooks import reproduce as reproduce_notebook

    files = Path(notebook).expanduser(), Path(to).expanduser()
    return reproduce_notebook(*files, kernel=kernel, at_commit=at_commit)


def doctor() -> Report:
    """What this machine has for training, and what is missing with the remedy."""
    from workbench.runs import doctor as examine

    return examine()


def display_plan(plan: Plan) -> None:
    """A plan at the end of a notebook cell: one interactive figure, with a table where no script runs."""
    from IPython.display import display

    from workbench.figures import plan_mimebundle

    display(plan_mimebundle(plan), raw=True)


def display_runs(table: RunTable) -> None:
    """A table of runs at the end of a notebook cell: it keeps itself up to date, with buttons for each run."""
    from workbench.widgets import LiveTable

    LiveTable(table, resume=resume)._ipython_display_()


def _labels(runs: Sequence[Run]) -> list[str]:
    """The experiments' names where they tell the runs apart, else the runs' own."""
    names = [str(run.experiment["name"]) for run in runs]
    return names if len(set(names)) == len(names) else [run.name for run in runs]


def _handles(runs: Runs) -> list[Run]:
    several = [runs] if isinstance(runs, Run | str | os.PathLike) else list(runs)
    return [load_run(run) for run in several]
