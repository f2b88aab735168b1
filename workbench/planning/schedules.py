"""Pipeline schedules as data, and what they cost by simulation.

A schedule is one list of `Action`s per pipeline rank: what that rank runs, in order. The runtime executes the
same order, the planner simulates it, and the timeline draws it. A rank holds one stage, or under an interleaved
schedule several: those with `stage % ranks == rank`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from workbench.errors import PlanInfeasible, suggestion
from workbench.planning.plan import INTERLEAVED, SCHEDULES


@dataclass(frozen=True, slots=True)
class Action:
    """One micro-batch through one stage: forward (`F`), backward (`B`), or the backward in two parts: what the stage
    before waits for (`I`, the input's gradient) and what only the optimiser needs (`W`, the weights')."""

    kind: str
    stage: int
    micro_batch: int


Schedule = tuple[tuple[Action, ...], ...]
"""Actions of each pipeline rank, in the order in which it runs them."""


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action with its start and end, in ms from the start of the step."""

    kind: str
    stage: int
    micro_batch: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step: one lane per pipeline rank."""

    lanes: tuple[tuple[TimedAction, ...], ...]
    step_ms: float
    """From the first action to the end of the last."""
    busy_ms: tuple[float, ...]
    """Time that each rank computes."""
    in_flight: tuple[int, ...]
    """Most micro-batches that each rank holds activations of at once, summed over its stages."""

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks' time."""
        if self.step_ms <= 0:
            return 0.0
        return 1 - sum(self.busy_ms) / (self.step_ms * len(self.busy_ms))


def bubble_fraction(num_stages: int, num_microbatches: int) -> float:
    """Idle share of a GPipe or 1F1B step with p equal stages and free sends: (p - 1) / (m + p - 1).

    Megatron-LM (arXiv:2104.04473) quotes the bubble over ideal time instead, (p - 1) / m.
    """
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards in the same order (GPipe, arXiv:1811.06965; as torch runs it)."""
    return tuple(
        tuple(Action(kind, stage, i) for kind in "FB" for i in range(num_microbatches)) for stage in range(num_stages)
    )


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Warm-up forwards, then one forward and one backward in turn, then the backwards left (arXiv:1806.03377)."""
    return tuple(_one_f_one_b_rank(stage, num_stages, num_microbatches) for stage in range(num_stages))


def _one_f_one_b_rank(stage: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    warmup = min(num_microbatches, num_stages - stage)
    actions = [Action("F", stage, i) for i in range(warmup)]
    for i in range(num_microbatches - warmup):
        actions += [Action("B", stage, i), Action("F", stage, warmup + i)]
    actions += [Action("B", stage, i) for i in range(num_microbatches - warmup, num_microbatches)]
    return tuple(actions)


def interleaved(ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B (arXiv:2104.04473), as torch's `ScheduleInterleaved1F1B` runs it."""
    return tuple(_interleaved_rank(rank, ranks, num_microbatches, chunks, split=False) for rank in range(ranks))


def zero_bubble(ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """ZB-H1 (arXiv:2401.10241), interleaved over chunks, as torch's `ScheduleInterleavedZeroBubble` runs it."""
    return tuple(_interleaved_rank(rank, ranks, num_microbatches, chunks, split=True) for rank in range(ranks))


def rounds(ranks: int, num_microbatches: int) -> int:
    """Rounds of an interleaved schedule: micro-batches pass a rank's chunks in groups of `num_microbatches / rounds`,
    which must be whole."""
    return max(1, num_microbatches // ranks)


def _interleaved_rank(rank: int, ranks: int, num_microbatches: int, chunks: int, *, split: bool) -> tuple[Action, ...]:
    """Warm-up forwards, then a forward and a backward in turn, then the backwards left.

    With `split`, weight gradients wait until `rank` micro-batches have gone backward, and fill the end.
    """
    group = num_microbatches // rounds(ranks, num_microbatches)
    passes = num_microbatches * chunks
    hops = (1 if split else 2) * (ranks - 1 - rank)
    warmup = min((chunks - 1) * group + hops, passes)

    def turn(kind: str, number: int) -> Action:
        """The rank's `number`-th forward, or its `number`-th backward."""
        chunk = (number // group) % chunks
        stage = (chunk if kind == "F" else chunks - 1 - chunk) * ranks + rank
        return Action(kind, stage, number // (group * chunks) * group + number % group)

    actions = [turn("F", number) for number in range(warmup)]
    weights = 0
    for number in range(passes):
        if warmup + number < passes:
            actions.append(turn("F", warmup + number))
        actions.append(turn("I" if split else "B", number))
        if split and number >= rank:
            actions.append(turn("W", weights))
            weights += 1
    if split:
        actions += [turn("W", number) for number in range(weights, passes)]
    return tuple(actions)


def check_schedule(name: str, ranks: int, num_microbatches: int, chunks: int = 1) -> None:
    """Raise `PlanInfeasible` for a schedule that torch refuses, with the way out."""
    if name not in SCHEDULES:
        raise PlanInfeasible(f"There is no schedule {name!r}. {suggestion(name, SCHEDULES)}", schedule=name)
    if chunks > 1 and name not in INTERLEAVED:
        raise PlanInfeasible(
            f"{name} has one stage a pipeline rank, and {chunks} were asked for. Choose schedule='interleaved', or "
            f"leave chunks out.",
            schedule=name,
            chunks=chunks,
        )
    if name == "1f1b" and num_microbatches < ranks:
        raise PlanInfeasible(
            f"1F1B needs at least as many micro-batches as pipeline ranks, and {num_microbatches} are fewer than "
            f"{ranks}. Choose smaller micro-batches, or schedule='gpipe'.",
            num_microbatches=num_microbatches,
            pipeline=ranks,
        )
    if name in INTERLEAVED and num_microbatches % rounds(ranks, num_microbatches):
        raise PlanInfeasible(
            f"{name} passes micro-batches in {rounds(ranks, num_microbatches)} equal rounds, and {num_microbatches} "
            f"cannot be divided so. Choose a micro-batch that gives a multiple of {ranks} micro-batches.",
            num_microbatches=num_microbatches,
            pipeline=ranks,
        )


@lru_cache(maxsize=64)
def build_schedule(name: str, ranks: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """A schedule by name; raises `PlanInfeasible` for one that there is not, or that torch refuses."""
    check_schedule(name, ranks, num_microbatches, chunks)
    if name in INTERLEAVED:
        make = interleaved if name == "interleaved" else zero_bubble
        return make(ranks, num_microbatches, chunks)
    return (gpipe if name == "gpipe" else one_f_one_b)(ranks, num_microbatches)


@dataclass(frozen=True)
class StageCosts:
    """Milliseconds of one micro-batch in every stage, as a simulation needs them."""

    forward_ms: Sequence[float]
    backward_ms: Sequence[float]
    weight_ms: Sequence[float]
    """Of `backward_ms`, what a zero-bubble schedule leaves for later."""
    send_ms: Sequence[float]
    """From stage `s` to `s + 1`: activations one way, gradients the other. Delays the receiver only."""

    @property
    def lengths(self) -> list[float]:
        """Of F, B, I and W of every stage, in that order of kinds."""
        split = [back - weight for back, weight in zip(self.backward_ms, self.weight_ms, strict=True)]
        return [*self.forward_ms, *self.backward_ms, *split, *self.weight_ms]


def simulate(
    schedule: Schedule,
    forward_ms: Sequence[float],
    backward_ms: Sequence[float],
    send_ms: Sequence[float] | float = 0.0,
    weight_ms: Sequence[float] | None = None,
    *,
    queued: bool = False,
) -> Timeline:
    """Run a schedule: a rank does its actions in order, each as soon as what it needs has arrived.

    `send_ms[s]` is the time from stage `s` to `s + 1`, activations one way and gradients the other; it delays
    the receiver and does not occupy the sender. `weight_ms` is the part of `backward_ms` that `W` takes.
    `queued`: what a rank sends and receives goes through one queue, in the order in which torch's runtime for several
    stages a rank (`INTERLEAVED`) posts it.
    """
    stages = len(forward_ms)
    sends = [send_ms] * stages if isinstance(send_ms, (int, float)) else list(send_ms)
    weights = [0.0] * stages if weight_ms is None else weight_ms
    costs = StageCosts(forward_ms, backward_ms, weights, sends)
    order = _in_order(schedule, stages, queued)
    ends, lengths = (_queued_ends if queued else _ends)(order, costs), costs.lengths
    lanes: list[list[TimedAction]] = [[] for _ in schedule]
    for action, rank, which, end in zip(order.actions, order.ranks, order.length_of, ends, strict=False):
        lanes[rank].append(TimedAction(action.kind, action.stage, action.micro_batch, end - lengths[which], end))
    return Timeline(
        lanes=tuple(map(tuple, lanes)),
        step_ms=max(ends),
        busy_ms=tuple(sum(action.end_ms - action.start_ms for action in lane) for lane in lanes),
        in_flight=tuple(most_held(actions) for actions in schedule),
    )


@dataclass(frozen=True)
class _Order:
    """A schedule's actions in an order in which each follows what it needs; positions in that order."""

    actions: tuple[Action, ...]
    ranks: tuple[int, ...]
    before: tuple[int, ...]
    """The action before it on its rank; the position past the end, where there is none."""
    needs: tuple[int, ...]
    """The action whose result it receives."""
    boundary: tuple[int, ...]
    """Index of the send between the two; past the end where nothing is sent."""
    length_of: tuple[int, ...]
    """Index into `StageCosts.lengths`."""


@lru_cache(maxsize=64)
def _in_order(schedule: Schedule, stages: int, queued: bool) -> _Order:
    """With `queued`, ranks take turns, an action each: so torch's runtime puts sends and receives into its queues."""
    total = sum(map(len, schedule))
    done: dict[tuple[str, int, int], int] = {}
    position = [0] * len(schedule)
    last = [total] * len(schedule)
    actions: list[Action] = []
    columns: list[tuple[int, int, int, int, int]] = []
    while len(actions) < total:
        found = len(actions)
        for rank, lane in enumerate(schedule):
            while position[rank] < len(lane):
                action = lane[position[rank]]
                needed, boundary = _needs(action, stages)
                if needed is not None and needed not in done:
                    break
                index = len(actions)
                done[_result(action)] = index
                which = "FBIW".index(action.kind) * stages + action.stage
                columns.append((rank, last[rank], done[needed] if needed else total, boundary, which))
                actions.append(action)
                last[rank] = index
                position[rank] += 1
                if queued:
                    break
        assert len(actions) > found, "the schedule waits for itself"
    ranks, before, needs, boundaries, length_of = zip(*columns, strict=True)
    return _Order(tuple(actions), ranks, before, needs, boundaries, length_of)


def _result(action: Action) -> tuple[str, int, int]:
    """`B` and `I` are alike to the stage before."""
    return ("B" if action.kind == "I" else action.kind, action.stage, action.micro_batch)


def _needs(action: Action, stages: int) -> tuple[tuple[str, int, int] | None, int]:
    """The result that an action waits for, and the boundary over which it comes (`stages`: none)."""
    stage, i = action.stage, action.micro_batch
    if action.kind == "W":
        return ("B", stage, i), stages
    if action.kind == "F":
        return (("F", stage - 1, i), stage - 1) if stage else (None, stages)
    return (("B", stage + 1, i), stage) if stage < stages - 1 else (("F", stage, i), stages)


def _ends(order: _Order, costs: StageCosts) -> list[float]:
    """When each action ends; one more entry, 0.0, for what nothing precedes."""
    ends = [0.0] * (len(order.actions) + 1)
    lengths, sends = costs.lengths, [*costs.send_ms[: len(costs.forward_ms)], 0.0]
    columns = zip(order.before, order.needs, order.boundary, order.length_of, strict=True)
    for index, (before, needed, boundary, which) in enumerate(columns):
        free, arrived = ends[before], ends[needed] + sends[boundary]
        ends[index] = (free if free > arrived else arrived) + lengths[which]
    return ends


def _queued_ends(order: _Order, costs: StageCosts) -> list[float]:
    """As `_ends`, where one queue a rank carries all that it sends and receives.

    A transfer begins when both ranks' queues have come to it and both have computed all that they were told before:
    NCCL's batched sends and receives share one stream a communicator, which waits for the computing stream when an
    operation is posted.
    """
    stages, ranks = len(costs.forward_ms), max(order.ranks) + 1
    ends = [0.0] * (len(order.actions) + 1)
    lengths, sends = costs.lengths, costs.send_ms
    computed, queue = [0.0] * ranks, [0.0] * ranks
    arrived: dict[tuple[str, int, int], float] = {}
    for index, (action, rank, which) in enumerate(zip(order.actions, order.ranks, order.length_of, strict=True)):
        kind, stage, i = _result(action)
        start = max(computed[rank], arrived.pop((kind, stage, i), 0.0))
        ends[index] = computed[rank] = start + lengths[which]
        receiver = {"F": stage + 1, "B": stage - 1}.get(kind, -1)
        if not 0 <= receiver < stages:
            continue
        other = receiver % ranks
        if other == rank:
            continue
        begun = max(queue[rank], queue[other], computed[rank], computed[other])
        queue[rank] = queue[other] = begun + sends[min(stage, receiver)]
        arrived[kind, receiver, i] = queue[other]
    return ends


def most_held(actions: Sequence[Action]) -> int:
    """Most micro-batches, over all stages of a rank, that are between their forward and the end of their backward."""
    held = most = 0
    for action in actions:
        held += {"F": 1, "I": 0}.get(action.kind, -1)
        most = max(most, held)
    return most


@lru_cache(maxsize=256)
def holdings(name: str, ranks: int, num_microbatches: int, chunks: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each rank, the different sets of what it holds at the forwards and backwards that can be its fullest moment.

    An entry has, for each of the rank's stages in order, the micro-batches held, and last the chunk that runs. Only
    entries that no other exceeds in every number are kept. A schedule repeats itself, so that few micro-batches
    show what many do.
    """
    if name == "gpipe":
        return (((num_microbatches, 0),),) * ranks
    shown = min(num_microbatches, _enough(ranks, num_microbatches, chunks))
    return tuple(_holdings(lane, ranks, chunks) for lane in build_schedule(name, ranks, shown, chunks))


def _enough(ranks: int, num_microbatches: int, chunks: int) -> int:
    """Micro-batches after which the schedule has reached its steady state, with rounds of the same size."""
    group = num_microbatches // rounds(ranks, num_microbatches)
    return max(1, -(-4 * ranks * chunks // group)) * group


def _holdings(lane: Sequence[Action], ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    held = [0] * chunks
    found: set[tuple[int, ...]] = set()
    for action in lane:
        chunk = action.stage // ranks
        if action.kind == "F":
            held[chunk] += 1
        if action.kind != "W":
            found.add((*held, chunk))
        if action.kind in "BW":
            held[chunk] -= 1

    def exceeded(entry: tuple[int, ...]) -> bool:
        return any(
            other != entry and other[-1] == entry[-1] and all(b >= a for a, b in zip(entry, other, strict=True))
            for other in found
        )

    return tuple(sorted(entry for entry in found if not exceeded(entry)))


EXACT_ACTIONS = 12_000
"""Actions of one step that are all simulated; of a longer step, so many, and the rest extended."""


def step_ms(
    name: str, ranks: int, num_microbatches: int, costs: StageCosts, exact_actions: int = EXACT_ACTIONS
) -> tuple[float, float]:
    """Length and bubble fraction of a step; one of many micro-batches is extended at its steady rate.

    After warm-up a schedule repeats itself, so the rate is that of the later half of what was simulated.
    """
    stages = len(costs.forward_ms)
    chunks = stages // ranks
    group = num_microbatches // rounds(ranks, num_microbatches)

    queued = name in INTERLEAVED

    def simulated_ms(count: int) -> float:
        order = _in_order(build_schedule(name, ranks, count, chunks), stages, queued)
        return max((_queued_ends if queued else _ends)(order, costs))

    shown = max(4 * ranks, exact_actions // (2 * stages))
    half = max(1, shown // (2 * group)) * group
    if num_microbatches <= 2 * half:
        length = simulated_ms(num_microbatches)
    else:
        length = simulated_ms(2 * half)
        length += (length - simulated_ms(half)) / half * (num_microbatches - 2 * half)
    busy = num_microbatches * (sum(costs.forward_ms) + sum(costs.backward_ms))
    return length, 1 - busy / (length * ranks) if length > 0 else 0.0
