"""The contrast of runs: of each with the first, or of configurations over their seeds."""

from __future__ import annotations

from workbench.analysis.contrast import Contrast
from workbench.analysis.contrast import contrast as contrast_curves
from workbench.analysis.curve import curves_of
from workbench.analysis.seed_contrast import SeedContrast, contrast_seeds, group_names, seed_groups
from workbench.analysis.smoothing import SMOOTHING
from workbench.arguments import checked_arguments
from workbench.errors import InvalidExperiment
from workbench.experiment import values_by_name
from workbench.rundir import read_json
from workbench.runs.registry import Runs, load_runs
from workbench.runs.run import Run
from workbench.sweeps.sweep import Sweep


@checked_arguments
def contrast(runs: Runs | Sweep, x: str = "tokens", *, smoothing: float = SMOOTHING) -> Contrast | SeedContrast:
    """Return a comparison of runs at equal tokens, FLOPs, GPU-hours and time.

    It holds the difference of each run to the first over the axis `x`, with its confidence interval and the points
    where curves cross, and everything that differs in experiments, plans and environments. Arguments are those of
    `compare`.

    Runs that differ in their seed alone are one configuration. If each of several configurations has at least two
    seeds, the interval of the difference comes from the seeds instead (Welch's t), and a difference whose interval
    contains zero is called not distinguishable. Of a sweep, the configurations with two finished seeds are compared
    with the best.
    """
    handles = load_runs(_finished(runs) if isinstance(runs, Sweep) else runs)
    plans = [run.directory.plan for run in handles]
    described = [
        {"experiment": values_by_name(run.config), "plan": read_json(plan) if plan.exists() else {}}
        for run, plan in zip(handles, plans, strict=True)
    ]
    groups, curves = seed_groups(described), curves_of(handles)
    if len(groups) > 1 and all(len(group) > 1 for group in groups):
        names = group_names([described[group[0]] for group in groups])
        by_name = {name: [curves[at] for at in group] for name, group in zip(names, groups, strict=True)}
        return contrast_seeds(by_name, smoothing=smoothing)
    full = [{**facts, "environment": run.environment} for facts, run in zip(described, handles, strict=True)]
    return contrast_curves(curves, full, x, smoothing=smoothing)


def _finished(sweep: Sweep) -> list[Run]:
    """Return the finished runs of each configuration that has two of them, the best configuration first."""
    rows = [row for row in sweep.rows() if len(row.finished) > 1]
    if len(rows) < 2:
        raise InvalidExperiment(
            f"{len(rows)} of {len(sweep.rows())} configurations of {sweep.name} have two finished seeds, and a "
            "contrast needs two such configurations. Sweep with seeds=2 or more, or wait until more runs have finished."
        )
    return [run for row in rows for run in row.finished]
