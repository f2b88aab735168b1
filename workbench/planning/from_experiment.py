"""The way from an experiment to its plan: capture, cost, measurements, search."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack, cast

from workbench.arguments import checked_arguments
from workbench.cost.cluster import Cluster
from workbench.errors import DataError, InvalidArgument, InvalidExperiment, PlanInfeasible, PlanMismatch, suggestion
from workbench.experiment import LARGEST_COUNT, Experiment
from workbench.planning.plan import Plan
from workbench.planning.request import Request, check_choices, check_cluster, memory_limit_bytes
from workbench.planning.table import Plans, weigh
from workbench.strategy import Choices, Fixed
from workbench.tensors import TensorSpec
from workbench.user_code import UserFunction

if TYPE_CHECKING:
    from workbench.capture import Graph
    from workbench.cost.block_sparse import SparseMatrices
    from workbench.cost.profile import Profile
    from workbench.measure.probe_request import ProbeRequest

CAPTURE_BATCH = 2
"""Samples of the batch that a model is captured with for planning; costs are linear in the micro-batch."""


@checked_arguments
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
    zero, schedule, chunks, micro_batch, recompute, offload_optimizer, cuda_graphs, block_sparse); the planner searches
    the rest.

    Raises `PlanInfeasible` if nothing fits, `CaptureError` if the model cannot be captured, `DataError` if the data
    cannot feed it.
    """
    return with_evaluation(experiment, search(experiment, cluster, memory_limit_gib=memory_limit_gib, **choices).best)


def with_evaluation(experiment: Experiment, plan: Plan) -> Plan:
    """Return the plan with the predicted time of one evaluation, if the experiment evaluates."""
    if experiment.evaluate is None:
        return plan
    predicted = dataclasses.replace(plan.prediction, evaluation_s=evaluation_seconds(experiment, plan))
    complete = dataclasses.replace(plan, prediction=predicted)
    object.__setattr__(complete, "origin", plan.origin)
    return complete


def evaluation_seconds(experiment: Experiment, plan: Plan) -> float:
    """Return the predicted seconds of one evaluation: forwards of all held-out samples in the plan's stages.

    In each tick a pipeline rank runs each of its stages once; the slowest rank sets the pace. The peak memory of an
    evaluation is not predicted, because it lies below that of training: the same weights and optimiser state, no
    gradients, and the values of one micro-batch between two blocks instead of all that the backward needs.
    """
    from workbench.data import held_out

    assert experiment.evaluate is not None
    own = experiment.eval_data is not None and experiment.eval_data.is_user_defined
    samples = len(held_out(experiment)) if own else experiment.evaluate.samples
    ticks = math.ceil(samples / plan.micro_batch / plan.data) + len(plan.stages) - 1
    ranks = range(plan.pipeline)
    return ticks * max(sum(stage.forward_ms for stage in plan.stages_of(rank)) for rank in ranks) / 1e3


@checked_arguments
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
    limit, fixed = memory_limit_bytes(memory_limit_gib), checked_choices(experiment, choices)
    costs, cluster = profile_and_cluster(experiment, cluster)  # last, because capture takes seconds
    request = Request(experiment.global_batch, experiment.seq_len, cluster, limit, fixed)
    return weigh(costs, costs.precision, request)


def search_profiled(experiment: Experiment, costs: Profile, cluster: Cluster) -> Plans:
    """Return what `search` does for a model whose profile is known, without another capture."""
    request = Request(experiment.global_batch, experiment.seq_len, cluster, None, checked_choices(experiment, {}))
    return weigh(costs, costs.precision, request)


def checked_choices(experiment: Experiment, choices: Choices) -> Fixed:
    """Return the checked choices, and those that follow from the experiment's optimiser."""
    if isinstance(experiment.optimizer, UserFunction):
        choices = _undivided(experiment, choices)
    if experiment.optimizer != "adamw":
        choices = {**choices, "offload_optimizer": _kept_on_device(experiment, choices.get("offload_optimizer"))}
    fixed = Fixed(**choices)
    check_choices(fixed)
    return fixed


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
    from workbench.capture import build_meta, capture

    if not 1 <= micro_batch <= LARGEST_COUNT:
        raise InvalidArgument(f"micro_batch={micro_batch:,} is no number of samples. Give 1 to {LARGEST_COUNT:,}.")
    model = build_meta(experiment.model.build)
    batch = _batch(experiment, micro_batch)
    return capture(model, batch, name=experiment.model.name, loss=experiment.loss)


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
    from workbench.cost.optimizer_cost import with_optimizer

    captured, examples = _planned_graph(experiment), experiment.data.examples(experiment)
    _check_rate_scale(experiment, captured)
    costs = profile_graph(
        captured,
        cluster.device,
        resolved_precision(experiment, cluster),
        compiled=_is_compiled(experiment, cluster),
        labelled_share=(
            experiment.data.labelled_share(experiment) if examples is None else labelled_share(captured, examples)
        ),
        deterministic=experiment.deterministic,
        sparse=_sparse_matrices(experiment, captured),
    )
    return with_optimizer(costs, experiment, captured)


def _kept_on_device(experiment: Experiment, offload: bool | None) -> bool | None:
    """Return the choice of `offload_optimizer` for an optimiser that cannot be offloaded; raises for `True`."""
    if offload is True:
        raise PlanInfeasible(
            f"offload_optimizer=True keeps AdamW's moments in the host's memory, and the experiment trains with "
            f"{experiment.optimizer_name}, whose state stays on the device. Leave offload_optimizer out, or choose "
            "optimizer='adamw'.",
            optimizer=experiment.optimizer_name,
        )
    return False if offload is None else offload


def _undivided(experiment: Experiment, choices: Choices) -> Choices:
    """Return the choices without those that divide what an optimiser of the user's own needs whole.

    Raises `InvalidExperiment` for an optimiser that cannot train, and `PlanInfeasible` for a choice that it rules out.
    """
    whole = _needed_whole(experiment, _trained_shapes(experiment))
    chosen: dict[str, Any] = dict(choices)
    for name, needed in whole.items():
        if chosen.get(name) not in (None, needed):
            raise PlanInfeasible(
                f"{name}={chosen[name]} divides what the optimizer of {experiment.optimizer_name} needs whole: "
                f"{_WHOLE[name]}. Choose {name}={needed}, or leave it out.",
                **{name: chosen[name]},
            )
    return cast(Choices, {**choices, **whole})


_WHOLE = {
    "zero": "its update of a tensor differs from its updates of the tensor's halves",
    "tensor": "its update of a tensor differs from its updates of the tensor's halves",
    "pipeline": "its update of one parameter depends on other parameters",
}


def _trained_shapes(experiment: Experiment) -> dict[str, tuple[int, ...]]:
    from workbench.capture import build_meta

    model = build_meta(experiment.model.build)
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}


def _needed_whole(experiment: Experiment, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the degrees and ZeRO stage that plans must have for an optimiser of the user's own."""
    from workbench.optimizers.own import ELEMENT, MODEL, reach_of_update

    reach = reach_of_update(experiment, shapes)
    return {} if reach == ELEMENT else {"zero": 0, "tensor": 1, **({"pipeline": 1} if reach == MODEL else {})}


def _check_rate_scale(experiment: Experiment, captured: Graph) -> None:
    """Raise `InvalidExperiment` for a pattern of `rate_scale` that matches no parameter of the model."""
    names = list(captured.parameters)
    for pattern in experiment.rate_scale or {}:
        if not fnmatch.filter(names, pattern):
            raise InvalidExperiment(
                f"The pattern {pattern!r} of rate_scale matches none of the {len(names)} parameters of "
                f"{experiment.model.name}. {suggestion(pattern, names)} They are in "
                "wb.planning.graph(experiment).parameters.",
                pattern=pattern,
            )


def _sparse_matrices(experiment: Experiment, captured: Graph) -> SparseMatrices | None:
    """Return the sparse weights of an experiment; raises `InvalidExperiment` if its blocks do not suit them."""
    from workbench.capture.sparse_matrices import block_sparse_obstacle
    from workbench.cost.block_sparse import SparseMatrices

    if experiment.sparsity is None:
        return None
    return SparseMatrices.of(captured, experiment.sparsity, block_sparse_obstacle(experiment, captured))


def check_sparsity(experiment: Experiment, plan: Plan | None = None, captured: Graph | None = None) -> None:
    """Raise `InvalidExperiment` unless the blocks of a sparse experiment suit the weights of its model.

    Raises `PlanMismatch` for a plan with block-sparse weights if the experiment's cannot be that.
    """
    from workbench.capture.sparse_matrices import block_sparse_obstacle, sparse_matrices

    is_block_sparse = plan is not None and plan.block_sparse
    if experiment.sparsity is None and not is_block_sparse:
        return
    captured = graph(experiment) if captured is None else captured
    if experiment.sparsity is not None:
        sparse_matrices(captured, experiment.sparsity)
    obstacle = block_sparse_obstacle(experiment, captured) if is_block_sparse else ""
    if not obstacle and plan is not None and is_block_sparse and not plan.can_be_block_sparse:
        obstacle = "its devices hold parts of weights (ZeRO or tensor parallelism)"
    if obstacle:
        raise PlanMismatch(
            f"The plan has block-sparse weights, and that is not possible: {obstacle}. Plan again: wb.plan(experiment)."
        )


def _planned_graph(experiment: Experiment) -> Graph:
    """Return the model's graph; where the user allows it, samples that influence one another are a note only."""
    captured = graph(experiment)
    if not captured.coupled or experiment.batch_coupling != "allow":
        return captured
    note = (
        f"The loss compares samples of one batch ({captured.coupled[0]}) and batch_coupling is 'allow': it compares "
        f"those of one micro-batch, so that its value depends on the plan."
    )
    return replace(captured, coupled=(), notes=(*captured.notes, note))


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
        experiment.loss,
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


def check_between_steps(experiment: Experiment, plan: Plan) -> None:
    """Raise unless what the experiment computes between steps can be computed in the plan's stages.

    That is the held-out loss with metrics, and samples of text. Raises `DataError` if there are too few held-out
    samples or the model cannot read a prompt, `InvalidExperiment` for a metric that cannot be summed or a model that
    returns no logits, and `CaptureError` if the model in eval mode does not consist of the same blocks.
    """
    from workbench.capture import build_meta, capture
    from workbench.capture.evaluation import capture_for_evaluation, capture_for_samples, require_same_stages
    from workbench.data import encoded_prompts

    if experiment.evaluate is None and experiment.samples is None:
        return
    if experiment.evaluate is not None:
        _check_held_out(experiment, plan)
    prompts = None if experiment.samples is None else encoded_prompts(experiment, experiment.samples.prompts)
    first_blocks = [stage.first_block for stage in plan.stages[1:]]
    model = build_meta(experiment.model.build)
    training = capture(model, _batch(experiment, plan.micro_batch), name=experiment.model.name, loss=experiment.loss)
    if experiment.evaluate is not None:
        evaluation = capture_for_evaluation(model, training, experiment.metrics or {})
        require_same_stages(training, evaluation, first_blocks, plan.tensor)
    if prompts is not None:
        assert experiment.samples is not None
        for group in prompts.groups(experiment.samples.tokens, experiment.seq_len):
            sampling = capture_for_samples(model, training, group.specs, prompts.vocabulary)
            require_same_stages(training, sampling, first_blocks, plan.tensor, same_shapes=False)


def _check_held_out(experiment: Experiment, plan: Plan) -> None:
    """Raise `DataError` if the held-out samples do not fill one micro-batch of the plan."""
    from workbench.data import held_out

    samples = len(held_out(experiment))
    if samples < plan.micro_batch:
        raise DataError(
            f"There are {samples:,} held-out samples, fewer than the {plan.micro_batch:,} of one micro-batch of the "
            "plan. Give more eval_data, raise Evaluate.samples, or plan with a smaller micro_batch.",
            samples=samples,
            micro_batch=plan.micro_batch,
        )


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


def check_optimizer(experiment: Experiment, plan: Plan, shapes: Mapping[str, Sequence[int]] | None = None) -> None:
    """Raise `PlanMismatch` if the plan divides what an optimiser of the user's own needs whole.

    `shapes` are those of the trained parameters, by default of the experiment's model. Raises `InvalidExperiment` for
    an optimiser that cannot train.
    """
    if not isinstance(experiment.optimizer, UserFunction):
        return
    for name, needed in _needed_whole(experiment, _trained_shapes(experiment) if shapes is None else shapes).items():
        if getattr(plan, name) > needed and plan.world > 1:
            raise PlanMismatch(
                f"The plan has {name}={getattr(plan, name)}, which divides what the optimizer of "
                f"{experiment.optimizer_name} needs whole: {_WHOLE[name]}. Plan again with wb.plan(experiment).",
                **{name: getattr(plan, name)},
            )
