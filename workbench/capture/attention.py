"""Attention as one operation, and masks that mask nothing removed: what lets the fast kernels run.

Exported `transformers` models carry a mask even where every position may be attended, because under tracing they do
not look at its values; a mask keeps scaled-dot-product attention off its flash kernels. And some models write
attention out as matmul, softmax, dropout, matmul, which stores scores quadratic in the sequence length. Some append
keys and values to an empty cache. All are rewritten here to what they compute. Nothing else of the model changes, and
a mask that depends on the batch stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from workbench.capture.dataflow import ATTENTION
from workbench.capture.regions import regions_of

aten = torch.ops.aten
_MASKED_BELOW = -1e9
"""Additive masks use at most this where a position may not be attended."""


def simplify_attention(module: fx.GraphModule) -> None:
    """Fuse written-out attention and drop constant masks, in place."""
    _make_dropout_explicit(module.graph)
    _drop_empty_caches(module.graph)
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is aten.matmul.default:
            _fuse(module.graph, node)
    constants: dict[fx.Node, _Mask | None] = {}
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is ATTENTION:
            _give_heads(module.graph, node)
            _simplify_mask(node, constants)
    module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output") or _writes(node))
    module.recompile()


@dataclass(frozen=True)
class _Mask:
    """What a constant mask amounts to."""

    nothing: bool
    causal: bool


@dataclass(frozen=True)
class _Attention:
    """`dropout(softmax(query @ keyᵀ * scale + mask)) @ value`."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: fx.Node | None
    dropout: float
    scale: float


def _fuse(graph: fx.Graph, output: fx.Node) -> None:
    found = _matched(output)
    if found is None:
        return
    with graph.inserting_before(output):
        fused = graph.call_function(
            ATTENTION, (found.query, found.key, found.value, found.mask, found.dropout), {"scale": found.scale}
        )
    fused.meta = dict(output.meta)
    output.replace_all_uses_with(fused)
    graph.erase_node(output)


def _matched(output: fx.Node) -> _Attention | None:
    """Read the pattern backwards from its last product; None where anything differs from it."""

    def is_step(node: Any, *targets: Any) -> bool:
        """In the same regions as the product: a softmax under `no_grad` has no gradient."""
        return _is(node, *targets) and not node.kwargs and regions_of(node) == regions_of(output)

    weights: Any
    value: Any
    weights, value = output.args[:2]
    dropout = 0.0
    if is_step(weights, aten.dropout.default):
        dropout = float(weights.args[1]) if weights.args[2] else 0.0
        weights = weights.args[0]
    if not is_step(weights, aten.softmax.int) or weights.args[1] not in (-1, 3) or len(weights.args) > 2:
        return None
    scores: Any = weights.args[0]
    mask: Any = None
    if is_step(scores, aten.add.Tensor):
        scores, mask = scores.args[:2]
        if not isinstance(mask, fx.Node) or not _is_constant(mask):
            return None
    scale = 1.0
    if is_step(scores, aten.div.Tensor, aten.mul.Tensor) and isinstance(scores.args[1], int | float):
        scale = 1 / scores.args[1] if scores.target is aten.div.Tensor else float(scores.args[1])
        scores = scores.args[0]
    if not is_step(scores, aten.matmul.default):
        return None
    query: Any
    transposed: Any
    query, transposed = scores.args[:2]
    if not is_step(transposed, aten.transpose.int) or {_dim(transposed, 1), _dim(transposed, 2)} != {2, 3}:
        return None
    key: Any = transposed.args[0]
    if any(not isinstance(node, fx.Node) or _rank(node) != 4 for node in (query, key, value)):
        return None
    if len({tuple(node.meta["val"].shape[:2]) for node in (query, key, value)}) > 1:
        return None  # products broadcast samples and heads; attention kernels do not
    return _Attention(query, key, value, mask, dropout, scale)


def _is(node: Any, *targets: Any) -> bool:
    """A call of one of the targets whose result goes to one place only."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets and len(node.users) == 1


def _dim(node: fx.Node, position: int) -> int:
    dim = node.args[position]
    assert isinstance(dim, int)
    return dim % 4


def _rank(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else -1


def _make_dropout_explicit(graph: fx.Graph) -> None:
    """A dropout of rate 0 is the identity; without it, patterns are the same for every rate."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.dropout.default and node.args[1] == 0:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _drop_empty_caches(graph: fx.Graph) -> None:
    """What is appended to nothing is itself: keys and values of `transformers` models, whose default is a cache."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.cat.default:
            tensors: Any = node.args[0]
            filled = [tensor for tensor in tensors if tuple(tensor.meta["val"].shape) != (0,)]
            if len(filled) == 1 and filled[0].meta["val"].dtype == node.meta["val"].dtype:
                node.replace_all_uses_with(filled[0])
                graph.erase_node(node)


def _give_heads(graph: fx.Graph, attention: fx.Node) -> None:
    """Attention without a dim of heads has one head: kernels and the rest of us know four dims."""

    def viewed(operand: Any, operation: Any) -> Any:
        if not isinstance(operand, fx.Node) or _rank(operand) < 3:
            return operand
        view = graph.call_function(operation, (operand, 1))
        value = operand.meta["val"]
        changed = value.unsqueeze(1) if operation is aten.unsqueeze.default else value.squeeze(1)
        view.meta = {**attention.meta, "val": changed}
        return view

    if any(not isinstance(operand, fx.Node) or _rank(operand) != 3 for operand in attention.args[:3]):
        return
    with graph.inserting_before(attention):
        attention.args = tuple(viewed(operand, aten.unsqueeze.default) for operand in attention.args)
        if "attn_mask" in attention.kwargs:
            attention.update_kwarg("attn_mask", viewed(attention.kwargs["attn_mask"], aten.unsqueeze.default))
    attention.meta = {**attention.meta, "val": attention.meta["val"].unsqueeze(1)}
    with graph.inserting_after(attention):
        result = viewed(attention, aten.squeeze.dim)
    attention.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)


def _simplify_mask(attention: fx.Node, constants: dict[fx.Node, _Mask | None]) -> None:
    mask = attention.args[3] if len(attention.args) > 3 else attention.kwargs.get("attn_mask")
    if not isinstance(mask, fx.Node):
        return
    if mask not in constants:
        constants[mask] = _examined(mask)
    found = constants[mask]
    if found is None or not (found.nothing or found.causal):
        return
    query, key, value = attention.args[:3]
    dropout = attention.args[4] if len(attention.args) > 4 else attention.kwargs.get("dropout_p", 0.0)
    others = {name: item for name, item in attention.kwargs.items() if name not in ("attn_mask", "dropout_p")}
    attention.args = (query, key, value, None, dropout, not found.nothing)
    attention.kwargs = {name: item for name, item in others.items() if name != "is_causal"}


def _examined(mask: fx.Node) -> _Mask | None:
    """Compute a mask that depends on nothing, and see what it masks."""
    if not _is_constant(mask):
        return None
    value = _computed(mask)
    allowed = value if value.dtype == torch.bool else _allowed(value)
    if allowed is None or allowed.dim() < 2:
        return None
    causal = torch.ones(allowed.shape[-2:], dtype=torch.bool).tril()
    return _Mask(nothing=bool(allowed.all()), causal=bool((allowed == causal).all()))


def _allowed(additive: torch.Tensor) -> torch.Tensor | None:
    """Where an additive mask of zeros and very negative numbers lets attention through."""
    zero, masked = additive == 0, additive <= _MASKED_BELOW
    return zero if bool((zero | masked).all()) else None


def _is_constant(node: fx.Node) -> bool:
    return all(source.op == "call_function" and not _draws(source) for source in _sources(node))


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _draws(node: fx.Node) -> bool:
    return any(word in str(node.target) for word in ("rand", "dropout", "bernoulli", "normal", "empty"))


def _sources(node: fx.Node) -> list[fx.Node]:
    """The node and everything that it is computed from, in order."""
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        found = stack.pop()
        if found not in seen:
            seen.add(found)
            stack.extend(found.all_input_nodes)
    return [candidate for candidate in node.graph.nodes if candidate in seen]


def _computed(node: fx.Node) -> torch.Tensor:
    """The value of a node of constants, on the CPU whatever device it was captured for."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for source in _sources(node):
        copies[source] = graph.node_copy(source, lambda argument: copies[argument])
        copies[source].args = _on_cpu(copies[source].args)
        copies[source].kwargs = _on_cpu(copies[source].kwargs)
    graph.output(copies[node])
    with torch.no_grad(), torch.device("cpu"):
        value = fx.GraphModule({}, graph)()
    assert isinstance(value, torch.Tensor)
    return value


def _on_cpu(arguments: Any) -> Any:
    def moved(value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) else value

    return fx.node.map_aggregate(arguments, moved)
