"""AdamW with warm-up and decay, and a gradient norm over all stages and shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from workbench.execution.shard import is_sharded, local
from workbench.experiment import Experiment


def learning_rate_factor(step: int, warmup: int, steps: int, schedule: str) -> float:
    """Multiplier of the peak learning rate for the update after `step` completed steps.

    Linear warm-up reaches 1 at update `warmup`; then linear or cosine decay to 0 at `steps`, or constant.
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress


def build_optimizer(parameters: Mapping[str, nn.Parameter], experiment: Experiment) -> torch.optim.AdamW:
    """AdamW over trainable parameters; weight decay on matrices only (tensors of two dims or more)."""
    trainable = [p for p in parameters.values() if p.requires_grad]
    decayed = [p for p in trainable if p.ndim >= 2]
    plain = [p for p in trainable if p.ndim < 2]
    groups = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((decayed, experiment.weight_decay), (plain, 0.0))
        if group
    ]
    on_gpu = any(p.device.type == "cuda" for p in trainable)
    return torch.optim.AdamW(
        groups or [{"params": []}],
        lr=experiment.learning_rate,
        betas=experiment.betas,
        eps=experiment.eps,
        fused=True if on_gpu else None,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


def squared_norm(parameters: Iterable[nn.Parameter], replicas: int, device: torch.device) -> torch.Tensor:
    """This rank's share of the squared global norm: summed over all ranks, it is the whole.

    A shard counts as it is; a gradient that every replica holds counts for 1 / `replicas` on each.
    """
    total = torch.zeros((), device=device)
    by_kind: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for parameter in parameters:
        if parameter.grad is not None:
            by_kind[is_sharded(parameter.grad)].append(local(parameter.grad).detach())
    for sharded, gradients in by_kind.items():
        if gradients:
            norms = torch._foreach_norm(gradients)
            square = torch.stack(norms).float().square().sum()
            total = total + (square if sharded else square / replicas)
    return total


def clip(parameters: Iterable[nn.Parameter], norm: torch.Tensor, limit: float) -> None:
    """Scale every gradient by `limit / norm` where the norm exceeds the limit (Pascanu et al., 2013)."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
