"""A run's columns prepared for drawing: x axes and their units, smoothing, decimation. NumPy in, NumPy out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from workbench.figures import theme
from workbench.machine import available_cores

Array = NDArray[np.float64]
Drawn = TypeVar("Drawn")

MAX_POINTS = 2000
"""Points of one trace: what a browser redraws, and a notebook stores, without being noticed."""

POINT_BUDGET = 40_000
"""Points of all traces of one figure together."""

SMOOTHING = 0.01


PARTS = ("raw", "line", "nan", "mark", "end")
"""What a run's curve is drawn of, from back to front: values, their average, where they break off, events, the last."""

MAX_MARKS = 100
TURN_POINTS = 20
TURN = 2**15
NEIGHBOURS = 50_000
CONTEXT_POINTS = 200
"""Of a trace that is zoomed into: points kept outside, so that zooming out shows the whole at once."""


class Columns(Protocol):
    """A mapping of names to columns, or a run's `History`."""

    def __getitem__(self, name: str, /) -> Any: ...


class CurveLike(Protocol):
    """Anything with a name and columns."""

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> Columns: ...


@dataclass(frozen=True)
class Mark:
    """Something that happened to a run at a step: `kind` is `checkpoint`, `resume` or `divergence`."""

    kind: str
    step: float
    text: str


@dataclass(frozen=True)
class Curve:
    """What one run recorded: equally long columns, one value a logged step.

    Columns are named as in a run's events: step, loss, learning_rate, grad_norm, step_ms, tokens, samples,
    flops, seconds (all cumulative but loss, rates and step_ms), gpu_hours, tokens_per_s, mfu. Only those
    that a figure draws have to be there.
    """

    name: str
    columns: Columns = field(repr=False)
    color: str | None = None
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class Axis:
    """One way to lay out training: which column, and how its values are written."""

    column: str
    label: str
    units: tuple[tuple[float, str], ...]
    """Scales from large to small with the axis title of each."""

    def unit(self, largest: float) -> tuple[float, str]:
        for scale, name in self.units:
            if largest >= scale:
                return scale, name
        return self.units[-1]


X_AXES = {
    "step": Axis("step", "step", ((1.0, "Step"),)),
    "tokens": Axis(
        "tokens",
        "tokens",
        ((1e12, "Tokens (T)"), (1e9, "Tokens (B)"), (1e6, "Tokens (M)"), (1e3, "Tokens (k)"), (1.0, "Tokens")),
    ),
    "samples": Axis("samples", "samples", ((1e6, "Samples (M)"), (1e3, "Samples (k)"), (1.0, "Samples"))),
    "time": Axis(
        "seconds",
        "time",
        ((7200.0, "Training time (hours)"), (120.0, "Training time (minutes)"), (1.0, "Training time (seconds)")),
    ),
    "flops": Axis(
        "flops",
        "FLOPs",
        (
            (1e21, "Model FLOPs (ZFLOP, 10<sup>21</sup>)"),
            (1e18, "Model FLOPs (EFLOP, 10<sup>18</sup>)"),
            (1e15, "Model FLOPs (PFLOP, 10<sup>15</sup>)"),
            (1e12, "Model FLOPs (TFLOP, 10<sup>12</sup>)"),
            (1e9, "Model FLOPs (GFLOP, 10<sup>9</sup>)"),
        ),
    ),
    "gpu_hours": Axis("gpu_hours", "GPU-hours", ((1.0, "GPU-hours"), (1 / 60, "GPU-minutes"))),
}


def column(curve: CurveLike, name: str) -> Array:
    """One column as float64, `None` as NaN; empty where the curve has none of that name."""
    try:
        values = curve.columns[name]
    except (KeyError, AttributeError):
        return np.empty(0)
    return np.asarray(values, dtype=np.float64)


def color_of(curve: CurveLike, index: int) -> str:
    return str(getattr(curve, "color", None) or theme.series_color(index))


def smoothed(x: Array, y: Array, width: float) -> Array:
    """Centred exponential average over `x`: weights `exp(-|x_i - x_j| / width)`, normalised.

    An average to both sides does not lag behind a falling loss as a one-sided one does; at either end it
    is the one-sided, bias-corrected average (arXiv:1412.6980, section 3). Weighing by distance in `x`
    rather than by index treats runs alike that log at different intervals. Over the first five widths
    the width grows with `x`, so that the steep start is not smeared. NaNs carry no weight and stay NaN.
    """
    finite = np.isfinite(y) & np.isfinite(x)
    if width <= 0 or not finite.any():
        return np.where(finite, y, np.nan)
    if finite.all():
        return _averaged(_in_widths(x, width), y)
    result = np.full(len(y), np.nan)
    result[finite] = _averaged(_in_widths(x[finite], width), y[finite])
    return result


def _in_widths(x: Array, width: float) -> Array:
    """Position in units of the local width `min(width, x / 5)`: the integral of its reciprocal. `x` does not fall."""
    full = 5.0 * width
    position = (x - full) / width
    begun = int(np.searchsorted(x, full, side="right"))
    position[:begun] = 5.0 * np.log(np.clip(x[:begun], full * 1e-3, full) / full)
    return position


def _averaged(distance: Array, values: Array) -> Array:
    """`sum_j exp(-|distance_i - distance_j|) values_j` over the same sum of ones; `distance` does not fall.

    What lies before a point and what lies after it are summed in turns of `TURN` points, which stay in the processor's
    cache, and of 30 widths at most, so that no exponential overflows.
    """
    sums, weights = np.empty(len(values)), np.empty(len(values))
    turns = _turns(distance)
    total = weight = 0.0
    origin = distance[0]
    for start, end in turns:
        here = distance[start:end]
        growth, decay = np.exp(here - here[0]), np.exp(origin - here[0])
        sums[start:end] = (np.cumsum(values[start:end] * growth) + total * decay) / growth
        weights[start:end] = (np.cumsum(growth) + weight * decay) / growth
        total, weight, origin = sums[end - 1], weights[end - 1], here[-1]
    total = weight = 0.0
    for start, end in reversed(turns):
        here = distance[start:end]
        growth, decay = np.exp(here[-1] - here), np.exp(here[-1] - origin)
        after = (np.cumsum((values[start:end] * growth)[::-1])[::-1] + total * decay) / growth
        weight_after = (np.cumsum(growth[::-1])[::-1] + weight * decay) / growth
        sums[start:end] += after - values[start:end]  # a point is both before and after itself
        weights[start:end] += weight_after - 1.0
        total, weight, origin = after[0], weight_after[0], here[0]
    return np.divide(sums, weights, out=sums)


def _turns(distance: Array) -> list[tuple[int, int]]:
    turns = []
    start = 0
    while start < len(distance):
        wide = int(np.searchsorted(distance, distance[start] + 30.0, side="right"))
        end = max(start + 1, min(wide, start + TURN))
        turns.append((start, end))
        start = end
    return turns


def decimated(y: Array, max_points: int = MAX_POINTS) -> NDArray[np.int64]:
    """Indices of at most `max_points` points that draw as all of them do.

    Every bin keeps its minimum and its maximum, so that no spike is lost; the first and the last point
    stay, and one NaN for every gap (the first hundred), so that a gap is still seen.
    """
    if len(y) <= max_points:
        return np.arange(len(y))
    known = np.isfinite(y)
    if known.all():
        return _ascending([0], _extremes(y, (max_points - 2) // 2 * 2), [len(y) - 1])
    finite, gaps = np.flatnonzero(known), gap_starts(y)[:100]
    bins = (max_points - len(gaps) - 2) // 2 * 2
    if len(finite) > bins:
        finite = np.concatenate([finite[:1], finite[_extremes(y[finite], bins)], finite[-1:]])
    return _ascending(finite, gaps)


def _ascending(*indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """All of them, each once. (`np.unique` hashes, which takes ten times longer.)"""
    merged = np.sort(np.concatenate(indices).astype(np.int64, copy=False))
    return merged[np.diff(merged, prepend=-1) > 0]


def _extremes(y: Array, count: int) -> NDArray[np.int64]:
    """Indices of the minimum and maximum of each of `count / 2` bins."""
    from tsdownsample import MinMaxDownsampler

    return np.asarray(MinMaxDownsampler().downsample(np.ascontiguousarray(y), n_out=count), dtype=np.int64)


def focused(
    x: Array, y: Array, whole: NDArray[np.int64], window: tuple[float, float], max_points: int
) -> NDArray[np.int64]:
    """Indices as `decimated` keeps them, chosen anew among the points within `window` of the rising `x`.

    `whole` is what `decimated` keeps of all; `CONTEXT_POINTS` of these stay outside the window, so that zooming out
    shows the whole until it is drawn anew.
    """
    if len(y) <= max_points:
        return whole
    first = max(0, int(np.searchsorted(x, window[0])) - 1)
    end = min(len(y), int(np.searchsorted(x, window[1], side="right")) + 1)
    inside = first + decimated(y[first:end], max_points - CONTEXT_POINTS)
    outside = whole[decimated(y[whole], CONTEXT_POINTS)]
    return np.concatenate([outside[outside < first], inside, outside[outside >= end]])


def diverged_at(raw: Array, line: Array) -> int | None:
    """Index of a loss' lowest smoothed value, if the loss has left it for good since; None otherwise.

    For good means that the later half of what followed (20 values or 2 % of all, at least) stays above it by a
    quarter of all that the loss had fallen by, and by six times its noise: 1.4826 times the median absolute
    difference of neighbouring values over the root of two (after Rousseeuw and Croux 1993), which a trend does
    not enlarge.
    """
    known = np.flatnonzero(np.isfinite(line) & np.isfinite(raw))
    if len(known) < 2 * TURN_POINTS:
        return None
    raw, values = (raw, line) if len(known) == len(raw) else (raw[known], line[known])
    lowest = int(np.argmin(values))
    after = values[lowest:]
    if len(after) < max(TURN_POINTS, 0.02 * len(values)):
        return None
    noise = 1.4826 * float(np.median(_neighbour_differences(raw))) / math.sqrt(2)
    fallen = float(values[: lowest + 1].max() - values[lowest])
    risen = float(after[len(after) // 2 :].min() - values[lowest])
    return int(known[lowest]) if risen > max(0.25 * fallen, 6.0 * noise, 1e-9) else None


def _neighbour_differences(values: Array) -> Array:
    """Absolute differences of neighbouring values, of a long column as many as say enough, evenly spread."""
    first = np.arange(0, len(values) - 1, max(1, len(values) // NEIGHBOURS))
    return np.abs(values[first + 1] - values[first])


def gap_starts(y: Array) -> NDArray[np.int64]:
    """Index of the first NaN (or infinity) of every run of them."""
    bad = ~np.isfinite(y)
    if not bad.any():
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(bad & ~np.concatenate([[False], bad[:-1]]))


def smoothing_axis(curves: Sequence[CurveLike]) -> str:
    """What smoothing is measured along: tokens where every curve counts them, else steps."""
    return "tokens" if curves and all(len(column(curve, "tokens")) for curve in curves) else "step"


def smoothing_width(curves: Sequence[CurveLike], smoothing: float) -> float:
    """`smoothing` as a share of the longest curve, in the units of `smoothing_axis`; the same for every curve."""
    name = smoothing_axis(curves)
    longest = max((_largest(column(curve, name)) for curve in curves), default=0.0)
    return float(smoothing * longest)


@dataclass(frozen=True)
class DrawnCurve:
    """One run prepared for drawing: whole arrays, and which points are shown; `x` holds each axis in its own unit."""

    name: str
    key: str
    """Tells runs of one name apart."""
    color: str
    raw_index: NDArray[np.int64]
    line_index: NDArray[np.int64]
    raw: Array
    line: Array
    dash: str
    gaps: NDArray[np.int64]
    x: Mapping[str, Array]
    step: Array
    tokens: Array
    marks: tuple[Mark, ...]

    @property
    def hover(self) -> Array:
        """Columns raw value, step, tokens at `line_index`."""
        return np.column_stack([values[self.line_index] for values in (self.raw, self.step, self.tokens)])

    @cached_property
    def last(self) -> int | None:
        """Index of the last finite value."""
        if len(self.raw) and np.isfinite(self.raw[-1]):
            return len(self.raw) - 1
        finite = np.flatnonzero(np.isfinite(self.raw))
        return int(finite[-1]) if len(finite) else None

    @cached_property
    def mark_index(self) -> NDArray[np.int64]:
        """Index of the last point at or before each mark's step."""
        steps = np.array([mark.step for mark in self.marks], dtype=np.float64)
        return np.clip(np.searchsorted(self.step, steps, side="right") - 1, 0, None).astype(np.int64)

    def points(self, part: str) -> NDArray[np.int64]:
        """Indices of the points that one of `PARTS` shows."""
        if part == "end":
            return np.array([] if self.last is None else [self.last], dtype=np.int64)
        if part == "mark":
            return self.mark_index
        return {"raw": self.raw_index, "line": self.line_index, "nan": self.gaps}[part]

    def focused(self, axis: str, window: tuple[float, float] | None, budget: int) -> DrawnCurve:
        """The same curve with its points chosen for what is visible of it."""
        if window is None:
            return self
        x, points = self.x[axis], max(budget // 2, 2 * CONTEXT_POINTS)
        return replace(
            self,
            raw_index=focused(x, self.raw, self.raw_index, window, budget),
            line_index=focused(x, self.line, self.line_index, window, points),
        )


def points_each(num_curves: int) -> int:
    """Points of a trace where so many curves share a figure."""
    return int(min(MAX_POINTS, max(2 * CONTEXT_POINTS, POINT_BUDGET / 2 / max(1, num_curves))))


def draw(curves: Sequence[CurveLike], y: str, smoothing: float, scales: Mapping[str, float]) -> list[DrawnCurve]:
    """Smooth, then decimate; the same points serve every x axis, all of them being monotonic in the step."""
    width, along = smoothing_width(curves, smoothing), smoothing_axis(curves)
    budget = points_each(len(curves))
    return at_once(lambda index: drawn(curves[index], index, y, width, along, scales, budget), range(len(curves)))


def at_once(function: Callable[[int], Drawn], indices: Sequence[int]) -> list[Drawn]:
    """`function` of each, on all cores: NumPy lets go of the interpreter while it works on long columns."""
    if len(indices) < 2:
        return [function(index) for index in indices]
    with ThreadPoolExecutor(min(len(indices), available_cores()), "workbench-draw") as pool:
        return list(pool.map(function, indices))


def drawn(
    curve: CurveLike, index: int, y: str, width: float, along: str, scales: Mapping[str, float], budget: int
) -> DrawnCurve:
    """One curve of a figure, the `index`-th, smoothed over `width` of the column `along`."""
    raw = column(curve, y)
    position = column(curve, along)
    line = smoothed(position, raw, width) if len(position) == len(raw) else raw
    return DrawnCurve(
        name=curve.name,
        key=str(index),
        color=color_of(curve, index),
        dash=theme.series_dash(index),
        raw_index=decimated(raw, budget),
        line_index=decimated(line, budget if width <= 0 else max(budget // 2, 2 * CONTEXT_POINTS)),
        raw=raw,
        line=line,
        gaps=gap_starts(raw)[:100],
        x={axis: _scaled(_or_nan(curve, X_AXES[axis].column, len(raw)), scale) for axis, scale in scales.items()},
        step=_or_nan(curve, "step", len(raw)),
        tokens=_or_nan(curve, "tokens", len(raw)),
        marks=marks_of(curve, raw, line) if y == "loss" and len(raw) else (),
    )


def marks_of(curve: CurveLike, raw: Array, line: Array) -> tuple[Mark, ...]:
    """What was recorded of a run, at most `MAX_MARKS`, and the divergence that its loss shows."""
    recorded = tuple(getattr(curve, "marks", ()))
    every = -(-len(recorded) // MAX_MARKS) or 1
    marks = recorded[::-1][::every][::-1]
    turned = diverged_at(raw, line)
    if turned is None:
        return marks
    step = float(_or_nan(curve, "step", len(raw))[turned])
    return (*marks, Mark("divergence", step, f"diverges after step {step:,.0f}"))


def _scaled(values: Array, scale: float) -> Array:
    return values if scale == 1.0 else values / scale


def _or_nan(curve: CurveLike, name: str, length: int) -> Array:
    values = column(curve, name)
    return values if len(values) == length else np.full(length, np.nan)


def _largest(values: Array) -> float:
    """Of a column that rises with the step, so that its last value is enough where there is one."""
    if len(values) and np.isfinite(values[-1]):
        return float(values[-1])
    return float(np.nanmax(values, initial=0.0))


def axes_of(curves: Sequence[CurveLike]) -> dict[str, tuple[float, str]]:
    """The x axes that every curve with a point can be drawn over, each with its scale and title."""
    begun = [curve for curve in curves if len(column(curve, "step"))]
    axes = {}
    for name, axis in X_AXES.items():
        columns = [column(curve, axis.column) for curve in begun]
        if all(len(values) and (np.isfinite(values[-1]) or np.isfinite(values).any()) for values in columns):
            axes[name] = axis.unit(max(map(_largest, columns), default=0.0))
    return axes
