"""The noise along a curve, the scatter of the ends of runs between seeds, and the intervals that follow from them.

Residuals around a smoothed curve vanish where its width is less than the distance of its points, and so does every
interval that resamples them. Here the curve is averaged in bins of two widths, and the noise is estimated from how far
each average lies from the line between its neighbours (Gasser, Sroka and Jennen-Steinmetz 1986, Biometrika 73, 625).
A bin holds at least one point, so sparse points are compared with their neighbours. Averages of dense points contain
the correlation of points within a bin, as batch means do (Carlstein 1986, Ann. Statist. 14, 1171).

The end of a run scatters between seeds with a standard deviation that is estimated from few runs, so the interval of a
difference is Student's: t times the deviation times sqrt(1/n1 + 1/n2). Deviations of several configurations are pooled,
as their variances are in a moderated t (Smyth 2004, https://doi.org/10.2202/1544-6115.1027): what is known from other
runs enters as if it had been measured with a limited number of degrees of freedom, because recipes differ in scatter.
The noise along a curve moves its end as well, so the scatter of ends holds it already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from workbench.analysis.curve import Array, Indices, position_in_widths

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

    def half_width(self, first: int = 1, second: int = 1) -> float:
        """Return how far the means of two equal recipes with so many seeds lie apart at most, in 90 % of cases."""
        return student_quantile(self.freedom) * self.deviation * math.sqrt(1 / first + 1 / second)

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


def student_quantile(freedom: float) -> float:
    """Return the t that holds `CONFIDENCE` of Student's distribution between -t and t."""
    return _quantile(round(min(freedom, 1000.0), 2))


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
