"""One training step of one rank, the same for every plan (one stage is a pipeline of length one).

Order: label counts → schedule (forwards, backwards, data-parallel reduction) → tied gradients → norm and clip →
optimiser.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.capture import Graph
from workbench.capture.label_counting import count_labels, retarget
from workbench.execution.blocks.context import StepContext
from workbench.execution.blocks.labelled_head import LabelCounter, LabelCounts
from workbench.execution.blocks.tensor_parallel import all_gather_shards
from workbench.execution.optimizer import build_optimizer, clip, learning_rate_factor, set_learning_rate, squared_norm
from workbench.execution.parallel.gradient_all_reduce import GradientAllReduce
from workbench.execution.parallel.mesh import MeshCoordinate
from workbench.execution.parallel.pipeline import SPLIT_BACKWARD, PipeStage, build_schedule
from workbench.execution.parallel.sharding import distribute, full, is_sharded, local
from workbench.execution.parallel.stage import RankStages, StageModule
from workbench.experiment import Experiment
from workbench.planning.plan import Plan


@dataclass(frozen=True)
class StepResult:
    """Scalars still on the device, the same on every rank: reading them waits for the step."""

    scalars: torch.Tensor
    """Loss over the global batch, squared norm of its gradient, ranks that want to stop."""
    learning_rate: float


class Trainer:
    """Owns this rank's stages, their optimiser and the groups that it reduces over."""

    def __init__(
        self,
        experiment: Experiment,
        plan: Plan,
        graph: Graph,
        stage: RankStages,
        context: StepContext,
        coordinate: MeshCoordinate,
    ) -> None:
        self.experiment, self.plan, self.graph = experiment, plan, graph
        self.context, self.coordinate = context, coordinate
        self.stage = stage
        pipes = [self._pipe_stage(held, index) for index, held in enumerate(stage.stages)]
        self._parameters = stage.model_parameters()  # what sharding has made of them
        self.optimizer = build_optimizer(self._parameters, experiment, plan.offload_optimizer)
        self._schedule = build_schedule(plan.schedule, pipes, plan.num_microbatches)
        self._averaging = GradientAllReduce(coordinate.data_group) if plan.data > 1 else None
        self._averaged = self._averaged_by_hand()
        if self._averaging is not None and context.cuda_graphs is not None:
            context.cuda_graphs.on_last_backward = self._averaging.start
        self._copies = stage.duplicated_parameters()
        self._ties = _tied_groups(plan, graph, coordinate)
        self._owned = [(p, self._holders(name, p)) for name, p in self._parameters.items() if self._owns(name)]
        self._label_counts = [count.code.to(context.device) for count in graph.label_counts if stage.needs_label_counts]
        for code in self._label_counts:
            retarget(code, context.device)
        selecting = {index: graph.label_counts[index] for index in stage.selecting_losses}
        self._counter = LabelCounter(selecting, plan.micro_batch)

    def _pipe_stage(self, stage: StageModule, index: int) -> PipeStage:
        """This rank's `index`-th stage, made ready for the data-parallel axis, at its place in the pipeline."""
        plan, coordinate = self.plan, self.coordinate
        splits = plan.schedule in SPLIT_BACKWARD
        is_ready = plan.averages_by_hand or plan.shards  # FSDP2 has what is sharded since it was built
        return PipeStage(
            stage if is_ready else distribute(stage, coordinate.data_mesh, plan.zero, plan.precision),
            stage,
            coordinate.pipeline_rank + index * plan.pipeline,
            len(plan.stages),
            group=coordinate.pipeline_group,
            context=self.context,
            zero=plan.zero,
            deferral=self.context.deferral if splits else None,
        )

    @property
    def samples(self) -> int:
        """Samples of one step on this replica."""
        return self.plan.micro_batch * self.plan.num_microbatches

    def labels_of(self, batch: Mapping[str, torch.Tensor]) -> LabelCounts:
        """Labels of each micro-batch, where this rank selects rows by them; `batch` had better be on the host still."""
        return self._counter.count(batch)

    def gradients(
        self, step: int, batch: Mapping[str, torch.Tensor], labelled: LabelCounts | None = None
    ) -> torch.Tensor:
        """Forward and backward of step `step` (0-based) over this replica's part of the global batch.

        Leaves every gradient of the mean loss over the global batch in place (tied ones summed over the stages that
        hold them); returns this rank's part of that loss: summed over all ranks, it is the loss. `labelled` are
        `labels_of(batch)`, taken before the batch went to the device; without, a new batch is waited for.
        """
        self.context.label_counts = self.labels_of(batch) if labelled is None else labelled
        self.context.step = step
        self.context.first_microbatch = self.coordinate.data_rank * self.plan.num_microbatches
        self._count_labels(batch)
        self._refresh_copies()
        self.stage.refresh_weight_copies()
        self.optimizer.zero_grad(set_to_none=True)
        if self.context.cuda_graphs is not None:
            self.context.cuda_graphs.begin_step()
        losses: list[torch.Tensor] = []
        target = torch.empty(self.samples, device="meta") if self.stage.computes_loss else None
        inputs: dict[str, Any] = dict(batch)
        self._schedule.step(target=target, losses=losses, return_outputs=False, **inputs)
        if self._averaging is not None:
            self._averaging.finish(self._averaged)
        self._reduce_ties()
        if not losses:
            return torch.zeros((), device=self.context.device)
        return torch.stack([loss.detach() for loss in losses]).sum() / (self.plan.data * self.plan.tensor)

    def full_gradient(self, name: str) -> torch.Tensor | None:
        """The whole gradient of a parameter that this rank holds, gathered from its shards (a collective)."""
        gradient = self._parameters[name].grad
        return None if gradient is None else self.full(name, gradient)

    def full(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter, or of what belongs to it, gathered from its shards (a collective)."""
        gathered, sharding = full(tensor.detach()), self.stage.sharding(name)
        if sharding is None or tensor.ndim == 0:
            return gathered
        return all_gather_shards(gathered, sharding, self.coordinate.tensor_group)

    def step(
        self,
        step: int,
        batch: Mapping[str, torch.Tensor],
        stop: bool = False,
        labelled: LabelCounts | None = None,
    ) -> StepResult:
        """One update; `step` counts from 0. `stop` is summed over the ranks along with the loss.

        `labelled` as for `gradients`.
        """
        part = self.gradients(step, batch, labelled)
        norm_part = squared_norm(self._owned_gradients(), self.context.device)
        scalars = torch.stack([part.float(), norm_part, torch.full_like(norm_part, float(stop))])
        dist.all_reduce(scalars)
        experiment = self.experiment
        if experiment.clip_norm is not None:
            clip(self._parameters.values(), scalars[1].sqrt(), experiment.clip_norm)
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
            count_labels(code, count.inputs, batch, self.plan.micro_batch).sum()
            for count, code in zip(self.graph.label_counts, self._label_counts, strict=True)
        ]
        counts = torch.stack(found).float()
        if self.plan.data > 1:
            dist.all_reduce(counts, group=self.coordinate.data_group)
        shares = self.plan.num_microbatches * self.plan.data
        self.context.loss_denominators = list((counts / shares).unbind())

    def _averaged_by_hand(self) -> list[nn.Parameter]:
        """What nothing else averages over the replicas: all, or what sharded stages hold whole."""
        parameters = [parameter for stage in self.stage.stages for parameter in stage.parameters()]
        if self.plan.averages_by_hand:
            return parameters
        return [parameter for parameter in parameters if self.plan.zero > 0 and not isinstance(parameter, DTensor)]

    def _refresh_copies(self) -> None:
        """Bring this rank's copies of a parameter to its value after the last update or a loaded checkpoint."""
        for first, *others in self._copies.values():
            for other in others:
                other.grad = None
                local(other.detach()).copy_(local(first.detach()))

    def _reduce_ties(self) -> None:
        """Sum the gradients of a tied parameter: over this rank's copies, then over the ranks that hold it."""
        for first, *others in self._copies.values():
            for other in others:
                if other.grad is not None:
                    local(_gradient(first)).add_(local(other.grad))
        for name, group in self._ties.items():
            dist.all_reduce(local(_gradient(self._parameters[name])), group=group)

    def _owned_gradients(self) -> Iterator[tuple[torch.Tensor, int]]:
        """This rank's gradients, each with the number of ranks that hold the same."""
        for parameter, holders in self._owned:
            if parameter.grad is not None:
                yield parameter.grad, holders

    def _holders(self, name: str, parameter: nn.Parameter) -> int:
        """The ranks of a stage that hold the same of a parameter, and of its gradient."""
        replicas = 1 if is_sharded(parameter) else self.plan.data
        return replicas * (1 if self.stage.sharding(name) else self.plan.tensor)

    def _owns(self, name: str) -> bool:
        """A tied parameter counts once in the norm: on the first pipeline rank that holds it."""
        return name not in self._ties or holders(self.plan, self.graph, name)[0] == self.coordinate.pipeline_rank


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Its gradient; zeros where the backward left none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def holders(plan: Plan, graph: Graph, name: str) -> tuple[int, ...]:
    """The pipeline ranks that need a parameter, in ascending order."""
    stages = (
        stage.index
        for stage in plan.stages
        if any(name in block.parameters for block in graph.blocks[stage.first_block : stage.end_block])
    )
    return tuple(sorted({index % plan.pipeline for index in stages}))


def _tied_groups(plan: Plan, graph: Graph, coordinate: MeshCoordinate) -> dict[str, dist.ProcessGroup]:
    """This rank's tied parameters -> the ranks of the same replica and tensor-parallel rank that hold them too.

    Every rank creates every group, as `torch.distributed` demands, in the same order.
    """
    ranks = _rank_table(coordinate)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    mine: dict[str, dist.ProcessGroup] = {}
    for name in graph.parameters:
        found = holders(plan, graph, name)
        if len(found) < 2 or name in graph.frozen:
            continue
        for replica in range(coordinate.data * coordinate.tensor):
            members = tuple(ranks[pipeline_rank][replica] for pipeline_rank in found)
            if members not in groups:
                groups[members] = dist.new_group(list(members))
            if coordinate.rank in members:
                mine[name] = groups[members]
    return mine


def _rank_table(coordinate: MeshCoordinate) -> list[list[int]]:
    """Ranks by pipeline rank; within each in the order of the mesh."""
    size = coordinate.data * coordinate.tensor
    return [[pipeline_rank * size + inner for inner in range(size)] for pipeline_rank in range(coordinate.pipeline)]
