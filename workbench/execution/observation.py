"""Hooks on the blocks of one rank, and the search with them for the block where a number is not finite."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from workbench.base.errors import NonFiniteLoss
from workbench.execution.blocks.block_module import BlockModule
from workbench.execution.blocks.step_context import LabelCounts
from workbench.execution.trainer import Trainer
from workbench.optimizers.parameters import local

BATCH, WEIGHT, FORWARD, BACKWARD, GRADIENT = SOURCES = range(5)
"""Sources of a number: a batch field that a block reads, its weights, a value that it sends, a gradient that it passes
on, the gradient of its weights."""


class BlockObserver(ABC):
    """Calls `note` for what each block of a rank reads of the batch, sends, and passes on in the backward.

    The schedule of the pipeline runs as it does in training.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._context = trainer, trainer.context
        self._modules = [module for stage in trainer.stages.stages for module in stage.block_modules()]

    @abstractmethod
    def note(self, source: int, block: int, name: str, micro_batch: int, value: torch.Tensor) -> torch.Tensor | None:
        """Take note of a value of a micro-batch of the global batch, and return what is used in its place.

        None leaves the value as it is. A batch field is never replaced.
        """

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe the passes over the stages that run in this context."""
        handles = [module.register_forward_pre_hook(self._before) for module in self._modules]
        handles += [module.register_forward_hook(self._after) for module in self._modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def _micro_batch(self) -> int:
        """The micro-batch of the global batch whose forward runs."""
        return self._context.first_microbatch + self._context.microbatch

    def _before(self, module: BlockModule, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Note the batch fields of a block, and observe the gradients that it will pass on."""
        shared, values = arguments
        block, micro_batch = module.block, self._micro_batch
        for name, value in zip(block.inputs, values[len(block.receives) :], strict=True):
            self.note(BATCH, block.index, name, micro_batch, value)

        def observed(name: str, value: Any) -> Any:
            if not (isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled()):
                return value
            own = value.view_as(value)  # the gradient of `value` itself is the sum over all blocks that read it
            own.register_hook(functools.partial(self.note, BACKWARD, block.index, name, micro_batch))
            return own

        names = (*block.receives, *block.inputs)
        return (
            {name: observed(name, value) for name, value in shared.items()},
            tuple(observed(name, value) for name, value in zip(names, values, strict=True)),
        )

    def _after(
        self, module: BlockModule, _arguments: tuple[Any, ...], sent: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Note what a block sends."""
        block = module.block
        noted = [
            self.note(FORWARD, block.index, name, self._micro_batch, value)
            for name, value in zip(block.sends, sent, strict=True)
        ]
        return tuple(old if new is None else new for old, new in zip(sent, noted, strict=True))


# The origin of a number that is not finite: a second pass over the step, in which every block is observed.
#
# The trainer leaves out the update of a step whose loss or gradient norm is not finite, and every update after it.
# Therefore the weights are still those of that step, and its batch, dropout and schedule can be repeated exactly.


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
            BATCH: f"The batch itself is not finite, in a field that {block} reads: correct it in the dataset.",
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
                    gradient = weights[name].grad if name in module.exclusive_parameters else None
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
