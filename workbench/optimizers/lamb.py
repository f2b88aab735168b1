"""LAMB over sharded parameters (You et al., "Large batch optimization for deep learning", arXiv:1904.00962)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from workbench.optimizers.adamw import MOMENTS, batches
from workbench.optimizers.shards import WholeTensors, local

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
