"""Blocks rewritten for one device of the tensor-parallel axis, as `workbench.capture.tensor_parallel` found possible.

Collectives are functional (`torch.ops._c10d_functional`), so that the compiler can trace them. Megatron-LM's pair:
`enter` is the identity forward and an all-reduce backward; `leave` is an all-reduce forward and the identity backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.nn import functional

from workbench.capture.division import DROPOUT, EMBEDDING, Division, Product, Sharding, product_of
from workbench.execution.blocks.dropout import counted_dropout

aten = torch.ops.aten
_RESHAPES = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
    }
)
_SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default})


# Tensors and their parts


def part(tensor: torch.Tensor, sharding: Sharding, rank: int) -> torch.Tensor:
    """What one device holds of a whole tensor."""
    pieces = [tensor.narrow(sharding.dim, start, length) for start, length in sharding.pieces(rank)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, sharding.dim)


def whole(local: torch.Tensor, sharding: Sharding, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensor that every device of the group holds its part of (a collective)."""
    degree, dim = sharding.degree, sharding.dim
    longest = max(sharding.size(rank) for rank in range(degree))
    padded = local.new_zeros([longest if d == dim else size for d, size in enumerate(local.shape)])
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    parts = [torch.empty_like(padded) for _ in range(degree)]
    dist.all_gather(parts, padded, group=group)
    shape = [sum(sharding.segments) if d == dim else size for d, size in enumerate(local.shape)]
    found = local.new_empty(shape)
    for rank, held in enumerate(parts):
        offset = 0
        for start, length in sharding.pieces(rank):
            found.narrow(dim, start, length).copy_(held.narrow(dim, offset, length))
            offset += length
    return found


# Collectives that a gradient passes


def _all_reduce(value: torch.Tensor, operation: str, group: str) -> torch.Tensor:
    reduced = torch.ops._c10d_functional.all_reduce(value.contiguous(), operation, group)
    result: torch.Tensor = torch.ops._c10d_functional.wait_tensor(reduced)
    return result


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _all_reduce(gradients[0], "sum", ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, value: torch.Tensor, group: str) -> torch.Tensor:
        return _all_reduce(value, "sum", group)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0], None


def enter(value: torch.Tensor, group: str) -> torch.Tensor:
    """A whole value read by divided operations: its gradients are summed over the devices."""
    result: torch.Tensor = _Enter.apply(value, group)
    return result


def enter_products(value: torch.Tensor, group: str) -> torch.Tensor:
    """As `enter`, for what only matrix products read: cast ahead of them, where autocast would, so that gradients are
    summed in its type, as partial results are in `leave`."""
    device = value.device.type
    if value.dtype == torch.float32 and torch.is_autocast_enabled(device):
        value = value.to(torch.get_autocast_dtype(device))
    return enter(value, group)


def leave(value: torch.Tensor, group: str) -> torch.Tensor:
    """Partial results summed over the devices."""
    result: torch.Tensor = _Leave.apply(value, group)
    return result


def local_part(value: torch.Tensor, pieces: Sequence[tuple[int, int]], dim: int) -> torch.Tensor:
    """`pieces` (start, length) of a whole value along `dim`."""
    found = [value.narrow(dim, start, length) for start, length in pieces]
    return found[0] if len(found) == 1 else torch.cat(found, dim)


# Operations over a divided vocabulary


def parallel_embedding(
    table: torch.Tensor, indices: torch.Tensor, padding_index: int, start: int, length: int, group: str
) -> torch.Tensor:
    """Rows `start` … `start + length - 1` of the table are here; the others' results come from their devices."""
    local = indices - start
    elsewhere = (local < 0) | (local >= length)
    padding = padding_index - start if start <= padding_index < start + length else None
    found = functional.embedding(local.masked_fill(elsewhere, 0), table, padding_idx=padding)
    return leave(found.masked_fill(elsewhere[..., None], 0), group)


class _ParallelCrossEntropy(torch.autograd.Function):
    """-log softmax at the label, for logits (N, C / degree) of classes `start` …; labels elsewhere contribute zero.

    The gradient is softmax minus one at the label, which each device has for its own classes.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_NC: torch.Tensor, labels_N: torch.Tensor, start: int, ignore: int, group: str
    ) -> torch.Tensor:
        length = logits_NC.shape[1]
        largest_N = _all_reduce(logits_NC.amax(1), "max", group)
        exponentials_NC = (logits_NC - largest_N[:, None]).exp()
        local_N = labels_N - start
        here_N = (local_N >= 0) & (local_N < length)
        local_N = local_N.clamp(0, length - 1)
        own_N = logits_NC.gather(1, local_N[:, None])[:, 0] - largest_N
        sums_2N = _all_reduce(torch.stack([exponentials_NC.sum(1), own_N.masked_fill(~here_N, 0)]), "sum", group)
        counted_N = labels_N != ignore
        ctx.save_for_backward(exponentials_NC / sums_2N[0][:, None], local_N, here_N, counted_N)
        return (sums_2N[0].log() - sums_2N[1]).masked_fill(~counted_N, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        softmax_NC, local_N, here_N, counted_N = ctx.saved_tensors
        gradient_NC = softmax_NC.scatter_add(1, local_N[:, None], -here_N.to(softmax_NC.dtype)[:, None])
        gradient_N = gradients[0].masked_fill(~counted_N, 0)
        return gradient_NC * gradient_N[:, None], None, None, None, None


def parallel_cross_entropy(
    logits_NC: torch.Tensor, labels_N: torch.Tensor, reduction: int, ignore: int, start: int, group: str
) -> torch.Tensor:
    """As `aten.cross_entropy_loss` over logits whose classes are divided; `reduction` is none 0, mean 1, sum 2."""
    losses_N: torch.Tensor = _ParallelCrossEntropy.apply(logits_NC.float(), labels_N, start, ignore, group)
    if reduction == 0:
        return losses_N
    return losses_N.sum() if reduction == 2 else losses_N.sum() / (labels_N != ignore).sum()


# The rewriting


def divide(code: fx.GraphModule, division: Division, rank: int, group: str) -> fx.GraphModule:
    """A block's code for one device of the axis. Where `division.random`, the seed that all devices have is its last
    argument, and dropout outside of divided regions counts, so that they draw it alike."""
    return fx.GraphModule(dict(code.named_children()), _Rewriting(code, division, rank, group).graph)


class _Rewriting:
    def __init__(self, code: fx.GraphModule, division: Division, rank: int, group: str) -> None:
        self.graph = fx.Graph()
        self._division, self._rank, self._group = division, rank, group
        self._copies: dict[fx.Node, fx.Node] = {}
        self._entered: dict[fx.Node, fx.Node] = {}
        self._seed: fx.Node | None = None
        self._salt = 0
        for node in code.graph.nodes:
            if division.random and self._seed is None and node.op not in ("placeholder", "get_attr"):
                self._seed = self.graph.placeholder("seed")
            self._copies[node] = self._copied(node)
        self.graph.lint()

    def _call(self, function: Any, *arguments: Any) -> fx.Node:
        return self.graph.call_function(function, arguments)

    def _copied(self, node: fx.Node) -> fx.Node:
        product = product_of(node) if node.name in self._division.reduced else None
        if product is not None:
            return self._row(node, product)
        if node.name in self._division.reduced:
            return self._embedding(node) if node.target is EMBEDDING else self._cross_entropy(node)
        if node.target is DROPOUT and self._division.random and node.name not in self._division.sharded:
            return self._dropout(node)
        if node.target in _SPLITS and self._sharding(node.args[0]) is not None:
            return self._split(node)
        copied = self.graph.node_copy(node, lambda source: self._operand(node, source))
        sharding = self._division.sharded.get(node.name)
        if sharding is not None:
            self._fit_sizes(node, copied, sharding)
        return copied

    def _operand(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """What a node reads: a copy of its source, entered into the region, cut to this device's part."""
        found = self._copies[source]
        if source.name in self._division.entering.get(node.name, ()):
            if source not in self._entered:
                entered = enter_products if source.name in self._division.multiplied else enter
                self._entered[source] = self._call(entered, found, self._group)
            found = self._entered[source]
        sliced = self._division.sliced.get((node.name, source.name))
        return found if sliced is None else self._call(local_part, found, sliced.pieces(self._rank), sliced.dim)

    def _sharding(self, node: Any) -> Sharding | None:
        return self._division.sharded.get(node.name) if isinstance(node, fx.Node) else None

    def _row(self, node: fx.Node, product: Product) -> fx.Node:
        if product.experts:
            partial = self.graph.node_copy(node, lambda source: self._operand(node, source))
            return self._call(leave, partial, self._group)
        value, weight = self._operand(node, product.value), self._operand(node, product.weight)
        multiply = aten.matmul.default if product.transposed else aten.linear.default
        result = self._call(leave, self._call(multiply, value, weight), self._group)
        if product.bias is None:
            return result
        return self._call(aten.add.Tensor, result, self._operand(node, product.bias))

    def _embedding(self, node: fx.Node) -> fx.Node:
        table, indices, *rest = node.args
        assert isinstance(table, fx.Node)
        rows = Sharding(0, (table.meta["val"].shape[0],), self._degree())
        [(start, length)] = rows.pieces(self._rank)
        padding = rest[0] if rest else node.kwargs.get("padding_idx", -1)
        arguments = (self._copies[table], self._copies[indices], padding, start, length)  # type: ignore[index]
        return self._call(parallel_embedding, *arguments, self._group)

    def _degree(self) -> int:
        return next(iter(self._division.parameters.values())).degree

    def _cross_entropy(self, node: fx.Node) -> fx.Node:
        defaults: tuple[Any, ...] = (None, None, None, 1, -100)
        given: tuple[Any, ...] = (*node.args[:5], *defaults[len(node.args) :])
        logits, labels, _, reduction, ignore = given
        sharding = self._sharding(logits)
        assert sharding is not None
        [(start, _)] = sharding.pieces(self._rank)
        operands = (self._operand(node, logits), self._operand(node, labels))
        return self._call(parallel_cross_entropy, *operands, reduction, ignore, start, self._group)

    def _dropout(self, node: fx.Node) -> fx.Node:
        value, rate, training = node.args
        assert isinstance(value, fx.Node)
        if not training or not rate:
            return self._copies[value]
        self._salt += 1
        return self._call(counted_dropout, self._copies[value], rate, self._seed, self._salt)

    def _split(self, node: fx.Node) -> fx.Node:
        """Along the divided dim, into what this device holds of each part."""
        sharding = self._sharding(node.args[0])
        given: Any = node.args[2] if len(node.args) > 2 else 0
        assert sharding is not None
        values = node.meta["val"]
        dim = given % values[0].dim()
        sizes = [int(value.shape[dim]) for value in values]
        if dim == sharding.dim:
            remaining = list(sharding.segments)
            sizes = [_taken(remaining, size, sharding.degree, self._rank) for size in sizes]
        return self._call(aten.split_with_sizes.default, self._operand(node, node.args[0]), sizes, dim)  # type: ignore[arg-type]

    def _fit_sizes(self, node: fx.Node, copied: fx.Node, sharding: Sharding) -> None:
        """Replace literal sizes by this device's."""
        if node.target in _RESHAPES:
            shape = list(node.meta["val"].shape)
        elif node.target is aten.expand.default:
            given: Any = node.args[1]
            shape = list(given)
        else:
            return
        if shape[sharding.dim] != -1:
            shape[sharding.dim] = sharding.size(self._rank)
        copied.target = aten.reshape.default if node.target in _RESHAPES else node.target
        copied.args, copied.kwargs = (copied.args[0], shape), {}


def _taken(remaining: list[int], size: int, degree: int, rank: int) -> int:
    """This device's share of the segments that make up the next `size` of a divided dim."""
    taken: list[int] = []
    while sum(taken) < size:
        taken.append(remaining.pop(0))
    return Sharding(0, tuple(taken), degree).size(rank)
