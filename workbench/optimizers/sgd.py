"""Stochastic gradient descent with momentum over sharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.sgd import sgd

from workbench.optimizers.shards import local, momentum_of

MOMENTUM = 0.9
"""Momentum of `optimizer="sgd"`."""


class ShardedSGD(torch.optim.SGD):
    """SGD that updates this rank's shard of each parameter as a plain tensor, with the numbers of `torch.optim.SGD`.

    Weight decay is added to the gradient, as there. The momentum of a `DTensor` is a `DTensor`; it begins at zero, so
    that the first update equals PyTorch's, which is the gradient.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                sgd(
                    [local(parameter) for parameter in parameters],
                    [local(parameter.grad) for parameter in parameters],
                    [local(momentum_of(self, parameter)) for parameter in parameters],
                    weight_decay=group["weight_decay"],
                    momentum=group["momentum"],
                    lr=group["lr"],
                    dampening=group["dampening"],
                    nesterov=group["nesterov"],
                    maximize=group["maximize"],
                )
        return loss
