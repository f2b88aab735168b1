"""Which weights of a captured model can be divided over devices, found by following a sharded dim through each block.

    division = plan_tensor(graph, degree=2)      # what is sharded on which dim, and what each block then reduces

Megatron-LM's scheme (arXiv:1909.08053), found instead of written by hand. A product with a weight may be a *column*:
its weight is divided over the output features, and so is its result. The divided dim is followed through views,
attention (whole heads), activations and dropout until a product contracts it: the *row*, whose partial results are
summed over the devices. Embeddings and heads are divided over the vocabulary, up to a cross-entropy that knows how to
reduce over it. Where the dim meets an operation that is not known here, or leaves the block, its columns are not
divided: every device then computes them whole. So nothing has to be understood for the result to be right.

Analysis only: no processes, no collectives. `workbench.execution.blocks.tensor_parallel` rewrites the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import fx

from workbench.capture.division import (
    EMBEDDING,
    Division,
    Product,
    Sharding,
    TensorDivision,
    product_of,
    shape_of,
    width_of,
)
from workbench.capture.graph import Block, Graph
from workbench.capture.tensor_rules import DeadEnd, Propagation

__all__ = ["Division", "Product", "Sharding", "TensorDivision", "plan_tensor", "product_of"]


def plan_tensor(graph: Graph, degree: int) -> TensorDivision:
    """The largest consistent division: a parameter that two blocks would treat differently stays whole."""
    if degree == 1:
        return TensorDivision(1, {}, {}, tuple(Division() for _ in graph.blocks))
    barred: dict[str, set[int]] = {}
    while True:
        kinds: dict[str, Division] = {}
        for block in graph.blocks:
            if block.block_type not in kinds:
                kinds[block.block_type] = _divided(block, degree, barred.get(block.block_type, set()))
        inconsistent = _inconsistent(graph, kinds)
        if not inconsistent:
            break
        for kind, position in inconsistent:
            barred.setdefault(kind, set()).add(position)
    blocks = tuple(kinds[block.block_type] for block in graph.blocks)
    parameters = {
        block.parameters[position]: sharding
        for block, division in zip(graph.blocks, blocks, strict=True)
        for position, sharding in division.parameters.items()
    }
    return TensorDivision(degree, {kind: found for kind, found in kinds.items() if found.divided}, parameters, blocks)


def _inconsistent(graph: Graph, kinds: Mapping[str, Division]) -> set[tuple[str, int]]:
    """(kind, position) of parameters that are divided there and otherwise elsewhere."""
    uses: dict[str, set[Sharding | None]] = {}
    for block in graph.blocks:
        for position, name in enumerate(block.parameters):
            uses.setdefault(name, set()).add(kinds[block.block_type].parameters.get(position))
    return {
        (block.block_type, position)
        for block in graph.blocks
        for position in kinds[block.block_type].parameters
        if len(uses[block.parameters[position]]) > 1
    }


def _divided(block: Block, degree: int, barred: set[int]) -> Division:
    """Try all columns; while one leads nowhere, give it up and try again."""
    placeholders = [node for node in block.code.graph.nodes if node.op == "placeholder"]
    parameters = {node: i for i, node in enumerate(placeholders[: len(block.parameters)]) if i not in barred}
    columns: dict[fx.Node, tuple[int, ...] | None] = dict.fromkeys(_candidates(block, parameters))
    while True:
        try:
            return Propagation(block, degree, parameters, columns).run()
        except DeadEnd as end:
            for column in end.columns:
                if end.segments is not None and columns[column] is None and width_of(column) == sum(end.segments):
                    columns[column] = end.segments
                else:
                    del columns[column]


def _candidates(block: Block, parameters: Mapping[fx.Node, int]) -> Iterator[fx.Node]:
    tables = [n.args[0] for n in block.code.graph.nodes if n.target is EMBEDDING and n.args[0] in parameters]
    held = sum(math.prod(shape_of(table)) for table in set(tables))
    for node in block.code.graph.nodes:
        product = product_of(node)
        if product is not None:
            if product.weight in parameters and (product.bias is None or product.bias in parameters):
                yield node
        elif node.target is EMBEDDING and node.args[0] in parameters:
            counts_uses = len(node.args) > 3 and bool(node.args[3])
            if 2 * math.prod(shape_of(node.args[0])) > held and not counts_uses:
                yield node
