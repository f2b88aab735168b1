"""Pipeline schedules as data, and what they cost by simulation.

A schedule is one list of `Action`s per pipeline rank: what that rank runs, in order. The runtime executes the
same order, the planner simulates it, and the timeline draws it. A rank may hold several stages
(`stage % ranks == rank`); GPipe and 1F1B give it one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from workbench.errors import PlanInfeasible, suggestion


@dataclass(frozen=True, slots=True)
class Action:
    """Forward (`F`) or backward (`B`) of one micro-batch through one stage."""

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


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {"1f1b": one_f_one_b, "gpipe": gpipe}


def build_schedule(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """A schedule by name; raises `PlanInfeasible` for one that there is not."""
    if name not in SCHEDULES:
        raise PlanInfeasible(f"There is no schedule {name!r}. {suggestion(name, SCHEDULES)}", schedule=name)
    return SCHEDULES[name](num_stages, num_microbatches)


def most_in_flight(name: str, stage: int, num_stages: int, num_microbatches: int) -> int:
    """Micro-batches whose activations `stage` holds at its peak: min(m, p - s) under 1F1B, m under GPipe."""
    return num_microbatches if name == "gpipe" else min(num_microbatches, num_stages - stage)


def simulate(
    schedule: Schedule,
    forward_ms: Sequence[float],
    backward_ms: Sequence[float],
    send_ms: Sequence[float] | float = 0.0,
) -> Timeline:
    """Run a schedule: a rank does its actions in order, each as soon as what it needs has arrived.

    `send_ms[s]` is the time from stage `s` to `s + 1`, activations one way and gradients the other; it delays
    the receiver and does not occupy the sender.
    """
    num_stages = len(forward_ms)
    sends = [send_ms] * num_stages if isinstance(send_ms, (int, float)) else list(send_ms)
    done: dict[tuple[str, int, int], float] = {}
    lanes: list[list[TimedAction]] = [[] for _ in schedule]
    position = [0] * len(schedule)
    clock = [0.0] * len(schedule)
    remaining = sum(map(len, schedule))
    while remaining:
        before = remaining
        for rank, actions in enumerate(schedule):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                ready = _ready(action, done, sends, num_stages)
                if ready is None:
                    break
                start = max(clock[rank], ready)
                length = forward_ms[action.stage] if action.kind == "F" else backward_ms[action.stage]
                clock[rank] = done[action.kind, action.stage, action.micro_batch] = start + length
                lanes[rank].append(TimedAction(action.kind, action.stage, action.micro_batch, start, start + length))
                position[rank] += 1
                remaining -= 1
        assert remaining < before, "the schedule waits for itself"
    return Timeline(
        lanes=tuple(map(tuple, lanes)),
        step_ms=max(clock, default=0.0),
        busy_ms=tuple(sum(action.end_ms - action.start_ms for action in lane) for lane in lanes),
        in_flight=tuple(map(_most_held, schedule)),
    )


def _ready(
    action: Action, done: Mapping[tuple[str, int, int], float], sends: Sequence[float], num_stages: int
) -> float | None:
    """When the inputs of an action have arrived; None while what makes them has not run."""
    stage, i = action.stage, action.micro_batch
    if action.kind == "F":
        if stage == 0:
            return 0.0
        made = done.get(("F", stage - 1, i))
        return None if made is None else made + sends[stage - 1]
    if stage == num_stages - 1:
        return done.get(("F", stage, i))
    made = done.get(("B", stage + 1, i))
    return None if made is None else made + sends[stage]


def _most_held(actions: Sequence[Action]) -> int:
    held = most = 0
    for action in actions:
        held += 1 if action.kind == "F" else -1
        most = max(most, held)
    return most


EXACT_ACTIONS = 40_000
"""Forwards and backwards of one step that are all simulated; of a longer step, so many, and the rest extended."""


def step_ms(
    name: str,
    num_microbatches: int,
    forward_ms: Sequence[float],
    backward_ms: Sequence[float],
    send_ms: Sequence[float],
    exact_actions: int = EXACT_ACTIONS,
) -> tuple[float, float]:
    """Length and bubble fraction of a step; one of many micro-batches is extended at its steady rate.

    After warm-up a schedule repeats itself, so the rate is that of the later half of what was simulated.
    """
    num_stages = len(forward_ms)

    def simulated_ms(count: int) -> float:
        return simulate(build_schedule(name, num_stages, count), forward_ms, backward_ms, send_ms).step_ms

    simulated = min(num_microbatches, max(4 * num_stages, exact_actions // (2 * num_stages)))
    length = simulated_ms(simulated)
    if num_microbatches > simulated:
        half = simulated // 2
        rate = (length - simulated_ms(simulated - half)) / half
        length += rate * (num_microbatches - simulated)
    busy = num_microbatches * (sum(forward_ms) + sum(backward_ms))
    return length, 1 - busy / (length * num_stages) if length > 0 else 0.0
