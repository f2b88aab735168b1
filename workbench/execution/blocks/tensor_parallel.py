"""Rewrite blocks for one device of the tensor-parallel axis, as planned by `workbench.capture.blocks.tensor_parallel`.

Collectives are functional (`torch.ops._c10d_functional`), so that the compiler can trace them. They come in
Megatron-LM's pair (arXiv:1909.08053): `enter` is the identity forward and an all-reduce backward; `leave` is an
all-reduce forward and the identity backward. Suffixes of tensor names: N rows, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import fx
from torch.nn import functional

from workbench.capture.blocks.tensor_parallel import BlockSharding, Sharding, product_of
from workbench.capture.operations import DROPOUT, EMBEDDING, LOGS, arguments_of, overloads
from workbench.execution.blocks.rewriting import GraphRewriter, hashed_dropout

aten = torch.ops.aten
_RESHAPES = overloads("view reshape _unsafe_view flatten.using_ints unflatten.int")
_SPLITS = overloads("split.Tensor split_with_sizes chunk")


# Tensors and their shards


def take_pieces(value: torch.Tensor, pieces: Sequence[tuple[int, int]], dim: int) -> torch.Tensor:
    """Return `pieces`, each (start, length) along `dim`, of a whole value, one after the other."""
    taken = [value.narrow(dim, start, length) for start, length in pieces]
    return taken[0] if len(taken) == 1 else torch.cat(taken, dim)


def take_shard(tensor: torch.Tensor, sharding: Sharding, rank: int) -> torch.Tensor:
    """Return the shard of a whole tensor that one device holds."""
    return take_pieces(tensor, sharding.pieces(rank), sharding.dim)


def all_gather_shards(shard: torch.Tensor, sharding: Sharding, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the whole tensor of which each device of the group holds a shard (a collective)."""
    return gather(shard, *_gathering(sharding), group.group_name).contiguous()


# Collectives with gradients


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
    """Pass a whole value to divided operations; its gradient is summed over the devices."""
    result: torch.Tensor = _Enter.apply(value, group)
    return result


def enter_products(value: torch.Tensor, group: str) -> torch.Tensor:
    """Pass a whole value that only matrix products read, cast to autocast's dtype before it enters.

    The gradient is then summed over the devices in that dtype, as partial results are in `leave`.
    """
    device = value.device.type
    if value.dtype == torch.float32 and torch.is_autocast_enabled(device):
        value = value.to(torch.get_autocast_dtype(device))
    return enter(value, group)


def leave(value: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum of the devices' partial results."""
    result: torch.Tensor = _Leave.apply(value, group)
    return result


def gather(
    value: torch.Tensor, dim: int, longest: int, parts: Sequence[tuple[int, int]], degree: int, group: str
) -> torch.Tensor:
    """Return the whole of a sharded value, without a gradient.

    Each device gives `longest` entries of `dim`, the last of which may be padding; `parts` are (start, length) of the
    pieces of the whole value in the sequence of all devices' entries.
    """
    own = value.movedim(dim, 0)
    padded = torch.cat([own, own.new_zeros((longest - own.shape[0], *own.shape[1:]))]).contiguous()
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(padded, degree, group)
    entries = torch.ops._c10d_functional.wait_tensor(gathered)
    return torch.cat([entries.narrow(0, start, length) for start, length in parts]).movedim(0, dim)


def _gathering(sharding: Sharding) -> tuple[int, int, tuple[tuple[int, int], ...], int]:
    """Return `dim`, `longest`, `parts` and `degree` for `gather`."""
    longest = max(sharding.size(rank) for rank in range(sharding.degree))
    parts: dict[int, tuple[int, int]] = {}
    for rank in range(sharding.degree):
        offset = rank * longest
        for start, length in sharding.pieces(rank):
            if length:
                parts[start] = (offset, length)
            offset += length
    return sharding.dim, longest, tuple(parts[start] for start in sorted(parts)), sharding.degree


# Operations over a divided vocabulary


def parallel_embedding(
    table: torch.Tensor, indices: torch.Tensor, padding_index: int, start: int, length: int, group: str
) -> torch.Tensor:
    """Look up rows of a divided table, of which this device holds `start` … `start + length - 1`."""
    local = indices - start
    elsewhere = (local < 0) | (local >= length)
    padding = padding_index - start if start <= padding_index < start + length else None
    rows = functional.embedding(local.masked_fill(elsewhere, 0), table, padding_idx=padding)
    return leave(rows.masked_fill(elsewhere[..., None], 0), group)


class _ParallelCrossEntropy(torch.autograd.Function):
    """-log softmax at the label, for logits (N, C / degree) of classes `start` …; ignored labels contribute zero.

    The gradient is softmax minus one at the label; each device computes it for its own classes.
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
    """Compute `aten.cross_entropy_loss` over logits with divided classes; `reduction` is none 0, mean 1 or sum 2."""
    losses_N: torch.Tensor = _ParallelCrossEntropy.apply(logits_NC.float(), labels_N, start, ignore, group)
    if reduction == 0:
        return losses_N
    return losses_N.sum() if reduction == 2 else losses_N.sum() / (labels_N != ignore).sum()


# The graph pass


def divide_block(code: fx.GraphModule, division: BlockSharding, rank: int, group: str) -> fx.GraphModule:
    """Rewrite a block's code for device `rank` of the tensor-parallel axis, whose process group is named `group`.

    If `division.random`, the new code's last argument is the seed that all devices of the axis share, and dropout
    outside of divided regions is hashed from it, so that all devices draw the same mask.
    """
    rewriter = _TensorParallelRewriter(code, division, rank, group)
    return rewriter.rewrite(rewriter.rule, "seed" if division.random else None)


class _TensorParallelRewriter(GraphRewriter):
    def __init__(self, code: fx.GraphModule, division: BlockSharding, rank: int, group: str) -> None:
        super().__init__(code)
        self._division, self._rank, self._group = division, rank, group
        self._entered: dict[fx.Node, fx.Node] = {}
        self._salt = 0

    def rule(self, node: fx.Node) -> fx.Node:
        """Return what one device computes in the place of a node of the whole code."""
        division, sharding = self._division, self._division.sharded.get(node.name)
        operand = partial(self._operand, node)
        if node.op == "output":  # whole values are sent: a sharded one, which forward returned, is gathered
            whole = []
            sent: Any = node.args[0]
            for source in sent:
                held, value = self._sharding(source), self.copies[source]
                whole.append(value if held is None else self.call(gather, value, *_gathering(held), self._group))
            return cast(fx.Node, self.graph.output(tuple(whole)))

        # Partial results, which `leave` sums over the devices: products over a divided dim, lookups in a divided table
        # and losses over divided classes.
        product = product_of(node) if node.name in division.reduced else None
        if product is not None and product.experts:
            return self.call(leave, self.copy(node, operand), self._group)
        if product is not None:
            multiply = aten.matmul.default if product.transposed else aten.linear.default
            partial_sum = self.call(multiply, operand(product.value), operand(product.weight))
            result = self.call(leave, partial_sum, self._group)  # to which the bias is added once
            return result if product.bias is None else self.call(aten.add.Tensor, result, operand(product.bias))
        if node.name in division.reduced and node.target is EMBEDDING:
            given = arguments_of(node)
            degree = next(iter(division.parameters.values())).degree
            [(start, length)] = Sharding(0, (given["weight"].meta["val"].shape[0],), degree).pieces(self._rank)
            operands = self.copies[given["weight"]], self.copies[given["indices"]]
            return self.call(parallel_embedding, *operands, given["padding_idx"], start, length, self._group)
        if node.name in division.reduced:
            given = arguments_of(node)
            [(start, _)] = division.sharded[given["self"].name].pieces(self._rank)
            operands, ignored = (operand(given["self"]), operand(given["target"])), given["ignore_index"]
            return self.call(parallel_cross_entropy, *operands, given["reduction"], ignored, start, self._group)

        # Operations that read their own sizes or draw random numbers
        if node.target is DROPOUT and division.random and sharding is None:
            value, rate, training = cast(Any, node.args)
            if not training or not rate:
                return self.copies[value]
            self._salt += 1
            return self.call(hashed_dropout, self.copies[value], rate, self.new_argument, self._salt)
        if node.target in _SPLITS and LOGS not in node.meta and (held := self._sharding(node.args[0])) is not None:
            values, remaining = node.meta["val"], list(held.segments)
            dim = arguments_of(node)["dim"] % values[0].dim()
            sizes = [int(value.shape[dim]) for value in values]
            if dim == held.dim:  # each part takes the segments that make up its size, of which a device holds a share
                for at, size in enumerate(sizes):
                    taken: list[int] = []
                    while sum(taken) < size:
                        taken.append(remaining.pop(0))
                    sizes[at] = Sharding(0, tuple(taken), held.degree).size(self._rank)
            return self.call(aten.split_with_sizes.default, operand(cast(Any, node.args[0])), sizes, dim)
        copied = self.copy(node, operand)
        if sharding is not None and (node.target in _RESHAPES or node.target is aten.expand.default):
            written: Any = node.meta["val"].shape if node.target in _RESHAPES else node.args[1]
            shape = list(written)  # literal sizes, in place of which this device's stand
            if shape[sharding.dim] != -1:
                shape[sharding.dim] = sharding.size(self._rank)
            copied.target = aten.reshape.default if node.target in _RESHAPES else node.target
            copied.args, copied.kwargs = (copied.args[0], shape), {}
        return copied

    def _operand(self, node: fx.Node, source: Any) -> fx.Node:
        """Return what `node` reads of `source`: a copy that enters the divided region and is sliced where needed."""
        operand = self.copies[source]
        if (whole := self._division.whole.get((node.name, source.name))) is not None:
            detached = self.call(aten.detach.default, operand)
            return self.call(gather, detached, *_gathering(whole), self._group)
        if source.name in self._division.entering.get(node.name, ()):
            if source not in self._entered:
                function = enter_products if source.name in self._division.multiplied else enter
                self._entered[source] = self.call(function, operand, self._group)
            operand = self._entered[source]
        sliced = self._division.sliced.get((node.name, source.name))
        return operand if sliced is None else self.call(take_pieces, operand, sliced.pieces(self._rank), sliced.dim)

    def _sharding(self, node: Any) -> Sharding | None:
        return self._division.sharded.get(node.name) if isinstance(node, fx.Node) else None
