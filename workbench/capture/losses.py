"""Losses as means over the *global* batch, whatever the micro-batches.

The mean of micro-batch means is not the mean over the batch when the number of labels differs (masked language
modelling). Each mean-reduced cross-entropy becomes a sum divided by a count that the runtime supplies; the count
of labels is itself a small graph over the batch, taken from the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from workbench.capture.dataflow import Dataflow
from workbench.capture.graph import LabelCount

_CROSS_ENTROPY = torch.ops.aten.cross_entropy_loss.default
_MEAN, _SUM = 1, 2


@dataclass(frozen=True)
class MeanLoss:
    """A cross-entropy whose labels come from the batch alone."""

    node: fx.Node
    target: fx.Node
    ignore_index: int


def mean_losses(flow: Dataflow) -> tuple[MeanLoss, ...]:
    """Mean-reduced, unweighted cross-entropies over integer labels that the batch determines."""
    return tuple(
        MeanLoss(node, node.args[1], int(_argument(node, 4, "ignore_index", -100)))
        for node in flow.order
        if node.op == "call_function"
        and node.target is _CROSS_ENTROPY
        and _argument(node, 3, "reduction", _MEAN) == _MEAN
        and _argument(node, 2, "weight", None) is None
        and isinstance(node.args[1], fx.Node)
        and node.args[1] in flow.free
        and not node.args[1].meta["val"].is_floating_point()
    )


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def emit_sum_over_count(graph: fx.Graph, copied: fx.Node, count: fx.Node) -> fx.Node:
    """After the copy of a mean cross-entropy: make it a sum, and return that sum over `count`."""
    arguments = [_argument(copied, i, n, d) for i, (n, d) in enumerate(_SIGNATURE)]
    arguments[3] = _SUM
    copied.args, copied.kwargs = tuple(arguments), {}
    quotient = graph.call_function(torch.ops.aten.div.Tensor, (copied, count))
    quotient.meta = dict(copied.meta)
    return quotient


_SIGNATURE = (
    ("self", None),
    ("target", None),
    ("weight", None),
    ("reduction", _MEAN),
    ("ignore_index", -100),
    ("label_smoothing", 0.0),
)


def label_count(module: fx.GraphModule, flow: Dataflow, loss: MeanLoss) -> LabelCount:
    """The graph `batch -> number of labels that count` of one loss."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    needed = {loss.target} | flow.with_free_sources([loss.target])
    inputs = [node for node in flow.order if node.op == "placeholder" and node in needed]
    for node in inputs:
        copies[node] = graph.placeholder(str(node.target))
    for node in flow.order:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, lambda source: copies[source])
    counted = graph.call_function(torch.ops.aten.ne.Scalar, (copies[loss.target], loss.ignore_index))
    graph.output(graph.call_function(torch.ops.aten.sum.default, (counted,)))
    return LabelCount(tuple(str(node.target) for node in inputs), fx.GraphModule(module, graph))
