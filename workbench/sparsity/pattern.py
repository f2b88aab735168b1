"""Patterns of blocks as pure functions of their arguments, so that every rank computes the same pattern by itself.

A pattern is a uint8 tensor with one entry for each block of a weight: the sum of `PRESENT`, if the block is present,
and of `EXPLORED`, if it is or ever was present. Suffixes of tensor names: R and C rows and columns of blocks, N weights
of one shape, which a GPU moves together: each weight by itself would keep it waiting for the host.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

PRESENT, EXPLORED = 1, 2
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Move:
    """The outcome of one update of the patterns of weights of one shape."""

    patterns: torch.Tensor
    stayed: torch.Tensor
    """True for each block that is present before and after the update."""
    moved: int
    """Number of blocks of each weight that were pruned, and of those that regrew."""


def initial(
    shape: tuple[int, int], block: int, kept: int, key: str, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return a pattern with `kept` random blocks of a weight of `shape`, chosen by a hash of `key`."""
    [scores_RC] = uniform([key], (shape[0] // block, shape[1] // block), device)
    present_RC = largest(scores_RC, torch.ones_like(scores_RC, dtype=torch.bool), kept)
    return present_RC.to(torch.uint8) * (PRESENT | EXPLORED)


def moved(patterns_NRC: torch.Tensor, sizes_NRC: torch.Tensor, growth_NRC: torch.Tensor, count: int) -> Move:
    """Prune the `count` smallest present blocks, and let as many absent ones of the largest `growth_NRC` regrow.

    Each weight does so by itself; all have equally many present blocks. Blocks that are pruned do not regrow in the
    same update. Where fewer than `count` blocks are absent, fewer move.
    """
    present_NRC = is_present(patterns_NRC)
    count = min(count, int((~present_NRC[0]).sum()))
    pruned_NRC = largest(-sizes_NRC, present_NRC, count)
    grown_NRC = largest(growth_NRC, ~present_NRC, count)
    stayed_NRC = present_NRC & ~pruned_NRC
    now_NRC, ever_NRC = stayed_NRC | grown_NRC, is_explored(patterns_NRC) | grown_NRC
    return Move(now_NRC.to(torch.uint8) * PRESENT + ever_NRC.to(torch.uint8) * EXPLORED, stayed_NRC, count)


def is_present(pattern_RC: torch.Tensor) -> torch.Tensor:
    return (pattern_RC & PRESENT).bool()


def is_explored(pattern_RC: torch.Tensor) -> torch.Tensor:
    return (pattern_RC & EXPLORED).bool()


def expanded(blocks_RC: torch.Tensor, block: int) -> torch.Tensor:
    """Return the value of its block for each element of the weight."""
    return blocks_RC.repeat_interleave(block, 0).repeat_interleave(block, 1)


def block_sums(matrix: torch.Tensor, block: int) -> torch.Tensor:
    """Return the sum of the absolute values of each block of a matrix."""
    rows, columns = matrix.shape[0] // block, matrix.shape[1] // block
    return matrix.abs().float().view(rows, block, columns, block).sum((1, 3))


def largest(scores: torch.Tensor, eligible: torch.Tensor, count: int) -> torch.Tensor:
    """Return True for the `count` eligible blocks of the largest scores in each matrix [..., R, C].

    Of equal scores, the first counts as larger.
    """
    flat = torch.where(eligible, scores.double(), -torch.inf).flatten(-2)
    # Without `stable`, equal scores could come in another order on a GPU than on a CPU, and ranks would part.
    order = torch.sort(flat, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(flat, dtype=torch.bool).scatter_(-1, order, True).view(scores.shape)


def uniform(keys: Sequence[str], shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Return numbers from 0 to below 1, one a block, as [keys, *shape], equal on every device.

    Each is a hash of a key and the block's position: SplitMix64 (Steele et al., "Fast splittable pseudorandom number
    generators", 2014).
    """
    # torch's own generators draw other numbers on a GPU than on a CPU from the same seed. The hash is computed on the
    # device, in whole numbers that wrap around alike everywhere: an update of BERT-Base hashes 85 million positions.
    hashes = (hashlib.blake2b(key.encode(), digest_size=8).digest() for key in keys)
    seeds = torch.tensor([_signed(int.from_bytes(each, "little")) for each in hashes], device=device)
    bits = torch.arange(1, math.prod(shape) + 1, device=device).mul_(_signed(_GOLDEN)) + seeds[:, None]
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(_signed(factor))
    # The highest 53 bits, which a double holds exactly.
    return _shifted(bits, 11).double().mul_(2.0**-53).view(len(keys), *shape)


def _signed(bits: int) -> int:
    """Return the int64 of the same 64 bits: torch computes with no other 64-bit numbers."""
    return bits - (bits >> 63 << 64)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Return int64 bits shifted to the right with zeros from the left, where torch repeats the sign."""
    return (bits >> by).bitwise_and_((1 << 64 - by) - 1)
