"""Forwards without a backward. Micro-batches pass through the stages of all ranks in lock-step.

In tick t, stage s computes micro-batch t - s, then all ranks exchange what they send. CUDA graphs and the wrapper of
DistributedDataParallel are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist

from workbench.execution.blocks.context import StepContext
from workbench.execution.parallel.mesh import MeshCoordinate
from workbench.execution.parallel.sharding import end_forward_only
from workbench.execution.parallel.stage import RankStages
from workbench.planning.plan import Plan

Batch = Mapping[str, torch.Tensor]
Values = tuple[torch.Tensor, ...]


class ForwardOnly:
    """Runs micro-batches through the stages of all ranks, without gradients; every run is a collective."""

    def __init__(self, stages: RankStages, plan: Plan, context: StepContext, coordinate: MeshCoordinate) -> None:
        self._stages, self._plan, self._context, self._coordinate = stages, plan, context, coordinate
        self._is_connected = False

    def run(
        self, batches: Iterator[Batch], denominators: Sequence[list[torch.Tensor]]
    ) -> Iterator[tuple[int, Batch, Values]]:
        """Compute a micro-batch for each of `denominators`, those of its mean losses.

        On the ranks of the last stage, yield each with its number and what the stage returns. All ranks must exhaust
        the iterator.
        """
        plan, context, count = self._plan, self._context, len(denominators)
        if not self._is_connected:
            # All ranks of the group must take part in its first operation; the first exchanges concern two ranks only.
            dist.all_reduce(torch.zeros(1, device=context.device), group=self._coordinate.pipeline_group)
            self._is_connected = True
        batch_of, received = dict[int, Batch](), dict[int, Values]()
        for tick in range(count + len(plan.stages) - 1):
            if tick < count:
                batch_of[tick] = next(batches)
            batch_of.pop(tick - len(plan.stages), None)
            sent: dict[int, Values] = {}
            for position, stage in enumerate(self._stages.stages):
                index = self._coordinate.pipeline_rank + position * plan.pipeline
                number = tick - index
                if not 0 <= number < count:
                    continue
                context.microbatch, context.loss_denominators = number, denominators[number]
                with torch.no_grad(), context.action("F", index, number):
                    result = stage(*received.pop(index, ()), **batch_of[number])
                if not stage.is_last:
                    sent[index] = result
                else:
                    yield number, batch_of[number], result if isinstance(result, tuple) else (result,)
            received = self._exchange(tick, sent, count)

    def over_whole_batch(self, batch: Batch, *, trains: bool) -> Values | None:
        """Run every micro-batch of this replica's `batch`, and compute the loss that compares all samples of a step.

        On the ranks of the last stage, return what it returns for the last micro-batch: the loss, and the outputs of an
        evaluation. If it `trains`, the gradient of the loss is computed, too (`GatheredLoss`).
        """
        loss, count, size = self._stages.gathered_loss, self._plan.num_microbatches, self._plan.micro_batch
        parts = (
            {name: field[index * size : (index + 1) * size] for name, field in batch.items()} for index in range(count)
        )
        with nullcontext() if loss is None else loss.collecting(trains):
            last = deque(self.run(parts, [self._context.loss_denominators] * count), maxlen=1)
        for stage in self._stages.stages:
            end_forward_only(stage)
        return last[0][2] if last else None

    def _exchange(self, tick: int, sent: Mapping[int, Values], count: int) -> dict[int, Values]:
        """Send results to the next stages, and return what this rank's stages need in the next tick."""
        plan, coordinate = self._plan, self._coordinate
        if plan.pipeline == 1:
            return {index + 1: values for index, values in sent.items()}
        group, operations, received = coordinate.pipeline_group, [], {}

        def peer(index: int) -> int:
            return dist.get_global_rank(group, index % plan.pipeline)

        for index, values in sent.items():
            operations += [dist.P2POp(dist.isend, value, peer(index + 1), group) for value in values]
        for position, stage in enumerate(self._stages.stages):
            index = coordinate.pipeline_rank + position * plan.pipeline
            if index and 0 <= tick - (index - 1) < count:
                received[index] = tuple(
                    torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._context.device)
                    for spec in stage.received
                )
                operations += [dist.P2POp(dist.irecv, value, peer(index - 1), group) for value in received[index]]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return received
