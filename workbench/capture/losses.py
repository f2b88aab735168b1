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
from workbench.capture.regions import close_regions

_MEAN, _SUM = 1, 2
_ARGUMENTS = (("self", None), ("target", None), ("weight", None), ("reduction", _MEAN), ("ignore_index", -100))
_LOSSES: dict[Any, tuple[tuple[str, Any], ...]] = {
    torch.ops.aten.cross_entropy_loss.default: (*_ARGUMENTS, ("label_smoothing", 0.0)),
    torch.ops.aten.nll_loss_nd.default: _ARGUMENTS,
}
"""Losses over class labels, with their arguments and defaults."""


@dataclass(frozen=True)
class MeanLoss:
    """A cross-entropy whose labels come from the batch alone."""

    node: fx.Node
    target: fx.Node
    weight: fx.Node | None
    """One weight per class: the mean divides by the weights of the labels instead of their number."""
    ignore_index: int


def mean_losses(flow: Dataflow) -> tuple[MeanLoss, ...]:
    """Mean-reduced cross-entropies and negative log-likelihoods over integer labels that the batch determines."""
    nodes = [node for node in flow.order if node.op == "call_function" and node.target in _LOSSES]
    return tuple(found for node in nodes if (found := _mean_loss(node, flow)) is not None)


def _mean_loss(node: fx.Node, flow: Dataflow) -> MeanLoss | None:
    _, target, weight, reduction, ignore_index, *smoothing = _arguments(node)
    if reduction != _MEAN or target not in flow.free or target.meta["val"].is_floating_point():
        return None
    if weight is not None and (weight not in flow.free or any(smoothing)):
        return None
    return MeanLoss(node, target, weight, int(ignore_index))


def _arguments(node: fx.Node) -> list[Any]:
    """The arguments of a loss, by position, defaults filled in."""
    given = dict(zip((name for name, _ in _LOSSES[node.target]), node.args, strict=False)) | node.kwargs
    return [given.get(name, default) for name, default in _LOSSES[node.target]]


def emit_sum_over_count(graph: fx.Graph, copied: fx.Node, count: fx.Node) -> fx.Node:
    """After the copy of a mean loss: make it a sum, and return that sum over `count`."""
    arguments = _arguments(copied)
    arguments[3] = _SUM
    copied.args, copied.kwargs = tuple(arguments), {}
    quotient = graph.call_function(torch.ops.aten.div.Tensor, (copied, count))
    quotient.meta = dict(copied.meta)
    return quotient


def label_count(module: fx.GraphModule, flow: Dataflow, loss: MeanLoss) -> LabelCount:
    """The graph `batch -> number (or weight) of the labels that count` of one loss."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    ends = [loss.target] if loss.weight is None else [loss.target, loss.weight]
    needed = {*ends} | flow.with_free_sources(ends)
    inputs = [node for node in flow.order if node.op == "placeholder" and node in needed]
    for node in inputs:
        copies[node] = graph.placeholder(str(node.target))
    for node in flow.order:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, lambda source: copies[source])
    target = copies[loss.target]
    counted = graph.call_function(torch.ops.aten.ne.Scalar, (target, loss.ignore_index))
    if loss.weight is not None:
        label = graph.call_function(torch.ops.aten.mul.Tensor, (target, counted))
        weight = graph.call_function(torch.ops.aten.index.Tensor, (copies[loss.weight], [label]))
        counted = graph.call_function(torch.ops.aten.mul.Tensor, (weight, counted))
    graph.output(graph.call_function(torch.ops.aten.sum.default, (counted,)))
    close_regions(graph)
    return LabelCount(tuple(str(node.target) for node in inputs), fx.GraphModule(module, graph))
