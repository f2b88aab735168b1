"""Finds the weights of a captured model that tensor parallelism can shard, by following sharded dims through blocks.

    sharding = plan_tensor_parallel(graph, degree=2)   # the sharded dim of each weight, and each block's all-reduces

This is Megatron-LM's scheme (arXiv:1909.08053), found instead of written by hand. A product with a weight may be a
*column*: its weight is sharded over the output features, and so is its result. The sharded dim is followed through
views, attention (whole heads), activations and dropout until a product contracts it: the *row*, whose partial results
are summed over the devices. Embeddings and heads are sharded over the vocabulary, up to a cross-entropy, which can be
reduced over it. Where the dim meets an operation without a rule, or leaves the block, its columns are not sharded, and
every device computes them whole. So an operation that is not understood costs speed, never correctness.

Analysis only, without processes or collectives: `workbench.execution.blocks.tensor_parallel` rewrites the blocks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import fx

from workbench.capture.graph import Block, Graph
from workbench.capture.operations import EMBEDDING, shape_of
from workbench.capture.sharding_propagation import DeadEnd, Propagation
from workbench.capture.tensor_sharding import BlockSharding, ModelSharding, Sharding, product_of


def plan_tensor_parallel(graph: Graph, degree: int) -> ModelSharding:
    """Return the largest consistent sharding: a parameter that two blocks would shard differently stays whole."""
    if degree == 1:
        return ModelSharding({}, tuple(BlockSharding() for _ in graph.blocks))
    firsts: dict[str, Block] = {}
    for block in graph.blocks:
        firsts.setdefault(block.block_type, block)
    excluded: dict[str, set[int]] = {block_type: set() for block_type in firsts}
    while True:
        by_type = {key: _shard_block(block, degree, excluded[key]) for key, block in firsts.items()}
        uses: defaultdict[str, set[Sharding | None]] = defaultdict(set)
        for block in graph.blocks:
            for position, name in enumerate(block.parameters):
                uses[name].add(by_type[block.block_type].parameters.get(position))
        inconsistent = {  # parameters that are sharded in a block and treated otherwise elsewhere
            (block.block_type, position)
            for block in graph.blocks
            for position in by_type[block.block_type].parameters
            if len(uses[block.parameters[position]]) > 1
        }
        if not inconsistent:
            break
        for block_type, position in inconsistent:
            excluded[block_type].add(position)
    blocks = tuple(by_type[block.block_type] for block in graph.blocks)
    parameters = {
        block.parameters[position]: sharding
        for block, shardings in zip(graph.blocks, blocks, strict=True)
        for position, sharding in shardings.parameters.items()
    }
    return ModelSharding(parameters, blocks)


def _shard_block(block: Block, degree: int, excluded: set[int]) -> BlockSharding:
    """Try to shard all columns; as long as one leads to a dead end, give it up and try again."""
    placeholders = [node for node in block.code.graph.nodes if node.op == "placeholder"]
    parameters = {node: i for i, node in enumerate(placeholders[: len(block.parameters)]) if i not in excluded}
    columns: dict[fx.Node, tuple[int, ...] | None] = dict.fromkeys(_candidates(block, parameters))
    while True:
        try:
            return Propagation(block, degree, parameters, columns).run()
        except DeadEnd as end:
            for column in end.columns:
                width = shape_of(column)[-1]
                if end.segments is not None and columns[column] is None and width == sum(end.segments):
                    columns[column] = end.segments
                else:
                    del columns[column]


def _candidates(block: Block, parameters: Mapping[fx.Node, int]) -> Iterator[fx.Node]:
    """Yield the products with a weight, and the lookup in an embedding that is most of the block's embeddings."""
    tables = [n.args[0] for n in block.code.graph.nodes if n.target is EMBEDDING and n.args[0] in parameters]
    table_elements = sum(math.prod(shape_of(table)) for table in set(tables))
    for node in block.code.graph.nodes:
        product = product_of(node)
        if product is not None:
            if product.weight in parameters and (product.bias is None or product.bias in parameters):
                yield node
        elif node.target is EMBEDDING and node.args[0] in parameters:
            scales_by_frequency = len(node.args) > 3 and bool(node.args[3])
            if 2 * math.prod(shape_of(node.args[0])) > table_elements and not scales_by_frequency:
                yield node
