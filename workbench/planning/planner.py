"""The search: every combination of degrees, the best cut of each, and the fastest that fits.

Nothing is sampled. An option is cut and simulated unless a lower bound of its step already exceeds the best step found.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from workbench.cost.cluster import Cluster
from workbench.cost.memory import StageState
from workbench.cost.profiles import RECOMPUTE, Profile
from workbench.errors import PlanInfeasible, PlanMismatch
from workbench.planning.basis import basis
from workbench.planning.cutting import Cut, Cutter
from workbench.planning.plan import INTERLEAVED, Candidate, Memory, Plan, Prediction, Stage, recompute_of_all
from workbench.planning.pricing import Array, Degrees, DeviceCosts, Pricer, StageTimes
from workbench.planning.refusals import apart, host_need, host_too_small, nothing_to_weigh, too_large
from workbench.planning.requests import Request, check, check_cluster, divisors
from workbench.planning.schedules import StageCosts, rounds, step_ms

CHUNKS = (1, 2, 3, 4)
"""Stages of one pipeline rank that are tried under an interleaved schedule, of two blocks or more on average unless
the user asked for such a schedule."""
MAX_SETTLED = 80
"""Options that are weighed after the best is known, so that a table of the fastest has steps and not bounds."""
HEDGE = 0.02
"""Of a step, what is given up for CUDA graphs where a host that is slower than when it was measured would be waited
for."""
MAX_ROWS = 400
"""Options that a plan lists, nearest to the chosen one first."""
MAX_REJECTED = 60
"""Of these, such as do not fit, nearest to fitting first."""


def checked_search(profile: Profile, precision: str, request: Request) -> Search:
    """Raises for what no search can satisfy; see `workbench.planning.search`."""
    check_cluster(request.cluster)
    check_profile(profile, precision, request.cluster)
    check(request, profile)
    return Search(profile, request)


def check_profile(profile: Profile, precision: str, cluster: Cluster) -> None:
    """Raise `PlanMismatch` for one that was made for another precision or kind of device."""
    device = cluster.device
    if (profile.precision, profile.device_type) != (precision, device.type):
        raise PlanMismatch(
            f"The profile of {profile.model} is for {profile.precision} on {profile.device_type}, and the plan is for "
            f"{precision} on {device.type}. Make the profile again for {device.name} with wb.profile(experiment, "
            f"cluster), or plan in {profile.precision} on a {profile.device_type} cluster.",
            profiled=profile.precision,
            planned=precision,
        )


@lru_cache(maxsize=8)
def _device_costs(profile: Profile, device: object) -> DeviceCosts:
    """What a slider's every move shares."""
    return DeviceCosts(profile, device)  # type: ignore[arg-type]


@dataclass
class _Option:
    """One point of the search: its best cut, or why it has none."""

    degrees: Degrees
    bound_ms: float
    """No step of this option is shorter."""
    least_bytes: float
    """No cut of this option needs less on its fullest device."""
    cut: Cut | None = None
    step_ms: float | None = None
    bubble_fraction: float | None = None
    weighed: bool = False

    @property
    def may_fit(self) -> bool:
        return self.cut is not None or not self.weighed

    @property
    def least_ms(self) -> float:
        """Its step, or what that is at least."""
        return self.bound_ms if self.step_ms is None else self.step_ms


class Search:
    def __init__(self, profile: Profile, request: Request) -> None:
        self.profile = profile
        self.request = request
        allowed = request.runnable.recompute if request.recompute is None else (request.recompute,)
        self.kinds = tuple(kind for kind in RECOMPUTE if kind in allowed)
        self.pricer = Pricer(_device_costs(profile, request.cluster.device), request.cluster, self.kinds)
        self.searched = 0
        self._basis = basis(profile, request.cluster.device)
        self._weighed: dict[Degrees, _Option] = {}

    def plan(self, known: int = 1) -> Plan:
        """The fastest that fits; `searched` then says how many options there were.

        Of so many of the fastest, not of the first alone, `Plan.candidates` then has the step and not a bound.
        """
        options = sorted(map(self._option, self._degrees()), key=lambda option: option.bound_ms)
        self.searched = len(options)
        if not options:
            raise nothing_to_weigh(self.profile, self.request, lambda other: Search(self.profile, other).has_options())
        best: _Option | None = None
        for option in options:
            if best is not None and best.step_ms is not None and option.bound_ms >= best.step_ms:
                break
            if not self._is_dominated(option):
                self._weigh(option, np.inf if best is None or best.step_ms is None else best.step_ms)
            if option.step_ms is None:
                continue
            if best is None or best.step_ms is None or option.step_ms < best.step_ms:
                best = option
        if best is None:
            degrees, needed = self._leanest(options)
            if not np.isfinite(needed):
                host = min(Cutter(self.pricer, option.degrees).least_host for option in options)
                raise host_too_small(self.profile, self.request, host)
            raise too_large(self.profile, self.request, len(options), (degrees, needed), self.kinds[-1], self._fits)
        best = self._steadier(best, options)
        self._settle(options, known)
        return self._plan(best, options)

    def _steadier(self, best: _Option, options: list[_Option]) -> _Option:
        """The same with CUDA graphs, where the memory that these take costs little: a plan whose host needs a good part
        of the device's time is as fast as predicted only where the host is as fast as when it was measured."""
        assert best.step_ms is not None
        recorded = replace(best.degrees, cuda_graphs=True)
        for option in options:
            if option.degrees == recorded and option is not best:
                self._weigh(option, np.inf)
                if option.step_ms is not None and option.step_ms <= (1 + HEDGE) * best.step_ms:
                    return option
        return best

    def _settle(self, options: list[_Option], known: int) -> None:
        """Weigh what by its bound may be one of the fastest, until so many of these are known, or `MAX_SETTLED` are."""
        queue = [(option.least_ms, number) for number, option in enumerate(options) if option.may_fit]
        heapq.heapify(queue)
        most = len(self._weighed) + MAX_SETTLED
        while queue and known > 0 and len(self._weighed) < most:
            _, number = heapq.heappop(queue)
            option = options[number]
            if option.step_ms is not None:
                known -= 1
                continue
            self._weigh(option, np.inf)
            if option.may_fit:
                heapq.heappush(queue, (option.least_ms, number))

    def _leanest(self, options: list[_Option]) -> tuple[Degrees, float]:
        """Which option needs least, and how much; those that are known to need more are not cut for it."""
        found, least = options[0].degrees, np.inf
        for option in sorted(options, key=lambda option: option.least_bytes):
            if option.least_bytes >= least:
                break
            needed = Cutter(self.pricer, option.degrees).leanest()
            if needed < least:
                found, least = option.degrees, needed
        return found, float(least)

    def _fits(self, other: Request) -> bool:
        try:
            return bool(Search(self.profile, other).plan())
        except PlanInfeasible:
            return False

    # What there is to weigh

    def has_options(self) -> bool:
        return next(self._degrees(), None) is not None

    def _degrees(self) -> Iterator[Degrees]:
        request = self.request
        for pipeline, data, tensor in self._grids():
            share = request.global_batch // data
            for micro_batch in [request.micro_batch] if request.micro_batch else divisors(share):
                num_microbatches, rest = divmod(share, micro_batch)
                if rest:
                    continue
                for schedule, chunks in self._schedules(pipeline, num_microbatches):
                    for zero in self._zero_stages(data, schedule, num_microbatches):
                        for offload in self._offloads():
                            yield from self._with_and_without_graphs(
                                Degrees(
                                    pipeline,
                                    data,
                                    tensor,
                                    zero,
                                    schedule,
                                    chunks,
                                    offload,
                                    micro_batch,
                                    num_microbatches,
                                )
                            )

    def _grids(self) -> Iterator[tuple[int, int, int]]:
        """Degrees that use all devices and leave each replica an equal share of the batch."""
        request = self.request
        gpus = request.cluster.gpus
        for tensor in self._tensor_degrees():
            for pipeline in divisors(gpus // tensor):
                data = gpus // tensor // pipeline
                wanted = request.pipeline in (None, pipeline) and request.data in (None, data)
                if wanted and pipeline <= len(self.profile.blocks) and request.global_batch % data == 0:
                    yield pipeline, data, tensor

    def _tensor_degrees(self) -> list[int]:
        """Within a node, where the model's blocks can be divided so; fixed by the user, anywhere."""
        request = self.request
        if request.tensor is not None:
            return [request.tensor]
        if not request.runnable.tensor:
            return [1]
        near = divisors(min(request.cluster.gpus, request.cluster.gpus_per_node))
        return [d for d in near if request.cluster.gpus % d == 0 and self.profile.divides(d)]

    def _schedules(self, pipeline: int, num_microbatches: int) -> Iterator[tuple[str, int]]:
        """Schedules that torch runs with so many micro-batches; GPipe only where asked for, or 1F1B cannot run.

        A zero-bubble schedule's blocks run uncompiled: a compiled profile does not price them.
        """
        request = self.request
        runnable = request.runnable.schedules
        names = runnable if request.schedule is None else (request.schedule,)
        if request.schedule is None:
            plain = "gpipe" if num_microbatches < pipeline or "1f1b" not in runnable else "1f1b"
            names = tuple(name for name in names if name == plain or (name in INTERLEAVED and pipeline > 1))
        for name in names:
            if name == "zero_bubble" and self.profile.compiled:
                continue
            if name not in INTERLEAVED:
                if (name == "gpipe" or num_microbatches >= pipeline) and request.chunks in (None, 1):
                    yield name, 1
                continue
            if pipeline == 1 or num_microbatches % rounds(pipeline, num_microbatches):
                continue
            for chunks in CHUNKS if request.chunks is None else (request.chunks,):
                is_1f1b = name == "interleaved" and chunks == 1 and request.chunks is None and pipeline > 1
                asked = request.chunks or request.schedule in INTERLEAVED
                most = len(self.profile.blocks) // (1 if asked or chunks == 1 else 2)
                if chunks * pipeline <= most and not is_1f1b:
                    yield name, chunks

    def _zero_stages(self, data: int, schedule: str, num_microbatches: int) -> tuple[int, ...]:
        """On one replica there is nothing to shard. In a step of one micro-batch ZeRO 1 and 2 are the same: which is
        faster is a matter of rounding. A zero-bubble schedule's backward leaves nothing that FSDP2 could reduce."""
        if data == 1:
            return () if self.request.zero else (0,)
        wanted = self.request.runnable.zero_stages if self.request.zero is None else (self.request.zero,)
        if num_microbatches == 1 and 1 in wanted:
            wanted = tuple(stage for stage in wanted if stage != 2)
        return tuple(stage for stage in wanted if stage == 0) if schedule == "zero_bubble" else wanted

    def _offloads(self) -> tuple[bool, ...]:
        if self.request.offload_optimizer is not None:
            return (self.request.offload_optimizer,)
        has_a_host = self.request.cluster.device.type != "cpu"
        return (False, True) if self.request.runnable.offload_optimizer and has_a_host else (False,)

    def _with_and_without_graphs(self, degrees: Degrees) -> Iterator[Degrees]:
        """With them only where the host would need a good part of the device's time: they take memory."""
        asked = self.request.cuda_graphs
        weighed = self.request.runnable.cuda_graphs if asked is None else asked
        if weighed and self.pricer.records(degrees) and (asked or self.pricer.is_launched_late(degrees)):
            yield replace(degrees, cuda_graphs=True)
        if not asked:
            yield degrees

    def _option(self, degrees: Degrees) -> _Option:
        """With what can be said of it before it is cut."""
        whole = self.pricer.whole(degrees)
        ranks, count, busy = degrees.pipeline, degrees.num_microbatches, float(whole.busy)
        length = count * busy / ranks
        if degrees.schedule not in INTERLEAVED:
            # Stage s cannot start before the first micro-batch has passed the stages above, nor end before its last
            # one goes back up: busy_0 + … + busy_{s-1} + m · busy_s. The least that this can be for every s at once:
            length = busy / (1 - (1 - 1 / count) ** ranks)
        state = self.pricer.whole_state(degrees)
        return _Option(degrees, length + float(whole.ending) / ranks, state / ranks)

    def _is_dominated(self, option: _Option) -> bool:
        """Moving the optimiser's state to the host gains nothing where everything fits as it is, nothing recomputed."""
        if not option.degrees.offload_optimizer:
            return False
        twin = self._weighed.get(replace(option.degrees, offload_optimizer=False))
        if twin is None or twin.cut is None or any(twin.cut.levels):
            return False
        option.bound_ms = max(option.bound_ms, twin.bound_ms if twin.step_ms is None else twin.step_ms)
        return True

    # Cutting

    def _weigh(self, option: _Option, best_ms: float) -> None:
        """Cut an option, and simulate it unless its stages show that it cannot win."""
        option.weighed = True
        self._weighed[option.degrees] = option
        if option.least_bytes > self.request.offered_bytes:
            return
        cutter = Cutter(self.pricer, option.degrees)
        option.cut, option.least_bytes = cutter.best(self.request.offered_bytes)
        if option.cut is not None:
            times = self.pricer.times(option.degrees, option.cut.stages)
            option.bound_ms = max(option.bound_ms, self._bound(option.degrees, option.cut, times))
            if option.bound_ms < best_ms:
                prediction = self._predict(option.degrees, option.cut, times)
                option.step_ms, option.bubble_fraction = prediction.step_ms, prediction.bubble_fraction

    def _bound(self, degrees: Degrees, cut: Cut, times: StageTimes) -> float:
        """The longest of these: all of a rank's own work, before it what a first micro-batch takes down to its first
        stage, and after it what a last one takes back up; then the step's end. (Where weights' gradients may come last,
        nothing goes up after them.)"""
        busy, ends = times.busy, times.ending
        longest = degrees.num_microbatches * _of_ranks(busy, degrees)
        if degrees.schedule != "zero_bubble":
            above = slice(degrees.pipeline - 1)
            sends = self._sends(degrees, cut)
            longest = longest + np.concatenate([[0.0], np.cumsum(busy[above] + 2 * sends[above])])
        return float(longest.max() + _of_ranks(ends, degrees).max())

    def _sends(self, degrees: Degrees, cut: Cut) -> Array:
        """From each stage to the next; 0 after the last."""
        send = self.pricer.send_ms(degrees)
        return np.array([row[j] for row, j in zip(send, cut.cuts[1:], strict=True)])

    # Predicting

    def _predict(self, degrees: Degrees, cut: Cut, times: StageTimes) -> Prediction:
        count = degrees.num_microbatches
        forward, backward = times.forward, times.backward
        waits = times.forward_wait + times.backward_wait
        costs = StageCosts(
            (forward + times.forward_wait).tolist(),
            (backward + times.backward_wait).tolist(),
            times.weight.tolist(),
            self._sends(degrees, cut).tolist(),
        )
        length, bubble = step_ms(degrees.schedule, degrees.pipeline, count, costs)
        ends = _of_ranks(times.ending, degrees)
        tied = self.pricer.tied_ms(degrees, cut.cuts)
        total = length + float(ends.max()) + tied
        last, busiest = int(ends.argmax()), int(_of_ranks(forward + backward + waits, degrees).argmax())
        late = count * float(_of_ranks(times.late, degrees)[busiest])
        compute = count * float(_of_ranks(forward + backward, degrees)[busiest]) - late
        waiting = count * float(_of_ranks(waits, degrees)[busiest])
        return Prediction(
            step_ms=total,
            compute_ms=compute,
            bubble_ms=length - compute - late - waiting,
            communication_ms=waiting + float(_of_ranks(times.step_wait, degrees)[last]) + tied,
            optimizer_ms=float(_of_ranks(times.optimizer, degrees)[last]),
            bubble_fraction=bubble,
            tokens_per_s=self.request.global_batch * self.request.seq_len / (total / 1e3),
            mfu=self._mfu(total),
            host_ms=late,
            basis=self._basis,
        )

    def _mfu(self, step: float) -> float | None:
        cluster = self.request.cluster
        if cluster.device.type == "cpu":
            return None
        peak = cluster.gpus * cluster.device.peak(self.profile.precision)
        return self.profile.flops_per_sample * self.request.global_batch / (step / 1e3) / peak

    # The answer

    def _plan(self, best: _Option, options: list[_Option]) -> Plan:
        request, degrees = self.request, best.degrees
        assert best.cut is not None
        plan = Plan(
            model=self.profile.model,
            signature=self.profile.signature,
            cluster=request.cluster,
            global_batch=request.global_batch,
            seq_len=request.seq_len,
            precision=self.profile.precision,
            pipeline=degrees.pipeline,
            data=degrees.data,
            tensor=degrees.tensor,
            zero=degrees.zero,
            schedule=degrees.schedule,
            micro_batch=degrees.micro_batch,
            num_microbatches=degrees.num_microbatches,
            block_names=tuple(block.name for block in self.profile.blocks),
            stages=self._stages(degrees, best.cut),
            memory_limit_bytes=request.memory_limit_bytes,
            flops_per_step=round(self.profile.flops_per_sample * request.global_batch),
            prediction=self._predict(degrees, best.cut, self.pricer.times(degrees, best.cut.stages)),
            candidates=self._rows(best, options),
            offload_optimizer=degrees.offload_optimizer,
            cuda_graphs=degrees.cuda_graphs,
        )
        plan.__dict__["_origin"] = (self.profile, request)
        return plan

    def _stages(self, degrees: Degrees, cut: Cut) -> tuple[Stage, ...]:
        times, cutter, mixed = self.pricer.times(degrees, cut.stages), Cutter(self.pricer, degrees), cut.stages
        shares = [cutter.shares(rank, cut) for rank in range(degrees.pipeline)]
        crossing = self.profile.crossing_bytes
        found = []
        for s, (i, j) in enumerate(pairwise(cut.cuts)):
            at_peak = shares[s % degrees.pipeline][s // degrees.pipeline]
            recomputed = int(mixed.middle[s]) - i
            found.append(
                Stage(
                    index=s,
                    first_block=i,
                    end_block=j,
                    parameters=int(self.pricer.elements[i, j]),
                    forward_ms=float(times.forward[s] + times.forward_wait[s]),
                    backward_ms=float(times.backward[s] + times.backward_wait[s]),
                    send_bytes=int(crossing[j] * degrees.micro_batch) if j < len(crossing) - 1 else 0,
                    recompute=self.kinds[mixed.heavier[s]],
                    memory=_memory(cutter.state, i, j, at_peak, cutter.gradients_to_come(cut, s)),
                    weight_ms=float(times.weight[s]),
                    recompute_first=recomputed if 0 < recomputed < j - i else None,
                    recompute_rest=self.kinds[mixed.lighter[s]] if 0 < recomputed < j - i else "none",
                )
            )
        return tuple(found)

    def _rows(self, best: _Option, options: list[_Option]) -> tuple[Candidate, ...]:
        rows = [self._row(option, best) for option in options]
        fitting = [row for row in rows if row.step_ms is not None]
        rejected = [row for row in rows if row.step_ms is None]
        fitting.sort(key=lambda row: (row.verdict != "chosen", row.step_ms))
        rejected.sort(key=lambda row: (row.peak_bytes is None, row.peak_bytes))
        rejected = rejected[:MAX_REJECTED]
        return (*fitting[: MAX_ROWS - len(rejected)], *rejected)

    def _row(self, option: _Option, best: _Option) -> Candidate:
        degrees, cut, blocks = option.degrees, option.cut, len(self.profile.blocks)
        recomputed = self._recomputed(cut)
        return Candidate(
            pipeline=degrees.pipeline,
            data=degrees.data,
            tensor=degrees.tensor,
            zero=degrees.zero,
            recompute=self.kinds[0] if len(self.kinds) == 1 else recompute_of_all(recomputed, blocks) if cut else "any",
            schedule=degrees.schedule,
            chunks=degrees.chunks,
            offload_optimizer=degrees.offload_optimizer,
            micro_batch=degrees.micro_batch,
            step_ms=option.least_ms if option.may_fit else None,
            peak_bytes=int(option.least_bytes) if option.weighed and np.isfinite(option.least_bytes) else None,
            verdict=self._verdict(option, best),
            bubble_fraction=option.bubble_fraction,
            selective_blocks=recomputed.get("selective", 0),
            full_blocks=recomputed.get("full", 0),
            cuda_graphs=degrees.cuda_graphs,
        )

    def _recomputed(self, cut: Cut | None) -> dict[str, int]:
        """How many blocks are recomputed by each kind."""
        if cut is None:
            return {}
        mixed, blocks = cut.stages, np.zeros(len(self.kinds), dtype=int)
        np.add.at(blocks, mixed.heavier, mixed.middle - mixed.first)
        np.add.at(blocks, mixed.lighter, mixed.end - mixed.middle)
        return dict(zip(self.kinds, blocks.tolist(), strict=True))

    def _verdict(self, option: _Option, best: _Option) -> str:
        if option is best:
            return "chosen"
        if option.weighed and option.cut is None and not np.isfinite(option.least_bytes):
            host = Cutter(self.pricer, option.degrees).least_host
            return f"{host_need(host, self.request)} fall to one"
        if option.weighed and option.cut is None:
            needed, offered = apart(option.least_bytes, self.request.offered_bytes)
            return f"needs at least {needed} of {offered}"
        assert best.step_ms is not None
        if option.step_ms is not None and option.step_ms < best.step_ms:
            return f"{1 - option.step_ms / best.step_ms:.1%} faster, if its host keeps up"
        step, least = (option.step_ms, "") if option.step_ms is not None else (option.bound_ms, "at least ")
        return f"{least}{step / best.step_ms - 1:.1%} slower"


def _of_ranks(values: Array, degrees: Degrees) -> Array:
    """Sums over the stages of each pipeline rank."""
    return np.asarray(values.reshape(degrees.chunks, degrees.pipeline).sum(axis=0))


def _memory(state: StageState, i: int, j: int, total: float, gradients_to_come: float) -> Memory:
    """The kinds of memory that make up `total` bytes of a stage."""
    return Memory(
        parameters=int(state.parameters[i, j]),
        gradients=int(state.gradients[i, j] - gradients_to_come),
        optimizer=int(state.optimizer[i, j]),
        activations=int(total - state.total[i, j] + gradients_to_come),
        workspace=int(state.workspace[i, j]),
    )
