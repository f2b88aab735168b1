"""Copy a block's graph node by node, with changes: the base of the passes that rewrite captured blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

NodeMap = Callable[[fx.Node], fx.Node]


class GraphRewriter:
    """A graph under construction; `copies` maps each node of the old code to its counterpart in the new graph."""

    def __init__(self, code: fx.GraphModule) -> None:
        self.code = code
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.new_argument: fx.Node | None = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> fx.Node:
        """Append a call of `function`; nodes among the arguments belong to the new graph."""
        return self.graph.call_function(function, arguments)

    def copy(self, node: fx.Node, operand: NodeMap | None = None) -> fx.Node:
        """Append a copy of an old node; `operand` gives the new node for each one it reads (default: its copy)."""
        return self.graph.node_copy(node, operand or self.copies.__getitem__)

    def rewrite(self, rule: NodeMap, new_argument: str | None = None) -> fx.GraphModule:
        """Replace every node by what `rule` makes of it, in order; `new_argument` becomes the code's last argument."""
        for node in self.code.graph.nodes:
            if new_argument and self.new_argument is None and node.op not in ("placeholder", "get_attr"):
                self.new_argument = self.graph.placeholder(new_argument)
            self.copies[node] = rule(node)
        return self.finish()

    def finish(self) -> fx.GraphModule:
        """Return the new graph as a module with the old module's children and buffers."""
        self.graph.lint()
        return fx.GraphModule(dict(self.code.named_children()) | dict(self.code.named_buffers()), self.graph)
