"""The in-place writes of forward: batch fields are copied first, buffers keep theirs, parameters may have none."""

from __future__ import annotations

import torch
from torch import fx, nn

from workbench.capture.operations import mutated_arguments, storage_of, tensor_at
from workbench.capture.source_lines import line_of_node


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
                raise line.error(
                    name,
                    f"writes to its parameter {owner.target} in forward{line.where}. Make it a buffer, or compute a "
                    f"new tensor from it and leave the parameter to the optimiser.",
                    parameter=str(owner.target),
                )
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
