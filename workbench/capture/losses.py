"""Losses as means over the *global* batch, whatever the micro-batches.

The mean of micro-batch means is not the mean over the batch when the number of labels differs (masked language
modelling). Each mean-reduced loss over labels, or over a selection that the batch makes, becomes a sum divided by a
count that the runtime supplies. The count of labels is itself a small graph over the batch, taken from the model.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from workbench.capture.context_managers import restore_regions
from workbench.capture.dataflow import Dataflow
from workbench.capture.graph import LabelCount
from workbench.capture.operations import ancestors, arguments_of, copy_nodes, dtype_of, overloads, shape_of

aten = torch.ops.aten
_MEAN, SUM = 1, 2
"""Numbers that torch gives to a loss's reductions."""
_OVER_LABELS = overloads("cross_entropy_loss nll_loss_nd")
"""Losses over class labels."""
_OVER_ELEMENTS = overloads(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits"
)
"""Losses over every element: micro-batches count equally many, unless the batch selects some (ELECTRA's)."""


@dataclass(frozen=True)
class MeanLoss:
    """A mean-reduced loss whose labels come from the batch alone."""

    node: fx.Node
    target: fx.Node
    weight: fx.Node | None
    """One weight per class: the mean divides by the weights of the labels instead of their number."""
    ignore_index: int | None
    """Label that does not count; None if every element of the target counts. For a mean over the elements that a mask
    of the batch chose, the target is the mask, and this is 0."""


@dataclass(frozen=True)
class Quotient:
    """A division by a sum over fields of the batch, as in `(loss * w).sum() / w.sum().clamp(min=1)`."""

    node: fx.Node
    total: fx.Node
    """The sum."""
    divisor: fx.Node
    """The number by which is divided, made of the sum."""


@dataclass(frozen=True)
class OwnMean:
    """A product of a mean loss with 1, which a scalar reads in place of the loss: the mean of its micro-batch alone.

    The loss is divided by the labels of the global batch; the runtime supplies what to multiply that with instead of 1.
    """

    node: fx.Node
    of: MeanLoss | Quotient


def normaliser(loss: MeanLoss | Quotient) -> tuple[object, ...]:
    """Return a key that is equal for losses which are divided by the same number."""
    if isinstance(loss, Quotient):
        return loss.total, loss.divisor
    return loss.target, loss.weight, loss.ignore_index


def mean_losses(flow: Dataflow) -> tuple[MeanLoss, ...]:
    """Return the means over integer labels, or over selected elements, that the batch determines."""
    losses = (_mean_loss(node, flow) for node in flow.order if node.op == "call_function")
    return tuple(loss for loss in losses if loss is not None)


def _mean_loss(node: fx.Node, flow: Dataflow) -> MeanLoss | None:
    if node.target is aten.mean.default:
        mask = _mask_of(node, flow)
        return None if mask is None else MeanLoss(node, mask, None, 0)
    if node.target not in _OVER_LABELS | _OVER_ELEMENTS:
        return None
    given = arguments_of(node)
    target, weight = _before_broadcast(given["target"]), given.get("weight")
    if given["reduction"] != _MEAN or target not in flow.recomputable:
        return None
    if node.target in _OVER_ELEMENTS:
        is_selected = any(not isinstance(size, int) for size in shape_of(target))
        return MeanLoss(node, target, None, None) if is_selected else None
    if target.meta["val"].is_floating_point() or (weight is not None and weight not in flow.recomputable):
        return None
    return MeanLoss(node, target, weight, int(given["ignore_index"]))


def _mask_of(mean: fx.Node, flow: Dataflow) -> fx.Node | None:
    """Return the mask, made of fields of the batch, that chose the elements of a mean: `(x - y)[mask].square().mean()`.

    The first dim of what a mask chose has a size of its own, by which the selection is found again.
    """
    chosen = [size for size in shape_of(mean.args[0]) if not isinstance(size, int)]
    for node in ancestors([mean]) if len(chosen) == 1 else ():
        if node.target is aten.index.Tensor and str(shape_of(node)[0]) == str(chosen[0]):
            masks = [index for index in node.args[1] if index is not None]  # type: ignore[union-attr]
            if len(masks) == 1 and masks[0] in flow.recomputable and dtype_of(masks[0]) == torch.bool:
                return masks[0]  # type: ignore[return-value]
    return None


def _before_broadcast(target: fx.Node) -> fx.Node:
    """Return the target as it was before the loss function broadcast it with the prediction, if that changed no size.

    `torch.nn.functional.mse_loss` and its kin broadcast both first, so that the target seems to depend on the model.
    """
    source: Any = target.args[0] if target.target is operator.getitem else None
    if source is None or source.target is not aten.broadcast_tensors.default:
        return target
    before: fx.Node = source.args[0][target.args[1]]
    sizes = zip(shape_of(before), shape_of(target), strict=False)
    is_same = all(one == other for one, other in sizes if isinstance(one, int) and isinstance(other, int))
    return before if is_same and len(shape_of(before)) == len(shape_of(target)) else target


def emit_sum_over_count(graph: fx.Graph, loss: fx.Node, count: fx.Node) -> fx.Node:
    """Make the mean loss, which was copied to the end of `graph`, a sum, and return the sum over `count`.

    A quotient is divided by `count` in place of its own divisor, and an `OwnMean` multiplied with it.
    """
    if loss.target in (aten.div.Tensor, aten.mul.Tensor):
        loss.update_arg(1, count)
        return loss
    if loss.target is aten.mean.default:
        per_choice = math.prod(size for size in shape_of(loss.args[0]) if isinstance(size, int))
        loss.target, meta = aten.sum.default, dict(count.meta)
        count = graph.call_function(aten.mul.Tensor, (count, per_choice))
        count.meta = meta
    else:
        loss.args, loss.kwargs = tuple((arguments_of(loss) | {"reduction": SUM}).values()), {}
    quotient = graph.call_function(aten.div.Tensor, (loss, count))
    quotient.meta = dict(loss.meta)
    return quotient


def label_count(module: fx.GraphModule, flow: Dataflow, loss: MeanLoss | Quotient | OwnMean) -> LabelCount:
    """Return the graph `batch -> number (or weight) of the labels that count` of one loss."""
    if isinstance(loss, OwnMean):
        return replace(label_count(module, flow, loss.of), is_ratio=True)
    if isinstance(loss, Quotient):
        ends = [loss.total]
    else:
        ends = [loss.target] if loss.weight is None else [loss.target, loss.weight]
    graph = fx.Graph()
    needed = {*ends} | flow.recomputable_sources(ends)
    inputs = [node for node in flow.order if node.op == "placeholder" and node in needed]
    copies = {node: graph.placeholder(str(node.target)) for node in inputs}
    copy_nodes(graph, (node for node in flow.order if node in needed), copies)
    if isinstance(loss, Quotient):
        graph.output(copies[loss.total])
    else:
        graph.output(graph.call_function(aten.sum.default, (_label_weights(graph, loss, copies),)))
    restore_regions(graph)
    of_total = _of_total(module, flow, loss) if isinstance(loss, Quotient) and loss.total is not loss.divisor else None
    return LabelCount(tuple(str(node.target) for node in inputs), fx.GraphModule(module, graph), of_total)


def _of_total(module: fx.GraphModule, flow: Dataflow, quotient: Quotient) -> fx.GraphModule:
    """Return the graph `total -> divisor` of a quotient."""
    graph = fx.Graph()
    copies = {quotient.total: graph.placeholder("total")}
    needed = {quotient.divisor} | flow.recomputable_sources([quotient.divisor])
    after = needed - flow.recomputable_sources([quotient.total])
    copy_nodes(graph, (node for node in flow.order if node in after), copies)
    graph.output(copies[quotient.divisor])
    return fx.GraphModule(module, graph)


def _label_weights(graph: fx.Graph, loss: MeanLoss, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return the node that holds, for each label, how much it counts."""
    target = copies[loss.target]
    if loss.ignore_index is None:
        return graph.call_function(aten.ones_like.default, (target,))
    counted = graph.call_function(aten.ne.Scalar, (target, loss.ignore_index))
    if loss.weight is None:
        return counted
    label = graph.call_function(aten.mul.Tensor, (target, counted))
    weight = graph.call_function(aten.index.Tensor, (copies[loss.weight], [label]))
    return graph.call_function(aten.mul.Tensor, (weight, counted))
