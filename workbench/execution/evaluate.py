"""The loss and the metrics of held-out samples, computed by a `ForwardPass` in the stages of the training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from workbench.capture import Graph
from workbench.capture.losses import count_labels, on_device
from workbench.capture.outputs import sum_and_count
from workbench.execution.blocks.block_module import BlockProgram
from workbench.execution.blocks.labelled_head import LabelCounter
from workbench.execution.forward_pass import ForwardPass
from workbench.execution.parallel.forward_only import Batch
from workbench.execution.step_log import StepLog, flops_of
from workbench.execution.trainer import Trainer
from workbench.rundir import log_event


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
    """Computes the mean loss over a dataset, the same number on every rank and under every plan; writes it when due.

    A loss that compares samples is computed over each `global_batch` samples in order, and the mean of these losses is
    taken; samples that fill no such batch are left out. The time of an evaluation counts neither as training time nor
    as time of a step.
    """

    def __init__(
        self,
        trainer: Trainer,
        graph: Graph,
        programs: Sequence[Sequence[BlockProgram]],
        dataset: Any,
        metrics: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
        further: Mapping[str, Evaluator] = MappingProxyType({}),
        events: Path | None = None,
    ) -> None:
        """`graph` is the model in eval mode, and `programs` its code for each block of this rank's stages.

        With `metrics`, the graph has the outputs that they read. The losses of `further` sets are written as metrics
        of these names. `events` is None on all ranks but one.
        """
        self.trainer, self._forward, self._dataset = trainer, ForwardPass(trainer, graph, programs), dataset
        self._graph, self._metrics, self._further, self._events = graph, dict(metrics), dict(further), events
        self._plan, self._context = trainer.plan, trainer.context
        coordinate = trainer.coordinate
        self._size, self.samples = self._plan.evaluation_batch, len(dataset)
        """Samples of one loss, and of all."""
        if self._plan.coupled:
            self.samples -= self.samples % self._size
        divided = micro_batches(self.samples, self._size, 1 if self._plan.coupled else coordinate.data)
        share = len(divided) if self._plan.coupled else len(divided) // coordinate.data
        first = 0 if self._plan.coupled else coordinate.data_rank * share
        self._micro_batches = divided[first : first + share]
        self._denominators: list[list[torch.Tensor]] | None = None

    def evaluate(self) -> tuple[float, dict[str, float | None]]:
        """Return the mean loss over the whole set and each metric, None for one whose count is 0; a collective."""
        with self._forward.untouched_training():
            if self._denominators is None:
                self._denominators = self._count_denominators()
            total = self._weighted_sums(self._denominators)
        dist.all_reduce(total)
        loss, *sums = (total / self._plan.tensor / (self._plan.data if self._plan.coupled else 1)).tolist()
        pairs = zip(self._metrics, sums[::2], sums[1::2], strict=True)
        metrics = {name: value / count if count else None for name, value, count in pairs}
        return loss * self._size / self.samples, metrics

    def _count_denominators(self) -> list[list[torch.Tensor]]:
        """Return the denominators of each micro-batch: for each mean loss, the labels of the whole set per micro-batch.

        Where samples are compared, they are the labels of each batch. The result is on the device.
        """
        device, number = self._context.device, len(self._micro_batches)
        entries = [on_device(entry, torch.device("cpu")) for entry in self._graph.label_counts]
        counts = torch.zeros(number, len(entries), dtype=torch.float64)
        if entries and any(block.counts for block in self._forward.blocks):
            for row, item, batch in zip(counts, self._micro_batches, self._host_batches(), strict=True):
                for index, entry in enumerate(entries):
                    row[index] = item.weight * count_labels(entry, batch, self._plan.micro_batch).sum()
        counts, per_loss = counts.to(device), 1.0
        if not self._plan.coupled:
            counts, per_loss = counts.sum(0, keepdim=True), self._size / self.samples
            dist.all_reduce(counts, group=self.trainer.coordinate.data_group)
        on_it = [on_device(entry, device) for entry in entries]
        found = [
            [(entry.divisor(total) * per_loss).float() for entry, total in zip(on_it, row, strict=True)]
            for row in counts
        ]
        return found if self._plan.coupled else found * number

    def _weighted_sums(self, denominators: list[list[torch.Tensor]]) -> torch.Tensor:
        """Return this rank's share of the sums over micro-batches of the loss and of each metric's sum and count."""
        total = torch.zeros(1 + 2 * len(self._metrics), dtype=torch.float64, device=self._context.device)
        results = self._forward.run(self._device_batches(), denominators)
        for number, batch, (loss, *outputs) in results:
            weight = self._micro_batches[number].weight
            if not weight:
                continue
            total[0] += weight * loss.double() * self._plan.num_microbatches
            if self._graph.outputs is not None and self._metrics:
                returned = self._graph.outputs.rebuilt(outputs)
                for index, (name, metric) in enumerate(self._metrics.items()):
                    pair = sum_and_count(name, metric, returned, batch)
                    total[2 * index + 1 : 2 * index + 3] += weight * pair.to(total.device)
        return total

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
        blocks = self._forward.blocks
        modules = [module for stage in self.trainer.stages.stages for module in stage.block_modules()]
        losses = {loss for module in modules if (loss := module.selecting_loss) is not None}
        assert len(blocks) == len(modules)
        counter = LabelCounter({loss: self._graph.label_counts[loss] for loss in losses}, self._plan.micro_batch)
        counted: dict[int, list[int]] = {loss: [] for loss in losses}
        self._context.label_counts = counted
        for batch in self._host_batches():
            for loss, counts in counter.count(batch).items():
                counted[loss] += counts
            yield send_to_device(batch, self._context.device, non_blocking=True)

    # Events

    def is_due(self, step: int) -> bool:
        """Return True if the loss is to be computed after `step` steps."""
        evaluate, last = self.trainer.experiment.evaluation, self.trainer.experiment.total_steps
        return evaluate is not None and (step % evaluate.every == 0 or step == last)

    def run(self, step: int, log: StepLog) -> None:
        """Compute the loss after `step` steps, and write it; a collective."""
        log.flush()
        started = time.perf_counter()
        loss, metrics = self.evaluate()
        metrics |= {name: each.evaluate()[0] for name, each in self._further.items()}
        log.evaluated = {"eval_loss": loss, **{name: value for name, value in metrics.items() if value is not None}}
        if self._events is not None:
            samples = self.trainer.experiment.samples_before(step)
            log_event(
                self._events,
                "evaluation",
                step=step,
                loss=loss,
                **({"metrics": metrics} if metrics else {}),
                evaluated=self.samples,
                tokens=samples * self.trainer.experiment.seq_len,
                samples=samples,
                flops=flops_of(self._plan, samples),
                seconds=log.seconds,
                eval_seconds=time.perf_counter() - started,
            )
        log.restart_clock()
