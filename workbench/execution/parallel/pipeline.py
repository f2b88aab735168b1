"""Stages on the schedules of `torch.distributed.pipelining`.

`PipeStage` differs from the stock `PipelineStage` as follows:

- each forward tells the step's context which micro-batch runs (for dropout seeds), and each action is recorded;
- under FSDP2, gradients are reduced during the backward that completes them, overlapped with it; the stock class turns
  the reduction off and runs it alone after the last backward;
- schedules with several stages per rank do not see that a stage is sharded: FSDP2's own hooks all-gather each block
  when it is needed, whereas torch's schedules would all-gather whole stages ahead.
"""

from __future__ import annotations

import itertools
import pkgutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from workbench.execution.blocks.context import StepContext
from workbench.execution.parallel.stage import StageModule
from workbench.strategy import SCHEDULES
from workbench.tensors import TensorSpec

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
        super().__init__(
            _HiddenFsdpModule(module) if isinstance(module, FSDPModule) else module,
            index,
            num_stages,
            context.device,
            input_args=tuple(map(_meta, stage.received)),
            output_args=tuple(map(_meta, outputs)),
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
        module.set_is_last_backward(last_backward)
        module.set_requires_gradient_sync(last_backward or self._zero >= 2)
        module.set_reshard_after_backward(last_backward or self._zero == 3)
        gradients = stage_backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"])
        return gradients, None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: the last backward has reduced all gradients, and the loss carries its scale."""
        assert grad_scale_factor == 1


def _meta(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta", requires_grad=spec.is_floating)


def schedule_runtime(
    name: str, stages: Sequence[PipeStage], num_microbatches: int
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    """Return torch's schedule over this rank's stages, several if interleaved; the last stage's output is the loss."""
    schedule = SCHEDULES[name]
    runtime: Any = pkgutil.resolve_name(schedule.runtime)
    held = list(stages) if schedule.interleaves else stages[0]
    built: PipelineScheduleSingle | PipelineScheduleMulti = runtime(
        held, num_microbatches, loss_fn=lambda output, _target: output, scale_grads=False
    )
    return built


class Schedules:
    """The schedules of one rank: one for each number of micro-batches that a step is divided into."""

    def __init__(
        self, name: str, pipe_stages: Sequence[PipeStage], stages: Sequence[StageModule], num_microbatches: int
    ) -> None:
        """`stages` are those of the model in `pipe_stages`; `num_microbatches` is the plan's number."""
        self._name, self._pipe_stages, self._stages, self._planned = name, pipe_stages, stages, num_microbatches
        self._built = {num_microbatches: schedule_runtime(name, pipe_stages, num_microbatches)}

    @contextmanager
    def dividing_by(self, num_microbatches: int) -> Iterator[Any]:
        """Return the schedule of so many micro-batches, by which the stages divide the loss meanwhile."""
        if num_microbatches not in self._built:
            self._built[num_microbatches] = schedule_runtime(self._name, self._pipe_stages, num_microbatches)
        for stage in self._stages:
            stage.num_microbatches = num_microbatches
        try:
            yield self._built[num_microbatches]
        finally:
            for stage in self._stages:
                stage.num_microbatches = self._planned
