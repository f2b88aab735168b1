"""The profile of an experiment's model: captured, priced by the device's constants, corrected by measurements."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from workbench.arguments import checked_arguments
from workbench.cost.hardware import Cluster
from workbench.display import waiting
from workbench.errors import CaptureError, InvalidArgument, InvalidExperiment, in_words, suggestion
from workbench.experiment import Experiment
from workbench.planning.request import checked_cluster
from workbench.validation import LARGEST_COUNT

if TYPE_CHECKING:
    from workbench.capture import Graph
    from workbench.capture.captured_model import CapturedModel
    from workbench.cost.profile import Profile
    from workbench.measure.block_probes import ProbeRequest


NOT_GATHERED = ("samples", "sparsity")
"""Fields of an experiment with which the samples of a loss that compares them are not gathered."""
CAPTURE_BATCH = 2
"""Samples of the batch that a model is captured with for planning; costs are linear in the micro-batch."""


@checked_arguments
def profile(experiment: Experiment, cluster: Cluster | None = None) -> Profile:
    """Return what each block of the experiment's model costs on a device of the cluster, by default of this machine.

    Where this machine has the cluster's GPU, each block type is measured on it (about a minute, once for each model,
    device and torch version). Elsewhere the device's constants price it.
    """
    return profile_and_cluster(experiment, cluster)[0]


@checked_arguments
def graph(experiment: Experiment, micro_batch: int = CAPTURE_BATCH) -> Graph:
    """Return the experiment's model as a graph of blocks, without weights; raises `CaptureError`."""
    from workbench.capture.captured_model import CapturedModel

    if not 1 <= micro_batch <= LARGEST_COUNT:
        raise InvalidArgument(f"micro_batch={micro_batch:,} is no number of samples. Give 1 to {LARGEST_COUNT:,}.")
    return CapturedModel(experiment, micro_batch).graph


def profile_and_cluster(experiment: Experiment, cluster: Cluster | None) -> tuple[Profile, Cluster]:
    """Return the profile, and the cluster that it is for: this machine if none was given.

    The processes that measure start first, because they need as long as this process to import torch.
    """
    from workbench.cost.profile import corrected_profile
    from workbench.measure.block_probes import (
        BlockProbes,
        cached_measurements,
        has_cached_measurements,
        has_nvidia_gpus,
        measure_blocks,
    )
    from workbench.measure.calibration import local_cluster
    from workbench.measure.detection import local_gpu

    experiment.data.check(experiment)
    with ExitStack() as stack:
        early = cluster is None and has_nvidia_gpus() and not has_cached_measurements(experiment.model.name)
        probes = stack.enter_context(BlockProbes()) if early else None
        if cluster is None:
            cluster = local_cluster()
        checked_cluster(cluster)
        is_here = cluster.device.type == "cuda" and local_gpu() == cluster.device.name
        request = probe_request(experiment, cluster) if is_here else None
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
            with waiting(f"measuring the blocks of {experiment.model.name} on this machine"):
                measured = measure_blocks(probes, costs, cluster, experiment.largest_batch)
    return (corrected_profile(costs, cluster.device, measured) if measured else costs), cluster


def analytic_profile(experiment: Experiment, cluster: Cluster) -> Profile:
    """Return the profile of the experiment's model by the device's constants, without measurements."""
    from workbench.capture.captured_model import CapturedModel
    from workbench.capture.losses import labelled_share
    from workbench.cost.graph_profiler import profile_graph, with_gathered, with_optimizer
    from workbench.cost.sparse_matrices import SparseMatrices, block_sparse_obstacle

    captured, examples = CapturedModel(experiment, CAPTURE_BATCH), experiment.data.examples(experiment)
    graph = _with_division(captured, experiment.numerics.batch_coupling == "allow")
    if note := experiment.data.note(experiment):
        graph = replace(graph, notes=(*graph.notes, note))
    pattern = experiment.sparsity
    _check_patterns(experiment, graph)
    costed = partial(
        profile_graph,
        device=cluster.device,
        precision=resolved_precision(experiment, cluster),
        compiled=_is_compiled(experiment, cluster),
        deterministic=experiment.numerics.deterministic,
    )
    costs = costed(
        graph,
        labelled_share=(
            experiment.data.labelled_share(experiment) if examples is None else labelled_share(graph, examples)
        ),
        sparse=None if pattern is None else SparseMatrices.of(graph, pattern, block_sparse_obstacle(experiment, graph)),
    )
    costs = replace(with_optimizer(costs, experiment, graph), captured=captured)
    if not costs.coupled:
        return costs
    if obstacle := _gathering_obstacle(experiment, captured):
        return replace(costs, not_gathered=obstacle)
    part, whole = captured.tower_and_tail(CAPTURE_BATCH), captured.tower_and_tail(experiment.largest_batch)
    towers = with_optimizer(costed(part), experiment, graph)
    is_compared = captured.is_gathering_compared
    return with_gathered(costs, towers, costed(whole), part, experiment.largest_batch, is_compared)


def _gathering_obstacle(experiment: Experiment, captured: CapturedModel) -> str:
    """Return why the samples of a loss that compares them cannot be gathered over micro-batches; empty if they can."""
    from workbench.capture.captured_model import require_same_stages

    asked = [name for name in NOT_GATHERED if getattr(experiment, name) is not None]
    if asked:
        return f"Its samples are not gathered over micro-batches in an experiment with {' or '.join(asked)}."
    try:
        graph = captured.gathered(experiment.largest_batch)
        if experiment.evaluation is not None:
            require_same_stages(graph, captured.evaluation(experiment, experiment.largest_batch), (), 1)
        fault = captured.gathering_fault if captured.is_gathering_compared else ""
    except InvalidExperiment:  # a metric that no plan computes
        raise
    except CaptureError as error:
        return str(error)
    except Exception as error:  # such as a forward that cannot take so many samples; the batch can still stay whole
        return f"Whether its samples can be gathered is not known: {in_words(error)}."
    return f"Gathered over micro-batches, it would be another loss: {fault}." if fault else ""


def _with_division(captured: CapturedModel, is_allowed: bool) -> Graph:
    """Return the graph with what numbers say of its samples; with a note where they mix and that `is_allowed`."""
    graph, division = captured.graph, captured.division
    notes = (*graph.notes, division.note) if division.note else graph.notes
    if not division.coupled or not is_allowed:
        return replace(graph, coupled=division.coupled, notes=notes)
    note = (
        f"The loss compares samples of one batch ({division.coupled[0]}) and batch_coupling is 'allow': it compares "
        f"those of one micro-batch, so that its value depends on the plan."
    )
    return replace(graph, coupled=(), notes=(*notes, note))


def _check_patterns(experiment: Experiment, graph: Graph) -> None:
    """Raise `InvalidExperiment` for a pattern of the optimiser that matches no parameter of the model."""
    names = list(graph.parameters)
    factors = ("rate_scale", "decay_scale", "eps_scale", "grad_norm_scale", "fused_projections")
    for field in (*factors, "clip_norm", "trained_during"):
        patterns = getattr(experiment.optimizer, field)
        for pattern in patterns if isinstance(patterns, Mapping) else ():
            if not fnmatch.filter(names, pattern):
                raise InvalidExperiment(
                    f"The pattern {pattern!r} of {field} matches none of the {len(names)} parameters of "
                    f"{experiment.model.name}. {suggestion(pattern, names)} They are in "
                    "wb.planning.graph(experiment).parameters."
                )


def probe_request(experiment: Experiment, cluster: Cluster) -> ProbeRequest:
    """Return the request to the processes that measure the model's blocks on this machine."""
    from workbench.measure.block_probes import ProbeRequest, likely_micro_batches

    return ProbeRequest(
        experiment.model.name,
        experiment.model.build,
        dict(experiment.data.batch_specs(experiment)),
        experiment.model.vocab_size or int(getattr(experiment.data, "vocab_size", 0)),
        experiment.data.labelled_share(experiment),
        resolved_precision(experiment, cluster),
        _is_compiled(experiment, cluster),
        experiment.numerics.deterministic,
        likely_micro_batches(cluster, experiment.largest_batch),
        experiment.data.examples(experiment),
        experiment.loss,
    )


def resolved_precision(experiment: Experiment, cluster: Cluster) -> str:
    """Return the experiment's precision; `auto` is bf16 on GPUs and fp32 on CPUs."""
    if experiment.precision != "auto":
        return experiment.precision
    return "bf16" if cluster.device.type == "cuda" else "fp32"


def _is_compiled(experiment: Experiment, cluster: Cluster) -> bool:
    return cluster.device.type == "cuda" if experiment.numerics.compile is None else experiment.numerics.compile
