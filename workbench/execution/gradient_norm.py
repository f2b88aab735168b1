"""The norm of the gradient over all stages and shards, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from workbench.optimizers.shards import local


@torch.no_grad()  # With autograd, reading the shards of DTensors would take 5 times the host's time.
def squared_norm(gradients: Iterable[tuple[torch.Tensor, int]], device: torch.device) -> torch.Tensor:
    """Return this rank's share of the squared global norm, which is the sum of the shares of all ranks.

    Each gradient (or this rank's shard of it) comes with the number of ranks that hold the same values, and counts for
    1 / that number on each of them.
    """
    by_holders: dict[int, list[torch.Tensor]] = {}
    for gradient, holders in gradients:
        by_holders.setdefault(holders, []).append(local(gradient))
    total = torch.zeros((), device=device)
    for holders, shards in by_holders.items():
        norms = torch._foreach_norm(shards)
        total = total + torch.stack(norms).float().square().sum() / holders
    return total


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], norm: torch.Tensor, limit: float) -> None:
    """Scale every gradient by `limit / norm` if the norm exceeds the limit (Pascanu et al., arXiv:1211.5063)."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
