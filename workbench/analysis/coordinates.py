"""The coordinate check: activation sizes over the first steps at several widths of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.arguments import checked_arguments
from workbench.errors import InvalidArgument
from workbench.experiment import Experiment

Sizes = Mapping[int, Sequence[Mapping[str, float]]]
"""Sizes of the activations by width and by name, before the first step and after every further one."""
HIDDEN, READ_OUT = "hidden activations", "logits"


@dataclass(frozen=True)
class CoordinateCheck:
    """Activation sizes by width; a notebook shows them as a figure."""

    with_rule: Sizes
    without: Sizes


@checked_arguments
def coordinate_check(experiment: Experiment, widths: Sequence[int] = (64, 128, 256), steps: int = 4) -> CoordinateCheck:
    """Return activation sizes over the first steps by width, with the rule of `wb.models.scaling` and without it.

    The experiment's model is the base of the rule. It is trained at each width for some steps in this process, on the
    CPU, at the full rate. Sizes that grow with the width mean that a rate does not carry over.

    Args:
        experiment: an experiment with a small `wb.models.…`.
        widths: hidden sizes, each a multiple of the model's head size.
        steps: number of steps.

    Raises `InvalidExperiment` for a model whose parameters the rule does not know, or a width of other heads.
    """
    from workbench.execution.activation_sizes import activation_sizes
    from workbench.models import at_width, scaling

    if not widths or not 1 <= steps <= 1000:
        raise InvalidArgument(
            f"widths={list(widths)} and steps={steps} compute nothing. Give at least one width and 1 to 1,000 steps."
        )
    experiment.data.check(experiment)
    base: Any = experiment.model
    with_rule, without = {}, {}
    for width in sorted(set(widths)):
        model = at_width(base, width)
        rule = scaling(base, model)
        scaled = experiment.replace(model=rule.model, **rule.optimizer)
        with_rule[width] = activation_sizes(scaled, steps)
        without[width] = activation_sizes(experiment.replace(model=model), steps)
    return CoordinateCheck(with_rule, without)


def drift(sizes: Sizes, part: str, step: int = -1) -> float:
    """Return the exponent with which sizes after a step grow with the width: 0 does not drift, 0.5 is its square root.

    `part` is `hidden activations` (the geometric mean of all but the read-out) or `logits`.
    """
    widths = sorted(sizes)
    logs = [np.log(activation_size(sizes[width][step], part)) for width in widths]
    return float(np.polyfit(np.log(widths), logs, 1)[0])


def activation_size(sizes: Mapping[str, float], part: str) -> float:
    """Return the size of one part of a model: that of the read-out, or the geometric mean of all others."""
    *hidden, read_out = sizes.values()
    return read_out if part == READ_OUT else float(np.exp(np.log(hidden).mean()))
