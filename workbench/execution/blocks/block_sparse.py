"""Rewrite captured blocks so that they multiply by sparse weights without the absent blocks of these.

A block-sparse parameter is compact: [stored blocks, block, block]. An index says where its blocks belong; it is a
further buffer of each captured block that multiplies by the weight. The index changes in place when the pattern moves,
so that compiled code and CUDA graphs stay valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import fx

from workbench.capture import Block, Graph
from workbench.cost.block_sparse import products_with
from workbench.execution.blocks.graph_rewriter import GraphRewriter
from workbench.sparsity import Static
from workbench.sparsity.kernels.index import BlockIndex
from workbench.sparsity.kernels.operators import block_sparse_linear
from workbench.sparsity.pattern import initial

INDEX = "_index."
"""First letters of the names of index buffers; the weight's name follows."""


def initial_pattern(sparsity: Static, seed: int, name: str, shape: tuple[int, int]) -> torch.Tensor:
    """Return the pattern with which a weight begins, on the CPU."""
    return initial(shape, sparsity.block, sparsity.kept(prod(shape) // sparsity.block**2), f"{seed}/{name}")


@dataclass(frozen=True)
class BlockSparseParameters:
    """The parameters of one rank that are stored without their absent blocks, and where their blocks belong."""

    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Shapes of all sparse weights of the model, whichever rank holds them."""
    indices: Mapping[str, BlockIndex] = field(default_factory=dict)
    """Index of each weight of this rank, by name; a pattern moves by overwriting its `data`."""

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Indices by the names of the buffers that the rewritten blocks read."""
        return {INDEX + name: index.data for name, index in self.indices.items()}

    def rewritten(self, graph: Graph) -> Graph:
        """Return a graph of the model, for training or evaluation, whose blocks multiply by the stored blocks."""
        codes: dict[tuple[str, tuple[int, ...]], fx.GraphModule] = {}
        blocks = []
        for block in graph.blocks:
            positions = tuple(at for at, name in enumerate(block.parameters) if name in self.shapes)
            if not positions:
                blocks.append(block)
                continue
            key = (block.block_type, positions)
            if key not in codes:
                codes[key] = self._rewritten_code(block, positions)
            buffers = (*block.buffers, *(INDEX + block.parameters[at] for at in positions))
            block_type = f"{block.block_type}, block-sparse {positions}"
            blocks.append(replace(block, block_type=block_type, buffers=buffers, code=codes[key]))
        return replace(graph, blocks=tuple(blocks))

    def _rewritten_code(self, block: Block, positions: tuple[int, ...]) -> fx.GraphModule:
        """Return the block's code with an index for each weight at `positions` after its buffers."""
        rewriter = GraphRewriter(block.code)
        copies = rewriter.copies
        products = {node: (product, name) for node, product, name in products_with(block, self.shapes)}
        indices: dict[str, fx.Node] = {}
        arguments = [node for node in block.code.graph.nodes if node.op == "placeholder"]
        last_buffer = arguments[len(block.parameters) + len(block.buffers) - 1]

        def rule(node: fx.Node) -> fx.Node:
            if node not in products:
                return rewriter.copy(node)
            product, name = products[node]
            value, weight = copies[product.value], copies[product.weight]
            bias = None if product.bias is None else copies[product.bias]
            rows, cols = self.shapes[name]
            return rewriter.call(
                multiply_by_stored_blocks, value, weight, indices[name], bias, rows, cols, product.transposed
            )

        for node in block.code.graph.nodes:
            copies[node] = rule(node)
            copies[node].meta = dict(node.meta)
            if node is last_buffer:
                for number, position in enumerate(positions):
                    indices[block.parameters[position]] = rewriter.graph.placeholder(f"index_{number}")
        return rewriter.finish()


DENSE = BlockSparseParameters()
"""No parameters: all are stored whole."""


def multiply_by_stored_blocks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    index: torch.Tensor,
    bias: torch.Tensor | None,
    rows: int,
    cols: int,
    transposed: bool,
) -> torch.Tensor:
    """Multiply by a compact weight [rows, cols], as the linear layer or, transposed, the `addmm` that it replaces."""
    layout = BlockIndex(rows, cols, weight.shape[1], weight.shape[0], index)
    return block_sparse_linear(hidden, weight, layout, bias, transposed)
