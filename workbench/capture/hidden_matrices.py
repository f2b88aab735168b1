"""The matrices of a model that are neither embedding tables nor output heads, found in its graph.

A matrix may hold several projections side by side, such as the queries, keys and values of GPT-2 or the two halves of
a gated feed-forward. They are found where the model reads its outputs apart: the positions of the outputs are sent
through the model's own splits, views and permutations, and each value that anything else reads tells which of them it
holds.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from workbench.capture.graph import Graph
from workbench.capture.operations import EMBEDDING, ancestors, names, op_name, reachable, schema_of, shape_of
from workbench.errors import InvalidExperiment
from workbench.validation import factor_of

PRODUCTS = names("linear addmm mm matmul bmm baddbmm")
"""Names of the operations that multiply an activation by a weight."""
TRANSPOSES, CASTS = names("t numpy_T transpose permute"), names("to _to_copy")
REARRANGES = TRANSPOSES | names(
    "view reshape _unsafe_view flatten unflatten split split_with_sizes chunk tensor_split slice narrow select unbind "
    "contiguous clone squeeze unsqueeze alias detach unsafe_split unsafe_chunk expand swapaxes movedim"
)
"""Names of the operations that move and choose elements, and do nothing else."""


@dataclass(frozen=True)
class Projections:
    """The projections that a matrix holds side by side: one, or several that the model reads apart."""

    output_dim: int = 0
    """Dim of the matrix along which its outputs lie: 0 in `nn.Linear`, 1 in GPT-2's `Conv1D`."""
    sizes: tuple[int, ...] = ()
    """Outputs of each projection, in order; empty for one that has all."""


def hidden_matrices(graph: Graph) -> frozenset[str]:
    """Return the trained parameters of two dims that the model neither looks rows up in nor computes its outputs with.

    An output head is the weight of a product whose result reaches the loss through no further product. A table that is
    tied to a head is no hidden matrix either.
    """
    other: set[str] = set()
    for block in graph.blocks:
        parameters = block.parameter_nodes
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


def projections(graph: Graph, fused: Mapping[str, float] | None = None) -> dict[str, Projections]:
    """Return the projections of each hidden matrix by name.

    `fused` gives the number of equal projections by pattern of the name, and is believed where a pattern matches; the
    others are found in the graph. Raises `InvalidExperiment` where a number does not divide a matrix's outputs.
    """
    hidden = hidden_matrices(graph)
    found: dict[str, Projections] = {}
    alike: dict[tuple[str, int], Projections] = {}  # layers of one block type are searched once
    for block in graph.blocks:
        for position, (node, name) in enumerate(block.parameter_nodes.items()):
            if name in hidden and name not in found:
                if (block.block_type, position) not in alike:
                    read = _read_by_a_product(node)
                    each = Projections() if read is None else Projections(read[1], _read_apart(read[0]))
                    alike[block.block_type, position] = each
                found[name] = alike[block.block_type, position]
    for name in sorted(hidden):
        number = int(factor_of(name, {**(fused or {}), "?*": 0}))  # 0 where no pattern of the user matches
        if number:
            dim = found[name].output_dim
            outputs = graph.parameters[name].shape[dim]
            if outputs % number:
                raise InvalidExperiment(
                    f"fused_projections says that {name} {tuple(graph.parameters[name].shape)} holds {number} "
                    f"projections, and its {outputs} outputs do not divide into so many. Give a divisor of {outputs}.",
                    parameter="fused_projections",
                )
            found[name] = Projections(dim, (outputs // number,) * number if number > 1 else ())
    return found


def _read_by_a_product(weight: fx.Node) -> tuple[fx.Node, int] | None:
    """Return a product that reads a weight, and the weight's dim along which the product's outputs lie."""
    transposed, node = False, weight
    while True:
        for user in node.users:
            name = op_name(user)
            if name == "linear" and user.args[1] is node:
                return user, int(transposed)
            if name in ("mm", "matmul") and user.args[1] is node:
                return user, int(not transposed)
            if name == "addmm" and user.args[2] is node:
                return user, int(not transposed)
        onward = [user for user in node.users if op_name(user) in TRANSPOSES | CASTS]
        if not onward:
            return None
        node = onward[0]
        transposed ^= op_name(node) in TRANSPOSES


def _read_apart(product: fx.Node) -> tuple[int, ...]:
    """Return the sizes of consecutive runs of a product's outputs that nothing reads together; empty for one run."""
    outputs = shape_of(product)[-1]
    joined, is_read = torch.zeros(outputs, dtype=torch.bool), torch.zeros(outputs, dtype=torch.bool)
    for positions in _positions_read(product, torch.arange(outputs).expand(shape_of(product))):
        is_read[positions.flatten()] = True
        joined[int(positions.min()) + 1 : int(positions.max()) + 1] = True  # with the output before
    if not is_read.all():
        return ()
    starts = torch.nonzero(~joined).flatten().tolist()
    sizes = [end - start for start, end in zip(starts, [*starts[1:], outputs], strict=True)]
    return tuple(sizes) if len(sizes) > 1 else ()


def _positions_read(node: fx.Node, positions: Any) -> Iterator[torch.Tensor]:
    """Yield the outputs in each value, rearranged from a node's, that anything else than a rearrangement reads.

    A bias that is added leaves its value's positions.
    """
    is_read = False
    for user in node.users:
        name, others = op_name(user), [each for each in user.all_input_nodes if each is not node]
        adds_bias = name == "add" and shape_of(user) == shape_of(node) and [len(shape_of(o)) for o in others] == [1]
        if user.target is operator.getitem:
            yield from _positions_read(user, positions[user.args[1]])
        elif name in CASTS or adds_bias:
            yield from _positions_read(user, positions)
        elif name in REARRANGES and schema_of(user) is not None and user.all_input_nodes == [node]:
            rearranged: Any = user.target
            yield from _positions_read(user, rearranged(positions, *user.args[1:], **user.kwargs))
        else:
            is_read = True
    if is_read and isinstance(positions, torch.Tensor) and positions.numel():
        yield positions


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
