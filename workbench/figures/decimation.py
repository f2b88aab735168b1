"""Decimation: fewer points that draw the same line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.analysis.curve import Array, Indices

MAX_POINTS = 2000
"""Largest number of points of one trace: a browser redraws and a notebook stores so many without being noticed."""
POINT_BUDGET = 40_000
"""Number of points of all traces of one figure together."""
CONTEXT_POINTS = 200
"""Number of points of a zoomed trace outside the visible window, so that zooming out shows the whole line at once."""
MAX_GAPS = 100
"""Largest number of gaps of a curve that are kept and marked."""


def points_per_trace(num_curves: int) -> int:
    """Return how many points a trace may have if `num_curves` curves share the figure's budget."""
    return int(min(MAX_POINTS, max(2 * CONTEXT_POINTS, POINT_BUDGET / 2 / max(1, num_curves))))


def decimated(y: Array, max_points: int = MAX_POINTS) -> Indices:
    """Return indices of at most `max_points` points that draw as all points do.

    Every bin keeps its minimum and its maximum, so that no spike is lost. The first and the last point stay, and one
    NaN for each of the first `MAX_GAPS` gaps, so that a gap is still seen.
    """
    if len(y) <= max_points:
        return np.arange(len(y))
    known = np.isfinite(y)
    if known.all():
        return _ascending([0], _extremes(y, (max_points - 2) // 2 * 2), [len(y) - 1])
    finite, gaps = np.flatnonzero(known), gap_starts(y)[:MAX_GAPS]
    bins = (max_points - len(gaps) - 2) // 2 * 2
    if len(finite) > bins:
        finite = np.concatenate([finite[:1], finite[_extremes(y[finite], bins)], finite[-1:]])
    return _ascending(finite, gaps)


def _ascending(*indices: Sequence[int] | Indices) -> Indices:
    """Return all indices in ascending order, each once; `np.unique` would hash and take ten times as long."""
    merged = np.sort(np.concatenate(indices).astype(np.int64, copy=False))
    return merged[np.diff(merged, prepend=-1) > 0]


def _extremes(y: Array, count: int) -> Indices:
    """Return indices of the minimum and the maximum of each of `count / 2` bins."""
    from tsdownsample import MinMaxDownsampler

    return np.asarray(MinMaxDownsampler().downsample(np.ascontiguousarray(y), n_out=count), dtype=np.int64)


def focused(x: Array, y: Array, whole: Indices, window: tuple[float, float], max_points: int) -> Indices:
    """Return indices as `decimated` does, chosen anew among the points within a window of `x`.

    Args:
        x: positions in rising order, shape (n,).
        y: values, shape (n,).
        whole: indices that `decimated` returns for all of `y`; `CONTEXT_POINTS` of them stay outside the window.
        window: lowest and highest visible `x`.
        max_points: largest number of indices to return.
    """
    if len(y) <= max_points:
        return whole
    first = max(0, int(np.searchsorted(x, window[0])) - 1)
    end = min(len(y), int(np.searchsorted(x, window[1], side="right")) + 1)
    inside = first + decimated(y[first:end], max_points - CONTEXT_POINTS)
    outside = whole[decimated(y[whole], CONTEXT_POINTS)]
    return np.concatenate([outside[outside < first], inside, outside[outside >= end]])


def gap_starts(y: Array) -> Indices:
    """Return the index of the first value of every stretch of NaN or infinite values."""
    bad = ~np.isfinite(y)
    return np.flatnonzero(bad & ~np.concatenate([[False], bad[:-1]]))
