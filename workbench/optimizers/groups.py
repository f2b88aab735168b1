"""Parameter groups: which parameters decay, and the rates that patterns of names give them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from torch import nn

from workbench.experiment import Experiment
from workbench.validation import factor_of

Group = dict[str, Any]
DECAYED_DIMS = 2
"""Least number of dims of a tensor that weight decay applies to."""


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], experiment: Experiment, orthogonal: Set[str] = frozenset()
) -> list[Group]:
    """Divide the trainable parameters by weight decay, by learning rate, and by whether updates are orthogonalised.

    A group has the entries `params`, `names`, `lr`, `weight_decay` and `orthogonal`, which is True for the parameters
    that `orthogonal` names. Tensors of fewer than two dims do not decay.
    """
    groups: dict[tuple[bool, float, bool], Group] = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        decays = parameter.ndim >= DECAYED_DIMS
        scale = factor_of(name, experiment.optimizer.rate_scale or {})
        group = groups.setdefault(
            (not decays, scale, name in orthogonal),
            {
                "params": [],
                "names": [],
                "lr": experiment.learning_rate * scale,
                "weight_decay": experiment.optimizer.weight_decay if decays else 0.0,
                "orthogonal": name in orthogonal,
            },
        )
        group["params"].append(parameter)
        group["names"].append(name)
    return [groups[key] for key in sorted(groups)]
