"""Finds the weights of a captured model that tensor parallelism can shard, by following sharded dims through blocks.

    sharding = plan_tensor_parallel(graph, degree=2)   # the sharded dim of each weight, and each block's all-reduces

This is Megatron-LM's scheme (arXiv:1909.08053), found instead of written by hand. A product with a weight may be a
*column*: its weight is sharded over the output features, and so is its result. The sharded dim is followed through
views, attention (whole heads), activations and dropout until a product contracts it: the *row*, whose partial results
are summed over the devices. Embeddings and heads are sharded over the vocabulary, up to a cross-entropy, which can be
reduced over it. Where the dim meets an operation without a rule, or leaves the block, its columns are not sharded, and
every device computes them whole. So an operation that is not understood costs speed, never correctness.

Analysis only, without processes or collectives: `workbench.execution.blocks.tensor_parallel` rewrites the blocks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from workbench.capture.graph import Block, Graph
from workbench.capture.operations import (
    DROPOUT,
    EMBEDDING,
    GROUPED_MATMUL,
    LOGS,
    MOVED,
    arguments_of,
    holds_integers,
    is_random,
    moved_dim,
    names,
    op_name,
    reachable,
    schema_of,
    shape_of,
)

# Values that say how a block's tensors are sharded over the devices of the tensor-parallel axis.

aten = torch.ops.aten


@dataclass(frozen=True)
class Sharding:
    """One dim of a tensor, sharded over `degree` devices.

    The dim consists of consecutive `segments` that are sharded separately: the fused query, key and value of GPT-2 are
    three. Where `degree` does not divide a segment, the last device holds less of it.
    """

    dim: int
    segments: tuple[int, ...]
    degree: int

    @property
    def even(self) -> bool:
        return all(segment % self.degree == 0 for segment in self.segments)

    def pieces(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return (start, length) in the whole tensor of each piece that a device holds, in its order on the device."""
        pieces, start = [], 0
        for segment in self.segments:
            chunk = -(-segment // self.degree)
            first, end = min(rank * chunk, segment), min((rank + 1) * chunk, segment)
            pieces.append((start + first, end - first))
            start += segment
        return tuple(pieces)

    def size(self, rank: int) -> int:
        """Return the length of the dim on a device."""
        return sum(length for _, length in self.pieces(rank))


@dataclass(frozen=True)
class BlockSharding:
    """The tensor-parallel sharding of one block type. Nodes go by their names in `Block.code`."""

    sharded: Mapping[str, Sharding] = field(default_factory=dict)
    """Operations whose result is sharded, and how (`getitem`s of a split stand for its parts)."""
    parameters: Mapping[int, Sharding] = field(default_factory=dict)
    """Sharded parameters, by position in `Block.parameters`."""
    entering: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Operation -> the whole values that it reads into a sharded region: the backward all-reduces their gradients."""
    multiplied: frozenset[str] = frozenset()
    """Entering values that only matrix products read, as their left operand: autocast casts them for all readers."""
    sliced: Mapping[tuple[str, str], Sharding] = field(default_factory=dict)
    """(operation, whole operand) -> the part of the operand that the operation reads on each device."""
    whole: Mapping[tuple[str, str], Sharding] = field(default_factory=dict)
    """(operation, sharded operand) of operations that only logged scalars need, which read the whole operand."""
    reduced: frozenset[str] = frozenset()
    """Operations whose results are partial: the forward all-reduces them."""
    forward_elements: tuple[int, ...] = ()
    """Elements of each all-reduce of one forward."""
    backward_elements: tuple[int, ...] = ()
    """Elements of each all-reduce of one backward."""
    random: bool = False
    """True if a sharded operation draws random numbers: each device then needs its own."""

    @property
    def divided(self) -> frozenset[str]:
        """Operations of which each device does 1 / degree."""
        return frozenset(self.sharded) | self.reduced


@dataclass(frozen=True)
class ModelSharding:
    """The tensor-parallel sharding of a model."""

    parameters: Mapping[str, Sharding]
    """Sharded parameters, by name; the others are whole on every device."""
    blocks: tuple[BlockSharding, ...]
    """One for each block of the graph."""


@dataclass(frozen=True)
class Product:
    """A matrix product `value @ weightᵀ + bias` with a weight; this is stored as (in, out) if `transposed`."""

    value: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool
    experts: bool = False
    """True if the weight has one matrix per expert in its first dim, and each row of the value meets one of them."""
    transpose: fx.Node | None = None
    """Transpose between the experts' weights and the product, if there is one."""

    @property
    def out_dim(self) -> int:
        """Dim of the weight that holds the output features."""
        return self.experts + self.transposed

    @property
    def in_dim(self) -> int:
        """Dim of the weight that holds the input features."""
        return self.experts + (not self.transposed)


def product_of(node: fx.Node) -> Product | None:
    """Return the product with a matrix, or with one for each expert, that a node computes; None for other nodes."""
    arguments: Any = node.args
    if node.op != "call_function" or node.kwargs:
        return None
    if node.target is aten.linear.default:
        return Product(arguments[0], arguments[1], arguments[2] if len(arguments) > 2 else None, False)
    if node.target is aten.addmm.default:
        return Product(arguments[1], arguments[2], arguments[0], True)
    if node.target in (aten.mm.default, aten.matmul.default) and len(shape_of(arguments[1])) == 2:
        return Product(arguments[0], arguments[1], None, True)
    schema = schema_of(node)
    if schema is not None and schema.name == GROUPED_MATMUL:
        rows, weights, _ = arguments
        is_transpose = weights.target is aten.transpose.int and {dim % 3 for dim in weights.args[1:]} == {1, 2}
        if is_transpose and set(weights.users) == {node}:
            return Product(rows, weights.args[0], None, False, experts=True, transpose=weights)
        return Product(rows, weights, None, True, experts=True)
    return None


# Rules for each operation on a sharded dim: they carry it from columns to rows.
#
# A rule returns the layout of its operation's result, the layouts of several results, or None where the sharding ends.
# It raises `DeadEnd` if the dim cannot be followed. An operation without a rule is a dead end.


class DeadEnd(Exception):
    """Columns whose results cannot be followed further; `segments` are given if sharding them so may help."""

    def __init__(self, columns: Iterable[fx.Node], segments: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.columns, self.segments = tuple(columns), segments


@dataclass(frozen=True)
class Layout:
    """The sharding of a result, with the columns that it comes from."""

    sharding: Sharding
    columns: frozenset[fx.Node]

    @property
    def dim(self) -> int:
        return self.sharding.dim

    def at(self, dim: int, segments: Sequence[int] | None = None) -> Layout:
        """Return the layout with the sharding on another dim, and perhaps in other segments."""
        chosen = self.sharding.segments if segments is None else tuple(segments)
        return Layout(Sharding(dim, chosen, self.sharding.degree), self.columns)

    def dead_end(self, segments: Iterable[int] | None = None) -> DeadEnd:
        return DeadEnd(self.columns, None if segments is None else tuple(segments))


class Propagation:
    """One pass over a block's operations for one choice of columns.

    Args:
        parameters: positions in `Block.parameters` of the parameters that may be sharded.
        columns: products and embeddings to shard, each with the segments of its result (None: one).
    """

    def __init__(
        self,
        block: Block,
        degree: int,
        parameters: Mapping[fx.Node, int],
        columns: Mapping[fx.Node, tuple[int, ...] | None],
    ) -> None:
        self._block, self._degree = block, degree
        self._positions, self._columns = parameters, columns
        self._layouts: dict[fx.Node, Layout] = {}
        self.items: dict[fx.Node, tuple[Layout, ...]] = {}
        self._weights: dict[fx.Node, tuple[Sharding, set[fx.Node], frozenset[fx.Node]]] = {}
        self._entering: dict[fx.Node, dict[fx.Node, None]] = {}
        self._sliced: dict[tuple[fx.Node, fx.Node], Sharding] = {}
        self._whole: dict[tuple[fx.Node, fx.Node], Sharding] = {}
        self._reduced: dict[fx.Node, int] = {}
        # A gradient may flow to what descends from parameters and received values.
        first = len(block.parameters) + len(block.buffers)
        arguments = block.code.graph.find_nodes(op="placeholder")
        start = (*block.parameter_nodes, *arguments[first : first + len(block.receives)])
        reached = reachable(start, lambda node: (user for user in node.users if not holds_integers(user)))
        self._trained = {node for node in reached if not holds_integers(node)}

    def run(self) -> BlockSharding:
        """Return the sharding of the block; raises `DeadEnd` with the columns to give up."""
        for node in self._block.code.graph.nodes:
            held = [source for source in node.all_input_nodes if source in self._layouts or source in self.items]
            if not held:
                if node in self._columns:
                    self._column(node)
            elif LOGS in node.meta:
                for source in held:
                    if source not in self._layouts:
                        raise self.items[source][0].dead_end()
                    self._whole[node, source] = self._layouts[source].sharding
            elif node.op == "output":
                names = dict(zip(node.args[0], self._block.sends, strict=True))
                for source in held:  # what forward returns is gathered; what a later block reads must be whole
                    if names[source] not in self._block.returned:
                        raise (self._layouts.get(source) or self.items[source][0]).dead_end()
            elif (rule := _RULES.get(op_name(node))) is None:
                raise DeadEnd(self.columns_of(held))
            elif isinstance(result := rule(self, node), Layout):
                self._layouts[node] = result
            elif result is not None:
                self.items[node] = result

        # Every reader of a sharded weight must have followed its shard, but for logged scalars, which read it whole.
        for weight, (sharding, users, columns) in self._weights.items():
            others = [user for user in weight.users if user not in users]
            if any(LOGS not in user.meta for user in others):
                raise DeadEnd(columns)
            self._whole |= {(user, weight): sharding for user in others}
        # What is not sharded must be drawn alike by all devices, and only dropout can be made to.
        random = [node for node in self._block.code.graph.nodes if is_random(node)]
        sharded = [node for node in random if node in self._layouts]
        if sharded and any(node not in self._layouts and node.target is not DROPOUT for node in random):
            raise DeadEnd(self.columns_of(sharded))
        readers: dict[fx.Node, list[fx.Node]] = {}
        for node, sources in self._entering.items():
            for source in sources:
                readers.setdefault(source, []).append(node)
        return BlockSharding(
            sharded={node.name: layout.sharding for node, layout in self._layouts.items()},
            parameters={self._positions[node]: sharding for node, (sharding, _, _) in self._weights.items()},
            entering={node.name: tuple(n.name for n in sources) for node, sources in self._entering.items()},
            multiplied=frozenset(
                source.name
                for source, nodes in readers.items()
                if all((product := product_of(node)) is not None and product.value is source for node in nodes)
            ),
            sliced={(node.name, source.name): sharding for (node, source), sharding in self._sliced.items()},
            whole={(node.name, source.name): sharding for (node, source), sharding in self._whole.items()},
            reduced=frozenset(node.name for node in self._reduced),
            forward_elements=tuple(self._reduced.values()),
            backward_elements=tuple(math.prod(shape_of(source)) for source in readers),
            random=bool(sharded),
        )

    # Columns, where a sharded dim begins, and rows, where it ends

    def _column(self, node: fx.Node) -> None:
        product = product_of(node)
        if product is None:
            table: Any = node.args[0]
            rows = Sharding(0, (shape_of(table)[0],), self._degree)
            if not rows.size(self._degree - 1):
                raise DeadEnd({node})
            self._weight(table, rows, node, frozenset({node}))
            self._reduced[node] = math.prod(shape_of(node))
            return
        shape = shape_of(node)
        segments = self._columns[node] or shape[-1:]
        layout = Layout(Sharding(len(shape) - 1, segments, self._degree), frozenset({node}))
        if not layout.sharding.size(self._degree - 1):
            raise layout.dead_end()
        self._weight(product.weight, self._on(product.out_dim, layout), product.transpose or node, layout.columns)
        if product.bias is not None:
            self._weight(product.bias, self._on(0, layout), node, layout.columns)
        self.enter(node, product.value)
        self._layouts[node] = layout

    def row(self, node: fx.Node, product: Product, layout: Layout) -> None:
        """Record a product that contracts the sharded dim."""
        if product.weight not in self._positions:
            raise layout.dead_end()
        self._weight(product.weight, self._on(product.in_dim, layout), product.transpose or node, layout.columns)
        self._reduced[node] = math.prod(shape_of(node))

    def cross_entropy(self, node: fx.Node) -> None:
        """Record that each label needs its largest logit, its sum of exponentials and its own logit all-reduced."""
        self._reduced[node] = 3 * math.prod(shape_of(node.args[1]))

    def _on(self, dim: int, layout: Layout) -> Sharding:
        return Sharding(dim, layout.sharding.segments, self._degree)

    def _weight(self, weight: fx.Node, sharding: Sharding, user: fx.Node, columns: frozenset[fx.Node]) -> None:
        before, users, others = self._weights.get(weight, (sharding, set(), frozenset()))
        if before != sharding:
            raise DeadEnd(columns | others)
        self._weights[weight] = (sharding, users | {user}, columns | others)

    # The interface of rules

    def layout(self, node: Any) -> Layout | None:
        """Return the layout of an operand, None if it is whole or no node."""
        return self._layouts.get(node) if isinstance(node, fx.Node) else None

    def operand(self, node: fx.Node) -> Layout:
        """Return the layout of an operation's first operand, which must be sharded."""
        layout = self.layout(node.args[0])
        assert layout is not None
        return layout

    def columns_of(self, nodes: Iterable[Any]) -> frozenset[fx.Node]:
        """Return the columns that the sharded ones of `nodes` come from."""
        known = [node for node in nodes if isinstance(node, fx.Node)]
        layouts = [self._layouts[node] for node in known if node in self._layouts]
        items = [layout for node in known for layout in self.items.get(node, ())]
        return frozenset().union(*(layout.columns for layout in (*layouts, *items)))

    def enter(self, node: fx.Node, source: fx.Node) -> None:
        """Record that `node` reads a whole value, to which it returns only this device's part of the gradient."""
        if source in self._trained:
            self._entering.setdefault(node, {})[source] = None

    def meet(self, node: fx.Node, source: Any, layout: Layout, dim: int) -> None:
        """Check that `source`, another operand of a sharded operation, is sharded alike on its own `dim`, or is whole.

        The operation reads a part of a whole operand, or all of it if it is broadcast along the dim.
        """
        if not isinstance(source, fx.Node) or not isinstance(source.meta.get("val"), torch.Tensor):
            return
        other = self.layout(source)
        if other is not None:
            if other.dim != dim or other.sharding.segments != layout.sharding.segments:
                raise DeadEnd(other.columns | layout.columns)
        elif dim >= len(shape_of(source)):
            raise layout.dead_end()
        elif dim < 0 or shape_of(source)[dim] == 1:
            self.enter(node, source)
        elif shape_of(source)[dim] == sum(layout.sharding.segments):
            self.enter(node, source)
            self._sliced[node, source] = self._on(dim, layout)
        else:
            raise layout.dead_end()


_Result = Layout | tuple[Layout, ...] | None
_Rule = Callable[[Propagation, fx.Node], _Result]
_RULES: dict[str, _Rule] = {}


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    def register(function: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return register


@_rule(
    *names("add sub rsub mul div pow maximum minimum where masked_fill addcmul lerp eq ne lt le gt ge logical_and"),
    *names("logical_or logical_not bitwise_not atan2 gelu relu silu tanh sigmoid hardtanh leaky_relu elu softplus"),
    *names("mish hardswish hardsigmoid celu selu relu6 logsigmoid log_sigmoid softsign threshold neg abs exp log"),
    *names("log1p expm1 sqrt rsqrt reciprocal sin cos erf square sign clamp clamp_min clamp_max dropout to _to_copy"),
    *names("type_as contiguous clone detach alias zeros_like ones_like full_like"),
)
def _elementwise(p: Propagation, node: fx.Node) -> _Result:
    """Follow operations on operands that are aligned at their last dims; a whole one is read in part."""
    rank = len(shape_of(node))
    aligned = [
        operand.at(operand.dim + rank - len(shape_of(source)))
        for source in node.all_input_nodes
        if (operand := p.layout(source)) is not None
    ]
    result = aligned[0]
    if shape_of(node)[result.dim] != sum(result.sharding.segments):
        raise DeadEnd(p.columns_of(node.all_input_nodes))
    for source in node.all_input_nodes:
        p.meet(node, source, result, result.dim - rank + len(shape_of(source)))
    return Layout(result.sharding, p.columns_of(node.all_input_nodes))


@_rule("view", "reshape", "_unsafe_view", "flatten", "unflatten")
def _view(p: Propagation, node: fx.Node) -> _Result:
    """Follow splits and merges of dims; the outermost part of a split dim is sharded."""
    layout = p.operand(node)
    before, after, dim, segments = shape_of(node.args[0]), shape_of(node), layout.dim, layout.sharding.segments
    if not all(isinstance(size, int) for size in (*before, *after)):
        raise layout.dead_end()
    outer, through = math.prod(before[:dim]), math.prod(before[: dim + 1])
    ends = [math.prod(after[: o + 1]) for o in range(len(after))]
    at = next((o for o, end in enumerate(ends) if end > outer), None)
    if at is None:
        raise layout.dead_end()
    start = ends[at] // after[at]
    if outer % start:
        raise layout.dead_end()
    lead = outer // start
    if ends[at] % through == 0:  # the dim stays as it is, or is merged with its neighbours
        inner = ends[at] // through
        return layout.at(at, [segment * inner for segment in segments] * lead)
    if lead > 1 or through % ends[at]:
        raise layout.dead_end()
    # The dim is split, and dim `at` is its outermost part.
    degree, size, count, whole = layout.sharding.degree, after[at], len(segments), sum(segments)
    if len(set(segments)) > 1:
        raise layout.dead_end()
    if size % count == 0 and (size // count) % degree == 0:
        return layout.at(at, [size // count] * count)
    if size == count:  # the segments become a dim of their own; the dim after it is sharded
        following = next((o for o in range(at + 1, len(after)) if after[o] > 1), None)
        if following is not None and after[following] % degree == 0 and segments[0] % after[following] == 0:
            return layout.at(following, [after[following]])
        raise layout.dead_end()
    raise layout.dead_end([whole // size] * size if count == 1 and size < whole else None)


@_rule(*MOVED - {"expand_as"}, "slice")
def _move(p: Propagation, node: fx.Node) -> _Result:
    """Follow operations that only move dims, or that work along another one."""
    layout = p.operand(node)
    dim = moved_dim(node, layout.dim)
    if dim is None and op_name(node) == "slice" and shape_of(node) == shape_of(node.args[0]):
        return layout
    if dim is None:
        raise layout.dead_end()
    return (layout.at(dim),) * len(node.meta["val"]) if op_name(node) == "unbind" else layout.at(dim)


@_rule("squeeze")
def _squeeze(p: Propagation, node: fx.Node) -> _Result:
    layout, shape = p.operand(node), shape_of(node.args[0])
    if len(node.args) < 2:
        raise layout.dead_end()
    return layout.at(layout.dim - sum(dim < layout.dim and shape[dim] == 1 for dim in _dims(node.args[1], len(shape))))


def _dims(given: Any, rank: int) -> set[int]:
    """Return the dims that an argument, an int or a list of them, names."""
    return {dim % rank for dim in ([given] if isinstance(given, int) else given)}


@_rule("split", "split_with_sizes", "chunk")
def _split(p: Propagation, node: fx.Node) -> _Result:
    """Split along the sharded dim only between segments: the parts of a fused product."""
    layout = p.operand(node)
    dim = arguments_of(node)["dim"] % len(shape_of(node.args[0]))
    sizes = [int(value.shape[dim]) for value in node.meta["val"]]
    if dim != layout.dim:
        return (layout,) * len(sizes)
    remaining, parts = list(layout.sharding.segments), []
    for size in sizes:
        taken: list[int] = []
        while remaining and sum(taken) < size:
            taken.append(remaining.pop(0))
        if sum(taken) != size:
            raise layout.dead_end(sizes if len(layout.sharding.segments) == 1 else None)
        parts.append(layout.at(dim, taken))
    return tuple(parts)


@_rule("getitem")
def _getitem(p: Propagation, node: fx.Node) -> _Result:
    source, index = cast(Any, node.args)
    return cast(Layout, p.items[source][index])


@_rule("cat", "stack")
def _cat(p: Propagation, node: fx.Node) -> _Result:
    tensors: Any = node.args[0]
    layout = next(operand for tensor in tensors if (operand := p.layout(tensor)) is not None)
    dim, stacked = arguments_of(node)["dim"] % len(shape_of(node)), op_name(node) == "stack"
    if dim == layout.dim and not stacked:
        raise DeadEnd(p.columns_of(tensors))
    for tensor in tensors:
        p.meet(node, tensor, layout, layout.dim)
    return Layout(layout.at(layout.dim + (stacked and dim <= layout.dim)).sharding, p.columns_of(tensors))


@_rule("mean", "sum", "amax", "amin", "var", "std", "linalg_vector_norm", "logsumexp", "all", "any")
def _reduction(p: Propagation, node: fx.Node) -> _Result:
    """Follow reductions over dims other than the sharded one."""
    layout, rank, given = p.operand(node), len(shape_of(node.args[0])), arguments_of(node).get("dim")
    dims = set[int]() if given is None else _dims(given, rank)
    if layout.dim in dims or not dims:
        raise layout.dead_end()
    removed = sum(dim < layout.dim for dim in dims) if len(shape_of(node)) < rank else 0
    return layout.at(layout.dim - removed)


@_rule("layer_norm", "rms_norm")
def _norm(p: Propagation, node: fx.Node) -> _Result:
    """Follow norms over trailing dims that are whole (a norm of each head)."""
    source: Any = node.args[0]
    layout, over = p.layout(source), node.args[1]
    assert isinstance(over, (list, tuple))
    if layout is None or layout.dim >= len(shape_of(source)) - len(over):
        raise DeadEnd(p.columns_of(node.all_input_nodes))
    weights = node.all_input_nodes[1:]
    if any(p.layout(weight) is not None for weight in weights):
        raise DeadEnd(p.columns_of(node.all_input_nodes))
    for weight in weights:
        p.enter(node, weight)
    return layout


@_rule("linear", "addmm", "mm", "matmul", "bmm", GROUPED_MATMUL)
def _matmul(p: Propagation, node: fx.Node) -> _Result:
    """Shard a weight, or each expert's; the rows that experts read stay whole, since they are sorted by expert."""
    product = product_of(node)
    if product is None and len(node.args) == 2:
        return _batched_product(p, node)
    layout = p.layout(product.value) if product is not None else None
    if product is None or layout is None or any(p.layout(operand) for operand in (product.weight, product.bias)):
        raise DeadEnd(p.columns_of(node.all_input_nodes))
    if layout.dim == len(shape_of(product.value)) - 1:
        p.row(node, product, layout)
        return None
    if product.experts:
        raise layout.dead_end()
    p.enter(node, product.weight)  # all heads share the weight, and each device has the gradient of its own heads
    if product.bias is not None:
        p.enter(node, product.bias)
    return layout


def _batched_product(p: Propagation, node: fx.Node) -> _Result:
    """Follow the two products of written-out attention, where heads are a batch dim."""
    left: Any
    right: Any
    left, right = node.args
    rank = len(shape_of(node))
    if len(shape_of(left)) < 2 or len(shape_of(right)) < 2:
        raise DeadEnd(p.columns_of((left, right)))
    for source, other, own in ((left, right, 2), (right, left, 1)):
        layout = p.layout(source)
        if layout is None:
            continue
        from_end = len(shape_of(source)) - layout.dim
        result = layout.at(rank - from_end)
        if from_end > 2:
            p.meet(node, other, layout, len(shape_of(other)) - from_end)
            return Layout(result.sharding, p.columns_of((left, right)))
        if from_end == own and p.layout(other) is None:  # rows of the left, columns of the right
            p.enter(node, other)
            return result
        raise DeadEnd(p.columns_of((left, right)))
    raise AssertionError("one operand is sharded")


@_rule("scaled_dot_product_attention")
def _attention(p: Propagation, node: fx.Node) -> _Result:
    """Follow whole heads; a mask of each head is read in part, a key shared by all heads (multi-query) whole."""
    query, *others = node.args[:3]
    layout = p.layout(query)
    columns = p.columns_of(node.all_input_nodes)
    rank = len(shape_of(query))
    if layout is None or layout.dim != rank - 3 or not layout.sharding.even:
        raise DeadEnd(columns)
    for other in others:
        operand = p.layout(other)
        if operand is not None and (operand.dim != layout.dim or not operand.sharding.even):
            raise DeadEnd(columns)
        if operand is None:
            p.meet(node, other, layout, layout.dim)
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    if isinstance(mask, fx.Node):
        p.meet(node, mask, layout, layout.dim - rank + len(shape_of(mask)))
    return Layout(layout.sharding, columns)


@_rule("cross_entropy_loss")
def _cross_entropy(p: Propagation, node: fx.Node) -> _Result:
    given = arguments_of(node)
    logits, target = given["self"], given["target"]
    layout = p.layout(logits)
    if layout is None or node.kwargs or given["weight"] is not None or given["label_smoothing"]:
        raise DeadEnd(p.columns_of(node.all_input_nodes))
    over_classes = layout.dim == 1 and len(shape_of(logits)) == 2 and len(layout.sharding.segments) == 1
    if not over_classes or not holds_integers(target):
        raise layout.dead_end()
    p.cross_entropy(node)
    return None


# The search: all columns are tried, and those are given up that lead to a dead end.


def plan_tensor_parallel(graph: Graph, degree: int) -> ModelSharding:
    """Return the largest consistent sharding: a parameter that two blocks would shard differently stays whole."""
    if degree == 1:
        return ModelSharding({}, tuple(BlockSharding() for _ in graph.blocks))
    firsts: dict[str, Block] = {}
    for block in graph.blocks:
        firsts.setdefault(block.block_type, block)
    excluded: dict[str, set[int]] = {block_type: set() for block_type in firsts}
    while True:
        by_type = {key: _shard_block(block, degree, excluded[key]) for key, block in firsts.items()}
        uses: defaultdict[str, set[Sharding | None]] = defaultdict(set)
        for block in graph.blocks:
            for position, name in enumerate(block.parameters):
                uses[name].add(by_type[block.block_type].parameters.get(position))
        inconsistent = {  # parameters that are sharded in a block and treated otherwise elsewhere
            (block.block_type, position)
            for block in graph.blocks
            for position in by_type[block.block_type].parameters
            if len(uses[block.parameters[position]]) > 1
        }
        if not inconsistent:
            break
        for block_type, position in inconsistent:
            excluded[block_type].add(position)
    blocks = tuple(by_type[block.block_type] for block in graph.blocks)
    parameters = {
        block.parameters[position]: sharding
        for block, shardings in zip(graph.blocks, blocks, strict=True)
        for position, sharding in shardings.parameters.items()
    }
    return ModelSharding(parameters, blocks)


def _shard_block(block: Block, degree: int, excluded: set[int]) -> BlockSharding:
    """Try to shard all columns; as long as one leads to a dead end, give it up and try again."""
    parameters = {node: i for i, node in enumerate(block.parameter_nodes) if i not in excluded}
    # Candidates are the products with a weight, and the lookup in an embedding that is most of the block's embeddings.
    columns: dict[fx.Node, tuple[int, ...] | None] = {}
    tables = [n.args[0] for n in block.code.graph.nodes if n.target is EMBEDDING and n.args[0] in parameters]
    table_elements = sum(math.prod(shape_of(table)) for table in set(tables))
    for node in block.code.graph.nodes:
        product = product_of(node)
        if product is not None:
            if product.weight in parameters and (product.bias is None or product.bias in parameters):
                columns[node] = None
        elif node.target is EMBEDDING and node.args[0] in parameters:
            scales_by_frequency = len(node.args) > 3 and bool(node.args[3])
            if 2 * math.prod(shape_of(node.args[0])) > table_elements and not scales_by_frequency:
                columns[node] = None
    while True:
        try:
            return Propagation(block, degree, parameters, columns).run()
        except DeadEnd as end:
            for column in end.columns:
                width = shape_of(column)[-1]
                if end.segments is not None and columns[column] is None and width == sum(end.segments):
                    columns[column] = end.segments
                else:
                    del columns[column]
