"""A pipeline stage: a run of consecutive blocks over a table of values.

A parameter used by one block of the stage belongs to that block's module, so that sharding, recomputation and
compilation apply per block. A parameter used by several blocks (a tied embedding and decoder, ALBERT's shared layer)
belongs to the stage and is passed in. Attributes of modules have short names; `StageModule.model_parameters()` maps the
model's own names to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from workbench.base.errors import CaptureError
from workbench.base.tensors import TensorSpec
from workbench.capture import Block, Graph
from workbench.capture.blocks.tensor_parallel import Sharding
from workbench.capture.operations import mutated_arguments, storage_of
from workbench.execution.blocks.block_module import BlockModule, BlockProgram, WeightCopies
from workbench.execution.blocks.sparse_weights import BlockSparseParameters
from workbench.execution.blocks.step_context import StepContext

CARRIER = "float64"
"""Dtype in which integers cross stages, as raw bits: torch 2.11 asks for a gradient of every value a stage receives."""


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose backward returns a contiguous gradient: what the pipeline sends must be contiguous."""

    @staticmethod
    def forward(_ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].contiguous()


class StageModule(nn.Module):
    """Blocks `first` … `end - 1` of a graph: `forward(*received, **batch) -> sends`, or the loss at the end.

    A graph with outputs, which only evaluations run, adds these to the loss.

    The loss is divided by the number of micro-batches, so that a step's loss is the sum over its micro-batches.
    """

    def __init__(
        self,
        graph: Graph,
        first: int,
        context: StepContext,
        *,
        num_microbatches: int,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        programs: Sequence[BlockProgram],
    ) -> None:
        """`parameters` and `buffers` go by the model's names; `programs` has one entry per block of the stage.

        `forward` divides the loss by `num_microbatches`.
        """
        super().__init__()
        self.first, self.end, self.num_microbatches = first, (end := first + len(programs)), num_microbatches
        self._context = context
        uses = Counter(name for block in graph.blocks[first:end] for name in block.parameters)
        self._shared = {name: f"s{i}" for i, name in enumerate(n for n, times in uses.items() if times > 1)}
        for name, attribute in self._shared.items():
            self.register_parameter(attribute, parameters[name])
        exclusive = {name: parameters[name] for name, times in uses.items() if times == 1}
        modules = (BlockModule(program, exclusive, buffers, context) for program in programs)
        self.blocks = nn.ModuleList(modules)
        self.use(graph)

    def use(self, graph: Graph) -> None:
        """Pass values between blocks as this graph does, from now on; it has the same boundaries as the stage's own."""
        self.graph, self._is_checked = graph, False
        self._receives = graph.crossing(self.first) if self.first else ()
        self._sends = graph.crossing(self.end) if self.end < len(graph.blocks) else ()
        self._finished = graph.last_uses(self.first, self.end)
        # Specs of what the stage receives and sends, as it goes between ranks
        self.received, self.sent = (
            tuple(
                spec if spec.is_floating else TensorSpec(spec.name, spec.shape, CARRIER)
                for spec in (graph.values[name] for name in names)
            )
            for names in (self._receives, self._sends)
        )

    def block_modules(self) -> Iterator[BlockModule]:
        return (cast(BlockModule, module) for module in self.blocks)

    @property
    def is_last(self) -> bool:
        return self.end == len(self.graph.blocks)

    def model_parameters(self) -> dict[str, nn.Parameter]:
        """Map the model's parameter names to the present parameter objects (sharding replaces them)."""
        parameters = {name: getattr(self, attribute) for name, attribute in self._shared.items()}
        for block in self.block_modules():
            parameters |= {name: getattr(block, attribute) for name, attribute in block.exclusive_parameters.items()}
        return parameters

    def model_buffers(self) -> dict[str, torch.Tensor]:
        """Map the model's buffer names to the buffers that the blocks read or change."""
        return {
            name: getattr(block, attribute)
            for block in self.block_modules()
            for name, attribute in block.model_buffers.items()
        }

    def forward(self, *received: torch.Tensor, **batch: torch.Tensor) -> Any:
        # The pipeline carries floating-point numbers only, and asks for a gradient of all that it carries. What no
        # parameter before this stage reaches is detached again.
        values: dict[str, torch.Tensor] = {}
        for name, value in zip(self._receives, received, strict=True):
            spec = self.graph.values[name]
            if not spec.is_floating:
                values[name] = value.detach().view(torch.int64).to(getattr(torch, spec.dtype))
            elif name not in self.graph.differentiated:
                values[name] = value.detach()
            else:
                values[name] = _ContiguousGradient.apply(value) if value.requires_grad else value

        shared = {name: getattr(self, attribute) for name, attribute in self._shared.items()}
        with self._context.autocast():
            for module, finished in zip(self.block_modules(), self._finished, strict=True):
                block = module.block
                arguments = (*(values[n] for n in block.receives), *(batch[n] for n in block.inputs))
                # A block gets only the shared parameters it reads: FSDP2 makes a gradient for every tensor it is given.
                borrowed = {name: shared[name] for name in module.borrowed_parameters}
                sent = dict(zip(block.sends, module(borrowed, arguments), strict=True))
                for name, value in () if self._is_checked else sent.items():
                    # Capture sends no views of weights that it knows. This check stands for operations that hide one:
                    # ZeRO 3 has freed the weight by now, and to read its view would end the process. All forwards of a
                    # graph send the same.
                    if value.numel() and not value.untyped_storage().nbytes():
                        raise CaptureError(
                            f"{block.name} passes {name!r} {tuple(value.shape)} to later layers. It shares the memory "
                            "of a weight, which ZeRO 3 frees when the layer has run. Write .clone() behind the "
                            "operation that makes it, or plan with zero=2."
                        )
                if self._context.scalars is not None:
                    self._context.scalars.collect(self._context.microbatch, sent)
                values |= sent
                for name in finished:  # autograd keeps what the backward needs of it
                    del values[name]
        self._is_checked = True
        if self.is_last:
            # Divided here and not by the schedule (`scale_grads`), which would pass over all gradients once more.
            loss = values[self.graph.loss].float().reshape(()) / self.num_microbatches
            outputs = self.graph.outputs
            return loss if outputs is None else (loss, *(values[name] for name in outputs.names))
        # Contiguous copies, which share no memory with the stage's values.
        sent = {}
        for name in self._sends:
            spec = self.graph.values[name]
            dtype = getattr(torch, spec.dtype) if spec.is_floating else torch.int64
            carried = values[name].to(dtype, copy=True, memory_format=torch.contiguous_format)
            sent[name] = carried if spec.is_floating else carried.view(getattr(torch, CARRIER))
        return tuple(sent.values())


def written_buffers(blocks: Iterable[Block]) -> set[str]:
    """Return the names of the buffers that the code of blocks writes to."""
    names: set[str] = set()
    for block in blocks:
        nodes = block.code.graph.nodes
        placeholders = [node for node in nodes if node.op == "placeholder"][len(block.parameters) :]
        written = {storage_of(argument) for node in nodes for argument in mutated_arguments(node)}
        names |= {name for name, node in zip(block.buffers, placeholders, strict=False) if node in written}
    return names


@dataclass(frozen=True, eq=False)
class RankStages:
    """The stages of one rank in pipeline order: one, or several under an interleaved schedule.

    A parameter that several stages use is one parameter to the optimiser, the norm and the checkpoint: the first
    stage's. The other stages hold copies of it, which the trainer updates.
    """

    stages: Sequence[StageModule]
    weight_copies: Sequence[WeightCopies]
    compact: BlockSparseParameters
    """Parameters that are stored without absent blocks."""
    shardings: Mapping[str, Sharding]
    """Parameters that the tensor-parallel axis divides, by name; every device holds all of the others."""

    def model_parameters(self) -> dict[str, nn.Parameter]:
        """Map the model's parameter names to the present parameter objects, one for each name."""
        stages = reversed(self.stages)  # the first stage's parameter wins
        return {name: parameter for stage in stages for name, parameter in stage.model_parameters().items()}

    def duplicated_parameters(self) -> dict[str, tuple[nn.Parameter, ...]]:
        """Map each name that several stages of this rank hold to the first stage's parameter and the others' copies."""
        holders: dict[str, list[nn.Parameter]] = {}
        for stage in self.stages:
            for name, parameter in stage.model_parameters().items():
                holders.setdefault(name, []).append(parameter)
        return {name: tuple(parameters) for name, parameters in holders.items() if len(parameters) > 1}

    def model_buffers(self) -> dict[str, torch.Tensor]:
        """Map the model's buffer names to buffers; a buffer that the forward changes belongs to one stage only."""
        return {name: buffer for stage in reversed(self.stages) for name, buffer in stage.model_buffers().items()}

    @property
    def computes_loss(self) -> bool:
        return self.stages[-1].is_last
