"""AdamW over sharded parameters, whose moments may stay in the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from workbench.optimizers.shards import local

MOMENTS = ("exp_avg", "exp_avg_sq")
BATCH_ELEMENTS = 32 << 20
"""Number of parameter elements that are updated at once where an update needs memory: that of offloaded moments on the
device, or of intermediate results."""


def batches(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Divide parameters, in order, into lists of about `BATCH_ELEMENTS`."""
    batch: list[nn.Parameter] = []
    for parameter in parameters:
        if batch and sum(local(p).numel() for p in batch) + local(parameter).numel() > BATCH_ELEMENTS:
            yield batch
            batch = []
        batch.append(parameter)
    if batch:
        yield batch


class ShardedAdamW(torch.optim.AdamW):
    """AdamW that updates this rank's shard of each parameter as a plain tensor.

    The numbers are those of `torch.optim.AdamW`, in a fifth of the host's time, most of which the dispatch of hundreds
    of `DTensor`s would take. The moments of a `DTensor` are `DTensor`s, so that checkpoints know their placements.
    """

    skips_update: torch.Tensor | None = None
    """A scalar on the device: where it is 1, a fused update changes nothing."""

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
        _adamw(parameters, moments, states, group, fused=group["fused"], skips=self.skips_update)

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device if self.defaults["fused"] else "cpu")
            for slot in MOMENTS:
                state[slot] = self._zeros(parameter)
        return state

    def _zeros(self, parameter: nn.Parameter) -> torch.Tensor:
        return torch.zeros_like(parameter)


class OffloadedAdamW(ShardedAdamW):
    """AdamW whose moments stay in the host's (pinned) memory and are copied to the device, some at a time, for updates.

    Weights and gradients stay on the device, which computes the same update as without offloading. A step moves 8 bytes
    per parameter each way. Copies are queued on the device's stream: wait for the step before reading the moments.
    """

    def _batches(self, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        return batches(parameters)

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
    skips: torch.Tensor | None = None,
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
        found_inf=skips,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
