"""Rules for each operation on a sharded dim: they carry it from columns to rows.

A rule returns the layout of its operation's result, the layouts of several results, or None where the sharding ends.
It raises `DeadEnd` if the dim cannot be followed. An operation without a rule is a dead end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from workbench.capture.graph import Block
from workbench.capture.operations import (
    DROPOUT,
    GROUPED_MATMUL,
    arguments_of,
    holds_integers,
    is_random,
    reachable,
    schema_of,
    shape_of,
)
from workbench.capture.tensor_sharding import BlockSharding, Product, Sharding, product_of


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
        self._items: dict[fx.Node, tuple[Layout, ...]] = {}
        self._weights: dict[fx.Node, tuple[Sharding, set[fx.Node], frozenset[fx.Node]]] = {}
        self._entering: dict[fx.Node, dict[fx.Node, None]] = {}
        self._sliced: dict[tuple[fx.Node, fx.Node], Sharding] = {}
        self._reduced: dict[fx.Node, int] = {}
        self._trained = _trained(block)

    def run(self) -> BlockSharding:
        """Return the sharding of the block; raises `DeadEnd` with the columns to give up."""
        for node in self._block.code.graph.nodes:
            self._visit(node)
        for weight, (_, users, columns) in self._weights.items():
            if set(weight.users) != users:
                raise DeadEnd(columns)
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
                source.name for source in readers if all(_multiplies(node, source) for node in readers[source])
            ),
            sliced={(node.name, source.name): sharding for (node, source), sharding in self._sliced.items()},
            reduced=frozenset(node.name for node in self._reduced),
            forward_elements=tuple(self._reduced.values()),
            backward_elements=tuple(math.prod(shape_of(source)) for source in readers),
            random=bool(sharded),
        )

    def _visit(self, node: fx.Node) -> None:
        sharded = [source for source in node.all_input_nodes if source in self._layouts or source in self._items]
        if not sharded:
            if node in self._columns:
                self._column(node)
            return
        if node.op == "output":
            sent: Any = node.args[0]
            names = dict(zip(sent, self._block.sends, strict=True))
            for source in sharded:  # what forward returns is gathered; what a later block reads must be whole
                if names[source] not in self._block.returned:
                    raise (self._layouts.get(source) or self._items[source][0]).dead_end()
            return
        rule = _RULES.get(_name(node))
        if rule is None:
            raise DeadEnd(self.columns_of(sharded))
        result = rule(self, node)
        if isinstance(result, Layout):
            self._layouts[node] = result
        elif result is not None:
            self._items[node] = result

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
        known, users, others = self._weights.get(weight, (sharding, set(), frozenset()))
        if known != sharding:
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

    def items(self, node: Any) -> tuple[Layout, ...]:
        return self._items[node]

    def columns_of(self, nodes: Iterable[Any]) -> frozenset[fx.Node]:
        """Return the columns that the sharded ones of `nodes` come from."""
        known = [node for node in nodes if isinstance(node, fx.Node)]
        layouts = [self._layouts[node] for node in known if node in self._layouts]
        items = [layout for node in known for layout in self._items.get(node, ())]
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


def _multiplies(node: fx.Node, value: fx.Node) -> bool:
    product = product_of(node)
    return product is not None and product.value is value


def _trained(block: Block) -> set[fx.Node]:
    """Return the nodes that a gradient may flow to: those that descend from parameters and received values."""
    placeholders = [node for node in block.code.graph.nodes if node.op == "placeholder"]
    first = len(block.parameters) + len(block.buffers)
    start = (*placeholders[: len(block.parameters)], *placeholders[first : first + len(block.receives)])
    reached = reachable(start, lambda node: (user for user in node.users if not holds_integers(user)))
    return {node for node in reached if not holds_integers(node)}


def _name(node: fx.Node) -> str:
    """Return an operation's name without namespace and overload: `aten.add.Tensor` -> `add`."""
    schema = schema_of(node)
    if schema is not None:
        namespace, _, name = schema.name.partition("::")
        return name if namespace == "aten" else f"{namespace}::{name}"
    return str(getattr(node.target, "__name__", node.target))


_Result = Layout | tuple[Layout, ...] | None
_Rule = Callable[[Propagation, fx.Node], _Result]
_RULES: dict[str, _Rule] = {}


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    def register(function: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return register


@_rule(
    *("add", "sub", "rsub", "mul", "div", "pow", "maximum", "minimum", "where", "masked_fill", "addcmul", "lerp"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "bitwise_not", "atan2"),
    *("gelu", "relu", "silu", "tanh", "sigmoid", "hardtanh", "leaky_relu", "elu", "softplus", "mish", "hardswish"),
    *("hardsigmoid", "celu", "selu", "relu6", "logsigmoid", "log_sigmoid", "softsign", "threshold"),
    *("neg", "abs", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "erf", "square"),
    *("sign", "clamp", "clamp_min", "clamp_max", "dropout", "to", "_to_copy", "type_as", "contiguous", "clone"),
    *("detach", "alias", "zeros_like", "ones_like", "full_like"),
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
    return _split_dim(layout, after, at)


def _split_dim(layout: Layout, after: tuple[int, ...], at: int) -> Layout:
    """Return the layout of a view whose dim `at` is the outermost part of the sharded dim."""
    segments, degree, size = layout.sharding.segments, layout.sharding.degree, after[at]
    if len(set(segments)) > 1:
        raise layout.dead_end()
    count = len(segments)
    if size % count == 0 and (size // count) % degree == 0:
        return layout.at(at, [size // count] * count)
    if size == count:  # the segments become a dim of their own; the dim after it is sharded
        following = next((o for o in range(at + 1, len(after)) if after[o] > 1), None)
        if following is not None and after[following] % degree == 0 and segments[0] % after[following] == 0:
            return layout.at(following, [after[following]])
        raise layout.dead_end()
    whole = sum(segments)
    raise layout.dead_end([whole // size] * size if count == 1 and size < whole else None)


@_rule("expand")
def _expand(p: Propagation, node: fx.Node) -> _Result:
    layout = p.operand(node)
    return layout.at(layout.dim + len(shape_of(node)) - len(shape_of(node.args[0])))


@_rule("transpose", "permute", "t", "mT", "swapaxes")
def _permute(p: Propagation, node: fx.Node) -> _Result:
    layout, rank = p.operand(node), len(shape_of(node))
    if _name(node) == "permute":
        dims: Any = node.args[1]
        return layout.at([dim % rank for dim in dims].index(layout.dim))
    pair: Any = node.args[1:3] if len(node.args) > 2 else (-1, -2)
    first, second = (dim % rank for dim in pair)
    return layout.at({first: second, second: first}.get(layout.dim, layout.dim))


@_rule("unsqueeze")
def _unsqueeze(p: Propagation, node: fx.Node) -> _Result:
    layout = p.operand(node)
    return layout.at(layout.dim + (_dim(node, 1, rank=len(shape_of(node))) <= layout.dim))


@_rule("squeeze")
def _squeeze(p: Propagation, node: fx.Node) -> _Result:
    layout, shape = p.operand(node), shape_of(node.args[0])
    if len(node.args) < 2:
        raise layout.dead_end()
    removed = (dim for dim in _dims(node.args[1], len(shape)) if dim < layout.dim and shape[dim] == 1)
    return layout.at(layout.dim - sum(1 for _ in removed))


def _dims(given: Any, rank: int) -> set[int]:
    """Return the dims that an argument, an int or a list of them, names."""
    return {dim % rank for dim in ([given] if isinstance(given, int) else given)}


def _dim(node: fx.Node, position: int, rank: int) -> int:
    """Return the dim that the argument at `position` names, which is 0 by default."""
    given: Any = node.args[position] if len(node.args) > position else 0
    return int(given % rank)


def _other_dim(layout: Layout, node: fx.Node, position: int = 1) -> int:
    """Return the dim that an operation works along; raise `DeadEnd` if it is the sharded one."""
    dim = _dim(node, position, rank=len(shape_of(node.args[0])))
    if dim == layout.dim:
        raise layout.dead_end()
    return dim


@_rule("slice")
def _slice(p: Propagation, node: fx.Node) -> _Result:
    layout = p.operand(node)
    if shape_of(node) != shape_of(node.args[0]):
        _other_dim(layout, node)
    return layout


@_rule("select")
def _select(p: Propagation, node: fx.Node) -> _Result:
    layout = p.operand(node)
    return layout.at(layout.dim - (_other_dim(layout, node) < layout.dim))


@_rule("unbind")
def _unbind(p: Propagation, node: fx.Node) -> _Result:
    layout = p.operand(node)
    dim = _other_dim(layout, node)
    return (layout.at(layout.dim - (dim < layout.dim)),) * shape_of(node.args[0])[dim]


@_rule("split", "split_with_sizes", "chunk")
def _split(p: Propagation, node: fx.Node) -> _Result:
    """Split along the sharded dim only between segments: the parts of a fused product."""
    layout = p.operand(node)
    dim = _dim(node, 2, rank=len(shape_of(node.args[0])))
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
    index: Any = node.args[1]
    layout: Layout = p.items(node.args[0])[index]
    return layout


@_rule("cat", "stack")
def _cat(p: Propagation, node: fx.Node) -> _Result:
    tensors: Any = node.args[0]
    layout = next(operand for tensor in tensors if (operand := p.layout(tensor)) is not None)
    dim = _dim(node, 1, rank=len(shape_of(node)))
    stacked = _name(node) == "stack"
    if dim == layout.dim and not stacked:
        raise DeadEnd(p.columns_of(tensors))
    for tensor in tensors:
        p.meet(node, tensor, layout, layout.dim)
    return Layout(layout.at(layout.dim + (stacked and dim <= layout.dim)).sharding, p.columns_of(tensors))


@_rule("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum")
def _along_one_dim(p: Propagation, node: fx.Node) -> _Result:
    layout = p.operand(node)
    _other_dim(layout, node)
    return layout


@_rule("mean", "sum", "amax", "amin", "var", "std", "linalg_vector_norm", "logsumexp", "all", "any")
def _reduction(p: Propagation, node: fx.Node) -> _Result:
    """Follow reductions over dims other than the sharded one."""
    layout, rank = p.operand(node), len(shape_of(node.args[0]))
    position = 2 if _name(node) == "linalg_vector_norm" else 1
    given: Any = node.args[position] if len(node.args) > position else node.kwargs.get("dim")
    if given is None or isinstance(given, bool):
        raise layout.dead_end()
    dims = _dims(given, rank)
    if layout.dim in dims or not dims:
        raise layout.dead_end()
    removed = sum(1 for dim in dims if dim < layout.dim) if len(shape_of(node)) < rank else 0
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


@_rule(GROUPED_MATMUL)
def _experts(p: Propagation, node: fx.Node) -> _Result:
    """Shard each expert's matrix as a layer's; the dim of rows stays whole, since they are sorted by expert."""
    product = product_of(node)
    assert product is not None
    layout = p.layout(product.value)
    if layout is None or layout.dim != 1:
        raise DeadEnd(p.columns_of(node.all_input_nodes))
    p.row(node, product, layout)
    return None


@_rule("linear", "addmm", "mm", "matmul", "bmm")
def _matmul(p: Propagation, node: fx.Node) -> _Result:
    product = product_of(node)
    if product is None and len(node.args) == 2:
        return _batched_product(p, node)
    layout = p.layout(product.value) if product is not None else None
    if product is None or layout is None or any(p.layout(operand) for operand in (product.weight, product.bias)):
        raise DeadEnd(p.columns_of(node.all_input_nodes))
    if layout.dim == len(shape_of(product.value)) - 1:
        p.row(node, product, layout)
        return None
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
