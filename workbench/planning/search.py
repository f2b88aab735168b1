"""The search: every strategy, its best cut, and the fastest one that fits, as a `Plan`.

Nothing is sampled. An option is cut and simulated unless a lower bound of its step already exceeds the best step.
"""

from __future__ import annotations

import functools
import gc
import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Unpack

import numpy as np

from workbench.base.arguments import checked_keywords
from workbench.base.display import Say
from workbench.base.errors import PlanInfeasible, PlanMismatch
from workbench.base.units import duration, gib
from workbench.cost.hardware import Cluster
from workbench.cost.memory import Array, Matrices, ParameterTable, shares_out
from workbench.cost.profile import Profile, break_even_sparsity
from workbench.planning.plan import Candidate, Memory, Plan, Stage, common_recompute
from workbench.planning.prediction import bound_ms, evaluation_s, predict
from workbench.planning.request import (
    Request,
    apart,
    check,
    coupled_samples,
    divisors,
    host_need,
    host_too_small,
    memory_limit_bytes,
    no_options,
    too_large,
)
from workbench.planning.stage_costs import ClusterCosts, Cut, StrategyCosts, device_costs, overlapped
from workbench.planning.stage_cuts import Cutter
from workbench.strategy import RECOMPUTE, SCHEDULES, ZERO, Choices, Fixed, Strategy

# Options: every strategy that the runtime runs and the request allows.


@dataclass
class Option:
    """One strategy in a search: its best cut, or why it has none."""

    costs: StrategyCosts
    bound_ms: float
    """Lower bound of the option's step."""
    least_bytes: float
    """Lower bound of the fullest device, whatever the cut."""
    cut: Cut | None = None
    step_ms: float | None = None
    bubble_fraction: float | None = None
    weighed: bool = False
    """True once the best cut was looked for."""

    @property
    def strategy(self) -> Strategy:
        return self.costs.strategy

    @property
    def may_fit(self) -> bool:
        return self.cut is not None or not self.weighed

    @property
    def least_ms(self) -> float:
        """The option's step, or a lower bound of it."""
        return self.bound_ms if self.step_ms is None else self.step_ms

    @staticmethod
    def of(costs: StrategyCosts) -> Option:
        """Return an option with the bounds that are known before it is cut."""
        whole, strategy = costs.whole, costs.strategy
        ranks, count, busy = strategy.pipeline, strategy.num_microbatches, float(whole.busy)
        length = count * busy / ranks
        if not strategy.interleaves:
            # Stage s cannot start before the first micro-batch has passed the stages above, nor end before its last
            # one goes back up, so that the step takes at least busy_0 + … + busy_{s-1} + m · busy_s for every s. A cut
            # that makes all of these equal to L gives stage s a share 1 / m of what the stages above leave of L, so
            # that p stages together take L · (1 - (1 - 1 / m)^p): that is the busy time of the whole model.
            length = busy / (1 - (1 - 1 / count) ** ranks)
        return Option(costs, length + float(whole.ending) / ranks, costs.state_bytes / ranks)


def has_options(profile: Profile, request: Request) -> bool:
    """Return True if any strategy satisfies the request, whether or not it fits in memory."""
    return next(options(profile, request), None) is not None


def options(profile: Profile, request: Request) -> Iterator[StrategyCosts]:
    """Yield the costs of every strategy.

    CUDA graphs take memory: unless the user asked for them, they are tried only where the host may hold up its device,
    and for the best of all the others in the end.
    """
    modes = tuple(RECOMPUTE) if request.fixed.recompute is None else (request.fixed.recompute,)
    cluster, fixed = request.cluster, request.fixed
    asked, sparse = fixed.cuda_graphs, fixed.block_sparse
    forms = profile.forms(cluster.device, sparse)
    costs_of_forms = [ClusterCosts(device_costs(form, cluster.device), cluster, modes) for form in forms]
    for strategy in _strategies(profile, request):
        for costs in costs_of_forms:
            is_block_sparse = costs.profile.is_block_sparse
            if is_block_sparse and not strategy.can_be_block_sparse:
                continue
            without = costs.of(replace(strategy, block_sparse=True) if is_block_sparse else strategy)
            if asked is not False and not request.ramp and without.can_capture and (asked or without.is_host_bound):
                yield costs.of(replace(without.strategy, cuda_graphs=True))
            if not asked:
                yield without

    gathered = profile.gathered
    if gathered is None or asked or sparse:
        return
    costs = ClusterCosts(device_costs(gathered, cluster.device), cluster, modes)
    for strategy in _strategies(gathered, request):
        # One sample has no dim of its own in every operation, and one micro-batch needs no gathering.
        is_divided = 1 < strategy.micro_batch < request.global_batch
        if is_divided and strategy.tensor == 1 and not strategy.interleaves:
            yield costs.of(replace(strategy, gathers=True))


def _strategies(profile: Profile, request: Request) -> Iterator[Strategy]:
    """Yield every strategy without CUDA graphs."""
    fixed, batch = request.fixed, request.global_batch
    others = request.batches[1:]
    offloads = (False,) if request.cluster.device.type == "cpu" else (False, True)
    if fixed.offload_optimizer is not None:
        offloads = (fixed.offload_optimizer,)
    for pipeline, data, tensor in _meshes(profile, request):
        for micro_batch in [fixed.micro_batch] if fixed.micro_batch else divisors(request.common_batch // data):
            num_microbatches = batch // data // micro_batch
            if request.common_batch % (data * micro_batch) or (profile.coupled and micro_batch < batch):
                continue
            for schedule, chunks in _schedules(profile, request, pipeline, num_microbatches):
                if not all(SCHEDULES[schedule].runs(pipeline, other // data // micro_batch) for other in others):
                    continue
                for zero in _zero_stages(request, data, num_microbatches):
                    for offload in offloads:
                        yield Strategy(
                            pipeline=pipeline,
                            data=data,
                            tensor=tensor,
                            zero=zero,
                            schedule=schedule,
                            chunks=chunks,
                            micro_batch=micro_batch,
                            num_microbatches=num_microbatches,
                            recompute=fixed.recompute or "any",
                            offload_optimizer=offload,
                        )


def _meshes(profile: Profile, request: Request) -> Iterator[tuple[int, int, int]]:
    """Yield degrees that use all devices and leave each replica an equal share of the batch.

    Tensor parallelism stays within a node, unless the user fixed its degree.
    """
    fixed, gpus = request.fixed, request.cluster.gpus
    near = divisors(min(gpus, request.cluster.gpus_per_node))
    tensors = [d for d in near if gpus % d == 0 and profile.divides(d)] if fixed.tensor is None else [fixed.tensor]
    for tensor in tensors:
        for pipeline in divisors(gpus // tensor):
            data = gpus // tensor // pipeline
            wanted = fixed.pipeline in (None, pipeline) and fixed.data in (None, data)
            if wanted and pipeline <= len(profile.blocks) and request.common_batch % data == 0:
                yield pipeline, data, tensor


def _schedules(profile: Profile, request: Request, pipeline: int, num_microbatches: int) -> Iterator[tuple[str, int]]:
    """Yield the schedules that torch runs with so many micro-batches, and the stages per pipeline rank.

    Unless the user asked for several stages on a rank, these have two blocks or more on average.
    """
    fixed = request.fixed
    for name in SCHEDULES if fixed.schedule is None else (fixed.schedule,):
        schedule = SCHEDULES[name]
        preferred = SCHEDULES.get(schedule.stands_in_for or "") if fixed.schedule is None else None
        if not schedule.runs(pipeline, num_microbatches) or (preferred and preferred.runs(pipeline, num_microbatches)):
            continue
        if not schedule.interleaves:
            if fixed.chunks in (None, 1):
                yield name, 1
            continue
        asked = fixed.chunks or fixed.schedule
        most = len(profile.blocks) // (1 if asked else 2)
        for chunks in schedule.chunks if fixed.chunks is None else (fixed.chunks,):
            if pipeline > 1 and chunks * pipeline <= most:
                yield name, chunks


def _zero_stages(request: Request, data: int, num_microbatches: int) -> tuple[int, ...]:
    """Return the ZeRO stages to try: none but 0 on one replica, where nothing can be sharded.

    In a step of one micro-batch ZeRO 1 and 2 are the same, and 2 is left out.
    """
    wanted = tuple(ZERO) if request.fixed.zero is None else (request.fixed.zero,)
    if data == 1:
        return tuple(stage for stage in wanted if stage == 0)
    if num_microbatches == 1 and 1 in wanted:
        return tuple(stage for stage in wanted if stage != 2)
    return wanted


MAX_SETTLED = 80
"""Number of options that are weighed after the best is known, so that a table of the fastest has steps, not bounds."""
STORED_BLOCKS_GAIN = 0.08
"""Smallest predicted gain for which sparse weights are stored without their absent blocks, whose products are priced to
5 % rms of the layers that were measured (to 11 % for blocks of 16); two trainings with them were measured."""
CUDA_GRAPHS_SLACK = 0.02
"""Fraction of the step time that the planner may sacrifice to use CUDA graphs, which protect a host-bound plan against
a host that is slower than when it was measured."""
CUDA_GRAPHS_GAIN = 0.01
"""Least fraction of the step time that CUDA graphs must save a plan whose host holds nothing up: they take memory."""


def checked_search(profile: Profile, precision: str, request: Request, advises: bool = True) -> Search:
    """Return a search of a checked request; raises what `search` raises before anything is searched."""
    search = Search(profile, request, advises)
    check_profile(profile, precision, request.cluster)
    check(request, profile)
    return search


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
        best, obstacle = self._fastest(by_bound), ""
        while best is not None and (said := self._obstacle(best.strategy)):
            obstacle, size = said, best.strategy.micro_batch
            by_bound = [option for option in by_bound if option.strategy.micro_batch != size]
            best = self._fastest(by_bound)
        if best is None and not by_bound:
            ways = (
                f"a global batch that is a multiple of {2 * self.request.cluster.gpus}, or give the plan fewer devices"
            )
            ways = "another micro_batch, or leave it to the search" if self.request.fixed.micro_batch else ways
            raise PlanInfeasible(
                f"The batch of {self.profile.model} cannot be divided into micro-batches of {size}, and there are no "
                f"others. {obstacle} Choose {ways}."
            )
        if best is None:
            if self.profile.coupled:
                offer = self.request.offer()
                raise coupled_samples(self.profile, self.request, f"which does not fit: {offer}", self._fits)
            raise self._refusal(by_bound)
        if best.strategy.block_sparse:
            masked = self._fastest([option for option in by_bound if not option.strategy.block_sparse])
            if masked is not None and best.least_ms > (1 - STORED_BLOCKS_GAIN) * masked.least_ms:
                best = masked
        best = self._with_cuda_graphs(best, by_bound)
        form = best.strategy.block_sparse
        other = self._fastest([option for option in by_bound if option.strategy.block_sparse != form])
        self._settle(by_bound, num_simulated)
        return assemble(self.profile, self.request, best, by_bound, other)

    def _obstacle(self, strategy: Strategy) -> str:
        """Return why the ranks of a strategy cannot divide the batch into its micro-batches; empty if they can."""
        captured = None if self.profile.facts is None else self.profile.facts.captured
        is_divided = strategy.micro_batch < self.request.global_batch and not strategy.gathers
        if captured is None or not captured.is_captured or not is_divided:
            return ""
        return captured.obstacle_at(strategy.micro_batch)

    def _fastest(self, by_bound: list[Option]) -> Option | None:
        """Return the fastest option that fits, of options in the order of their bounds.

        This is branch and bound. A bound never exceeds the step that it stands for, and options come in its order: as
        soon as one is no less than the best simulated step, neither that option nor any after it can be faster. Most
        options are ruled out so by the time of the whole model as one stage, before a cut is looked for.
        """
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


# The best option as a `Plan`: its stages, its notes, and the rows of its table.

UNCONFIRMED = (
    "which follows from the operations alone: the model is too large to compare numbers here. A run compares them on "
    "its first device before the first update."
)
"""End of the sentence on a gathered loss that no numbers confirm."""


MAX_ROWS = 400
"""Number of options that a plan lists, nearest to the chosen one first."""
MAX_OPAQUE = 5
"""Number of opaque calls whose shares a plan lists, the largest first."""
MAX_REJECTED = 60
"""Number of these that do not fit, nearest to fitting first."""


def assemble(
    profile: Profile, request: Request, best: Option, options: Sequence[Option], other: Option | None = None
) -> Plan:
    """Return the plan of the best option, with all options as its candidates.

    `other` is the best option that executes sparse weights in the other way.
    """
    costs, cut = best.costs, best.cut
    assert cut is not None
    # The last block of a gathered loss is its tail; the profile of block-sparse weights counts those present alone.
    divided = profile if costs.profile.tail is None else costs.profile
    strategy, choices = best.strategy, dict(vars(best.strategy))
    del choices["chunks"], choices["recompute"]
    prediction = predict(costs, cut, costs.times(cut.stages), request)

    # A batch that changes has a step of its own in each stretch, in the same stages.
    ramp_notes, each, training_ms = list[str](), list[str](), 0.0
    for batch, steps in request.ramp:
        count = batch // strategy.data // strategy.micro_batch
        of_stretch = costs.model.of(replace(strategy, num_microbatches=count))
        predicted = predict(of_stretch, cut, of_stretch.times(cut.stages), replace(request, global_batch=batch))
        each.append(f"{steps:,} of {batch:,} samples in {duration(predicted.step_ms / 1e3)} each")
        training_ms += steps * predicted.step_ms
    if each:
        prediction = replace(prediction, training_s=training_ms / 1e3)
        ramp_notes = [
            f"The batch changes: {', '.join(each)}, {duration(prediction.training_s)} together. Memory and all other "
            "figures are those of the largest batch."
        ]

    # Rows of the table: the options nearest to the best one, those that do not fit by the memory that they lack.
    fitting = sorted((o for o in options if o.may_fit), key=lambda option: (option is not best, option.least_ms))
    rejected = sorted((o for o in options if not o.may_fit), key=lambda option: option.least_bytes)[:MAX_REJECTED]
    rows = (*fitting[: MAX_ROWS - len(rejected)], *rejected)

    stages = _stages(costs, cut, ParameterTable(divided).elements)
    if request.evaluated:
        prediction = replace(prediction, evaluation_s=evaluation_s(stages, strategy, request, bool(profile.coupled)))

    # Sentences of capture hold where the batch is divided, or state goes from one micro-batch to the next.
    is_divided = not strategy.gathers and strategy.data * strategy.num_microbatches > 1
    carries_state = not strategy.gathers and strategy.num_microbatches > 1
    loss_depends = profile.notes_if_accumulated if carries_state else ()
    plan = Plan(
        model=profile.model,
        signature=profile.signature,
        cluster=request.cluster,
        global_batch=request.global_batch,
        seq_len=request.seq_len,
        precision=profile.precision,
        block_names=tuple(block.name for block in divided.blocks),
        stages=stages,
        memory_limit_bytes=request.memory_limit_bytes,
        flops_per_step=round(profile.flops_per_sample * request.global_batch),
        prediction=prediction,
        coupled=bool(profile.coupled),
        notes=(
            *profile.notes,
            *(profile.notes_if_divided if is_divided else ()),
            *loss_depends,
            *_opaque_note(divided, costs),
            *(_coupling_note(operation, best, request) for operation in profile.coupled),
            *weights_note(profile, request, best, other),
            *ramp_notes,
        ),
        loss_depends=loss_depends,
        candidates=tuple(_row(option, best, request) for option in rows),
        shares_matrices=_shares_matrices(divided, strategy, request.cluster, stages),
        computation=None if profile.facts is None else profile.facts.computation,
        **choices,
    )
    object.__setattr__(plan, "origin", (profile, request))
    return plan


def _shares_matrices(
    profile: Profile, strategy: Strategy, cluster: Cluster, stages: Sequence[Stage]
) -> tuple[bool, ...]:
    """Return, for each pipeline rank, if its devices share out the matrices that are updated as a whole."""
    whole = {name: update for name, update in profile.parameter_updates.items() if update.whole_elements}
    found = []
    for rank in range(strategy.pipeline if whole else 0):
        held_by = (profile.blocks[s.first_block : s.end_block] for s in stages[rank :: strategy.pipeline])
        names = {name for block in chain.from_iterable(held_by) for name in block.parameters}
        held = [update for name, update in whole.items() if name in names]
        matrices = Matrices(
            flops=sum(update.whole_flops for update in held),
            elements=sum(update.whole_elements for update in held),
            divided_elements=0,  # where the tensor-parallel axis divides them, they are shared out in any case
            largest_flops=max((update.whole_flops for update in held), default=0.0),
            gram_elements=sum(update.gram_elements for update in held),
            shapes=len({(update.whole_elements, update.whole_flops) for update in held}),
        )
        found.append(shares_out(matrices, strategy, cluster))
    return tuple(found)


def _opaque_note(profile: Profile, costs: StrategyCosts) -> tuple[str, ...]:
    """Return a sentence on the share of the step that blocks with opaque calls take; none for other models."""
    block_ms = costs.blocks.forward_ms + costs.blocks.backward_ms
    shares = {
        labels: sum(block_ms[at] for at, block in enumerate(profile.blocks) if block.opaque == labels) / block_ms.sum()
        for labels in dict.fromkeys(block.opaque for block in profile.blocks if block.opaque)
    }
    if not shares:
        return ()
    largest = sorted(shares.items(), key=lambda item: -item[1])
    each = [f"{' and '.join(labels)} {share:.1%}" for labels, share in largest[:MAX_OPAQUE]]
    rest = [f"{len(largest) - MAX_OPAQUE} others the rest"] if len(largest) > MAX_OPAQUE else []
    return (
        f"Of the predicted time of forward and backward, {sum(shares.values()):.1%} goes to the layers that run as "
        f"written, with what stands beside them in their blocks: {', '.join([*each, *rest])}.",
    )


def _coupling_note(operation: str, best: Option, request: Request) -> str:
    strategy, tail = best.strategy, best.costs.profile.tail
    said = f"The loss compares samples of one batch ({operation}), so that the plan"
    if tail is None:
        return f"{said} keeps the global batch in one micro-batch on one replica."
    count, size = strategy.num_microbatches, gib(tail.gathered_bytes)
    micro = f"{count} micro-batches, each of which runs forward twice" if count > 1 else "one micro-batch"
    replicas = f", on each of {strategy.data} replicas" if strategy.data > 1 else ""
    return (
        f"{said} gathers what lies before the comparison, {size} of {request.global_batch} samples in {micro}"
        f"{replicas}: loss and gradients are those of the whole batch, "
        + ("as numbers confirm." if tail.is_compared else UNCONFIRMED)
    )


def _stages(costs: StrategyCosts, cut: Cut, elements: Array) -> tuple[Stage, ...]:
    times, cutter, mixed, modes = costs.times(cut.stages), Cutter(costs), cut.stages, costs.model.modes
    pipeline = costs.strategy.pipeline
    at_peak = [cutter.fullest_moment(rank, cut)[0] for rank in range(pipeline)]
    crossing, state, hidden = costs.profile.crossing_bytes, cutter.state, overlapped(costs, cut.stages)
    again = {"full": costs.blocks.full_recompute_ms, "selective": costs.blocks.selective_recompute_ms}
    stages = []
    for s, (i, j) in enumerate(pairwise(cut.cuts)):
        recomputed = int(mixed.middle[s]) - i
        is_mixed = 0 < recomputed < j - i
        to_come = cutter.gradients_to_come(cut, s)
        block_ms = costs.blocks.forward_ms[i:j] + costs.blocks.backward_ms[i:j]
        for mode, part in ((mixed.heavier[s], slice(recomputed)), (mixed.lighter[s], slice(recomputed, None))):
            if modes[mode] in again:
                block_ms[part] += again[modes[mode]][i:j][part]
        stages.append(
            Stage(
                index=s,
                first_block=i,
                end_block=j,
                parameters=int(elements[i, j]),
                tied_parameters=int(elements[i, j] + elements[0, i] - elements[0, j]),
                forward_ms=float(times.forward[s] + times.forward_wait[s]),
                backward_ms=float(times.backward[s] + times.backward_wait[s]),
                send_bytes=int(crossing[j] * costs.strategy.micro_batch) if j < len(crossing) - 1 else 0,
                recompute=modes[mixed.heavier[s]],
                memory=Memory(
                    parameters=int(state.parameters[i, j]),
                    gradients=int(state.gradients[i, j] - to_come),
                    optimizer=int(state.optimizer[i, j]),
                    activations=int(at_peak[s % pipeline][s // pipeline] - state.total[i, j] + to_come),
                    workspace=int(state.workspace[i, j]),
                ),
                recompute_first=recomputed if is_mixed else None,
                recompute_rest=modes[mixed.lighter[s]] if is_mixed else "none",
                host_bytes=cutter.host_bytes(i, j),
                forward_wait_ms=float(times.forward_wait[s]),
                backward_wait_ms=float(times.backward_wait[s]),
                host_wait_ms=float(times.host_wait[s]),
                overlapped_ms=(float(hidden[0][s]), float(hidden[1][s]), float(hidden[2][s])),
                end_wait_ms=float(times.step_wait[s]),
                optimizer_ms=float(times.optimizer[s]),
                block_shares=tuple((block_ms / block_ms.sum()).round(6).tolist()) if block_ms.any() else (),
            )
        )
    return tuple(stages)


def _row(option: Option, best: Option, request: Request) -> Candidate:
    recomputed: dict[str, int] = {}
    choices = dict(vars(option.strategy))
    if option.cut is not None:
        mixed, modes = option.cut.stages, option.costs.model.modes
        blocks = np.zeros(len(modes), dtype=int)
        np.add.at(blocks, mixed.heavier, mixed.middle - mixed.first)
        np.add.at(blocks, mixed.lighter, mixed.end - mixed.middle)
        recomputed = dict(zip(modes, blocks.tolist(), strict=True))
        choices["recompute"] = common_recompute(recomputed)
    return Candidate(
        step_ms=option.least_ms if option.may_fit else None,
        peak_bytes=int(option.least_bytes) if option.weighed and np.isfinite(option.least_bytes) else None,
        verdict=_verdict(option, best, request),
        bubble_fraction=option.bubble_fraction,
        selective_blocks=recomputed.get("selective", 0),
        full_blocks=recomputed.get("full", 0),
        **choices,
    )


def _verdict(option: Option, best: Option, request: Request) -> str:
    if option is best:
        return "chosen"
    if not option.may_fit and not np.isfinite(option.least_bytes):
        return f"{host_need(Cutter(option.costs).least_host, request)} fall to one"
    if not option.may_fit:
        needed, offered = apart(option.least_bytes, request.offered_bytes)
        return f"needs at least {needed} of {offered}"
    assert best.step_ms is not None
    if option.step_ms is not None and option.step_ms < best.step_ms:
        is_alike = option.strategy.block_sparse == best.strategy.block_sparse
        condition = "its host keeps up" if is_alike else "the price of stored blocks is exact"
        return f"{1 - option.step_ms / best.step_ms:.1%} faster, if {condition}"
    step, least = (option.step_ms, "") if option.step_ms is not None else (option.bound_ms, "at least ")
    return f"{least}{step / best.step_ms - 1:.1%} slower"


def weights_note(profile: Profile, request: Request, best: Option, other: Option | None) -> tuple[str, ...]:
    """Return one note for a model with sparse weights, none for others.

    `other` is the best option that executes the weights in the other way than `best`, if one was found.
    """
    sparse = profile.sparse
    if sparse is None:
        return ()
    block = f"{sparse.block} × {sparse.block}"
    what = f"Of the {block} blocks of the sparse weights, {100 * sparse.sparsity:.3g} % are absent. The weights are"
    if best.strategy.block_sparse:
        how = "block-sparse (only present blocks are stored, multiplied and optimised)"
    else:
        how = "dense and masked"
    if best.strategy.block_sparse:
        why = ", because block_sparse is True" if request.fixed.block_sparse else ", because no other plan fits"
    elif request.fixed.block_sparse is False:
        why = ", because block_sparse is False"
    else:
        obstacle = sparse.obstacle_on(request.cluster.device, profile.precision)
        why = f", because {obstacle or 'every plan that fits divides them over devices'}"
    if other is not None:
        name = "dense and masked" if best.strategy.block_sparse else "block-sparse"
        why = f": {_figures(best)} are predicted, and {_figures(other)} for the best plan with {name} ones"
        if not best.strategy.block_sparse and other.least_ms < best.least_ms and request.fixed.block_sparse is None:
            why += f", which are taken where they save {STORED_BLOCKS_GAIN:.0%} or more"
    break_even = ""
    if sparse.products is not None:
        at = break_even_sparsity(sparse.products, request.cluster.device)
        faster = f"faster than dense ones from a sparsity of {at:.2f}" if at < 1 else "never faster than dense ones"
        break_even = (
            f" By times measured on one H100 and one H200, products with blocks of {sparse.block} are {faster} here."
        )
    return (f"{what} {how}{why}.{break_even}",)


def _figures(option: Option) -> str:
    return f"{duration(option.least_ms / 1e3)} a step and {gib(option.least_bytes)} a device"
