"""The optimiser of an experiment over named parameters, and stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim.sgd import sgd

from workbench.capture.hidden_matrices import Projections
from workbench.experiment import Experiment
from workbench.optimizers.adamw import OffloadedAdamW, ShardedAdamW
from workbench.optimizers.groups import parameter_groups
from workbench.optimizers.lamb import Lamb
from workbench.optimizers.muon import MuonAndAdamW
from workbench.optimizers.shards import MatrixExchange, WholeTensors, local, momentum_of
from workbench.optimizers.user_optimizer import ShardedUserOptimizer
from workbench.user_code import UserFunction


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    experiment: Experiment,
    *,
    offload: bool = False,
    whole: WholeTensors | None = None,
    matrices: Mapping[str, Projections] = MappingProxyType({}),
    exchange: MatrixExchange | None = None,
    apart: Collection[str] = (),
) -> torch.optim.Optimizer:
    """Return the experiment's optimiser over the trainable parameters, which go by the model's names.

    `whole` is needed where parameters are divided over ranks. With `offload`, AdamW's moments stay in the host's
    memory. `matrices` are the parameters that Muon updates; `exchange` and `apart` are those of `MuonAndAdamW`.
    """
    groups = parameter_groups(parameters, experiment, matrices) or [{"params": [], "names": [], "orthogonal": False}]
    rate, betas, eps = experiment.learning_rate, experiment.optimizer.betas, experiment.optimizer.eps
    if isinstance(experiment.optimizer.algorithm, UserFunction):
        return ShardedUserOptimizer(experiment.optimizer.algorithm, groups)
    if experiment.optimizer.algorithm == "sgd":
        return ShardedSGD(groups, lr=rate, momentum=MOMENTUM)
    if experiment.optimizer.algorithm == "lamb":
        return Lamb(groups, lr=rate, betas=betas, eps=eps, whole=whole)
    on_gpu = any(p.device.type == "cuda" for group in groups for p in group["params"])
    fused = True if on_gpu and not offload else None
    if experiment.optimizer.algorithm == "muon":
        return MuonAndAdamW(
            groups,
            projections=matrices,
            scale=experiment.optimizer.muon_scale,
            exchange=exchange,
            apart=apart,
            lr=rate,
            betas=betas,
            eps=eps,
            fused=fused,
        )
    adamw = OffloadedAdamW if offload else ShardedAdamW
    return adamw(groups, lr=rate, betas=betas, eps=eps, fused=fused)


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
