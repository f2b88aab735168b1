"""Laws of the loss over parameters N and tokens D, and their fit to finished trainings.

For two exponents, the rest of each law is found by non-negative least squares (variable projection, as arXiv:2603.22339
recommends), so that the search has two dims and no start of its own. The loss of the fit is Chinchilla's
(arXiv:2203.15556, D.3): the sum of the Huber losses, with δ = 1e-3, of log(predicted) − log(measured).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Number = float | Array
HUBER = 1e-3
"""δ of the Huber loss: residuals of log L beyond it count linearly (arXiv:2203.15556, D.3)."""
COARSE = 13
"""Exponents tried in each dim before the search narrows."""
ZOOMS, SHRINK = 18, 0.5
"""Number of searches around the best exponents, and how much narrower the next is unless the best lies at the edge."""
ROUNDS = 12
"""Reweightings of the least squares, after which the Huber losses change in the fifth digit."""
CHUNK = 24
"""Fits that are searched at a time, so that the arrays stay small."""


@dataclass(frozen=True, eq=False)
class ChinchillaLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta, in nats (Hoffmann et al., arXiv:2203.15556, eq. 2)."""

    E: Number
    A: Number
    B: Number
    alpha: Number
    beta: Number
    source: str = "fitted"
    form: ClassVar[str] = "Chinchilla's form"

    def loss(self, parameters: Number, tokens: Number) -> Any:
        """Return the loss in nats after this many tokens; arrays are broadcast."""
        return self.E + self.A * np.power(parameters, -self.alpha) + self.B * np.power(tokens, -self.beta)

    def difference(self, small: Number, large: Number, tokens: Number) -> Any:
        """Return by how many nats the law puts the larger model below the smaller one; here at any tokens the same."""
        return self.loss(small, tokens) - self.loss(large, tokens)

    def __str__(self) -> str:
        return f"L = {self.E:.4g} + {self.A:.4g} / N^{self.alpha:.3g} + {self.B:.4g} / D^{self.beta:.3g}"


@dataclass(frozen=True, eq=False)
class KaplanLaw:
    """L(N, D) = ((N_c/N)^(alpha_N/alpha_D) + D_c/D)^alpha_D, in nats (Kaplan et al., arXiv:2001.08361, eq. 1.5)."""

    n_c: Number
    alpha_n: Number
    d_c: Number
    alpha_d: Number
    source: str = "fitted"
    form: ClassVar[str] = "Kaplan et al.'s form"

    def loss(self, parameters: Number, tokens: Number) -> Any:
        """Return the loss in nats after this many tokens; arrays are broadcast."""
        of_size = np.power(self.n_c / parameters, self.alpha_n / self.alpha_d)
        return np.power(of_size + self.d_c / tokens, self.alpha_d)

    def difference(self, small: Number, large: Number, tokens: Number) -> Any:
        """Return by how many nats the law puts the larger model below the smaller one; it grows with the tokens."""
        return self.loss(small, tokens) - self.loss(large, tokens)

    def __str__(self) -> str:
        return (
            f"L = (({self.n_c:.3g} / N)^({self.alpha_n:.3g} / {self.alpha_d:.3g}) + {self.d_c:.3g} / D)"
            f"^{self.alpha_d:.3g}"
        )


Law = ChinchillaLaw | KaplanLaw
KAPLAN = KaplanLaw(6.4e13, 0.076, 1.8e13, 0.103, "Kaplan et al. (table 2 of arXiv:2001.08361, causal models)")
"""Published law of parameters without embeddings and tokens; the joint fit of both."""


@dataclass(frozen=True)
class Form:
    """A form of a law: prediction = (sum of non-negative coefficients × columns)^power, for two exponents."""

    name: str
    law: type[Law]
    ranges: tuple[tuple[float, float], tuple[float, float]]
    """Smallest and largest value of each exponent."""
    columns: Callable[[Array, Array, Array], tuple[Array, Array]]
    """Columns, shape (..., runs, k), and the power, shape (..., 1), for exponents of shape (..., 2), N and D."""
    values: Callable[[Array, Array, float, float, float], dict[str, Array]]
    """Values of the law by name, from exponents and coefficients, with the N, D and loss by which all were divided."""
    freedom: int
    """Number of fitted values."""


def _chinchilla_columns(exponents: Array, n: Array, d: Array) -> tuple[Array, Array]:
    alpha, beta = exponents[..., :1], exponents[..., 1:]
    of_size, of_data = n**-alpha, d**-beta
    return np.stack([np.ones_like(of_size), of_size, of_data], axis=-1), np.ones_like(alpha)


def _chinchilla(exponents: Array, coefficients: Array, n: float, d: float, loss: float) -> dict[str, Array]:
    (alpha, beta), (E, A, B) = exponents.T, loss * coefficients.T
    return {"E": E, "A": A * n**alpha, "B": B * d**beta, "alpha": alpha, "beta": beta}


def _kaplan_columns(exponents: Array, n: Array, d: Array) -> tuple[Array, Array]:
    power = exponents[..., 1:]
    of_size = np.exp(np.clip(-exponents[..., :1] / power * np.log(n), -60, 60))
    return np.stack([of_size, np.broadcast_to(1 / d, of_size.shape)], axis=-1), power


def _kaplan(exponents: Array, coefficients: Array, n: float, d: float, loss: float) -> dict[str, Array]:
    (alpha_n, alpha_d), (of_size, of_data) = exponents.T, coefficients.T
    scale = loss ** (1 / alpha_d)
    n_c = n * (of_size * scale) ** (alpha_d / alpha_n)
    return {"n_c": n_c, "alpha_n": alpha_n, "d_c": of_data * scale * d, "alpha_d": alpha_d}


FORMS = (
    Form("chinchilla", ChinchillaLaw, ((0.03, 2.0), (0.03, 2.0)), _chinchilla_columns, _chinchilla, 5),
    Form("kaplan", KaplanLaw, ((0.01, 2.0), (0.01, 1.5)), _kaplan_columns, _kaplan, 4),
)
"""The forms that are fitted. Exponents of the second are alpha_N and alpha_D."""


def fit(form: Form, parameters: Array, tokens: Array, losses: Array, weights: Array) -> dict[str, Array]:
    """Return the values of the laws that fit best, by name: of each an array, with one for each row of `weights`.

    Args:
        form: the form of the law.
        parameters: N of each run, shape (runs,).
        tokens: D of each run.
        losses: its loss.
        weights: weight of each run, shape (fits, runs).
    """
    n, d, loss = (float(np.exp(np.log(values).mean())) for values in (parameters, tokens, losses))
    scaled = (parameters / n, tokens / d, losses / loss)
    edges = [np.log(ends) for ends in form.ranges]
    grid = np.array(list(itertools.product(*(np.linspace(low, high, COARSE) for low, high in edges))))
    low, high = np.array(edges).T
    around = np.array(list(itertools.product((-1.0, -0.5, 0.0, 0.5, 1.0), repeat=2)))
    found = []
    for start in range(0, len(weights), CHUNK):
        rows = weights[start : start + CHUNK]
        best = _best(form, np.broadcast_to(grid, (len(rows), *grid.shape)), scaled, rows, ROUNDS // 3)[0]
        reach = np.broadcast_to((high - low) / (COARSE - 1), best.shape)
        for _ in range(ZOOMS):
            tried = np.clip(best[:, None] + around * reach[:, None], low, high)
            centre, (best, coefficients) = best, _best(form, tried, scaled, rows, ROUNDS)
            # The best may lie further along a narrow valley.
            far = np.any(np.abs(best - centre) > 0.75 * reach, axis=1, keepdims=True)
            reach = np.where(far, reach, SHRINK * reach)
        found.append((best, coefficients))
    exponents, values = (np.concatenate(parts) for parts in zip(*found, strict=True))
    with np.errstate(over="ignore"):
        return form.values(np.exp(exponents), values, n, d, loss)


def _best(
    form: Form, tried: Array, points: tuple[Array, Array, Array], weights: Array, rounds: int
) -> tuple[Array, Array]:
    """Return the best of the tried log exponents, shape (fits, tried, 2), of each fit, and their coefficients.

    The coefficients are found by reweighted least squares: each round linearises log(prediction) around the last one.
    """
    n, d, losses = points
    columns, power = form.columns(np.exp(tried), n, d)
    weight = np.broadcast_to(weights[:, None], columns.shape[:-1])
    inner = losses ** (1 / power)
    residual, robust = np.zeros_like(inner), np.ones_like(inner)
    for _ in range(rounds):
        slope = power / inner
        coefficients = _non_negative(columns, inner * (1 - residual / power), weight * robust * slope**2)
        inner = np.maximum(np.einsum("...nk,...k->...n", columns, coefficients), 1e-12)
        residual = power * np.log(inner) - np.log(losses)
        size = np.abs(residual)
        robust = np.minimum(1.0, HUBER / np.maximum(size, 1e-12))
    cost = (weight * np.where(size < HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER))).sum(-1)
    at = np.arange(len(tried)), np.argmin(cost, axis=1)
    return tried[at], coefficients[at]


def _non_negative(columns: Array, target: Array, weight: Array) -> Array:
    """Return the coefficients of weighted least squares, none below zero: the best of all choices of columns."""
    normal = np.einsum("...nk,...n,...nl->...kl", columns, weight, columns, optimize=True)
    right = np.einsum("...nk,...n->...k", columns, weight * target)
    count = columns.shape[-1]
    best: Array = np.zeros_like(right)
    least = np.full(right.shape[:-1], np.inf)
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            part, aim = normal[..., chosen, :][..., :, chosen], right[..., chosen]
            ridge = 1e-12 * np.trace(part, axis1=-2, axis2=-1)[..., None, None] * np.eye(size)
            values = np.linalg.solve(part + ridge, aim[..., None])[..., 0]
            cost = np.where((values >= 0).all(-1), -(values * aim).sum(-1), np.inf)
            better = cost < least
            least = np.where(better, cost, least)
            full = np.zeros_like(right)
            full[..., chosen] = values
            best = np.where(better[..., None], full, best)
    return best
