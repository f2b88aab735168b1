"""The noise along a curve, estimated where points lie closer together than the smoothing and where they do not.

Residuals around a smoothed curve vanish where its width is less than the distance of its points, and so does every
interval that resamples them. Here the curve is averaged in bins of two widths, and the noise is estimated from how far
each average lies from the line between its neighbours (Gasser, Sroka and Jennen-Steinmetz 1986, Biometrika 73, 625).
A bin holds at least one point, so sparse points are compared with their neighbours. Averages of dense points contain
the correlation of points within a bin, as batch means do (Carlstein 1986, Ann. Statist. 14, 1171).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.analysis.curve import Array, Indices
from workbench.analysis.scatter import student_quantile
from workbench.analysis.smoothing import position_in_widths

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


WHOLE, END = slice(None), slice(-1, None)
"""All points of a curve, and the last."""


def smoothed_line(x: Array, y: Array, width: float, points: slice = WHOLE) -> Line:
    """Return the smoothed values of `workbench.analysis.smoothing.smoothed` at some points, with their noise."""
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
