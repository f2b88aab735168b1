"""Rewrites that let attention run on its fast kernels: written-out attention is fused, useless masks are removed.

Exported `transformers` models carry a mask even where every position may be attended, because they do not look at its
values under tracing; a mask keeps scaled-dot-product attention off its flash kernels. Some models write attention out
as matmul, softmax, dropout, matmul, which stores scores quadratic in the sequence length. Some append keys and values
to an empty cache. All are rewritten to what they compute. A mask that depends on the batch stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from workbench.capture.context_managers import regions_of
from workbench.capture.operations import (
    ATTENTION,
    ancestors,
    copy_nodes,
    dtype_of,
    replace_call,
    retarget,
    schema_of,
    shape_of,
)

aten = torch.ops.aten
_MASKED_BELOW = -1e9
"""Largest number with which additive masks forbid a position."""
_DRAWS = ("rand", "dropout", "bernoulli", "normal", "empty")
"""Parts of the names of operations whose results differ between two calls."""


def simplify_attention(module: fx.GraphModule) -> None:
    """Fuse written-out attention and remove masks that mask nothing, in place."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=aten.dropout.default):
        if node.args[1] == 0:  # without it, the patterns below are the same for every rate
            _replace_by(node, node.args[0])
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        # Keys and values of `transformers` models, which append to a cache by default.
        filled = [tensor for tensor in node.args[0] if shape_of(tensor) != (0,)]
        if len(filled) == 1 and dtype_of(filled[0]) == dtype_of(node):
            _replace_by(node, filled[0])
    for node in graph.find_nodes(op="call_function", target=aten.matmul.default):
        _fuse(node)
    examined: dict[fx.Node, bool | None] = {}
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        _add_head_dim(graph, node)
        _simplify_mask(node, examined)

    def is_impure(node: fx.Node) -> bool:
        schema = schema_of(node)
        return node.op in ("placeholder", "output") or (schema is not None and schema.is_mutable)

    graph.eliminate_dead_code(is_impure_node=is_impure)


def _replace_by(node: fx.Node, other: Any) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _fuse(output: fx.Node) -> None:
    """Replace `dropout(softmax(query @ keyᵀ * scale + mask)) @ value` by one operation.

    The pattern is read backwards from its last product; where anything differs from it, nothing is replaced.
    """

    def is_step(node: Any, *targets: Any) -> bool:
        """Return True for a call of a target with one user, in the same regions (`no_grad`) as the product."""
        is_call = isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets
        return is_call and len(node.users) == 1 and not node.kwargs and regions_of(node) == regions_of(output)

    weights: Any
    value: Any
    weights, value = output.args[:2]
    dropout, scale, mask = 0.0, 1.0, None
    if is_step(weights, aten.dropout.default):
        dropout = float(weights.args[1]) if weights.args[2] else 0.0
        weights = weights.args[0]
    if not is_step(weights, aten.softmax.int) or weights.args[1] not in (-1, 3) or len(weights.args) > 2:
        return
    scores = weights.args[0]
    if is_step(scores, aten.add.Tensor):
        scores, mask = scores.args[:2]
        if not isinstance(mask, fx.Node) or not _is_constant(mask):
            return
    if is_step(scores, aten.div.Tensor, aten.mul.Tensor) and isinstance(scores.args[1], int | float):
        scale = 1 / scores.args[1] if scores.target is aten.div.Tensor else float(scores.args[1])
        scores = scores.args[0]
    if not is_step(scores, aten.matmul.default):
        return
    query, transposed = scores.args[:2]
    if not is_step(transposed, aten.transpose.int) or {dim % 4 for dim in transposed.args[1:3]} != {2, 3}:
        return
    key = transposed.args[0]
    shapes = [shape_of(node) for node in (query, key, value)]
    # Products broadcast samples and heads; attention kernels do not.
    if any(len(shape) != 4 for shape in shapes) or len({shape[:2] for shape in shapes}) > 1:
        return
    replace_call(output, ATTENTION, (query, key, value, mask, dropout), {"scale": scale})


def _add_head_dim(graph: fx.Graph, attention: fx.Node) -> None:
    """Give attention on three dims a fourth, of one head, which kernels and the rest of this package expect."""

    def viewed(operand: Any, operation: Any) -> Any:
        if len(shape_of(operand)) < 3:
            return operand
        view = graph.call_function(operation, (operand, 1))
        value = operand.meta["val"]
        changed = value.unsqueeze(1) if operation is aten.unsqueeze.default else value.squeeze(1)
        view.meta = {**attention.meta, "val": changed}
        return view

    if any(len(shape_of(operand)) != 3 for operand in attention.args[:3]):
        return
    with graph.inserting_before(attention):
        attention.args = tuple(viewed(operand, aten.unsqueeze.default) for operand in attention.args)
        if "attn_mask" in attention.kwargs:
            attention.update_kwarg("attn_mask", viewed(attention.kwargs["attn_mask"], aten.unsqueeze.default))
    attention.meta = {**attention.meta, "val": attention.meta["val"].unsqueeze(1)}
    with graph.inserting_after(attention):
        result = viewed(attention, aten.squeeze.dim)
    attention.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)


def _simplify_mask(attention: fx.Node, examined: dict[fx.Node, bool | None]) -> None:
    """Replace a constant mask that masks nothing, or only later positions, by the flag `is_causal`."""
    mask = attention.args[3] if len(attention.args) > 3 else attention.kwargs.get("attn_mask")
    if not isinstance(mask, fx.Node):
        return
    if mask not in examined:
        examined[mask] = _is_causal(mask)
    is_causal = examined[mask]
    if is_causal is None:
        return
    dropout = attention.args[4] if len(attention.args) > 4 else attention.kwargs.get("dropout_p", 0.0)
    attention.args = (*attention.args[:3], None, dropout, is_causal)
    replaced = ("attn_mask", "dropout_p", "is_causal")
    attention.kwargs = {name: item for name, item in attention.kwargs.items() if name not in replaced}


def _is_causal(mask: fx.Node) -> bool | None:
    """Return False for a constant mask that masks nothing, True for the causal mask, None for every other."""
    if not _is_constant(mask):
        return None
    allowed = _computed(mask)
    if allowed.dtype != torch.bool:
        masked = allowed <= _MASKED_BELOW
        allowed = allowed == 0
        if not bool((allowed | masked).all()):
            return None
    if allowed.dim() < 2:
        return None
    causal = torch.ones(allowed.shape[-2:], dtype=torch.bool).tril()
    if bool(allowed.all()):
        return False
    return True if bool((allowed == causal).all()) else None


def _is_constant(node: fx.Node) -> bool:
    """Return True if the node depends on nothing but numbers in the graph, and draws nothing at random."""
    return all(
        source.op == "call_function" and not any(word in str(source.target) for word in _DRAWS)
        for source in ancestors([node])
    )


def _computed(node: fx.Node) -> torch.Tensor:
    """Return the value of a constant node, on the CPU whatever device it was captured for."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    needed = ancestors([node])
    copy_nodes(graph, (candidate for candidate in node.graph.nodes if candidate in needed), copies)
    graph.output(copies[node])
    code = fx.GraphModule({}, graph)
    retarget(code, torch.device("cpu"))
    with torch.no_grad(), torch.device("cpu"):
        value: torch.Tensor = code()
    return value
