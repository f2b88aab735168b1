"""The scalars that a forward logs (`workbench.log_scalar`), as values of the exported graph.

A scalar is what the model's code computes for one micro-batch. What is computed for scalars alone runs where its last
operand is made, so that no stage sends a value for it that it need not, and tensor parallelism treats it apart: see
`LOGS`. Where a scalar reads a mean loss, which the runtime divides by the labels of the global batch, it reads the mean
of its micro-batch instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from workbench.capture.export import Exported
from workbench.capture.losses import MeanLoss, OwnMean, Quotient, normaliser
from workbench.capture.operations import (
    LOGS,
    Dataflow,
    ancestors,
    descendants,
    is_random,
    mutated_arguments,
    storage_of,
)
from workbench.errors import InvalidExperiment


@dataclass(frozen=True)
class Scalar:
    """One call of `log_scalar`, with the node of its value."""

    name: str
    reduce: str
    node: fx.Node
    loss: MeanLoss | Quotient | None = None
    """The mean loss by whose labels micro-batches are weighted; None weights them equally."""
    own_means: tuple[OwnMean, ...] = ()


def scalars_of(
    exported: Exported, flow: Dataflow, losses: Sequence[MeanLoss | Quotient], outputs: Iterable[fx.Node]
) -> tuple[Scalar, ...]:
    """Return what forward logs, and prepare the graph for it; `losses` are divided by labels of the global batch.

    A scalar that is computed from mean losses over the same labels is weighted by these. One that is computed from none
    is weighted by those of the loss, if all means in it are over the same labels. Other scalars, such as a sum of means
    over different labels, are weighted equally, and their means are those of the global batch, so that such a sum is
    exact.
    """
    if not exported.scalars:
        return ()
    reductions: dict[str, str] = {}
    for name, reduce, _ in exported.scalars:
        if reductions.setdefault(name, reduce) != reduce:
            raise InvalidExperiment(
                f"The scalar {name!r} is logged with reduce={reductions[name]!r} and with reduce={reduce!r}. Give all "
                "calls the same, or two names."
            )
    needed = ancestors([exported.loss, *outputs])
    of_loss = [loss for loss in losses if loss.node in needed]
    by_labels = {normaliser(loss): loss for loss in of_loss}
    only = next(iter(by_labels.values())) if len(by_labels) == 1 else None
    scalars = []
    for name, reduce, node in exported.scalars:
        before = ancestors([node])
        read = [loss for loss in of_loss if loss.node in before]
        if not read:
            scalars.append(Scalar(name, reduce, node, only))
        elif len({normaliser(loss) for loss in read}) > 1:
            scalars.append(Scalar(name, reduce, node))
        else:
            means = tuple(_own_mean(loss) for loss in read)
            path = before & {later for loss in read for later in descendants(loss.node)}
            copy = _with_own_means(node, [each for each in flow.order if each in path], means)
            scalars.append(Scalar(name, reduce, copy, read[0], means))
    _move_to_operands(exported.module.graph, flow, needed, [scalar.node for scalar in scalars])
    return tuple(scalars)


def _own_mean(loss: MeanLoss | Quotient) -> OwnMean:
    graph = loss.node.graph
    with graph.inserting_before(graph.output_node()):
        product = graph.call_function(torch.ops.aten.mul.Tensor, (loss.node, 1.0))
    product.meta = dict(loss.node.meta)
    return OwnMean(product, loss)


def _with_own_means(node: fx.Node, path: Sequence[fx.Node], means: Sequence[OwnMean]) -> fx.Node:
    """Return a copy of a node that reads the means of a micro-batch, through copies of the nodes of `path`."""
    graph = node.graph
    copies = {mean.of.node: mean.node for mean in means}
    for each in path:
        with graph.inserting_before(graph.output_node()):
            copies[each] = graph.node_copy(each, lambda source: copies.get(source, source))
    return copies[node]


def _move_to_operands(graph: fx.Graph, flow: Dataflow, needed: set[fx.Node], scalars: Collection[fx.Node]) -> None:
    """Move what only scalars need to just after its last operand, as a part of that one's module."""
    kept = needed | ancestors(node for node in graph.nodes if mutated_arguments(node))
    own = ancestors(scalars) - kept
    written = set(flow.writers)
    for node in list(graph.nodes):
        if node not in own or node.op != "call_function":
            continue
        node.meta[LOGS] = True
        operands = {source for source in node.all_input_nodes if source.op == "call_function"}
        if not operands or is_random(node) or any(storage_of(source) in written for source in node.all_input_nodes):
            continue
        last = next(each for each in reversed(graph.nodes) if each in operands)
        last.append(node)
        if "nn_module_stack" in last.meta:
            node.meta["nn_module_stack"] = last.meta["nn_module_stack"]
