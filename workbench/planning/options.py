"""The options of a search: every strategy that the runtime runs and the request allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from workbench.cost.profile import Profile
from workbench.planning.device_costs import device_costs
from workbench.planning.request import Request, divisors, no_kernels, unknown_rates
from workbench.planning.stage_costs import ClusterCosts, StrategyCosts
from workbench.planning.stage_cuts import Cut
from workbench.strategy import RECOMPUTE, SCHEDULES, ZERO, Strategy


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
            # one goes back up: busy_0 + … + busy_{s-1} + m · busy_s. The least that this can be for every s at once:
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
    obstacle = no_kernels(cluster.device) or ("" if sparse else unknown_rates(profile.precision))
    forms = [] if sparse else [profile]  # of dense or masked weights, and of block-sparse ones
    if sparse is not False and profile.block_sparse is not None and not obstacle:
        forms.append(profile.block_sparse)
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
