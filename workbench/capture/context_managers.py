"""`torch.no_grad()` and `torch.autocast(…)` in a model's forward, inlined so that block boundaries can pass through.

Export keeps the operations of each such `with` block in one higher-order operation, which hides what they draw, write
and read. `inline_regions` moves them to the outer graph and marks each with the regions that it lies in;
`restore_regions` enters and leaves the context managers again around the operations of one block.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from workbench.capture.operations import holds_integers
from workbench.capture.torch_internals import enter_autocast, exit_autocast, set_grad_enabled

_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_SETTINGS: dict[Any, int] = {_GRAD: 1, _AUTOCAST: 4}
"""Higher-order operation -> number of its arguments that stand before the graph of the region."""


@dataclass(frozen=True)
class Region:
    """One `with` block: its higher-order operation and that operation's settings."""

    operation: Any
    settings: tuple[Any, ...]


def regions_of(node: fx.Node) -> tuple[Region, ...]:
    """Return the regions around an operation, outermost first."""
    regions: tuple[Region, ...] = node.meta.get("regions", ())
    return regions


def passes_gradient(node: fx.Node) -> bool:
    """Return True if an operation's result can carry a gradient to its inputs."""
    switches = [region.settings[0] for region in regions_of(node) if region.operation is _GRAD]
    is_detached = node.target is torch.ops.aten.detach.default
    return not holds_integers(node) and not is_detached and (not switches or bool(switches[-1]))


def inline_regions(module: fx.GraphModule) -> None:
    """Replace every region of `module` by its operations, in place."""
    while regions := [node for node in module.graph.nodes if node.target in _SETTINGS]:
        for node in regions:
            _inline(module, node)
    module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr")


def _inline(module: fx.GraphModule, region: fx.Node) -> None:
    number = _SETTINGS[region.target]
    body_name: Any = region.args[number]
    body = getattr(module, body_name.target)
    around = (*regions_of(region), Region(region.target, region.args[:number]))
    arguments = iter(region.args[number + 1 :])
    copies: dict[fx.Node, Any] = {}
    with module.graph.inserting_before(region):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(arguments)
            elif node.op == "get_attr":  # the graph of a region inside this one
                name = next(name for i in itertools.count() if not hasattr(module, name := f"region_{i}"))
                module.add_module(name, getattr(body, str(node.target)))
                copies[node] = module.graph.get_attr(name)
            elif node.op == "output":
                results: Any = fx.node.map_arg(node.args[0], copies.__getitem__)
                for user in list(region.users):  # a region returns a tuple, and `getitem` takes the items out
                    user.replace_all_uses_with(results[user.args[1]])
                    region.graph.erase_node(user)
            else:
                copies[node] = module.graph.node_copy(node, copies.__getitem__)
                copies[node].meta["regions"] = around
    module.graph.erase_node(region)


def restore_regions(graph: fx.Graph) -> None:
    """Enter and leave the context managers around the marked operations of a block's graph, in place."""
    entered: list[tuple[Region, fx.Node]] = []  # with the state that leaving the region restores
    for node in list(graph.nodes):
        if node.op not in ("call_function", "output"):
            continue
        wanted = regions_of(node)
        pairs = zip(entered, wanted, strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0][0] == pair[1], pairs))
        with graph.inserting_before(node):
            while len(entered) > common:
                region, state = entered.pop()
                leave = exit_autocast if region.operation is _AUTOCAST else set_grad_enabled
                graph.call_function(leave, (state,))
            for region in wanted[common:]:
                if region.operation is _AUTOCAST:
                    entered.append((region, graph.call_function(enter_autocast, region.settings)))
                else:
                    entered.append((region, graph.call_function(torch.is_grad_enabled)))
                    graph.call_function(set_grad_enabled, region.settings)
