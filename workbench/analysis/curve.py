"""Curves as the figures take them: a name, columns with one value per logged step, and the axes to draw them over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.columns import COLUMNS, AxisUnit
from workbench.errors import InvalidArgument, UnknownParameter, suggestion
from workbench.runs.history import History
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
class Curve:
    """The record of one run: columns of equal length with one value per logged step.

    Columns are named and counted as in `workbench.columns.COLUMNS`. Only those that a figure draws are needed.
    """

    name: str
    columns: Columns = field(repr=False)
    marks: tuple[Mark, ...] = ()
    evaluations: Columns | None = field(default=None, repr=False)
    """Columns with one value per evaluation: eval_loss and those of the x axes; None without evaluation."""
    basis: LossBasis | None = None
    """The facts on which its losses depend; None if they are unknown."""


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
    except (KeyError, AttributeError):
        return np.empty(0)
    return np.asarray(values, dtype=np.float64)


def evaluations_of(curve: Curve) -> Curve | None:
    """Return the held-out losses of a run as a curve of their own, or None if it has none."""
    if curve.evaluations is None or not len(curve.evaluations["step"]):
        return None
    return Curve(curve.name, curve.evaluations, basis=curve.basis)


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
