"""Comparison of single runs at equal cost: which is lower and by how much, where two curves cross, what else differs.

Two kinds of noise are told apart (`workbench.analysis.curve`). The noise along a curve makes the band of a difference
and holds for these two runs. Whether their recipes differ depends on how far another seed would move the end of a run:
without that, one seed each cannot tell, and nothing is called lower.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.analysis.curve import (
    COST_AXES,
    END,
    RESOLUTION,
    SMOOTHING,
    X_AXES,
    Array,
    Curve,
    Line,
    Scatter,
    check_axis,
    column,
    column_or_nan,
    evaluations_of,
    finite_points,
    is_held_out,
    shared_axes,
    smoothed_line,
    why_curves_do_not_compare,
)
from workbench.base.display import Table
from workbench.base.errors import UnknownParameter
from workbench.base.units import gib

MAX_POINTS = 1000
"""Number of bins into which a longer run is averaged before it is smoothed."""
GRID_POINTS = 300
"""Number of points at which a difference is computed."""
TIMED_AXES = ("gpu_hours", "time")
"""Axes on which the speed of machines moves runs apart as well, so that a scatter at equal tokens is too small."""
CANNOT_TELL = "one seed each: cannot tell"
"""The verdict on recipes of which one run each is known, and not how far seeds scatter."""
NOT_TIMED = "cannot tell, since the speed of the machines moves it as well"
"""The verdict on axes of time, for which no scatter is known."""
TOO_CLOSE = "too close to call"
LEAST_EVALUATIONS = 2
"""Smallest number of held-out losses of each run from which they are compared in place of training losses."""
SPARSE = 0.5
"""Distance of two neighbouring points, as a share of the stretch, from which no loss is read between them."""
DO_NOT_COMPARE = "do not compare"
"""The verdict on losses that are measured on different things."""
ADVICE = "To tell recipes apart, train each with three seeds or more, or give scatter=, such as scatter=wb.list_runs()."
"""The way out where one seed each cannot tell."""
IGNORED_SETTINGS = (
    *("candidates", "prediction", "stages", "block_names", "signature", "computation", "flops_per_step"),
    *("load_average", "time", "started", "command", "directory", "executable", "name", "run"),
)
"""Keys that are no settings: results of a search, facts that follow from the model, when and where a run started."""


STARTS = ("model", "data", "global_batch", "seq_len", "seed", "loss", "sparsity")
"""Parts of an experiment that decide the loss of the first step."""
ROUNDING = 1e-3
"""Relative difference of two first losses up to which they are taken for equal, since bf16 rounds."""
DRAWS_AT_STEP_10 = (0.001, 0.008)
"""Standard deviations of the loss of a tenth step between draws of dropout alone (`benchmarks/noise.py`)."""
FACTORS = ("initial_scale", "rate_scale", "decay_scale", "eps_scale", "grad_norm_scale")
"""Mappings of an experiment from patterns of parameters' names to factors, of which a rule makes dozens."""
MOST_FACTORS = 3
"""Largest number of differing factors that have a row each."""


@dataclass(frozen=True)
class Interval:
    """A number with the edges of its 90 % interval, which are NaN if it is unknown."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval; NaN if it is unknown."""
        return (self.high - self.low) / 2

    def describe(self) -> str:
        """Return the value with half of its interval, both to the second digit of the half."""
        return with_margin(self.value, self.half_width)


def with_margin(value: float, half: float, sign: str = "") -> str:
    """Return a value and half of its interval, both to the half's second digit.

    The half is left out if it is unknown or below `RESOLUTION`, which is rounding. `sign="+"` signs positive values.
    """
    if not (math.isfinite(half) and half > RESOLUTION * max(1.0, abs(value))):
        return f"{value:{sign}.3g}"
    digits = max(0, 1 - math.floor(math.log10(half)))
    return f"{value:{sign}.{digits}f} ± {half:.{digits}f}"


@dataclass(frozen=True)
class Difference:
    """Smoothed loss of one run minus that of another over the stretch of an x axis that both have been on."""

    names: tuple[str, str]
    axis: str
    x: Array
    """Positions in the unit of the recorded column: tokens, FLOPs, seconds, …"""
    value: Array
    low: Array
    high: Array
    """Band of the noise along the two curves; NaN where it is unknown."""
    crossover: Interval | None
    """Position of the last change of sign, in the unit of `x`; None without one."""
    scatter: Scatter | None
    """Scatter of the ends of such runs between seeds; None if nobody knows it."""
    loss: str = "Training loss"
    """`Held-out loss` or `Training loss`."""
    compared: int = 2
    """Number of runs that are compared; the margins of all of their differences hold together."""

    def __repr__(self) -> str:
        first, second = self.names
        return f"Difference({first} − {second} over {self.axis}: {self.describe()})"

    @property
    def margin(self) -> float | None:
        """Largest distance of the ends of any two of the runs, were all of one recipe; None without a scatter."""
        noise = float(self.high[-1] - self.low[-1]) / 2
        return None if self.scatter is None else float(np.fmax(self.scatter.half_width(of=self.compared), noise))

    @property
    def pair(self) -> str:
        """The runs that seeds part by less than the margin, in words."""
        return "two runs" if self.compared == 2 else f"any two of {self.compared} runs"

    @property
    def distinguishable(self) -> bool:
        """True if the recipes are known to differ: the runs end further apart than seeds alone would part them."""
        return self.margin is not None and abs(float(self.value[-1])) > self.margin

    @property
    def verdict(self) -> str:
        """The verdict on the two recipes and how the two runs ended, in words."""
        end = float(self.value[-1])
        below, above = self.names if end < 0 else self.names[::-1]
        apart = with_margin(abs(end), float(self.high[-1] - self.low[-1]) / 2)
        if self.distinguishable:
            return f"{below} is lower than {above} by {apart}"
        return f"{CANNOT_TELL if self.margin is None else TOO_CLOSE}; {below} ended below {above} by {apart}"

    def describe(self) -> str:
        """Return the verdict, what it rests on, and where the curves cross, in words."""
        known = " ± " in self.verdict
        noise = "± is the noise along the curves" if known else "the noise along the curves is unknown"
        if self.scatter is None or self.margin is None:
            ground = f"{noise}, so this holds for these two runs, not for these two recipes"
        else:
            ground = f"{noise}; {self.scatter.describe()}, which alone parts {self.pair} by up to {self.margin:.2g}"
        return f"{self.verdict} ({ground}); {self._crossing_in_words()}"

    def _crossing_in_words(self) -> str:
        if self.crossover is None:
            return "the curves do not cross"
        at, low, high = (
            X_AXES[self.axis].describe(edge) for edge in (self.crossover.value, self.crossover.low, self.crossover.high)
        )
        if self.crossover.high >= self.x[-1]:
            return f"the curves last cross at {at}, if they do: from {low} on they cannot be told apart"
        return f"the curves last cross at {at}" + (f" ({low} to {high})" if low != high else "")


@dataclass(frozen=True)
class Standing:
    """Smoothed losses of several runs where each has spent the same: the most that all of them have spent."""

    axis: str
    at: float
    losses: Mapping[str, Interval]
    """Loss of each run, with the noise along its curve."""
    differences: Mapping[str, Interval]
    """Loss of each other run minus that of the first, with the noise along the two curves."""
    scatter: Scatter | None
    """Scatter of the ends of such runs between seeds; None if nobody knows it, and on axes of time."""
    compares: bool = True
    """False if the losses are measured on different things."""

    @property
    def margin(self) -> float | None:
        """Largest distance of the ends of two runs of one recipe; None without a scatter between seeds."""
        return None if self.scatter is None else self.scatter.half_width()

    @property
    def best(self) -> str:
        """The name of the run with the lowest loss."""
        return min(self.losses, key=lambda name: self.losses[name].value)

    @property
    def sure(self) -> bool:
        """True if all others are further behind than seeds, or the noise along the curves, part runs of one recipe.

        At worst two recipes are equally good and the others far behind, so that the margin of two suffices.
        """
        return self.compares and all(self.told_apart(self.best, name) for name in self.losses if name != self.best)

    def told_apart(self, one: str, other: str, of: int = 2) -> bool:
        """Return True if two runs are further apart than seeds, or the noise along their curves, part any two `of`."""
        if self.scatter is None:
            return False
        apart = abs(self.losses[one].value - self.losses[other].value)
        first = next(iter(self.losses))
        if first in (one, other):
            noise = self.differences[other if one == first else one].half_width
        else:
            noise = math.hypot(self.losses[one].half_width, self.losses[other].half_width)
        return bool(apart > np.fmax(self.scatter.half_width(of=of), noise))

    @property
    def verdict(self) -> str:
        """The best run and whether its recipe is better, in words."""
        return self._in_words(self.sure, self.best)

    def verdict_on(self, other: str) -> str:
        """Return which of the first run and another is lower, and whether their recipes are told apart, in words."""
        first = next(iter(self.losses))
        sure = self.told_apart(first, other, len(self.losses))
        return self._in_words(sure, min(first, other, key=lambda run: self.losses[run].value))

    def _in_words(self, sure: bool, lower: str) -> str:
        if not self.compares:
            return DO_NOT_COMPARE
        if self.margin is None:
            return NOT_TIMED if self.axis in TIMED_AXES else CANNOT_TELL
        return f"{lower} is lower" if sure else TOO_CLOSE

    def __str__(self) -> str:
        order = sorted(self.losses, key=lambda name: self.losses[name].value) if self.compares else list(self.losses)
        values = ", ".join(f"{name} {self.losses[name].describe()}" for name in order)
        axis = X_AXES[self.axis]
        return f"at equal {axis.label} ({axis.describe(self.at)}): {self.verdict} ({values})"


def difference(
    first: Curve,
    second: Curve,
    x: str = "tokens",
    scatter: Scatter | None = None,
) -> Difference:
    """Return the smoothed loss of `first` minus that of `second`, with a band of noise and the crossover.

    Runs that were recorded at the same positions are subtracted point by point before they are smoothed, so that noise
    which both have (batches in the same order, the same held-out samples) is none of the difference.

    Args:
        first: one run.
        second: the run whose loss is subtracted.
        x: name of the x axis.
        scatter: how far seeds move the end of such a run at equal tokens.

    Raises:
        UnknownParameter: a run did not record the axis, or the runs share no stretch of it.
    """
    begin, end, points = _shared_stretch([first, second], x)
    grid, width = np.linspace(begin, end, GRID_POINTS), _width(first, end)
    (own, loss), (others, other_loss) = (finite_points(*each, MAX_POINTS) for each in points)
    if np.array_equal(points[0][0], points[1][0]):
        line = smoothed_line(own, loss - other_loss, width).at(grid, own)
    else:
        line = smoothed_line(own, loss, width).at(grid, own)
        line = line.minus(smoothed_line(others, other_loss, width).at(grid, others))
    value, half = line.value.copy(), line.half_width()
    value[-1], half[-1] = _difference_at_end(points[0], points[1], width)
    low, high = value - half, value + half
    # Where the value last passes through zero, between the places where the edges of its band do: the edge that faces
    # zero before the crossing, and the one that faces it after.
    crossover = None
    if not math.isnan(cross := _last_crossing(grid, value)):
        edges = (low, high) if value[-1] < 0 else (high, low)
        early, late = (_last_crossing(grid, edge) for edge in edges)
        early, late = early if early <= cross else float(begin), late if late >= cross else float(end)
        crossover = Interval(cross, early, late)
    known = None if x in TIMED_AXES else scatter
    return Difference((first.name, second.name), x, grid, value, low, high, crossover, known, loss_name(first))


def _difference_at_end(first: tuple[Array, Array], second: tuple[Array, Array], width: float) -> tuple[float, float]:
    """Return the loss of one run minus that of another at their end, from every point, and half of its interval."""
    (x, loss), (other_x, other_loss) = first, second
    if np.array_equal(x, other_x):
        last = end_of(x, loss - other_loss, width)
    else:
        last = end_of(x, loss, width).minus(end_of(other_x, other_loss, width))
    return float(last.value[0]), float(last.half_width()[0])


def loss_name(curve: Curve) -> str:
    """Return `Held-out loss` or `Training loss`."""
    return "Held-out loss" if is_held_out(curve) else "Training loss"


def _width(curve: Curve, end: float) -> float:
    """Return the width over which losses are averaged: a held-out loss is a mean over the whole set already."""
    return 0.0 if is_held_out(curve) else SMOOTHING * end


def end_of(x: Array, loss: Array, width: float) -> Line:
    """Return the loss at the end of a stretch with its noise: the number that labels and tables show of a run.

    Of a training loss it is `workbench.record.history.final_loss`, of held-out losses (a width of 0) the last.
    """
    return smoothed_line(x, loss, width, END)


def standings(curves: Sequence[Curve], scatter: Scatter | None = None, compares: bool = True) -> tuple[Standing, ...]:
    """Return which run is lowest at equal tokens, FLOPs, device-hours and time, unless their losses do not compare.

    Axes without a stretch that all runs share are left out: one step of a slow run may cost more than another run as a
    whole.
    """
    shared, results = shared_axes(curves), []
    for axis in COST_AXES:
        if axis not in shared:
            continue
        try:
            _, end, points = _shared_stretch(curves, axis)
        except UnknownParameter:
            continue
        losses = {}
        for curve, (x, loss) in zip(curves, points, strict=True):
            line = end_of(x, loss, _width(curve, end))
            value, half = float(line.value[0]), float(line.half_width()[0])
            losses[curve.name] = Interval(value, value - half, value + half)
        apart = dict[str, Interval]()
        for curve, own in zip(curves[1:], points[1:], strict=True):
            value, half = _difference_at_end(own, points[0], _width(curves[0], end))
            apart[curve.name] = Interval(value, value - half, value + half)
        known = None if axis in TIMED_AXES else scatter
        results.append(Standing(axis, end, losses, apart, known, compares))
    return tuple(results)


def _shared_stretch(curves: Sequence[Curve], axis: str) -> tuple[float, float, list[tuple[Array, Array]]]:
    """Return begin and end of the stretch of an axis that all curves have been on, and the points until then."""
    check_axis(axis)
    points = []
    for curve in curves:
        x, loss = points_of(curve, axis)
        if len(x) < 2:
            raise UnknownParameter(
                f"{curve.name} has recorded {len(x)} finite losses over x={axis!r}, and a comparison needs two. "
                "Leave the run out, or choose another axis."
            )
        points.append((x, loss))
    begin, end = max(x[0] for x, _ in points), min(x[-1] for x, _ in points)
    if end <= begin:
        raise UnknownParameter(
            f"The runs share no stretch of x={axis!r}: one ends at {X_AXES[axis].describe(end)}, another begins at "
            f"{X_AXES[axis].describe(begin)}. Choose another axis, or runs that overlap."
        )
    for curve, (x, _) in zip(curves, points, strict=True):
        if not is_known_at(x, end):
            raise UnknownParameter(
                f"{curve.name} has no loss near x={axis!r} of {X_AXES[axis].describe(end)}, where another run ends. "
                "Choose another axis, or evaluate more often."
            )
    return float(begin), float(end), [points_until(x, loss, end) for x, loss in points]


def is_known_at(x: Array, at: float) -> bool:
    """Return True unless the points around a position lie so far apart that no loss can be read between them."""
    after = int(np.searchsorted(x, at))
    return after < len(x) and bool(x[after] == at or (after > 0 and x[after] - x[after - 1] <= SPARSE * at))


def points_of(curve: Curve, axis: str, y: str | None = None) -> tuple[Array, Array]:
    """Return the finite positions and values of column `y` over an axis; by default the held-out losses, if any."""
    values = column(curve, y or "eval_loss")
    if y is None and not len(values):
        values = column(curve, "loss")
    return finite_points(column(curve, X_AXES[axis].column), values)


def points_until(x: Array, loss: Array, end: float) -> tuple[Array, Array]:
    """Return the points up to `end`, the last one interpolated.

    What comes later is left out, so that a centred average does not take a longer run's lower losses for its loss here.
    """
    before = x <= end
    if x[before][-1] < end:
        x, loss = np.append(x[before], end), np.append(loss[before], np.interp(end, x, loss))
    else:
        x, loss = x[before], loss[before]
    return x, loss


def _last_crossing(x: Array, value: Array) -> float:
    """Return the last position at which the value passes through zero, interpolated; NaN if it never does."""
    changes = np.flatnonzero(np.sign(value[1:]) * np.sign(value[:-1]) < 0)
    if not len(changes):
        return float("nan")
    at = changes[-1]
    share = value[at] / (value[at] - value[at + 1])
    return float(x[at] + share * (x[at + 1] - x[at]))


@dataclass(frozen=True)
class Contrast:
    """Comparison of runs and of their settings; a notebook shows it as a figure and tables."""

    names: tuple[str, ...]
    standings: tuple[Standing, ...]
    differences: tuple[Difference, ...]
    """Difference of each other run to the first."""
    settings: tuple[tuple[str, tuple[str, ...]], ...]
    """Settings that differ, as (dotted name, one value per run), from experiments, plans and environments."""
    incomparable: str | None = None
    """Sentence on why the losses do not compare; then nothing is called lower, and no difference is computed."""
    loss: str = "Training loss"
    """`Held-out loss` or `Training loss`: the losses that are compared."""
    draws: tuple[str, ...] = ()
    """Sentences on losses that are left out because they are not finite, and on runs that draw other random numbers
    than the first, as of dropout, although they have its seed."""

    def __repr__(self) -> str:
        lines = [self.headline, *(f"{self.loss} {standing}" for standing in self.standings)]
        lines += [item.describe() for item in self.differences]
        lines += [f"{name}: {' | '.join(values)}" for name, values in self.settings]
        return "\n".join([*lines, *self.draws, *self._advice()])

    @property
    def headline(self) -> str:
        """The sentence that says what was found."""
        if self.incomparable or not self.differences:
            return self.incomparable or f"{self.names[0]} alone is no comparison."
        others = self.names[1:]
        item, axis = self.differences[0], X_AXES[self.differences[0].axis]
        start, loss = f"At equal {axis.label} ({axis.describe(float(item.x[-1]))})", self.loss.lower()
        if others[1:]:
            [standing] = [each for each in self.standings if each.axis == item.axis]
            words = f"{start}, {standing.best} has the lowest {loss} of {len(self.names)} runs"
            words += f", {standing.losses[standing.best].describe()}"
            sure, apart, margin = standing.sure, "the best two differ", standing.margin
        else:
            below, above = item.names if item.value[-1] < 0 else item.names[::-1]
            by = with_margin(abs(float(item.value[-1])), float(item.high[-1] - item.low[-1]) / 2)
            words = f"{start}, the {loss} of {below} is {by} below that of {above}"
            sure, apart, margin = item.distinguishable, "that is", item.margin
        if margin is None:
            why = (
                NOT_TIMED if item.axis in TIMED_AXES else "with one seed each, this cannot tell which recipe is better"
            )
            return f"{words}; {why}."
        told = (
            f"{apart} more than seeds alone part two runs" if sure else "too close to call: seeds alone part two runs"
        )
        return f"{words}; {told} (up to {margin:.2g})."

    @property
    def table(self) -> Table:
        """Both losses, their difference and a verdict, in a row for each axis and each run but the first."""
        (first, *others), rows = self.names, list[tuple[str, ...]]()
        for item, other in itertools.product(self.standings, others):
            axis, apart = X_AXES[item.axis], item.differences[other]
            losses = [item.losses[name].describe() for name in (first, other)]
            difference = with_margin(apart.value, apart.half_width, "+") if item.compares else "–"
            named = [other] if others[1:] else []
            rows.append((axis.label, axis.describe(item.at), *named, *losses, difference, item.verdict_on(other)))
        runs = ("run", first, "its loss") if others[1:] else self.names
        return (f"{self.loss.lower()} at equal", "", *runs, "difference", "verdict"), rows

    @property
    def details(self) -> list[str | Table]:
        """Sentences on what the verdicts rest on and where curves cross, and a table of the settings that differ."""
        sentences = [*(f"{item.describe()}." for item in self.differences), *self.draws, *self._advice()]
        if not self.settings:
            return [*sentences, "Their experiments, plans and environments agree."]
        return [*sentences, (("what differs", *self.names), [(name, *values) for name, values in self.settings])]

    def _advice(self) -> list[str]:
        """Return what would tell the recipes apart, if one seed each cannot."""
        return (
            [ADVICE] if any(item.scatter is None and item.axis not in TIMED_AXES for item in self.differences) else []
        )


def contrast_curves(
    curves: Sequence[Curve],
    described: Sequence[Mapping[str, Any]] = (),
    x: str = "tokens",
    scatter: Scatter | None = None,
) -> Contrast:
    """Compare runs at equal cost, each run with the first over `x`, and list the settings that differ.

    The held-out losses are compared if every run has some where they all end, else the training losses.
    Losses that are measured on different things (`Curve.basis`) get no verdict and no difference.

    `described` holds nested JSON for every run: its experiment, plan and environment. `scatter` says how far seeds move
    the ends of other runs; without it no run is called lower.
    """
    check_axis(x)
    runs = curves
    first, *others = curves = compared_curves(curves, x)
    known = None if scatter is None else scatter.of_others()
    incomparable = why_curves_do_not_compare(curves)
    differences = () if incomparable else tuple(difference(other, first, x, scatter=known) for other in others)
    differences = tuple(replace(each, compared=len(curves)) for each in differences)
    return Contrast(
        tuple(curve.name for curve in curves),
        standings(curves, known, incomparable is None),
        differences,
        setting_differences(described),
        incomparable,
        loss_name(first),
        (*not_finite(curves), *unlike_draws(runs, described)),
    )


def not_finite(curves: Sequence[Curve]) -> tuple[str, ...]:
    """Say which runs have losses that are not finite, which a comparison leaves out, and which end in them."""
    told = []
    for curve in curves:
        step, name = column(curve, "step"), "eval_loss" if is_held_out(curve) else "loss"
        loss = column_or_nan(curve, name, len(step))
        if (missing := int((~np.isfinite(loss)).sum())) == 0 or missing == len(loss):
            continue
        last = int(np.flatnonzero(np.isfinite(loss))[-1])
        ends = f", and none after step {step[last]:,.0f} is: it is compared until there" if last + 1 < len(loss) else ""
        told.append(f"{missing:,} of {len(loss):,} losses of {curve.name} are not finite and left out{ends}.")
    return tuple(told)


def unlike_draws(curves: Sequence[Curve], described: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Say which runs of one start draw other random numbers than the first, and how far that parts their first losses.

    Runs of one start have the same weights and samples in their first step. Dropout is drawn for each micro-batch, and
    otherwise under tensor parallelism, in compiled code and on another type of device. A model that does not say its
    dropout draws, or has statistics of a micro-batch, if its first losses differ by more than `ROUNDING`.
    """
    settings, told = [described_settings(each) for each in described], []
    for curve, own in zip(curves[1:], settings[1:], strict=False):
        unlike = {name for name in {*own, *settings[0]} if own.get(name) != settings[0].get(name)}
        causes = [
            f"{words} {' and '.join(each.get(name, 'by default') for each in (settings[0], own))}"
            for name, words in UNLIKE_DRAWS.items()
            if name in unlike
        ]
        rate = own.get("experiment.model.dropout")
        if not causes or rate in ("0", "0.0") or any(name.split(".")[1] in STARTS for name in unlike if "." in name):
            continue
        first, second = (_first_loss(each) for each in (curves[0], curve))
        apart = abs(second - first)
        if rate is None and not apart > ROUNDING * abs(first):
            continue
        what = "draw other dropout masks" if rate else "draw other numbers, or have statistics of other micro-batches,"
        size = f"their first losses, of the same weights and samples, are {apart:.2g} apart for that alone. In"
        low, high = DRAWS_AT_STEP_10
        told.append(
            f"{curves[0].name} and {curve.name} {what} from the same seed ({', '.join(causes)}): "
            f"{size if math.isfinite(apart) else 'in'} small models such draws scatter the loss of a tenth step by "
            f"{low:g} to {high:g}, and the end of a run as another seed does."
        )
    return tuple(told)


UNLIKE_DRAWS = {
    "plan.micro_batch": "micro-batch",
    "plan.tensor": "tensor-parallel degree",
    "plan.cluster.device.type": "device",
    "experiment.compile": "compiled",
}
"""Settings on which random numbers depend beside the seed, with their words."""


def _first_loss(curve: Curve) -> float:
    """Return the training loss of the first step; NaN if it was not logged."""
    step, loss = finite_points(column(curve, "step"), column(curve, "loss"))
    return float(loss[0]) if len(step) and step[0] == 1 else math.nan


def compared_curves(curves: Sequence[Curve], x: str = "tokens") -> Sequence[Curve]:
    """Return the held-out losses of the runs, or the curves as they are where those cannot be compared over an axis.

    Each run needs at least `LEAST_EVALUATIONS` of them, and some near where the shortest run ends.
    """
    held_out = [evaluations_of(curve) for curve in curves]
    enough = [curve for curve in held_out if curve is not None and len(column(curve, "step")) >= LEAST_EVALUATIONS]
    if len(enough) < len(curves):
        return curves
    try:
        _shared_stretch(enough, x)
    except UnknownParameter:
        return curves
    return enough


def setting_differences(described: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return every leaf of nested descriptions that is not equal in all of them, as (dotted name, values).

    A leaf that says no more than that something is absent equals none. The factors of a rule by pattern of the
    parameter's name are one row if more than `MOST_FACTORS` of them differ.
    """
    settings = [described_settings(item) for item in described]
    rows = []
    for name in dict.fromkeys(name for item in settings for name in item):
        values = tuple(item.get(name, "–") for item in settings)
        if len(set(values)) > 1 and not {*values} <= {"–", "False", ""}:
            rows.append((name, values))
    factors = [name for name, _ in rows if _rule_of(name)]
    if len(factors) <= MOST_FACTORS:
        return tuple(rows)
    rules = dict.fromkeys(_rule_of(name) for name in factors)
    each = [sorted(float(item[name]) for name in factors if name in item) for item in settings]
    counted = tuple(f"{len(own)}, {own[0]:.3g} to {own[-1]:.3g}" if own else "–" for own in each)
    return *(row for row in rows if row[0] not in factors), (f"factors of {', '.join(map(str, rules))}", counted)


def _rule_of(name: str) -> str | None:
    """Return the rule that a leaf is a factor of, such as `rate_scale`; None for other leaves."""
    return next((part for part in name.split(".") if part in FACTORS), None)


def described_settings(described: Mapping[str, Any]) -> dict[str, str]:
    """Return every leaf of a nested description that is not None, as a dotted name and a short text."""
    return {name: _in_words(name, value) for name, value in _flattened(described).items() if value is not None}


def _flattened(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, item in value.items():
        if key in IGNORED_SETTINGS:
            continue
        if isinstance(item, Mapping) and item:
            leaves |= _flattened(item, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = item
    return leaves


def _in_words(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int | float):
        return gib(value)
    if name.endswith(".gpus") and isinstance(value, Sequence):  # which of a machine's equal GPUs is no setting
        counted = Counter(str(each.get("name") if isinstance(each, Mapping) else each) for each in value)
        return ", ".join(f"{n} × {gpu}" for gpu, n in counted.items())
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 4:
        return f"{len(value)} items"
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
