"""Parameter groups: which parameters decay, and the rates that patterns of names give them."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Set
from typing import Any

from torch import nn

from workbench.experiment import Experiment

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
        scale = rate_scale(name, experiment.optimizer.rate_scale)
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


def rate_scale(name: str, scales: Mapping[str, float] | None) -> float:
    """Return the scale of the first pattern (`fnmatch`) that matches a parameter's name, or 1."""
    return next((scale for pattern, scale in (scales or {}).items() if fnmatch.fnmatchcase(name, pattern)), 1.0)
