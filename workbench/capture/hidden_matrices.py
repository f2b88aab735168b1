"""The matrices of a model that are neither embedding tables nor output heads, found in its graph."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from workbench.capture.graph import Graph
from workbench.capture.operations import EMBEDDING, ancestors, names, op_name, reachable

PRODUCTS = names("linear addmm mm matmul bmm baddbmm")
"""Names of the operations that multiply an activation by a weight."""


def hidden_matrices(graph: Graph) -> frozenset[str]:
    """Return the trained parameters of two dims that the model neither looks rows up in nor computes its outputs with.

    An output head is the weight of a product whose result reaches the loss through no further product. A table that is
    tied to a head is no hidden matrix either.
    """
    other: set[str] = set()
    for block in graph.blocks:
        parameters = dict(zip(block.code.graph.find_nodes(op="placeholder"), block.parameters, strict=False))
        for node in block.code.graph.find_nodes(op="call_function", target=EMBEDDING):
            other |= {parameters[each] for each in ancestors([node.all_input_nodes[0]]) if each in parameters}
        if graph.loss in block.sends:
            output = next(iter(reversed(block.code.graph.nodes)))
            other |= _heads(output.args[0][block.sends.index(graph.loss)], parameters)
    return frozenset(
        name
        for name, spec in graph.parameters.items()
        if len(spec.shape) == 2 and name not in other and name not in graph.frozen
    )


def _heads(loss: fx.Node, parameters: dict[fx.Node, str]) -> set[str]:
    """Return the parameters of the last products before the loss."""

    def sources(node: fx.Node) -> Iterator[fx.Node]:
        is_product = op_name(node) in PRODUCTS
        return (each for each in node.all_input_nodes if not is_product or _is_weight(each, parameters))

    return {parameters[node] for node in reachable([loss], sources) if node in parameters}


def _is_weight(node: fx.Node, parameters: dict[fx.Node, str]) -> bool:
    """Return True if a value is a parameter, perhaps transposed or cast."""
    inputs = node.all_input_nodes
    return node in parameters or (len(inputs) == 1 and _is_weight(inputs[0], parameters))
