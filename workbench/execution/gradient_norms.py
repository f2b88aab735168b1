"""Norms of gradients over all ranks, and the clipping by them: of all parameters together, or of each group.

A rank adds the squares of the gradients that it holds, each divided by the number of ranks that hold the same; the sum
over all ranks is the squared norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from workbench.experiment import Optimizer
from workbench.optimizers.adamw import ShardedAdamW
from workbench.optimizers.parameters import local
from workbench.validation import factor_of, first_match


class GradientNorms:
    """The norms and limits of one rank's gradients, and the steps in which its parameters have one."""

    def __init__(
        self,
        settings: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        holders: Mapping[str, int],
        device: torch.device,
    ) -> None:
        """`holders` are the ranks that hold the same values, for the parameters whose squares this rank adds."""
        self._parameters, self._device, self._limit = parameters, device, settings.clip_norm
        scales = settings.grad_norm_scale or {}
        self._divisors = {parameters[name]: count / factor_of(name, scales) ** 2 for name, count in holders.items()}
        limits = settings.clip_norm if isinstance(settings.clip_norm, Mapping) else {}
        self._groups: dict[str, list[nn.Parameter]] = {pattern: [] for pattern in limits}
        """Parameters of each group that has a limit."""
        spans = settings.trained_during or {}
        self._spans: dict[nn.Parameter, tuple[int, int | None]] = {}
        """First and end step of the parameters that are not always trained."""
        for name, parameter in parameters.items():
            if (pattern := first_match(name, limits)) is not None:
                self._groups[pattern].append(parameter)
            if (pattern := first_match(name, spans)) is not None:
                self._spans[parameter] = spans[pattern]

    def free_untrained(self, step: int) -> None:
        """Remove the gradients of parameters that are not trained in step `step`, counted from 0."""
        for parameter, (first, end) in self._spans.items():
            if step < first or (end is not None and step >= end):
                parameter.grad = None

    def squared(self) -> list[torch.Tensor]:
        """Return this rank's share of the squared norm of all gradients, and of those of each group."""
        return [self._squared(parameters) for parameters in (self._parameters.values(), *self._groups.values())]

    def _squared(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor:
        divisors = self._divisors
        counted = ((p.grad, divisors[p]) for p in parameters if p in divisors and p.grad is not None)
        return squared_norm(counted, self._device)

    def clip(self, optimizer: torch.optim.Optimizer, squared: torch.Tensor, of_groups: torch.Tensor) -> None:
        """Clip the gradients, or let the optimiser's kernel do so; the squared norms are those over all ranks."""
        if isinstance(self._limit, Mapping):
            for (pattern, parameters), norm in zip(self._groups.items(), of_groups, strict=True):
                scale_gradients(parameters, clip_factor(norm.sqrt(), self._limit[pattern]))
        elif self._limit is not None:
            factor = clip_factor(squared.sqrt(), self._limit)
            if isinstance(optimizer, ShardedAdamW):
                optimizer.gradient_factor = factor
            else:
                scale_gradients(self._parameters.values(), factor)


@torch.no_grad()  # With autograd, reading the shards of DTensors would take 5 times the host's time.
def squared_norm(gradients: Iterable[tuple[torch.Tensor, float]], device: torch.device) -> torch.Tensor:
    """Return this rank's share of the squared global norm, which is the sum of the shares of all ranks.

    Each gradient (or this rank's shard of it) comes with what its squares are divided by, such as the number of ranks
    that hold the same values.
    """
    alike: dict[tuple[float, torch.dtype], list[torch.Tensor]] = {}
    for gradient, divisor in gradients:
        alike.setdefault((divisor, gradient.dtype), []).append(local(gradient))
    total = torch.zeros((), device=device)
    for (divisor, dtype), shards in alike.items():
        norms = torch._foreach_norm(shards, dtype=torch.float32 if dtype == torch.bfloat16 else None)
        total = total + torch.stack(norms).float().square().sum() / divisor
    return total


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the factor of gradients whose norm may exceed the limit (Pascanu et al., arXiv:1211.5063)."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply every gradient, or this rank's shard of it, by a factor."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
