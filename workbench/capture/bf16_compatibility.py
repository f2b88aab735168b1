"""Rewrites that make a graph captured in fp32 valid under bf16 autocast; in fp32 they change nothing.

- `torch.finfo(scores.dtype).min` is -3.403e38 in fp32, but scores that autocast computes in bf16 end at 3.390e38.
  Operations refuse such a number or make an infinity of it. The end of bf16's range masks as well.
- `torch.zeros(n, dtype=x.dtype)` is fp32 in the capture, whatever type autocast gives `x`. Operations that write values
  into such a tensor want them of its type, so the values are cast to it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from workbench.capture.operations import arguments_of, dtype_of, names, op_name, schema_of

LARGEST = torch.finfo(torch.bfloat16).max
_WRITE_VALUES = names(
    "index_add index_copy index_put index_reduce masked_scatter scatter scatter_add scatter_reduce lerp"
)
"""Operations, in place or not, whose first operand and values must have one type."""
_VALUES = ("source", "src", "values", "end")
"""Argument names of the values that these operations write."""


def clamp_to_bf16_range(module: fx.GraphModule) -> None:
    """Bring constants that only fp32 holds into the range of bf16, in place."""

    def clamped(value: Any) -> Any:
        if isinstance(value, float) and math.isfinite(value) and abs(value) > LARGEST:
            return math.copysign(LARGEST, value)
        return value

    for node in module.graph.nodes:
        if node.op == "call_function" and dtype_of(node) == torch.float32:
            node.args, node.kwargs = tree_map(clamped, (node.args, dict(node.kwargs)))


def cast_written_values(module: fx.GraphModule) -> None:
    """Cast the values that operations write into a tensor to that tensor's type, in place."""
    for node in list(module.graph.nodes):
        target, values = node.args[0] if node.args else None, _written_values(node)
        if values is None or values is target or dtype_of(values) != dtype_of(target):
            continue
        with module.graph.inserting_before(node):
            cast = module.graph.call_function(torch.ops.aten.to.other, (values, target))
        cast.meta = {**node.meta, "val": values.meta["val"]}
        node.replace_input_with(values, cast)


def _written_values(node: fx.Node) -> fx.Node | None:
    """Return the floating-point values that an operation writes into its first operand, None if it writes none."""
    if schema_of(node) is None or op_name(node).rstrip("_") not in _WRITE_VALUES:
        return None
    given = arguments_of(node)
    values = next((given[name] for name in _VALUES if name in given), None)
    dtype = dtype_of(values)
    return values if isinstance(values, fx.Node) and dtype is not None and dtype.is_floating_point else None
