"""The optimiser of an experiment over named parameters: parameter groups, and the rates that patterns give them."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from workbench.experiment import Experiment
from workbench.optimizers.adamw import OffloadedAdamW, PartwiseAdamW
from workbench.optimizers.lamb import Lamb
from workbench.optimizers.sgd import MOMENTUM, PartwiseSGD
from workbench.optimizers.shards import WholeTensors

Group = dict[str, Any]
DECAYED_DIMS = 2
"""Least number of dims of a tensor that weight decay applies to."""


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    experiment: Experiment,
    *,
    offload: bool = False,
    whole: WholeTensors | None = None,
) -> torch.optim.Optimizer:
    """Return the experiment's optimiser over the trainable parameters, which go by the model's names.

    `whole` is needed where parameters are divided over ranks. With `offload`, AdamW's moments stay in the host's
    memory.
    """
    groups = parameter_groups(parameters, experiment) or [{"params": [], "names": []}]
    rate, betas, eps = experiment.learning_rate, experiment.betas, experiment.eps
    if experiment.optimizer == "sgd":
        return PartwiseSGD(groups, lr=rate, momentum=MOMENTUM)
    if experiment.optimizer == "lamb":
        return Lamb(groups, lr=rate, betas=betas, eps=eps, whole=whole)
    on_gpu = any(p.device.type == "cuda" for group in groups for p in group["params"])
    adamw = OffloadedAdamW if offload else PartwiseAdamW
    return adamw(groups, lr=rate, betas=betas, eps=eps, fused=True if on_gpu and not offload else None)


def parameter_groups(parameters: Mapping[str, nn.Parameter], experiment: Experiment) -> list[Group]:
    """Divide the trainable parameters by weight decay and by learning rate.

    A group has the entries `params`, `names`, `lr` and `weight_decay`. Tensors of fewer than two dims do not decay.
    """
    groups: dict[tuple[bool, float], Group] = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        decays = parameter.ndim >= DECAYED_DIMS
        scale = rate_scale(name, experiment.rate_scale)
        group = groups.setdefault(
            (not decays, scale),
            {
                "params": [],
                "names": [],
                "lr": experiment.learning_rate * scale,
                "weight_decay": experiment.weight_decay if decays else 0.0,
            },
        )
        group["params"].append(parameter)
        group["names"].append(name)
    return [groups[key] for key in sorted(groups)]


def rate_scale(name: str, scales: Mapping[str, float] | None) -> float:
    """Return the scale of the first pattern (`fnmatch`) that matches a parameter's name, or 1."""
    return next((scale for pattern, scale in (scales or {}).items() if fnmatch.fnmatchcase(name, pattern)), 1.0)
