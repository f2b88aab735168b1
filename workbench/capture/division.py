"""How a block's tensors are divided over the devices of the tensor-parallel axis: values, without any analysis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
EMBEDDING = aten.embedding.default
DROPOUT = aten.dropout.default
GROUPED_PRODUCT = "workbench::grouped_mm"
"""See `workbench.capture.experts`."""


@dataclass(frozen=True)
class Sharding:
    """One dim of a tensor divided over `degree` devices.

    The dim consists of `segments` laid one after the other, each divided on its own: the fused query, key and value
    of GPT-2 are three. Of a segment that `degree` does not divide, the last device holds less.
    """

    dim: int
    segments: tuple[int, ...]
    degree: int

    @property
    def even(self) -> bool:
        return all(segment % self.degree == 0 for segment in self.segments)

    def pieces(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(start, length) in the whole tensor of what a device holds, in the order in which it holds it."""
        found, start = [], 0
        for segment in self.segments:
            chunk = -(-segment // self.degree)
            first, end = min(rank * chunk, segment), min((rank + 1) * chunk, segment)
            found.append((start + first, end - first))
            start += segment
        return tuple(found)

    def size(self, rank: int) -> int:
        """Length of the dim on a device."""
        return sum(length for _, length in self.pieces(rank))


@dataclass(frozen=True)
class Division:
    """How one kind of block is divided. Nodes go by their names in `Block.code`."""

    sharded: Mapping[str, Sharding] = field(default_factory=dict)
    """Operations whose result is divided, and how (`getitem`s of a split stand for its parts)."""
    parameters: Mapping[int, Sharding] = field(default_factory=dict)
    """Positions in `Block.parameters` of the divided ones."""
    entering: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Whole values that a divided operation reads: their gradients are partial and summed in the backward."""
    multiplied: frozenset[str] = frozenset()
    """Of those, what only matrix products read, as the value that they multiply: autocast casts it for all of them."""
    sliced: Mapping[tuple[str, str], Sharding] = field(default_factory=dict)
    """(operation, whole operand) of which the operation reads this device's part."""
    reduced: frozenset[str] = frozenset()
    """Operations whose results are partial: summed over the devices in the forward."""
    forward_elements: tuple[int, ...] = ()
    """Size of each all-reduce of one forward."""
    backward_elements: tuple[int, ...] = ()
    random: bool = False
    """Whether a divided operation draws random numbers: each device then needs its own."""

    @property
    def divided(self) -> frozenset[str]:
        """Operations that each device does 1 / degree of."""
        return frozenset(self.sharded) | self.reduced


@dataclass(frozen=True)
class TensorDivision:
    """A model divided over `degree` devices; `kinds` holds the blocks that are."""

    degree: int
    kinds: Mapping[str, Division]
    parameters: Mapping[str, Sharding]
    """Divided parameters, by name; the others are whole on every device."""
    blocks: tuple[Division, ...]
    """One for each block of the graph."""


@dataclass(frozen=True)
class Product:
    """`value @ weightᵀ + bias`; the weight as it is stored, (in, out) if `transposed`."""

    value: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool
    experts: bool = False
    """(experts, out, in), or (experts, in, out): each row of the value meets one of them."""
    turned: fx.Node | None = None
    """What swaps the last two dims of experts' weights, between them and the product."""

    @property
    def out_dim(self) -> int:
        return self.experts + self.transposed

    @property
    def in_dim(self) -> int:
        return self.experts + (not self.transposed)


def product_of(node: fx.Node) -> Product | None:
    """A product with a two-dimensional tensor, or with one for each expert."""
    arguments: Any = node.args
    if node.op != "call_function" or node.kwargs:
        return None
    if node.target is aten.linear.default:
        return Product(arguments[0], arguments[1], arguments[2] if len(arguments) > 2 else None, False)
    if node.target is aten.addmm.default:
        return Product(arguments[1], arguments[2], arguments[0], True)
    if node.target in (aten.mm.default, aten.matmul.default) and len(shape_of(arguments[1])) == 2:
        return Product(arguments[0], arguments[1], None, True)
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == GROUPED_PRODUCT:
        rows, weights, _ = arguments
        turned = weights.target is aten.transpose.int and {dim % 3 for dim in weights.args[1:]} == {1, 2}
        if turned and set(weights.users) == {node}:
            return Product(rows, weights.args[0], None, False, experts=True, turned=weights)
        return Product(rows, weights, None, True, experts=True)
    return None


def shape_of(node: Any) -> tuple[int, ...]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def width_of(column: fx.Node) -> int:
    return shape_of(column)[-1]


def holds_whole_numbers(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
