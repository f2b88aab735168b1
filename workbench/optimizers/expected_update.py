"""The size of an update that an optimiser's formulas let expect, before anything is measured.

Of most optimisers the size depends on how alike the gradients of successive steps are. The two ends of an interval are
those of gradients that are independent of each other from step to step, and of gradients that are all the same.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from workbench.base.validation import factor_of, first_match
from workbench.capture.blocks.hidden_matrices import Projections
from workbench.experiment import Experiment
from workbench.optimizers.adamw import ADAPTED_DIMS
from workbench.optimizers.building import MOMENTUM
from workbench.optimizers.muon import COEFFICIENTS, update_scale
from workbench.optimizers.parameters import parameter_groups, rate_factor


class Expected(NamedTuple):
    """Norms of an update that are expected; NaN where no formula says so."""

    least: float
    most: float


UNKNOWN = Expected(math.nan, math.nan)
LEAST_SINGULAR = 1e-3
"""Smallest singular value, as a share of the norm, that Polar Express is made to take to 1 (arXiv:2505.16932)."""


class ExpectedUpdates:
    """The updates that an experiment's optimiser lets expect, by parameter.

    The factors of a rule of widths (`wb.models.scaling`) are in the experiment's `rate_scale`, `decay_scale`,
    `eps_scale` and `grad_norm_scale`, and so in what is expected.
    """

    def __init__(
        self, experiment: Experiment, shapes: Mapping[str, Sequence[int]], matrices: Mapping[str, Projections]
    ) -> None:
        """`shapes` are those of the trained parameters; `matrices` are the ones among them that Muon updates."""
        self._experiment, self._shapes, self._matrices = experiment, shapes, matrices
        parameters = {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes.items()}
        groups = parameter_groups(parameters, experiment, matrices)
        self._groups: dict[str, dict[str, Any]] = {name: group for group in groups for name in group["names"]}

    def at(self, step: int, weights: Mapping[str, float], gradients: Mapping[str, float]) -> dict[str, Expected]:
        """Return what is expected of the update of step `step`, counted from 0.

        `weights` are the norms of whole parameters before the update, and `gradients` those of gradients before
        clipping, without those of parameters that the step does not train.
        """
        factors = self._clip_factors(gradients)
        return {
            name: self._of(name, step, weights[name], gradients[name] * factors[name]) if name in gradients else UNKNOWN
            for name in weights
        }

    def _of(self, name: str, step: int, weight: float, gradient: float) -> Expected:
        """Return what is expected of one parameter, from the norms of its weights and of its clipped gradient."""
        optimizer, group = self._experiment.optimizer, self._groups[name]
        rate = group["lr"] * rate_factor(self._experiment, step)
        spans = optimizer.trained_during or {}
        pattern = first_match(name, spans)
        updates = step + 1 - (spans[pattern][0] if pattern is not None else 0)
        decay = group["weight_decay"] * weight
        if name in self._matrices:
            # An orthogonal matrix of m × n has the norm √min(m, n); its singular values are 1 but for what is left by
            # the polynomials.
            shapes = self._matrices[name].shapes(self._shapes[name])
            squares = sum(update_scale(shape, optimizer.muon_scale) ** 2 * min(shape) for shape in shapes)
            low, high = polar_range()
            norm = rate * math.sqrt(squares)
            return Expected(low * norm, high * norm + rate * decay)
        if optimizer.record.expected is None:
            return UNKNOWN
        formula: Callable[[Update], Expected] = pkgutil.resolve_name(optimizer.record.expected)
        eps = group.get("eps", optimizer.eps)
        return formula(Update(self._shapes[name], rate, updates, weight, gradient, decay, optimizer.betas[0], eps))

    def _clip_factors(self, gradients: Mapping[str, float]) -> dict[str, float]:
        """Return the factor by which clipping multiplies each gradient."""
        settings = self._experiment.optimizer
        limit = settings.clip_norm
        scales = settings.grad_norm_scale or {}

        def factor(names: Sequence[str], limit: float, scales: Mapping[str, float]) -> float:
            norm = math.sqrt(sum((gradients[name] * factor_of(name, scales)) ** 2 for name in names))
            return min(1.0, limit / (norm + 1e-6))

        if limit is None:
            return dict.fromkeys(gradients, 1.0)
        if not isinstance(limit, Mapping):
            return dict.fromkeys(gradients, factor(list(gradients), limit, scales))
        patterns = {name: first_match(name, limit) for name in gradients}
        of_group = {
            pattern: factor([name for name, found in patterns.items() if found == pattern], limit[pattern], scales)
            for pattern in limit
        }
        return {name: 1.0 if pattern is None else of_group[pattern] for name, pattern in patterns.items()}


class Update(NamedTuple):
    """One update of a parameter, as the formulas read it: norms are those of the whole parameter."""

    shape: Sequence[int]
    rate: float
    updates: int
    """Number of updates with this one."""
    weight: float
    gradient: float
    decay: float
    """Norm of the decay before it is multiplied by the rate."""
    first_beta: float
    eps: float


def of_sgd(update: Update) -> Expected:
    """v = Σ μ^k g: the squares of the weights add up for independent gradients, and the weights for equal ones."""
    independent = math.sqrt((1 - MOMENTUM ** (2 * update.updates)) / (1 - MOMENTUM**2))
    alike = (1 - MOMENTUM**update.updates) / (1 - MOMENTUM)
    return Expected(update.rate * update.gradient * independent, update.rate * (update.gradient + update.decay) * alike)


def of_lamb(update: Update) -> Expected:
    """LAMB scales the update of a matrix to the norm of its weights, and moves other parameters as Adam does."""
    if len(update.shape) < ADAPTED_DIMS or update.weight <= 0:
        return of_adam(update)
    return Expected(update.rate * update.weight, update.rate * update.weight)


def of_adam(update: Update) -> Expected:
    """m̂ is a mean of gradients with weights that add up to 1, and √v̂ is their root mean square.

    The squares of these weights add up to the square of `independent`.
    """
    first, elements = update.first_beta, math.prod(update.shape)
    independent = math.sqrt((1 - first) * (1 + first**update.updates) / ((1 + first) * (1 - first**update.updates)))
    rms = update.gradient / math.sqrt(max(1, elements))
    norm = update.rate * math.sqrt(elements) * (rms / (rms + update.eps))
    return Expected(norm * independent, norm + update.rate * update.decay)


@cache
def polar_range() -> Expected:
    """Return the least and the largest singular value that Muon's polynomials make of those from `LEAST_SINGULAR`."""
    values = np.geomspace(LEAST_SINGULAR, 1.0, 20_000)
    for a, b, c in COEFFICIENTS:
        values = a * values + b * values**3 + c * values**5
    return Expected(float(values.min()), float(values.max()))
