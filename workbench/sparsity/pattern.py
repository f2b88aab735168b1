"""Patterns of blocks as pure functions of their arguments, so that every rank computes the same pattern by itself.

A pattern is a uint8 tensor with one entry for each block of a weight: the sum of `PRESENT`, if the block is present,
and of `EXPLORED`, if it is or ever was present. Suffixes of tensor names: R and C rows and columns of blocks.
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
    """The outcome of one update of a pattern."""

    pattern: torch.Tensor
    stayed: torch.Tensor
    """True for each block that is present before and after the update."""
    moved: int
    """Number of blocks that were pruned, and of those that regrew."""


def initial(
    shape: tuple[int, int], block: int, kept: int, key: str, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return a pattern with `kept` random blocks of a weight of `shape`, chosen by a hash of `key`."""
    scores_RC = uniform(key, (shape[0] // block, shape[1] // block), device)
    present_RC = largest(scores_RC, torch.ones_like(scores_RC, dtype=torch.bool), kept)
    return present_RC.to(torch.uint8) * (PRESENT | EXPLORED)


def moved(pattern_RC: torch.Tensor, sizes_RC: torch.Tensor, growth_RC: torch.Tensor, count: int) -> Move:
    """Prune the `count` smallest present blocks, and let as many absent ones of the largest `growth_RC` regrow.

    Blocks that are pruned do not regrow in the same update. Where fewer than `count` blocks are absent, fewer move.
    """
    present_RC = is_present(pattern_RC)
    count = min(count, int((~present_RC).sum()))
    pruned_RC = largest(-sizes_RC, present_RC, count)
    grown_RC = largest(growth_RC, ~present_RC, count)
    stayed_RC = present_RC & ~pruned_RC
    now_RC, ever_RC = stayed_RC | grown_RC, is_explored(pattern_RC) | grown_RC
    return Move(now_RC.to(torch.uint8) * PRESENT + ever_RC.to(torch.uint8) * EXPLORED, stayed_RC, count)


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


def largest(scores_RC: torch.Tensor, eligible_RC: torch.Tensor, count: int) -> torch.Tensor:
    """Return True for the `count` eligible blocks of the largest scores; of equal ones, the first counts as larger."""
    scores = torch.where(eligible_RC, scores_RC.double(), -torch.inf).flatten()
    # Without `stable`, equal scores could come in another order on a GPU than on a CPU, and ranks would part.
    order = torch.sort(scores, descending=True, stable=True).indices[:count]
    chosen = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    chosen[order] = True
    return chosen.view(scores_RC.shape)


def uniform(key: str, shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Return numbers from 0 to below 1, one a block: a hash of `key` and the block's position, equal on every device.

    The hash is SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014).
    """
    # torch's own generators draw other numbers on a GPU than on a CPU from the same seed. The hash is computed on the
    # device, in whole numbers that wrap around alike everywhere: an update of BERT-Base hashes 85 million positions.
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    bits = torch.arange(1, math.prod(shape) + 1, device=device).mul_(_signed(_GOLDEN)).add_(_signed(seed))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(_signed(factor))
    return _shifted(bits, 11).double().mul_(2.0**-53).view(*shape)


def _signed(bits: int) -> int:
    """Return the int64 of the same 64 bits: torch computes with no other 64-bit numbers."""
    return bits - (bits >> 63 << 64)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Return int64 bits shifted to the right with zeros from the left, where torch repeats the sign."""
    return (bits >> by).bitwise_and_((1 << 64 - by) - 1)
