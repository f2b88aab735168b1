"""Location of a loss or gradient that is not finite: a second pass over the step, in which every block is observed.

The trainer leaves out the update of a step whose loss or gradient norm is not finite, and every update after it.
Therefore the weights are still those of that step, and its batch, dropout and schedule can be repeated exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from workbench.errors import NonFiniteLoss
from workbench.execution.blocks.labelled_head import LabelCounts
from workbench.execution.observation import BACKWARD, BATCH, FORWARD, GRADIENT, SOURCES, WEIGHT, BlockObserver
from workbench.execution.trainer import Trainer
from workbench.optimizers.parameters import local


@dataclass(frozen=True)
class Origin:
    """The first source of a step at which a number was not finite."""

    source: int
    """One of `SOURCES`."""
    block: int
    block_name: str
    stage: int
    num_blocks: int
    micro_batch: int | None = None
    """Micro-batch of the global batch, from 0; None where micro-batches are summed."""

    @property
    def sentence(self) -> str:
        """Tell in a sentence where the number arose."""
        block = f"block {self.block_name} ({self.block + 1} of {self.num_blocks}, stage {self.stage})"
        sentences = {
            BATCH: f"The batch itself is not finite, in a field that {block} reads.",
            WEIGHT: f"A weight of {block} was not finite before this step.",
            FORWARD: f"It arose in the forward of {block}: everything before that block is finite.",
        }
        in_backward = f"It arose in the backward of {block}: the forward and all later blocks are finite."
        return sentences.get(self.source, in_backward)

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of the error record."""
        sources = ("batch", "weights", "forward", "backward", "backward")
        return {
            "source": sources[self.source],
            "block": self.block,
            "block_name": self.block_name,
            "stage": self.stage,
            "micro_batch": self.micro_batch,
        }


Batches = Callable[[int], Iterator[tuple[Mapping[str, torch.Tensor], LabelCounts]]]
"""Function of a first step (0-based) that yields this replica's batches from there on, with their label counts."""


def with_origin(error: NonFiniteLoss, trainer: Trainer, batches: Batches) -> NonFiniteLoss:
    """Return the error of a step with the block in which the number arose; a collective."""
    step = error.facts["step"] - 1
    try:
        origin, sentence = locate(trainer, step, *next(batches(step)))
    except Exception as failure:  # such as a lack of memory; why training ended must not be hidden by it
        return NonFiniteLoss(f"{error} Its block is not known: {type(failure).__name__}: {failure}", **error.facts)
    facts = {**error.facts, **({} if origin is None else origin.facts)}
    if any(not float(divisor) for divisor in trainer.context.loss_denominators if not divisor.ndim):
        return NonFiniteLoss(
            f"Step {step + 1:,} has loss {error.facts['loss']:g}, because none of its batch's labels counts: each "
            "is ignored, as -100 is, or has a weight of 0, and a mean over none is not a number. Checkpoints of "
            "earlier steps are kept. Leave out items without labels, or train with a larger global_batch.",
            **facts,
        )
    return NonFiniteLoss(f"{error} {sentence}", **facts)


def locate(
    trainer: Trainer, step: int, batch: Mapping[str, torch.Tensor], label_counts: LabelCounts
) -> tuple[Origin | None, str]:
    """Repeat step `step` (0-based) without its update, and return where a number first was not finite; a collective.

    The result is the same on every rank, with a sentence about it. The origin is None if nothing in the second pass is.
    """
    observer = _Observer(trainer)
    with observer.observing():
        loss, squared_norm, *_ = trainer.measure(step, batch, label_counts=label_counts).tolist()
    origin = observer.origin()
    if origin is not None:
        return origin, origin.sentence
    if math.isfinite(loss) and math.isfinite(squared_norm):
        return None, "A second pass over the step is finite, so it does not repeat: suspect the device or random code."
    return None, "Every value and gradient of a second pass is finite, and only their sum exceeds the range of fp32."


class _Observer(BlockObserver):
    """Notes the first micro-batch of each source that is not finite.

    Everything is noted on the device, so that the schedule of the pipeline runs as it does in training.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._plan = trainer.plan
        self._never = trainer.plan.num_microbatches * trainer.plan.data
        shape = (len(SOURCES), len(trainer.graph.blocks))
        self._first = torch.full(shape, self._never, dtype=torch.int64, device=trainer.context.device)

    def origin(self) -> Origin | None:
        """Return the first source over all ranks; a collective."""
        for stage in self._trainer.stages.stages:
            weights = stage.model_parameters()
            for module in stage.block_modules():
                for name in module.block.parameters:
                    self.note(WEIGHT, module.block.index, name, 0, weights[name])
                    gradient = weights[name].grad if name in module.own_parameters else None
                    if gradient is not None:
                        self.note(GRADIENT, module.block.index, name, 0, gradient)
        dist.all_reduce(self._first, op=dist.ReduceOp.MIN)
        first = self._first.tolist()
        for source in (BATCH, WEIGHT, FORWARD):
            for block, micro_batch in enumerate(first[source]):
                if micro_batch < self._never:
                    return self._found(source, block, micro_batch)
        for block in reversed(range(len(first[BACKWARD]))):  # the backward comes to the last block first
            for source in (BACKWARD, GRADIENT):
                if first[source][block] < self._never:
                    return self._found(source, block, first[source][block])
        return None

    def _found(self, source: int, block: int, micro_batch: int) -> Origin:
        stage = next(stage.index for stage in self._plan.stages if block < stage.end_block)
        is_known = source not in (WEIGHT, GRADIENT)
        name, count = self._plan.block_names[block], len(self._plan.block_names)
        return Origin(source, block, name, stage, count, micro_batch if is_known else None)

    def note(
        self,
        source: int,
        block: int,
        name: str,  # noqa: ARG002 - blocks are told apart, not their values
        micro_batch: int,
        value: torch.Tensor,
    ) -> None:
        """Note the micro-batch if the value is not finite.

        Minus infinity in a value counts only where gradients flow, since masks of attention are made of it.
        """
        if not (value.is_floating_point() or value.is_complex()):
            return
        allows_minus = source in (BATCH, FORWARD) and not value.requires_grad
        value = local(value.detach())
        value = value.coalesce().values() if value.is_sparse else value
        value = torch.view_as_real(value) if value.is_complex() else value
        if not value.numel():
            return
        low, high = value.aminmax()  # NaN if any element is NaN; needs no memory of the value's size
        is_finite = high.isfinite() | (high == -math.inf) if allows_minus else high.isfinite() & low.isfinite()
        found = torch.where(is_finite, self._never, micro_batch)
        self._first[source, block] = torch.minimum(self._first[source, block], found)
