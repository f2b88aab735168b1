"""Preparation of curves for drawing: smoothed, fewer points that draw the same line, positions in each axis' unit."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from workbench.analysis.curve import (
    X_AXES,
    Array,
    Curve,
    Indices,
    Look,
    Mark,
    column,
    column_or_nan,
    evaluations_of,
    smoothed,
    smoothing_axis,
    smoothing_width,
)
from workbench.base.machine import available_cores
from workbench.figures import theme
from workbench.record.columns import COLUMNS
from workbench.record.history import final_loss, last_held_out
from workbench.runs.loss_basis import LossBasis

MAX_POINTS = 2000
"""Largest number of points of one trace: a browser redraws and a notebook stores so many without being noticed."""
POINT_BUDGET = 40_000
"""Number of points of all traces of one figure together."""
CONTEXT_POINTS = 200
"""Number of points of a zoomed trace outside the visible window, so that zooming out shows the whole line at once."""
MAX_GAPS = 100
"""Largest number of gaps of a curve that are kept and marked."""
Result = TypeVar("Result")
TRACE_ROLES = ("raw", "line", "nan", "evaluation", "mark", "end")
"""Traces of one curve from back to front: values, their average, starts of gaps, held-out losses, events, the last
value."""
MAX_MARKS = 100
"""Largest number of recorded events that are drawn on a curve."""
DIVERGENCE_POINTS = 20
"""Smallest number of values after its lowest from which a loss is called diverged."""
QUIET_SHARE = 0.55
"""Share of white in the colour of the runs beside the best of a folded group."""
MAX_DIFFERENCES = 50_000
"""Number of neighbouring pairs, spread evenly over a long column, from which its noise is estimated."""


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


@dataclass(frozen=True)
class PreparedCurve:
    """One run prepared for drawing: whole columns, and the indices of the points that are shown."""

    name: str
    key: str
    """Number that tells runs of equal names apart."""
    look: Look
    """The way in which it is drawn."""
    raw_index: Indices
    line_index: Indices
    raw: Array
    line: Array
    """Smoothed values."""
    gaps: Indices
    """Indices at which gaps begin."""
    x: Mapping[str, Array]
    """Positions by axis name, each in the unit that the figure shows."""
    step: Array
    tokens: Array
    marks: tuple[Mark, ...]
    evaluations: Mapping[str, Array] = field(default_factory=dict)
    """Positions of the held-out losses by axis name, and the losses as `eval_loss`; empty if there are none."""
    ends_held_out: bool = False
    """True if the number at its end is the last held-out loss."""
    is_loss: bool = False
    """True if it is the training loss."""
    basis: LossBasis | None = None
    """The facts on which its losses depend; None for other columns, and if they are unknown."""
    seeds: tuple[PreparedCurve, ...] = field(default=(), repr=False)
    """The runs that it is the mean of; empty for a run, and for a mean that has none yet."""
    low: Array | None = None
    high: Array | None = None
    """Lowest and highest smoothed value of those runs; None for a run."""

    @property
    def is_mean(self) -> bool:
        """True for the mean of the seeds of a setting."""
        return self.low is not None

    @property
    def is_drawn(self) -> bool:
        """False for a run whose loss the mean of its setting stands for."""
        return self.is_mean or not (self.is_loss and self.look.averaged)

    @property
    def is_quiet(self) -> bool:
        """True if it is thin and pale: a run of a folded group beside the best, or beside the mean of the best."""
        beside_mean = self.is_loss and self.look.setting is not None and not self.is_mean
        return self.look.folded and (beside_mean or not self.look.best)

    @property
    def has_band(self) -> bool:
        """True for a mean in a band from its lowest to its highest run: the best has one, as many would hide all."""
        return bool(self.seeds) and not self.is_quiet

    @property
    def entry(self) -> str:
        """The words in the legend; empty for no entry."""
        return entry_of(self) if self.is_drawn else ""

    @property
    def color(self) -> str:
        """The colour, which is that of its group if it is folded, and pale where it is quiet."""
        color = theme.series_color(self.look.index)
        return theme.pale(color, QUIET_SHARE) if self.is_quiet else color

    @property
    def dash(self) -> str:
        """The line style; a folded group has solid lines."""
        return "solid" if self.look.folded else theme.series_dash(self.look.index)

    def positions(self, axis: str, role: str) -> Array:
        """Return the x values that the trace of this role (one of `TRACE_ROLES`) shows on an axis."""
        if role == "raw" and self.is_mean:  # there and back along the edges of the band
            x = self.x[axis] if self.has_band else np.empty(0)
            return np.concatenate([x, x[::-1]])
        if role == "evaluation":
            return self.evaluations.get(axis, np.empty(0))
        if role == "end" and self.ends_held_out:
            return self.evaluations[axis][-1:]
        return np.asarray(self.x[axis][self.points(role)])

    @property
    def hover(self) -> Array:
        """Columns raw value, step and tokens at `line_index`, for the hover text."""
        return np.column_stack([values[self.line_index] for values in (self.raw, self.step, self.tokens)])

    @cached_property
    def last(self) -> int | None:
        """Index of the last finite value; None without one."""
        finite = np.flatnonzero(np.isfinite(self.raw))
        return int(finite[-1]) if len(finite) else None

    @cached_property
    def end_value(self) -> float | None:
        """The number at its end: the last held-out loss if `ends_held_out`, else the smoothed last value.

        Of a training loss it is the number that tables show (`final_loss`), whatever the smoothing of the line.
        """
        if self.ends_held_out:
            return float(self.evaluations["eval_loss"][-1])
        if self.last is None:
            return None
        if self.seeds:
            ends = [seed.end_value for seed in self.seeds]
            return float(np.mean([end for end in ends if end is not None]))
        if not self.is_loss:
            return float(self.line[self.last])
        return final_loss(self.step[: self.last + 1], self.raw[: self.last + 1])

    @cached_property
    def mark_index(self) -> Indices:
        """Index of the last point at or before each mark's step."""
        steps = np.array([mark.step for mark in self.marks], dtype=np.float64)
        return np.clip(np.searchsorted(self.step, steps, side="right") - 1, 0, None).astype(np.int64)

    def points(self, role: str) -> Indices:
        """Return the indices of the points that the trace of this role (one of `TRACE_ROLES`) shows."""
        if role == "end":
            return np.array([] if self.last is None else [self.last], dtype=np.int64)
        if role == "mark":
            return self.mark_index
        return {"raw": self.raw_index, "line": self.line_index, "nan": self.gaps}[role]

    def focused(self, axis: str, window: tuple[float, float] | None, budget: int) -> PreparedCurve:
        """Return the same curve with its points chosen for the visible window of an axis; None is the whole axis."""
        if window is None:
            return self
        x, points = self.x[axis], max(budget // 2, 2 * CONTEXT_POINTS)
        return replace(
            self,
            raw_index=focused(x, self.raw, self.raw_index, window, budget),
            line_index=focused(x, self.line, self.line_index, window, points),
        )


def entry_of(curve: Curve | PreparedCurve) -> str:
    """Return the words of a curve in the legend; empty for no entry."""
    return curve.name if curve.look is None or curve.look.entry is None else curve.look.entry


def with_means(runs: Sequence[PreparedCurve], before: Sequence[PreparedCurve] = ()) -> list[PreparedCurve]:
    """Return runs and, behind them, the mean loss of each setting that is repeated with other seeds, at shown points.

    It goes as far as the shortest of the runs that are averaged. A curve of `before` whose runs are the same is kept.
    """
    settings: dict[tuple[int, str], list[PreparedCurve]] = {}
    for run in runs:
        if run.look.setting is not None:
            settings.setdefault((run.look.index, run.look.setting), []).append(run)
    means = []
    for at, ((_, setting), members) in enumerate(settings.items(), len(runs)):
        seeds, old = [run for run in members if run.look.averaged], before[at] if before else None
        same = old is not None and len(old.seeds) == len(seeds) and all(map(operator.is_, old.seeds, seeds))
        means.append(old if old is not None and same else _mean(seeds, members[0], setting, str(at)))
    return [*runs, *means]


def _mean(seeds: Sequence[PreparedCurve], first: PreparedCurve, setting: str, key: str) -> PreparedCurve:
    """Return the mean of runs of one setting; of none an empty curve in the colours of the `first` of the setting."""
    look, none = replace(first.look, entry=""), np.empty(0)
    shown: dict[str, Any] = {"key": key, "marks": (), "gaps": np.empty(0, np.int64)}
    if not seeds:
        at = np.empty(0, np.int64)
        x: dict[str, Array] = dict.fromkeys(first.x, none)
        columns: dict[str, Any] = dict.fromkeys(("raw", "line", "step", "tokens", "low", "high"), none)
        return replace(
            first,
            **shown,
            **columns,
            name=setting,
            look=look,
            raw_index=at,
            line_index=at,
            x=x,
            evaluations={},
            ends_held_out=False,
        )
    first, look = seeds[0], next((seed.look for seed in seeds if seed.look.entry), look)
    begin, end = max(float(seed.step[0]) for seed in seeds), min(float(seed.step[-1]) for seed in seeds)
    step = first.step[first.line_index]
    step = step[(step >= begin) & (step <= end)]

    def each(columns: Sequence[Array]) -> Array:
        return np.array([np.interp(step, seed.step, values) for seed, values in zip(seeds, columns, strict=True)])

    lines, raw = each([seed.line for seed in seeds]), each([seed.raw for seed in seeds]).mean(axis=0)
    if (lowest := diverged_at(raw, lines.mean(axis=0))) is not None:
        shown["marks"] = (divergence(float(step[lowest])),)
    evaluated = [seed.evaluations for seed in seeds if seed.evaluations]
    common = min((len(each["eval_loss"]) for each in evaluated), default=0) if len(evaluated) == len(seeds) else 0
    names = first.evaluations if common else ()
    return replace(
        first,
        **shown,
        name=f"{setting}, mean of {len(seeds)} seeds",
        look=look,
        seeds=tuple(seeds),
        raw=raw,
        line=lines.mean(axis=0),
        low=lines.min(axis=0),
        high=lines.max(axis=0),
        raw_index=np.arange(len(step)),
        line_index=np.arange(len(step)),
        x={axis: each([seed.x[axis] for seed in seeds]).mean(axis=0) for axis in first.x},
        step=step,
        tokens=each([seed.tokens for seed in seeds]).mean(axis=0),
        evaluations={name: np.mean([each[name][:common] for each in evaluated], axis=0) for name in names},
        ends_held_out=all(seed.ends_held_out for seed in seeds),
        basis=None,
    )


@dataclass(frozen=True)
class Preparation:
    """The choices that all curves of a figure share."""

    width: float
    """Smoothing width in units of the column `along`."""
    along: str
    scales: Mapping[str, float]
    """Scale of each axis that the figure can show."""
    max_points: int
    """Largest number of points of a trace."""
    held_out: bool
    """True if every run has a held-out loss after a step, so that runs are compared by it."""

    @classmethod
    def of(
        cls, curves: Sequence[Curve], smoothing: float, scales: Mapping[str, float], max_points: int | None = None
    ) -> Preparation:
        """Return the choices for these curves; by default they share the figure's budget of points."""
        points = points_per_trace(len(curves)) if max_points is None else max_points
        held_out = bool(curves) and all(last_held_out(curve.evaluations) is not None for curve in curves)
        return cls(smoothing_width(curves, smoothing), smoothing_axis(curves), scales, points, held_out)

    def prepare(self, curve: Curve, index: int, y: str) -> PreparedCurve:
        """Return column `y` of the figure's `index`-th curve, ready to draw.

        Smoothing comes before decimation. The same points serve every x axis, since all of them rise with the step.
        """
        raw, [line], look = column(curve, y), self.lines([curve], y), curve.look or Look(index)
        is_loss, evaluations = y == "loss", dict[str, Array]()
        marks: tuple[Mark, ...] = ()
        if is_loss and len(raw):  # at most `MAX_MARKS` events of the run, and the divergence of its loss
            every = -(-len(curve.marks) // MAX_MARKS) or 1
            marks = curve.marks[::-1][::every][::-1]
            if look.folded and (look.setting is not None or not look.best):
                marks = ()  # of the runs beside the best, those of their divergence alone
            if (lowest := diverged_at(raw, line)) is not None:
                step = float(column_or_nan(curve, "step", len(raw))[lowest])
                marks = (*marks, divergence(step))
        if is_loss and (held_out := evaluations_of(curve)) is not None:
            losses = column(held_out, "eval_loss")
            evaluations = {
                axis: column_or_nan(held_out, X_AXES[axis].column, len(losses)) / scale
                for axis, scale in self.scales.items()
            }
            evaluations = {"eval_loss": losses, **evaluations}
        line_points = self.max_points if self.width <= 0 else max(self.max_points // 2, 2 * CONTEXT_POINTS)
        return PreparedCurve(
            name=curve.name,
            key=str(index),
            raw_index=decimated(raw, self.max_points),
            line_index=decimated(line, line_points),
            raw=raw,
            line=line,
            gaps=gap_starts(raw)[:MAX_GAPS],
            x={
                axis: values if scale == 1 else values / scale
                for axis, scale in self.scales.items()
                for values in [column_or_nan(curve, X_AXES[axis].column, len(raw))]
            },
            step=column_or_nan(curve, "step", len(raw)),
            tokens=column_or_nan(curve, "tokens", len(raw)),
            marks=marks,
            evaluations=evaluations,
            ends_held_out=self.held_out and is_loss,
            is_loss=is_loss,
            basis=curve.basis if y in ("loss", "eval_loss", "perplexity") else None,
            look=look,
        )

    def lines(self, curves: Sequence[Curve], y: str) -> list[Array]:
        """Return the smoothed column `y` of every curve; one that has no noise as it is."""
        if y in COLUMNS and COLUMNS[y].is_exact:
            return [column(curve, y) for curve in curves]
        pairs = [(column(curve, self.along), column(curve, y)) for curve in curves]
        return [smoothed(x, raw, self.width) if len(x) == len(raw) else raw for x, raw in pairs]

    def prepare_all(self, curves: Sequence[Curve], y: str) -> list[PreparedCurve]:
        """Return column `y` of every curve, ready to draw."""
        return map_in_threads(lambda index: self.prepare(curves[index], index, y), range(len(curves)))


def map_in_threads(function: Callable[[int], Result], indices: Sequence[int]) -> list[Result]:
    """Return `function` of each index, computed on all cores: NumPy releases the interpreter for long columns."""
    if len(indices) < 2:
        return [function(index) for index in indices]
    with ThreadPoolExecutor(min(len(indices), available_cores()), "workbench-draw") as pool:
        return list(pool.map(function, indices))


def divergence(step: float) -> Mark:
    """Return the mark of the step after which a loss diverges."""
    return Mark("divergence", step, f"diverges after step {step:,.0f}")


def diverged_at(raw: Array, line: Array) -> int | None:
    """Return the index of a loss' lowest smoothed value if the loss has since left it for good, else None.

    A loss has left its lowest value for good if the later half of the values after it (at least 20 values and 2 % of
    all) stays above it by a quarter of the loss' whole fall and by six times its noise. The noise is 1.4826 times the
    median absolute difference of neighbouring values over the square root of two (after Rousseeuw and Croux 1993); a
    trend does not enlarge it.
    """
    known = np.isfinite(line) & np.isfinite(raw)
    places = None if known.all() else np.flatnonzero(known)
    values = line if places is None else line[places]
    raw = raw if places is None else raw[places]
    if len(values) < 2 * DIVERGENCE_POINTS:
        return None
    lowest = int(np.argmin(values))
    after = values[lowest:]
    if len(after) < max(DIVERGENCE_POINTS, 0.02 * len(values)):
        return None
    first = np.arange(0, len(raw) - 1, max(1, len(raw) // MAX_DIFFERENCES))
    noise = 1.4826 * float(np.median(np.abs(raw[first + 1] - raw[first]))) / math.sqrt(2)
    fallen = float(values[: lowest + 1].max() - values[lowest])
    risen = float(after[len(after) // 2 :].min() - values[lowest])
    return int(lowest if places is None else places[lowest]) if risen > max(0.25 * fallen, 6.0 * noise, 1e-9) else None
