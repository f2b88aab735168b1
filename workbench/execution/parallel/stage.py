"""Blocks as modules, and a stage as a run of them over a table of values.

A parameter used by one block of the stage belongs to that block's module, so that sharding, recomputation and
compilation apply per block. One used by several (a tied embedding and decoder, ALBERT's shared layer) belongs to
the stage and is passed in. Module attributes have short names; `StageModule.named()` gives the model's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from workbench.capture import Block, Graph
from workbench.capture.dataflow import is_random, is_replayable
from workbench.capture.division import Division, Sharding, TensorDivision
from workbench.execution.blocks.activation_checkpointing import checkpointed, mode_for
from workbench.execution.blocks.context import StepContext
from workbench.execution.blocks.cuda_graphs import Inputs
from workbench.execution.blocks.dropout import draws_dropout
from workbench.execution.blocks.labelled_head import LabelledRows, Runner
from workbench.tensors import TensorSpec

if TYPE_CHECKING:
    from workbench.execution.blocks.weight_copies import Halves

Values = tuple[torch.Tensor, ...]


class BlockModule(nn.Module):
    """One block: `forward(shared, values) -> sends`, values in the order receives, inputs.

    Where the divided part of a block draws random numbers, its devices seed their generators differently, and `run` is
    given the common seed: for what they must draw alike. A compiled block with dropout is given its device's seed
    last (`workbench.execution.blocks.dropout`).
    """

    def __init__(
        self,
        block: Block,
        run: Runner,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        context: StepContext,
        recompute: str,
        division: Division,
        *,
        compiled: bool,
    ) -> None:
        super().__init__()
        self.block = block
        mode = mode_for(block.code, recompute)
        self.recompute = "none" if compiled else mode
        """What it does here: compiled code has its recomputation inside."""
        self.recordable = compiled and is_replayable(block.code, mode) and not isinstance(run, LabelledRows)
        """Does it launch the same in every step? What selects rows by labels does not."""
        self._run = run
        self._context = context
        self._random = any(is_random(node) for node in block.code.graph.nodes)
        self._draws_own = division.random
        self._counts_dropout = compiled and draws_dropout(block.code)
        self._static: tuple[list[torch.Tensor], list[nn.Parameter | None], list[torch.Tensor]] | None = None
        """What a recordable block is given in every step: weights, whose they are, buffers."""
        self.own = {name: f"p{i}" for i, name in enumerate(block.parameters) if name in parameters}
        self.borrowed = tuple(name for name in block.parameters if name not in parameters)
        """The stage's parameters that it uses."""
        self.halves: Mapping[str, torch.Tensor] = {}
        """Copies that it reads in the place of its parameters (`workbench.execution.blocks.weight_copies`)."""
        self.kept = {name: f"b{i}" for i, name in enumerate(block.buffers)}
        for name, attribute in self.own.items():
            self.register_parameter(attribute, parameters[name])
        for name, attribute in self.kept.items():
            self.register_buffer(attribute, buffers[name], persistent=False)

    def forward(self, shared: Mapping[str, torch.Tensor], values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        context = self._context
        counts = tuple(context.counts[index] for index in self.block.counts)
        seed = context.block_seed(self.block.index) if self._random else None
        run = self._runner()  # now: a recomputation happens when another micro-batch is the context's
        if context.cuda_graphs is not None and self.recordable:
            return context.cuda_graphs.forward(
                self.block.index, context.microbatch, run, self._inputs(seed, shared, (*values, *counts))
            )
        if self.recompute == "none":
            return cast(Values, self._compute(run, seed, shared, *values, *counts))
        return cast(Values, checkpointed(self.recompute, self._compute, run, seed, shared, *values, *counts))

    @property
    def selecting_count(self) -> int | None:
        """The mean loss (an index into `Graph.label_counts`) by whose labels the block selects rows, if it can."""
        return self.block.counts[self._run.part.count] if isinstance(self._run, LabelledRows) else None

    def _runner(self) -> Runner:
        """What runs this micro-batch: over the labelled rows only, where the host knows how many they are."""
        count = self.selecting_count
        labels = None if count is None else self._context.labels(count)
        return self._run if labels is None else cast(LabelledRows, self._run).over(labels)

    def _compute(self, run: Runner, seed: int | None, shared: Mapping[str, torch.Tensor], *values: torch.Tensor) -> Any:
        device = self._context.device
        seeds = (torch.full((), number, dtype=torch.int64, device=device) for number in self._seeds(seed))
        return run(*self._read_weights(shared), *self._read_buffers(), *values, *seeds)

    def _inputs(self, seed: int | None, shared: Mapping[str, torch.Tensor], values: Values) -> Inputs:
        if self._static is None:  # where blocks are recorded, parameters are what they are for good
            names = self.block.parameters
            owners = [getattr(self, self.own[name]) if name in self.own else None for name in names]
            self._static = self._read_weights(shared), owners, self._read_buffers()
        return Inputs(*self._static, values, tuple(self._seeds(seed)))

    def _read_weights(self, shared: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [self._weight(name, shared) for name in self.block.parameters]

    def _read_buffers(self) -> list[torch.Tensor]:
        return [getattr(self, attribute) for attribute in self.kept.values()]

    def _weight(self, name: str, shared: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if name in self.halves:
            return self.halves[name]
        return cast(torch.Tensor, getattr(self, self.own[name])) if name in self.own else shared[name]

    def _seeds(self, seed: int | None) -> Iterator[int]:
        """The seeds that `run` is given, once the generator has this device's; none without random numbers."""
        if seed is None:
            return
        context = self._context
        own = context.own_seed(seed) if self._draws_own else seed
        context.seed_generator(own)
        if self._draws_own:
            yield seed
        if self._counts_dropout:
            yield own


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

    `runners` and `recompute` have one entry a block. The loss is divided by `num_microbatches`: a step's loss is the
    sum over its micro-batches.
    """

    def __init__(
        self,
        graph: Graph,
        first: int,
        end: int,
        *,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        runners: Sequence[Runner],
        context: StepContext,
        num_microbatches: int,
        recompute: Sequence[str],
        compiled: bool = False,
        division: TensorDivision | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__()
        self.graph = graph
        self.first, self.end = first, end
        blocks = graph.blocks[first:end]
        uses = Counter(name for block in blocks for name in block.parameters)
        self._shared = {name: f"s{i}" for i, name in enumerate(n for n, times in uses.items() if times > 1)}
        for name, attribute in self._shared.items():
            self.register_parameter(attribute, parameters[name])
        exclusive = {name: parameters[name] for name, times in uses.items() if times == 1}
        self.blocks = nn.ModuleList(
            BlockModule(
                block,
                run,
                exclusive,
                buffers,
                context,
                mode,
                division.blocks[block.index] if division is not None else Division(),
                compiled=compiled,
            )
            for block, run, mode in zip(blocks, runners, recompute, strict=True)
        )
        self._receives = graph.crossing(first) if first else ()
        self._sends = graph.crossing(end) if end < len(graph.blocks) else ()
        self._finished = graph.finished(first, end)
        self._inputs = {name for block in blocks for name in block.inputs}
        self._num_microbatches = num_microbatches
        self._division = division
        self._autocast = autocast

    def block_modules(self) -> Iterator[BlockModule]:
        return (cast(BlockModule, module) for module in self.blocks)

    @property
    def is_last(self) -> bool:
        return self.end == len(self.graph.blocks)

    @property
    def received(self) -> tuple[TensorSpec, ...]:
        """What crosses the cut before it, as it is carried."""
        return tuple(_carried(self.graph.values[name]) for name in self._receives)

    @property
    def sent(self) -> tuple[TensorSpec, ...]:
        """What crosses the cut after it, as it is carried."""
        return tuple(_carried(self.graph.values[name]) for name in self._sends)

    def named(self) -> dict[str, nn.Parameter]:
        """The model's parameter names -> the parameters as they are now (sharding replaces the objects)."""
        found = {name: getattr(self, attribute) for name, attribute in self._shared.items()}
        for block in self.block_modules():
            found |= {name: getattr(block, attribute) for name, attribute in block.own.items()}
        return found

    def sharding(self, name: str) -> Sharding | None:
        """How a parameter is divided over the tensor-parallel axis; None if every device holds all of it."""
        return self._division.parameters.get(name) if self._division is not None else None

    def named_state(self) -> dict[str, torch.Tensor]:
        """The model's buffer names -> buffers, those that forward changes and those it reads."""
        return {
            name: getattr(block, attribute) for block in self.block_modules() for name, attribute in block.kept.items()
        }

    def forward(self, *received: torch.Tensor, **batch: torch.Tensor) -> Any:
        values = {
            name: _arrived(value, self.graph.values[name], name in self.graph.learned)
            for name, value in zip(self._receives, received, strict=True)
        }
        shared = {name: getattr(self, attribute) for name, attribute in self._shared.items()}
        with self._autocast():
            for module, finished in zip(self.block_modules(), self._finished, strict=True):
                block = module.block
                arguments = (*(values[n] for n in block.receives), *(batch[n] for n in block.inputs))
                # No more than it uses: of whatever a sharded module is given, its backward adds up a gradient.
                borrowed = {name: shared[name] for name in module.borrowed}
                values |= dict(zip(block.sends, module(borrowed, arguments), strict=True))
                for name in finished:  # what the backward needs of it, it has
                    del values[name]
        if self.is_last:
            return values[self.graph.loss].float().reshape(()) / self._num_microbatches
        return tuple(_fresh(values[name], self.graph.values[name]) for name in self._sends)


class HeldStages:
    """The stages of one rank, in the order of the pipeline: one, or several under an interleaved schedule.

    A parameter that several of them use is one parameter to the optimiser, the norm and the checkpoint: the first
    stage's. The others hold copies, which `refresh_copies` brings up to date.
    """

    def __init__(self, stages: Sequence[StageModule], halves: Sequence[Halves] = ()) -> None:
        self.stages = tuple(stages)
        self._halves = tuple(halves)

    def refresh_halves(self) -> None:
        """Bring bf16 copies of weights up to date, where stages keep some."""
        for halves in self._halves:
            halves.refresh()

    def named(self) -> dict[str, nn.Parameter]:
        """The model's parameter names -> the parameters as they are now, one for each name."""
        found: dict[str, nn.Parameter] = {}
        for stage in self.stages:
            found = {**stage.named(), **found}
        return found

    def sharding(self, name: str) -> Sharding | None:
        """How a parameter is divided over the tensor-parallel axis; None if every device holds all of it."""
        return self.stages[0].sharding(name)

    def copies(self) -> dict[str, tuple[nn.Parameter, ...]]:
        """Names that several stages of this rank hold -> the first stage's parameter, then the others'."""
        found: dict[str, list[nn.Parameter]] = {}
        for stage in self.stages:
            for name, parameter in stage.named().items():
                found.setdefault(name, []).append(parameter)
        return {name: tuple(parameters) for name, parameters in found.items() if len(parameters) > 1}

    def named_state(self) -> dict[str, torch.Tensor]:
        """The model's buffer names -> buffers; one that forward changes has one home."""
        found: dict[str, torch.Tensor] = {}
        for stage in self.stages:
            found = {**stage.named_state(), **found}
        return found

    @property
    def computes_loss(self) -> bool:
        return self.stages[-1].is_last

    @property
    def selecting_counts(self) -> frozenset[int]:
        """The mean losses by whose labels some block selects its rows."""
        found = (module.selecting_count for stage in self.stages for module in stage.block_modules())
        return frozenset(count for count in found if count is not None)

    @property
    def label_counts_needed(self) -> bool:
        return any(module.block.counts for stage in self.stages for module in stage.block_modules())


_CARRIER = "float64"
"""Whole numbers cross cuts as the bits of these: torch 2.11 asks a gradient of whatever a stage receives."""


def _carried(spec: TensorSpec) -> TensorSpec:
    return spec if spec.is_floating else TensorSpec(spec.name, spec.shape, _CARRIER)


def _fresh(value: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A contiguous tensor of the promised dtype, as it is carried, that aliases nothing the stage keeps."""
    if not spec.is_floating:
        return value.to(torch.int64, copy=True, memory_format=torch.contiguous_format).view(getattr(torch, _CARRIER))
    return value.to(getattr(torch, spec.dtype), copy=True, memory_format=torch.contiguous_format)


def _arrived(value: torch.Tensor, spec: TensorSpec, learned: bool) -> torch.Tensor:
    """What was carried; torch asks a gradient of all of it, whether some parameter before it is trained or not."""
    if not spec.is_floating:
        return value.detach().view(torch.int64).to(getattr(torch, spec.dtype))
    if not learned:
        return value.detach()
    return _ContiguousGradient.apply(value) if value.requires_grad else value
