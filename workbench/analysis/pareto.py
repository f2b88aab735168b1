"""Pareto fronts: of finished runs in loss and cost, and of plans in memory and time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.analysis.flops import sample_flops
from workbench.errors import InvalidExperiment
from workbench.experiment import values_by_name
from workbench.models import UserModel
from workbench.runs.run import Run

NOT_COMPARED = ("seed", "name", "tags", "project")
"""Fields of an experiment in which the seeds of one mark may differ."""


@dataclass(frozen=True)
class ParetoPoint:
    """One configuration: its cost, and the held-out losses of its seeds."""

    name: str
    group: str
    """`dense`, `static` or `dynamic`."""
    gflop: float
    """FLOPs of one sequence, in the layers and at the labelled positions in the head, in 1e9."""
    seconds: float
    """Mean training time."""
    losses: tuple[float, ...]
    """Held-out loss at the end of the training, one for each seed."""

    @property
    def loss(self) -> float:
        return float(np.mean(self.losses))


def pareto_points(runs: Sequence[Run]) -> list[ParetoPoint]:
    """Return a mark for each experiment among the runs; raises `InvalidExperiment` for runs that have none."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if not len(run.evaluations()):
            raise InvalidExperiment(
                f"{run.name} has no held-out loss. Train with evaluation=wb.Evaluation(every=100), or leave it out."
            )
        fields = {name: value for name, value in values_by_name(run.config).items() if name not in NOT_COMPARED}
        groups.setdefault(json.dumps(fields, sort_keys=True), []).append(run)
    return [_point(same) for same in groups.values()]


def _point(runs: Sequence[Run]) -> ParetoPoint:
    experiment = runs[0].experiment
    if isinstance(experiment.model, UserModel) or experiment.data.is_user_defined:
        raise InvalidExperiment(
            f"{runs[0].name} trains a model or data of your own, which the run's description does not contain, so that "
            "its FLOPs are unknown. Compare it with wb.compare(runs, x='flops')."
        )
    sparsity = experiment.sparsity
    label = "dense" if sparsity is None else sparsity.label
    return ParetoPoint(
        f"{experiment.model.name}, {label}",
        "dense" if sparsity is None else type(sparsity).__name__.lower(),
        sample_flops(experiment).at_labels / 1e9,
        float(np.mean([run.history().seconds[-1] for run in runs])),
        tuple(float(run.evaluations().eval_loss[-1]) for run in runs),
    )


def pareto_front(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points of memory and step that none beats in both, the leanest first."""
    front: list[tuple[int, float]] = []
    for peak_bytes, ms in sorted(points):
        if not front or ms < front[-1][1]:
            front.append((peak_bytes, ms))
    return front
