"""One compiled code for blocks that differ in numbers only, such as the rates of stochastic depth.

The compiler takes numbers for constants, and would compile a Swin of 24 layers 24 times. The numbers in which blocks
differ become an argument of their code here: a tensor of one dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from workbench.capture.block_extraction import digest
from workbench.execution.blocks.graph_rewriter import GraphRewriter
from workbench.execution.blocks.labelled_head import Runner

_ATEN = torch.ops.aten
_TAKES_TENSORS = (_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor)
"""Operations whose second argument is a number or a tensor."""


def finish_alike(
    codes: Mapping[str, fx.GraphModule],
    finish: Callable[[str, fx.GraphModule], Runner],
    compile: bool,
    device: torch.device,
) -> dict[str, Runner]:
    """Return what `finish` makes of each code, by block type.

    If it compiles, it is called once for codes that differ in numbers only, where tensors can stand for them.
    """
    if not compile:
        return {block_type: finish(block_type, code) for block_type, code in codes.items()}
    alike: dict[str, list[str]] = {}
    for block_type, code in codes.items():
        alike.setdefault(digest(code.graph, code, of_cost=True), []).append(block_type)
    found: dict[str, Runner] = {}
    for first, *others in alike.values():
        of_each = [list(codes[block_type].graph.nodes) for block_type in (first, *others)]
        places = _different_numbers(of_each) if others else []
        if not places:
            found |= {block_type: finish(block_type, codes[block_type]) for block_type in (first, *others)}
            continue
        run = finish(first, _with_argument(codes[first], [of_each[0][at] for at in places]))
        arguments = len(codes[first].graph.find_nodes(op="placeholder"))
        for block_type, nodes in zip((first, *others), of_each, strict=True):
            numbers = torch.tensor([nodes[at].args[1] for at in places], dtype=torch.float64, device=device)
            found[block_type] = _bound(run, arguments, numbers)
    return found


def _different_numbers(of_each: Sequence[Sequence[fx.Node]]) -> list[int]:
    """Return the places of the nodes whose numbers differ; none if one of them cannot be a tensor."""
    places = []
    for at, nodes in enumerate(zip(*of_each, strict=True)):
        numbers = [_numbers(node) for node in nodes]
        if any(each != numbers[0] for each in numbers):
            node = nodes[0]
            if node.target not in _TAKES_TENSORS or len(numbers[0]) > 1 or not isinstance(node.args[1], float):
                return []
            places.append(at)
    return places


def _numbers(node: fx.Node) -> list[float]:
    found: list[float] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, float):
            found.append(leaf)
        return leaf

    fx.node.map_aggregate((node.args, node.kwargs), note)
    return found


def _with_argument(code: fx.GraphModule, takers: Sequence[fx.Node]) -> fx.GraphModule:
    """Return the code with a last argument, from which `takers` take their numbers in this order."""
    rewriter = GraphRewriter(code)

    def rule(node: fx.Node) -> fx.Node:
        if node not in takers:
            return rewriter.copy(node)
        number = rewriter.call(_ATEN.select.int, rewriter.new_argument, 0, takers.index(node))
        copied = rewriter.copy(node)
        copied.args = (copied.args[0], number, *copied.args[2:])
        return copied

    return rewriter.rewrite(rule, "numbers")


def _bound(run: Runner, arguments: int, numbers: torch.Tensor) -> Runner:
    """Return a runner that has its numbers, which follow the captured arguments; a seed may come behind them."""

    def bound(*values: Any) -> tuple[torch.Tensor, ...]:
        return run(*values[:arguments], numbers, *values[arguments:])

    return bound
