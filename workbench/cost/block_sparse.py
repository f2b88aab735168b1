"""The costs of sparse weights: of all blocks where they are masked, of stored blocks where they are block-sparse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from workbench.capture.graph import Block, Graph
from workbench.capture.sparse_matrices import absent_flops, products_with, sparse_matrices
from workbench.cost.block_trace import BlockTrace
from workbench.cost.block_type_cost import block_type_cost
from workbench.cost.profile import SparseCosts
from workbench.sparsity import Static
from workbench.sparsity.kernels.index import BLOCKS, index_length
from workbench.sparsity.kernels.speed import Products, break_even_sparsity, relative_rates

INDEX_BYTES = 4
"""Bytes of one element of an index."""


@dataclass(frozen=True)
class SparseMatrices:
    """The sparse weights of a captured model."""

    graph: Graph
    sparsity: Static
    shapes: Mapping[str, tuple[int, int]]
    obstacle: str
    """Clause that says why the weights can only be masked; empty if they can be block-sparse."""

    @staticmethod
    def of(graph: Graph, sparsity: Static, obstacle: str) -> SparseMatrices:
        return SparseMatrices(graph, sparsity, sparse_matrices(graph, sparsity), obstacle)

    def positions(self, block: Block) -> tuple[int, ...]:
        """Return the positions of a block's sparse weights among its parameters: they tell block types apart."""
        return tuple(index for index, name in enumerate(block.parameters) if name in self.shapes)

    def costs(self, traces: Sequence[BlockTrace]) -> SparseCosts:
        """Return the costs; `traces` are those of the block types."""
        block = self.sparsity.block
        blocks = {name: prod(shape) // block**2 for name, shape in self.shapes.items()}
        absent = absent_flops(self.graph, self.sparsity)
        costs = SparseCosts(
            self.sparsity.sparsity,
            block,
            blocks,
            absent,
            break_even_sparsity=break_even_sparsity(block) if block in BLOCKS else None,
            obstacle=self.obstacle,
        )
        if self.obstacle:
            return costs
        kept = {name: self.sparsity.kept(count) for name, count in blocks.items()}
        stored = {name: kept[name] / count for name, count in blocks.items()}
        types, rates = [], relative_rates(block)
        for trace in traces:
            products = products_with(trace.block, self.shapes)
            times = {node.name: Products(*(stored[name] / rate for rate in rates)) for node, _, name in products}
            trace.leave_out(stored, times)
            types.append(block_type_cost(trace))
        elements = {name: spec.numel for name, spec in self.graph.parameters.items()}
        return replace(
            costs,
            block_types=tuple(types),
            parameters=elements | {name: count * block**2 for name, count in kept.items()},
            index_bytes={
                name: float(INDEX_BYTES * index_length(*shape, block, kept[name]))
                for name, shape in self.shapes.items()
            },
        )
