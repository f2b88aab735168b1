"""Comparison of single runs at equal cost: which is lower and by how much, where two curves cross, what else differs.

Two kinds of noise are told apart (`workbench.analysis.noise`). The noise along a curve makes the band of a difference
and holds for these two runs. Whether their recipes differ depends on how far another seed would move the end of a run:
without that, one seed each cannot tell, and nothing is called lower.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.analysis.curve import (
    COST_AXES,
    X_AXES,
    Array,
    Curve,
    check_axis,
    column,
    evaluations_of,
    finite_points,
    shared_axes,
)
from workbench.analysis.noise import END, RESOLUTION, Scatter, smoothed_line
from workbench.analysis.smoothing import SMOOTHING
from workbench.errors import UnknownParameter
from workbench.tables import html_table
from workbench.units import gib

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
LEAST_EVALUATIONS = 5
"""Smallest number of held-out losses of each run from which they are compared in place of training losses."""
ADVICE = "To tell recipes apart, train each with three seeds or more, or give scatter=, such as scatter=wb.list_runs()."
"""The way out where one seed each cannot tell."""
IGNORED_SETTINGS = (
    *("candidates", "prediction", "stages", "block_names", "signature", "flops_per_step"),
    *("load_average", "time", "started", "command", "directory", "executable", "name", "run"),
)
"""Keys that are no settings: results of a search, facts that follow from the model, when and where a run started."""


@dataclass(frozen=True)
class Interval:
    """A number with the edges of its 90 % interval, which are NaN if it is unknown."""

    value: float
    low: float
    high: float

    def describe(self) -> str:
        """Return the value with half of its interval, both to the second digit of the half."""
        return with_margin(self.value, (self.high - self.low) / 2)


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

    def __repr__(self) -> str:
        first, second = self.names
        return f"Difference({first} − {second} over {self.axis}: {self.describe()})"

    @property
    def margin(self) -> float | None:
        """Largest distance of the ends of two runs of one recipe; None without a scatter between seeds."""
        noise = float(self.high[-1] - self.low[-1]) / 2
        return None if self.scatter is None else float(np.fmax(self.scatter.half_width(), noise))

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
            ground = f"{noise}; {self.scatter.describe()}, which alone parts two runs by up to {self.margin:.2g}"
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
    best: str
    margin: float | None
    """Largest distance of the ends of two runs of one recipe; None without a scatter between seeds."""

    @property
    def sure(self) -> bool:
        """True if the second is further behind than seeds alone would part two runs of one recipe."""
        first, *others = sorted(loss.value for loss in self.losses.values())
        return self.margin is not None and (not others or others[0] - first > self.margin)

    @property
    def verdict(self) -> str:
        """The best run and whether its recipe is better, in words."""
        if self.margin is None:
            return NOT_TIMED if self.axis in TIMED_AXES else CANNOT_TELL
        return f"{self.best} is lower" if self.sure else TOO_CLOSE

    def __str__(self) -> str:
        order = sorted(self.losses, key=lambda name: self.losses[name].value)
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
    grid, width = np.linspace(begin, end, GRID_POINTS), SMOOTHING * end
    (own, loss), (others, other_loss) = points
    if np.array_equal(own, others):
        line = smoothed_line(own, loss - other_loss, width).at(grid, own)
    else:
        line = smoothed_line(own, loss, width).at(grid, own)
        line = line.minus(smoothed_line(others, other_loss, width).at(grid, others))
    low, high = line.value - line.half_width(), line.value + line.half_width()
    crossover = _crossover(grid, line.value, low, high)
    known = None if x in TIMED_AXES else scatter
    return Difference((first.name, second.name), x, grid, line.value, low, high, crossover, known)


def standings(curves: Sequence[Curve], scatter: Scatter | None = None) -> tuple[Standing, ...]:
    """Return which run is lowest at equal tokens, FLOPs, device-hours and time.

    Axes without a stretch that all runs share are left out: one step of a slow run may cost more than another run as a
    whole.
    """
    known, results = shared_axes(curves), []
    for axis in COST_AXES:
        if axis not in known:
            continue
        try:
            _, end, points = _shared_stretch(curves, axis)
        except UnknownParameter:
            continue
        losses = {}
        for curve, (x, loss) in zip(curves, points, strict=True):
            line = smoothed_line(x, loss, SMOOTHING * end, END)
            value, half = float(line.value[0]), float(line.half_width()[0])
            losses[curve.name] = Interval(value, value - half, value + half)
        best = min(losses, key=lambda name: losses[name].value)
        margin = None if scatter is None or axis in TIMED_AXES else scatter.half_width()
        results.append(Standing(axis, end, losses, best, margin))
    return tuple(results)


def _shared_stretch(curves: Sequence[Curve], axis: str) -> tuple[float, float, list[tuple[Array, Array]]]:
    """Return begin and end of the stretch of an axis that all curves have been on, and the points until then."""
    check_axis(axis)
    points = []
    for curve in curves:
        x, loss = points_of(curve, axis)
        if len(x) < 2:
            raise UnknownParameter(f"{curve.name} has not recorded its loss over x={axis!r}. Choose another axis.")
        points.append((x, loss))
    begin, end = max(x[0] for x, _ in points), min(x[-1] for x, _ in points)
    if end <= begin:
        raise UnknownParameter(
            f"The runs share no stretch of x={axis!r}: one ends at {X_AXES[axis].describe(end)}, another begins at "
            f"{X_AXES[axis].describe(begin)}. Choose another axis, or runs that overlap."
        )
    return float(begin), float(end), [points_until(x, loss, end) for x, loss in points]


def points_of(curve: Curve, axis: str) -> tuple[Array, Array]:
    """Return the finite positions and losses of a curve over an axis: its held-out losses if it has any."""
    held_out = column(curve, "eval_loss")
    return finite_points(column(curve, X_AXES[axis].column), held_out if len(held_out) else column(curve, "loss"))


def points_until(x: Array, loss: Array, end: float) -> tuple[Array, Array]:
    """Return the points up to `end`, the last one interpolated; of more than `MAX_POINTS`, averages of neighbours.

    What comes later is left out, so that a centred average does not take a longer run's lower losses for its loss here.
    """
    before = x <= end
    if x[before][-1] < end:
        x, loss = np.append(x[before], end), np.append(loss[before], np.interp(end, x, loss))
    else:
        x, loss = x[before], loss[before]
    return finite_points(x, loss, MAX_POINTS)


def _crossover(x: Array, value: Array, low: Array, high: Array) -> Interval | None:
    """Return where the value last passes through zero, between the places where the edges of its band do."""
    at = _last_crossing(x, value)
    if math.isnan(at):
        return None
    # The edge that faces zero before the crossing, and the one that faces it after.
    before, after = (low, high) if value[-1] < 0 else (high, low)
    first, last = _last_crossing(x, before), _last_crossing(x, after)
    return Interval(at, first if first <= at else float(x[0]), last if last >= at else float(x[-1]))


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

    def __repr__(self) -> str:
        lines = [str(standing) for standing in self.standings]
        lines += [item.describe() for item in self.differences]
        lines += [f"{name}: {' | '.join(values)}" for name, values in self.settings]
        return "\n".join([*lines, *self._advice()])

    def _advice(self) -> list[str]:
        """Return what would tell the recipes apart, if one seed each cannot."""
        return (
            [ADVICE] if any(item.scatter is None and item.axis not in TIMED_AXES for item in self.differences) else []
        )

    def to_html(self) -> str:
        """Return standings and settings as HTML tables, every name escaped."""
        rows = list[tuple[str, ...]]()
        for item in self.standings:
            losses = (item.losses[name].describe() for name in self.names)
            axis = X_AXES[item.axis]
            rows.append((axis.label, axis.describe(item.at), *losses, item.verdict))
        page = html_table(("at equal", "", *self.names, "verdict"), rows)
        sentences = [f"{item.describe()}." for item in self.differences]
        notes = [*sentences, *self._advice()]
        page += "".join(f"<p>{html.escape(note)}</p>" for note in notes)
        if not self.settings:
            return f"{page}<p>Their experiments, plans and environments agree.</p>"
        settings = html_table(("what differs", *self.names), ((name, *values) for name, values in self.settings))
        return f"{page}{settings}"


def contrast(
    curves: Sequence[Curve],
    described: Sequence[Mapping[str, Any]] = (),
    x: str = "tokens",
    scatter: Scatter | None = None,
) -> Contrast:
    """Compare runs at equal cost, each run with the first over `x`, and list the settings that differ.

    The held-out losses are compared if every run has at least `LEAST_EVALUATIONS` of them, else the training losses.

    `described` holds nested JSON for every run: its experiment, plan and environment. `scatter` says how far seeds move
    the ends of other runs; without it no run is called lower.
    """
    check_axis(x)
    first, *others = curves = compared_curves(curves)
    known = None if scatter is None else scatter.of_others()
    return Contrast(
        tuple(curve.name for curve in curves),
        standings(curves, known),
        tuple(difference(other, first, x, scatter=known) for other in others),
        setting_differences(described),
    )


def compared_curves(curves: Sequence[Curve], least: int = LEAST_EVALUATIONS) -> Sequence[Curve]:
    """Return the held-out losses of the runs if each has at least `least` of them, else the curves as they are."""
    held_out = [evaluations_of(curve) for curve in curves]
    enough = [curve for curve in held_out if curve is not None and len(column(curve, "step")) >= least]
    return enough if len(enough) == len(curves) else curves


def setting_differences(described: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return every leaf of nested descriptions that is not equal in all of them, as (dotted name, values)."""
    settings = [described_settings(item) for item in described]
    rows = []
    for name in dict.fromkeys(name for item in settings for name in item):
        values = tuple(item.get(name, "–") for item in settings)
        if len(set(values)) > 1:
            rows.append((name, values))
    return tuple(rows)


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
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 4:
        return f"{len(value)} items"
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
