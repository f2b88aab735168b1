"""The part of a block that need only run where a label stands: a vocabulary head and its cross-entropy.

A row whose label is `ignore_index` adds nothing to the loss and gets no gradient from it. So every operation that
computes each row from that row alone, between the last one that mixes rows (or draws random numbers) and the
cross-entropy, may run on the labelled rows only: the loss and every gradient are the same.

Analysis only. `workbench.execution.blocks.labelled_head` rewrites the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from workbench.capture.dataflow import is_random, mutates
from workbench.capture.division import product_of, shape_of
from workbench.capture.graph import Block
from workbench.capture.losses import SUM, loss_arguments
from workbench.capture.regions import regions_of

aten = torch.ops.aten
PARTS = 16
"""Rows are kept in multiples of a sixteenth: at most so many variants of a block are ever compiled."""
WORTHWHILE = 0.75
"""With more of the rows than this to compute, all are."""

CROSS_ENTROPY = aten.cross_entropy_loss.default
MEAN = aten.mean.dim
BINARY = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor})
_NORMS = frozenset({aten.layer_norm.default, aten.rms_norm.default})
_VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.slice.Tensor,
    }
)
"""Where they only merge or split the dims that make up the rows (a slice: where it keeps everything)."""
_EACH = frozenset(
    {
        aten.gelu.default,
        aten.relu.default,
        aten.silu.default,
        aten.tanh.default,
        aten.sigmoid.default,
        aten.neg.default,
        aten.exp.default,
        aten.sqrt.default,
        aten.rsqrt.default,
        aten.pow.Tensor_Scalar,
        aten.mul.Scalar,
        aten.add.Scalar,
        aten.alias.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.dropout.default,
    }
)
"""Element by element; dropout where its rate is 0."""


@dataclass(frozen=True)
class LabelledPart:
    """The operations of one kind of block that may run on the labelled rows alone, by their names in `Block.code`."""

    count: int
    """Position in `Block.counts` of what the loss is divided by: the number of labels that stand."""
    rows: int
    """All of them, labelled or not."""
    ignore_index: int
    target: str
    """The label of each row."""
    loss: str
    reads: Mapping[str, tuple[str, ...]]
    """Operation, in order -> those of its operands that have rows; the others it reads whole. The loss is the last."""
    views: frozenset[str]
    """Of the operations, those that leave every row as it is."""

    def kept(self, labels: int) -> int | None:
        """How many rows to compute for a micro-batch of so many labels; None for all, as they come."""
        kept = math.ceil(max(1, math.ceil(labels * PARTS / self.rows)) * self.rows / PARTS)
        return kept if kept <= WORTHWHILE * self.rows else None


def labelled_part(block: Block) -> LabelledPart | None:
    """The largest such part of a block, if there is one with a matrix product in it."""
    nodes = list(block.code.graph.nodes)
    if not block.counts or any(mutates(node) for node in nodes):
        return None
    placeholders = [node for node in nodes if node.op == "placeholder"]
    counts = placeholders[len(placeholders) - len(block.counts) :]
    losses = (node for node in nodes if node.op == "call_function" and node.target is CROSS_ENTROPY)
    found = [part for node in losses if (part := _part(node, nodes, counts)) is not None]
    return max(found, key=lambda part: part.rows, default=None)


def after(loss: fx.Node) -> frozenset[fx.Node]:
    """Every node that needs the loss."""
    found: set[fx.Node] = set()
    stack = [loss]
    while stack:
        new = [user for user in stack.pop().users if user not in found]
        found.update(new)
        stack.extend(new)
    return frozenset(found)


def _part(loss: fx.Node, nodes: list[fx.Node], counts: list[fx.Node]) -> LabelledPart | None:
    given = loss_arguments(loss)
    logits, target = given["self"], given["target"]
    users: list[Any] = [user.args[1] for user in loss.users if user.target is aten.div.Tensor]
    divisors: list[fx.Node] = [divisor for divisor in users if divisor in counts]
    if not divisors or given["reduction"] != SUM or given["weight"] is not None or given["label_smoothing"]:
        return None
    rows = _rows(logits)
    if rows is None or len(shape_of(logits)) != 2 or shape_of(target) != (rows,) or rows < PARTS:
        return None
    if any(regions_of(node) or is_random(node) for node in (loss, *after(loss))):
        return None
    reads = _row_wise(loss, logits, nodes, rows)
    members = [node for node in nodes if node in reads]
    if not any(product_of(node) for node in members):
        return None
    return LabelledPart(
        count=counts.index(divisors[0]),
        rows=rows,
        ignore_index=int(given["ignore_index"]),
        target=target.name,
        loss=loss.name,
        reads={node.name: tuple(operand.name for operand in reads[node]) for node in members},
        views=frozenset(node.name for node in members if node.target in _VIEWS),
    )


def _row_wise(loss: fx.Node, logits: fx.Node, nodes: list[fx.Node], rows: int) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """The operations before the loss whose results only feed, row by row, the loss; with what each reads row by row."""
    found: dict[fx.Node, tuple[fx.Node, ...]] = {loss: (logits,)}
    for node in reversed(nodes[: nodes.index(loss)]):
        if node.users and all(node in found.get(user, ()) for user in node.users):
            operands = _row_operands(node, rows)
            if operands:
                found[node] = operands
    return found


def _row_operands(node: fx.Node, rows: int) -> tuple[fx.Node, ...]:
    """What a row-wise operation reads row by row; nothing where it may mix rows."""
    if node.op != "call_function" or _rows(node) != rows or regions_of(node) or is_random(node):
        return ()
    product = product_of(node)
    if product is not None:
        by_row, whole = [product.value], [product.weight, *([product.bias] if product.bias is not None else [])]
        possible = len(shape_of(product.weight)) == 2 and len(shape_of(product.bias)) <= 1
    elif node.target in BINARY:
        operands = [arg for arg in node.args if isinstance(arg, fx.Node)]
        by_row = [arg for arg in operands if shape_of(arg)[:-1] == shape_of(node)[:-1]]
        whole = [arg for arg in operands if arg not in by_row]
        possible = all(_is_one_row(arg) for arg in whole)
    else:
        by_row, whole = list(node.all_input_nodes[:1]), list(node.all_input_nodes[1:])
        possible = _keeps_rows_apart(node, shape_of(by_row[0])) if by_row else False
    if not possible or any(_rows(operand) != rows or operand in whole for operand in by_row):
        return ()
    return tuple(by_row)


def _keeps_rows_apart(node: fx.Node, given: tuple[int, ...]) -> bool:
    """Of an operation with one operand of shape `given` that has rows: each result row needs that row only."""
    arguments: Any = node.args
    if node.target in _VIEWS:
        return shape_of(node)[-1] == given[-1] and (node.target is not aten.slice.Tensor or shape_of(node) == given)
    if node.target in _EACH:
        return shape_of(node) == given and "memory_format" not in node.kwargs
    if node.target in _NORMS:
        return list(arguments[1]) == [given[-1]]
    if node.target is MEAN:
        return list(arguments[1]) in ([-1], [len(given) - 1]) and arguments[2:3] == (True,)
    return False


def _rows(node: Any) -> int | None:
    """Into how many rows all dims but the last divide a tensor."""
    shape = shape_of(node)
    return math.prod(shape[:-1]) if len(shape) > 1 and all(isinstance(size, int) for size in shape) else None


def _is_one_row(node: fx.Node) -> bool:
    """The same for every row: a bias, a norm's weight, a scalar."""
    return all(size == 1 for size in shape_of(node)[:-1])
