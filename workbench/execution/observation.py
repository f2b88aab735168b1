"""Hooks on the blocks of one rank, through which the numbers of a step are seen as the runtime computes them."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from workbench.execution.blocks.block_module import BlockModule
from workbench.execution.trainer import Trainer

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
