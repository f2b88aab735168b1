"""Numbers of a comparison of curves: which run is lower at equal cost, by how much, and where two curves cross.

Uncertainty comes from a moving-block bootstrap (Künsch 1989, Ann. Statist. 17, 1217): the residuals of each run around
its smoothed curve are resampled in blocks, added to the curve and smoothed again, `RESAMPLES` times. Blocks of n^(1/3)
neighbouring values (the rate of Hall, Horowitz and Jing 1995, Biometrika 82, 561) preserve the correlation of
neighbours. The result tells how far the noise of batches may have moved the curve of one run. It does not tell how far
another seed would move it: that takes several runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.analysis.axes import COST_AXES, X_AXES, check_axis, shared_axes
from workbench.analysis.curve import Array, Curve, CurveLike, column, finite_points
from workbench.analysis.smoothing import SMOOTHING, smoothed
from workbench.errors import UnknownParameter

RESAMPLES = 400
MAX_POINTS = 2000
"""Number of bins into which a longer run is averaged before it is resampled."""
GRID_POINTS = 300
"""Number of points at which a difference is computed."""
CONFIDENCE = 0.9
"""Share of the resamples that an interval holds, and that must agree before a run is called lower."""
PERCENTILES = (50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE))


@dataclass(frozen=True)
class Interval:
    """A number with the interval that holds `CONFIDENCE` of its resamples."""

    value: float
    low: float
    high: float

    def describe(self) -> str:
        """Return the value with half of its interval, which is left out where the value's last digit is larger."""
        half, written = (self.high - self.low) / 2, f"{self.value:.4g}"
        return f"{written} ± {half:.2g}" if f"{self.value + half:.4g}" != written else written


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
    crossover: Interval | None
    """Position of the last change of sign, in the unit of `x`; None without one."""
    crossing_share: float
    """Share of the resamples whose difference changes its sign."""

    def __repr__(self) -> str:
        first, second = self.names
        return f"Difference({first} − {second} over {self.axis}: {self.describe()})"

    def describe(self) -> str:
        """Return the difference in words.

        For example `"a ends lower than b by 0.26 (0.25 to 0.27); the curves last cross at 1.36 M tokens (…)"`.
        """
        last = Interval(float(self.value[-1]), float(self.low[-1]), float(self.high[-1]))
        if last.low <= 0 <= last.high:
            interval = f"{last.value:+.3g}, {last.low:+.3g} to {last.high:+.3g}"
            ending = f"{self.names[0]} and {self.names[1]} cannot be told apart at the end ({interval})"
        else:
            better, other = self.names if last.value < 0 else self.names[::-1]
            low, high = (f"{end:.3g}" for end in sorted((abs(last.low), abs(last.high))))
            interval = f" ({low} to {high})" if low != high else ""
            ending = f"{better} ends lower than {other} by {abs(last.value):.3g}{interval}"
        if self.crossover is None:
            return f"{ending}; the curves do not cross"
        at, low_at, high_at = map(
            X_AXES[self.axis].describe, (self.crossover.value, self.crossover.low, self.crossover.high)
        )
        share = self.crossing_share
        doubt = "" if share >= CONFIDENCE else f", in {share:.0%} of the resamples only"
        found = f"{low_at} to {high_at}{doubt}" if low_at != high_at else doubt.removeprefix(", ")
        return f"{ending}; the curves last cross at {at}" + (f" ({found})" if found else "")


@dataclass(frozen=True)
class Standing:
    """Smoothed losses of several runs where each has spent the same: the most that all of them have spent."""

    axis: str
    at: float
    losses: Mapping[str, Interval]
    best: str
    share: float
    """Share of the resamples in which `best` has the lowest loss."""

    @property
    def sure(self) -> bool:
        """True if `CONFIDENCE` of the resamples agree on the best run."""
        return self.share >= CONFIDENCE

    def __str__(self) -> str:
        order = sorted(self.losses, key=lambda name: self.losses[name].value)
        values = ", ".join(f"{name} {self.losses[name].value:.4g}" for name in order)
        verdict = f"{self.best} is lower" if self.sure else "too close to call"
        axis = X_AXES[self.axis]
        return f"at equal {axis.label} ({axis.describe(self.at)}): {verdict} ({values})"


def difference(
    first: CurveLike, second: CurveLike, x: str = "tokens", smoothing: float = SMOOTHING, seed: int = 0
) -> Difference:
    """Return the smoothed loss of `first` minus that of `second`, with a 90 % band and the crossover.

    Args:
        first: one run.
        second: the run whose loss is subtracted.
        x: name of the x axis.
        smoothing: width of the moving average as a share of the shared stretch's end.
        seed: seed of the resampling; the same seed gives the same band.

    Raises:
        UnknownParameter: a run did not record the axis, or the runs share no stretch of it.
    """
    grid = _shared_grid([first, second], x)
    width = smoothing * float(grid[-1])
    first_line, first_resampled = _resample(first, x, grid, width, seed)
    second_line, second_resampled = _resample(second, x, grid, width, seed + 1)
    value, resampled = first_line - second_line, first_resampled - second_resampled
    low, high = np.percentile(resampled, PERCENTILES, axis=0)
    crossing = _last_crossing(grid, value)
    crossings = np.array([_last_crossing(grid, row) for row in resampled])
    known = crossings[np.isfinite(crossings)]
    crossover = None
    if np.isfinite(crossing) and len(known):
        crossover = Interval(crossing, *(float(edge) for edge in np.percentile(known, PERCENTILES)))
    return Difference((first.name, second.name), x, grid, value, low, high, crossover, len(known) / RESAMPLES)


def standings(
    curves: Sequence[CurveLike], axes: Sequence[str] = COST_AXES, smoothing: float = SMOOTHING, seed: int = 0
) -> tuple[Standing, ...]:
    """Return which run is lowest at equal tokens, FLOPs, GPU-hours and time.

    Axes without a stretch that all runs share are left out: one step of a slow run may cost more than another run as a
    whole.
    """
    curves, known = with_unique_names(curves), shared_axes(curves)
    results = []
    for axis in axes:
        if axis in known:
            try:
                grid = _shared_grid(curves, axis)
            except UnknownParameter:
                continue
            results.append(_standing(curves, axis, grid, smoothing, seed))
    return tuple(results)


def _standing(curves: Sequence[CurveLike], axis: str, grid: Array, smoothing: float, seed: int) -> Standing:
    width = smoothing * float(grid[-1])
    ends = [_resample(curve, axis, grid, width, seed + index) for index, curve in enumerate(curves)]
    values = np.array([line[-1] for line, _ in ends])
    resampled = np.array([lines[:, -1] for _, lines in ends])
    low, high = np.percentile(resampled, PERCENTILES, axis=1)
    best = int(np.argmin(values))
    share = float(np.mean(np.argmin(resampled, axis=0) == best))
    losses = {
        curve.name: Interval(float(value), float(below), float(above))
        for curve, value, below, above in zip(curves, values, low, high, strict=True)
    }
    return Standing(axis, float(grid[-1]), losses, curves[best].name, share)


def with_unique_names(curves: Sequence[CurveLike]) -> Sequence[CurveLike]:
    """Return the curves with the later ones of equal name numbered, such as runs of two folders."""
    names = [curve.name for curve in curves]
    if len(set(names)) == len(names):
        return curves
    numbers = [names[: index + 1].count(name) for index, name in enumerate(names)]
    return [
        Curve(name if number == 1 else f"{name} ({number})", curve.columns)
        for name, number, curve in zip(names, numbers, curves, strict=True)
    ]


def _shared_grid(curves: Sequence[CurveLike], axis: str) -> Array:
    """Return `GRID_POINTS` positions over the stretch of an axis that every curve has been on."""
    check_axis(axis)
    spans = []
    for curve in curves:
        x, _ = _binned_loss(curve, axis)
        if len(x) < 2:
            raise UnknownParameter(
                f"{curve.name} has not recorded its loss over x={axis!r}. Choose another axis.",
                parameter="x",
                value=axis,
            )
        spans.append((x[0], x[-1]))
    low, high = max(span[0] for span in spans), min(span[1] for span in spans)
    if high <= low:
        raise UnknownParameter(
            f"The runs share no stretch of x={axis!r}: one ends at {X_AXES[axis].describe(high)}, another begins at "
            f"{X_AXES[axis].describe(low)}. Choose another axis, or runs that overlap.",
            parameter="x",
            value=axis,
        )
    return np.linspace(low, high, GRID_POINTS)


def _binned_loss(curve: CurveLike, axis: str) -> tuple[Array, Array]:
    """Return finite (x, loss) pairs, at most `MAX_POINTS`; a longer run is averaged in bins."""
    held_out = column(curve, "eval_loss")
    y = held_out if len(held_out) else column(curve, "loss")
    return finite_points(column(curve, X_AXES[axis].column), y, MAX_POINTS)


def _resample(curve: CurveLike, axis: str, grid: Array, width: float, seed: int) -> tuple[Array, Array]:
    """Return the smoothed loss on the grid, shape (grid,), and that of every resample, shape (RESAMPLES, grid)."""
    x, y = _binned_loss(curve, axis)
    line = smoothed(x, y, width)
    residual = y - line
    resampled = np.empty((RESAMPLES, len(grid)))
    for row, noise in enumerate(_resampled_blocks(residual - residual.mean(), np.random.default_rng(seed))):
        resampled[row] = np.interp(grid, x, smoothed(x, line + noise, width))
    # Smoothing a smoothed line moves it, so the band is shifted back to lie around the line itself.
    shift = np.interp(grid, x, line) - np.interp(grid, x, smoothed(x, line, width))
    return np.interp(grid, x, line), resampled + shift


def _resampled_blocks(residual: Array, random: np.random.Generator) -> NDArray[np.float64]:
    """Return `RESAMPLES` rows of residuals, drawn in blocks of neighbours, shape (RESAMPLES, n)."""
    size = len(residual)
    length = max(1, min(size, round(size ** (1 / 3))))
    blocks = -(-size // length)
    starts = random.integers(0, size - length + 1, (RESAMPLES, blocks))
    index = (starts[:, :, None] + np.arange(length)).reshape(RESAMPLES, -1)[:, :size]
    return np.asarray(residual[index])


def _last_crossing(x: Array, value: Array) -> float:
    """Return the last position at which the value passes through zero, interpolated; NaN if it never does."""
    changes = np.flatnonzero(np.sign(value[1:]) * np.sign(value[:-1]) < 0)
    if not len(changes):
        return float("nan")
    at = changes[-1]
    share = value[at] / (value[at] - value[at + 1])
    return float(x[at] + share * (x[at + 1] - x[at]))
