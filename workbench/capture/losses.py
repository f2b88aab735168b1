"""Losses as means over the *global* batch, whatever the micro-batches.

The mean of micro-batch means is not the mean over the batch when the number of labels differs (masked language
modelling). Each mean-reduced loss over labels, or over a selection that the batch makes, becomes a sum divided by a
count that the runtime supplies; the count of labels is itself a small graph over the batch, taken from the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from workbench.capture.dataflow import Dataflow
from workbench.capture.graph import LabelCount
from workbench.capture.regions import close_regions

aten = torch.ops.aten
_MEAN, SUM = 1, 2
"""How torch numbers a loss's reductions."""
_Arguments = tuple[tuple[str, Any], ...]
_PAIR: _Arguments = (("self", None), ("target", None))
_REDUCTION = ("reduction", _MEAN)
_WEIGHTED: _Arguments = (*_PAIR, ("weight", None), _REDUCTION)
_OF_LABELS: dict[Any, _Arguments] = {
    aten.cross_entropy_loss.default: (*_WEIGHTED, ("ignore_index", -100), ("label_smoothing", 0.0)),
    aten.nll_loss_nd.default: (*_WEIGHTED, ("ignore_index", -100)),
}
"""Losses over class labels, with their arguments and defaults."""
_OF_ELEMENTS: dict[Any, _Arguments] = {
    aten.mse_loss.default: (*_PAIR, _REDUCTION),
    aten.l1_loss.default: (*_PAIR, _REDUCTION),
    aten.smooth_l1_loss.default: (*_PAIR, _REDUCTION, ("beta", 1.0)),
    aten.huber_loss.default: (*_PAIR, _REDUCTION, ("delta", 1.0)),
    aten.binary_cross_entropy.default: _WEIGHTED,
    aten.binary_cross_entropy_with_logits.default: (*_PAIR, ("weight", None), ("pos_weight", None), _REDUCTION),
}
"""Losses over every element: micro-batches count equally many, unless the batch selects some (ELECTRA's)."""
_LOSSES = _OF_LABELS | _OF_ELEMENTS


@dataclass(frozen=True)
class MeanLoss:
    """A mean-reduced loss whose labels come from the batch alone."""

    node: fx.Node
    target: fx.Node
    weight: fx.Node | None
    """One weight per class: the mean divides by the weights of the labels instead of their number."""
    ignore_index: int | None
    """None where every element of the target counts."""


def mean_losses(flow: Dataflow) -> tuple[MeanLoss, ...]:
    """Mean-reduced losses over integer labels, or over a selection of elements, that the batch determines."""
    nodes = [node for node in flow.order if node.op == "call_function" and node.target in _LOSSES]
    return tuple(found for node in nodes if (found := _mean_loss(node, flow)) is not None)


def _mean_loss(node: fx.Node, flow: Dataflow) -> MeanLoss | None:
    given = loss_arguments(node)
    target, weight = given["target"], given.get("weight")
    if given["reduction"] != _MEAN or target not in flow.free:
        return None
    if node.target in _OF_ELEMENTS:
        selected = any(not isinstance(size, int) for size in target.meta["val"].shape)
        return MeanLoss(node, target, None, None) if selected else None
    if target.meta["val"].is_floating_point():
        return None
    if weight is not None and weight not in flow.free:
        return None
    return MeanLoss(node, target, weight, int(given["ignore_index"]))


def loss_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a loss by name, defaults filled in."""
    formal = _LOSSES[node.target]
    return dict(formal) | dict(zip((name for name, _ in formal), node.args, strict=False)) | node.kwargs


def emit_sum_over_count(graph: fx.Graph, copied: fx.Node, count: fx.Node) -> fx.Node:
    """After the copy of a mean loss: make it a sum, and return that sum over `count`."""
    copied.args, copied.kwargs = tuple((loss_arguments(copied) | {"reduction": SUM}).values()), {}
    quotient = graph.call_function(aten.div.Tensor, (copied, count))
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
    graph.output(graph.call_function(aten.sum.default, (_counted(graph, loss, copies),)))
    close_regions(graph)
    return LabelCount(tuple(str(node.target) for node in inputs), fx.GraphModule(module, graph))


def _counted(graph: fx.Graph, loss: MeanLoss, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """For each label, how much it counts."""
    target = copies[loss.target]
    if loss.ignore_index is None:
        return graph.call_function(aten.ones_like.default, (target,))
    counted = graph.call_function(aten.ne.Scalar, (target, loss.ignore_index))
    if loss.weight is None:
        return counted
    label = graph.call_function(aten.mul.Tensor, (target, counted))
    weight = graph.call_function(aten.index.Tensor, (copies[loss.weight], [label]))
    return graph.call_function(aten.mul.Tensor, (weight, counted))
