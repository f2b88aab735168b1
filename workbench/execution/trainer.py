"""One training step of one rank, the same for every plan (one stage is a pipeline of length one).

Order: label counts → schedule (forwards, backwards, data-parallel reduction) → tied gradients → norm and clip →
optimiser.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from workbench.capture import Graph
from workbench.execution.context import StepContext
from workbench.execution.mesh import Place
from workbench.execution.optim import build_optimizer, clip, learning_rate_factor, set_learning_rate, squared_norm
from workbench.execution.pipe import PipeStage, build_schedule
from workbench.execution.shard import distribute, local
from workbench.execution.stage import StageModule
from workbench.experiment import Experiment
from workbench.planning.plan import Plan


@dataclass(frozen=True)
class StepResult:
    """Scalars still on the device, the same on every rank: reading them waits for the step."""

    scalars: torch.Tensor
    """Loss over the global batch, squared norm of its gradient, ranks that want to stop."""
    learning_rate: float


class Trainer:
    """Owns this rank's stage, its optimiser and the groups that it reduces over."""

    def __init__(
        self, experiment: Experiment, plan: Plan, graph: Graph, stage: StageModule, context: StepContext, place: Place
    ) -> None:
        self.experiment, self.plan, self.graph = experiment, plan, graph
        self.context, self.place = context, place
        self.stage = stage
        runs = distribute(stage, place.data_mesh, plan.zero, plan.precision)
        self.optimizer = build_optimizer(self.stage.named(), experiment)
        self._pipe = PipeStage(
            runs,
            stage,
            place.pipeline_rank,
            plan.pipeline,
            group=place.pipeline_group,
            context=context,
            zero=plan.zero,
        )
        self._schedule = build_schedule(plan.schedule, self._pipe, plan.num_microbatches)
        self._ties = _tied_groups(plan, graph, place)
        needed = any(block.counts for block in graph.blocks[stage.first : stage.end])
        self._label_counts = [count.code.to(context.device) for count in graph.label_counts] if needed else []

    @property
    def samples(self) -> int:
        """Samples of one step on this replica."""
        return self.plan.micro_batch * self.plan.num_microbatches

    def gradients(self, step: int, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Forward and backward of step `step` (0-based) over this replica's part of the global batch.

        Leaves every gradient of the mean loss over the global batch in place (tied ones summed over the stages that
        hold them); returns this rank's part of that loss: summed over all ranks, it is the loss.
        """
        self.context.step = step
        self.context.first_microbatch = self.place.data_rank * self.plan.num_microbatches
        self._count_labels(batch)
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        target = torch.empty(self.samples, device="meta") if self.stage.is_last else None
        inputs: dict[str, Any] = dict(batch)
        self._schedule.step(target=target, losses=losses, return_outputs=False, **inputs)
        self._reduce_ties()
        if not losses:
            return torch.zeros((), device=self.context.device)
        return torch.stack([loss.detach() for loss in losses]).sum() / self.plan.data

    def step(self, step: int, batch: Mapping[str, torch.Tensor], stop: bool = False) -> StepResult:
        """One update; `step` counts from 0. `stop` is summed over the ranks along with the loss."""
        part = self.gradients(step, batch)
        owned = [p for name, p in self.stage.named().items() if self._owns(name)]
        norm_part = squared_norm(owned, self.plan.data, self.context.device)
        scalars = torch.stack([part.float(), norm_part, torch.full_like(norm_part, float(stop))])
        dist.all_reduce(scalars)
        experiment = self.experiment
        if experiment.clip_norm is not None:
            clip(self.stage.named().values(), scalars[1].sqrt(), experiment.clip_norm)
        rate = experiment.learning_rate * learning_rate_factor(
            step, experiment.warmup, experiment.steps, experiment.lr_schedule
        )
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        return StepResult(scalars, rate)

    def _count_labels(self, batch: Mapping[str, torch.Tensor]) -> None:
        if not self._label_counts:
            return
        found = [
            code(*(batch[name] for name in count.inputs))
            for count, code in zip(self.graph.label_counts, self._label_counts, strict=True)
        ]
        counts = torch.stack(found).float()
        if self.plan.data > 1:
            dist.all_reduce(counts, group=self.place.data_group)
        shares = self.plan.num_microbatches * self.plan.data
        self.context.counts = list((counts / shares).unbind())

    def _reduce_ties(self) -> None:
        named = self.stage.named()
        for name, group in self._ties.items():
            gradient = named[name].grad
            if gradient is None:
                gradient = torch.zeros_like(named[name])
                named[name].grad = gradient
            dist.all_reduce(local(gradient), group=group)

    def _owns(self, name: str) -> bool:
        """A tied parameter counts once in the norm: in the first stage that holds it."""
        return name not in self._ties or holders(self.plan, self.graph, name)[0] == self.place.pipeline_rank


def holders(plan: Plan, graph: Graph, name: str) -> tuple[int, ...]:
    """The stages that need a parameter."""
    return tuple(
        stage.index
        for stage in plan.stages
        if any(name in block.parameters for block in graph.blocks[stage.first_block : stage.end_block])
    )


def _tied_groups(plan: Plan, graph: Graph, place: Place) -> dict[str, dist.ProcessGroup]:
    """This rank's tied parameters -> the ranks of the same replica (and shard) that hold them too.

    Every rank creates every group, as `torch.distributed` demands, in the same order.
    """
    ranks = _rank_table(place)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    mine: dict[str, dist.ProcessGroup] = {}
    for name in graph.parameters:
        stages = holders(plan, graph, name)
        if len(stages) < 2:
            continue
        for data_rank in range(place.data):
            members = tuple(ranks[stage][data_rank] for stage in stages)
            if members not in groups:
                groups[members] = dist.new_group(list(members))
            if place.rank in members:
                mine[name] = groups[members]
    return mine


def _rank_table(place: Place) -> list[list[int]]:
    return [[stage * place.data + replica for replica in range(place.data)] for stage in range(place.pipeline)]
