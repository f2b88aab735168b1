"""`wb.plan` and `wb.search`: from an experiment and a cluster to the fastest plan."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from workbench.arguments import checked_arguments
from workbench.cost.hardware import Cluster
from workbench.display import waiting
from workbench.experiment import Experiment
from workbench.planning.optimizer_limits import choices_for_optimizer
from workbench.planning.plan import Plan
from workbench.planning.profiling import profile_and_cluster
from workbench.planning.request import Request, memory_limit_bytes
from workbench.planning.table import Plans, weigh
from workbench.strategy import Choices, Fixed

if TYPE_CHECKING:
    from workbench.cost.profile import Profile


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

    Examples:
        >>> plan = wb.plan(experiment)
        >>> plan.prediction.step_ms > 0
        True
        >>> elsewhere = wb.plan(experiment, wb.Cluster.of("h200", gpus=2), zero=1)
        >>> elsewhere.zero
        1
    """
    return with_evaluation(experiment, search(experiment, cluster, memory_limit_gib=memory_limit_gib, **choices).best)


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

    Examples:
        >>> plans = wb.search(experiment)
        >>> plans.best.global_batch
        8
        >>> plans[1].prediction.step_ms >= 0
        True
    """
    limit, fixed = memory_limit_bytes(memory_limit_gib), checked_choices(experiment, choices)
    with waiting(f"planning {experiment.model.name}"):
        costs, cluster = profile_and_cluster(experiment, cluster)  # last, because capture takes seconds
        request = Request.of(experiment, cluster, limit, fixed)
        return weigh(costs, costs.precision, request)


def checked_choices(experiment: Experiment, choices: Choices) -> Fixed:
    """Return the checked choices, and those that follow from the experiment's optimiser."""
    return Fixed(**choices_for_optimizer(experiment, choices))


def plan_profiled(
    experiment: Experiment, costs: Profile, cluster: Cluster, memory_limit_bytes: int | None = None
) -> Plan:
    """Return what `plan` returns for a model whose profile is there, without another capture."""
    fixed = checked_choices(experiment, {})
    request = Request.of(experiment, cluster, memory_limit_bytes, fixed)
    return with_evaluation(experiment, weigh(costs, costs.precision, request).best)


def with_evaluation(experiment: Experiment, plan: Plan) -> Plan:
    """Return the plan with the predicted seconds of one evaluation, if the experiment evaluates.

    An evaluation is the forward of all held-out samples in the plan's stages. In each tick a pipeline rank runs each
    of its stages once; the slowest rank sets the pace. The peak memory of an evaluation is not predicted, because it
    lies below that of training: the same weights and optimiser state, no gradients, and the values of one micro-batch
    between two blocks instead of all that the backward needs.
    """
    from workbench.data import held_out

    if experiment.evaluation is None:
        return plan
    is_counted = experiment.eval_data is not None and experiment.eval_data.is_user_defined
    samples = len(held_out(experiment)) if is_counted else experiment.evaluation.samples
    samples *= 1 + len(experiment.held_out_sets)
    samples -= samples % plan.global_batch if plan.coupled else 0
    ticks = math.ceil(samples / plan.micro_batch / plan.data) + len(plan.stages) - 1
    tick_ms = max(sum(stage.forward_ms for stage in plan.stages_of(rank)) for rank in range(plan.pipeline))
    complete = replace(plan, prediction=replace(plan.prediction, evaluation_s=ticks * tick_ms / 1e3))
    object.__setattr__(complete, "origin", plan.origin)
    return complete
