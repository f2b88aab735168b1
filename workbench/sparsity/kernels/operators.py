"""Products with a block-sparse weight as operators of PyTorch, with their gradients, and a linear layer of them.

`torch.compile` and `torch.export` see one operator per product. On a GPU it runs the Triton kernels; on a CPU it
multiplies by the masked dense weight, which is the reference that the kernels are tested against.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbench.base.errors import InvalidArgument
from workbench.sparsity.kernels.index import BlockIndex, move, to_compact, to_dense


def block_sparse_linear(
    hidden: Tensor, weight: Tensor, index: BlockIndex, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """Return hidden [..., cols] × weightᵀ + bias [..., rows], as `torch.nn.functional.linear` does for a dense weight.

    The weight is compact: [non-zero blocks, block, block]. If `transposed`, the result is hidden [..., rows] × weight +
    bias [..., cols]. Under autocast all inputs are cast to its dtype. Sums are in fp32. Raises `InvalidArgument` if
    shapes or dtypes do not fit.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    features, outputs = (index.rows, index.cols) if transposed else (index.cols, index.rows)
    if hidden.shape[-1] != features:
        raise InvalidArgument(f"The input has {hidden.shape[-1]} features, and the weight takes {features}.")
    if hidden.dtype != weight.dtype:
        raise InvalidArgument(
            f"The input is {hidden.dtype} and the weight is {weight.dtype}. Cast one of them, or use autocast."
        )
    flat: Tensor = torch.ops.workbench.block_sparse_product(
        hidden.reshape(-1, features), weight, bias, index.data, index.rows, index.cols, transposed
    )
    return flat.view(*hidden.shape[:-1], outputs)


@torch.library.custom_op("workbench::block_sparse_product", mutates_args=())
def _product(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, rows: int, cols: int, transposed: bool
) -> Tensor:
    """Return hidden × weightᵀ + bias, or hidden × weight if transposed; `hidden` is a matrix of tokens."""
    layout = _layout(weight, index, rows, cols)
    if runs_triton(hidden):
        from workbench.sparsity.kernels import triton_kernels

        lines = layout.sections.by_column if transposed else layout.sections.by_row
        return triton_kernels.product(weight.contiguous(), lines, _with_unit_stride(hidden), bias, transposed)
    dense = to_dense(weight, layout)
    return functional.linear(hidden, dense.T if transposed else dense, bias)


@_product.register_fake
def _product_shape(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, rows: int, cols: int, transposed: bool
) -> Tensor:
    return hidden.new_empty(hidden.shape[0], cols if transposed else rows)


@torch.library.custom_op("workbench::block_sparse_weight_gradient", mutates_args=())
def _weight_gradient(gradient: Tensor, hidden: Tensor, weight: Tensor, index: Tensor, rows: int, cols: int) -> Tensor:
    """Return the stored blocks of gradientᵀ × hidden; of `weight`, only shape and dtype are used."""
    layout = _layout(weight, index, rows, cols)
    if runs_triton(hidden):
        from workbench.sparsity.kernels import triton_kernels

        gradient, hidden = _with_unit_stride(gradient), _with_unit_stride(hidden)
        return triton_kernels.weight_gradient(gradient, hidden, layout.sections, layout.block)
    return to_compact(gradient.T @ hidden, layout)


@_weight_gradient.register_fake
def _weight_gradient_shape(
    gradient: Tensor, hidden: Tensor, weight: Tensor, index: Tensor, rows: int, cols: int
) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, weight, bias, index, ctx.rows, ctx.cols, ctx.transposed = inputs
    ctx.save_for_backward(hidden, weight, index)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight, index = ctx.saved_tensors
    shape = (index, ctx.rows, ctx.cols)
    operators = torch.ops.workbench
    to_hidden = to_weight = to_bias = None
    if ctx.needs_input_grad[0]:
        to_hidden = operators.block_sparse_product(gradient, weight, None, *shape, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        pair = (hidden, gradient) if ctx.transposed else (gradient, hidden)
        to_weight = operators.block_sparse_weight_gradient(*pair, weight, *shape)
    if ctx.has_bias and ctx.needs_input_grad[2]:
        to_bias = gradient.sum(0)
    return to_hidden, to_weight, to_bias, None, None, None, None


torch.library.register_autograd("workbench::block_sparse_product", _backward, setup_context=_save)


def _layout(weight: Tensor, index: Tensor, rows: int, cols: int) -> BlockIndex:
    return BlockIndex(rows, cols, weight.shape[1], weight.shape[0], index)


def runs_triton(tensor: Tensor) -> bool:
    """Return True if Triton's kernels run over a tensor: on a GPU, or on the CPU in Triton's interpreter."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def _with_unit_stride(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


# A layer whose parameter is the compact weight, so that optimisers keep no state for absent blocks.


class BlockSparseLinear(nn.Module):
    """A linear layer with the parameter `weight` [non-zero blocks, block, block] instead of [rows, cols].

    Its pattern is the buffer `index`, which checkpoints contain. A pattern moves in place, with its number of blocks
    unchanged, so that optimisers, compiled code and CUDA graphs stay valid.
    """

    index: Tensor

    def __init__(self, weight: Tensor, index: BlockIndex, bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features, self.block = index.cols, index.rows, index.block
        self.weight = nn.Parameter(weight.detach())
        self.bias = None if bias is None else nn.Parameter(bias.detach())
        self.register_buffer("index", index.data)

    @classmethod
    def from_linear(cls, linear: nn.Linear, mask: Tensor, block: int) -> BlockSparseLinear:
        """Take the blocks of a linear layer where a mask (bool [out / block, in / block]) is true."""
        index = BlockIndex.from_mask(mask.to(linear.weight.device), block)
        return cls(to_compact(linear.weight, index), index, linear.bias)

    @property
    def pattern(self) -> BlockIndex:
        """The stored blocks; moving the pattern changes the value that was returned."""
        return BlockIndex(self.out_features, self.in_features, self.block, len(self.weight), self.index)

    def forward(self, hidden: Tensor) -> Tensor:
        return block_sparse_linear(hidden, self.weight, self.pattern, self.bias)

    @torch.no_grad()
    def move_pattern(self, mask: Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Keep the blocks that the new mask has too, and begin the others with zero weights and zero optimiser state.

        Raises `InvalidArgument` if the new mask has another number of blocks.
        """
        old, new = self.pattern, BlockIndex.from_mask(mask.to(self.index.device), self.block)
        if new.num_blocks != old.num_blocks:
            raise InvalidArgument(
                f"The layer has {old.num_blocks} blocks, and the new pattern has {new.num_blocks}. "
                "Regrow as many blocks as are pruned."
            )
        state = {} if optimizer is None else optimizer.state.get(self.weight, {})
        for tensor in (self.weight, self.weight.grad, *state.values()):
            if isinstance(tensor, Tensor) and tensor.shape == self.weight.shape:
                tensor.copy_(move(tensor, old, new))
        self.index.copy_(new.data)

    def extra_repr(self) -> str:
        share = len(self.weight) * self.block**2 / (self.in_features * self.out_features)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, block={self.block}, "
            f"sparsity={1 - share:.3g}, bias={self.bias is not None}"
        )


def replace_linears(model: nn.Module, masks: Mapping[str, Tensor], block: int) -> None:
    """Replace linear layers of a model, given by name, by block-sparse ones with these masks.

    Do this before the optimiser is built. Raises `InvalidArgument` if a name is not the name of a linear layer.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name, mask in masks.items():
        if name not in names:
            raise InvalidArgument(f"The model has no linear layer {name!r}. Its linear layers are {', '.join(names)}.")
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        model.set_submodule(name, BlockSparseLinear.from_linear(linear, mask, block))
