"""The matrices of a model that are neither embedding tables nor output heads, found in its graph."""

from __future__ import annotations

from torch import fx

from workbench.capture.graph import Block, Graph
from workbench.capture.operations import EMBEDDING, ancestors, schema_of

PRODUCTS = frozenset({"linear", "addmm", "mm", "matmul", "bmm", "baddbmm"})
"""Names of the operations that multiply an activation by a weight."""


def hidden_matrices(graph: Graph) -> frozenset[str]:
    """Return the trained parameters of two dims that the model neither looks rows up in nor computes its outputs with.

    An output head is the weight of a product whose result reaches the loss through no further product. A table that is
    tied to a head is no hidden matrix either.
    """
    other: set[str] = set()
    for block in graph.blocks:
        other |= _tables(block)
        if graph.loss in block.sends:
            other |= _heads(block, graph.loss)
    return frozenset(
        name
        for name, spec in graph.parameters.items()
        if len(spec.shape) == 2 and name not in other and name not in graph.frozen
    )


def _tables(block: Block) -> set[str]:
    """Return the parameters in which the block looks up rows."""
    parameters = _parameters(block)
    found: set[str] = set()
    for node in block.code.graph.nodes:
        if node.target is EMBEDDING:
            found |= {parameters[each] for each in ancestors([node.all_input_nodes[0]]) if each in parameters}
    return found


def _heads(block: Block, loss: str) -> set[str]:
    """Return the parameters of the last products before the loss."""
    parameters = _parameters(block)
    output = next(iter(reversed(block.code.graph.nodes)))
    waiting, seen, found = [output.args[0][block.sends.index(loss)]], set[fx.Node](), set[str]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        found |= {parameters[node]} if node in parameters else set()
        schema = schema_of(node)
        is_product = schema is not None and str(schema.name).rpartition("::")[2] in PRODUCTS
        waiting += [each for each in node.all_input_nodes if not is_product or _is_weight(each, parameters)]
    return found


def _is_weight(node: fx.Node, parameters: dict[fx.Node, str]) -> bool:
    """Return True if a value is a parameter, perhaps transposed or cast."""
    inputs = node.all_input_nodes
    return node in parameters or (len(inputs) == 1 and _is_weight(inputs[0], parameters))


def _parameters(block: Block) -> dict[fx.Node, str]:
    """Map the arguments of the block's code that are parameters to their names."""
    arguments = [node for node in block.code.graph.nodes if node.op == "placeholder"]
    return dict(zip(arguments, block.parameters, strict=False))
