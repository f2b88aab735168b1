"""Stages on the schedules of `torch.distributed.pipelining`.

`PipeStage` differs from the stock `PipelineStage` as follows:

- each forward tells the step's context which micro-batch runs (for dropout seeds), and each action is recorded;
- under FSDP2, gradients are reduced during the backward that completes them, overlapped with it; the stock class turns
  the reduction off and runs it alone after the last backward;
- schedules with several stages per rank do not see that a stage is sharded: FSDP2's own hooks all-gather each block,
  one block ahead of the host's launches, whereas torch's schedules would all-gather whole stages ahead.
"""

from __future__ import annotations

import itertools
import pkgutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from workbench.base.tensors import TensorSpec
from workbench.execution.blocks.loss_runners import GatheredLoss
from workbench.execution.blocks.step_context import StepContext, Values
from workbench.execution.parallel.mesh import MeshCoordinate
from workbench.execution.parallel.sharding import end_forward_only
from workbench.execution.parallel.stage import RankStages, StageModule
from workbench.planning.plan import Plan
from workbench.strategy import SCHEDULES

FIELD = "field "
"""Prefix of batch fields on their way through a schedule, whose `step` has arguments of its own: `target`, `losses`."""


class _HiddenFsdpModule(nn.Module):
    """Runs an FSDP2 module without being recognised as one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class PipeStage(PipelineStage):
    """A stage at its position in the pipeline."""

    def __init__(
        self,
        module: nn.Module,
        stage: StageModule,
        index: int,
        num_stages: int,
        *,
        group: dist.ProcessGroup,
        context: StepContext,
        zero: int,
    ) -> None:
        """`module` is what runs: `stage` or its data-parallel wrapper, with ZeRO stage `zero`."""
        outputs = stage.sent if not stage.is_last else (TensorSpec("loss", (), "float32"),)
        given, returned = (
            tuple(
                torch.empty(s.shape, dtype=getattr(torch, s.dtype), device="meta", requires_grad=s.is_floating)
                for s in specs
            )
            for specs in (stage.received, outputs)
        )
        super().__init__(
            _HiddenFsdpModule(module) if isinstance(module, FSDPModule) else module,
            index,
            num_stages,
            context.device,
            input_args=given,
            output_args=returned,
            group=group,
        )
        self._module = module
        self._received = stage.received
        self._context = context
        self._zero = zero

    def forward_one_chunk(  # type: ignore[override]  # the options differ between versions of torch
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        self._context.microbatch = fwd_chunk_id
        fields = {name.removeprefix(FIELD): value for name, value in (kwargs or {}).items()}
        with self._context.action("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, args, fields, **options)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: Any = False
    ) -> Any:
        with self._context.action("B", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if bwd_chunk_id in self.bwd_cache:
            # Received values without a gradient get zeros, because torch 2.11 would have nothing to send for them.
            pairs = itertools.zip_longest(self.bwd_cache[bwd_chunk_id], self._received)
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=self._context.device)
                if gradient is None and spec is not None
                else gradient
                for gradient, spec in pairs
            )

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        module = self._module
        if not isinstance(module, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        assert backward_type == "full", "a sharded stage has no split backward"
        # ZeRO 1 reduces once a step and keeps weights whole until then; 2 reduces each micro-batch's gradients; 3 frees
        # weights behind each backward as well.
        module.set_is_last_backward(last_backward)
        module.set_requires_gradient_sync(last_backward or self._zero >= 2)
        module.set_reshard_after_backward(last_backward or self._zero == 3)
        gradients = stage_backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"])
        return gradients, None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: the last backward has reduced all gradients, and the loss carries its scale."""
        assert grad_scale_factor == 1


class Schedules:
    """The schedules of one rank: one for each number of micro-batches that a step is divided into."""

    def __init__(
        self, name: str, pipe_stages: Sequence[PipeStage], stages: Sequence[StageModule], num_microbatches: int
    ) -> None:
        """`stages` are those of the model in `pipe_stages`; `num_microbatches` is the plan's number."""
        self._name, self._pipe_stages, self._stages, self._planned = name, pipe_stages, stages, num_microbatches
        self._built: dict[int, PipelineScheduleSingle | PipelineScheduleMulti] = {}

    @contextmanager
    def dividing_by(self, num_microbatches: int) -> Iterator[Any]:
        """Return the schedule of so many micro-batches, by which the stages divide the loss meanwhile."""
        if num_microbatches not in self._built:
            # Under 1F1B, stage s of p warms up with p - s forwards: the first gradient reaches it only after a
            # micro-batch has gone to the last stage and back. In the steady phase it runs one backward and one forward
            # by turns, so that at most p - s micro-batches hold activations, whatever their number (GPipe holds all).
            # In the cool-down it runs the backwards that are left. With equal stages, none waits in the steady phase.
            schedule = SCHEDULES[self._name]
            held = list(self._pipe_stages) if schedule.interleaves else self._pipe_stages[0]
            runtime: Any = pkgutil.resolve_name(schedule.runtime)
            self._built[num_microbatches] = runtime(
                # The last stage returns the loss, which carries its scale: torch has nothing to compute or to divide.
                held,
                num_microbatches,
                loss_fn=lambda output, _target: output,
                scale_grads=False,
            )
        for stage in self._stages:
            stage.num_microbatches = num_microbatches
        try:
            yield self._built[num_microbatches]
        finally:
            for stage in self._stages:
                stage.num_microbatches = self._planned


# Forwards without a backward. Micro-batches pass through the stages of all ranks in lock-step.
#
# In tick t, stage s computes micro-batch t - s, then all ranks exchange what they send. CUDA graphs and the wrapper of
# DistributedDataParallel are left out.

Batch = Mapping[str, torch.Tensor]


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
        group, rank = self._coordinate.pipeline_group, self._coordinate.pipeline_rank
        peers = [dist.get_global_rank(group, each) for each in range(plan.pipeline)]
        if not self._is_connected:
            # All ranks of the group must take part in its first operation; the first exchanges concern two ranks only.
            dist.all_reduce(torch.zeros(1, device=context.device), group=group)
            self._is_connected = True
        batch_of, received = dict[int, Batch](), dict[int, Values]()
        for tick in range(count + len(plan.stages) - 1):
            if tick < count:
                batch_of[tick] = next(batches)
            batch_of.pop(tick - len(plan.stages), None)
            sent: dict[int, Values] = {}
            for position, stage in enumerate(self._stages.stages):
                index = rank + position * plan.pipeline
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
            # Results go to the next stages, and this rank's stages get what they need in the next tick.
            if plan.pipeline == 1:
                received = {index + 1: values for index, values in sent.items()}
                continue
            operations, received = list[dist.P2POp](), {}
            for index, values in sent.items():
                to = peers[(index + 1) % plan.pipeline]
                operations += [dist.P2POp(dist.isend, value, to, group) for value in values]
            for position, stage in enumerate(self._stages.stages):
                index = rank + position * plan.pipeline
                if index and 0 <= tick - (index - 1) < count:
                    received[index] = tuple(
                        torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=context.device)
                        for spec in stage.received
                    )
                    source = peers[(index - 1) % plan.pipeline]
                    operations += [dist.P2POp(dist.irecv, value, source, group) for value in received[index]]
            # All sends and receives of a tick in one batch: one by one, two ranks that send to each other would wait.
            for work in dist.batch_isend_irecv(operations) if operations else []:
                work.wait()

    def over_whole_batch(self, batch: Batch, *, trains: bool) -> Values | None:
        """Run every micro-batch of this replica's `batch`, and compute the loss that compares all samples of a step.

        On the ranks of the last stage, return what it returns for the last micro-batch: the loss, and the outputs of an
        evaluation. If it `trains`, the gradient of the loss is computed, too (`GatheredLoss`).
        """
        count, size = self._plan.num_microbatches, self._plan.micro_batch
        last_block = list(self._stages.stages[-1].block_modules())[-1].program.run
        parts = (
            {name: field[index * size : (index + 1) * size] for name, field in batch.items()} for index in range(count)
        )
        with last_block.collecting(trains) if isinstance(last_block, GatheredLoss) else nullcontext():
            last = deque(self.run(parts, [self._context.loss_denominators] * count), maxlen=1)
        for stage in self._stages.stages:
            end_forward_only(stage)
        return last[0][2] if last else None
