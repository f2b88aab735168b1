"""Regions of `torch.no_grad()` and `torch.autocast(…)` in a model's forward, opened so that cuts can pass through.

Export keeps each region as one higher-order operation around a graph of its own, which hides what the region draws,
writes and reads. `open_regions` lays these operations out flat, each marked with the regions that it lies in;
`close_regions` switches them on and off again around the operations of one block.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_SETTINGS: dict[Any, int] = {_GRAD: 1, _AUTOCAST: 4}
"""How many arguments come before the region's own graph."""


@dataclass(frozen=True)
class Region:
    """One `with`: its higher-order operation and that operation's settings."""

    operation: Any
    settings: tuple[Any, ...]


def regions_of(node: fx.Node) -> tuple[Region, ...]:
    """The regions around an operation, outermost first."""
    found: tuple[Region, ...] = node.meta.get("regions", ())
    return found


def gradients_pass(node: fx.Node) -> bool:
    """Whether an operation's result can carry a gradient to its inputs."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
        return False
    switches = [region.settings[0] for region in regions_of(node) if region.operation is _GRAD]
    return node.target is not torch.ops.aten.detach.default and (not switches or bool(switches[-1]))


def open_regions(module: fx.GraphModule) -> None:
    """Replace every region of `module` by its operations, in place."""
    while regions := [node for node in module.graph.nodes if node.target in _SETTINGS]:
        for node in regions:
            _open(module, node)
    module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr")
    module.recompile()


def _open(module: fx.GraphModule, region: fx.Node) -> None:
    number = _SETTINGS[region.target]
    held: Any = region.args[number]
    body = getattr(module, held.target)
    around = (*regions_of(region), Region(region.target, region.args[:number]))
    arguments = iter(region.args[number + 1 :])
    copies: dict[fx.Node, Any] = {}
    with module.graph.inserting_before(region):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(arguments)
            elif node.op == "get_attr":  # the graph of a region inside this one
                name = _free_name(module)
                module.add_module(name, getattr(body, str(node.target)))
                copies[node] = module.graph.get_attr(name)
            elif node.op == "output":
                _replace_results(region, fx.node.map_arg(node.args[0], copies.__getitem__))
            else:
                copies[node] = module.graph.node_copy(node, copies.__getitem__)
                copies[node].meta["regions"] = around
    module.graph.erase_node(region)


def _replace_results(region: fx.Node, results: Any) -> None:
    """A region returns a tuple, whose items are taken out by `getitem`."""
    for user in list(region.users):
        user.replace_all_uses_with(results[user.args[1]])
        region.graph.erase_node(user)


def _free_name(module: fx.GraphModule) -> str:
    return next(name for number in itertools.count() if not hasattr(module, name := f"region_{number}"))


def close_regions(graph: fx.Graph) -> None:
    """Switch gradients and autocast around the marked operations of a block's graph, in place."""
    opened: list[tuple[Region, fx.Node]] = []
    for node in list(graph.nodes):
        if node.op not in ("call_function", "output"):
            continue
        wanted = regions_of(node)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0][0] == pair[1], zip(opened, wanted)))  # noqa: B905
        with graph.inserting_before(node):
            while len(opened) > common:
                _leave(graph, *opened.pop())
            opened += [(region, _enter(graph, region)) for region in wanted[common:]]


def _enter(graph: fx.Graph, region: Region) -> fx.Node:
    """Returns what `_leave` needs to restore."""
    if region.operation is _AUTOCAST:
        return graph.call_function(_enter_autocast, region.settings)
    before = graph.call_function(torch.is_grad_enabled)
    graph.call_function(torch._C._set_grad_enabled, region.settings)
    return before


def _leave(graph: fx.Graph, region: Region, state: fx.Node) -> None:
    graph.call_function(_exit_autocast if region.operation is _AUTOCAST else torch._C._set_grad_enabled, (state,))
