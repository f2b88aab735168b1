"""The coordinate check: activation sizes over the first steps at several widths or depths of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.arguments import checked_arguments
from workbench.errors import InvalidArgument
from workbench.experiment import Experiment

Sizes = Mapping[int, Sequence[Mapping[str, float]]]
"""Sizes of the parts' activations by width or depth, before the first step and after every further one."""
WIDTHS = (64, 128, 256)


@dataclass(frozen=True)
class CoordinateCheck:
    """Activation sizes by width or depth; a notebook shows them as a figure."""

    with_rule: Sizes
    without: Sizes
    axis: str = "width"
    """Either `width` or `depth`, by which the models differ."""


@checked_arguments
def coordinate_check(
    experiment: Experiment,
    widths: Sequence[int] | None = None,
    steps: int = 4,
    *,
    depths: Sequence[int] | None = None,
) -> CoordinateCheck:
    """Return activation sizes over the first steps, with the rule of `wb.models.scaling` and without it.

    The experiment's model is the base of the rule. It is trained at each width (or depth) for some steps in this
    process, on the CPU, at the full rate. Sizes that grow with the width or depth mean that a rate does not carry over.

    Args:
        experiment: an experiment with a small `wb.models.…`.
        widths: hidden sizes, each a multiple of the model's head size; 64, 128 and 256 if no depths are given either.
        steps: number of steps.
        depths: numbers of layers, at the model's own width, in place of widths.

    Raises `InvalidExperiment` for a model whose parameters the rule does not know, or a width of other heads.
    """
    from workbench.execution.activation_sizes import activation_sizes
    from workbench.models import at_width, scaling

    axis, values = ("width", WIDTHS if widths is None else widths) if depths is None else ("depth", depths)
    if not values or not 1 <= steps <= 1000 or (widths is not None and depths is not None):
        raise InvalidArgument(
            f"widths={widths}, depths={depths} and steps={steps} compute nothing. Give at least one width or one "
            "depth, not both, and 1 to 1,000 steps."
        )
    experiment.data.check(experiment)
    base: Any = experiment.model
    with_rule, without = {}, {}
    for value in sorted(set(values)):
        model = at_width(base, value) if axis == "width" else dataclasses.replace(base, num_layers=value)
        rule = scaling(base, model)
        with_rule[value] = activation_sizes(experiment.replace(model=rule.model, **rule.optimizer), steps)
        without[value] = activation_sizes(experiment.replace(model=model), steps)
    return CoordinateCheck(with_rule, without, axis)


def drift(sizes: Sizes, part: str, step: int = -1) -> float:
    """Return the exponent with which a size after a step grows with the width or depth: 0 does not drift.

    `part` is `hidden activations`, `residual stream`, `logits`, or `change of the` one of them.
    """
    logs = [np.log(of_steps[step][part]) for of_steps in sizes.values()]
    return float(np.polyfit(np.log(list(sizes)), logs, 1)[0])
