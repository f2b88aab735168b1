"""Shards of tensors, and sums over them for optimisers that need the norms of whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


Owned = Sequence[Sequence[str]]
"""Names of the matrices that each rank owns, by rank."""
Arriving = Callable[[], dict[str, torch.Tensor]]
"""Waits for a collective, and returns what it brought by name of the matrix."""


class MatrixExchange(Protocol):
    """The ways of matrices from the ranks that hold their shards to their owners, and back.

    All ranks must call `to_owners` and `from_owners` in the same order.
    """

    ranks: int
    rank: int

    def whole_shape(self, name: str, parameter: nn.Parameter) -> torch.Size:
        """Return the shape of the whole of a matrix."""

    def is_source(self, name: str, owner: int) -> bool:
        """Return True if the owner takes this rank's shard of a matrix, and not an equal one of another rank."""

    def to_owners(self, owned: Owned, shards: Mapping[str, torch.Tensor]) -> Arriving:
        """Send this rank's shards, of the matrices it is a source of; whole matrices arrive at their owners."""

    def from_owners(self, owned: Owned, whole: Mapping[str, torch.Tensor]) -> Arriving:
        """Send the matrices that this rank owns; this rank's shards of all owned matrices arrive."""


class OneRank:
    """The exchange of a rank that owns all matrices, and holds them whole."""

    ranks, rank = 1, 0

    def whole_shape(self, name: str, parameter: nn.Parameter) -> torch.Size:  # noqa: ARG002
        return parameter.shape

    def is_source(self, name: str, owner: int) -> bool:  # noqa: ARG002
        return True

    def to_owners(self, owned: Owned, shards: Mapping[str, torch.Tensor]) -> Arriving:  # noqa: ARG002
        return lambda: dict(shards)

    from_owners = to_owners
