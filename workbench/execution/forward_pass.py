"""A forward pass of a model in eval mode, in the stages and over the parameters of the training.

The model is captured again in eval mode. Meanwhile the blocks of the stages run that code, so that sharding, tensor
parallelism, shared parameters and weight copies are those of the training. Nothing that training reads is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from workbench.capture import Graph
from workbench.data.datasets import untouched_generators
from workbench.execution.blocks.block_module import BlockProgram
from workbench.execution.parallel.forward_only import Batch, Values
from workbench.execution.parallel.sharding import end_forward_only
from workbench.execution.parallel.stage import written_buffers
from workbench.execution.trainer import Trainer


class ForwardPass:
    """Runs micro-batches through the stages of all ranks, without a backward."""

    def __init__(self, trainer: Trainer, graph: Graph, programs: Sequence[Sequence[BlockProgram]]) -> None:
        """`graph` is the model in eval mode, and `programs` its code for each block of this rank's stages."""
        self.trainer, self.graph, self.programs = trainer, graph, programs
        self._plan, self._forward_only = trainer.plan, trainer.forward_only
        self.context = trainer.context
        self.blocks = [program.block for stage in programs for program in stage]

    def run(
        self, batches: Iterator[Batch], denominators: Sequence[list[torch.Tensor]]
    ) -> Iterator[tuple[int, Batch, Values]]:
        """Compute a micro-batch for each of `denominators`; on the last stage's ranks, yield each number and result.

        The results are the loss, divided by the plan's number of micro-batches, and the graph's outputs. All ranks
        must exhaust the iterator, within `untouched_training`: it is a collective. `denominators` has the loss
        denominators of each micro-batch. If the graph gathers samples, each batch is a global batch, of which each
        replica computes its micro-batches.
        """
        if not self._plan.gathers:
            yield from self._forward_only.run(batches, denominators)
            return
        size = self.trainer.samples
        first = self.trainer.coordinate.data_rank * size
        for number, self.context.loss_denominators in enumerate(denominators):
            batch = next(batches)
            own = {name: field[first : first + size] for name, field in batch.items()}
            result = self._forward_only.over_whole_batch(own, trains=False)
            if result is not None:
                yield number, batch, result

    @contextmanager
    def untouched_training(self) -> Iterator[None]:
        """Run the graph's code meanwhile, without gradients; afterwards everything that training reads is as before.

        Where the experiment averages weights, the code computes with the average.
        """
        average = self.trainer.average
        with nullcontext() if average is None else average.in_place_of_weights():
            self.trainer.prepare_forward()
            with self._untouched_state():
                yield

    @contextmanager
    def _untouched_state(self) -> Iterator[None]:
        context, stages, coordinate = self.context, self.trainer.stages.stages, self.trainer.coordinate
        modules = [list(stage.block_modules()) for stage in stages]
        before = [(stage.graph, [module.program for module in own]) for stage, own in zip(stages, modules, strict=True)]
        saved, held = dict(vars(context)), self.trainer.stages.model_buffers()
        trained = sorted(written_buffers(module.block for own in modules for module in own))
        names = {*trained, *(name for name in written_buffers(self.blocks) if name in held)}
        buffers = [(held[name], held[name].clone()) for name in names]
        if coordinate.data > 1:  # each replica has running averages of its own, and a checkpoint those of the first
            for name in trained:
                value = held[name].contiguous()
                dist.broadcast(value, group=coordinate.data_group, group_src=0)
                held[name].copy_(value)
        context.first_microbatch, context.cuda_graphs, context.action_log, context.scalars = 0, None, None, None
        try:
            for stage, own, programs in zip(stages, modules, self.programs, strict=True):
                stage.use(self.graph)
                for module, program in zip(own, programs, strict=True):
                    module.use(program)
            with untouched_generators(context.device), torch.no_grad():
                yield
        finally:
            vars(context).update(saved)
            for stage, own, (graph, programs) in zip(stages, modules, before, strict=True):
                stage.use(graph)
                for module, program in zip(own, programs, strict=True):
                    module.use(program)
                end_forward_only(stage)
            for buffer, value in buffers:
                buffer.copy_(value)
