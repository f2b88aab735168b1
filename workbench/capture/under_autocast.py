"""What a forward asked of its tensors' type in fp32, where it is captured, made to hold under autocast, where it runs.

- `torch.finfo(scores.dtype).min` was -3.403e38; scores that autocast makes bf16 end at 3.390e38. Operations refuse such
  a number, or make an infinity of it. What is filled in to mean "nothing" means it as well at the end of bf16's range.
- `torch.zeros(n, dtype=x.dtype)` is fp32 now, whatever x will be. Operations that write values into such a tensor want
  them of its type, so they are cast to it.

Neither needs to know here what autocast will choose, and in fp32 neither changes what is computed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

aten = torch.ops.aten
LARGEST = torch.finfo(torch.bfloat16).max
_WRITE_VALUES = frozenset(
    {
        *("index_add", "index_copy", "index_put", "index_reduce", "masked_scatter"),
        *("scatter", "scatter_add", "scatter_reduce", "lerp"),
    }
)
"""Operations, in place or not, that want two operands of one type, as autocast may leave them."""
_VALUES = ("source", "src", "values", "end")
"""What they call the second; the first comes first."""


def fit_numbers(module: fx.GraphModule) -> None:
    """Bring numbers that only fp32 holds into the range of bf16, in place."""
    for node in module.graph.nodes:
        if node.op == "call_function" and _type(node) == torch.float32:
            node.args, node.kwargs = tree_map(_fitted, (node.args, dict(node.kwargs)))
    module.recompile()


def _fitted(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value) and abs(value) > LARGEST:
        return math.copysign(LARGEST, value)
    return value


def fit_types(module: fx.GraphModule) -> None:
    """Cast what is written into a tensor to the type that the tensor will have, in place."""
    for node in list(module.graph.nodes):
        target, values = node.args[0] if node.args else None, _written(node)
        if values is None or values is target or not isinstance(target, fx.Node) or _type(values) != _type(target):
            continue
        with module.graph.inserting_before(node):
            cast = module.graph.call_function(aten.to.other, (values, target))
        cast.meta = {**node.meta, "val": values.meta["val"]}
        node.replace_input_with(values, cast)
    module.recompile()


def _written(node: fx.Node) -> fx.Node | None:
    """The values that an operation writes into its first operand, if they are floating."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._opname.rstrip("_") not in _WRITE_VALUES:
        return None
    names = [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    values = next((given[name] for name in _VALUES if name in given), None)
    dtype = _type(values)
    return values if isinstance(values, fx.Node) and dtype is not None and dtype.is_floating_point else None


def _type(node: Any) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None
