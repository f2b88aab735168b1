"""The way from an experiment to its plan: capture, cost, measurements, search."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Unpack

from workbench.cost.cluster import Cluster
from workbench.errors import PlanMismatch, checked_keywords
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.planning.request import Request, check_cluster, memory_limit_bytes
from workbench.planning.table import Plans, weigh
from workbench.strategy import Choices, Fixed
from workbench.tensors import TensorSpec

if TYPE_CHECKING:
    from workbench.capture import Graph
    from workbench.cost.profile import Profile
    from workbench.measure.probe_request import ProbeRequest

CAPTURE_BATCH = 2
"""Samples of the batch that a model is captured with for planning; costs are linear in the micro-batch."""


@checked_keywords
def plan(
    experiment: Experiment,
    cluster: Cluster | None = None,
    *,
    memory_limit_gib: float | None = None,
    **choices: Unpack[Choices],
) -> Plan:
    """Return the fastest plan that fits, by default for this machine; `wb.search` shows the alternatives.

    `cluster` plans for another machine (`Cluster.of("h200", gpus=256)`). `memory_limit_gib` caps the memory of each
    device, in the plan and while it runs. `choices` fixes any of `workbench.strategy.Choices` (pipeline, data, tensor,
    zero, schedule, chunks, micro_batch, recompute, offload_optimizer, cuda_graphs); the planner searches the rest.

    Raises `PlanInfeasible` if nothing fits, `CaptureError` if the model cannot be captured, `DataError` if the data
    cannot feed it.
    """
    return search(experiment, cluster, memory_limit_gib=memory_limit_gib, **choices).best


@checked_keywords
def search(
    experiment: Experiment,
    cluster: Cluster | None = None,
    *,
    memory_limit_gib: float | None = None,
    **choices: Unpack[Choices],
) -> Plans:
    """Return every plan that the planner considered, as a table; `.best` is the plan that `wb.plan` returns.

    Arguments and errors are those of `wb.plan`.
    """
    costs, cluster = profile_and_cluster(experiment, cluster)
    limit = memory_limit_bytes(memory_limit_gib)
    request = Request(experiment.global_batch, experiment.seq_len, cluster, limit, Fixed(**choices))
    return weigh(costs, costs.precision, request)


@checked_keywords
def profile(experiment: Experiment, cluster: Cluster | None = None) -> Profile:
    """Return what each block of the experiment's model costs on a device of the cluster, by default of this machine.

    Where this machine has the cluster's GPU, each block type is measured on it (about a minute, once for each model,
    device and torch version). Elsewhere the device's constants price it.
    """
    return profile_and_cluster(experiment, cluster)[0]


@checked_keywords
def graph(experiment: Experiment, micro_batch: int = CAPTURE_BATCH) -> Graph:
    """Return the experiment's model as a graph of blocks, without weights; raises `CaptureError`."""
    from workbench.capture import build_meta, capture

    model = build_meta(experiment.model.build)
    return capture(model, _batch(experiment, micro_batch), name=experiment.model.name)


def profile_and_cluster(experiment: Experiment, cluster: Cluster | None) -> tuple[Profile, Cluster]:
    """Return the profile, and the cluster that it is for: this machine if none was given.

    The processes that measure start first, because they need as long as this process to import torch.
    """
    from workbench.cost.correction import corrected_profile
    from workbench.measure.block_probes import (
        BlockProbes,
        cached_measurements,
        has_cached_measurements,
        has_nvidia_gpus,
        measure_blocks,
    )
    from workbench.measure.local_cluster import local_cluster

    experiment.data.check(experiment)
    with ExitStack() as stack:
        early = cluster is None and has_nvidia_gpus() and not has_cached_measurements(experiment.model.name)
        probes = stack.enter_context(BlockProbes()) if early else None
        if cluster is None:
            cluster = local_cluster()
        check_cluster(cluster)
        request = probe_request(experiment, cluster) if _is_here(cluster) else None
        if request is None:
            probes = None
            stack.close()
        elif probes is not None:
            probes.ask(request, cluster.device)
        costs = analytic_profile(experiment, cluster)
        measured = cached_measurements(costs, cluster) if cluster.device.type == "cuda" else ()
        if not measured and request is not None:
            if probes is None:
                probes = stack.enter_context(BlockProbes())
                probes.ask(request, cluster.device)
            measured = measure_blocks(probes, costs, cluster, experiment.global_batch)
    return (corrected_profile(costs, cluster.device, measured) if measured else costs), cluster


def analytic_profile(experiment: Experiment, cluster: Cluster) -> Profile:
    """Return the profile of the experiment's model by the device's constants, without measurements."""
    from workbench.capture.label_counting import labelled_share
    from workbench.cost.graph_profiler import profile_graph

    captured, examples = graph(experiment), experiment.data.examples(experiment)
    return profile_graph(
        captured,
        cluster.device,
        resolved_precision(experiment, cluster),
        compiled=_is_compiled(experiment, cluster),
        labelled_share=(
            experiment.data.labelled_share(experiment) if examples is None else labelled_share(captured, examples)
        ),
        deterministic=experiment.deterministic,
    )


def _is_here(cluster: Cluster) -> bool:
    """Return True if this machine has the cluster's GPU."""
    from workbench.measure.detection import local_gpu

    return cluster.device.type == "cuda" and local_gpu() == cluster.device.name


def probe_request(experiment: Experiment, cluster: Cluster) -> ProbeRequest:
    """Return the request to the processes that measure the model's blocks on this machine."""
    from workbench.measure.block_probes import likely_micro_batches
    from workbench.measure.probe_request import ProbeRequest

    return ProbeRequest(
        experiment.model.name,
        experiment.model.build,
        dict(experiment.data.batch_specs(experiment)),
        experiment.model.vocab_size or int(getattr(experiment.data, "vocab_size", 0)),
        experiment.data.labelled_share(experiment),
        resolved_precision(experiment, cluster),
        _is_compiled(experiment, cluster),
        experiment.deterministic,
        likely_micro_batches(cluster, experiment.global_batch),
        experiment.data.examples(experiment),
    )


def resolved_precision(experiment: Experiment, cluster: Cluster) -> str:
    """Return the experiment's precision; `auto` is bf16 on GPUs and fp32 on CPUs."""
    if experiment.precision != "auto":
        return experiment.precision
    return "bf16" if cluster.device.type == "cuda" else "fp32"


def _is_compiled(experiment: Experiment, cluster: Cluster) -> bool:
    return cluster.device.type == "cuda" if experiment.compile is None else experiment.compile


def _batch(experiment: Experiment, micro_batch: int) -> dict[str, TensorSpec]:
    specs = experiment.data.batch_specs(experiment)
    return {name: spec.batched(micro_batch) for name, spec in specs.items()}


def check_signature(experiment: Experiment, plan: Plan) -> None:
    """Raise `PlanMismatch` unless the plan was made for this model and these batch fields."""
    from workbench.capture import build_meta, signature

    own = signature(build_meta(experiment.model.build), _batch(experiment, 1))
    if own != plan.signature:
        raise PlanMismatch(
            f"The plan was made for {plan.model} at sequence length {plan.seq_len} (signature {plan.signature}), and "
            f"this is {experiment.model.name} at {experiment.seq_len} ({own}). Plan again with wb.plan(experiment).",
            planned=plan.signature,
            found=own,
        )
