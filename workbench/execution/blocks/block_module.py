"""A captured block as a module that runs: its weights, its random seeds and its activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from workbench.capture import Block
from workbench.capture.operations import is_random, is_replayable
from workbench.capture.tensor_parallel import BlockSharding
from workbench.execution.blocks.activation_checkpointing import checkpointed, supported_mode
from workbench.execution.blocks.context import StepContext
from workbench.execution.blocks.cuda_graphs import BlockInputs
from workbench.execution.blocks.dropout import has_active_dropout
from workbench.execution.blocks.labelled_head import LabelledRows, Runner

Values = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class BlockProgram:
    """The code of one block for training or for evaluation, and how it is run."""

    block: Block
    run: Runner
    recompute: str = "none"
    """Activation checkpointing that the plan asks for."""
    division: BlockSharding = field(default_factory=BlockSharding)
    compiled: bool = False
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors read in place of the module's buffers of these names: evaluation has unnamed constants of its own."""
    copied: frozenset[str] | None = None
    """Parameters whose bf16 copies the code may read; None for all that have copies."""

    @property
    def mode(self) -> str:
        """Activation checkpointing that the code supports."""
        return supported_mode(self.block.code, self.recompute)


class BlockModule(nn.Module):
    """One block: `forward(shared, values) -> sends`, with values in the order `Block.receives`, `Block.inputs`.

    `run` receives the seeds it needs after all other arguments. If the tensor-parallel part of a block draws random
    numbers, its devices seed their generators differently, and `run` is given the seed they have in common, for what
    they must draw alike. A compiled block with dropout is then given its device's seed
    (`workbench.execution.blocks.dropout`).
    """

    def __init__(
        self,
        program: BlockProgram,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        context: StepContext,
    ) -> None:
        """`parameters` are those that only this block uses; it borrows the others that it reads from its stage."""
        super().__init__()
        block = program.block
        self._context = context
        self.weight_copies: Mapping[str, torch.Tensor] = {}
        """bf16 copies that are read in place of parameters (`workbench.execution.blocks.weight_copies`)."""
        self.use(program)
        self._static: tuple[list[torch.Tensor], list[nn.Parameter | None], list[torch.Tensor]] | None = None
        """Arguments of a captured block that are the same in every step: weights, their owners, buffers."""
        self.own_parameters = {name: f"p{i}" for i, name in enumerate(block.parameters) if name in parameters}
        """The model's names of the block's own parameters -> attributes of this module."""
        self.borrowed_parameters = tuple(name for name in block.parameters if name not in parameters)
        """The model's names of the stage's shared parameters that the block reads."""
        self.model_buffers = {name: f"b{i}" for i, name in enumerate(block.buffers)}
        """The model's names of the block's buffers -> attributes of this module."""
        for name, attribute in self.own_parameters.items():
            self.register_parameter(attribute, parameters[name])
        for name, attribute in self.model_buffers.items():
            self.register_buffer(attribute, buffers[name], persistent=False)

    def use(self, program: BlockProgram) -> None:
        """Run this code from now on, over the same parameters and buffers."""
        self.program, self.block = program, program.block
        self.recompute = "none" if program.compiled else program.mode
        """Checkpointing around the code; compiled code has its recomputation inside."""
        is_replayable_code = program.compiled and is_replayable(program.block.code, program.mode)
        self.is_capturable = is_replayable_code and not isinstance(program.run, LabelledRows)
        """True if every step launches the same kernels, so that a CUDA graph can replay them."""
        self._is_random = any(is_random(node) for node in program.block.code.graph.nodes)
        self._has_device_seed = program.division.random
        self._hashes_dropout = program.compiled and has_active_dropout(program.block.code)

    def forward(self, shared: Mapping[str, torch.Tensor], values: Values) -> Values:
        context = self._context
        denominators = tuple(context.denominator(index) for index in self.block.counts)
        seed = context.block_seed(self.block.index) if self._is_random else None
        run, loss = self.program.run, self.selecting_loss
        labels = None if loss is None else context.num_labels(loss)
        if labels is not None:  # chosen now: when the block is recomputed, the context names another micro-batch
            run = cast(LabelledRows, run).for_labels(labels)
        if context.cuda_graphs is not None and self.is_capturable:
            inputs = self._graph_inputs(seed, shared, (*values, *denominators))
            return context.cuda_graphs.forward(self.block.index, context.microbatch, run, inputs)
        arguments: tuple[Any, ...] = (run, seed, shared, *values, *denominators)
        if self.recompute == "none":
            return cast(Values, self._compute(*arguments))
        return cast(Values, checkpointed(self.recompute, self._compute, *arguments))

    @property
    def selecting_loss(self) -> int | None:
        """The mean loss (an index into `Graph.label_counts`) by whose labels the block selects rows, or None."""
        run = self.program.run
        return self.block.counts[run.part.count] if isinstance(run, LabelledRows) else None

    def _compute(self, run: Runner, seed: int | None, shared: Mapping[str, torch.Tensor], *values: torch.Tensor) -> Any:
        device = self._context.device
        seeds = (torch.full((), number, dtype=torch.int64, device=device) for number in self._seeds(seed))
        return run(*self._read_weights(shared), *self._read_buffers(), *values, *seeds)

    def _graph_inputs(self, seed: int | None, shared: Mapping[str, torch.Tensor], values: Values) -> BlockInputs:
        if self._static is None:  # nothing replaces the parameters of a stage that uses CUDA graphs
            attributes = [self.own_parameters.get(name) for name in self.block.parameters]
            owners = [None if attribute is None else getattr(self, attribute) for attribute in attributes]
            self._static = self._read_weights(shared), owners, self._read_buffers()
        return BlockInputs(*self._static, values, tuple(self._seeds(seed)))

    def _read_weights(self, shared: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        own = {name: getattr(self, attribute) for name, attribute in self.own_parameters.items()}
        copied = self.program.copied
        copies = {name: copy for name, copy in self.weight_copies.items() if copied is None or name in copied}
        weights = {**shared, **own, **copies}
        return [weights[name] for name in self.block.parameters]

    def _read_buffers(self) -> list[torch.Tensor]:
        constants = self.program.constants
        return [
            constants[name] if name in constants else getattr(self, self.model_buffers[name])
            for name in self.block.buffers
        ]

    def _seeds(self, seed: int | None) -> Iterator[int]:
        """Seed this device's generator and yield the seeds for `run`; do nothing for a deterministic block."""
        if seed is None:
            return
        context = self._context
        own = context.device_seed(seed) if self._has_device_seed else seed
        on_gpu, index = context.device.type == "cuda", context.device.index or 0
        (torch.cuda.default_generators[index] if on_gpu else torch.default_generator).manual_seed(own)
        if self._has_device_seed:
            yield seed
        if self._hashes_dropout:
            yield own
