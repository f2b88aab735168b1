"""Rewrites of an exported graph: in-place writes, and what makes an fp32 capture valid under bf16 autocast.

- Batch fields that forward writes to are copied first, buffers keep their updates, parameters may have none.
- `torch.finfo(scores.dtype).min` is -3.403e38 in fp32, but scores that autocast computes in bf16 end at 3.390e38.
  Operations refuse such a number or make an infinity of it. The end of bf16's range masks as well.
- `torch.zeros(n, dtype=x.dtype)` is fp32 in the capture, whatever type autocast gives `x`. Operations that write values
  into such a tensor want them of its type, so the values are cast to it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map

from workbench.capture.operations import (
    arguments_of,
    dtype_of,
    mutated_arguments,
    names,
    op_name,
    schema_of,
    storage_of,
    tensor_at,
)
from workbench.capture.source_lines import line_of_node

LARGEST = torch.finfo(torch.bfloat16).max
_WRITE_VALUES = names(
    "index_add index_copy index_put index_reduce masked_scatter scatter scatter_add scatter_reduce lerp"
)
"""Operations, in place or not, whose first operand and values must have one type."""
_VALUES = ("source", "src", "values", "end")
"""Argument names of the values that these operations write."""


def place_buffer_updates(module: fx.GraphModule, name: str) -> None:
    """Move each buffer update, which export puts at the end of the graph, to just after the last read of the old value.

    Writes to batch fields go to copies.

    The update of a buffer by itself is removed: the operation before it wrote in place.

    Raises:
        CaptureError: forward writes to a parameter, which an optimiser step on another device would not see.
    """
    _copy_written_fields(module)
    owners = {node: storage_of(node) for node in module.graph.nodes}
    for node in list(module.graph.nodes):
        for written in mutated_arguments(node):
            owner = owners[written]
            if owner.op == "get_attr" and isinstance(tensor_at(module, str(owner.target)), nn.Parameter):
                line = line_of_node(node)
                way = "Make it a buffer, or compute a new tensor from it and leave the parameter to the optimiser."
                if line.is_of_library:
                    way = (
                        "The line is a library's: give the module a class of your own that overrides the method that "
                        "writes, or set the option of the model that leaves the write out."
                    )
                raise line.error(name, f"writes to its parameter {owner.target} in forward{line.where}. {way}")
        if node.target is not torch.ops.aten.copy_.default or node.args[0].op != "get_attr" or node.users:
            continue
        buffer, value = node.args[:2]
        if owners[value] is buffer:
            module.graph.erase_node(node)
            continue
        readers = {value} | {
            other for other in owners if other is not node and any(owners[s] is buffer for s in other.all_input_nodes)
        }
        next(other for other in reversed(module.graph.nodes) if other in readers).append(node)


def _copy_written_fields(module: fx.GraphModule) -> None:
    """Let forward write into a copy of each batch field that it writes to.

    Every block that reads the field repeats the write, so that on the field itself it would happen several times.
    """
    written = {storage_of(argument) for node in module.graph.nodes for argument in mutated_arguments(node)}
    for field in [node for node in module.graph.nodes if node.op == "placeholder" and node in written]:
        with module.graph.inserting_after(field):
            copy = module.graph.call_function(torch.ops.aten.clone.default, (field,))
        copy.meta = dict(field.meta)
        field.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)


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
        if schema_of(node) is None or op_name(node).rstrip("_") not in _WRITE_VALUES:
            continue
        given, target = arguments_of(node), node.args[0]
        values: Any = next((given[name] for name in _VALUES if name in given), None)
        dtype = dtype_of(values)
        if dtype is None or not dtype.is_floating_point or values is target or dtype != dtype_of(target):
            continue
        with module.graph.inserting_before(node):
            cast = module.graph.call_function(torch.ops.aten.to.other, (values, target))
        cast.meta = {**node.meta, "val": values.meta["val"]}
        node.replace_input_with(values, cast)
