"""Products with experts' matrices as one operation, for mixtures of experts whose rows stand sorted by expert.

`transformers` takes torch's grouped product only for bf16 weights once it is traced; under autocast the weights are
fp32 still, and what it falls back to multiplies in fp32 too, one expert after the other, with the host waiting for how
many rows each has. Such products become `workbench::grouped_mm`, which autocast knows. Its kernel is torch's
(`torch.nn.functional.grouped_mm`) where there is one for the device; elsewhere it is that loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import register_flop_formula

from workbench.capture.division import shape_of

aten = torch.ops.aten
FALLBACK = "transformers.grouped_mm_fallback.default"
ALIGNED = 8
"""Elements: torch's kernel takes matrices whose rows begin at multiples of 16 bytes."""
CAPABILITY = (8, 0)
"""Of the GPUs that have it, at least."""


@torch.library.custom_op("workbench::grouped_mm", mutates_args=())
def grouped_mm(rows_SK: torch.Tensor, weights_EKN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """(S, K) and (E, K, N) -> (S, N): rows `ends[e - 1]` to `ends[e]` times matrix e."""
    if _has_kernel(rows_SK, weights_EKN):
        return torch._grouped_mm(rows_SK, weights_EKN, ends_E)
    product_SN = rows_SK.new_zeros(rows_SK.shape[0], weights_EKN.shape[2])
    for expert, rows in _groups(ends_E):
        torch.mm(rows_SK[rows], weights_EKN[expert], out=product_SN[rows])
    return product_SN


@torch.library.custom_op("workbench::grouped_outer", mutates_args=())
def grouped_outer(left_SK: torch.Tensor, right_SN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """(S, K) and (S, N) -> (E, K, N): for each expert its rows' `leftᵀ @ right`, the gradient of its matrix."""
    if _has_kernel(left_SK, right_SN):
        return torch._grouped_mm(left_SK.t(), right_SN, ends_E)
    outer_EKN = left_SK.new_zeros(ends_E.shape[0], left_SK.shape[1], right_SN.shape[1])
    for expert, rows in _groups(ends_E):
        torch.mm(left_SK[rows].t(), right_SN[rows], out=outer_EKN[expert])
    return outer_EKN


def _has_kernel(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.device.type != "cuda" or left.dtype != torch.bfloat16 or not hasattr(torch.nn.functional, "grouped_mm"):
        return False
    aligned = all(size % ALIGNED == 0 for size in (left.shape[1], *right.shape[1:]))
    return aligned and torch.cuda.get_device_capability(left.device) >= CAPABILITY


def _groups(ends_E: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, and which."""
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


@grouped_mm.register_fake
def _(rows_SK: torch.Tensor, weights_EKN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return rows_SK.new_empty(rows_SK.shape[0], weights_EKN.shape[2])


@grouped_outer.register_fake
def _(left_SK: torch.Tensor, right_SN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return left_SK.new_empty(ends_E.shape[0], left_SK.shape[1], right_SN.shape[1])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient_SN: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    rows_SK, weights_EKN, ends_E = ctx.saved_tensors
    gradient_SN = gradient_SN.contiguous()
    of_rows = of_weights = None
    if ctx.needs_input_grad[0]:
        of_rows = grouped_mm(gradient_SN, weights_EKN.transpose(1, 2), ends_E)
    if ctx.needs_input_grad[1]:
        if weights_EKN.stride(2) == 1:
            of_weights = grouped_outer(rows_SK, gradient_SN, ends_E)
        else:  # stored the other way round, and so is the gradient that is added to
            of_weights = grouped_outer(gradient_SN, rows_SK, ends_E).transpose(1, 2)
    return of_rows, of_weights, None


grouped_mm.register_autograd(_backward, setup_context=_keep)
for _kind in ("cuda", "cpu"):
    grouped_mm.register_autocast(_kind, torch.bfloat16)


@register_flop_formula(torch.ops.workbench.grouped_mm)
def _flops_of_product(rows: tuple[int, int], weights: tuple[int, int, int], *_: Any, **__: Any) -> int:
    return 2 * rows[0] * rows[1] * weights[2]


@register_flop_formula(torch.ops.workbench.grouped_outer)
def _flops_of_outer(left: tuple[int, int], right: tuple[int, int], *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def unify_experts(module: fx.GraphModule) -> None:
    """Make every grouped product of rows with matrices `workbench::grouped_mm`, in place."""
    for node in list(module.graph.nodes):
        operands = _operands(node)
        if operands is None:
            continue
        rows, weights, ends = operands
        with module.graph.inserting_before(node):
            product = module.graph.call_function(torch.ops.workbench.grouped_mm.default, (_uncast(rows), weights, ends))
        product.meta = dict(node.meta)
        node.replace_all_uses_with(product)
        module.graph.erase_node(node)
        if not rows.users:
            module.graph.erase_node(rows)
    module.recompile()


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Rows, matrices and ends of a grouped product of two and three dims with neither bias nor a type of its own."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if str(node.target) != FALLBACK and node.target is not aten._grouped_mm.default:
        return None
    names = [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    rows, weights, ends, *others = [given.get(name) for name in names]
    if not (isinstance(rows, fx.Node) and isinstance(weights, fx.Node) and isinstance(ends, fx.Node)):
        return None
    if any(value is not None for value in others) or (len(shape_of(rows)), len(shape_of(weights))) != (2, 3):
        return None
    return rows, weights, ends


def _uncast(rows: fx.Node) -> fx.Node:
    """What `rows` is, where it only is cast to the type that it has: under autocast that type would be another."""
    source = rows.args[0] if rows.target is aten.to.dtype else None
    if isinstance(source, fx.Node) and source.meta["val"].dtype == rows.meta["val"].dtype:
        return _uncast(source)
    return rows
