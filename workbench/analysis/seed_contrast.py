"""`wb.contrast`: of each run with the first, or of configurations over their seeds.

Of configurations the question is whether their difference is larger than the seeds' own.

What is compared is the loss, of which the lower is better, or a metric of the held-out samples, such as an accuracy.

The interval of a difference of means is Student's, with the scatter between seeds pooled over the two configurations
and, with fewer degrees of freedom, over the others (`workbench.analysis.curve`). Runs of equal seeds are paired
where enough degrees of freedom are left. Of more than two configurations the intervals of all pairs hold together, so
that one may be called the best because it ended lowest.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.analysis.contrast import (
    Contrast,
    compared_curves,
    contrast_curves,
    described_settings,
    end_of,
    is_known_at,
    loss_name,
    points_of,
    points_until,
    setting_differences,
    with_margin,
)
from workbench.analysis.curve import (
    CONFIDENCE,
    COST_AXES,
    SMOOTHING,
    X_AXES,
    Array,
    Curve,
    Scatter,
    column,
    combined,
    curves_of,
    evaluations_of,
    finite_points,
    is_held_out,
    metrics_of,
    paired_scatter,
    scatter_of,
    usual_scatter,
    why_curves_do_not_compare,
)
from workbench.base.arguments import checked_arguments
from workbench.base.display import Table
from workbench.base.errors import InvalidArgument, InvalidExperiment, UnknownParameter
from workbench.base.units import count
from workbench.experiment import values_by_name
from workbench.record.rundir import read_json
from workbench.runs.registry import Runs, load_runs
from workbench.runs.run import Run
from workbench.sparsity import from_json
from workbench.sweeps.sweep import Sweep

Points = tuple[Array, Array]
"""Positions and losses of one run."""


@dataclass(frozen=True)
class SeedDifference:
    """Mean of one configuration minus that of another where all of their runs have spent the same."""

    names: tuple[str, str]
    axis: str
    at: float
    """Position in the unit of the recorded column: tokens, FLOPs or device-hours."""
    means: tuple[float, float]
    seeds: tuple[int, int]
    """Number of runs of each configuration."""
    scatter: Scatter | None
    """Scatter of the ends of such runs between seeds; None if all seeds of each configuration ended alike."""
    metric: str | None = None
    """Name of the metric that is compared; None for a loss."""
    compared: int = 2
    """Number of configurations that are compared; the intervals of all of their differences hold together."""

    @property
    def value(self) -> float:
        """The difference of the means."""
        return self.means[0] - self.means[1]

    @property
    def margin(self) -> float:
        """Half of the interval's width; infinite without a scatter."""
        return self.scatter.half_width(*self.seeds, of=self.compared) if self.scatter else float("inf")

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.value - self.margin

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.value + self.margin

    @property
    def distinguishable(self) -> bool:
        """True if the interval does not contain zero."""
        return abs(self.value) > self.margin

    @property
    def told(self) -> str:
        """The words that say which of the two is lower, of a metric which is higher, or that this cannot be told."""
        first, second = self.names
        below, above = self.names if self.value < 0 else (second, first)
        if self.distinguishable:
            return f"{below} is lower than {above}" if self.metric is None else f"{above} is higher than {below}"
        if self.scatter:
            return f"{first} and {second} are too close to call"
        return f"the seeds of {first} and of {second} ended alike: cannot tell how far another seed would move them"

    def describe(self) -> str:
        """Return the difference in words."""
        axis, seeds = X_AXES[self.axis], f"{self.seeds[0]} and {self.seeds[1]} seeds"
        known = [interval_in_words(self.compared), seeds, self.scatter.describe()] if self.scatter else [seeds]
        difference = ", ".join([with_margin(self.value, self.margin, "+"), *known])
        return f"at equal {axis.label} ({axis.describe(self.at)}): {self.told} ({difference})"


@dataclass(frozen=True)
class SeedContrast:
    """Contrast of configurations with several seeds; a notebook shows it as a figure and a table."""

    loss: str
    """The compared quantity: `Held-out loss`, `Training loss`, or `Held-out` and the name of a metric."""
    differences: tuple[SeedDifference, ...]
    """Difference of each other configuration to the first, at equal tokens, FLOPs, device-hours and time."""
    incomparable: str | None = None
    """Sentence on why the losses do not compare; then there are no differences."""

    def __repr__(self) -> str:
        if self.incomparable:
            return self.incomparable
        return "\n".join([f"{self.loss}, intervals over the seeds:", *(item.describe() for item in self.differences)])

    @property
    def compared(self) -> int:
        """Number of configurations that are compared."""
        return max((item.compared for item in self.differences), default=2)

    @property
    def headline(self) -> str:
        """The sentence that says what was found."""
        if self.incomparable:
            return self.incomparable
        item, axis = self.differences[0], X_AXES[self.differences[0].axis]
        same = [each for each in self.differences if each.axis == item.axis]
        if not same[1:]:
            sign, words = ("", "by") if item.distinguishable else ("+", "a difference of")
            by = with_margin(abs(item.value) if item.distinguishable else item.value, item.margin, sign)
            how = f"{words} {by}, {CONFIDENCE:.0%} interval" if item.scatter else f"{words} {by}"
            seeds = f"{item.seeds[0]} and {item.seeds[1]} seeds"
            start = f"{self.loss} at equal {axis.label} ({axis.describe(item.at)})"
            return f"{start}: {item.told} ({how}, {seeds})."
        told = [each for each in same if each.distinguishable]
        lower = sum(each.value < 0 for each in told)
        return (
            f"{self.loss} at equal {axis.label}: of {len(same)} configurations beside {item.names[1]}, {lower} end "
            f"lower, {len(told) - lower} higher, and {len(same) - len(told)} cannot be told from it "
            f"({interval_in_words(self.compared)})."
        )

    @property
    def table(self) -> Table:
        """Both means, their difference and a verdict, in a row for each axis and each other configuration."""
        rows, pairs = list[tuple[str, ...]](), {item.names for item in self.differences}
        for item in self.differences:
            axis, lower = X_AXES[item.axis], "lower" if item.value < 0 else "higher"
            verdict = lower if item.distinguishable else "too close to call" if item.scatter else "cannot tell"
            names = item.names if len(pairs) > 1 else ()
            means = [f"{mean:.4g} (n={n})" for mean, n in zip(item.means, item.seeds, strict=True)]
            scatter = f"{item.scatter.deviation:.2g} {item.scatter.source}" if item.scatter else "none"
            difference = with_margin(item.value, item.margin, "+")
            rows.append((axis.label, axis.describe(item.at), *names, *means, difference, scatter, verdict))
        several = ("configuration", "compared with", "its mean", "the other's mean")
        titles = next(iter(pairs)) if len(pairs) == 1 else several
        head = (f"{self.loss.lower()} at equal", "", *titles, f"difference ({interval_in_words(self.compared)})")
        return (*head, "scatter of seeds", "verdict"), rows

    @property
    def details(self) -> list[str | Table]:
        """A sentence for each difference."""
        return [f"{item.describe()}." for item in self.differences]


def interval_in_words(compared: int) -> str:
    """Say what share of equal configurations an interval holds, and for how many configurations it does so at once."""
    return f"{CONFIDENCE:.0%} interval" + (f" for {compared} configurations together" if compared > 2 else "")


def seed_groups(described: Sequence[Mapping[str, object]]) -> list[list[int]]:
    """Return the positions of runs that differ in their seed alone, a list for each configuration, in order.

    `described` holds nested JSON for every run: its experiment and its plan. Plans divide the same training, so that a
    run with a plan of its own, on another number of GPUs for instance, joins a configuration of its experiment that
    lacks its seed. Configurations with several seeds each stay apart if their plans differ.
    """
    groups = dict[tuple[Any, int], list[int]]()
    times = Counter[Any]()
    experiments, seeds = [], []
    for at, own in enumerate(described):
        settings = described_settings(own)
        seed = settings.pop("experiment.seed", None)
        others = frozenset(settings.items())
        groups.setdefault((others, times[others, seed]), []).append(at)  # the same seed again is no other seed
        times[others, seed] += 1
        experiments.append(frozenset(item for item in settings.items() if not item[0].startswith("plan.")))
        seeds.append(seed)
    joined = list[list[int]]()
    for group in sorted(groups.values(), key=len, reverse=True):
        lacking = (
            other
            for other in joined
            if len(group) == 1
            and experiments[other[0]] == experiments[group[0]]
            and seeds[group[0]] not in [seeds[at] for at in other]
        )
        if (home := next(lacking, None)) is None:
            joined.append(group)
        else:
            home += group
    return sorted(sorted(group) for group in joined)


def group_names(described: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the models, or of the experiments, where each has its own, else the fields that differ."""
    named = [facts.get("experiment") or {} for facts in described]
    for own in ([(each.get("model") or {}).get("name") for each in named], [each.get("name") for each in named]):
        if None not in own and len(set(own)) == len(own) > 1:
            return list(map(str, own))
    experiments = [dict(facts.get("experiment") or {}) for facts in described]
    for fields in experiments:
        if "sparsity" in fields:  # a label stands for its fields
            fields["sparsity"] = from_json(fields["sparsity"]).label if fields["sparsity"] else "dense"
    rows = setting_differences(experiments)
    numbers = ("configuration", tuple(str(at + 1) for at in range(len(described))))
    rows = tuple(row for row in rows if row[0] != "seed") or (numbers,)
    parts = [[f"{name.rpartition('.')[2]} {values[at]}" for name, values in rows] for at in range(len(described))]
    return [", ".join(words) for words in parts]


def contrast_seeds(
    groups: Mapping[str, Sequence[Curve]],
    paired: bool = False,
    scatter: Scatter | None = None,
    metric: str | None = None,
) -> SeedContrast:
    """Compare each configuration with the first at equal cost; each has at least two runs, which differ in their seed.

    The held-out losses are compared if every run has some where they all end, else the training losses. Losses that
    are measured on different things (`Curve.basis`) are not compared, and neither are their metrics.

    Args:
        groups: the runs of each configuration.
        paired: the configurations have the same seeds, and their runs the same order.
        scatter: how far seeds moved the ends of other runs.
        metric: name of a metric of the held-out samples, which is compared instead of the loss.

    Raises:
        UnknownParameter: the runs of two configurations share no stretch of any axis, or a run lacks the metric.
    """
    chosen = list(itertools.chain(*groups.values()))
    chosen = list(compared_curves(chosen)) if metric is None else [metric_curve(curve, metric) for curve in chosen]
    loss, width = loss_name(chosen[0]), 0.0 if is_held_out(chosen[0]) else SMOOTHING
    loss = loss if metric is None else f"Held-out {metric}"
    if incomparable := why_curves_do_not_compare(chosen):
        return SeedContrast(loss, (), incomparable)
    curves = iter(chosen)
    compared = {name: [next(curves) for _ in runs] for name, runs in groups.items()}
    first, *others = compared
    differences = []
    for axis in COST_AXES:
        points = {name: [points_of(curve, axis, metric) for curve in runs] for name, runs in compared.items()}
        ends = {
            name: ends_at(runs, end, width) for name, runs in points.items() if (end := _shared_end([runs])) is not None
        }
        for other in others:
            rest = [ends.get(name) for name in compared if name not in (other, first)]
            pair = points[other], points[first]
            difference = _difference((other, first), axis, pair, rest, width, paired, scatter)
            differences += [] if difference is None else [replace(difference, metric=metric, compared=len(compared))]
    if not differences:
        raise UnknownParameter("The runs share no stretch of tokens, FLOPs or device-hours. Train them further.")
    return SeedContrast(loss, tuple(differences))


def metric_curve(curve: Curve, metric: str) -> Curve:
    """Return the evaluations of a run as a curve of their own; raise `UnknownParameter` if it lacks a metric."""
    found = evaluations_of(curve)
    if found is None or not len(finite_points(column(found, "step"), column(found, metric))[0]):
        has = metrics_of([curve])
        told = f"It has: {', '.join(has)}" if has else "It has none: give metrics={…} to wb.Evaluation"
        raise UnknownParameter(f"{curve.name} has no metric {metric!r} of held-out samples. {told}.")
    return found


def _difference(
    names: tuple[str, str],
    axis: str,
    pair: Sequence[Sequence[Points]],
    others: Sequence[list[float] | None],
    width: float,
    paired: bool,
    known: Scatter | None,
) -> SeedDifference | None:
    """Return the difference of two configurations; None if their runs share no stretch of an axis.

    The ends of the others tell how far seeds move the end of a run; None for one whose runs share no stretch.
    """
    at = _shared_end(pair)
    if at is None:
        return None
    ends = [ends_at(runs, at, width) for runs in pair]
    rest = [own for own in others if own is not None]
    scatter = paired_scatter(ends, [*ends, *rest]) if paired and len(rest) == len(others) else None
    if scatter is None:
        told = [part for part in (usual_scatter(rest, "in other configurations"), known) if part is not None]
        scatter = combined(scatter_of(ends), max(told, key=lambda part: part.freedom, default=None))
    means = float(np.mean(ends[0])), float(np.mean(ends[1]))
    return SeedDifference(names, axis, at, means, (len(ends[0]), len(ends[1])), scatter)


def _shared_end(groups: Sequence[Sequence[Points]]) -> float | None:
    """Return the end of the stretch that all runs of some configurations have been on; None if there is none."""
    runs = [run for group in groups for run in group]
    if not all(len(x) for x, _ in runs):
        return None
    begin, end = max(float(x[0]) for x, _ in runs), min(float(x[-1]) for x, _ in runs)
    return end if end > 0 and begin <= end and all(is_known_at(x, end) for x, _ in runs) else None


def ends_at(runs: Sequence[Points], at: float, width: float = SMOOTHING) -> list[float]:
    """Return the loss of each run at a position, over what lies before it (`end_of`); `width` is a share of that."""
    return [float(end_of(*points_until(*run, at), width * at).value[0]) for run in runs]


# `wb.contrast` reads runs, and chooses: each with the first, or configurations over their seeds.


@checked_arguments
def contrast(
    runs: Runs | Sweep, x: str = "tokens", *, y: str | None = None, scatter: float | Runs | Sweep | None = None
) -> Contrast | SeedContrast:
    """Return a comparison of runs at equal tokens, FLOPs, device-hours and time.

    It holds the difference of each run to the first over the axis `x`, with the noise along the curves and the points
    where they cross, and everything that differs in experiments, plans and environments.

    Runs that differ in their seed alone are one configuration. If each of several configurations has at least two
    seeds, their means are compared, and the interval comes from the scatter between seeds. Of a sweep, the
    configurations with two finished seeds are compared with the best. With one seed each, no run is called lower
    unless `scatter` says how far seeds move the end of a run. The more configurations or runs there are, the further
    two must lie apart: of equal ones, some are called different in at most a tenth of such comparisons.

    Args:
        runs: the runs to compare, or a sweep.
        x: name of the x axis.
        y: name of a metric of the held-out samples, such as `accuracy`, which is compared over the seeds instead of the
            loss.
        scatter: standard deviation of one run's last loss between seeds, or runs that show it, such as
            `wb.list_runs()`: of those that differ in their seed alone, the ones nearest in parameters are taken.

    Raises:
        InvalidArgument: `scatter` is no positive number, or none of its runs differ in their seed alone.
        InvalidExperiment: a sweep has fewer than two configurations with two finished seeds, or `y` is given for runs
            without several seeds.
        UnknownParameter: a run has no such metric.

    Examples:
        >>> contrast = wb.contrast(runs, scatter=0.05)
        >>> len(contrast.differences)
        1
    """
    handles = load_runs(_finished(runs) if isinstance(runs, Sweep) else runs)
    described = described_runs(handles)
    groups, curves = seed_groups(described), curves_of(handles)
    known = _scatter(scatter, described, y)
    if len(groups) > 1 and all(len(group) > 1 for group in groups):
        groups = [sorted(group, key=lambda at: str(described[at]["experiment"].get("seed"))) for group in groups]
        seeds = {tuple(described[at]["experiment"].get("seed") for at in group) for group in groups}
        names = group_names([described[group[0]] for group in groups])
        by_name = {name: [curves[at] for at in group] for name, group in zip(names, groups, strict=True)}
        return contrast_seeds(by_name, len(seeds) == 1, known, y)
    if y is not None:
        raise InvalidExperiment(
            f"y={y!r} is compared over seeds, and these {len(handles)} runs are {len(groups)} configurations with "
            f"{min(map(len, groups))} seed{'s' * (min(map(len, groups)) > 1)} or more each. Give two configurations "
            f"with two seeds or more, or draw the curves: wb.compare(runs, y={y!r})."
        )
    if known is None:
        ends = [_last_losses([curves[at] for at in group]) for group in groups]
        known = scatter_of(ends, "in the runs with several seeds")
    full = [{**facts, "environment": run.environment} for facts, run in zip(described, handles, strict=True)]
    return contrast_curves(curves, full, x, known)


def described_runs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the experiment and the plan of each run as nested JSON."""
    plans = [run.directory.plan for run in runs]
    return [
        {"experiment": values_by_name(run.config), "plan": read_json(plan) if plan.exists() else {}}
        for run, plan in zip(runs, plans, strict=True)
    ]


def _scatter(
    scatter: float | Runs | Sweep | None, described: Sequence[Mapping[str, Any]], metric: str | None
) -> Scatter | None:
    """Return the scatter that is given, or that of other runs whose size is nearest to that of `described`."""
    if scatter is None:
        return None
    if isinstance(scatter, int | float):
        if not (math.isfinite(scatter) and scatter > 0):
            raise InvalidArgument(
                f"scatter={scatter!r} is no standard deviation. Give a positive number in the unit of the loss, or "
                "runs that differ in their seed alone."
            )
        return Scatter(float(scatter), math.inf)
    given = scatter.runs if isinstance(scatter, Sweep) else load_runs(scatter)
    runs = [run for run in given if run.status.state == "finished"]
    facts = described_runs(runs)
    groups = [group for group in seed_groups(facts) if len(group) > 1]
    if not groups:
        raise InvalidArgument(
            f"scatter: no two of the {len(runs)} finished runs differ in their seed alone, so they do not show how far "
            "seeds move the end of a run. Train one of the configurations with seeds 0, 1 and 2, or give the standard "
            "deviation as a number."
        )
    sizes = [_parameters(facts[group[0]]) for group in groups]
    wanted = {size for each in described if (size := _parameters(each))}
    nearest = {min(filter(None, sizes), key=lambda size: abs(math.log(size / own))) for own in wanted if any(sizes)}
    chosen = [group for group, size in zip(groups, sizes, strict=True) if size in nearest] or groups
    ends = [_last_losses(curves_of([runs[at] for at in group]), metric) for group in chosen]
    words = " and ".join(count(size) for size in sorted(nearest))
    number = f"in {sum(map(len, ends))} other runs" + (f" of {words} parameters" if words else "")
    return usual_scatter(ends, number)


def _parameters(facts: Mapping[str, Any]) -> int:
    """Return the number of parameters of a run's model by its plan, 0 without one."""
    return sum(each["parameters"] - each.get("tied_parameters", 0) for each in facts["plan"].get("stages", ()))


def _last_losses(curves: Sequence[Curve], metric: str | None = None) -> list[float]:
    """Return the smoothed loss, or the metric, of each run where all of them have taken the same number of tokens."""
    chosen = compared_curves(curves) if metric is None else [metric_curve(curve, metric) for curve in curves]
    points = [points_of(curve, "tokens", metric) for curve in chosen]
    if not all(len(x) for x, _ in points):
        return []
    return ends_at(points, min(float(x[-1]) for x, _ in points), 0.0 if is_held_out(chosen[0]) else SMOOTHING)


def _finished(sweep: Sweep) -> list[Run]:
    """Return the finished runs of each configuration that has two of them, the best configuration first."""
    rows = [row for row in sweep.rows() if len(row.finished) > 1]
    if len(rows) < 2:
        raise InvalidExperiment(
            f"{len(rows)} of {len(sweep.rows())} configurations of {sweep.name} have two finished seeds, and a "
            "contrast needs two such configurations. Sweep with seeds=2 or more, or wait until more runs have finished."
        )
    return [run for row in rows for run in row.finished]
