"""The two halves of a backward, for zero-bubble schedules (arXiv:2401.10241): what the stage before waits for, and
the weights' gradients, which nobody waits for until the optimiser.

torch's own split (`stage_backward_input`) gives wrong gradients where a parameter does not descend from what the
stage received (a decoder's embeddings). Here each matrix product with a weight computes its input's gradient at
once and leaves its weight's for later; everything else is a plain backward, so nothing can be missed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

aten = torch.ops.aten


class Deferral:
    """The weight gradients that backwards of one rank have left for later."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], None]] = []

    def leave(self, work: Callable[[], None]) -> None:
        self._pending.append(work)

    def take(self) -> Callable[[], None]:
        """Everything left so far, as one call."""
        taken, self._pending = self._pending, []

        def finish() -> None:
            while taken:
                taken.pop()()

        return finish


def defer_weight_gradients(code: fx.GraphModule, parameters: int, deferral: Deferral) -> fx.GraphModule:
    """A copy of a block's code whose products with its own weights leave the weights' gradients to `deferral`.

    The first `parameters` placeholders are the block's parameters.
    """
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(code.graph, values)
    graph.output(result)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    weights = set(placeholders[:parameters])
    with graph.inserting_after(placeholders[-1]):
        where = graph.create_node("get_attr", "deferral")
    for node in list(graph.nodes):
        product = _product(node)
        if product is not None and product[1] in weights and (product[2] is None or product[2] in weights):
            node.target, node.args, node.kwargs = _deferred_product, (where, *product), {}
    return fx.GraphModule({**dict(code.named_children()), "deferral": deferral}, graph)


def _product(node: fx.Node) -> tuple[Any, Any, Any, bool] | None:
    """(input, weight, bias, whether the weight is stored as (in, out)) of a product with a weight."""
    if node.op != "call_function" or node.kwargs:
        return None
    if node.target is aten.linear.default:
        return node.args[0], node.args[1], node.args[2] if len(node.args) > 2 else None, False
    if node.target is aten.addmm.default:
        return node.args[1], node.args[2], node.args[0], True
    return None


def _deferred_product(
    deferral: Deferral, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    if torch.is_autocast_enabled(value.device.type):
        value = value.to(torch.get_autocast_dtype(value.device.type))
    result: torch.Tensor = _Product.apply(deferral, value, weight, bias, transposed)
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        deferral: Deferral,
        value: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
    ) -> torch.Tensor:
        ctx.deferral, ctx.transposed = deferral, transposed
        ctx.weight, ctx.bias = weight, bias  # not saved: a checkpoint would give back a detached weight
        ctx.save_for_backward(value)
        matrix = weight.t() if transposed else weight
        return functional.linear(value, matrix.to(value.dtype), None if bias is None else bias.to(value.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        [value], [gradient], weight = ctx.saved_tensors, gradients, ctx.weight
        ctx.deferral.leave(partial(_accumulate, value, gradient, weight, ctx.bias, ctx.transposed))
        into = None
        if ctx.needs_input_grad[1]:
            matrix = weight.t() if ctx.transposed else weight
            into = gradient @ matrix.to(gradient.dtype).conj()
        return None, into, None, None, None


def _accumulate(
    value: torch.Tensor, gradient: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, transposed: bool
) -> None:
    rows, seen = gradient.reshape(-1, gradient.shape[-1]), value.reshape(-1, value.shape[-1]).conj()
    if weight.requires_grad:
        _add(weight, seen.t() @ rows if transposed else rows.t() @ seen)
    if bias is not None and bias.requires_grad:
        _add(bias, rows.sum(0))


def _add(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad += gradient
