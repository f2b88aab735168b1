"""What forward writes to the model's own tensors: buffers where they change, parameters never."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import fx, nn

from workbench.capture.dataflow import mutates, storage_of, tensor_at
from workbench.errors import CaptureError

_COPY = torch.ops.aten.copy_.default


def settle_writes(module: fx.GraphModule, name: str) -> None:
    """Bring the buffer updates that export collects at the end of the graph back to where their values are made.

    An update of a buffer by itself is dropped: the operation before it wrote in place. Raises `CaptureError` where
    forward writes to a parameter, which an optimiser step on another device would not see.
    """
    owners = {node: storage_of(node) for node in module.graph.nodes}
    for node in list(module.graph.nodes):
        for written in mutates(node):
            _refuse_parameter(module, owners[written], node, name)
        if node.target is _COPY and node.args[0].op == "get_attr" and not node.users:
            buffer, value = node.args[:2]
            if owners[value] is buffer:
                module.graph.erase_node(node)
            else:
                _after_last_reader(node, buffer, value, owners)
    module.recompile()


def _after_last_reader(update: fx.Node, buffer: fx.Node, value: fx.Node, owners: dict[fx.Node, fx.Node]) -> None:
    readers = {value} | {
        node for node in owners if node is not update and any(owners[s] is buffer for s in node.all_input_nodes)
    }
    last = next(node for node in reversed(update.graph.nodes) if node in readers)
    last.append(update)


def _refuse_parameter(module: fx.GraphModule, owner: fx.Node, writer: fx.Node, name: str) -> None:
    if owner.op != "get_attr" or not isinstance(tensor_at(module, str(owner.target)), nn.Parameter):
        return
    line = users_line(writer)
    raise CaptureError(
        f"{name} writes to its parameter {owner.target} in forward{line.where}. Make it a buffer, or compute a new "
        f"tensor from it and leave the parameter to the optimiser.",
        model=name,
        file=line.file,
        line=line.number,
        parameter=str(owner.target),
    )


@dataclass(frozen=True)
class Line:
    """A line of the model's code; `where` is `" at file:number (`text`)"`, or empty where export lost it."""

    file: str = ""
    number: int = 0
    text: str = ""

    @property
    def where(self) -> str:
        return f" at {self.file}:{self.number} (`{self.text}`)" if self.file else ""


def users_line(node: fx.Node) -> Line:
    """The innermost line that export noted for an operation."""
    found = re.findall(r'File "([^"]+)", line (\d+)[^\n]*\n\s*([^\n]*)', node.stack_trace or "")
    return Line(found[-1][0], int(found[-1][1]), found[-1][2]) if found else Line()
