"""AdamW over sharded parameters, its learning-rate schedule, and the gradient norm over all stages and shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from workbench.execution.parallel.sharding import local
from workbench.experiment import Experiment

MOMENTS = ("exp_avg", "exp_avg_sq")
OFFLOAD_ELEMENTS = 32 << 20
"""Number of parameter elements whose offloaded moments are on the device at once during an update."""


def learning_rate_factor(step: int, warmup: int, steps: int, schedule: str) -> float:
    """Return the multiple of the peak learning rate for the update after `step` completed steps.

    A linear warm-up reaches 1 at update `warmup`. Then the schedule decays (`linear`, `cosine`) to 0 at `steps`, or
    stays (`constant`).
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], experiment: Experiment, offload: bool = False
) -> PartwiseAdamW:
    """Return AdamW over the trainable parameters, with weight decay on tensors of two or more dims only.

    With `offload`, its moments stay in the host's memory.
    """
    trainable = [p for p in parameters.values() if p.requires_grad]
    decayed = [p for p in trainable if p.ndim >= 2]
    plain = [p for p in trainable if p.ndim < 2]
    groups = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((decayed, experiment.weight_decay), (plain, 0.0))
        if group
    ]
    on_gpu = any(p.device.type == "cuda" for p in trainable)
    return (OffloadedAdamW if offload else PartwiseAdamW)(
        groups or [{"params": []}],
        lr=experiment.learning_rate,
        betas=experiment.betas,
        eps=experiment.eps,
        fused=True if on_gpu and not offload else None,
    )


class PartwiseAdamW(torch.optim.AdamW):
    """AdamW that updates this rank's shard of each parameter as a plain tensor.

    The numbers are those of `torch.optim.AdamW`, in a fifth of the host's time, most of which the dispatch of hundreds
    of `DTensor`s would take. The moments of a `DTensor` are `DTensor`s, so that checkpoints know their placements.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameters in self._batches([p for p in group["params"] if p.grad is not None]):
                self._update(parameters, group)
        return loss

    def _batches(self, parameters: list[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
        """Divide parameters into lists that are updated at once."""
        return [parameters] if parameters else []

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        states = [self._state(parameter) for parameter in parameters]
        moments = [[local(state[slot]) for state in states] for slot in MOMENTS]
        _adamw(parameters, moments, states, group, fused=group["fused"])

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device if self.defaults["fused"] else "cpu")
            for slot in MOMENTS:
                state[slot] = self._zeros(parameter)
        return state

    def _zeros(self, parameter: nn.Parameter) -> torch.Tensor:
        return torch.zeros_like(parameter)


class OffloadedAdamW(PartwiseAdamW):
    """AdamW whose moments stay in the host's (pinned) memory and are copied to the device, some at a time, for updates.

    Weights and gradients stay on the device, which computes the same update as without offloading. A step moves 8 bytes
    per parameter each way. Copies are queued on the device's stream: wait for the step before reading the moments.
    """

    def _batches(self, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Divide parameters, in order, into lists of about `OFFLOAD_ELEMENTS`."""
        batch: list[nn.Parameter] = []
        for parameter in parameters:
            if batch and sum(local(p).numel() for p in batch) + local(parameter).numel() > OFFLOAD_ELEMENTS:
                yield batch
                batch = []
            batch.append(parameter)
        if batch:
            yield batch

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        states = [self._state(parameter) for parameter in parameters]
        device = parameters[0].device
        host_moments = [[local(state[slot]) for state in states] for slot in MOMENTS]
        moments = [[host.to(device, non_blocking=True) for host in hosts] for hosts in host_moments]
        _adamw(parameters, moments, states, group, foreach=device.type == "cuda")
        for hosts, moved in zip(host_moments, moments, strict=True):
            for host, moment in zip(hosts, moved, strict=True):
                if host is not moment:
                    host.copy_(moment, non_blocking=True)

    def _zeros(self, parameter: nn.Parameter) -> torch.Tensor:
        shard = local(parameter)
        zeros = torch.zeros(shard.shape, dtype=shard.dtype, device="cpu", pin_memory=shard.device.type == "cuda")
        if not isinstance(parameter, DTensor):
            return zeros
        return DTensor(zeros, parameter._spec, requires_grad=False)  # from_local would move it to the mesh's device.


def _adamw(
    parameters: list[nn.Parameter],
    moments: list[list[torch.Tensor]],
    states: list[dict[str, Any]],
    group: dict[str, Any],
    *,
    foreach: bool | None = None,
    fused: bool | None = None,
) -> None:
    """Update this rank's shards once; `moments` are their first and their second moments."""
    adamw(
        [local(parameter) for parameter in parameters],
        [local(parameter.grad) for parameter in parameters if parameter.grad is not None],
        moments[0],
        moments[1],
        [],
        [state["step"] for state in states],
        foreach=foreach,
        fused=fused,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


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
