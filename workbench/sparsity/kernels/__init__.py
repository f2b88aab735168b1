"""Products with block-sparse weights that are stored, multiplied and optimised without their zero blocks."""

from workbench.sparsity.kernels.index import BlockIndex, move, to_compact, to_dense
from workbench.sparsity.kernels.operators import BlockSparseLinear, block_sparse_linear, replace_linears

__all__ = [
    "BlockIndex",
    "BlockSparseLinear",
    "block_sparse_linear",
    "move",
    "replace_linears",
    "to_compact",
    "to_dense",
]
