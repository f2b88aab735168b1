"""Values that say how a block's tensors are sharded over the devices of the tensor-parallel axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from workbench.capture.operations import GROUPED_MATMUL, schema_of, shape_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Sharding:
    """One dim of a tensor, sharded over `degree` devices.

    The dim consists of consecutive `segments` that are sharded separately: the fused query, key and value of GPT-2 are
    three. Where `degree` does not divide a segment, the last device holds less of it.
    """

    dim: int
    segments: tuple[int, ...]
    degree: int

    @property
    def even(self) -> bool:
        return all(segment % self.degree == 0 for segment in self.segments)

    def pieces(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return (start, length) in the whole tensor of each piece that a device holds, in its order on the device."""
        pieces, start = [], 0
        for segment in self.segments:
            chunk = -(-segment // self.degree)
            first, end = min(rank * chunk, segment), min((rank + 1) * chunk, segment)
            pieces.append((start + first, end - first))
            start += segment
        return tuple(pieces)

    def size(self, rank: int) -> int:
        """Return the length of the dim on a device."""
        return sum(length for _, length in self.pieces(rank))


@dataclass(frozen=True)
class BlockSharding:
    """The tensor-parallel sharding of one block type. Nodes go by their names in `Block.code`."""

    sharded: Mapping[str, Sharding] = field(default_factory=dict)
    """Operations whose result is sharded, and how (`getitem`s of a split stand for its parts)."""
    parameters: Mapping[int, Sharding] = field(default_factory=dict)
    """Sharded parameters, by position in `Block.parameters`."""
    entering: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Operation -> the whole values that it reads into a sharded region: the backward all-reduces their gradients."""
    multiplied: frozenset[str] = frozenset()
    """Entering values that only matrix products read, as their left operand: autocast casts them for all readers."""
    sliced: Mapping[tuple[str, str], Sharding] = field(default_factory=dict)
    """(operation, whole operand) -> the part of the operand that the operation reads on each device."""
    whole: Mapping[tuple[str, str], Sharding] = field(default_factory=dict)
    """(operation, sharded operand) of operations that only logged scalars need, which read the whole operand."""
    reduced: frozenset[str] = frozenset()
    """Operations whose results are partial: the forward all-reduces them."""
    forward_elements: tuple[int, ...] = ()
    """Elements of each all-reduce of one forward."""
    backward_elements: tuple[int, ...] = ()
    """Elements of each all-reduce of one backward."""
    random: bool = False
    """True if a sharded operation draws random numbers: each device then needs its own."""

    @property
    def divided(self) -> frozenset[str]:
        """Operations of which each device does 1 / degree."""
        return frozenset(self.sharded) | self.reduced


@dataclass(frozen=True)
class ModelSharding:
    """The tensor-parallel sharding of a model."""

    parameters: Mapping[str, Sharding]
    """Sharded parameters, by name; the others are whole on every device."""
    blocks: tuple[BlockSharding, ...]
    """One for each block of the graph."""


@dataclass(frozen=True)
class Product:
    """A matrix product `value @ weightᵀ + bias` with a weight; this is stored as (in, out) if `transposed`."""

    value: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool
    experts: bool = False
    """True if the weight has one matrix per expert in its first dim, and each row of the value meets one of them."""
    transpose: fx.Node | None = None
    """Transpose between the experts' weights and the product, if there is one."""

    @property
    def out_dim(self) -> int:
        """Dim of the weight that holds the output features."""
        return self.experts + self.transposed

    @property
    def in_dim(self) -> int:
        """Dim of the weight that holds the input features."""
        return self.experts + (not self.transposed)


def product_of(node: fx.Node) -> Product | None:
    """Return the product with a matrix, or with one for each expert, that a node computes; None for other nodes."""
    arguments: Any = node.args
    if node.op != "call_function" or node.kwargs:
        return None
    if node.target is aten.linear.default:
        return Product(arguments[0], arguments[1], arguments[2] if len(arguments) > 2 else None, False)
    if node.target is aten.addmm.default:
        return Product(arguments[1], arguments[2], arguments[0], True)
    if node.target in (aten.mm.default, aten.matmul.default) and len(shape_of(arguments[1])) == 2:
        return Product(arguments[0], arguments[1], None, True)
    schema = schema_of(node)
    if schema is not None and schema.name == GROUPED_MATMUL:
        rows, weights, _ = arguments
        is_transpose = weights.target is aten.transpose.int and {dim % 3 for dim in weights.args[1:]} == {1, 2}
        if is_transpose and set(weights.users) == {node}:
            return Product(rows, weights.args[0], None, False, experts=True, transpose=weights)
        return Product(rows, weights, None, True, experts=True)
    return None
