"""The scaling law of finished runs: fitted, tested on sizes that the fit has not seen, and asked about others.

The interval of a prediction comes from `RESAMPLES` fits with random weights (the Bayesian bootstrap, Rubin 1981, Ann.
Statist. 9, 130): a weight for each size times one for each run, both exponential. A size whose recipe suits it less
than the others' moves all of its runs alike, which weights of runs alone would not show.
"""

from __future__ import annotations

import dataclasses
import html
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.analysis.contrast import Interval
from workbench.analysis.laws import FORMS, KAPLAN, Array, ChinchillaLaw, Form, KaplanLaw, Law, fit
from workbench.analysis.noise import CONFIDENCE, scatter_of
from workbench.arguments import checked_arguments
from workbench.display import html_table, text_table
from workbench.errors import InvalidArgument, InvalidExperiment
from workbench.experiment import Experiment, values_by_name
from workbench.models import Model
from workbench.models._named import parameters_without_embeddings as parameters_without_embeddings
from workbench.runs.history import Evaluations
from workbench.runs.registry import Runs, load_runs
from workbench.runs.run import Run
from workbench.sweeps.sweep import Sweep
from workbench.units import count

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

    def __str__(self) -> str:
        (small, large), (few, many) = self.names, self.parameters
        low, high, at = self.difference.low, self.difference.high, self.difference.value
        size, words = f"{abs(at):.2g} nats", "below" if at >= 0 else "above"
        interval = f" ({CONFIDENCE:.0%} interval {low:+.2g} to {high:+.2g})" if low < high else ""
        return (
            f"After {count(self.tokens)} tokens ({count(self.tokens / few)} and {count(self.tokens / many)} for each "
            f"parameter without embeddings), {large} ({count(many)}) is expected {size} {words} {small} ({count(few)})"
            f"{interval}, by {self.source}."
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
    return PairExpectation((small.name, large.name), (few, many), tokens, difference, source)


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
    _check_comparable(handles)
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
    """Return the ends of trainings, such as those that a law predicted; runs that `scaling_law` leaves out are not."""
    return tuple(_points(runs)[0])


def _unfit(run: Run, experiment: Experiment, ends: Evaluations) -> str | None:
    """Return why the end of a run is no point of the law; None if it is one."""
    state, schedule = run.status.state, experiment.optimizer.lr_schedule
    if experiment.sparsity is not None:
        return "its weights are sparse"
    if schedule not in DECAYING:
        return f"the rate of {schedule} has not fallen to zero at the end ({', '.join(DECAYING)} do)"
    if state != "finished":
        return f"the run is {state}, not finished"
    if not len(ends) or ends.step[-1] < experiment.total_steps:
        return "there is no held-out loss at the end (train with evaluation=wb.Evaluation(every=…))"
    return None if np.isfinite(ends.eval_loss[-1]) else "the last held-out loss is not finite"


def _check_comparable(runs: Sequence[Run]) -> None:
    """Raise `InvalidExperiment` if losses of the runs mean different things: other data, lengths or vocabularies."""
    known = [values_by_name(run.config) for run in runs]
    for name in SAME:
        different = [run for run, values in zip(runs, known, strict=True) if values.get(name) != known[0].get(name)]
        if different:
            raise InvalidExperiment(
                f"{name} of {different[0].name} differs from that of {runs[0].name}, so that their losses do not "
                "compare. Give runs that differ in the model's size, the length of the training and the seed.",
                parameter=name,
            )
