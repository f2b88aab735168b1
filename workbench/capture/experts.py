"""Grouped matrix products: one operation for mixtures of experts whose rows are sorted by expert.

Once it is traced, `transformers` uses torch's grouped product for bf16 weights only. Under autocast the weights are
still fp32, and its fallback multiplies in fp32, one expert after the other, while the host waits for the number of rows
of each. Such products become `workbench::grouped_mm`, which autocast knows. It runs torch's kernel
(`torch.nn.functional.grouped_mm`) where the device has one, and that loop elsewhere.

Dims in names: S rows, K input features, N output features, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import register_flop_formula

from workbench.capture.operations import arguments_of, dtype_of, replace_call, shape_of
from workbench.capture.torch_internals import grouped_mm_kernel

aten = torch.ops.aten
FALLBACK = "transformers.grouped_mm_fallback.default"
ALIGNED = 8
"""Number of bf16 elements in 16 bytes, at multiples of which torch's kernel needs the rows of its matrices to begin."""
CAPABILITY = (8, 0)
"""Lowest CUDA compute capability that has torch's kernel."""


@torch.library.custom_op("workbench::grouped_mm", mutates_args=())
def grouped_mm(rows_SK: torch.Tensor, weights_EKN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Multiply rows `ends[e - 1]` to `ends[e]` by matrix e: (S, K) and (E, K, N) -> (S, N)."""
    if _has_kernel(rows_SK, weights_EKN):
        return grouped_mm_kernel(rows_SK, weights_EKN, ends_E)
    product_SN = rows_SK.new_zeros(rows_SK.shape[0], weights_EKN.shape[2])
    for expert, rows in _groups(ends_E):
        torch.mm(rows_SK[rows], weights_EKN[expert], out=product_SN[rows])
    return product_SN


@torch.library.custom_op("workbench::grouped_outer", mutates_args=())
def grouped_outer(left_SK: torch.Tensor, right_SN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Return `leftᵀ @ right` of each expert's rows, its matrix's gradient: (S, K) and (S, N) -> (E, K, N)."""
    if _has_kernel(left_SK, right_SN):
        return grouped_mm_kernel(left_SK.t(), right_SN, ends_E)
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
    """Yield each expert that has rows, with these."""
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
        else:  # the gradient must have the layout of the weights, which are stored transposed
            of_weights = grouped_outer(gradient_SN, rows_SK, ends_E).transpose(1, 2)
    return of_rows, of_weights, None


grouped_mm.register_autograd(_backward, setup_context=_keep)
for _device_type in ("cuda", "cpu"):
    grouped_mm.register_autocast(_device_type, torch.bfloat16)


@register_flop_formula(torch.ops.workbench.grouped_mm)
def _flops_of_product(rows: tuple[int, int], weights: tuple[int, int, int], *_: Any, **__: Any) -> int:
    return 2 * rows[0] * rows[1] * weights[2]


@register_flop_formula(torch.ops.workbench.grouped_outer)
def _flops_of_outer(left: tuple[int, int], right: tuple[int, int], *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def unify_grouped_matmuls(module: fx.GraphModule) -> None:
    """Make every grouped product of rows (2 dims) with matrices (3 dims) `workbench::grouped_mm`, in place.

    A product with a bias or an output type of its own is left as it is.
    """
    for node in list(module.graph.nodes):
        if not (str(node.target) == FALLBACK or node.target is aten._grouped_mm.default):
            continue
        rows, weights, ends, *others = arguments_of(node).values()
        is_plain = all(isinstance(operand, fx.Node) for operand in (rows, weights, ends)) and not any(
            value is not None for value in others
        )
        if not is_plain or (len(shape_of(rows)), len(shape_of(weights))) != (2, 3):
            continue
        source = rows
        # A cast to the type that rows have in the capture would undo the type that autocast gives them.
        while source.target is aten.to.dtype and dtype_of(source.args[0]) == dtype_of(source):
            source = source.args[0]
        replace_call(node, torch.ops.workbench.grouped_mm.default, (source, weights, ends))
        if not rows.users:
            module.graph.erase_node(rows)
