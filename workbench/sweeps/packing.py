"""The choice between one run on all devices and several side by side, by the predicted time of the whole sweep."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.cost.cluster import Cluster
from workbench.cost.profile import Profile
from workbench.errors import InvalidExperiment, PlanInfeasible
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.planning.planner import plan_profiled
from workbench.planning.profiling import profile
from workbench.planning.request import divisors
from workbench.units import duration


@dataclass(frozen=True)
class Packing:
    """The number of runs side by side, their plans, and the predicted training time of the whole sweep."""

    side_by_side: int
    devices_each: int
    runs_per_gpu: int
    plans: Mapping[str, Plan]
    """Plan by the key of `directory.plan_key`."""
    seconds: float
    """Seconds that the runs take when each has its devices to itself."""

    @property
    def share(self) -> float:
        """The part of a device that a run takes in the device queue, where all CPU processes are one device."""
        on_cpu = next(iter(self.plans.values())).cluster.device.type == "cpu"
        return 1 / (self.side_by_side if on_cpu else self.runs_per_gpu)

    def describe(self, runs: int) -> str:
        """Return words such as `"2 runs side by side on 1 device each take 3 min"`."""
        each = f"{self.devices_each} device{'s' * (self.devices_each > 1)}"
        apart = self.side_by_side // self.runs_per_gpu
        if apart == 1:
            return f"{runs} runs one after another on {each} take {duration(self.seconds)}"
        return f"{apart} runs side by side on {each} each take {duration(self.seconds)}"


def choose(
    experiments: Mapping[str, Experiment],
    runs: Sequence[tuple[str, int]],
    cluster: Cluster,
    profiled_as: Mapping[str, str],
    runs_per_gpu: int = 1,
) -> tuple[Packing, str]:
    """Return the packing with the shortest predicted time, and the sentence that says why.

    Args:
        experiments: one experiment for each plan that is needed, by its key.
        runs: key and steps of each run of the sweep, in the order in which they start.
        cluster: the devices that the sweep may use.
        profiled_as: a text by the key of each plan, equal for experiments whose models cost the same.
        runs_per_gpu: number of runs that train on each GPU at the same time, each with that part of its memory.

    Raises `PlanInfeasible` if no plan fits even on all devices, and `InvalidExperiment` for several runs on each GPU
    where there is none.
    """
    if runs_per_gpu > 1 and cluster.device.type == "cpu":
        raise InvalidExperiment(
            f"runs_per_gpu={runs_per_gpu} is given, and this machine has no GPU. Leave it out: on CPUs, as many runs "
            "train side by side as the planner finds best."
        )
    profiles: dict[str, Profile] = {}
    for key, experiment in experiments.items():
        if profiled_as[key] not in profiles:
            profiles[profiled_as[key]] = profile(experiment, cluster)
    asked = {key: (experiment, profiles[profiled_as[key]]) for key, experiment in experiments.items()}
    options, refusal = [], None
    counts = divisors(cluster.gpus)
    for each in reversed(counts):
        try:
            options.append(_packing(asked, runs, cluster, each, runs_per_gpu))
        except PlanInfeasible as error:
            refusal = refusal or error
    if not options:
        assert refusal is not None
        raise refusal
    best = min(options, key=lambda option: option.seconds)  # of equals, the one with fewer runs side by side
    others = [f"{option.describe(len(runs))}" for option in options if option is not best]
    beside = f"; {'; '.join(others)}" if others else ""
    missing = len(counts) - len(options)
    tight = f"; {missing} other division{'s' * (missing > 1)} would not fit in memory" if missing else ""
    shortest = duration(best.seconds / runs_per_gpu)
    shared = (
        f" {runs_per_gpu} runs share each GPU, which takes between {shortest} and that time: how far they slow each "
        "other down is not predicted."
    )
    why = f"Predicted training time on {cluster.describe()}: {best.describe(len(runs))}{beside}{tight}."
    return best, why + shared * (runs_per_gpu > 1)


def _packing(
    asked: Mapping[str, tuple[Experiment, Profile]],
    runs: Sequence[tuple[str, int]],
    cluster: Cluster,
    each: int,
    runs_per_gpu: int,
) -> Packing:
    # `Cluster.resized` would give a CPU process the cores of the others, which run beside it here.
    part = replace(cluster, gpus=each, gpus_per_node=min(each, cluster.gpus_per_node))
    device = cluster.device
    limit = None if runs_per_gpu == 1 else max(1, device.memory_bytes // runs_per_gpu - device.reserved_bytes)
    plans = {key: plan_profiled(experiment, costs, part, limit) for key, (experiment, costs) in asked.items()}
    slots = [0.0] * (cluster.gpus // each)
    for key, steps in runs:
        evaluation, predicted = asked[key][0].evaluation, plans[key].prediction
        evaluations = 0 if evaluation is None else 1 + math.ceil(steps / evaluation.every)  # one is before training
        run_s = steps * predicted.step_ms / 1e3 + evaluations * predicted.evaluation_s
        heapq.heapreplace(slots, slots[0] + run_s)
    return Packing(len(slots) * runs_per_gpu, each, runs_per_gpu, plans, max(slots))
