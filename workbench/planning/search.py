"""The search: the best cut of every option, and the fastest option that fits.

Nothing is sampled. An option is cut and simulated unless a lower bound of its step already exceeds the best step.
"""

from __future__ import annotations

import functools
import gc
import heapq
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Unpack

import numpy as np

from workbench.arguments import checked_keywords
from workbench.cost.hardware import Cluster
from workbench.cost.profile import Profile
from workbench.display import Say
from workbench.errors import PlanInfeasible, PlanMismatch
from workbench.planning.assembly import assemble
from workbench.planning.options import Option, has_options, options
from workbench.planning.plan import Plan
from workbench.planning.prediction import bound_ms, predict
from workbench.planning.refusals import coupled_samples, host_too_small, no_options, too_large
from workbench.planning.request import Request, check, memory_limit_bytes
from workbench.planning.stage_cuts import Cutter
from workbench.strategy import Choices, Fixed, Strategy

MAX_SETTLED = 80
"""Number of options that are weighed after the best is known, so that a table of the fastest has steps, not bounds."""
CUDA_GRAPHS_SLACK = 0.02
"""Fraction of the step time that the planner may sacrifice to use CUDA graphs, which protect a host-bound plan against
a host that is slower than when it was measured."""
CUDA_GRAPHS_GAIN = 0.01
"""Least fraction of the step time that CUDA graphs must save a plan whose host holds nothing up: they take memory."""


FEWER = 4
"""Divisor of the number of devices by which a plan is compared with one on fewer of them."""


def on_fewer_devices(plan: Plan) -> Plan | None:
    """Return the best plan on a quarter of the devices, with the same choices fixed; None where there is none.

    The search runs again, so that a plan that was read from a file has none either.
    """
    if plan.origin is None or plan.cluster.gpus % FEWER:
        return None
    profile, request = plan.origin
    with suppress(PlanInfeasible):
        return Search(profile, replace(request, cluster=request.cluster.resized(plan.cluster.gpus // FEWER))).plan()
    return None


@checked_keywords
def what_if(
    profile: Profile,
    cluster: Cluster,
    *,
    global_batch: int,
    seq_len: int,
    gpus: int | None = None,
    memory_limit_gib: float | None = None,
    **choices: Unpack[Choices],
) -> Plan:
    """Return the best plan for one position of some sliders; a position seen before is answered from a cache.

    Make the profile once and call this function for every move:

        profile = wb.planning.profile(experiment, cluster)             # captures the model: seconds
        plan = what_if(profile, cluster, global_batch=256, seq_len=512, gpus=8, memory_limit_gib=32)
        show_plan(plan)

    `gpus` plans for as many of the cluster's devices (in nodes of their usual size), None for the cluster as it is.
    Costs of blocks are shared between calls. Raises `PlanInfeasible` where nothing fits: show its sentence in place of
    the picture.
    """
    cluster = cluster if gpus is None else cluster.resized(gpus)
    request = Request(global_batch, seq_len, cluster, memory_limit_bytes(memory_limit_gib), Fixed(**choices))
    with uncollected():
        return _what_if(profile, request)


@functools.lru_cache(maxsize=512)
def _what_if(profile: Profile, request: Request) -> Plan:
    return checked_search(profile, profile.precision, request).plan()


@contextmanager
def uncollected() -> Iterator[None]:
    """Suspend garbage collection: where a model has been captured, a full collection takes longer than a plan."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def checked_search(profile: Profile, precision: str, request: Request, advises: bool = True) -> Search:
    """Return a search of a checked request; raises what `search` raises before anything is searched."""
    check_profile(profile, precision, request.cluster)
    check(request, profile)
    return Search(profile, request, advises)


def check_profile(profile: Profile, precision: str, cluster: Cluster) -> None:
    """Raise `PlanMismatch` for a profile that was made for another precision or device type."""
    device = cluster.device
    if (profile.precision, profile.device_type) != (precision, device.type):
        raise PlanMismatch(
            f"The profile of {profile.model} is for {profile.precision} on {profile.device_type}, and the plan is for "
            f"{precision} on {device.type}. Make the profile again for {device.name} with "
            f"wb.planning.profile(experiment, cluster), or plan in {profile.precision} on a "
            f"{profile.device_type} cluster."
        )


class Search:
    """One search for the fastest plan; `advises=False` saves the searches for a way out where nothing fits.

    It covers pipeline × data × tensor degrees that use all devices, ZeRO stages, schedules and stages per rank,
    activation checkpointing of each stage, optimiser state on the host, CUDA graphs, and micro-batches that divide each
    replica's share. Stages are cut so that the slowest is as fast as memory allows.
    """

    def __init__(self, profile: Profile, request: Request, advises: bool = True) -> None:
        self.profile = profile
        self.request = request
        self._advises = advises
        self.searched = 0
        """Number of options, once `plan` has run."""
        self._weighed: dict[Strategy, Option] = {}
        self._say: Say | None = None

    def plan(self, num_simulated: int = 1, say: Say | None = None) -> Plan:
        """Return the fastest plan that fits.

        `Plan.candidates` has the simulated step of `num_simulated` of the fastest options, and bounds of others. `say`
        is told how many options have been weighed.
        """
        self._say = say
        by_bound = sorted(map(Option.of, options(self.profile, self.request)), key=lambda option: option.bound_ms)
        self.searched = len(by_bound)
        if not by_bound:
            works = functools.partial(has_options, self.profile)
            if self.profile.coupled and has_options(replace(self.profile, coupled=()), self.request):
                division = f"which no allowed division of {self.request.cluster.gpus} devices leaves room for"
                raise coupled_samples(self.profile, self.request, division, works)
            raise no_options(self.profile, self.request, works)
        best = self._fastest(by_bound)
        if best is None:
            if self.profile.coupled:
                offer = self.request.offer()
                raise coupled_samples(self.profile, self.request, f"which does not fit: {offer}", self._fits)
            raise self._refusal(by_bound)
        best = self._with_cuda_graphs(best, by_bound)
        form = best.strategy.block_sparse
        other = self._fastest([option for option in by_bound if option.strategy.block_sparse != form])
        self._settle(by_bound, num_simulated)
        return assemble(self.profile, self.request, best, by_bound, other)

    def _fastest(self, by_bound: list[Option]) -> Option | None:
        """Return the fastest option that fits, of options in the order of their bounds."""
        best: Option | None = None
        best_ms = np.inf
        for option in by_bound:
            if option.bound_ms >= best_ms:
                break
            if option.step_ms is None and not self._is_dominated(option):
                self._weigh(option, best_ms)
            if option.step_ms is not None and option.step_ms < best_ms:
                best, best_ms = option, option.step_ms
        return best

    def _weigh(self, option: Option, best_ms: float) -> None:
        """Cut an option, and simulate it unless its stages show that it cannot win."""
        option.weighed = True
        self._weighed[option.strategy] = option
        if self._say is not None:
            self._say(f"{len(self._weighed):,} of at most {self.searched:,}")
        if option.least_bytes > self.request.offered_bytes:
            return
        option.cut, option.least_bytes = Cutter(option.costs).best(self.request.offered_bytes)
        if option.cut is not None:
            times = option.costs.times(option.cut.stages)
            option.bound_ms = max(option.bound_ms, bound_ms(option.costs, option.cut, times))
            if option.bound_ms < best_ms:
                prediction = predict(option.costs, option.cut, times, self.request)
                option.step_ms, option.bubble_fraction = prediction.step_ms, prediction.bubble_fraction

    def _is_dominated(self, option: Option) -> bool:
        """Return True for optimiser state on the host where everything fits the device, with nothing recomputed."""
        if not option.strategy.offload_optimizer:
            return False
        twin = self._weighed.get(replace(option.strategy, offload_optimizer=False))
        if twin is None or twin.cut is None or any(twin.cut.levels):
            return False
        option.bound_ms = max(option.bound_ms, twin.least_ms)
        return True

    def _with_cuda_graphs(self, best: Option, by_bound: list[Option]) -> Option:
        """Return the best option with CUDA graphs if they cost little, or save a little; otherwise the best option.

        A host-bound plan is as fast as predicted only where the host is as fast as when it was measured. Others are
        tried only now that the best is known; kernels of a graph follow each other sooner, where that was measured.
        """
        assert best.step_ms is not None
        captured = replace(best.strategy, cuda_graphs=True)
        option = next((option for option in by_bound if option.strategy == captured), None)
        most_ms = (1 + CUDA_GRAPHS_SLACK) * best.step_ms
        if option is None and self.request.fixed.cuda_graphs is None and best.costs.can_capture:
            option = Option.of(best.costs.model.of(captured))
            by_bound.append(option)
            most_ms = (1 - CUDA_GRAPHS_GAIN) * best.step_ms
        if option is None or option is best:
            return best
        self._weigh(option, np.inf)
        return option if option.step_ms is not None and option.step_ms <= most_ms else best

    def _settle(self, by_bound: list[Option], num_simulated: int) -> None:
        """Weigh options whose bound may be among the fastest until `num_simulated`, or `MAX_SETTLED`, are simulated."""
        queue = [(option.least_ms, number) for number, option in enumerate(by_bound) if option.may_fit]
        heapq.heapify(queue)
        most = len(self._weighed) + MAX_SETTLED
        while queue and num_simulated > 0 and len(self._weighed) < most:
            _, number = heapq.heappop(queue)
            option = by_bound[number]
            if option.step_ms is not None:
                num_simulated -= 1
                continue
            self._weigh(option, np.inf)
            if option.may_fit:
                heapq.heappush(queue, (option.least_ms, number))

    def _refusal(self, by_bound: list[Option]) -> PlanInfeasible:
        """Return the reason why no option fits, with the option that needs least memory."""
        leanest, least, fullest = by_bound[0], np.inf, 0
        for option in sorted(by_bound, key=lambda option: option.least_bytes):
            if option.least_bytes >= least:
                break
            needed, rank = Cutter(option.costs).leanest()
            if needed < least:
                leanest, least, fullest = option, needed, rank
        if not np.isfinite(least):
            host = min(Cutter(option.costs).least_host for option in by_bound)
            return host_too_small(self.profile, self.request, host)
        strategy = replace(leanest.strategy, recompute=leanest.costs.model.modes[-1])
        return too_large(self.profile, self.request, len(by_bound), (strategy, float(least), fullest), self._fits)

    def _fits(self, other: Request) -> bool:
        with suppress(PlanInfeasible):
            return self._advises and bool(Search(self.profile, other, advises=False).plan())
        return False
