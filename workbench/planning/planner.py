"""`search`: every combination of degrees, the best cut of each, and the fastest that fits.

Nothing is sampled. An option is simulated unless a lower bound of its step already exceeds the best step found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from workbench.cost.cluster import Cluster
from workbench.cost.memory import StageMemory
from workbench.cost.profiles import Profile
from workbench.errors import PlanInfeasible, PlanMismatch, checked_keywords
from workbench.planning.partition import partition
from workbench.planning.plan import Candidate, Memory, Plan, Prediction, Stage
from workbench.planning.pricing import Array, Degrees, Pricer, StageTimes
from workbench.planning.requests import RUNNABLE, Request, check, divisors
from workbench.planning.schedules import most_in_flight, step_ms
from workbench.units import gib


@checked_keywords
def search(
    profile: Profile,
    *,
    global_batch: int,
    seq_len: int,
    precision: str,
    cluster: Cluster,
    memory_limit_bytes: int | None = None,
    pipeline: int | None = None,
    data: int | None = None,
    zero: int | None = None,
    micro_batch: int | None = None,
    recompute: str | None = None,
    schedule: str | None = None,
) -> Plan:
    """The fastest plan that fits, with every option that was weighed in `Plan.candidates`.

    Searched: pipeline × data degrees that use all devices, ZeRO 0, 2 and 3, activation checkpointing, and
    micro-batches that divide each replica's share; each argument given fixes its own. Stages are cut so that
    the slowest is as fast as can be within memory.

    Raises `PlanInfeasible` when nothing fits or the degrees contradict the cluster or the batch, `PlanMismatch`
    when the profile was made for another precision or kind of device.
    """
    _check_profile(profile, precision, cluster)
    request = Request(
        global_batch,
        seq_len,
        cluster,
        memory_limit_bytes,
        pipeline,
        data,
        zero,
        micro_batch,
        recompute,
        schedule or "1f1b",
    )
    check(request, profile)
    return _Search(profile, request).plan()


def _check_profile(profile: Profile, precision: str, cluster: Cluster) -> None:
    if (profile.precision, profile.device_kind) != (precision, cluster.device.kind):
        raise PlanMismatch(
            f"The profile of {profile.model} is for {profile.precision} on {profile.device_kind}, and the plan is for "
            f"{precision} on {cluster.device.kind}. Make the profile again for {cluster.device.name}.",
            profiled=profile.precision,
            planned=precision,
        )


@dataclass
class _Option:
    """One point of the search: its best cut, or why it has none."""

    degrees: Degrees
    cuts: tuple[int, ...] | None
    peak_bytes: float
    """Of the cut; without one, the least that any cut needs."""
    bound_ms: float = np.inf
    """No step of this option is shorter."""
    step_ms: float | None = None


class _Search:
    def __init__(self, profile: Profile, request: Request) -> None:
        self.profile = profile
        self.request = request
        self.pricer = Pricer(profile, request.cluster)

    def plan(self) -> Plan:
        options = [self._cut(degrees) for degrees in self._degrees()]
        if not options:
            raise self._indivisible()
        fitting = sorted((o for o in options if o.cuts), key=lambda o: (o.bound_ms, o.peak_bytes))
        if not fitting:
            raise self._too_large(options)
        best: _Option | None = None
        for option in fitting:
            if best is not None and best.step_ms is not None and option.bound_ms >= best.step_ms:
                break
            option.step_ms = self._predict(option).step_ms
            if best is None or best.step_ms is None or option.step_ms < best.step_ms:
                best = option
        assert best is not None
        return self._plan(best, options)

    # What there is to weigh

    def _degrees(self) -> Iterator[Degrees]:
        request = self.request
        blocks = len(self.profile.blocks)
        for pipeline in divisors(request.cluster.gpus):
            data = request.cluster.gpus // pipeline
            wanted = request.pipeline in (None, pipeline) and request.data in (None, data)
            if not wanted or pipeline > blocks or request.global_batch % data:
                continue
            share = request.global_batch // data
            for micro_batch in [request.micro_batch] if request.micro_batch else divisors(share):
                num_microbatches, rest = divmod(share, micro_batch)
                if rest or (request.schedule == "1f1b" and num_microbatches < pipeline):
                    continue
                for zero in self._zero_stages(data):
                    for recompute in RUNNABLE.recompute if request.recompute is None else (request.recompute,):
                        yield Degrees(pipeline, data, zero, recompute, micro_batch, num_microbatches)

    def _zero_stages(self, data: int) -> tuple[int, ...]:
        """On one replica there is nothing to shard, whatever was asked."""
        if data == 1:
            return (0,)
        return RUNNABLE.zero_stages if self.request.zero is None else (self.request.zero,)

    # Cutting

    def _cut(self, degrees: Degrees) -> _Option:
        times, memory = self.pricer.times(degrees), self.pricer.memory(degrees)
        peaks = self._peaks(degrees, memory)
        cost = times.busy + times.send[None, :]
        cuts = partition(cost, peaks, self.request.offered_bytes)
        if cuts is None:
            smallest = partition(np.zeros_like(cost), peaks, np.inf)
            assert smallest is not None
            return _Option(degrees, None, _largest(peaks, smallest))
        return _Option(degrees, cuts, _largest(peaks, cuts), self._bound(degrees, times, cuts))

    def _peaks(self, degrees: Degrees, memory: StageMemory) -> Array:
        return np.stack([memory.peak(self._in_flight(degrees, stage)) for stage in range(degrees.pipeline)])

    def _in_flight(self, degrees: Degrees, stage: int) -> int:
        return most_in_flight(self.request.schedule, stage, degrees.pipeline, degrees.num_microbatches)

    def _bound(self, degrees: Degrees, times: StageTimes, cuts: tuple[int, ...]) -> float:
        """The longest of these paths: down to a stage with the first micro-batch, all of that stage's own work, and
        back up with the last; then the step's end."""
        i, j = np.array(cuts[:-1]), np.array(cuts[1:])
        busy = times.busy[i, j]
        before = np.concatenate([[0.0], np.cumsum(busy[:-1] + 2 * times.send[list(cuts[1:-1])])])
        longest = (before + degrees.num_microbatches * busy).max()
        return float(longest + (times.step_wait + times.optimizer)[i, j].max())

    # Predicting

    def _predict(self, option: _Option) -> Prediction:
        assert option.cuts is not None
        degrees, cuts = option.degrees, option.cuts
        times, m = self.pricer.times(degrees), option.degrees.num_microbatches
        i, j = np.array(cuts[:-1]), np.array(cuts[1:])
        forward = times.forward[i, j] + times.forward_wait[i, j]
        backward = times.backward[i, j] + times.backward_wait[i, j]
        length, bubble = step_ms(
            self.request.schedule, m, forward.tolist(), backward.tolist(), [*times.send[list(cuts[1:-1])].tolist(), 0.0]
        )
        ends = times.step_wait[i, j] + times.optimizer[i, j]
        tied = self.pricer.tied_ms(degrees, cuts)
        total = length + float(ends.max()) + tied
        last, busiest = int(ends.argmax()), int((forward + backward).argmax())
        compute = m * float(times.forward[i, j][busiest] + times.backward[i, j][busiest])
        waits = m * float(times.forward_wait[i, j][busiest] + times.backward_wait[i, j][busiest])
        return Prediction(
            step_ms=total,
            compute_ms=compute,
            bubble_ms=length - compute - waits,
            communication_ms=waits + float(times.step_wait[i, j][last]) + tied,
            optimizer_ms=float(times.optimizer[i, j][last]),
            bubble_fraction=bubble,
            tokens_per_s=self.request.global_batch * self.request.seq_len / (total / 1e3),
            mfu=self._mfu(total),
        )

    def _mfu(self, step: float) -> float | None:
        cluster = self.request.cluster
        if cluster.device.kind == "cpu":
            return None
        peak = cluster.gpus * cluster.device.peak(self.profile.precision)
        return self.profile.flops_per_sample * self.request.global_batch / (step / 1e3) / peak

    # The answer

    def _plan(self, best: _Option, options: list[_Option]) -> Plan:
        request, degrees = self.request, best.degrees
        return Plan(
            model=self.profile.model,
            signature=self.profile.signature,
            cluster=request.cluster,
            global_batch=request.global_batch,
            seq_len=request.seq_len,
            precision=self.profile.precision,
            pipeline=degrees.pipeline,
            data=degrees.data,
            tensor=1,
            zero=degrees.zero,
            schedule=request.schedule,
            micro_batch=degrees.micro_batch,
            num_microbatches=degrees.num_microbatches,
            block_names=tuple(block.name for block in self.profile.blocks),
            stages=self._stages(best),
            memory_limit_bytes=request.memory_limit_bytes,
            flops_per_step=round(self.profile.flops_per_sample * request.global_batch),
            prediction=self._predict(best),
            candidates=tuple(self._row(option, best) for option in options),
        )

    def _stages(self, option: _Option) -> tuple[Stage, ...]:
        assert option.cuts is not None
        degrees, cuts = option.degrees, option.cuts
        times, memory = self.pricer.times(degrees), self.pricer.memory(degrees)
        crossing = self.profile.crossing_bytes
        return tuple(
            Stage(
                index=s,
                first_block=i,
                end_block=j,
                parameters=int(memory.elements[i, j]),
                forward_ms=float(times.forward[i, j] + times.forward_wait[i, j]),
                backward_ms=float(times.backward[i, j] + times.backward_wait[i, j]),
                send_bytes=int(crossing[j] * degrees.micro_batch) if j < len(crossing) - 1 else 0,
                recompute=degrees.recompute,
                memory=_memory(memory, i, j, self._in_flight(degrees, s)),
            )
            for s, (i, j) in enumerate(pairwise(cuts))
        )

    def _row(self, option: _Option, best: _Option) -> Candidate:
        d = option.degrees
        step = option.step_ms if option.step_ms is not None else option.bound_ms
        return Candidate(
            d.pipeline,
            d.data,
            1,
            d.zero,
            d.recompute,
            self.request.schedule,
            1,
            False,
            d.micro_batch,
            step if np.isfinite(step) else None,
            int(option.peak_bytes),
            self._verdict(option, best),
        )

    def _verdict(self, option: _Option, best: _Option) -> str:
        if option is best:
            return "chosen"
        if option.cuts is None:
            return f"needs {gib(option.peak_bytes)}, and {self.request.offer()}"
        assert best.step_ms is not None
        step, least = (option.step_ms, "") if option.step_ms is not None else (option.bound_ms, "at least ")
        return f"{least}{step / best.step_ms - 1:.1%} slower"

    # No answer

    def _too_large(self, options: list[_Option]) -> PlanInfeasible:
        request = self.request
        least = min(options, key=lambda o: o.peak_bytes)
        d = least.degrees
        shape = (
            f"pipeline={d.pipeline}, data={d.data}, zero={d.zero}, micro_batch={d.micro_batch}, "
            f"recompute={d.recompute!r}"
        )
        return PlanInfeasible(
            f"{self.profile.model} does not fit {request.cluster.describe()}: the smallest of {len(options)} options "
            f"({shape}) needs {gib(least.peak_bytes)} a device, and {request.offer()}. {self._way_out(least)}",
            needed_bytes=int(least.peak_bytes),
            offered_bytes=request.offered_bytes,
            options=len(options),
        )

    def _way_out(self, least: _Option) -> str:
        request, d = self.request, least.degrees
        ways = []
        if request.recompute == "none":
            ways.append("allow activation checkpointing")
        if request.zero is not None and request.zero < 3 and d.data > 1:
            ways.append("allow ZeRO 3")
        if request.micro_batch is not None and request.micro_batch > 1:
            ways.append(f"allow micro-batches smaller than {request.micro_batch}")
        if request.pipeline is not None or request.data is not None:
            ways.append("leave the degrees to the search")
        if request.memory_limit_bytes is not None and request.offered_bytes < request.cluster.device.usable_bytes:
            ways.append("raise the memory limit")
        ways.append(f"give the plan more than {request.cluster.gpus} devices")
        text = ", or ".join(ways)
        return text[0].upper() + text[1:] + "."

    def _indivisible(self) -> PlanInfeasible:
        request = self.request
        gpus, batch = request.cluster.gpus, request.global_batch
        nearest = max(1, round(batch / gpus)) * gpus
        return PlanInfeasible(
            f"No division of {gpus} devices suits a global batch of {batch} samples and {len(self.profile.blocks)} "
            f"blocks: every replica needs an equal share, cut into at least as many micro-batches as there are "
            f"stages. Choose a global batch that is a multiple of {gpus}, such as {nearest}, or fewer devices.",
            global_batch=batch,
            devices=gpus,
        )


def _largest(peaks: Array, cuts: tuple[int, ...]) -> float:
    return max(float(peaks[s, i, j]) for s, (i, j) in enumerate(pairwise(cuts)))


def _memory(memory: StageMemory, i: int, j: int, in_flight: int) -> Memory:
    return Memory(
        parameters=int(memory.parameters[i, j]),
        gradients=int(memory.gradients[i, j]),
        optimizer=int(memory.optimizer[i, j]),
        activations=int(memory.activations(in_flight)[i, j]),
        workspace=int(memory.workspace[i, j]),
    )
