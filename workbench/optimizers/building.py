"""The optimiser of an experiment over named parameters."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import nn

from workbench.experiment import Experiment
from workbench.optimizers.adamw import OffloadedAdamW, ShardedAdamW
from workbench.optimizers.groups import parameter_groups
from workbench.optimizers.lamb import Lamb
from workbench.optimizers.muon import MuonAndAdamW
from workbench.optimizers.sgd import MOMENTUM, ShardedSGD
from workbench.optimizers.shards import WholeTensors
from workbench.optimizers.user_optimizer import ShardedUserOptimizer
from workbench.user_code import UserFunction


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    experiment: Experiment,
    *,
    offload: bool = False,
    whole: WholeTensors | None = None,
    matrices: Set[str] = frozenset(),
) -> torch.optim.Optimizer:
    """Return the experiment's optimiser over the trainable parameters, which go by the model's names.

    `whole` is needed where parameters are divided over ranks. With `offload`, AdamW's moments stay in the host's
    memory. `matrices` are the parameters that Muon updates.
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
        return MuonAndAdamW(groups, lr=rate, betas=betas, eps=eps, fused=fused, whole=whole)
    adamw = OffloadedAdamW if offload else ShardedAdamW
    return adamw(groups, lr=rate, betas=betas, eps=eps, fused=fused)
