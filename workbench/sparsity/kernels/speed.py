"""The predicted rate of block-sparse products, and the sparsity from which they are faster than dense ones.

The rates were fitted to one profile of one layer on one H200 (benchmarks/results/sparse_profile_1xH200.json). They are
relative to the rate of dense products, so that they price other GPUs and other shapes by the same proportion.
"""

from __future__ import annotations

from typing import NamedTuple


class Products(NamedTuple):
    """One number for each of the three products of a linear layer."""

    forward: float
    to_input: float
    """Gradient to the input."""
    to_weight: float
    """Gradient to the weight."""


TOKENS, ROWS, COLS, SPARSITY = 16_384, 7680, 1920, 0.9
"""The product that was profiled: so many tokens times a weight [rows, cols] with this share of absent blocks."""
DENSE_MS = 0.69
"""Milliseconds of each of its three products with the dense weight (cuBLAS, bf16, one H200)."""
BLOCK_MS = {
    64: Products(0.191, 0.160, 0.153),
    32: Products(0.306, 0.263, 0.285),
    16: Products(0.745, 0.644, 1.38),
}
"""Milliseconds of the three products by block, on the same H200; the middle where the profile gave a range."""
DENSE_FLOPS_PER_S = 2 * TOKENS * ROWS * COLS / (DENSE_MS / 1e3)
"""Rate of the dense product that was profiled, in FLOP/s."""


def relative_rates(block: int) -> Products:
    """Return the rate of products with stored blocks over that of dense ones; absent blocks count no FLOPs."""
    return Products(*((1 - SPARSITY) * DENSE_MS / ms for ms in BLOCK_MS[block]))


def sparse_flops_per_s(block: int, dense_flops_per_s: float = DENSE_FLOPS_PER_S) -> float:
    """Return the predicted rate of the three products together, in FLOP/s; absent blocks count no FLOPs."""
    return dense_flops_per_s * 3 / sum(1 / rate for rate in relative_rates(block))


def break_even_sparsity(block: int, dense_flops_per_s: float = DENSE_FLOPS_PER_S) -> float:
    """Return the sparsity from which the three products together are predicted to be faster than dense ones."""
    return 1 - sparse_flops_per_s(block, dense_flops_per_s) / dense_flops_per_s
