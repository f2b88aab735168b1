"""Contrast of configurations that were trained with several seeds: is the difference larger than the seeds' own?

The interval of a difference is that of Welch's t: the difference of the mean losses, plus or minus the quantile of
Student's t times sqrt(s1²/n1 + s2²/n2), where s is the standard deviation over n seeds (Welch 1947, Biometrika 34, 28).
The degrees of freedom are those of Satterthwaite (1946, Biometrics Bulletin 2, 110), which let the two spreads differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.analysis.axes import X_AXES
from workbench.analysis.comparison import CONFIDENCE
from workbench.analysis.contrast import setting_differences
from workbench.analysis.curve import Array, CurveLike, column, evaluations_of, finite_points
from workbench.analysis.smoothing import SMOOTHING, smoothed
from workbench.errors import UnknownParameter
from workbench.sparsity import from_json
from workbench.tables import html_table

AXES = ("tokens", "flops", "gpu_hours")
"""Axes at whose equal values configurations are compared."""
Points = tuple[Array, Array]
"""Positions and losses of one run."""
ANGLES = 20_001
"""Points of the integral of Student's t; its quantiles are then right to five digits."""


@dataclass(frozen=True)
class SeedDifference:
    """Mean loss of one configuration minus that of another where all of their runs have spent the same."""

    names: tuple[str, str]
    axis: str
    at: float
    """Position in the unit of the recorded column: tokens, FLOPs or GPU-hours."""
    means: tuple[float, float]
    seeds: tuple[int, int]
    """Number of runs of each configuration."""
    value: float
    low: float
    high: float

    @property
    def distinguishable(self) -> bool:
        """True if the interval does not contain zero."""
        return not self.low <= 0 <= self.high

    def describe(self) -> str:
        """Return the difference in words."""
        axis, (first, second) = X_AXES[self.axis], self.names
        interval = f"{self.value:+.3g}, {CONFIDENCE:.0%} interval {self.low:+.3g} to {self.high:+.3g}"
        better, other = self.names if self.value < 0 else (second, first)
        told = (
            f"{better} is lower than {other}"
            if self.distinguishable
            else f"{first} and {second} are not distinguishable"
        )
        seeds = f"{self.seeds[0]} and {self.seeds[1]} seeds"
        return f"at equal {axis.label} ({axis.describe(self.at)}): {told} ({interval}, {seeds})"


@dataclass(frozen=True)
class SeedContrast:
    """Contrast of configurations with several seeds; a notebook shows it as a figure and a table."""

    loss: str
    """`Held-out loss` or `Training loss`."""
    differences: tuple[SeedDifference, ...]
    """Difference of each other configuration to the first, at equal tokens, FLOPs and GPU-hours."""

    def __repr__(self) -> str:
        return "\n".join([f"{self.loss}, Welch's t over the seeds:", *(item.describe() for item in self.differences)])

    def to_html(self) -> str:
        """Return the differences as an HTML table, every name escaped."""
        head = ("configuration", "compared with", "at equal", "", "losses", "difference")
        rows = []
        for item in self.differences:
            axis = X_AXES[item.axis]
            verdict = ("lower" if item.value < 0 else "higher") if item.distinguishable else "not distinguishable"
            losses = " and ".join(f"{mean:.4g} (n={n})" for mean, n in zip(item.means, item.seeds, strict=True))
            interval = f"{item.low:+.3g} to {item.high:+.3g}"
            at = (axis.label, axis.describe(item.at))
            rows.append((*item.names, *at, losses, f"{item.value:+.3g}", interval, verdict))
        return html_table((*head, f"{CONFIDENCE:.0%} interval", "verdict"), rows)


def seed_groups(described: Sequence[Mapping[str, object]]) -> list[list[int]]:
    """Return the positions of runs that differ in their seed alone, a list for each configuration, in order.

    `described` holds nested JSON for every run: its experiment and its plan.
    """
    groups: list[list[int]] = []
    for at, own in enumerate(described):
        for group in groups:
            differing = {name for name, _ in setting_differences([described[group[0]], own])}
            if differing == {"experiment.seed"}:
                group.append(at)
                break
        else:
            groups.append([at])
    return groups


def group_names(described: Sequence[Mapping[str, object]]) -> list[str]:
    """Return a name for each configuration from the fields of the experiment that differ between them."""
    labelled = [{"experiment": _with_label(facts.get("experiment"))} for facts in described]
    rows = list(setting_differences(labelled))
    numbers = ("configuration", tuple(str(at + 1) for at in range(len(described))))
    rows = [row for row in rows if row[0] != "experiment.seed"] or [numbers]
    parts = [[f"{name.rpartition('.')[2]} {values[at]}" for name, values in rows] for at in range(len(described))]
    return [", ".join(words) for words in parts]


def _with_label(experiment: Any) -> dict[str, Any]:
    """Return the description of an experiment with a label in place of the fields of its sparsity."""
    fields = dict(experiment or {})
    if "sparsity" in fields:
        fields["sparsity"] = from_json(fields["sparsity"]).label if fields["sparsity"] else "dense"
    return fields


def contrast_seeds(groups: Mapping[str, Sequence[CurveLike]], smoothing: float = SMOOTHING) -> SeedContrast:
    """Compare each configuration with the first at equal cost; each has at least two runs, which differ in their seed.

    The held-out losses are compared if every run has two of them, else the smoothed training losses. Raises
    `UnknownParameter` if the runs of two configurations share no stretch of any axis.
    """
    held_out = {name: [evaluations_of(curve) for curve in curves] for name, curves in groups.items()}
    known = {name: [curve for curve in curves if curve is not None] for name, curves in held_out.items()}
    evaluated = all(
        len(known[name]) == len(curves) and all(len(column(curve, "step")) > 1 for curve in known[name])
        for name, curves in groups.items()
    )
    compared = known if evaluated else groups
    loss, (first, *others) = "eval_loss" if evaluated else "loss", compared
    differences = []
    for axis in AXES:
        for other in others:
            points = [
                [finite_points(column(curve, X_AXES[axis].column), column(curve, loss)) for curve in compared[name]]
                for name in (other, first)
            ]
            difference = _difference((other, first), axis, points, 0.0 if evaluated else smoothing)
            differences += [] if difference is None else [difference]
    if not differences:
        raise UnknownParameter("The runs share no stretch of tokens, FLOPs or GPU-hours. Train them further.")
    return SeedContrast("Held-out loss" if evaluated else "Training loss", tuple(differences))


def _difference(
    names: tuple[str, str], axis: str, points: Sequence[Sequence[Points]], smoothing: float
) -> SeedDifference | None:
    """Return the difference of two configurations over an axis; None if their runs share no stretch of it."""
    runs = [run for group in points for run in group]
    if not all(len(x) for x, _ in runs):
        return None
    begin, at = max(float(x[0]) for x, _ in runs), min(float(x[-1]) for x, _ in runs)
    if begin > at or at <= 0:
        return None
    first, second = ([_loss_at(x, loss, at, smoothing * at) for x, loss in group] for group in points)
    value, low, high = welch_interval(first, second)
    means = float(np.mean(first)), float(np.mean(second))
    return SeedDifference(names, axis, at, means, (len(first), len(second)), value, low, high)


def _loss_at(x: Array, loss: Array, at: float, width: float) -> float:
    """Return the loss at a position: smoothed over what lies before it, or between its neighbours without a width."""
    if width > 0:
        before = x <= at
        return float(smoothed(x[before], loss[before], width)[-1])
    return float(np.interp(at, x, loss))


def welch_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Return the difference of the means of two samples, and the ends of its interval by Welch's t."""
    parts = [np.var(sample, ddof=1) / len(sample) for sample in (first, second)]
    value, variance = float(np.mean(first) - np.mean(second)), float(sum(parts))
    if variance == 0:
        return value, value, value
    spread = sum(part**2 / (len(sample) - 1) for part, sample in zip(parts, (first, second), strict=True))
    half = student_quantile(variance**2 / float(spread)) * math.sqrt(variance)
    return value, value - half, value + half


def student_quantile(freedom: float) -> float:
    """Return the t that holds `CONFIDENCE` of Student's distribution between -t and t.

    With t = sqrt(freedom) tan(angle) the density becomes cos(angle)^(freedom - 1), which is integrated.
    """
    angle = np.linspace(0, np.pi / 2, ANGLES)
    density = np.cos(angle) ** (freedom - 1)
    share = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(math.sqrt(freedom) * np.tan(np.interp(CONFIDENCE, share / share[-1], angle)))
