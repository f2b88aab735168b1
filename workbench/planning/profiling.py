"""The profile of an experiment's model: captured, priced by the device's constants, corrected by measurements."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from workbench.arguments import checked_arguments
from workbench.cost.hardware import Cluster
from workbench.errors import CaptureError, InvalidArgument, InvalidExperiment, in_words, suggestion
from workbench.experiment import Experiment
from workbench.planning.request import checked_cluster
from workbench.user_code import UserFunction
from workbench.validation import LARGEST_COUNT

if TYPE_CHECKING:
    from workbench.capture import Graph
    from workbench.capture.captured_model import CapturedModel
    from workbench.cost.profile import Facts, Profile


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
    """Return the profile, and the cluster that it is for: this machine if none was given."""
    from workbench.measure.block_probes import measured_blocks

    experiment.data.check(experiment)
    if cluster is not None:
        checked_cluster(cluster)
    with measured_blocks(experiment, cluster) as measured:
        return measured.correct(analytic_profile(experiment, measured.cluster)), measured.cluster


def analytic_profile(experiment: Experiment, cluster: Cluster) -> Profile:
    """Return the profile of the experiment's model by the device's constants, without measurements."""
    from workbench.capture.captured_model import CapturedModel
    from workbench.cost.sparse_matrices import SparseMatrices
    from workbench.cost.graph_profiler import profile_graph, with_gathered, with_optimizer
    from workbench.cost.profile import computed_on

    captured = CapturedModel(experiment, CAPTURE_BATCH)
    facts = facts_to_plan(experiment, captured)
    graph = _with_notes(captured, experiment)
    _check_patterns(experiment, graph)
    pattern, gathers = experiment.sparsity, facts.not_gathered == ""
    towers = [captured.tower_and_tail(samples) for samples in (CAPTURE_BATCH, experiment.largest_batch) if gathers]

    precision, compiled = computed_on(cluster.device, experiment)
    costed = partial(
        profile_graph,
        device=cluster.device,
        precision=precision,
        compiled=compiled,
        deterministic=experiment.numerics.deterministic,
    )
    costs = costed(
        graph,
        labelled_share=facts.labelled_share,
        sparse=None if pattern is None else SparseMatrices.of(graph, pattern, facts.not_block_sparse or ""),
    )
    costs = replace(with_optimizer(costs, experiment, graph), facts=facts)
    if not towers:
        return costs
    part, whole = towers
    at_parts, is_compared = with_optimizer(costed(part), experiment, graph), captured.is_gathering_compared
    return with_gathered(costs, at_parts, costed(whole), part, experiment.largest_batch, is_compared)


def facts_to_plan(experiment: Experiment, captured: CapturedModel) -> Facts:
    """Capture the experiment's model, and return all that a plan asks of it."""
    from workbench.capture.losses import labelled_share
    from workbench.cost.sparse_matrices import block_sparse_obstacle

    facts, graph = facts_of(experiment, captured, captures=True), captured.graph
    examples = experiment.data.examples(experiment)
    may_gather = facts.coupled and experiment.numerics.batch_coupling != "allow"
    return replace(
        facts,
        labelled_share=(
            experiment.data.labelled_share(experiment) if examples is None else labelled_share(graph, examples)
        ),
        not_gathered=_gathering_obstacle(experiment, captured) if may_gather else None,
        not_block_sparse=None if experiment.sparsity is None else block_sparse_obstacle(experiment, graph),
    )


def facts_of(experiment: Experiment, captured: CapturedModel, *, captures: bool = False) -> Facts:
    """Return what the gate before a training, and every rank, compare with a plan.

    The model is captured if it was not only where `captures` is True. Raises `InvalidExperiment` for an optimiser of
    the user's that cannot train.
    """
    from workbench.cost.profile import Facts

    reach = "element"
    if isinstance(experiment.optimizer.algorithm, UserFunction):
        from workbench.optimizers.building import reach_of_update

        reach = reach_of_update(experiment, captured.trained_shapes)
    if not captures and not captured.is_captured:
        return Facts(captured.signature, reach, optimizer=experiment.optimizer, captured=captured)
    return Facts(
        captured.graph.signature,
        reach,
        computation=captured.computation,
        blocks=tuple(block.name for block in captured.graph.blocks),
        coupled=captured.division.coupled,
        optimizer=experiment.optimizer,
        captured=captured,
    )


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


def _with_notes(captured: CapturedModel, experiment: Experiment) -> Graph:
    """Return the graph of a step as it is planned: coupled where its batch must stay whole, with a note where not."""
    graph, division = captured.graph, captured.division
    notes, coupled = [*graph.notes, *([division.note] if division.note else [])], division.coupled
    if coupled and experiment.numerics.batch_coupling == "allow":
        notes.append(
            f"The loss compares samples of one batch ({coupled[0]}) and batch_coupling is 'allow': it compares those "
            f"of one micro-batch, so that its value depends on the plan."
        )
        coupled = ()
    if note := experiment.data.note(experiment):
        notes.append(note)
    return replace(graph, coupled=coupled, notes=tuple(notes))


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
