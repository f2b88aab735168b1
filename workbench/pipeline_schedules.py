"""Pipeline schedules, one record each: the order of its actions, what it needs, what runs it, and its words.

To add a schedule, add one record to `SCHEDULES`. The planner searches and simulates it, refusals and captions quote its
words, and the runtime executes its class of `torch.distributed.pipelining`, whose order must be that of the record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from workbench.errors import PlanInfeasible, suggestion


@dataclass(frozen=True, slots=True)
class Action:
    """One micro-batch through one stage: its forward (`F`) or its backward (`B`)."""

    type: str
    stage: int
    micro_batch: int


Schedule = tuple[tuple[Action, ...], ...]
"""Actions of each pipeline rank, in the order in which it runs them."""


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule:
    """A pipeline schedule, for any number of ranks and micro-batches."""

    words: str
    """Name in a sentence."""
    order: Callable[..., Schedule]
    """Function that returns its actions, of the numbers of ranks, of micro-batches and, if several stages may lie on a
    rank, of these."""
    runtime: str
    """Class that executes it, as `module:name`: text, so that planning does not import `torch.distributed`."""
    chunks: tuple[int, ...] = (1,)
    """Numbers of stages on each rank that the planner tries; a user may ask for others if this is not 1 alone."""
    runs: Callable[[int, int], bool] = lambda _ranks, _num_microbatches: True
    """Function that returns True if torch runs it on so many ranks with so many micro-batches."""
    needs: str = ""
    """Condition of `runs` in words, as the object of "needs"."""
    remedy: str = ""
    """Way out where it does not run, as the object of "Choose"."""
    holds_every_microbatch: bool = False
    """True if a rank holds the activations of all micro-batches of a step at once, however many they are."""
    stands_in_for: str | None = None
    """Schedule in whose place this one is searched, where that cannot run; None for one that is always searched."""

    @cached_property
    def interleaves(self) -> bool:
        """Return True if ranks may hold several stages each."""
        return self.chunks != (1,)

    def needs_in_words(self) -> str:
        """Return the beginning of a refusal: `"1F1B needs at least as many micro-batches as pipeline ranks"`."""
        return f"{self.words[0].upper()}{self.words[1:]} needs {self.needs}"


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Return all forwards, then all backwards in the same order (GPipe, arXiv:1811.06965; as torch runs it)."""
    return tuple(
        tuple(Action(name, stage, i) for name in "FB" for i in range(num_microbatches)) for stage in range(num_stages)
    )


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Return, for each rank, warm-up forwards, then alternating forwards and backwards, then the remaining backwards.

    The schedule is PipeDream-Flush (arXiv:1806.03377).
    """
    lanes = []
    for stage in range(num_stages):
        warmup = min(num_microbatches, num_stages - stage)
        lane = [Action("F", stage, i) for i in range(warmup)]
        for i in range(num_microbatches - warmup):
            lane += [Action("B", stage, i), Action("F", stage, warmup + i)]
        lane += [Action("B", stage, i) for i in range(num_microbatches - warmup, num_microbatches)]
        lanes.append(tuple(lane))
    return tuple(lanes)


def rounds(ranks: int, num_microbatches: int) -> int:
    """Return the number of rounds of an interleaved schedule.

    Micro-batches pass a rank's stages in groups of `num_microbatches / rounds`, which must be whole.
    """
    return max(1, num_microbatches // ranks)


def interleaved(ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Return interleaved 1F1B (arXiv:2104.04473) in the order of torch's `ScheduleInterleaved1F1B`."""
    group = num_microbatches // rounds(ranks, num_microbatches)
    passes = num_microbatches * chunks

    def numbered(name: str, rank: int, number: int) -> Action:
        """Return the `number`-th forward, or the `number`-th backward, of a rank."""
        chunk = (number // group) % chunks
        stage = (chunk if name == "F" else chunks - 1 - chunk) * ranks + rank
        return Action(name, stage, number // (group * chunks) * group + number % group)

    lanes = []
    for rank in range(ranks):
        warmup = min((chunks - 1) * group + 2 * (ranks - 1 - rank), passes)
        lane = [numbered("F", rank, number) for number in range(warmup)]
        for number in range(passes):
            if warmup + number < passes:
                lane.append(numbered("F", rank, warmup + number))
            lane.append(numbered("B", rank, number))
        lanes.append(tuple(lane))
    return tuple(lanes)


SCHEDULES = {
    "gpipe": PipelineSchedule(
        words="GPipe",
        order=gpipe,
        runtime="torch.distributed.pipelining:ScheduleGPipe",
        holds_every_microbatch=True,
        stands_in_for="1f1b",
    ),
    "1f1b": PipelineSchedule(
        words="1F1B",
        order=one_f_one_b,
        runtime="torch.distributed.pipelining:Schedule1F1B",
        runs=lambda ranks, num_microbatches: num_microbatches >= ranks,
        needs="at least as many micro-batches as pipeline ranks",
        remedy="smaller micro-batches, or schedule='gpipe'",
    ),
    "interleaved": PipelineSchedule(
        words="interleaved 1F1B",
        order=interleaved,
        runtime="torch.distributed.pipelining:ScheduleInterleaved1F1B",
        chunks=(2, 3, 4),
        runs=lambda ranks, num_microbatches: num_microbatches % rounds(ranks, num_microbatches) == 0,
        needs="micro-batches in equal rounds of as many as there are pipeline ranks, or a few more",
        remedy="a micro-batch size that gives a multiple of the pipeline ranks",
    ),
}
"""The pipeline schedules, by the name that `schedule=` takes."""


def find_schedule(name: object) -> PipelineSchedule:
    """Return the record of a schedule; raises `PlanInfeasible` with the nearest name for one that there is not."""
    if not isinstance(name, str) or name not in SCHEDULES:
        near = suggestion(str(name).lower(), SCHEDULES)
        raise PlanInfeasible(f"There is no schedule {name!r}. {near}")
    return SCHEDULES[name]


def interleaving() -> list[str]:
    """Return the names of the schedules under which a rank may hold several stages."""
    return [name for name, schedule in SCHEDULES.items() if schedule.interleaves]


@lru_cache(maxsize=64)
def build_schedule(name: str, ranks: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """Return the actions of a schedule; raises `PlanInfeasible`, with the way out, for one that torch refuses."""
    schedule = find_schedule(name)
    if chunks > 1 and not schedule.interleaves:
        raise PlanInfeasible(
            f"The schedule {name} has one stage on each pipeline rank, and chunks={chunks} asks for {chunks}. Choose "
            f"schedule={' or '.join(map(repr, interleaving()))}, or leave chunks out."
        )
    if not schedule.runs(ranks, num_microbatches):
        raise PlanInfeasible(
            f"{schedule.needs_in_words()}, and this step has {num_microbatches} on {ranks} ranks. Choose "
            f"{schedule.remedy}."
        )
    return schedule.order(ranks, num_microbatches, *([chunks] if schedule.interleaves else []))
