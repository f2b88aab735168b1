"""Parameter groups: which parameters decay, and the rate, decay and epsilon that patterns of names give them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from workbench.experiment import Experiment
from workbench.validation import factor_of

Group = dict[str, Any]
DECAYED_DIMS = 2
"""Least number of dims of a tensor that weight decay applies to."""


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], experiment: Experiment, orthogonal: Collection[str] = ()
) -> list[Group]:
    """Divide the trainable parameters by decay, rate, epsilon, and by whether updates are orthogonalised.

    A group has the entries `params`, `names`, `lr`, `weight_decay` and `orthogonal`, which is True for the parameters
    that `orthogonal` names, and `eps` if the experiment scales it. Tensors of fewer than two dims do not decay. The
    rate of parameters that AdamW updates beside Muon is the experiment's `adamw_rate`.
    """
    chosen = experiment.optimizer
    of_others = chosen.adamw_rate or experiment.learning_rate
    groups: dict[tuple[float, ...], Group] = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        decays = parameter.ndim >= DECAYED_DIMS
        rate, decay, eps = (
            factor_of(name, scale or {}) for scale in (chosen.rate_scale, chosen.decay_scale, chosen.eps_scale)
        )
        group = groups.setdefault(
            (not decays, rate, decay if decays else 1.0, eps, name in orthogonal),
            {
                "params": [],
                "names": [],
                "lr": rate * (experiment.learning_rate if name in orthogonal else of_others),
                "weight_decay": chosen.weight_decay * decay if decays else 0.0,
                "orthogonal": name in orthogonal,
                **({"eps": chosen.eps * eps} if chosen.eps_scale else {}),
            },
        )
        group["params"].append(parameter)
        group["names"].append(name)
    return [groups[key] for key in sorted(groups)]
