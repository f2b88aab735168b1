"""Copy a block's graph node by node, with changes: the base of all passes that rewrite blocks, and two of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import fx

from workbench.capture.blocks.attention import broadcast_attention, is_broadcast
from workbench.capture.operations import DROPOUT

NodeMap = Callable[[fx.Node], fx.Node]


class GraphRewriter:
    """A graph under construction; `copies` maps each node of the old code to its counterpart in the new graph."""

    def __init__(self, code: fx.GraphModule) -> None:
        self.code = code
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.new_argument: fx.Node | None = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> fx.Node:
        """Append a call of `function`; nodes among the arguments belong to the new graph."""
        return self.graph.call_function(function, arguments)

    def copy(self, node: fx.Node, operand: NodeMap | None = None) -> fx.Node:
        """Append a copy of an old node; `operand` gives the new node for each one it reads (default: its copy)."""
        return self.graph.node_copy(node, operand or self.copies.__getitem__)

    def rewrite(self, rule: NodeMap, new_argument: str | None = None) -> fx.GraphModule:
        """Replace every node by what `rule` makes of it, in order; `new_argument` becomes the code's last argument."""
        for node in self.code.graph.nodes:
            if new_argument and self.new_argument is None and node.op not in ("placeholder", "get_attr"):
                self.new_argument = self.graph.placeholder(new_argument)
            self.copies[node] = rule(node)
        return self.finish()

    def finish(self) -> fx.GraphModule:
        """Return the new graph as a module with the old module's children and buffers."""
        self.graph.lint()
        return fx.GraphModule(dict(self.code.named_children()) | dict(self.code.named_buffers()), self.graph)


def use_fused_attention(code: fx.GraphModule) -> fx.GraphModule:
    """Give attention whose operands broadcast operands that PyTorch's fused kernels take (`broadcast_attention`)."""
    if not any(is_broadcast(node) for node in code.graph.nodes):
        return code
    rewriter = GraphRewriter(code)

    def rule(node: fx.Node) -> fx.Node:
        copied = rewriter.copy(node)
        if is_broadcast(node):
            copied.target = broadcast_attention
        return copied

    return rewriter.rewrite(rule)


# Dropout whose masks are hashes of element positions instead of draws from a generator.
#
# Element `i` is kept or dropped by a hash of (seed, salt, i). The seed is a tensor, so that compiled code serves
# every step; the salt tells the dropouts of a block apart. A hash costs a dozen integer instructions and the backward
# computes it again, whereas a GPU's generator (Philox, ten rounds) takes a third of a fused LayerNorm's time on an
# H200 and its masks must be stored for the backward. Devices that share a seed draw the same mask, which tensor
# parallelism needs.

_GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: its multiples, the keys of salts, spread over all bits
_INT32_RANGE = 1 << 31


def has_active_dropout(code: fx.GraphModule) -> bool:
    """Return True if the code contains a dropout with a rate above 0 in training mode."""
    return any(_is_active(node) for node in code.graph.nodes)


def use_hashed_dropout(code: fx.GraphModule) -> fx.GraphModule:
    """Replace the active dropouts of `code` by `hashed_dropout`; their seed becomes the code's last argument."""
    rewriter, salts = GraphRewriter(code), count(1)

    def rule(node: fx.Node) -> fx.Node:
        if not _is_active(node):
            return rewriter.copy(node)
        arguments: Any = node.args
        return rewriter.call(
            hashed_dropout, rewriter.copies[arguments[0]], arguments[1], rewriter.new_argument, next(salts)
        )

    return rewriter.rewrite(rule, new_argument="dropout_seed")


def hashed_dropout(value: torch.Tensor, rate: float, seed: torch.Tensor, salt: int) -> torch.Tensor:
    """Drop elements of `value` (any shape) with probability `rate` and scale the others by 1 / (1 - rate).

    `seed` is an int64 scalar on the value's device, of which 63 bits are random. Tensors of 2^31 elements or more,
    whose positions would overflow int32, use PyTorch's dropout.
    """
    if value.numel() + salt >= _INT32_RANGE:
        return torch.dropout(value, rate, True)
    # Positions start at the salt: a compiler that saw two dropouts share their positions would store a mask.
    positions = torch.arange(salt, salt + value.numel(), dtype=torch.int32, device=value.device).view(value.shape)
    low, high = _int32(_GOLDEN * salt), _int32(_GOLDEN * (salt + _INT32_RANGE))
    # The high bits of these signed integers are uniform. The hash is `triple32` (Wellons,
    # https://github.com/skeeto/hash-prospector), three rounds of shift and multiply, with a key mixed in before each of
    # the first two. Its final shift would not change the high bits. Products wrap around.
    bits = positions ^ (seed.to(torch.int32) ^ low)
    bits = _xor_shift(bits, 17) * _int32(0xED5AD4BB)
    bits = (_xor_shift(bits, 11) ^ ((seed >> 32).to(torch.int32) ^ high)) * _int32(0xAC4C1B51)
    bits = _xor_shift(bits, 15) * _int32(0x31848BAB)
    # The smallest `rate` of the 2^32 signed values drop their element.
    return torch.where(bits >= _int32(round(rate * (1 << 32)) - _INT32_RANGE), value, 0) / (1 - rate)


def _xor_shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    return bits ^ ((bits >> by) & ((1 << (32 - by)) - 1))


def _int32(word: int) -> int:
    """Return the signed integer with the same low 32 bits."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= _INT32_RANGE else word


def _is_active(node: fx.Node) -> bool:
    return node.target is DROPOUT and bool(node.args[1]) and bool(node.args[2])
