"""Numbers behind a comparison of curves: who is lower at equal tokens, FLOPs, GPU-hours; where two curves cross.

How sure each number is comes from a moving-block bootstrap (Künsch 1989, Ann. Statist. 17, 1217): each run's
residuals around its smoothed curve are drawn anew in blocks, added to the curve and smoothed again, `RESAMPLES`
times. Blocks of n^(1/3) neighbouring values (the rate of Hall, Horowitz and Jing 1995, Biometrika 82, 561) keep what
neighbours share. It says how far the noise of batches may have moved a curve of *this* run; another seed is another
run, and only several of them tell how much it matters.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import UnknownParameter, suggestion
from workbench.figures._series import SMOOTHING, X_AXES, Array, Curve, CurveLike, axes_of, column, smoothed
from workbench.units import count, duration

if TYPE_CHECKING:
    import plotly.graph_objects as go

RESAMPLES = 400
POINTS = 2000
"""A longer run is averaged into so many bins first."""
GRID = 300
SURE = 0.9
"""Share of an interval; of resamples that must agree before a run is called lower."""
EQUAL = ("tokens", "flops", "gpu_hours", "time")


@dataclass(frozen=True)
class Interval:
    """A number with the interval that holds `SURE` of its resamples."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True)
class Difference:
    """Smoothed loss of one run minus another's over a shared x axis, where both have been."""

    names: tuple[str, str]
    axis: str
    x: Array
    """In tokens, FLOPs, seconds, … as recorded."""
    value: Array
    low: Array
    high: Array
    crossover: Interval | None
    """Where the difference last changes its sign, in the units of `x`; None where it does not."""
    crossing_share: float
    """Of the resamples: how many have such a point."""

    def __repr__(self) -> str:
        first, second = self.names
        return f"Difference({first} − {second} over {self.axis}: {self.describe()})"

    def describe(self) -> str:
        """`"lower at the end by 0.26 (0.25 to 0.27); they cross at 1.36 M tokens (1.30 M to 1.41 M)"`, in words."""
        last = Interval(float(self.value[-1]), float(self.low[-1]), float(self.high[-1]))
        if last.low <= 0 <= last.high:
            ending = f"{self.names[0]} and {self.names[1]} cannot be told apart at the end ({_signed(last)})"
        else:
            better, other = self.names if last.value < 0 else self.names[::-1]
            low, high = sorted((abs(last.low), abs(last.high)))
            ending = f"{better} ends lower than {other} by {abs(last.value):.3g} ({low:.3g} to {high:.3g})"
        return f"{ending}; {self._crossing()}"

    def _crossing(self) -> str:
        if self.crossover is None:
            return "the curves do not cross"
        at = self.crossover
        sure = "" if self.crossing_share >= SURE else f", in {self.crossing_share:.0%} of the resamples only"
        span = f"{written(self.axis, at.low)} to {written(self.axis, at.high)}"
        return f"the curves last cross at {written(self.axis, at.value)} ({span}{sure})"


@dataclass(frozen=True)
class Standing:
    """Smoothed losses of several runs where each has spent the same: the most that all of them have."""

    axis: str
    at: float
    losses: Mapping[str, Interval]
    best: str
    share: float
    """Of the resamples in which `best` is lowest."""

    @property
    def sure(self) -> bool:
        return self.share >= SURE

    def __str__(self) -> str:
        order = sorted(self.losses, key=lambda name: self.losses[name].value)
        values = ", ".join(f"{name} {self.losses[name].value:.4g}" for name in order)
        verdict = f"{self.best} is lower" if self.sure else "too close to call"
        return f"at equal {X_AXES[self.axis].label} ({written(self.axis, self.at)}): {verdict} ({values})"


def difference(
    first: CurveLike, second: CurveLike, x: str = "tokens", smoothing: float = SMOOTHING, seed: int = 0
) -> Difference:
    """`first` minus `second`, with a 90 % band and the crossover; the same seed gives the same band.

    Raises `UnknownParameter` for an axis that a run did not record, or on which they share no stretch.
    """
    grid = shared_grid([first, second], x)
    width = smoothing * float(grid[-1])
    line_a, drawn_a = _resampled(first, x, grid, width, seed)
    line_b, drawn_b = _resampled(second, x, grid, width, seed + 1)
    resampled = drawn_a - drawn_b
    margin = 100 * (1 - SURE) / 2
    low, high = np.percentile(resampled, [margin, 100 - margin], axis=0)
    value = line_a - line_b
    crossing = _last_crossing(grid, value)
    crossings = np.array([_last_crossing(grid, row) for row in resampled])
    known = crossings[np.isfinite(crossings)]
    found = None
    if np.isfinite(crossing) and len(known):
        found = Interval(crossing, *(float(edge) for edge in np.percentile(known, [margin, 100 - margin])))
    return Difference((first.name, second.name), x, grid, value, low, high, found, len(known) / RESAMPLES)


def standings(
    curves: Sequence[CurveLike], axes: Sequence[str] = EQUAL, smoothing: float = SMOOTHING, seed: int = 0
) -> tuple[Standing, ...]:
    """Who is lowest at equal tokens, FLOPs, GPU-hours and time: over those that every run was on at some time."""
    curves, known = told_apart(curves), axes_of(curves)
    return tuple(_standing(curves, axis, smoothing, seed) for axis in axes if axis in known and _meet(curves, axis))


def _meet(curves: Sequence[CurveLike], axis: str) -> bool:
    """Whether all curves share a stretch: one step of a slow run may cost more than another run as a whole."""
    try:
        shared_grid(curves, axis)
    except UnknownParameter:
        return False
    return True


def _standing(curves: Sequence[CurveLike], axis: str, smoothing: float, seed: int) -> Standing:
    grid = shared_grid(curves, axis)
    width = smoothing * float(grid[-1])
    ends = [_resampled(curve, axis, grid, width, seed + index) for index, curve in enumerate(curves)]
    values = np.array([line[-1] for line, _ in ends])
    resampled = np.array([drawn[:, -1] for _, drawn in ends])
    margin = 100 * (1 - SURE) / 2
    low, high = np.percentile(resampled, [margin, 100 - margin], axis=1)
    best = int(np.argmin(values))
    share = float(np.mean(np.argmin(resampled, axis=0) == best))
    losses = {
        curve.name: Interval(float(value), float(below), float(above))
        for curve, value, below, above in zip(curves, values, low, high, strict=True)
    }
    return Standing(axis, float(grid[-1]), losses, curves[best].name, share)


def told_apart(curves: Sequence[CurveLike]) -> Sequence[CurveLike]:
    """The curves by names of their own: of runs that are called alike (in two folders), the later ones numbered."""
    names = [curve.name for curve in curves]
    if len(set(names)) == len(names):
        return curves
    numbers = [names[: index + 1].count(name) for index, name in enumerate(names)]
    return [
        Curve(name if number == 1 else f"{name} ({number})", curve.columns)
        for name, number, curve in zip(names, numbers, curves, strict=True)
    ]


def shared_grid(curves: Sequence[CurveLike], axis: str) -> Array:
    """`GRID` points over the stretch of an axis that every curve has been on, in recorded units."""
    if axis not in X_AXES:
        raise UnknownParameter(f"x={axis!r} is not an axis. {suggestion(axis, X_AXES)}", parameter="x", value=axis)
    spans = []
    for curve in curves:
        x, _ = _pairs(curve, axis)
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
            f"The runs share no stretch of x={axis!r}: one ends before another begins.", parameter="x", value=axis
        )
    return np.linspace(low, high, GRID)


def _pairs(curve: CurveLike, axis: str) -> tuple[Array, Array]:
    """Finite (x, loss), at most `POINTS` of them, each the mean of its bin."""
    x, y = column(curve, X_AXES[axis].column), column(curve, "loss")
    if len(x) != len(y):
        return np.empty(0), np.empty(0)
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= POINTS:
        return x, y
    starts = np.linspace(0, len(x), POINTS, endpoint=False).astype(np.int64)
    sizes = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x, starts) / sizes, np.add.reduceat(y, starts) / sizes


def _resampled(curve: CurveLike, axis: str, grid: Array, width: float, seed: int) -> tuple[Array, Array]:
    """The smoothed loss on the grid, and the same of every resample, one a row."""
    x, y = _pairs(curve, axis)
    line = smoothed(x, y, width)
    residual = y - line
    drawn = np.empty((RESAMPLES, len(grid)))
    for row, noise in enumerate(_blocks(residual - residual.mean(), np.random.default_rng(seed))):
        drawn[row] = np.interp(grid, x, smoothed(x, line + noise, width))
    # Smoothing a smoothed line moves it: the band is set around the line itself.
    shift = np.interp(grid, x, line) - np.interp(grid, x, smoothed(x, line, width))
    return np.interp(grid, x, line), drawn + shift


def _blocks(residual: Array, random: np.random.Generator) -> NDArray[np.float64]:
    """`RESAMPLES` rows of residuals, drawn in blocks of neighbours."""
    size = len(residual)
    length = max(1, min(size, round(size ** (1 / 3))))
    blocks = -(-size // length)
    starts = random.integers(0, size - length + 1, (RESAMPLES, blocks))
    index = (starts[:, :, None] + np.arange(length)).reshape(RESAMPLES, -1)[:, :size]
    return np.asarray(residual[index])


def _last_crossing(x: Array, value: Array) -> float:
    """Where the value last passes through zero, by linear interpolation; NaN where it never does."""
    changes = np.flatnonzero(np.sign(value[1:]) * np.sign(value[:-1]) < 0)
    if not len(changes):
        return float("nan")
    at = changes[-1]
    share = value[at] / (value[at] - value[at + 1])
    return float(x[at] + share * (x[at + 1] - x[at]))


def written(axis: str, value: float) -> str:
    """An amount of an x axis for people: `"30.1 M tokens"`, `"12 min 04 s"`, `"1.2 GPU-hours"`."""
    if axis == "time":
        return duration(value)
    if axis == "gpu_hours":
        return f"{value:.3g} GPU-hours" if value >= 0.1 else f"{60 * value:.3g} GPU-minutes"
    if axis == "flops":
        return f"{value:.3g} FLOPs"
    return f"{count(value)} {X_AXES[axis].label}{'s' if axis == 'step' else ''}"


def _signed(interval: Interval) -> str:
    return f"{interval.value:+.3g}, {interval.low:+.3g} to {interval.high:+.3g}"


@dataclass(frozen=True)
class Contrast:
    """How runs stand to each other, and what differs between them; shows itself as tables."""

    names: tuple[str, ...]
    standings: tuple[Standing, ...]
    differences: tuple[Difference, ...]
    """Of each other run to the first."""
    settings: tuple[tuple[str, tuple[str, ...]], ...]
    """What differs: (dotted name, one value a run) of experiments, plans and environments."""

    def __repr__(self) -> str:
        lines = [str(standing) for standing in self.standings]
        lines += [item.describe() for item in self.differences]
        lines += [f"{name}: {' | '.join(values)}" for name, values in self.settings]
        return "\n".join(lines)

    def figure(self) -> go.Figure:
        """The differences, drawn."""
        from workbench.figures._difference import differences

        return differences(self.differences)

    def _ipython_display_(self) -> None:
        from IPython.display import HTML, display

        if self.differences:
            display(self.figure())
        display(HTML(self.to_html()))

    def to_html(self) -> str:
        """Standings and settings as tables, every name escaped."""
        return self._standings_html() + self._settings_html()

    def _standings_html(self) -> str:
        head = _row(("at equal", "", *self.names, "lowest"), "th")
        rows = ""
        for item in self.standings:
            verdict = item.best if item.sure else f"too close to call ({item.best} in {item.share:.0%})"
            losses = (f"{item.losses[name].value:.4g} ± {_half(item.losses[name]):.2g}" for name in self.names)
            rows += _row((X_AXES[item.axis].label, written(item.axis, item.at), *losses, verdict), "td")
        return f"<table>{head}{rows}</table>"

    def _settings_html(self) -> str:
        if not self.settings:
            return "<p>Their experiments, plans and environments agree.</p>"
        rows = "".join(_row((name, *values), "td") for name, values in self.settings)
        return f"<table>{_row(('what differs', *self.names), 'th')}{rows}</table>"


def _half(interval: Interval) -> float:
    return (interval.high - interval.low) / 2


def _row(cells: Sequence[str], tag: str) -> str:
    style = "text-align:left;vertical-align:top;padding:2px 10px"
    return f"<tr>{''.join(f'<{tag} style={style!r}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def contrast(
    curves: Sequence[CurveLike],
    described: Sequence[Mapping[str, Any]] = (),
    x: str = "tokens",
    smoothing: float = SMOOTHING,
) -> Contrast:
    """Standings at equal cost, each run's difference to the first over `x`, and what differs in `described`.

    `described` holds, for every run, nested JSON of what it was: experiment, plan, environment.
    """
    curves = told_apart(curves)
    first, *others = curves
    return Contrast(
        tuple(curve.name for curve in curves),
        standings(curves, smoothing=smoothing),
        tuple(difference(other, first, x, smoothing) for other in others),
        setting_differences(described),
    )


IGNORED = (
    *("candidates", "prediction", "stages", "block_names", "signature", "flops_per_step"),
    *("time", "started", "command", "directory", "executable", "name", "run"),
)
"""Not a setting: what a search weighed and predicted, what follows from the model, when and where a run was started."""


def setting_differences(described: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Every leaf that is not the same in all of several nested descriptions, by its dotted name."""
    flat = [_flattened(item) for item in described]
    names = dict.fromkeys(name for item in flat for name in item)
    rows = []
    for name in names:
        values = tuple(_written_value(item.get(name)) for item in flat)
        if len(set(values)) > 1:
            rows.append((name, values))
    return tuple(rows)


def _flattened(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in value.items():
        if key in IGNORED:
            continue
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            found |= _flattened(item, f"{name}.")
        else:
            found[name] = item
    return found


def _written_value(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 4:
        return f"{len(value)} items"
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
