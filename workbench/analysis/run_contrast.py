"""The contrast of runs: of each with the first, or of configurations over their seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.analysis.contrast import Contrast, compared_curves, points_of
from workbench.analysis.contrast import contrast as contrast_curves
from workbench.analysis.curve import SMOOTHING, Curve, curves_of, is_held_out
from workbench.analysis.noise import Scatter, scatter_of, usual_scatter
from workbench.analysis.seed_contrast import (
    SeedContrast,
    contrast_seeds,
    ends_at,
    group_names,
    metric_curve,
    seed_groups,
)
from workbench.arguments import checked_arguments
from workbench.errors import InvalidArgument, InvalidExperiment
from workbench.experiment import values_by_name
from workbench.rundir import read_json
from workbench.runs.registry import Runs, load_runs
from workbench.runs.run import Run
from workbench.sweeps.sweep import Sweep
from workbench.units import count


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
    unless `scatter` says how far seeds move the end of a run.

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
    return sum(stage["parameters"] for stage in facts["plan"].get("stages", ()))


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
