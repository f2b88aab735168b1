"""The matrices of a model that are neither embedding tables nor output heads, found in its graph.

A matrix is what a product multiplies a value by. A tensor that is only looked up, added or multiplied elementwise, such
as a table of positions, is none, whatever its shape.

A matrix may hold several projections, side by side as the queries, keys and values of GPT-2, or in turn for each head
as those of GPT-NeoX. They are found where the model reads the outputs apart: the positions of the outputs are sent
through the model's own splits, views and permutations, and what reads several of them together joins them.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from workbench.base.errors import InvalidExperiment
from workbench.base.validation import factor_of, first_match
from workbench.capture.graph import Block, Graph
from workbench.capture.operations import TABLES, arguments_of, names, op_name, reachable, schema_of, shape_of
from workbench.experiment import Optimizer

OPERANDS = {
    **dict.fromkeys(names("mm matmul bmm tensordot"), (0, 1)),
    **dict.fromkeys(names("addmm baddbmm addbmm"), (1, 2)),
    **dict.fromkeys(names("linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d convolution"), (1,)),
    **dict.fromkeys(names("mv bilinear"), (0,)),
    **dict.fromkeys(names("addmv scaled_dot_product_attention"), (1,)),
    **dict.fromkeys(names("lstm gru rnn_tanh rnn_relu"), (2,)),
    **dict.fromkeys(names("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"), (2, 3)),
    "einsum": (1,),
}
"""Arguments of each product that may be matrices, or lists of them. A `linear` or a convolution multiplies its input by
its weight, even where the input is made of parameters, as the latents of a Perceiver are."""
PRODUCTS = frozenset(name for name in OPERANDS if not name.startswith(("scaled", "lstm", "gru", "rnn")))
"""Names of the operations that multiply an activation by a weight."""
GATES = {"lstm": 4, "lstm_cell": 4, "gru": 3, "gru_cell": 3}
"""Projections that each weight of a recurrent operation holds, one after the other."""
TRANSPOSES, CASTS = names("t numpy_T transpose permute"), names("to _to_copy")
REARRANGES = TRANSPOSES | names(
    "view reshape _unsafe_view flatten unflatten split split_with_sizes chunk tensor_split slice narrow select unbind "
    "contiguous clone squeeze unsqueeze alias detach unsafe_split unsafe_chunk expand swapaxes movedim"
)
"""Names of the operations that move and choose elements, and do nothing else."""


@dataclass(frozen=True)
class Projections:
    """The projections that a matrix holds: one, or several that the model reads apart."""

    output_dim: int = 0
    """Dim of the matrix along which its outputs lie: 0 in `nn.Linear`, 1 in GPT-2's `Conv1D`."""
    sizes: tuple[int, ...] = ()
    """Consecutive outputs of each projection, in order; empty for one that has all."""
    repeats: int = 1
    """Number of times that this order recurs along the outputs: that of heads where each has a query, a key and a value
    beside each other."""

    def shapes(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """Return the shape of each projection of a matrix, outputs first."""
        outputs, inputs = shape[self.output_dim], shape[1 - self.output_dim]
        return [(self.repeats * size, inputs) for size in self.sizes or (outputs // self.repeats,)]

    def split(self, matrix: torch.Tensor) -> list[torch.Tensor]:
        """Return each projection of a matrix, with the outputs in dim `output_dim`."""
        if not self.sizes:
            return [matrix]
        if self.repeats == 1:
            return list(matrix.split(self.sizes, self.output_dim))
        apart = matrix.unflatten(self.output_dim, (self.repeats, -1)).split(self.sizes, self.output_dim + 1)
        return [part.flatten(self.output_dim, self.output_dim + 1) for part in apart]

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the matrix of its projections."""
        if len(parts) == 1:
            return parts[0]
        if self.repeats == 1:
            return torch.cat(list(parts), self.output_dim)
        apart = [part.unflatten(self.output_dim, (self.repeats, -1)) for part in parts]
        return torch.cat(apart, self.output_dim + 1).flatten(self.output_dim, self.output_dim + 1)


@dataclass(frozen=True)
class _Use:
    """A product, or code that runs as written, that reads a value made of parameters and constants alone."""

    node: fx.Node
    operand: fx.Node
    argument: int
    """Index of the argument among the node's that the value is, or is listed in."""


@dataclass(frozen=True)
class _Read:
    """Uses of the parameters in a graph."""

    uses: dict[str, list[tuple[Block, _Use]]]
    """Products by the parameters that they multiply by, in the model's order."""
    learned: dict[int, set[fx.Node]]
    """Values of each block that depend on a parameter."""
    constants: dict[int, dict[fx.Node, torch.Tensor]]
    """Values of each block that Python numbers are, such as the list in `heads[[0, 2]]`."""
    tables: set[str]
    heads: set[str]


def hidden_matrices(graph: Graph) -> frozenset[str]:
    """Return the trained parameters of two dims that the model multiplies by, but for tables and output heads.

    An output head is the weight of a product whose result reaches the loss through no further product. A table that is
    looked up, and tied to a head or multiplied by, is no hidden matrix either.
    """
    return frozenset(_hidden(graph, _read(graph)))


def _hidden(graph: Graph, read: _Read) -> list[str]:
    return [name for name in _of_two_dims(graph) if name in read.uses and name not in read.tables | read.heads]


def _of_two_dims(graph: Graph) -> list[str]:
    """Return the trained parameters of two dims."""
    return [name for name, spec in graph.parameters.items() if len(spec.shape) == 2 and name not in graph.frozen]


def projections(graph: Graph, optimizer: Optimizer | None = None) -> dict[str, Projections]:
    """Return the projections of each matrix that Muon updates, by name.

    `optimizer` may say which these are (`parameters`, `adamw`) and what they hold (`fused_projections`); the rest is
    found in the graph. Raises `InvalidExperiment` for a number that does not divide a matrix's outputs, and where no
    matrix is left.
    """
    return _projections(graph, optimizer or Optimizer(), _read(graph))


def _projections(graph: Graph, optimizer: Optimizer, read: _Read) -> dict[str, Projections]:
    chosen = _of_two_dims(graph)
    hidden = set(_hidden(graph, read) if optimizer.parameters is None else chosen)
    hidden -= {name for name in chosen if optimizer.parameters and first_match(name, optimizer.parameters) is None}
    hidden -= {name for name in chosen if first_match(name, optimizer.adamw or ()) is not None}
    if not hidden and (optimizer.parameters is not None or optimizer.adamw is not None):
        asked = {name: getattr(optimizer, name) for name in ("parameters", "adamw") if getattr(optimizer, name)}
        raise InvalidExperiment(
            f"With {' and '.join(f'{name}={list(each)}' for name, each in asked.items())}, Muon has none of the "
            f"{len(chosen)} trained parameters of two dims of {graph.model} to update. Leave it some, or train with "
            'optimizer="adamw".',
            parameter=next(iter(asked)),
        )
    alike: dict[tuple[str, int], Projections] = {}  # layers of one block type are searched once
    found: dict[str, Projections] = {}
    for name in (name for name in graph.parameters if name in hidden):
        uses = read.uses.get(name, [])
        block = uses[0][0] if uses else None
        key = (block.block_type, block.parameters.index(name)) if block and name in block.parameters else (name, -1)
        if key not in alike:
            alike[key] = _read_apart(graph.parameters[name].shape, name, uses, read)
        found[name] = alike[key]
        number = int(factor_of(name, {**(optimizer.fused_projections or {}), "?*": 0}))  # 0 where no pattern matches
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


VECTORS = "tensors that do not have two dims"


def matrices_in_words(graph: Graph, optimizer: Optimizer) -> tuple[str, str]:
    """Return a sentence with the matrices that Muon updates and how each is divided, and one with AdamW's."""
    read = _read(graph)
    found = _projections(graph, optimizer, read)
    of_muon: dict[str, list[str]] = defaultdict(list)
    of_adamw: dict[str, list[str]] = defaultdict(list)
    opaque = {name for name, uses in read.uses.items() if all(_is_as_written(use.node) for _, use in uses)}
    for name, spec in graph.parameters.items():
        shape = " × ".join(map(str, spec.shape))
        if name in found:
            each = found[name]
            words = ""
            if each.sizes:
                sizes = ", ".join(str(each.repeats * size) for size in each.sizes)
                words = f" as {len(each.sizes)} projections of {sizes} outputs"
            words += f", interleaved {each.repeats} times" if each.repeats > 1 else ""
            words += ", read by code that runs as written" if name in opaque else ""
            of_muon[f"{{}} ({shape}){words}"].append(name)
        elif name not in graph.frozen:
            if len(spec.shape) != 2:
                why = VECTORS
            elif first_match(name, optimizer.adamw or ()) is not None:
                why = "what adamw names"
            elif optimizer.parameters is not None:
                why = "what parameters does not name"
            elif name in read.tables:
                why = "tables that are looked up"
            elif name in read.heads:
                why = "output heads"
            else:
                why = "tensors that no product multiplies by"
            of_adamw[why].append(name)

    def listed(members: Sequence[str]) -> str:
        """Return the names of members, those that differ in a number as one."""
        patterns: dict[str, list[str]] = defaultdict(list)
        for name in members:
            patterns[".".join("*" if word.isdigit() else word for word in name.split("."))].append(name)
        return ", ".join(f"{len(each)} {name}" if len(each) > 1 else each[0] for name, each in patterns.items())

    muon = "; ".join(words.replace("{}", listed(members), 1) for words, members in of_muon.items())
    adamw = [
        f"{why} ({len(members) if why == VECTORS else listed(members)})" for why, members in sorted(of_adamw.items())
    ]
    number = f"{len(found)} {'matrix' if len(found) == 1 else 'matrices'}: {muon}" if found else "no matrix"
    return (
        f"Muon updates {number}.",
        f"AdamW updates {'; '.join(adamw) or 'nothing'}. Others are chosen by patterns of names: "
        'wb.Optimizer("muon", parameters=[…], adamw=[…]).',
    )


# What becomes of parameters.


def _is_as_written(node: fx.Node) -> bool:
    """Return True for code of which nothing is known: a module that runs as written, an operation of the user's."""
    return node.target is not operator.getitem and (schema_of(node) is None or "::" in op_name(node))


def _read(graph: Graph) -> _Read:
    """Return what becomes of the parameters: one pass over the operations of all blocks."""
    uses: dict[str, list[tuple[Block, _Use]]] = defaultdict(list)
    learned_nodes: dict[int, set[fx.Node]] = {}
    constants: dict[int, dict[fx.Node, torch.Tensor]] = {}
    tables, heads = set[str](), set[str]()
    sent_alone: dict[str, frozenset[str]] = {}
    sent_learned: set[str] = set()
    for block in graph.blocks:
        parameters, learned = block.parameter_nodes, set[fx.Node]()
        alone: dict[fx.Node, frozenset[str]] = {}  # parameters of values that are made of them and constants alone
        known: dict[fx.Node, torch.Tensor] = {}
        chosen: set[fx.Node] = set()  # one-hot rows, with which a product looks rows up
        others = (*block.buffers, *block.receives, *block.inputs)
        rest = len(parameters) + len(block.buffers)
        for index, node in enumerate(block.code.graph.find_nodes(op="placeholder")):
            name = (*block.parameters, *others, *([""] * len(block.counts)))[index]
            if index < len(parameters):
                alone[node] = frozenset([name])
                learned.add(node)
            elif index < rest:
                alone[node] = frozenset()
                if name in graph.constants and graph.constants[name].device.type != "meta":
                    known[node] = graph.constants[name]
            elif index < rest + len(block.receives):
                if name in sent_alone:
                    alone[node] = sent_alone[name]
                if name in sent_learned:
                    learned.add(node)
        for node in block.code.graph.nodes:
            if node.op == "get_attr":
                alone[node] = frozenset()
            if node.op != "call_function":
                continue
            inputs, name = node.all_input_nodes, op_name(node)
            if not learned.isdisjoint(inputs):
                learned.add(node)
            is_alone = all(each in alone for each in inputs)
            if name == "lift_fresh_copy" and inputs[0] in known:
                known[node] = known[inputs[0]]
            if name == "one_hot" or (name in CASTS | REARRANGES and inputs[0] in chosen):
                chosen.add(node)
            if name in TABLES or (name in ("index", "index_select", "gather") and not is_alone):
                tables |= alone.get(inputs[0], frozenset())
                continue
            if name in OPERANDS or _is_as_written(node):
                arguments = [*node.args, *node.kwargs.values()]
                at = OPERANDS.get(name, range(len(arguments)))
                operands = [
                    _Use(node, each, index) for index in at for each in _nodes_of(arguments, index) if each in alone
                ]
                for use in operands:
                    for parameter in alone[use.operand]:
                        uses[parameter].append((block, use))
                        if name not in ("linear", "addmm") and not chosen.isdisjoint(inputs):
                            tables.add(parameter)
                if name == "linear" and inputs[0] in chosen:
                    tables |= alone.get(inputs[1], frozenset())
                if not set(at).issuperset((0, 1)):
                    continue  # an activation
            if is_alone:
                # What an elementwise operation spreads over a weight, such as a norm of its rows, is a scale.
                sizes = [math.prod(shape_of(each)) for each in inputs]
                spread = max(sizes, default=0) if _is_pointwise(node) or "weight_norm" in name else 0
                own = (alone[each] for each, size in zip(inputs, sizes, strict=True) if size >= spread)
                alone[node] = frozenset().union(*own)
        output = next(iter(reversed(block.code.graph.nodes)))
        for name, value in zip(block.sends, output.args[0], strict=True):
            if value in alone:
                sent_alone[name] = alone[value]
            if value in learned:
                sent_learned.add(name)
        if graph.loss in block.sends:
            heads |= _heads(output.args[0][block.sends.index(graph.loss)], alone)
        learned_nodes[block.index], constants[block.index] = learned, known
    return _Read(dict(uses), learned_nodes, constants, tables, heads)


def _nodes_of(arguments: Sequence[Any], index: int) -> list[fx.Node]:
    """Return the nodes of one argument: itself, or those of a list."""
    value = arguments[index] if index < len(arguments) else None
    return [each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, fx.Node)]


def _heads(loss: fx.Node, alone: Mapping[fx.Node, frozenset[str]]) -> set[str]:
    """Return the parameters of the last products before the loss."""

    def sources(node: fx.Node) -> Iterator[fx.Node]:
        is_product = op_name(node) in PRODUCTS
        return (each for each in node.all_input_nodes if not is_product or each in alone)

    return {name for node in reachable([loss], sources) for name in alone.get(node, ())}


# Which outputs of a matrix are read apart.


def _read_apart(shape: Sequence[int], name: str, uses: Sequence[tuple[Block, _Use]], read: _Read) -> Projections:
    """Return the projections of a matrix by its products."""
    dims, tracks = set[int](), []
    for block, use in uses:
        gates = GATES.get(op_name(use.node))
        if gates and shape[0] % gates == 0:
            return Projections(0, (shape[0] // gates,) * gates)
        weight = next((node for node, own in block.parameter_nodes.items() if own == name), None)
        found = None if weight is None else _outputs(use, weight, shape)
        if found is None:
            return Projections()
        dims.add(found[0])
        tracks.append((block, use, found[1]))
    if len(dims) != 1:  # none, or outputs of one product are inputs of another
        return Projections()
    dim = dims.pop()
    reads = _Reads(shape[dim])
    for block, use, positions in tracks:
        reads.follow(use.node, positions, read.learned[block.index], read.constants[block.index])
    sizes, repeats = reads.sizes()
    return Projections(dim, sizes, repeats)


def _outputs(use: _Use, weight: fx.Node, shape: Sequence[int]) -> tuple[int, torch.Tensor] | None:
    """Return the dim of a matrix along which a product's outputs lie, and the output that each of its values is.

    The positions of the matrix's elements, a row and a column each, follow it to the product. None where they cannot.
    """
    rows, columns = (torch.arange(size, dtype=torch.int32) for size in shape)
    placed: dict[fx.Node, tuple[Any, ...]] = {weight: (rows[:, None].expand(*shape), columns.expand(*shape))}
    for node in weight.graph.nodes:
        if node is use.node:
            break
        sources = [each for each in node.all_input_nodes if each in placed]
        if sources and node.target is operator.getitem:
            placed[node] = tuple(part[node.args[1]] for part in placed[sources[0]])
        elif sources and op_name(node) in CASTS:
            placed[node] = placed[sources[0]]
        elif sources and op_name(node) in REARRANGES and schema_of(node) is not None:
            moved = [_rearranged(node, part) for part in placed[sources[0]]]
            if None not in moved:
                placed[node] = tuple(moved)
        elif sources and _is_pointwise(node) and shape_of(node) == shape_of(sources[0]):  # such as a mask
            placed[node] = placed[sources[0]]
    kept = _kept_dims(use) if use.operand in placed else None
    if kept is None:
        return None
    for dim, positions in enumerate(placed[use.operand]):
        summed = [each for each, at in enumerate(kept) if at is None]
        if isinstance(positions, torch.Tensor) and all(_is_constant(positions, each) for each in summed):
            result = shape_of(use.node)
            values = positions
            for each in reversed(summed):
                values = values.select(each, 0)
            at = [place % len(result) for place in kept if place is not None]
            order = sorted(range(len(at)), key=at.__getitem__)
            view = [1] * len(result)
            for place, size in zip(at, values.shape, strict=True):
                view[place] = size
            return dim, values.permute(order).reshape(view).expand(result)
    return None


def _rearranged(node: fx.Node, positions: Any) -> Any:
    """Return positions as an operation rearranges a value; None where they would have to be copied.

    They are expanded along most of their dims, so that a copy may be as large as the value.
    """
    if op_name(node) in ("contiguous", "clone"):
        return positions
    if op_name(node) in ("view", "reshape", "_unsafe_view", "flatten", "unflatten"):
        try:
            return positions.view(shape_of(node))
        except RuntimeError:
            return None
    target: Any = node.target
    return target(positions, *node.args[1:], **node.kwargs)


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_constant(positions: torch.Tensor, dim: int) -> bool:
    return positions.stride(dim) == 0 or positions.shape[dim] == 1


def _kept_dims(use: _Use) -> list[int | None] | None:
    """Return for each dim of a product's operand the dim of its result, or None where the product sums over it."""
    name, dims = op_name(use.node), len(shape_of(use.operand))
    is_left = use.argument == OPERANDS.get(name, (0,))[0]
    if name == "linear" and dims == 2:
        return [-1, None]
    if name in ("mm", "matmul", "bmm", "addmm", "baddbmm") and dims >= 2:
        batch: list[int | None] = [each - dims for each in range(dims - 2)]
        return [*batch, -2, None] if is_left else [*batch, None, -1]
    if name == "einsum":
        equation, values = cast(tuple[str, list[fx.Node]], use.node.args[:2])
        operands, _, result = equation.replace(" ", "").partition("->")
        own, letters = operands.split(",")[values.index(use.operand)], result.replace("...", "")
        if not result or "." in own or not result.endswith(letters):
            return None
        return [letters.index(each) - len(letters) if each in letters else None for each in own]
    if name == "tensordot":
        arguments = arguments_of(use.node)
        summed = [each % dims for each in arguments["dims_self" if is_left else "dims_other"]]
        free = [each for each in range(dims) if each not in summed]
        total = len(shape_of(use.node))
        first = 0 if is_left else total - len(free)
        return [None if each in summed else first + free.index(each) for each in range(dims)]
    return None


class _Reads:
    """The outputs of a matrix, joined where an operation reads several of them together."""

    def __init__(self, outputs: int) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._is_read = torch.zeros(outputs, dtype=torch.bool)

    def follow(
        self,
        product: fx.Node,
        positions: torch.Tensor,
        learned: set[fx.Node],
        constants: Mapping[fx.Node, torch.Tensor],
    ) -> None:
        """Send the outputs that a product's values are through the operations after it."""
        placed: dict[fx.Node, Any] = {product: positions}
        nonlinear: set[fx.Node] = set()
        todo = list(product.graph.nodes)
        for node in todo[todo.index(product) + 1 :]:
            sources = [each for each in node.all_input_nodes if each in placed]
            if not sources:
                continue
            first, name = placed[sources[0]], op_name(node)
            if not nonlinear.isdisjoint(sources):
                nonlinear.add(node)
            if node.target is operator.getitem:
                placed[node] = first[node.args[1]]
            elif name in CASTS:
                placed[node] = first
            elif name in REARRANGES and schema_of(node) is not None and node.all_input_nodes == sources:
                moved = _rearranged(node, first)
                placed[node] = first.reshape(shape_of(node)) if moved is None else moved
            elif name == "index" and all(each is None or each in constants for each in node.args[1]):
                at = [None if each is None else constants[each] for each in node.args[1]]
                thin = _thinned([first], but=[dim for dim, each in enumerate(at) if each is not None])[0]
                placed[node] = torch.ops.aten.index(thin, at).expand(shape_of(node))
            elif name in ("cat", "stack") and node not in nonlinear:
                placed[node] = _concatenated(node, placed)
            elif _is_pointwise(node):
                operands = [placed[each].expand(shape_of(node)) for each in sources]
                is_sum = name in ("add", "sub", "rsub")
                others = [each for each in node.all_input_nodes if each not in placed]
                is_scaled = name in ("mul", "neg") or (name == "div" and node.args[0] in placed)
                is_scaled = is_scaled and learned.isdisjoint(others)
                if len(operands) == 1:
                    placed[node] = operands[0]
                    if not (is_sum or is_scaled):
                        nonlinear.add(node)
                elif is_sum and node not in nonlinear:
                    # A sum of values that are linear in the outputs, as a rotation of positions makes it, is of one
                    # projection.
                    one, other = _thinned(operands)
                    self._pairs.append((one.flatten(), other.flatten()))
                    placed[node] = operands[0]
                else:
                    for each in operands:
                        self._read(each)
            else:
                values = [placed[each] for each in sources]
                if name == "glu":
                    values = [first.chunk(2, arguments_of(node)["dim"])]
                for each in values:
                    for part in each if isinstance(each, list | tuple) else [each]:
                        self._read(part)

    def _read(self, positions: torch.Tensor) -> None:
        read = _thinned([positions])[0].flatten()
        read = read[read >= 0].long()
        if read.numel():
            self._is_read[read] = True
            self._pairs.append((read[:1].expand_as(read), read))

    def sizes(self) -> tuple[tuple[int, ...], int]:
        """Return the consecutive outputs of each projection and how often they recur; none for one projection."""
        outputs = len(self._is_read)
        if not self._is_read.all():
            return (), 1
        label = torch.arange(outputs)
        one, other = (torch.cat(each) for each in zip(*self._pairs, strict=True))
        known = (one >= 0) & (other >= 0)
        one, other = one[known].long(), other[known].long()
        while True:  # each output takes the least label among those that it is joined with
            least = torch.minimum(label[one], label[other])
            joined = label.scatter_reduce(0, one, least, "amin").scatter_reduce(0, other, least, "amin")
            joined = joined[joined]
            if torch.equal(joined, label):
                break
            label = joined
        labels, lengths = torch.unique_consecutive(label, return_counts=True)
        number = len(labels.unique())
        repeats = len(labels) // number
        if number == 1:
            return (), 1
        if len(labels) == number * repeats and all(
            torch.equal(each, each[:number].repeat(repeats)) for each in (labels, lengths)
        ):
            return tuple(lengths[:number].tolist()), repeats
        # Projections whose outputs are mixed otherwise are taken as one.
        last = {int(each): at for at, each in enumerate(label.tolist())}
        sizes, start, end = [], 0, 0
        for at, each in enumerate(label.tolist()):
            end = max(end, last[each])
            if at == end:
                sizes.append(at + 1 - start)
                start = at + 1
        return (tuple(sizes), 1) if len(sizes) > 1 else ((), 1)


def _concatenated(node: fx.Node, placed: Mapping[fx.Node, Any]) -> torch.Tensor:
    """Return the outputs that the values of a concatenation are, -1 for values that are none."""
    tensors = cast(list[fx.Node], node.args[0])
    shapes = [shape_of(each) for each in tensors]
    given = [
        placed[each] if each in placed else torch.full((1,), -1, dtype=torch.int32).expand(shape)
        for each, shape in zip(tensors, shapes, strict=True)
    ]
    dim = arguments_of(node)["dim"]
    if op_name(node) == "stack":
        dim %= len(shapes[0]) + 1
        given = [each.unsqueeze(dim) for each in given]
    else:
        dim %= len(shapes[0])
    return torch.cat(_thinned(given, but=[dim]), dim).expand(shape_of(node))


def _thinned(tensors: Sequence[torch.Tensor], but: Collection[int] = ()) -> list[torch.Tensor]:
    """Return tensors with size 1 in the dims, but for some, along which none of them changes."""
    for dim in range(tensors[0].ndim):
        if dim not in but and all(_is_constant(each, dim) and each.shape[dim] > 0 for each in tensors):
            tensors = [each.narrow(dim, 0, 1) for each in tensors]
    return list(tensors)
