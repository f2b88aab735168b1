"""The scaling law of finished runs: fitted, tested on sizes that the fit has not seen, and asked about others.

The interval of a prediction comes from `RESAMPLES` fits with random weights (the Bayesian bootstrap, Rubin 1981, Ann.
Statist. 9, 130): a weight for each size times one for each run, both exponential. A size whose recipe suits it less
than the others' moves all of its runs alike, which weights of runs alone would not show.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from workbench.analysis.contrast import Interval
from workbench.analysis.curve import CONFIDENCE, scatter_of
from workbench.base.arguments import checked_arguments
from workbench.base.display import html_table, text_table
from workbench.base.errors import InvalidArgument, InvalidExperiment
from workbench.base.units import count
from workbench.experiment import Experiment, values_by_name
from workbench.models import Model
from workbench.models._named import parameters_without_embeddings as parameters_without_embeddings
from workbench.record.history import Evaluations
from workbench.runs.registry import Runs, load_runs
from workbench.runs.run import Run
from workbench.sweeps.sweep import Sweep

# Laws of the loss over parameters N and tokens D, and their fit to finished trainings.
#
# For two exponents, the rest of each law is found by non-negative least squares (variable projection, as
# arXiv:2603.22339 recommends), so that the search has two dims and no start of its own. The loss of the fit is
# Chinchilla's (arXiv:2203.15556, D.3): the sum of the Huber losses, with δ = 1e-3, of log(predicted) − log(measured).

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


# The scaling law of finished runs, by the better of the two forms.

RESAMPLES = 200
PERCENTILES = (50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE))
LEAST = 3
"""Smallest number of sizes, and of budgets of tokens: two of either leave an exponent undetermined."""
COMPARABLE = 1.5
"""A second form widens the intervals if its held-out error is at most this many times the better one's."""
MISSES = 2.0
"""A form that misses the runs by more than this many times what seeds move them does not describe them."""
DECAYING = ("linear", "cosine", "wsd")
"""Schedules whose rate is zero at the end of the training."""
SAME = ("data", "seq_len", "eval_data", "loss")
"""Values of an experiment that decide what a held-out loss means."""
UNKNOWN_SIZE = "the parameters of a user-defined model are not in its record (give LadderPoint values)"
TABLE = ("form", "fitted law", "residuals", "error of left-out sizes", "largest size left out")


@dataclass(frozen=True)
class LadderPoint:
    """The end of one training: the number of parameters without embeddings, the tokens, the held-out loss in nats."""

    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True, eq=False)
class LawFit:
    """One form of the law with the values that fit best."""

    law: Law
    residual: float
    """Root mean square of log(predicted) − log(measured): about the relative error."""
    held_out: float | None
    """The same of each size predicted from the others; None for fewer than four sizes."""
    extrapolated: float | None
    """Mean of log(predicted) − log(measured) for the largest size, predicted from the smaller ones."""
    resampled: Law = dataclasses.field(repr=False)
    """Laws of the resamples, as one law with arrays."""


@dataclass(frozen=True, eq=False, repr=False)
class ScalingLaw:
    """A law L(N, D) of finished runs in two forms, the better one first."""

    points: tuple[LadderPoint, ...]
    fits: tuple[LawFit, ...]
    left_out: tuple[str, ...] = ()
    """Why runs are not among the points, a sentence for each reason."""

    @property
    def law(self) -> Law:
        """Return the fitted law of the better form: that with the smaller error of left-out sizes, else residuals."""
        return self.fits[0].law

    @property
    def noise(self) -> float:
        """Return the standard deviation of log L between seeds; NaN if no two runs have equal size and tokens."""
        cells: dict[tuple[float, float], list[float]] = {}
        for point in self.points:
            cells.setdefault((point.parameters, point.tokens), []).append(math.log(point.loss))
        scatter = scatter_of(list(cells.values()))
        return float("nan") if scatter is None else scatter.deviation

    def predict(self, parameters: float, tokens: float) -> Interval:
        """Return the held-out loss of a run of this size, with an interval.

        The interval holds 90 % of what the resampled laws predict, each with an error as large as that of the sizes
        that were left out of the fit. If the other form predicts these about as well, it reaches over both forms.
        """
        _check_positive(parameters=parameters, tokens=tokens)
        return Interval(*(float(each[0]) for each in self.losses(parameters, np.array([float(tokens)]))))

    def difference(self, small: float, large: float, tokens: float) -> Interval:
        """Return by how many nats the larger of two models is lower after this many tokens, with an interval.

        Args:
            small: parameters of the smaller model, without embeddings.
            large: parameters of the larger one.
            tokens: tokens that both train on.

        The interval is that of `predict`, with an error of each of the two.
        """
        _check_positive(small=small, large=large, tokens=tokens)
        return Interval(*(float(each[0]) for each in self.differences(small, large, np.array([float(tokens)]))))

    def losses(self, parameters: float, tokens: Array) -> tuple[Array, Array, Array]:
        """Return the loss over several numbers of tokens, and the ends of its interval."""
        return self._band([(1, parameters)], tokens)

    def differences(self, small: float, large: float, tokens: Array) -> tuple[Array, Array, Array]:
        """Return the difference of a pair over several numbers of tokens, and the ends of its interval."""
        return self._band([(1, small), (-1, large)], tokens)

    def _band(self, terms: Sequence[tuple[int, float]], tokens: Array) -> tuple[Array, Array, Array]:
        """Return the sum of signed losses of several sizes, and the ends of its interval over the trusted forms."""
        noise = np.random.default_rng(0).normal(size=(len(terms), RESAMPLES))
        value = np.asarray(sum(sign * self.law.loss(size, tokens) for sign, size in terms), dtype=np.float64)
        low, high = value, value
        for each in self._trusted():
            errors = np.exp(_score(each) * noise)
            drawn = sum(
                sign * each.resampled.loss(size, tokens[:, None]) * error
                for (sign, size), error in zip(terms, errors, strict=True)
            )
            ends = np.percentile(drawn, PERCENTILES, axis=1)
            low, high = np.minimum(low, ends[0]), np.maximum(high, ends[1])
        return value, low, high

    def _trusted(self) -> list[LawFit]:
        """Return the better form, and the other one if it is about as good."""
        return [each for each in self.fits if _score(each) <= COMPARABLE * _score(self.fits[0])]

    def __repr__(self) -> str:
        return "\n".join([self._summary(), text_table([TABLE, *self._cells()]), *self._notes()])

    def _repr_html_(self) -> str:
        summary, *notes = (f"<p>{html.escape(line)}</p>" for line in (self._summary(), *self._notes()))
        return summary + html_table(TABLE, self._cells()) + "".join(notes)

    def _summary(self) -> str:
        sizes, budgets = ({getattr(point, name) for point in self.points} for name in ("parameters", "tokens"))
        return (
            f"Scaling law of {len(self.points)} runs: {len(sizes)} sizes from {count(min(sizes))} to "
            f"{count(max(sizes))} parameters without embeddings, {count(min(budgets))} to {count(max(budgets))} tokens"
        )

    def _cells(self) -> list[tuple[str, ...]]:
        def share(value: float | None, sign: str = "") -> str:
            return "needs four sizes" if value is None else f"{value:{sign}.2%}"

        return [
            (each.law.form, str(each.law), share(each.residual), share(each.held_out), share(each.extrapolated, "+"))
            for each in self.fits
        ]

    def _notes(self) -> list[str]:
        noise = "" if np.isnan(self.noise) else f" Runs that differ in their seed alone scatter by {self.noise:.2%}."
        both = len(self._trusted()) > 1
        used = "reach over both forms" if both else f"are those of {self.law.form}: the other fits worse"
        notes = [f"Errors are root mean squares, in % of the loss. Intervals {used}.{noise}"]
        times = min(each.residual for each in self.fits) / (self.noise or math.nan)
        if times > MISSES:
            notes.append(
                f"Both forms miss the runs by at least {times:.1f} times what seeds move them: no such law describes "
                "these runs, and what it says of others is no better. Runs that are still on a plateau follow no such "
                "law: leave out the smallest budgets, and train longer ones."
            )
        return [*notes, *self.left_out]


@dataclass(frozen=True)
class PairExpectation:
    """Difference of two models after some tokens, as a law predicts it before either is trained."""

    names: tuple[str, str]
    parameters: tuple[float, float]
    """Numbers of parameters without embeddings."""
    tokens: float
    difference: Interval
    """Nats by which the larger model is lower; the ends are the value if the law has no interval."""
    source: str
    equal_flops_from: float | None = None
    """FLOPs, as 6 N D, from which on the larger model is expected below the smaller one at equal FLOPs; None if it is
    never, or always."""

    def __str__(self) -> str:
        (small, large), (few, many) = self.names, self.parameters
        low, high, at = self.difference.low, self.difference.high, self.difference.value
        size, words = f"{abs(at):.2g} nats", "below" if at >= 0 else "above"
        interval = f" ({CONFIDENCE:.0%} interval {low:+.2g} to {high:+.2g})" if low < high else ""
        turn = "."
        if self.equal_flops_from is not None:
            seen = count(self.equal_flops_from / (6 * few))
            turn = f". At equal FLOPs it is ahead from {self.equal_flops_from:.2g} on, or {seen} tokens of {small}."
        return (
            f"After {count(self.tokens)} tokens ({count(self.tokens / few)} and {count(self.tokens / many)} for each "
            f"parameter without embeddings), {large} ({count(many)}) is expected {size} {words} {small} ({count(few)})"
            f"{interval}, by {self.source}{turn}"
        )


@checked_arguments
def expected_difference(
    small: Model, large: Model, tokens: float, law: ScalingLaw | KaplanLaw | ChinchillaLaw = KAPLAN
) -> PairExpectation:
    """Return what a law says of a pair of models at a budget of tokens, before either is trained.

    Args:
        small: the smaller model.
        large: the larger one.
        tokens: tokens that both train on.
        law: a law that `scaling_law` fitted, or a published one, such as `wb.analysis.KAPLAN`.
    """
    _check_positive(tokens=tokens)
    few, many = parameters_without_embeddings(small), parameters_without_embeddings(large)
    if isinstance(law, ScalingLaw):
        sizes = len({point.parameters for point in law.points})
        difference, source = law.difference(few, many, tokens), f"the law of {len(law.points)} runs of {sizes} sizes"
    else:
        value = float(law.difference(few, many, tokens))
        difference, source = Interval(value, value, value), f"the law of {law.source}"
    turn = _equal_flops_from(law.law if isinstance(law, ScalingLaw) else law, few, many)
    return PairExpectation((small.name, large.name), (few, many), tokens, difference, source, turn)


def _equal_flops_from(law: Law, few: float, many: float) -> float | None:
    """Return the FLOPs from which on `many` parameters have the lower loss, each model with FLOPs / 6 N tokens."""

    def ahead(flops: float) -> bool:
        return bool(law.loss(few, flops / (6 * few)) > law.loss(many, flops / (6 * many)))

    low, high = 1e6, 1e36
    if ahead(low) or not ahead(high):
        return None
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if ahead(middle) else (middle, high)
    return high


@checked_arguments
def scaling_law(runs: Runs | Sweep | Sequence[Sweep] | Sequence[LadderPoint]) -> ScalingLaw:
    """Fit the loss over parameters N and tokens D to finished runs of several sizes and budgets.

    Two forms are fitted: E + A/N^alpha + B/D^beta by Chinchilla's third approach (arXiv:2203.15556: Huber losses of
    log L), and that of Kaplan et al. (arXiv:2001.08361, the joint fit of N and D). The law says how far each is from
    the runs, how far from sizes that were left out, and predicts further ones with an interval.

    Only ends of schedules count: the last held-out loss of a run that finished, with a rate that fell to zero. A loss
    in mid-schedule is higher than that of a run with this budget. N leaves embeddings out, see
    `parameters_without_embeddings`; for models of your own, or for losses of others, give `LadderPoint` values.

    Args:
        runs: the runs, a sweep or several, or points.

    Raises `InvalidExperiment` for fewer than three sizes or three budgets, and for runs whose losses do not compare.
    """
    points, left_out = _points(runs)
    points.sort(key=dataclasses.astuple)  # the random weights must not depend on the order of the runs
    sizes, budgets = (sorted({getattr(point, name) for point in points}) for name in ("parameters", "tokens"))
    needed = (sizes, "sizes", "models of other widths"), (budgets, "budgets of tokens", "other steps")
    for found, nouns, remedy in needed:
        if len(found) < LEAST:
            values = ", ".join(map(count, found))
            what = f"only {len(found)} of the {LEAST} {nouns} that a scaling law needs{f' ({values})' * bool(found)}"
            raise InvalidExperiment(
                f"{len(points)} ends of trainings have {what}: fewer leave its exponent "
                f"undetermined. Train {remedy} too, or ask a published law: "
                f"wb.analysis.expected_difference(small, large, tokens). {' '.join(left_out)}".strip()
            )
    n, d, losses = (np.array([getattr(point, name) for point in points]) for name in ("parameters", "tokens", "loss"))
    number = np.searchsorted(sizes, n)
    random = np.random.default_rng(0)
    resampled = random.exponential(size=(RESAMPLES, len(sizes)))[:, number]
    resampled = resampled * random.exponential(size=resampled.shape)
    tested = range(len(sizes)) if len(sizes) > LEAST else ()
    without = np.array([number != size for size in tested], dtype=np.float64).reshape(-1, len(n))
    weights = np.concatenate([np.ones((1, len(n))), without, resampled])
    fits = [_fit(form, weights, (n, d, losses), number) for form in FORMS]
    return ScalingLaw(tuple(points), tuple(sorted(fits, key=_score)), tuple(left_out))


def _fit(form: Form, weights: Array, points: tuple[Array, Array, Array], number: NDArray[np.integer[Any]]) -> LawFit:
    """Fit one form to all points, to those without each size, and to the resamples."""
    n, d, losses = points
    tested = len(weights) - 1 - RESAMPLES
    laws = fit(form, n, d, losses, weights)

    def rows(which: Any) -> Law:
        return form.law(**{name: values[which] for name, values in laws.items()})

    law = rows(0)
    residual = np.log(law.loss(n, d) / losses)
    rms = float(np.sqrt((residual**2).sum() / max(1, len(n) - form.freedom)))
    if not tested:
        return LawFit(law, rms, None, None, rows(slice(1, None)))
    errors = np.log(rows(1 + number).loss(n, d) / losses)
    held_out = float(np.sqrt((errors**2).mean()))
    largest = float(errors[number == number.max()].mean())
    return LawFit(law, rms, held_out, largest, rows(slice(1 + tested, None)))


def _score(fitted: LawFit) -> float:
    """Return the error by which forms are compared: that of left-out sizes, or of the residuals if there is none."""
    return fitted.residual if fitted.held_out is None else fitted.held_out


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise InvalidArgument(f"{name}={value!r} is not a number above 0. Give one.")


def _points(runs: Any) -> tuple[list[LadderPoint], list[str]]:
    """Return the ends of trainings, and a sentence for each reason why others were left out."""
    given = [runs] if isinstance(runs, Run | str | os.PathLike | Sweep) else list(runs)
    points = [each for each in given if isinstance(each, LadderPoint)]
    if points and len(points) == len(given):
        for point in points:
            _check_positive(**dataclasses.asdict(point))
        return points, []
    if points:
        raise InvalidArgument("Points and runs are mixed. Give either LadderPoint values or runs.")
    swept = [run for each in given if isinstance(each, Sweep) for row in each.rows() for run in row.runs]
    handles = swept + [run for each in given if not isinstance(each, Sweep) for run in load_runs(each)]
    known = [values_by_name(run.config) for run in handles]
    for name in SAME:
        different = [run for run, values in zip(handles, known, strict=True) if values.get(name) != known[0].get(name)]
        if different:
            raise InvalidExperiment(
                f"{name} of {different[0].name} differs from that of {handles[0].name}, so that their losses do not "
                "compare. Give handles that differ in the model's size, the length of the training and the seed.",
                parameter=name,
            )
    excluded: dict[str, list[str]] = {}
    for run in handles:
        experiment, ends = run.experiment, run.evaluations()
        model, reason = experiment.model, _unfit(run, experiment, ends)
        if reason is None and isinstance(model, Model):
            size = parameters_without_embeddings(model)
            points.append(LadderPoint(size, float(ends.tokens[-1]), float(ends.eval_loss[-1])))
        else:
            excluded.setdefault(reason or UNKNOWN_SIZE, []).append(run.name)
    return points, [
        f"Left out, because {reason}: {len(names)} run{'s' * (len(names) > 1)}, such as {names[0]}."
        for reason, names in excluded.items()
    ]


@checked_arguments
def ladder_points(runs: Runs | Sweep | Sequence[Sweep]) -> tuple[LadderPoint, ...]:
    """Return the end of each training of `runs`, such as those that a law predicted: as `scaling_law` fits them.

    Runs that it leaves out, such as those of sparse weights, are left out here as well.
    """
    return tuple(_points(runs)[0])


def _unfit(run: Run, experiment: Experiment, ends: Evaluations) -> str | None:
    """Return why the end of a run is no point of the law; None if it is one."""
    state, schedule = run.status.state, experiment.optimizer.lr_schedule
    if experiment.sparsity is not None:
        return "its weights are sparse"
    length = experiment.optimizer.schedule_steps
    if schedule in DECAYING and length is not None and length > experiment.total_steps:
        return f"its rate falls to zero at step {length:,} only"
    if schedule not in DECAYING:
        return f"the rate of {schedule} has not fallen to zero at the end ({', '.join(DECAYING)} do)"
    if state != "finished":
        return f"the run is {state}, not finished"
    if not len(ends) or ends.step[-1] < experiment.total_steps:
        return "there is no held-out loss at the end (train with evaluation=wb.Evaluation(every=…))"
    return None if np.isfinite(ends.eval_loss[-1]) else "the last held-out loss is not finite"
