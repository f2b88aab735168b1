"""The predicted step: a pipeline schedule simulated with the times of its stages, and what follows the last backward.

A rank holds one stage, or under an interleaved schedule several: those with `stage % ranks == rank`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from workbench.cost.hardware import CALIBRATED, DATA_SHEET, FITTED, TIMED, Device, point_to_point_s
from workbench.cost.profile import Profile
from workbench.planning.plan import Plan, Prediction, Stage
from workbench.planning.request import Request
from workbench.planning.stage_costs import Array, Cut, StageTimes, StrategyCosts, boundary_link
from workbench.strategy import SCHEDULES, Action, Schedule, Strategy, build_schedule, rounds

# A schedule, simulated: its time, and the micro-batches that ranks hold.
#
# Why pipelines have bubbles: with p equal stages, and F and B the forward and backward of a micro-batch, the last rank
# waits for p - 1 forwards before its first micro-batch arrives, and for p - 1 backwards after its last one has left.
# The other ranks wait as long, earlier or later: (p - 1) · (F + B). Their m micro-batches take m · (F + B), so that
# waiting over computing is (p - 1) / m, and the idle share of the step (p - 1) / (m + p - 1), whatever F and B are.
# GPipe and 1F1B are alike in this; 1F1B saves memory, because rank r begins a backward after p - r forwards and never
# holds more micro-batches than that, where GPipe holds all m. With v stages on a rank (interleaved) stages are v times
# as short, and so is the wait (arXiv:2104.04473). Real stages are uneven and sends take time: so steps are simulated.

EXACT_ACTIONS = 12_000
"""Number of actions up to which a whole step is simulated. Of a longer step as many are simulated, and the rest is
extrapolated."""
AROUND = {
    "O": "communication beside compute",
    "E": "exposed communication",
    "H": "waiting for the host",
    "U": "update",
    "R": "rest of the step, not recorded",
}
"""Names of all that a step does besides forward and backward, by type of action."""


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action with its start and end, in ms from the start of the step.

    The type is `F` for a forward, `B` for a backward, or one of `AROUND`.
    """

    type: str
    stage: int
    micro_batch: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step: one lane per pipeline rank."""

    lanes: tuple[tuple[TimedAction, ...], ...]
    step_ms: float
    """Time from the first forward to the end of the last backward."""
    busy_ms: tuple[float, ...]
    """Time that each rank computes."""
    in_flight: tuple[int, ...]
    """Largest number of micro-batches whose activations each rank holds at once, summed over its stages."""
    around: tuple[tuple[TimedAction, ...], ...] = ()
    """Actions of the types of `AROUND`, in and after those of each rank. Empty if they are not known."""

    @property
    def end_ms(self) -> float:
        """Return the end of the whole step, with what follows the last backward."""
        return max([self.step_ms, *(action.end_ms for lane in self.around for action in lane)])

    @property
    def bubble_fraction(self) -> float:
        """Return the bubble: the idle share of all ranks' time, from the first forward to the last backward."""
        if self.step_ms <= 0:
            return 0.0
        return 1 - sum(self.busy_ms) / (self.step_ms * len(self.busy_ms))


@dataclass(frozen=True)
class MicroBatchTimes:
    """Milliseconds of one micro-batch in every stage, as a simulation needs them."""

    forward_ms: Sequence[float]
    backward_ms: Sequence[float]
    send_ms: Sequence[float]
    """Time from stage `s` to `s + 1`: activations one way, gradients the other. It delays the receiver only."""

    @property
    def lengths(self) -> list[float]:
        """Return the forwards of all stages, then their backwards."""
        return [*self.forward_ms, *self.backward_ms]


def simulate(schedule: Schedule, times: MicroBatchTimes, *, queued: bool = False) -> Timeline:
    """Run a schedule: a rank does its actions in order, each as soon as what it needs has arrived.

    `queued` sends everything that a rank sends and receives through one queue, in the order in which torch's runtime
    for several stages per rank (interleaved schedules) posts it.
    """
    order = _in_order(schedule, len(times.forward_ms), queued)
    ends, lengths = (_queued_ends if queued else _ends)(order, times), times.lengths
    lanes: list[list[TimedAction]] = [[] for _ in schedule]
    for action, rank, which, end in zip(order.actions, order.ranks, order.length_of, ends, strict=False):
        lanes[rank].append(TimedAction(action.type, action.stage, action.micro_batch, end - lengths[which], end))
    return Timeline(
        lanes=tuple(map(tuple, lanes)),
        step_ms=max(ends),
        busy_ms=tuple(sum(action.end_ms - action.start_ms for action in lane) for lane in lanes),
        in_flight=tuple(most_in_flight(actions) for actions in schedule),
    )


@dataclass(frozen=True)
class _Order:
    """A schedule's actions in an order in which each follows what it needs; positions refer to that order."""

    actions: tuple[Action, ...]
    ranks: tuple[int, ...]
    before: tuple[int, ...]
    """Position of the action before it on its rank; the position past the end, where there is none."""
    needs: tuple[int, ...]
    """Position of the action whose result it receives; the position past the end, where there is none."""
    boundary: tuple[int, ...]
    """Index of the send between the two; past the last send where nothing is sent."""
    length_of: tuple[int, ...]
    """Index into `MicroBatchTimes.lengths`."""


@lru_cache(maxsize=64)
def _in_order(schedule: Schedule, stages: int, queued: bool) -> _Order:
    """Order a schedule's actions. With `queued`, ranks alternate after each action, as torch's runtime posts sends."""
    total = sum(map(len, schedule))
    done: dict[tuple[str, int, int], int] = {}
    position = [0] * len(schedule)
    last = [total] * len(schedule)
    actions: list[Action] = []
    columns: list[tuple[int, int, int, int, int]] = []
    while len(actions) < total:
        ordered = len(actions)
        for rank, lane in enumerate(schedule):
            while position[rank] < len(lane):
                action = lane[position[rank]]
                # A forward needs that of the stage above, and a backward that of the stage below, over the boundary
                # between the two; the first forward needs nothing, and the last backward its own stage's forward.
                stage, i, boundary = action.stage, action.micro_batch, stages
                needed: tuple[str, int, int] | None = None
                if action.type == "F" and stage:
                    needed, boundary = ("F", stage - 1, i), stage - 1
                elif action.type == "B":
                    is_last = stage == stages - 1
                    needed, boundary = (("F", stage, i), stages) if is_last else (("B", stage + 1, i), stage)
                if needed is not None and needed not in done:
                    break
                index = len(actions)
                done[action.type, action.stage, action.micro_batch] = index
                which = "FB".index(action.type) * stages + action.stage
                columns.append((rank, last[rank], done[needed] if needed else total, boundary, which))
                actions.append(action)
                last[rank] = index
                position[rank] += 1
                if queued:
                    break
        assert len(actions) > ordered, "the schedule waits for itself"
    ranks, before, needs, boundaries, length_of = zip(*columns, strict=True)
    return _Order(tuple(actions), ranks, before, needs, boundaries, length_of)


def _ends(order: _Order, times: MicroBatchTimes) -> list[float]:
    """Return the end of each action, and one more entry, 0.0, which stands before the first actions."""
    ends = [0.0] * (len(order.actions) + 1)
    lengths, sends = times.lengths, [*times.send_ms[: len(times.forward_ms)], 0.0]
    columns = zip(order.before, order.needs, order.boundary, order.length_of, strict=True)
    for index, (before, needed, boundary, which) in enumerate(columns):
        free, arrived = ends[before], ends[needed] + sends[boundary]
        ends[index] = (free if free > arrived else arrived) + lengths[which]
    return ends


def _queued_ends(order: _Order, times: MicroBatchTimes) -> list[float]:
    """Return what `_ends` returns, where one queue per rank carries everything that it sends and receives.

    A transfer begins when both ranks' queues have come to it and both have computed what they were told before: NCCL's
    batched sends and receives share one stream per communicator, which waits for the computing stream when an
    operation is posted.
    """
    stages, ranks = len(times.forward_ms), max(order.ranks) + 1
    ends = [0.0] * (len(order.actions) + 1)
    lengths, sends = times.lengths, times.send_ms
    computed, queue = [0.0] * ranks, [0.0] * ranks
    arrived: dict[tuple[str, int, int], float] = {}
    for index, (action, rank, which) in enumerate(zip(order.actions, order.ranks, order.length_of, strict=True)):
        stage, i = action.stage, action.micro_batch
        start = max(computed[rank], arrived.pop((action.type, stage, i), 0.0))
        ends[index] = computed[rank] = start + lengths[which]
        receiver = stage + 1 if action.type == "F" else stage - 1
        if not 0 <= receiver < stages or receiver % ranks == rank:
            continue
        other = receiver % ranks
        begun = max(queue[rank], queue[other], computed[rank], computed[other])
        queue[rank] = queue[other] = begun + sends[min(stage, receiver)]
        arrived[action.type, receiver, i] = queue[other]
    return ends


def most_in_flight(actions: Sequence[Action | TimedAction]) -> int:
    """Return the largest number of micro-batches, over all stages of a rank, between their forward and backward."""
    held = most = 0
    for action in actions:
        held += 1 if action.type == "F" else -1
        most = max(most, held)
    return most


@lru_cache(maxsize=256)
def peak_holdings(name: str, ranks: int, num_microbatches: int, chunks: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return, for each rank, what it holds at the forwards and backwards that can be its fullest moment.

    An entry has, for each of the rank's stages in order, the micro-batches held, and last the chunk that runs. Only
    entries that no other exceeds in every number are listed. A schedule repeats itself, so that few micro-batches
    show what many do.
    """
    group = num_microbatches // rounds(ranks, num_microbatches)
    until_steady = max(1, -(-4 * ranks * chunks // group)) * group
    shown = min(num_microbatches, until_steady)
    every = num_microbatches if SCHEDULES[name].holds_every_microbatch else shown
    holdings = []
    for lane in build_schedule(name, ranks, shown, chunks):
        held = [0] * chunks
        entries: set[tuple[int, ...]] = set()
        for action in lane:
            chunk = action.stage // ranks
            held[chunk] += action.type == "F"
            entries.add((*(every if count == shown else count for count in held), chunk))
            held[chunk] -= action.type == "B"
        not_exceeded = [
            entry
            for entry in entries
            if not any(o[-1] == entry[-1] and o != entry and all(map(operator.ge, o, entry)) for o in entries)
        ]
        holdings.append(tuple(sorted(not_exceeded)))
    return tuple(holdings)


def step_ms(name: str, ranks: int, num_microbatches: int, times: MicroBatchTimes) -> tuple[float, float]:
    """Return length and bubble fraction of a step; a step of many micro-batches is extended at its steady rate.

    After warm-up a schedule repeats itself, so the rate is that of the later half of what was simulated.
    """
    stages = len(times.forward_ms)
    chunks = stages // ranks
    group = num_microbatches // rounds(ranks, num_microbatches)
    queued = SCHEDULES[name].interleaves

    def simulated_ms(count: int) -> float:
        order = _in_order(build_schedule(name, ranks, count, chunks), stages, queued)
        return max((_queued_ends if queued else _ends)(order, times))

    shown = max(4 * ranks, EXACT_ACTIONS // (2 * stages))
    half = max(1, shown // (2 * group)) * group
    if num_microbatches <= 2 * half:
        length = simulated_ms(num_microbatches)
    else:
        length = simulated_ms(2 * half)
        length += (length - simulated_ms(half)) / half * (num_microbatches - 2 * half)
    busy = num_microbatches * (sum(times.forward_ms) + sum(times.backward_ms))
    return length, 1 - busy / (length * ranks) if length > 0 else 0.0


# The step of one cut of one option: its bound, and its prediction.


def bound_ms(costs: StrategyCosts, cut: Cut, times: StageTimes) -> float:
    """Return a lower bound of the step, without simulating it.

    The bound is the longest of these: all of a rank's own work, before it what a first micro-batch takes down to its
    first stage, and after it what a last one takes back up; then the end of the step.
    """
    strategy = costs.strategy
    above = slice(strategy.pipeline - 1)
    sends = _sends(costs, cut)
    own = strategy.num_microbatches * _by_rank(times.busy, strategy)
    longest = own + np.concatenate([[0.0], np.cumsum(times.busy[above] + 2 * sends[above])])
    return float(longest.max() + _by_rank(times.ending, strategy).max())


def predict(costs: StrategyCosts, cut: Cut, times: StageTimes, request: Request) -> Prediction:
    """Simulate the schedule with the stages' times, and add what follows the last backward."""
    strategy, count = costs.strategy, costs.strategy.num_microbatches
    forward, backward = times.forward, times.backward
    waits = times.forward_wait + times.backward_wait
    each = MicroBatchTimes(
        (forward + times.forward_wait).tolist(),
        (backward + times.backward_wait).tolist(),
        _sends(costs, cut).tolist(),
    )
    length, bubble = step_ms(strategy.schedule, strategy.pipeline, count, each)
    ends = _by_rank(times.ending, strategy)
    tied = costs.tied_ms(cut.cuts)
    total = length + float(ends.max()) + tied
    last, busiest = int(ends.argmax()), int(_by_rank(forward + backward + waits, strategy).argmax())
    host = count * float(_by_rank(times.host_wait, strategy)[busiest])
    compute = count * float(_by_rank(forward + backward, strategy)[busiest]) - host
    waiting = count * float(_by_rank(waits, strategy)[busiest])
    cluster, profile = costs.cluster, costs.profile
    flops = profile.flops_per_sample - (0.0 if profile.sparse is None else profile.sparse.absent_flops)
    peak = None if cluster.device.type == "cpu" else cluster.gpus * cluster.device.peak(profile.precision)
    return Prediction(
        step_ms=total,
        compute_ms=compute,
        bubble_ms=length - compute - host - waiting,
        communication_ms=waiting + float(_by_rank(times.step_wait, strategy)[last]) + tied,
        optimizer_ms=float(_by_rank(times.optimizer, strategy)[last]),
        bubble_fraction=bubble,
        tokens_per_s=request.global_batch * request.seq_len / (total / 1e3),
        mfu=None if peak is None else flops * request.global_batch / (total / 1e3) / peak,
        host_ms=host,
        orthogonalisation_ms=float(_by_rank(times.orthogonalisation, strategy)[last]),
        basis=basis_of_times(costs.profile, costs.cluster.device),
    )


def evaluation_s(stages: Sequence[Stage], strategy: Strategy, request: Request, coupled: bool) -> float:
    """Return the seconds of one evaluation: the forward of all held-out samples in the plan's stages.

    In each tick a pipeline rank runs each of its stages once; the slowest rank sets the pace. The peak memory of an
    evaluation is not predicted, because it lies below that of training: the same weights and optimiser state, no
    gradients, and the values of one micro-batch between two blocks instead of all that the backward needs.
    """
    # A loss that compares samples is evaluated over whole global batches; what is left over is not evaluated.
    samples = request.evaluated - (request.evaluated % request.global_batch if coupled else 0)
    ticks = math.ceil(samples / strategy.micro_batch / strategy.data) + len(stages) - 1
    ranks = range(strategy.pipeline)
    tick_ms = max(sum(stage.forward_ms for stage in stages[rank :: strategy.pipeline]) for rank in ranks)
    return ticks * tick_ms / 1e3


def _sends(costs: StrategyCosts, cut: Cut) -> Array:
    """Return the time to send one micro-batch from each stage to the next; 0 after the last."""
    return np.array([row[j] for row, j in zip(costs.send_ms, cut.cuts[1:], strict=True)])


def _by_rank(values: Array, strategy: Strategy) -> Array:
    """Return the sum over the stages of each pipeline rank."""
    return np.asarray(values.reshape(strategy.chunks, strategy.pipeline).sum(axis=0))


BLOCKS_FIRST = "On a machine that has this GPU, the model's blocks are measured first."


def basis_of_times(profile: Profile, device: Device) -> str:
    """Return, for instance, `"Times are those of this model's blocks, as measured on H200."`"""
    if profile.time_ratios and profile.measured_on == device.name:
        return f"Times are those of this model's blocks, as measured on {device.name}."
    if device.type == "cpu":
        how = "wb.measure.calibrate()" if device.basis == CALIBRATED else "a matrix product and a copy"
        return f"Times are for idle cores, from {how}, timed on this machine{device.measured}: enough to rank plans."
    return {
        FITTED: f"Times come from constants that were fitted to training on {device.name}. {BLOCKS_FIRST}",
        CALIBRATED: f"Times come from wb.measure.calibrate() on {device.name}{device.measured}. {BLOCKS_FIRST}",
        TIMED: f"Times come from a matrix product and a copy that were timed on this machine's {device.name}"
        f"{device.measured}, and from the efficiency of other GPUs: enough to rank plans.",
        DATA_SHEET: f"Times come from the data sheet of {device.name} and the efficiency of other GPUs; nothing was "
        f"measured: enough to rank plans. {BLOCKS_FIRST}",
    }[device.basis]


# The timeline of a finished plan.


def timeline(plan: Plan) -> Timeline:
    """Return start and end of all that one step does, from the times of the plan's own stages.

    The pipeline is simulated. In it, communication and waiting for the host lie where they hold compute up: what a
    forward needs is gathered before it, what a backward makes is reduced during and after it. After the last backward
    of all ranks come the rest of the communication and the update, whose clipping needs the norm of all gradients.
    """
    sends = []
    for stage in plan.stages:
        here, there = stage.index % plan.pipeline, (stage.index + 1) % plan.pipeline
        link = boundary_link(plan.cluster, plan.devices_per_stage, here, there)
        is_sent = here != there and stage.send_bytes
        sends.append(1e3 * point_to_point_s(stage.send_bytes, link) if is_sent else 0.0)
    forward, backward = zip(*((stage.forward_ms, stage.backward_ms) for stage in plan.stages), strict=True)
    schedule = build_schedule(plan.schedule, plan.pipeline, plan.num_microbatches, plan.chunks)
    pipeline = simulate(schedule, MicroBatchTimes(forward, backward, sends), queued=plan.interleaves)
    return replace(pipeline, around=tuple(_around(plan, rank, pipeline) for rank in range(plan.pipeline)))


def _ending(plan: Plan, rank: int) -> tuple[float, float] | None:
    """Return the milliseconds of communication and update of a pipeline rank after the last backward, if stored."""
    wait = update = 0.0
    for stage in plan.stages_of(rank):
        if stage.end_wait_ms is None or stage.optimizer_ms is None:
            return None
        wait, update = wait + stage.end_wait_ms, update + stage.optimizer_ms
    return wait, update


def _around(plan: Plan, rank: int, pipeline: Timeline) -> tuple[TimedAction, ...]:
    """Return communication, waiting for the host and the update of one pipeline rank, in order of their starts."""
    lane, found = pipeline.lanes[rank], list[TimedAction]()
    last = max((action for action in lane if action.type == "B"), key=lambda action: action.end_ms)

    def add(type_: str, action: TimedAction, start: float, end: float) -> None:
        if end - start > 1e-9:  # shorter gaps are rounding of sums of ms
            found.append(TimedAction(type_, action.stage, action.micro_batch, start, end))

    for action in lane:
        stage = plan.stages[action.stage]
        in_forward, in_backward, in_last = stage.overlapped_ms
        if action.type == "F":
            begin = action.start_ms + stage.forward_wait_ms
            add("E", action, action.start_ms, begin)
            add("O", action, begin, min(action.end_ms, begin + in_forward))
            add("H", action, action.end_ms - stage.host_wait_ms / 2, action.end_ms)
        else:
            end, hidden = action.end_ms - stage.backward_wait_ms, in_backward + (in_last if action is last else 0.0)
            add("H", action, action.start_ms, action.start_ms + stage.host_wait_ms / 2)
            add("O", action, max(action.start_ms, end - hidden), end)
            add("E", action, end, action.end_ms)
    rest = max(0.0, plan.prediction.step_ms - pipeline.step_ms)
    ends = [_ending(plan, each) for each in range(plan.pipeline)]
    if (own := ends[rank]) is None:  # a plan that stored the end of the rank that ends last, alone
        update = min(rest, plan.prediction.optimizer_ms)
        wait = rest - update
    else:
        longest = max(sum(each) for each in ends if each is not None)
        wait, update = own[0] + max(0.0, rest - longest), own[1]  # and gradients of parameters that several ranks hold
    add("E", last, pipeline.step_ms, pipeline.step_ms + wait)
    add("U", last, pipeline.step_ms + wait, pipeline.step_ms + wait + update)
    return tuple(found)
