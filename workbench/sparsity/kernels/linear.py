"""A linear layer whose parameter is the compact weight, so that optimisers keep no state for absent blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from workbench.errors import InvalidArgument
from workbench.sparsity.kernels.index import BlockIndex, move, to_compact
from workbench.sparsity.kernels.operators import block_sparse_linear


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
