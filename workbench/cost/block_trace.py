"""The trace of one block, run operation by operation on the meta device: its values, and those its backward needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from workbench.capture.graph import Block, Graph
from workbench.capture.losses import find_rowwise_head
from workbench.capture.operations import op_name
from workbench.capture.source_lines import line_of_node
from workbench.capture.tensor_parallel import BlockSharding
from workbench.cost.operations import (
    META,
    Operation,
    OperationRunner,
    Settings,
    identity,
    storage_bytes,
    tensors_in,
)
from workbench.errors import CaptureError
from workbench.sparsity.kernels.speed import Products
from workbench.tensors import TensorSpec

_RANDOM = frozenset({"dropout", "native_dropout"})
"""Operations whose own work, a random mask, depends on none of their inputs."""


@dataclass(frozen=True)
class RowSelection:
    """The operations of a block that run over labelled rows only, and the share of the rows that have a label."""

    operations: frozenset[str] = frozenset()
    share: float = 1.0

    @staticmethod
    def of(block: Block, labelled_share: float) -> RowSelection:
        part = find_rowwise_head(block)
        rows = None if part is None else part.rows_to_compute(math.ceil(labelled_share * part.rows))
        return RowSelection() if part is None or rows is None else RowSelection(frozenset(part.reads), rows / part.rows)


@dataclass
class Value:
    """One piece of memory inside a block; steps count the block's operations, and -1 stands for its arguments."""

    tensor: torch.Tensor
    born: int
    """Step that makes it."""
    last_use: int
    batched: bool
    """True if its size grows with the micro-batch."""
    weight: bool = False
    gradient: bool = False
    first_saved: int | None = None
    """First step that saves it for the backward."""
    share: float = 1.0
    """Share that one tensor-parallel rank, or a selection of rows, holds of it."""
    uses: set[int] = field(default_factory=set)

    @property
    def nbytes(self) -> float:
        return storage_bytes(self.tensor) * self.share

    @property
    def elements(self) -> float:
        return self.tensor.numel() * self.share


class BlockTrace:
    """One block run on meta tensors: its operations in order, and every value by the `identity` of its memory.

    `divide` then says which share of each operation and value one tensor-parallel rank has.
    """

    def __init__(
        self, graph: Graph, block: Block, received: tuple[torch.dtype, ...], settings: Settings, rows: RowSelection
    ) -> None:
        self.block, self.settings, self.samples = block, settings, graph.micro_batch
        self.runner = OperationRunner(settings)
        self.values: dict[int, Value] = {}
        self.operations: list[Operation] = []
        self.of_node: dict[str, list[torch.Tensor]] = {}
        """Tensors that each node of the block's code returned, by the node's name."""
        self.sent: tuple[torch.dtype, ...] = ()
        self.division = BlockSharding()
        self.relative: Mapping[str, Products] = {}
        """Times of the three products of a node, by its name, over those with a dense weight; see `leave_out`."""
        self._model, self._rows = graph.model, rows
        self._run(graph, received)
        self.divide(BlockSharding(), 1)

    def divide(self, division: BlockSharding, degree: int) -> None:
        """Set every share to that of one of `degree` tensor-parallel ranks."""
        self.division, self.relative = division, {}
        rows = self._rows if not division.divided else RowSelection()  # a divided head runs over all of its rows
        for value in self.values.values():
            value.share = 1.0
        for position, value in enumerate(self._weight_arguments()):
            if position in division.parameters:
                value.share = 1 / degree
        for step, ran in enumerate(self.operations):
            selects, divided = ran.node in rows.operations, ran.node in division.divided
            ran.share = 1 / degree if divided else rows.share if selects else 1.0
            for tensor in ran.output_tensors:
                value = self.values[identity(tensor)]
                if ran.node in division.sharded or (selects and value.born == step):
                    value.share = ran.share
            for tensor in (*ran.saved, *ran.own_results):
                if (selects or divided) and self.is_internal(tensor, step):
                    self.values[identity(tensor)].share = ran.share
            for source, copy in ran.casts:
                self.values[identity(copy)].share = self.values[identity(source)].share

    def leave_out(self, stored: Mapping[str, float], relative: Mapping[str, Products]) -> None:
        """Set every share to that of block-sparse weights.

        `stored` is the share of its blocks that a parameter stores, by name; `relative` are the times of the products
        with it, by node. `divide` undoes this.
        """
        self.divide(BlockSharding(), 1)
        self.relative = relative
        for name, value in zip(self.block.parameters, self._weight_arguments(), strict=False):
            value.share = stored.get(name, 1.0)
        for ran in self.operations:
            for source, copy in ran.casts:
                self.values[identity(copy)].share = self.values[identity(source)].share

    def _weight_arguments(self) -> list[Value]:
        """Return the parameters in the block's order, then the buffers."""
        return [value for value in self.values.values() if value.weight and value.born == -1]

    def is_internal(self, tensor: torch.Tensor, step: int) -> bool:
        """Return True if the step made the tensor (a mask, a log-sum-exp) and does not return it."""
        value = self.values.get(identity(tensor))
        outputs = {identity(output) for output in self.operations[step].output_tensors}
        return value is not None and value.born == step and identity(tensor) not in outputs

    @cached_property
    def recomputed(self) -> set[int]:
        """Steps that full activation checkpointing repeats: those that a value depends on which the backward reads.

        The last product of a block that ends in a residual addition is not among them.
        """
        needed = {key for key, value in self.values.items() if value.first_saved is not None and not value.weight}
        steps = set()
        for step, ran in reversed(list(enumerate(self.operations))):
            copies = {identity(copy): identity(source) for source, copy in ran.casts}
            internal = [] if ran.name in _RANDOM else [t for t in ran.saved if self.is_internal(t, step)]
            made = {identity(tensor) for tensor in (*ran.output_tensors, *ran.own_results, *internal)} - set(copies)
            if made & needed:
                steps.add(step)
                needed |= {identity(tensor) for tensor in ran.sources}
            needed |= {source for copy, source in copies.items() if copy in needed}
        return steps

    def _run(self, graph: Graph, received: tuple[torch.dtype, ...]) -> None:
        env: dict[fx.Node, Any] = {}
        arguments = iter(self._arguments(graph, received))
        for node in self.block.code.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(arguments)
            elif node.op == "get_attr":
                env[node] = getattr(self.block.code, str(node.target))
            elif node.op == "call_function":
                env[node] = self._step(node, env)
            elif node.op == "output":
                sends = tensors_in(fx.node.map_arg(node.args[0], env.__getitem__))
                self.sent = tuple(send.dtype for send in sends)
                for value in (self.values[identity(send)] for send in sends):
                    value.last_use = len(self.operations)
                    value.uses.add(len(self.operations))
            self.of_node[node.name] = tensors_in(env.get(node))

    def _arguments(self, graph: Graph, received: tuple[torch.dtype, ...]) -> Iterable[torch.Tensor]:
        for name in self.block.parameters:
            yield self._argument(graph.parameters[name], weight=True, gradient=name not in graph.frozen)
        for name in self.block.buffers:
            yield self._argument(graph.buffers[name], weight=True)
        for name, dtype in zip(self.block.receives, received, strict=True):
            yield self._argument(graph.values[name], dtype, batched=True, gradient=name in graph.differentiated)
        for name in self.block.inputs:
            yield self._argument(graph.batch[name], batched=True)
        for _ in self.block.counts:
            yield self._argument(TensorSpec("count", (), "float32"))

    def _argument(
        self,
        spec: TensorSpec,
        dtype: torch.dtype | None = None,
        *,
        weight: bool = False,
        batched: bool = False,
        gradient: bool = False,
    ) -> torch.Tensor:
        tensor = torch.empty(spec.shape, dtype=dtype or getattr(torch, spec.dtype), device=META)
        self.values[identity(tensor)] = Value(tensor, -1, -1, batched, weight, gradient)
        if gradient:
            self.runner.gradients.add(identity(tensor))
        if weight:
            self.runner.weights.add(identity(tensor))
        return tensor

    def _step(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
        lookup: Callable[[fx.Node], Any] = env.__getitem__
        args: Any = fx.node.map_arg(node.args, lookup)
        kwargs: Any = fx.node.map_arg(node.kwargs, lookup)
        if op_name(node) == "getitem":
            return args[0][args[1]]
        try:
            ran = self.runner.run(node, args, kwargs)
        except (RuntimeError, TypeError) as error:
            raise self._cannot_run(node, error) from error
        step = len(self.operations)
        self.operations.append(ran)
        for source, copy in ran.casts:
            read, made = self._value(source, step), self._value(copy, step)
            made.batched, made.gradient, made.weight = read.batched, read.gradient, read.weight
        batched = any(self._value(tensor, step).batched for tensor in ran.inputs)
        for tensor in ran.sources:
            value = self._value(tensor, step, batched=batched)
            value.last_use = step
            value.uses.add(step)
        for tensor in ran.output_tensors:
            value = self._value(tensor, step, batched=batched)
            value.gradient |= identity(tensor) in self.runner.gradients
        for tensor in ran.saved:
            value = self._value(tensor, step, batched=batched)
            value.first_saved = step if value.first_saved is None else min(value.first_saved, step)
        return ran.outputs

    def _value(self, tensor: torch.Tensor, step: int, *, batched: bool = False) -> Value:
        return self.values.setdefault(identity(tensor), Value(tensor, step, step, batched))

    def _cannot_run(self, node: fx.Node, error: Exception) -> CaptureError:
        """Return the error for an operation that ran in fp32 at capture and cannot run in autocast's dtypes."""
        name, precision = op_name(node), self.settings.precision
        line, reason = line_of_node(node), str(error).partition("\n")[0].rstrip(".")
        way_out = (
            "Under autocast it is given bf16: cast what it reads in forward (.float()), or train with precision='fp32'."
            if precision == "bf16"
            else "Replace it by operations that have a backward in this precision."
        )
        return line.error(f"{self._model}:", f"{name}{line.where} cannot run in {precision}: {reason}. {way_out}")
