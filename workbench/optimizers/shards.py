"""Shards of tensors, and sums over them for optimisers that need the norms of whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a distributed tensor, or a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def momentum_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.Tensor:
    """Return the momentum of a parameter, which begins at zero, sharded as the parameter is."""
    state: dict[str, torch.Tensor] = optimizer.state[parameter]
    if not state:
        state["momentum_buffer"] = torch.zeros_like(parameter)
    return state["momentum_buffer"]


class WholeTensors(Protocol):
    """Access to the whole tensors of which this rank holds shards."""

    def summed(self, names: Sequence[str], parameters: Sequence[nn.Parameter], shares: torch.Tensor) -> torch.Tensor:
        """Return `shares` (…, one column for each parameter), each summed over the shards of its parameter."""

    def all_gathered(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole of a tensor that is sharded like the parameter `name` (a collective)."""

    def own_shard(self, name: str, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a whole tensor, as a plain tensor; `like` is the parameter `name`."""
