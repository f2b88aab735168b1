"""The predicted rate of block-sparse products, and the sparsity from which they are faster than dense ones."""

from __future__ import annotations

TILE_TOKENS = 128
"""Tokens of a tile of the kernels; columns of a tile of the weight gradient."""
CACHE_BYTES_PER_S = 5.5e12
"""Bandwidth between the L2 cache and the multiprocessors of a Hopper GPU, in bytes/s.

An assumption from microbenchmarks of H100 that others published; it was not measured with these kernels."""


def sparse_flops_per_s(block: int, dense_flops_per_s: float, cache_bytes_per_s: float = CACHE_BYTES_PER_S) -> float:
    """Return the predicted rate of products with stored blocks, in FLOP/s; their absent blocks count nothing.

    A step multiplies a bf16 tile [t tokens, b] by a block [b, b]: 2·t·b² FLOPs for 2·(t·b + b²) bytes from the cache.
    That limits small blocks; the rate of dense products limits all. The weight gradient has the same ratio.
    """
    flops_per_byte = TILE_TOKENS * block / (TILE_TOKENS + block)
    return min(dense_flops_per_s, flops_per_byte * cache_bytes_per_s)


def break_even_sparsity(block: int, dense_flops_per_s: float, cache_bytes_per_s: float = CACHE_BYTES_PER_S) -> float:
    """Return the sparsity from which block-sparse products are predicted to be faster than dense ones."""
    return 1 - sparse_flops_per_s(block, dense_flops_per_s, cache_bytes_per_s) / dense_flops_per_s
