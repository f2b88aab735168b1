"""The part of a block that need only run on labelled rows: a vocabulary head and its cross-entropy.

A row whose label is `ignore_index` adds nothing to the loss and gets no gradient from it. So every operation that
computes each row from that row alone, between the last one that mixes rows (or draws random numbers) and the
cross-entropy, may run on the labelled rows only: the loss and every gradient are the same.

Analysis only: `workbench.execution.blocks.labelled_head` rewrites the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from workbench.capture.context_managers import regions_of
from workbench.capture.graph import Block
from workbench.capture.losses import SUM
from workbench.capture.operations import arguments_of, descendants, is_random, mutated_arguments, overloads, shape_of
from workbench.capture.tensor_sharding import product_of

aten = torch.ops.aten
ROW_STEPS = 16
"""Number of row counts a head is compiled for, at most: rows are kept in multiples of a sixteenth of all."""
MAX_ROW_FRACTION = 0.75
"""Largest fraction of the rows for which picking them is worth its cost; above, all rows are computed."""

CROSS_ENTROPY = aten.cross_entropy_loss.default
MEAN = aten.mean.dim
BINARY = overloads("add.Tensor sub.Tensor mul.Tensor div.Tensor")
_NORMS = overloads("layer_norm rms_norm")
_VIEWS = overloads("view reshape _unsafe_view flatten.using_ints unflatten.int unsqueeze squeeze.dim slice.Tensor")
"""Operations that are row-wise if they only merge or split the dims of the rows (a slice: if it keeps everything)."""
_ELEMENTWISE = overloads(
    "gelu relu silu tanh sigmoid neg exp sqrt rsqrt pow.Tensor_Scalar mul.Scalar add.Scalar alias clone contiguous "
    "to.dtype to.dtype_layout dropout"
)
"""Operations on each element by itself; a dropout counts if its rate is 0."""


@dataclass(frozen=True)
class RowwiseHead:
    """The operations of one block type that may run on the labelled rows alone, by their names in `Block.code`."""

    count: int
    """Position in `Block.counts` of the number of labels, which the loss is divided by."""
    rows: int
    """Number of all rows, labelled or not."""
    ignore_index: int
    target: str
    """Operation that holds the label of each row."""
    loss: str
    """The cross-entropy."""
    reads: Mapping[str, tuple[str, ...]]
    """Operation, in order -> its operands that have rows; it reads the others whole. The loss is the last."""
    views: frozenset[str]
    """Operations among these that leave every row as it is."""

    def rows_to_compute(self, labels: int) -> int | None:
        """Return how many rows to compute for a micro-batch with so many labels; None for all rows, in their order."""
        count = math.ceil(max(1, math.ceil(labels * ROW_STEPS / self.rows)) * self.rows / ROW_STEPS)
        return count if count <= MAX_ROW_FRACTION * self.rows else None


def find_rowwise_head(block: Block) -> RowwiseHead | None:
    """Return the row-wise head of a block with the most rows; None if there is none with a matrix product in it."""
    nodes = list(block.code.graph.nodes)
    if not block.counts or any(mutated_arguments(node) for node in nodes):
        return None
    placeholders = [node for node in nodes if node.op == "placeholder"]
    counts = placeholders[len(placeholders) - len(block.counts) :]
    losses = block.code.graph.find_nodes(op="call_function", target=CROSS_ENTROPY)
    heads = (_head(node, nodes, counts) for node in losses)
    return max((head for head in heads if head is not None), key=lambda head: head.rows, default=None)


def _head(loss: fx.Node, nodes: list[fx.Node], counts: list[fx.Node]) -> RowwiseHead | None:
    """Return the row-wise head that ends in `loss`; `counts` are the placeholders of the numbers of labels."""
    given = arguments_of(loss)
    logits, target = given["self"], given["target"]
    users: list[Any] = [user.args[1] for user in loss.users if user.target is aten.div.Tensor]
    divisors: list[fx.Node] = [divisor for divisor in users if divisor in counts and "count" in str(divisor.target)]
    if not divisors or given["reduction"] != SUM or given["weight"] is not None or given["label_smoothing"]:
        return None
    rows = _row_count(logits)
    if rows is None or len(shape_of(logits)) != 2 or shape_of(target) != (rows,) or rows < ROW_STEPS:
        return None
    if any(regions_of(node) or is_random(node) for node in (loss, *descendants(loss))):
        return None
    reads: dict[fx.Node, tuple[fx.Node, ...]] = {loss: (logits,)}
    for node in reversed(nodes[: nodes.index(loss)]):
        if node.users and all(node in reads.get(user, ()) for user in node.users):
            operands = _row_operands(node, rows)
            if operands:
                reads[node] = operands
    members = [node for node in nodes if node in reads]
    if not any(product_of(node) for node in members):
        return None
    return RowwiseHead(
        count=counts.index(divisors[0]),
        rows=rows,
        ignore_index=int(given["ignore_index"]),
        target=target.name,
        loss=loss.name,
        reads={node.name: tuple(operand.name for operand in reads[node]) for node in members},
        views=frozenset(node.name for node in members if node.target in _VIEWS),
    )


def _row_operands(node: fx.Node, rows: int) -> tuple[fx.Node, ...]:
    """Return the operands that an operation reads row by row; none if it may mix rows."""
    if node.op != "call_function" or _row_count(node) != rows or regions_of(node) or is_random(node):
        return ()
    product = product_of(node)
    if product is not None:
        by_row, whole = [product.value], [product.weight, *([product.bias] if product.bias is not None else [])]
        possible = len(shape_of(product.weight)) == 2 and len(shape_of(product.bias)) <= 1
    elif node.target in BINARY:
        operands = [arg for arg in node.args if isinstance(arg, fx.Node)]
        by_row = [arg for arg in operands if shape_of(arg)[:-1] == shape_of(node)[:-1]]
        whole = [arg for arg in operands if arg not in by_row]
        # A bias, a norm's weight or a scalar is the same for every row.
        possible = all(size == 1 for arg in whole for size in shape_of(arg)[:-1])
    else:
        by_row, whole = list(node.all_input_nodes[:1]), list(node.all_input_nodes[1:])
        possible = _keeps_rows_apart(node, shape_of(by_row[0])) if by_row else False
    if not possible or any(_row_count(operand) != rows or operand in whole for operand in by_row):
        return ()
    return tuple(by_row)


def _keeps_rows_apart(node: fx.Node, given: tuple[int, ...]) -> bool:
    """Return True if each row of the result needs one row only of the operand with rows, which has shape `given`."""
    arguments: Any = node.args
    if node.target in _VIEWS:
        return shape_of(node)[-1] == given[-1] and (node.target is not aten.slice.Tensor or shape_of(node) == given)
    if node.target in _ELEMENTWISE:
        return shape_of(node) == given and "memory_format" not in node.kwargs
    if node.target in _NORMS:
        return list(arguments[1]) == [given[-1]]
    if node.target is MEAN:
        return list(arguments[1]) in ([-1], [len(given) - 1]) and arguments[2:3] == (True,)
    return False


def _row_count(node: Any) -> int | None:
    """Return the number of rows of a tensor: the product of all its dims but the last."""
    shape = shape_of(node)
    return math.prod(shape[:-1]) if len(shape) > 1 and all(isinstance(size, int) for size in shape) else None
