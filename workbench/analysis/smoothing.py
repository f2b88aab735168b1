"""Smoothing of curves by a centred exponential average whose width is equal for all curves of a figure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.analysis.curve import Array, Curve, column, end_value
from workbench.errors import InvalidArgument

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
