"""A forward pass of a model in eval mode, in the stages and over the parameters of the training.

The model is captured again in eval mode. Meanwhile the blocks of the stages run that code, so that sharding, tensor
parallelism, shared parameters and weight copies are those of the training. Micro-batches pass through the stages in
lock-step: in tick t, stage s computes micro-batch t - s, then all ranks exchange what they send. CUDA graphs are not
used, and nothing that training reads is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from workbench.capture import Graph
from workbench.capture.operations import mutated_arguments
from workbench.data._datasets import untouched_generators
from workbench.execution.blocks.block_module import BlockProgram
from workbench.execution.parallel.sharding import end_forward_only
from workbench.execution.trainer import Trainer

Batch = Mapping[str, torch.Tensor]
Values = tuple[torch.Tensor, ...]


class ForwardPass:
    """Runs micro-batches through the stages of all ranks, without a backward."""

    def __init__(self, trainer: Trainer, graph: Graph, programs: Sequence[Sequence[BlockProgram]]) -> None:
        """`graph` is the model in eval mode, and `programs` its code for each block of this rank's stages."""
        self.trainer, self.graph, self.programs = trainer, graph, programs
        self._plan, self._coordinate = trainer.plan, trainer.coordinate
        self.context = trainer.context
        self.blocks = [program.block for stage in programs for program in stage]

    def run(
        self, batches: Iterator[Batch], count: int, denominators: Sequence[list[torch.Tensor]]
    ) -> Iterator[tuple[int, Batch, Values]]:
        """Compute `count` micro-batches; on the ranks of the last stage, yield each with its number and results.

        The results are the loss, divided by the plan's number of micro-batches, and the graph's outputs. All ranks
        must exhaust the iterator, within `untouched_training`: it is a collective. `denominators` has the loss
        denominators of each micro-batch. If the graph gathers samples, each batch is a global batch, of which each
        replica computes its micro-batches.
        """
        context, coordinate = self.context, self._coordinate
        loss = self.trainer.stages.gathered_loss
        if loss is not None:
            size = self.trainer.samples
            share = slice(coordinate.data_rank * size, (coordinate.data_rank + 1) * size)
            for number in range(count):
                batch, context.loss_denominators = next(batches), denominators[number]
                own = {name: field[share] for name, field in batch.items()}
                result = self.trainer.over_whole_batch(loss, own, trains=False)
                yield number, batch, result if isinstance(result, tuple) else (result,)
            return
        stages, num_stages = self.trainer.stages.stages, len(self._plan.stages)
        # All ranks of the group must take part in its first operation; the first exchanges concern two ranks only.
        dist.all_reduce(torch.zeros(1, device=context.device), group=coordinate.pipeline_group)
        batch_of, received = dict[int, Batch](), dict[int, Values]()
        for tick in range(count + num_stages - 1):
            if tick < count:
                batch_of[tick] = next(batches)
            batch_of.pop(tick - num_stages, None)
            sent: dict[int, Values] = {}
            for position, stage in enumerate(stages):
                index = coordinate.pipeline_rank + position * self._plan.pipeline
                number = tick - index
                if not 0 <= number < count:
                    continue
                context.microbatch, context.loss_denominators = number, denominators[number]
                result = stage(*received.pop(index, ()), **batch_of[number])
                if not stage.is_last:
                    sent[index] = result
                else:
                    yield number, batch_of[number], result if isinstance(result, tuple) else (result,)
            received = self._exchange(tick, sent, count)

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
        for position, stage in enumerate(self.trainer.stages.stages):
            index = coordinate.pipeline_rank + position * plan.pipeline
            if index and 0 <= tick - (index - 1) < count:
                received[index] = tuple(
                    torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self.context.device)
                    for spec in stage.received
                )
                operations += [dist.P2POp(dist.irecv, value, peer(index - 1), group) for value in received[index]]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return received

    @contextmanager
    def untouched_training(self) -> Iterator[None]:
        """Run the graph's code meanwhile, without gradients; afterwards everything that training reads is as before."""
        context, stages = self.context, self.trainer.stages.stages
        modules = [list(stage.block_modules()) for stage in stages]
        before = [(stage.graph, [module.program for module in own]) for stage, own in zip(stages, modules, strict=True)]
        saved, held = dict(vars(context)), self.trainer.stages.model_buffers()
        writing = [block for block in self.blocks if any(mutated_arguments(n) for n in block.code.graph.nodes)]
        names = {name for block in writing for name in block.buffers if name in held}
        buffers = [(held[name], held[name].clone()) for name in names]
        context.first_microbatch, context.cuda_graphs, context.action_log = 0, None, None
        try:
            for stage, own, programs in zip(stages, modules, self.programs, strict=True):
                stage.use(self.graph)
                for module, program in zip(own, programs, strict=True):
                    module.use(program)
            devices = [context.device.index or 0] if context.device.type == "cuda" else []
            with untouched_generators(devices), torch.no_grad():
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
