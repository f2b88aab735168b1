"""AdamW and LAMB over sharded parameters; the moments of AdamW may stay in the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from workbench.optimizers.parameters import WholeTensors, local
from workbench.sparsity.kernels.operators import runs_triton

if TYPE_CHECKING:
    from workbench.optimizers.update_kernels import TensorTable

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
    of `DTensor`s would take. The moments of a `DTensor` are `DTensor`s, so that checkpoints know their placements. On a
    GPU the formulas are the same, and a kernel of ours computes them (`workbench.optimizers.update_kernels`).
    """

    skips_update: torch.Tensor | None = None
    """A scalar on the device: where it is 1, a fused update changes nothing."""
    gradient_factor: torch.Tensor | None = None
    """A scalar on the device by which the next update multiplies gradients, in place unless our kernel runs."""
    copies: Mapping[nn.Parameter, torch.Tensor] = MappingProxyType({})
    """bf16 copies of parameters, which our kernel writes in its update."""
    copied: Mapping[nn.Parameter, int] = MappingProxyType({})
    """The parameters whose copies the last update has written, with their version at that time."""

    @property
    def reads_bf16_gradients(self) -> bool:
        """True if our kernels update all parameters: they read gradients in bf16 as well as in fp32."""
        by_kernel = bool(self.defaults["fused"]) and not isinstance(self, OffloadedAdamW)
        return by_kernel and all(runs_triton(parameter) for group in self.param_groups for parameter in group["params"])

    @cached_property
    def _tables(self) -> dict[int, TensorTable]:
        """The tables of our kernels, by the number of what they update."""
        return {}

    def _table(self, number: int) -> TensorTable:
        from workbench.optimizers.update_kernels import TensorTable

        return self._tables.setdefault(number, TensorTable())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        self.copied = {}
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
        if not self._update_by_kernel(parameters, moments, states, group):
            gradients = self._scaled_gradients(parameters)
            _adamw(parameters, gradients, moments, states, group, fused=group["fused"], skips=self.skips_update)

    def _update_by_kernel(
        self,
        parameters: list[nn.Parameter],
        moments: list[list[torch.Tensor]],
        states: list[dict[str, Any]],
        group: dict[str, Any],
    ) -> bool:
        """Return True if our kernel has updated the parameters, False if it cannot."""
        if not group["fused"] or not runs_triton(parameters[0]):
            return False
        from workbench.optimizers.update_kernels import adamw as by_kernel

        is_updated = by_kernel(
            self._table(-id(group)),
            [local(p.grad) for p in parameters if p.grad is not None],
            [[local(p) for p in parameters], *moments],
            [self.copies.get(p) for p in parameters],
            states,
            group,
            factor=self.gradient_factor,
            skips=self.skips_update,
        )
        if is_updated:
            self._note_copies(parameters)
        return is_updated

    def _note_copies(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note that a kernel has written the copies of those of the parameters that have one."""
        self.copied = {**self.copied, **{p: p._version for p in parameters if p in self.copies}}

    def _scaled_gradients(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        gradients = [local(p.grad).to(p.dtype) for p in parameters if p.grad is not None]
        if self.gradient_factor is not None:
            torch._foreach_mul_(gradients, self.gradient_factor)
        return gradients

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
        gradients = self._scaled_gradients(parameters)
        _adamw(parameters, gradients, moments, states, group, foreach=device.type == "cuda")
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
    gradients: list[torch.Tensor],
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
        gradients,
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


# LAMB over sharded parameters (You et al., "Large batch optimization for deep learning", arXiv:1904.00962).

ADAPTED_DIMS = 2
"""Least number of dims of a tensor whose update LAMB scales by the norm of its weights. The authors' own training of
BERT leaves out biases and normalisation weights, which start at 0 or 1 and would hardly move."""


class Lamb(torch.optim.Optimizer):
    """LAMB, algorithm 2 of the paper: Adam's direction with decay, scaled per tensor by ‖weight‖ / ‖direction‖.

    Norms are those of whole tensors, summed over all shards in one batch. Biases and normalisation weights move without
    this scale. A step replaces each gradient by its direction, so that it needs no memory for the directions.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        whole: WholeTensors | None = None,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "names": []})
        self._whole = whole

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameters in batches([p for p in group["params"] if p.grad is not None]):
                self._replace_gradients(parameters, group)
        self._scale()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                directions = [local(p.grad) for p in parameters if p.grad is not None]
                torch._foreach_add_([local(p) for p in parameters], directions, alpha=-group["lr"])
        return loss

    def _replace_gradients(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update the moments, and write m̂ / (√v̂ + ε) + λ · weight over each gradient."""
        first_decay, second_decay = group["betas"]
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        states = [self._state(parameter) for parameter in parameters]
        for state in states:
            state["step"] += 1
        first, second = ([local(state[slot]) for state in states] for slot in MOMENTS)
        torch._foreach_lerp_(first, gradients, 1 - first_decay)
        torch._foreach_mul_(second, second_decay)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - second_decay)
        steps = [float(state["step"]) for state in states]
        denominators = torch._foreach_sqrt(second)
        torch._foreach_div_(denominators, [(1 - second_decay**step) ** 0.5 for step in steps])
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_copy_(gradients, first)
        torch._foreach_div_(gradients, [1 - first_decay**step for step in steps])
        torch._foreach_div_(gradients, denominators)
        if group["weight_decay"]:
            torch._foreach_add_(gradients, [local(p) for p in parameters], alpha=group["weight_decay"])

    def _scale(self) -> None:
        """Multiply each direction by the norm of its whole weight over its own."""
        named = [
            (name, parameter)
            for group in self.param_groups
            for name, parameter in zip(group["names"], group["params"], strict=True)
            if parameter.ndim >= ADAPTED_DIMS
        ]
        if not named:
            return
        names, parameters = zip(*named, strict=True)
        weights = [local(parameter) for parameter in parameters]
        directions = [torch.zeros_like(local(p)) if p.grad is None else local(p.grad) for p in parameters]
        shares = torch.stack([torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, directions)])
        squares = shares.float().square()
        norms = (squares if self._whole is None else self._whole.summed(names, parameters, squares)).sqrt()
        ratios = torch.where((norms[0] > 0) & (norms[1] > 0), norms[0] / norms[1], 1.0)
        torch._foreach_mul_(directions, list(ratios.unbind()))

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for slot in MOMENTS:
                state[slot] = torch.zeros_like(parameter)
        return state
