"""The profile of an experiment's model: captured, priced by the device's constants, corrected by measurements."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from workbench.arguments import checked_arguments
from workbench.cost.hardware import Cluster
from workbench.errors import InvalidArgument, InvalidExperiment, suggestion
from workbench.experiment import Experiment
from workbench.planning.request import checked_cluster
from workbench.user_code import UserFunction
from workbench.validation import LARGEST_COUNT

if TYPE_CHECKING:
    from workbench.capture import Graph
    from workbench.capture.captured_model import CapturedModel, Facts
    from workbench.cost.profile import Profile


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
    from workbench.cost.graph_profiler import profile_graph, with_optimizer
    from workbench.cost.profile import computed_on, with_gathered
    from workbench.cost.sparse_matrices import SparseMatrices

    facts, graph, towers = capture_to_plan(experiment)
    precision, compiled = computed_on(cluster.device, experiment)
    costed = partial(
        profile_graph,
        device=cluster.device,
        precision=precision,
        compiled=compiled,
        deterministic=experiment.numerics.deterministic,
    )
    costs = costed(graph, labelled_share=facts.labelled_share, sparse=SparseMatrices.of(experiment, graph))
    costs = replace(with_optimizer(costs, experiment, graph), facts=facts)
    if not towers:
        return costs
    part, whole = towers
    in_parts = with_optimizer(costed(part), experiment, graph)
    return with_gathered(costs, in_parts, costed(whole), part, whole.micro_batch)


def capture_to_plan(experiment: Experiment) -> tuple[Facts, Graph, Sequence[Graph]]:
    """Capture the experiment's model, and return all that is known of it, and its graph as it is planned.

    The graph has the coupling and the notes of the facts. Where a loss that compares samples can gather them, further
    graphs have that comparison as their last block: of the samples that the model is captured with, and of the batch.

    Raises `CaptureError`, and `InvalidExperiment` for an optimiser that does not suit the model.
    """
    from workbench.capture.losses import labelled_share

    facts, examples = facts_of(experiment, captures=True), experiment.data.examples(experiment)
    assert facts.captured is not None
    captured, graph = facts.captured, facts.captured.graph

    # Patterns of the optimiser: a pattern that matches no parameter is a misspelt name.
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

    # Coupling: a batch whose samples the loss compares stays whole, or is gathered, unless the user allowed otherwise.
    coupled, division = facts.coupled or (), captured.division
    notes = [*graph.notes, *([division.note] if division.note else [])]
    towers: Sequence[Graph] = ()
    if coupled and experiment.numerics.batch_coupling == "allow":
        notes.append(
            f"The loss compares samples of one batch ({coupled[0]}) and batch_coupling is 'allow': it compares those "
            f"of one micro-batch, so that its value depends on the plan."
        )
        coupled = ()
    if coupled:
        asked = [name for name in NOT_GATHERED if getattr(experiment, name) is not None]
        fields = f"Its samples are not gathered over micro-batches in an experiment with {' or '.join(asked)}."
        facts = replace(facts, not_gathered=fields if asked else captured.gathering_obstacle)
        if not facts.not_gathered:
            towers = [captured.tower_and_tail(samples) for samples in (CAPTURE_BATCH, experiment.largest_batch)]
            facts = replace(facts, is_gathering_compared=captured.is_gathering_compared)

    # Prices: labels that a head computes, and what the user's data add to the notes.
    share = experiment.data.labelled_share(experiment) if examples is None else labelled_share(graph, examples)
    notes += [note] if (note := experiment.data.note(experiment)) else []
    planned = replace(graph, coupled=coupled, notes=tuple(notes))
    return replace(facts, labelled_share=share), planned, towers


def facts_of(experiment: Experiment, captured: CapturedModel | None = None, *, captures: bool = False) -> Facts:
    """Return what the gate before a training, and every rank, compare with a plan.

    The model is captured if `captures` says so; the facts of one that is not captured are those that need no capture.
    `captured` is the experiment's model, if there is one. Raises `InvalidExperiment` for an optimiser of the user's
    that cannot train.
    """
    from workbench.capture.captured_model import CapturedModel

    asked = captured or CapturedModel(experiment, CAPTURE_BATCH)
    reach = "element"
    if isinstance(experiment.optimizer.algorithm, UserFunction):
        from workbench.optimizers.building import reach_of_update

        reach = reach_of_update(experiment, asked.trained_shapes)
    return asked.facts(reach, captures=captures)
