"""The loss of held-out samples: forward only, in the stages and over the parameters of the training.

The model is captured a second time in eval mode. While an evaluation runs, the blocks of the stages run that code, so
that sharding, tensor parallelism, shared parameters and weight copies are those of the training. Micro-batches pass
through the stages in lock-step: in tick t, stage s computes micro-batch t - s, then all ranks exchange what they send.
CUDA graphs are not used, and nothing that training reads is changed.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from workbench.capture import Graph
from workbench.capture.label_counting import count_labels
from workbench.capture.operations import mutated_arguments, retarget
from workbench.execution.blocks.block_module import BlockProgram
from workbench.execution.blocks.labelled_head import LabelCounter
from workbench.execution.parallel.forward_only import end_forward_only
from workbench.execution.parallel.stage import StageModule
from workbench.execution.step_log import StepLog
from workbench.execution.trainer import Trainer
from workbench.rundir import log_event

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class WeightedMicroBatch:
    """Samples of one micro-batch, and the weight of its loss in the sum over the set; a weight of 0 is padding."""

    samples: tuple[int, ...]
    weight: float


def micro_batches(samples: int, size: int, replicas: int) -> list[WeightedMicroBatch]:
    """Divide a set into micro-batches of `size`, equally many for each replica, whose weighted sum is the set's.

    The captured model takes whole micro-batches only. Copies of sample 0 fill the last one, and a micro-batch of
    nothing but sample 0, with a negative weight, takes their loss out of the sum again.
    """
    whole, rest = divmod(samples, size)
    result = [WeightedMicroBatch(tuple(range(k * size, (k + 1) * size)), 1.0) for k in range(whole)]
    copies = (0,) * size
    if rest:
        result.append(WeightedMicroBatch((*range(whole * size, samples), *copies[rest:]), 1.0))
        result.append(WeightedMicroBatch(copies, -(size - rest) / size))
    result += [WeightedMicroBatch(copies, 0.0)] * (-len(result) % replicas)
    return result


class Evaluator:
    """Computes the mean loss over a dataset, the same number on every rank and under every plan."""

    def __init__(
        self, trainer: Trainer, graph: Graph, programs: Sequence[Sequence[BlockProgram]], dataset: Any
    ) -> None:
        """`graph` is the model in eval mode, and `programs` its code for each block of this rank's stages."""
        self.trainer, self._graph, self._programs, self._dataset = trainer, graph, programs, dataset
        self._plan, self._context = trainer.plan, trainer.context
        coordinate = trainer.coordinate
        divided = micro_batches(len(dataset), self._plan.micro_batch, coordinate.data)
        share = len(divided) // coordinate.data
        self._micro_batches = divided[coordinate.data_rank * share : (coordinate.data_rank + 1) * share]
        self._blocks = [program.block for stage in programs for program in stage]
        self._denominators: list[torch.Tensor] | None = None

    def loss(self) -> float:
        """Return the mean loss over the whole set; a collective."""
        self.trainer.prepare_forward()
        with self._untouched_training(), torch.no_grad():
            if self._denominators is None:
                self._denominators = self._count_denominators()
            self._context.loss_denominators = self._denominators
            total = self._weighted_sum()
        dist.all_reduce(total)
        return total.item() / self._plan.tensor * self._plan.micro_batch / len(self._dataset)

    def _count_denominators(self) -> list[torch.Tensor]:
        """Return, for each mean loss, the labels of the whole set per micro-batch; the result is on the device."""
        device = self._context.device
        entries = self._graph.label_counts
        codes = [copy.deepcopy(entry.code).to("cpu") for entry in entries]
        for code in codes:
            retarget(code, torch.device("cpu"))
        counts = torch.zeros(len(entries), dtype=torch.float64)
        if entries and any(block.counts for block in self._blocks):
            for item, batch in zip(self._micro_batches, self._host_batches(), strict=True):
                for index, (entry, code) in enumerate(zip(entries, codes, strict=True)):
                    counts[index] += item.weight * count_labels(code, entry.inputs, batch, self._plan.micro_batch).sum()
        counts = counts.to(device)
        dist.all_reduce(counts, group=self.trainer.coordinate.data_group)
        return list((counts * self._plan.micro_batch / len(self._dataset)).float().unbind())

    def _weighted_sum(self) -> torch.Tensor:
        """Return this rank's share of the sum of the micro-batches' losses, each times its weight."""
        plan, context, coordinate = self._plan, self._context, self.trainer.coordinate
        stages, num_stages = self.trainer.stages.stages, len(plan.stages)
        total = torch.zeros((), dtype=torch.float64, device=context.device)
        # All ranks of the group must take part in its first operation; the first exchanges concern two ranks only.
        dist.all_reduce(torch.zeros(1, device=context.device), group=coordinate.pipeline_group)
        batches, batch_of = self._device_batches(), dict[int, Batch]()
        received: dict[int, tuple[torch.Tensor, ...]] = {}
        for tick in range(len(self._micro_batches) + num_stages - 1):
            if tick < len(self._micro_batches):
                batch_of[tick] = next(batches)
            batch_of.pop(tick - num_stages, None)
            sent: dict[int, tuple[torch.Tensor, ...]] = {}
            for position, stage in enumerate(stages):
                index = coordinate.pipeline_rank + position * plan.pipeline
                number = tick - index
                if not 0 <= number < len(self._micro_batches):
                    continue
                context.microbatch = number
                result = stage(*received.pop(index, ()), **batch_of[number])
                weight = self._micro_batches[number].weight
                if not stage.is_last:
                    sent[index] = result
                elif weight:
                    total += weight * result.double() * stage.num_microbatches
            received = self._exchange(tick, sent)
        return total

    def _exchange(self, tick: int, sent: Mapping[int, tuple[torch.Tensor, ...]]) -> dict[int, tuple[torch.Tensor, ...]]:
        """Send results to the next stages, and return what this rank's stages need in the next tick."""
        plan, coordinate = self._plan, self.trainer.coordinate
        if plan.pipeline == 1:
            return {index + 1: values for index, values in sent.items()}
        group, operations, received = coordinate.pipeline_group, [], {}

        def peer(index: int) -> int:
            return dist.get_global_rank(group, index % plan.pipeline)

        for index, values in sent.items():
            operations += [dist.P2POp(dist.isend, value, peer(index + 1), group) for value in values]
        for position, stage in enumerate(self.trainer.stages.stages):
            index = coordinate.pipeline_rank + position * plan.pipeline
            if index and 0 <= tick - (index - 1) < len(self._micro_batches):
                received[index] = tuple(self._empty(stage))
                operations += [dist.P2POp(dist.irecv, value, peer(index - 1), group) for value in received[index]]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return received

    def _empty(self, stage: StageModule) -> Iterator[torch.Tensor]:
        for spec in stage.received:
            yield torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._context.device)

    # Batches

    def _host_batches(self) -> Iterator[Batch]:
        on_gpu = self._context.device.type == "cuda"
        yield from DataLoader(
            self._dataset,
            batch_sampler=[list(item.samples) for item in self._micro_batches],
            collate_fn=self._dataset.collate,
            num_workers=2 if on_gpu else 0,
            pin_memory=on_gpu,
            generator=torch.Generator(),  # its seed would be drawn from the generator that training uses
        )

    def _device_batches(self) -> Iterator[Batch]:
        """Yield this replica's micro-batches on its device; the labels that select rows are counted before."""
        programs = [program for stage in self._programs for program in stage]
        modules = [module for stage in self.trainer.stages.stages for module in stage.block_modules()]
        losses = {loss for module in modules if (loss := module.selecting_loss) is not None}
        assert len(programs) == len(modules)
        counter = LabelCounter({loss: self._graph.label_counts[loss] for loss in losses}, self._plan.micro_batch)
        counted: dict[int, list[int]] = {loss: [] for loss in losses}
        self._context.label_counts = counted
        for batch in self._host_batches():
            for loss, counts in counter.count(batch).items():
                counted[loss] += counts
            yield send_to_device(batch, self._context.device, non_blocking=True)

    # Switching

    @contextmanager
    def _untouched_training(self) -> Iterator[None]:
        """Run the stages' code for evaluation meanwhile; afterwards everything that training reads is as before."""
        context, stages = self._context, self.trainer.stages.stages
        modules = [list(stage.block_modules()) for stage in stages]
        before = [(stage.graph, [module.program for module in own]) for stage, own in zip(stages, modules, strict=True)]
        saved, buffers = dict(vars(context)), self._written_buffers()
        context.first_microbatch, context.cuda_graphs, context.actions = 0, None, None
        try:
            for stage, own, programs in zip(stages, modules, self._programs, strict=True):
                stage.use(self._graph)
                for module, program in zip(own, programs, strict=True):
                    module.use(program)
            with _untouched_random_state(context.device):
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

    def _written_buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each buffer that the code for evaluation may write to, with a copy of its value."""
        writing = [block for block in self._blocks if any(mutated_arguments(n) for n in block.code.graph.nodes)]
        names = {name for block in writing for name in block.buffers}
        held = self.trainer.stages.model_buffers()
        return [(held[name], held[name].clone()) for name in names if name in held]


class EvaluationLog:
    """Evaluates when it is due, and writes an event of each evaluation; `events` is None on all ranks but one.

    The time of an evaluation counts neither as training time nor as time of a step.
    """

    def __init__(self, evaluator: Evaluator, events: Path | None) -> None:
        self._evaluator, self._events = evaluator, events
        self._experiment, self._plan = evaluator.trainer.experiment, evaluator.trainer.plan

    def is_due(self, step: int) -> bool:
        """Return True if the loss is to be computed after `step` steps."""
        evaluate = self._experiment.evaluate
        return evaluate is not None and (step % evaluate.every == 0 or step == self._experiment.steps)

    def run(self, step: int, log: StepLog) -> None:
        """Compute the loss after `step` steps, and write it; a collective."""
        log.flush()
        started = time.perf_counter()
        loss = self._evaluator.loss()
        if self._events is not None:
            log_event(
                self._events,
                "evaluation",
                step=step,
                loss=loss,
                tokens=step * self._experiment.tokens_per_step,
                samples=step * self._experiment.global_batch,
                flops=step * self._plan.flops_per_step,
                seconds=log.seconds,
                eval_seconds=time.perf_counter() - started,
            )
        log.restart_clock()


@contextmanager
def _untouched_random_state(device: torch.device) -> Iterator[None]:
    """Restore the state of every random-number generator afterwards; a user's dataset may draw from any of them."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        yield
    random.setstate(python)
    np.random.set_state(numpy)
