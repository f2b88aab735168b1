"""Curves as the figures take them, their smoothing, and how far noise and seeds move their points.

A curve is a name, columns with one value per logged step, and the axes to draw them over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.base.errors import InvalidArgument, UnknownParameter, suggestion
from workbench.record.columns import COLUMNS, AxisUnit
from workbench.record.history import History
from workbench.runs.loss_basis import LossBasis, read_loss_basis, why_not_compared
from workbench.runs.registry import distinct_names
from workbench.runs.run import Run

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
X_AXES = {column.axis.name or column.axis.column: column.axis for column in COLUMNS.values() if column.axis is not None}
"""The x axes by the name that `x=` takes; menus list them in this order."""
COST_AXES = ("tokens", "flops", "gpu_hours", "time")
"""Axes at whose equal values `standings` compares runs, in the order of its table."""


class Columns(Protocol):
    """A mapping of names to columns, or a run's `History`."""

    def __getitem__(self, name: str, /) -> Any: ...


@dataclass(frozen=True)
class Mark:
    """An event of a run at a step; `type` is `checkpoint`, `resume`, `spike` or `divergence`, `text` the hover text."""

    type: str
    step: float
    text: str


@dataclass(frozen=True)
class Look:
    """The way in which a run is drawn: in colours of its own, or folded with the others of its group."""

    index: int
    """Number of its colour and line style, which a folded group shares."""
    entry: str | None = None
    """Words in the legend; None are the name of the run, and empty is no entry."""
    folded: bool = False
    best: bool = False
    """True if no setting of its folded group has a lower loss."""
    setting: str | None = None
    """The setting whose seeds are drawn as a mean with a band; None if it is not repeated."""
    averaged: bool = False
    """True if it is one of the seeds of that mean, and not far behind them."""


@dataclass(frozen=True)
class Curve:
    """The record of one run: columns of equal length with one value per logged step.

    Columns are named and counted as in `workbench.record.columns.COLUMNS`. Only those that a figure draws are needed.
    """

    name: str
    columns: Columns = field(repr=False)
    marks: tuple[Mark, ...] = ()
    evaluations: Columns | None = field(default=None, repr=False)
    """Columns with one value per evaluation: eval_loss and those of the x axes; None without evaluation."""
    basis: LossBasis | None = None
    """The facts on which its losses depend; None if they are unknown."""
    look: Look | None = None
    """The way in which it is drawn; None is in the colours of its place among the others."""


def curves_of(runs: Sequence[Run]) -> list[Curve]:
    """Return what runs have recorded, under names that differ."""
    named = zip(distinct_names(runs), runs, strict=True)
    return [
        Curve(name, run.history(), evaluations=run.evaluations(), basis=read_loss_basis(run.directory))
        for name, run in named
    ]


def column(curve: Curve, name: str) -> Array:
    """Return one column as float64 with `None` as NaN; an empty array if the curve has no column of that name."""
    try:
        values = curve.columns[name]
    except (KeyError, AttributeError, UnknownParameter):
        return np.empty(0)
    return np.asarray(values, dtype=np.float64)


def evaluations_of(curve: Curve) -> Curve | None:
    """Return the held-out losses of a run as a curve of their own, or None if it has none."""
    if curve.evaluations is None or not len(curve.evaluations["step"]):
        return None
    return Curve(curve.name, curve.evaluations, basis=curve.basis, look=curve.look)


def is_held_out(curve: Curve) -> bool:
    """Return True for held-out losses as a curve of their own."""
    return len(column(curve, "eval_loss")) > 0


def why_curves_do_not_compare(curves: Sequence[Curve]) -> str | None:
    """Return why the losses of some curves do not compare, as one sentence; None if they do."""
    return why_not_compared([curve.basis for curve in curves], [is_held_out(curve) for curve in curves])


def metrics_of(curves: Iterable[Curve]) -> tuple[str, ...]:
    """Return the names of the metrics that evaluations of some runs computed, each once."""
    found = (getattr(curve.evaluations, "metrics", {}) for curve in curves)
    return tuple(dict.fromkeys(name for metrics in found for name in metrics))


def scalars_of(curves: Iterable[Curve]) -> tuple[str, ...]:
    """Return the names of the scalars that some runs logged (`workbench.log_scalar`), each once."""
    return tuple(dict.fromkeys(name for curve in curves for name in getattr(curve.columns, "scalars", ())))


def where_logged(curve: Curve, scalar: str) -> Curve:
    """Return a run at the steps at which it logged a scalar, which need not be all."""
    known = ~np.isnan(column(curve, scalar))
    names = dict.fromkeys(("step", *(axis.column for axis in X_AXES.values()), scalar))
    columns = {name: values[known] for name in names if len(values := column(curve, name)) == len(known)}
    return replace(curve, columns=columns, evaluations=None)


def finite_points(x: Array, y: Array, most: int | None = None) -> tuple[Array, Array]:
    """Return the points whose two values are finite; of more than `most`, averages of neighbours.

    There are none where one of the columns was not recorded.
    """
    if len(x) != len(y):
        return np.empty(0), np.empty(0)
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if most is None or len(x) <= most:
        return x, y
    starts = np.linspace(0, len(x), most, endpoint=False).astype(np.int64)
    sizes = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x, starts) / sizes, np.add.reduceat(y, starts) / sizes


def column_or_nan(curve: Curve, name: str, length: int) -> Array:
    """Return one column, or `length` NaNs if the curve has no column of that name and length."""
    values = column(curve, name)
    return values if len(values) == length else np.full(length, np.nan)


def check_axis(x: str) -> None:
    """Raise `UnknownParameter` with the nearest name if `x` is not in `X_AXES`."""
    if x not in X_AXES:
        raise UnknownParameter(f"x={x!r} is not an axis. {suggestion(x, X_AXES)}")


def shared_axes(curves: Sequence[Curve]) -> dict[str, AxisUnit]:
    """Return the axes that every curve with a point has recorded, each with the unit that suits the longest curve."""
    begun = [curve for curve in curves if len(column(curve, "step"))]
    axes = {}
    for name, axis in X_AXES.items():
        ends = [end_value(curve, axis.column) for curve in begun]
        if not any(map(math.isnan, ends)):
            axes[name] = axis.unit(max(ends, default=0.0))
    return axes


def end_value(curve: Curve, name: str) -> float:
    """Return the last value of a column if that is finite, else its largest finite one, NaN without any."""
    if isinstance(curve.columns, History) and name in curve.columns:
        last = curve.columns.last(name)
        if len(last) and math.isfinite(last[0]):
            return float(last[0])
    values = column(curve, name)
    if len(values) and math.isfinite(values[-1]):
        return float(values[-1])
    finite = values[np.isfinite(values)]
    return float(finite.max()) if len(finite) else math.nan


# Smoothing of curves by a centred exponential average whose width is equal for all curves of a figure.

SMOOTHING = 0.01
"""Default width of the average, as a share of the longest curve."""
CHUNK_POINTS = 2**15
"""Number of points that are averaged at a time, so that they stay in the processor's cache."""
CHUNK_WIDTHS = 30.0
"""Largest extent of a chunk in units of the local width, so that no exponential overflows."""
BINS_PER_WIDTH = 256
"""Number of bins in one width of a long curve, from which its average is computed."""
MIN_BIN = 4
"""Number of points in a bin from which bins take less time than points."""


def check_smoothing(smoothing: float) -> None:
    """Raise `InvalidArgument` unless `smoothing` is a share of a curve."""
    if not 0 <= smoothing <= 1:
        raise InvalidArgument(
            f"smoothing={smoothing!r} is no share of a curve. Give a number from 0 to 1, such as {SMOOTHING}."
        )


def smoothing_axis(curves: Sequence[Curve]) -> str:
    """Return the column along which smoothing is measured: tokens if every curve counts them, else steps."""
    return "tokens" if curves and all(len(column(curve, "tokens")) for curve in curves) else "step"


def smoothing_width(curves: Sequence[Curve], smoothing: float) -> float:
    """Return `smoothing` as a share of the longest curve, in units of `smoothing_axis`; equal for every curve."""
    name = smoothing_axis(curves)
    return float(smoothing * np.nanmax([0.0, *(end_value(curve, name) for curve in curves)]))


def smoothed(x: Array, y: Array, width: float) -> Array:
    """Return the centred exponential average of `y` over `x`: weights `exp(-|x_i - x_j| / width)`, normalised.

    A centred average does not lag behind a falling loss as a one-sided average does. At either end it is the one-sided,
    bias-corrected average (arXiv:1412.6980, section 3). Weights depend on the distance in `x`, not on the index, so
    that runs with different logging intervals are treated alike. Over the first five widths the width grows with `x`,
    so that the steep start is not smeared. NaNs carry no weight and stay NaN.

    Args:
        x: positions in non-falling order, shape (n,).
        y: values, shape (n,).
        width: width of the average in units of `x`; 0 returns `y` unchanged.
    """
    finite = np.isfinite(y) & np.isfinite(x)
    if width <= 0 or not finite.any():
        return np.where(finite, y, np.nan)
    if finite.all():
        return _smoothed(x, y, width)
    result = np.full(len(y), np.nan)
    result[finite] = _smoothed(x[finite], y[finite], width)
    return result


def _smoothed(x: Array, y: Array, width: float) -> Array:
    """Return the average of finite values. Where thousands lie in one width, bins of them are averaged, with straight
    lines in between: the error is below a hundredth of the noise that is left in the average."""
    begun = int(np.searchsorted(x, 5.0 * width, side="right"))  # the local width is constant from here on
    size = int((len(x) - begun) * width / max(width, x[-1] - 5.0 * width)) // BINS_PER_WIDTH
    bins = (len(x) - begun - 1) // size if size >= MIN_BIN else 0
    end = begun + bins * size
    if not bins or (x[begun + size - 1 : end : size] - x[begun:end:size]).max() > 2 * width / BINS_PER_WIDTH:
        return _average(position_in_widths(x, width), y, np.ones(len(x)))
    centres, means = (
        np.concatenate([values[:begun], values[begun:end].reshape(bins, size).mean(axis=1), values[end:]])
        for values in (x, y)
    )
    counts = np.repeat([1.0, size, 1.0], [begun, bins, len(x) - end])
    return np.interp(x, centres, _average(position_in_widths(centres, width), means, counts))


def position_in_widths(x: Array, width: float) -> Array:
    """Return positions in units of the local width `min(width, x / 5)`: the integral of its reciprocal over `x`."""
    full = 5.0 * width
    position = (x - full) / width
    begun = int(np.searchsorted(x, full, side="right"))
    position[:begun] = 5.0 * np.log(np.clip(x[:begun], full * 1e-3, full) / full)
    return position


def _average(position: Array, values: Array, counts: Array) -> Array:
    """Return `sum_j exp(-|position_i - position_j|) counts_j values_j`, divided by the same sum without the values.

    Two passes over chunks sum what lies before each point and what lies after it. `position` must not fall.
    """
    sums, weights, rising = np.empty(len(values)), np.empty(len(values)), np.empty(len(values))
    chunks = _chunks(position)
    total = weight = 0.0
    origin, values = position[0], values * counts
    for start, end in chunks:
        here = position[start:end]
        growth, decay = np.exp(here - here[0], out=rising[start:end]), np.exp(origin - here[0])
        sums[start:end] = (np.cumsum(values[start:end] * growth) + total * decay) / growth
        weights[start:end] = (np.cumsum(counts[start:end] * growth) + weight * decay) / growth
        total, weight, origin = sums[end - 1], weights[end - 1], here[-1]
    total = weight = 0.0
    for start, end in reversed(chunks):
        here = position[start:end]
        growth = np.exp(here[-1] - here[0]) / rising[start:end]  # exp(here[-1] - here), in a fraction of its time
        decay = np.exp(here[-1] - origin)
        after = (np.cumsum((values[start:end] * growth)[::-1])[::-1] + total * decay) / growth
        weight_after = (np.cumsum((counts[start:end] * growth)[::-1])[::-1] + weight * decay) / growth
        sums[start:end] += after - values[start:end]  # Both passes count the point itself.
        weights[start:end] += weight_after - counts[start:end]
        total, weight, origin = after[0], weight_after[0], here[0]
    return np.divide(sums, weights, out=sums)


def _chunks(position: Array) -> list[tuple[int, int]]:
    chunks = []
    start = 0
    while start < len(position):
        wide = int(np.searchsorted(position, position[start] + CHUNK_WIDTHS, side="right"))
        end = max(start + 1, min(wide, start + CHUNK_POINTS))
        chunks.append((start, end))
        start = end
    return chunks


# The noise along a curve, the scatter of the ends of runs between seeds, and the intervals that follow from them.
#
# Residuals around a smoothed curve vanish where its width is less than the distance of its points, and so does every
# interval that resamples them. Here the curve is averaged in bins of two widths, and the noise is estimated from how
# far each average lies from the line between its neighbours (Gasser, Sroka and Jennen-Steinmetz 1986, Biometrika 73,
# 625). A bin holds at least one point, so sparse points are compared with their neighbours. Averages of dense points
# contain the correlation of points within a bin, as batch means do (Carlstein 1986, Ann. Statist. 14, 1171).
#
# The end of a run scatters between seeds with a standard deviation that is estimated from few runs, so the interval of
# a difference is Student's: t times the deviation times sqrt(1/n1 + 1/n2). Deviations of several configurations are
# pooled, as their variances are in a moderated t (Smyth 2004, https://doi.org/10.2202/1544-6115.1027): what is known
# from other runs enters as if it had been measured with a limited number of degrees of freedom, because recipes differ
# in scatter. The noise along a curve moves its end as well, so the scatter of ends holds it already.
#
# Of several configurations, the lowest and the highest are further apart than two, and which is compared with which is
# chosen by their ends. The intervals of all their differences therefore hold together: t is the quantile of the
# studentised range over sqrt(2) (Tukey 1953), of unlike numbers of seeds as well (Kramer 1956), where it is a little
# too large (Hayter 1984, Ann. Statist. 12, 61). Dunnett's smaller t is that of a control that was chosen beforehand.

CONFIDENCE = 0.9
"""Share of equal pairs that an interval leaves without a verdict."""
SIMILARITY = 8.0
"""Degrees of freedom that the scatter of other runs counts at most.

Variances that follow a scaled inverse chi-squared distribution of 8 degrees of freedom are those of recipes whose
deviations differ by a factor of about 1.3: sqrt(trigamma(4)) / 2 = 0.27 in the logarithm.
"""
OWN_SHARE = (SIMILARITY - 3) / (SIMILARITY - 2)
"""Share of the degrees of freedom that is left when two configurations of so unlike variances are pooled.

It is Satterthwaite's (1946) number for two variances a and b, E[(a + b)^2] / (2 E[a^2 + b^2]), and 5/6.
"""
LEAST_PAIRED_FREEDOM = 4
"""Degrees of freedom from which runs are paired by seed.

With fewer, t grows by more than pairing gains, unless the two runs of a seed are correlated by more than one half.
"""
RESOLUTION = 1e-6
"""Share of a loss below which a deviation is rounding of 32-bit numbers and no noise."""
ANGLES = 20_001
"""Points of the integral of Student's t; its quantiles are then right to five digits."""
RANGE_POINTS, WIDEST_RANGE = 2000, 12.0
"""Points of the integral over deviations, and the largest range of normal numbers, of which a thousand have 6.5."""
BIN_WIDTHS = 2.0
"""Extent of a bin in units of the local width of the smoothing."""
WINDOW = 0.2
"""Distance, as a share of the curve, within which the bins tell the noise at a point: it falls with the rate."""
FEWEST_BINS = 5
"""Number of bins below which the noise cannot be told from the shape of the curve."""
LEAST_BINS = 6
"""Number of nearest bins that tell the noise at a point, however far away."""
CORRELATED = 35 / 18
"""Number of bins for one degree of freedom: neighbouring second differences share points."""
WHOLE, END = slice(None), slice(-1, None)
"""All points of a curve, and the last."""


@dataclass(frozen=True)
class Scatter:
    """Standard deviation of one run's end between seeds, and the degrees of freedom of its square."""

    deviation: float
    freedom: float
    source: str = "as given"
    """The runs it comes from, in words that follow "seeds scatter by 0.02"."""

    def of_others(self) -> Scatter:
        """Return what this says of other runs: fewer degrees of freedom, as recipes differ in their scatter."""
        return Scatter(self.deviation, 1 / (1 / self.freedom + 1 / SIMILARITY), self.source)

    def half_width(self, first: int = 1, second: int = 1, *, of: int = 2) -> float:
        """Return how far the means of two equal recipes with so many seeds lie apart at most, in 90 % of cases.

        They are any two `of` so many recipes that are compared: the two that are furthest apart, say.
        """
        return student_quantile(self.freedom, of) * self.deviation * math.sqrt(1 / first + 1 / second)

    def describe(self) -> str:
        """Return the deviation and its source in words."""
        return f"seeds scatter by {self.deviation:.2g} {self.source}"


def scatter_of(groups: Sequence[Sequence[float]], source: str = "in their own runs") -> Scatter | None:
    """Return the pooled scatter of groups of ends, each around its own mean; None if no group has two unlike ends."""
    several = [np.asarray(ends) for ends in groups if len(ends) > 1]
    freedom = sum(len(ends) - 1 for ends in several)
    squares = sum(float(np.var(ends)) * len(ends) for ends in several)
    if not freedom or math.sqrt(squares / freedom) <= RESOLUTION * max(abs(float(np.mean(ends))) for ends in several):
        return None
    return Scatter(math.sqrt(squares / freedom), freedom * (OWN_SHARE if len(several) > 1 else 1.0), source)


def usual_scatter(groups: Sequence[Sequence[float]], source: str) -> Scatter | None:
    """Return the scatter that is usual among configurations: the median, which an unstable one does not raise.

    Each variance is divided by the median of its chi-squared distribution, (1 - 2 / 9f)^3 of its degrees of freedom f
    (Wilson and Hilferty 1931). A median is worth 2 / pi of a mean's degrees of freedom.
    """
    known = [own for ends in groups if (own := scatter_of([ends], source)) is not None]
    if not known:
        return None
    variance = np.median([own.deviation**2 / (1 - 2 / (9 * own.freedom)) ** 3 for own in known])
    freedom = sum(own.freedom for own in known)
    return Scatter(math.sqrt(variance), freedom * 2 / math.pi, source) if len(known) > 2 else scatter_of(groups, source)


def combined(own: Scatter | None, others: Scatter | None) -> Scatter | None:
    """Return the scatter of runs from their own and that of others; None if neither is known."""
    known = [part for part in (own, others and others.of_others()) if part is not None]
    if not known:
        return None
    freedom = sum(part.freedom for part in known)
    variance = sum(part.freedom * part.deviation**2 for part in known) / freedom
    return Scatter(math.sqrt(variance), freedom, " and ".join(part.source for part in known))


def paired_scatter(pair: Sequence[Sequence[float]], table: Sequence[Sequence[float]]) -> Scatter | None:
    """Return the scatter that is left when the effects of seeds and configurations are removed from a table of ends.

    `table` has a row for each configuration and a column for each seed; `pair` is two of its rows, which count fully,
    the others as other runs do. This is the residual of a randomised block design (Fisher 1935). None if it has fewer
    than `LEAST_PAIRED_FREEDOM` degrees of freedom.
    """

    def squares(rows: Sequence[Sequence[float]]) -> float:
        ends = np.asarray(rows)
        return float(((ends - ends.mean(0) - ends.mean(1, keepdims=True) + ends.mean()) ** 2).sum())

    seeds, spare = len(pair[0]) - 1, len(table) - 2
    if seeds * (spare + 1) < LEAST_PAIRED_FREEDOM:
        return None
    source = "between the pairs of one seed"
    own = Scatter(math.sqrt(squares(pair) / seeds), seeds, source)
    rest = math.sqrt(max(0.0, squares(table) - squares(pair)) / (spare * seeds)) if spare else 0.0
    return combined(own, Scatter(rest, spare * seeds, "in other configurations") if spare else None)


def student_quantile(freedom: float, of: int = 2) -> float:
    """Return the t that holds `CONFIDENCE` of Student's distribution between -t and t.

    With more than two means it holds all of their differences at once.
    """
    rounded = round(min(freedom, 1000.0), 2)
    return _quantile(rounded) if of == 2 else _range_quantile(rounded, of) / math.sqrt(2)


@lru_cache(maxsize=4096)
def _range_quantile(freedom: float, means: int) -> float:
    """Return the studentised range that so many means exceed in 1 - `CONFIDENCE` of cases.

    The range of means is divided by a deviation whose logarithm has the density exp(f u - f exp(2 u) / 2) of u.
    """
    widths, shares = _shares_of_ranges(means)
    log = np.linspace(-max(14 / freedom, 6 / math.sqrt(freedom)), 4 / math.sqrt(freedom), RANGE_POINTS)
    density = np.exp(freedom * (log - np.exp(2 * log) / 2 + 0.5))
    deviations, density = np.exp(log), density / density.sum()
    low, high = 0.0, 1024.0
    for _ in range(40):
        middle = (low + high) / 2
        is_below = float(np.interp(middle * deviations, widths, shares) @ density) < CONFIDENCE
        low, high = (middle, high) if is_below else (low, middle)
    return high


@lru_cache(maxsize=256)
def _shares_of_ranges(means: int) -> tuple[Array, Array]:
    """Return widths, and in which share of cases so many normal numbers have a range below each."""
    step = 0.01
    z = np.arange(-9.0, 9.0, step)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    below = np.cumsum(density) * step - density * step / 2
    count = round(WIDEST_RANGE / step)
    padded = np.append(below, np.ones(count))
    windows = np.lib.stride_tricks.sliding_window_view(padded, len(z))
    widths: Array = step * np.arange(count + 1, dtype=np.float64)
    shares: Array = means * step * ((windows - below) ** (means - 1) @ density)
    return widths, shares


@lru_cache(maxsize=4096)
def _quantile(freedom: float) -> float:
    """Integrate Student's density, which is cos(angle)^(freedom - 1) with t = sqrt(freedom) tan(angle)."""
    angle = np.linspace(0, np.pi / 2, ANGLES)
    density = np.cos(angle) ** (freedom - 1)
    share = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(math.sqrt(freedom) * np.tan(np.interp(CONFIDENCE, share / share[-1], angle)))


@dataclass(frozen=True)
class Line:
    """A smoothed curve with the noise of each of its points."""

    value: Array
    deviation: Array
    """Standard deviation; NaN where there are fewer than `FEWEST_BINS`."""
    freedom: Array
    """Degrees of freedom of the deviation's square."""

    def at(self, grid: Array, x: Array) -> Line:
        """Return the line between the points `x`, on the positions of `grid`."""
        return Line(*(np.interp(grid, x, values) for values in (self.value, self.deviation, self.freedom)))

    def minus(self, other: Line) -> Line:
        """Return the difference of two lines whose noise is independent, with Satterthwaite's degrees of freedom."""
        own, others = self.deviation**2, other.deviation**2
        with np.errstate(invalid="ignore", divide="ignore"):
            freedom = (own + others) ** 2 / (own**2 / self.freedom + others**2 / other.freedom)
        freedom = np.where(np.isfinite(freedom), freedom, np.minimum(self.freedom, other.freedom))
        return Line(self.value - other.value, np.sqrt(own + others), freedom)

    def half_width(self) -> Array:
        """Return half of the width of the line's interval."""
        return self.deviation * np.array([student_quantile(each) for each in self.freedom.tolist()], np.float64)


def smoothed_line(x: Array, y: Array, width: float, points: slice = WHOLE) -> Line:
    """Return the smoothed values of `workbench.analysis.curve.smoothed` at some points, with their noise."""
    position = position_in_widths(x, width) if width > 0 else 1e3 * np.arange(len(x))
    kernel = np.exp(-np.abs(position[points, None] - position))
    weight = kernel.sum(1)
    bins = np.floor((position[-1] - position) / BIN_WIDTHS)
    starts = np.flatnonzero(np.diff(bins, prepend=np.nan))
    variance, freedom = _variance_of_a_point(x, y, starts, points)
    return Line(kernel @ y / weight, np.sqrt(variance * (kernel**2).sum(1)) / weight, freedom)


def _variance_of_a_point(x: Array, y: Array, starts: Indices, points: slice) -> tuple[Array, Array]:
    """Return the variance of one point's noise around some points, and its degrees of freedom.

    It is told by bins of points that begin at `starts`.
    """
    if len(starts) < FEWEST_BINS:
        return np.full(len(x[points]), np.nan), np.ones(len(x[points]))
    sizes = np.diff(np.append(starts, len(x)))
    centers, means = np.add.reduceat(x, starts) / sizes, np.add.reduceat(y, starts) / sizes
    along = np.log(np.maximum(centers, 1e-3 * x[-1])) + 1e-9 * np.arange(len(centers))  # no two are equal
    before = (along[2:] - along[1:-1]) / (along[2:] - along[:-2])
    residual = means[1:-1] - before * means[:-2] - (1 - before) * means[2:]
    squares = residual**2 / (1 / sizes[1:-1] + before**2 / sizes[:-2] + (1 - before) ** 2 / sizes[2:])
    distance = np.abs(x[points, None] - centers[1:-1])
    nearest = np.sort(distance, axis=1)[:, min(LEAST_BINS, len(squares)) - 1]
    within = distance <= np.maximum(nearest, WINDOW * (x[-1] - x[0]))[:, None]
    count = within.sum(1)
    return within @ squares / count, np.maximum(count / CORRELATED, 1.0)
