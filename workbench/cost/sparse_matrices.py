"""Sparse weights: which of a captured model become sparse, whether their blocks can be stored alone, and the costs.

Masked weights cost what dense ones do. Block-sparse ones have their present blocks stored and multiplied only; training
with them is in `workbench.execution.blocks.sparse_weights`, their kernels are in `workbench.sparsity.kernels`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from torch import fx

from workbench.base.errors import InvalidExperiment, PlanMismatch
from workbench.capture.blocks.hidden_matrices import hidden_matrices
from workbench.capture.blocks.tensor_parallel import Product, product_of
from workbench.capture.captured_model import CapturedModel
from workbench.capture.graph import Block, Graph
from workbench.capture.operations import shape_of
from workbench.cost.block_type_cost import BlockTrace, Products, block_type_cost
from workbench.cost.profile import RelativeTime, SparseCosts
from workbench.experiment import Experiment
from workbench.sparsity import Dynamic, Static
from workbench.sparsity.kernels.index import BLOCKS, index_length
from workbench.strategy import Strategy

# The weights of a captured model that a sparse training divides into blocks, and the FLOPs of their products.


def sparse_matrices(graph: Graph, sparsity: Static) -> dict[str, tuple[int, int]]:
    """Return the shapes of the weights that become sparse, by name in the model's order.

    Raises `InvalidExperiment` if there are none, or if the blocks do not suit one of them.
    """
    hidden = hidden_matrices(graph)
    names = [name for name in graph.parameters if name in hidden]
    chosen = {name: graph.parameters[name].shape for name in names if sparsity.covers(name)}
    if not chosen:
        words = dict.fromkeys(word for name in names for word in name.split(".")[:-1] if not word.isdigit())
        raise InvalidExperiment(
            f"scope={sparsity.scope!r} matches none of the {len(names)} matrices of {graph.model} that can be sparse. "
            f"Choose a word of their names ({', '.join(words)}), or '*' for all of them."
        )
    shapes = {name: (shape[0], shape[1]) for name, shape in chosen.items()}
    block = sparsity.block
    for name, (height, width) in shapes.items():
        if height % block or width % block:
            divisor = math.gcd(*(size for shape in shapes.values() for size in shape))
            raise InvalidExperiment(
                f"block={block} does not divide the {height} × {width} weight {name} into whole blocks. Choose a "
                f"divisor of {divisor}, which divides all weights in the scope."
            )
        rows, columns = height // block, width // block
        kept = sparsity.kept(rows * columns)
        if kept < rows:
            raise InvalidExperiment(
                f"sparsity={sparsity.sparsity:g} leaves {kept:,} blocks of {block} × {block} in the {height} × {width} "
                f"weight {name}, fewer than one for each of its {rows:,} rows of blocks. Choose a sparsity of at most "
                f"{1 - 1 / columns:.4g}, or smaller blocks."
            )
    return shapes


def product_flops(graph: Graph, names: Collection[str]) -> dict[str, float]:
    """Return the forward FLOPs of one micro-batch in the products with each weight: 2 for each row and element."""
    flops = dict.fromkeys(names, 0.0)
    for block in graph.blocks:
        for node, _, name in products_with(block, names):
            flops[name] += 2.0 * math.prod(shape_of(node)[:-1]) * graph.parameters[name].numel
    return flops


def products_with(block: Block, names: Collection[str]) -> Iterator[tuple[fx.Node, Product, str]]:
    """Yield each product of a block with one of the weights: its node, its operands, and the weight's name."""
    weights = block.parameter_nodes
    for node in block.code.graph.nodes:
        product = product_of(node)
        name = None if product is None else weights.get(product.weight)
        if product is not None and name is not None and name in names:
            yield node, product, name


def block_sparse_obstacle(experiment: Experiment, graph: Graph) -> str:
    """Return why the weights of an experiment cannot be stored and multiplied without their absent blocks.

    The reason is a clause without a full stop, and empty if they can be.
    """
    sparsity = experiment.sparsity
    if sparsity is None:
        return "the experiment has dense weights"
    if sparsity.block not in BLOCKS:
        return f"there are kernels for blocks of {', '.join(map(str, BLOCKS))}, and none for blocks of {sparsity.block}"
    if isinstance(sparsity, Dynamic) and sparsity.regrow == "gradient":
        return "regrow='gradient' needs the gradients of absent blocks"
    if not experiment.optimizer.record.updates_stored_blocks:
        return f"the update of {experiment.optimizer.name} may need the whole of a weight"
    names = sparse_matrices(graph, sparsity)
    readers = Counter(name for block in graph.blocks for name in block.parameters if name in names)
    for block in graph.blocks:
        multiplied = {name for _, _, name in products_with(block, names)}
        for node, name in block.parameter_nodes.items():
            if name in names and (readers[name] > 1 or len(node.users) > 1 or name not in multiplied):
                return f"the model reads {name} otherwise than in one matrix product"
    return ""


def check_sparsity(experiment: Experiment, strategy: Strategy, captured: CapturedModel) -> None:
    """Raise `InvalidExperiment` unless the blocks of a sparse experiment suit the weights of its model.

    Raises `PlanMismatch` for a strategy with block-sparse weights if the experiment's cannot be that.
    """
    if experiment.sparsity is not None:
        sparse_matrices(captured.graph, experiment.sparsity)
    obstacle = block_sparse_obstacle(experiment, captured.graph) if strategy.block_sparse else ""
    if strategy.block_sparse and not strategy.can_be_block_sparse:
        obstacle = obstacle or "its devices hold parts of weights (ZeRO or tensor parallelism)"
    if obstacle:
        raise PlanMismatch(
            f"The plan has block-sparse weights, and that is not possible: {obstacle}. Plan again: wb.plan(experiment)."
        )


def absent_flops(graph: Graph, sparsity: Static | None) -> float:
    """Return the FLOPs, forward and backward, that a sample saves because blocks of the weights are absent.

    The backward of a product has two products of its size: one for the gradient of each factor. That of a weight has
    as many FLOPs as the other, since gradients of absent blocks are not needed (arXiv:2108.06277).
    """
    if sparsity is None:
        return 0.0
    shapes = sparse_matrices(graph, sparsity)
    total = 0.0
    for name, flops in product_flops(graph, shapes).items():
        blocks = math.prod(shapes[name]) // sparsity.block**2
        total += 3 * flops * (1 - sparsity.kept(blocks) / blocks)
    return total / graph.micro_batch


INDEX_BYTES = 4
"""Bytes of one element of an index."""


# Times of block-sparse products, fitted to 126 forwards and backwards of layers on one H100 and one H200
# (`python benchmarks/sparse_kernels.py --fit FILE FILE` fits them to benchmarks/results/sparse_kernels_1x*.json).
# Arithmetic is relative to the dense product of the same layer, and traffic is by the bandwidth of the device.


class StoredProduct(NamedTuple):
    """The parts of a product's time. Unlike those of a dense product, they do not overlap: they add up."""

    arithmetic: float
    """Time of the arithmetic over that of the dense product, if all blocks were stored."""
    read: float
    """Times that a token's values are read, at the bandwidth that kernels reach and beside arithmetic at its peak."""
    write: float
    """Times that a token's values are written."""


STORED_PRODUCTS = {
    64: (StoredProduct(1.72, 0.205, 0.697), StoredProduct(1.66, 0.692, 0)),
    32: (StoredProduct(3.00, 0.260, 0.903), StoredProduct(3.25, 0.794, 0)),
    16: (StoredProduct(9.45, 0.214, 1.09), StoredProduct(10.4, 0.771, 0)),
}
"""The forward, as which the gradient to the input is computed too, and the gradient to the weight, by block. The latter
reads inputs and outputs of the layer, and writes few numbers."""


def relative_times(block: int, outputs: int, inputs: int, stored: float) -> Products:
    """Return the times of a layer's three products over those of dense ones; `stored` is the share of its blocks.

    What is read and written does not shrink with the stored blocks. A narrow layer has little arithmetic beside it, so
    that stored blocks pay less there, or not at all; so do they on a device of little bandwidth for its arithmetic. A
    value of 2 bytes is multiplied with 2 FLOPs for each column of the weight.
    """
    product, gradient = STORED_PRODUCTS[block]
    return Products(
        RelativeTime(product.arithmetic * stored, product.read / outputs + product.write / inputs),
        RelativeTime(product.arithmetic * stored, product.read / inputs + product.write / outputs),
        RelativeTime(gradient.arithmetic * stored, gradient.read * (1 / outputs + 1 / inputs)),
    )


def none_and_all_stored(block: int, shapes: Iterable[tuple[int, int]]) -> tuple[RelativeTime, RelativeTime]:
    """Return the times of all products with weights of these shapes over dense ones: no blocks stored, all stored."""
    elements = Counter[tuple[int, int]]()
    for shape in shapes:
        elements[shape] += prod(shape)
    found = []
    for stored in (0.0, 1.0):
        parts = [(size, times) for shape, size in elements.items() for times in relative_times(block, *shape, stored)]
        whole = sum(size for size, _ in parts)
        found.append(RelativeTime(*(sum(size * times[part] for size, times in parts) / whole for part in (0, 1))))
    return found[0], found[1]


@dataclass(frozen=True)
class SparseMatrices:
    """The sparse weights of a captured model."""

    graph: Graph
    sparsity: Static
    shapes: Mapping[str, tuple[int, int]]
    obstacle: str
    """Clause that says why the weights can only be masked; empty if they can be block-sparse."""

    @staticmethod
    def of(experiment: Experiment, graph: Graph) -> SparseMatrices | None:
        """Return the sparse weights of an experiment, None if it has dense ones; raises what `sparse_matrices` does."""
        if experiment.sparsity is None:
            return None
        obstacle = block_sparse_obstacle(experiment, graph)
        return SparseMatrices(graph, experiment.sparsity, sparse_matrices(graph, experiment.sparsity), obstacle)

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
            products=none_and_all_stored(block, self.shapes.values()) if block in BLOCKS else None,
            obstacle=self.obstacle,
        )
        if self.obstacle:
            return costs
        kept = {name: self.sparsity.kept(count) for name, count in blocks.items()}
        stored = {name: kept[name] / count for name, count in blocks.items()}
        types = []
        for trace in traces:
            times = {}
            for node, product, name in products_with(trace.block, self.shapes):
                outputs, inputs = reversed(self.shapes[name]) if product.transposed else self.shapes[name]
                times[node.name] = relative_times(block, outputs, inputs, stored[name])
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
