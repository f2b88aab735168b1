"""Dropout whose masks are computed from places, not drawn from a generator: what compiled blocks run.

Element `i` is kept by a hash of (seed, salt, i). A GPU's generator, Philox with ten rounds, took a third of a fused
LayerNorm's time on H200, and its masks are kept for the backward; a hash costs a dozen integer instructions, and the
backward computes it again. The seed is a tensor, so that compiled code serves every step; the salt tells the
dropouts of a block apart. A device that has the same seed draws the same mask, which tensor parallelism needs.
"""

from __future__ import annotations

import torch
from torch import fx

from workbench.capture.division import DROPOUT

_GOLDEN = 0x9E3779B9
_LARGEST = 1 << 31


def draws_dropout(code: fx.GraphModule) -> bool:
    return any(_is_active(node) for node in code.graph.nodes)


def counted(code: fx.GraphModule) -> fx.GraphModule:
    """`code` with `counted_dropout` for its dropouts; their seed is its last argument."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    seed: fx.Node | None = None
    salt = 0
    for node in code.graph.nodes:
        if seed is None and node.op not in ("placeholder", "get_attr"):
            seed = graph.placeholder("dropout_seed")
        if _is_active(node):
            salt += 1
            copies[node] = graph.call_function(counted_dropout, (copies[node.args[0]], node.args[1], seed, salt))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.lint()
    return fx.GraphModule(dict(code.named_children()) | dict(code.named_buffers()), graph)


def counted_dropout(value: torch.Tensor, rate: float, seed: torch.Tensor, salt: int) -> torch.Tensor:
    """Dropout of any shape; `seed` is an int64 scalar on the value's device, of which 63 bits are random."""
    if value.numel() + salt >= _LARGEST:  # what a place is counted in would overflow
        return torch.dropout(value, rate, True)
    # Each from a start of its own: a compiler that saw two dropouts share their places would keep a mask.
    places = torch.arange(salt, salt + value.numel(), dtype=torch.int32, device=value.device).view(value.shape)
    low, high = _int32(_GOLDEN * salt), _int32(_GOLDEN * (salt + _LARGEST))
    bits = _hash(places, seed.to(torch.int32) ^ low, (seed >> 32).to(torch.int32) ^ high)
    return torch.where(bits >= _int32(round(rate * (1 << 32)) - _LARGEST), value, 0) / (1 - rate)


def _hash(places: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Words of 32 bits, as signed integers, whose high bits are uniform.

    `triple32` (Wellons, https://github.com/skeeto/hash-prospector): three rounds of shift and multiply; the keys go
    in before the first and before the second one. The shift that ends it leaves the high bits as they are and is not
    done. Products wrap.
    """
    bits = places ^ first
    bits = _shifted(bits, 17) * _int32(0xED5AD4BB)
    bits = (_shifted(bits, 11) ^ second) * _int32(0xAC4C1B51)
    return _shifted(bits, 15) * _int32(0x31848BAB)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    return bits ^ ((bits >> by) & ((1 << (32 - by)) - 1))


def _int32(word: int) -> int:
    """The signed integer of the same low 32 bits."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= _LARGEST else word


def _is_active(node: fx.Node) -> bool:
    return node.target is DROPOUT and bool(node.args[1]) and bool(node.args[2])
