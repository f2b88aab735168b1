"""The choices of a plan, stated once: what a user may fix, what may be combined, and what each choice implies.

To add a pipeline schedule, add one record to `SCHEDULES`. `Choices` holds what a user fixes; `Strategy` is one complete
set of choices, which plans, candidates and the planner's cost model share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, TypedDict, Unpack

from workbench.base.arguments import checked_keywords
from workbench.base.errors import PlanInfeasible, suggestion
from workbench.base.units import plain
from workbench.base.validation import (
    AfterValidator,
    Count,
    Field,
    PlainValidator,
    TrueOrFalse,
    Whole,
    checked_items,
    known,
)

# Pipeline schedules, one record each: the order of its actions, what it needs, what runs it, and its words. The planner
# searches and simulates a record, refusals and captions quote its words, and the runtime executes its class of
# `torch.distributed.pipelining`, whose order must be that of the record.


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


DEGREES = ("pipeline", "data", "tensor")
"""Degrees of a plan, one for each axis of the device mesh: their product is the number of ranks."""
RECOMPUTE = {
    "none": "no activation checkpointing",
    "selective": "selective activation checkpointing",
    "full": "activation checkpointing",
}
"""Kinds of activation checkpointing and how a sentence calls them. The backward of a block recomputes nothing; what is
cheap in FLOPs and large in bytes (results of matrix products and attention are kept); or everything from its inputs."""
ZERO = {
    0: "0 (replicate)",
    1: "1 (shard the optimiser)",
    2: "2 (shard gradients and optimiser)",
    3: "3 (shard parameters too)",
}
"""ZeRO stages of the data-parallel axis (arXiv:1910.02054) and how a sentence calls them."""


class Choices(TypedDict, total=False):
    """The choices that a user may fix of a plan. The planner searches those that are left out or None."""

    pipeline: Count | None
    """Pipeline-parallel degree: the number of ranks that the model's stages are spread over."""
    data: Count | None
    """Data-parallel degree: the number of replicas that share the global batch."""
    tensor: Count | None
    """Tensor-parallel degree: the number of devices that share each matrix product."""
    zero: Annotated[Whole, Field(ge=min(ZERO), le=max(ZERO))] | None
    """ZeRO stage, 0 to 3."""
    schedule: Annotated[str, AfterValidator(lambda name: find_schedule(name) and name)] | None
    """One of `workbench.strategy.SCHEDULES`."""
    chunks: Count | None
    """Number of stages that each pipeline rank holds; more than one needs an interleaved schedule."""
    micro_batch: Count | None
    """Samples of one forward on one replica."""
    recompute: Annotated[str, PlainValidator(known(RECOMPUTE))] | None
    """One of `RECOMPUTE`, for every block."""
    offload_optimizer: TrueOrFalse | None
    """True keeps the optimiser's state in the host's memory."""
    cuda_graphs: TrueOrFalse | None
    """True captures what blocks launch as CUDA graphs and replays it."""
    block_sparse: TrueOrFalse | None
    """True stores, multiplies and optimises sparse weights without their absent blocks; False masks dense weights. It
    makes no difference to an experiment without `sparsity`."""


class Fixed(dict[str, Any]):
    """The choices that a user fixed, as a hashable value: `Fixed(pipeline=2).pipeline` is 2, `.data` is None.

    Raises `PlanInfeasible` for a value that is wrong for every model and cluster.
    """

    @checked_keywords
    def __init__(self, **choices: Unpack[Choices]) -> None:
        given = {name: plain(value) for name, value in choices.items() if value is not None}
        super().__init__(checked_items(Choices, given, PlanInfeasible))

    def __getattr__(self, name: str) -> Any:
        if name in Choices.__annotations__:
            return self.get(name)
        raise AttributeError(name)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to divide a step over `pipeline * data * tensor` devices.

    The device mesh has pipeline outermost, then data, then tensor: rank = (p * data + d) * tensor + t. The fields mean
    what they mean in `Choices`.
    """

    pipeline: int
    data: int
    tensor: int
    zero: int
    schedule: str
    chunks: int
    micro_batch: int
    num_microbatches: int
    """Micro-batches of one step on one replica: `global_batch / (data * micro_batch)`."""
    recompute: str
    """One of `RECOMPUTE`; `mixed` where blocks differ; `any` where the model was not cut into stages."""
    offload_optimizer: bool = False
    cuda_graphs: bool = False
    block_sparse: bool = False
    gathers: bool = False
    """True computes a loss that compares samples over those of all micro-batches and replicas."""

    @property
    def devices_per_stage(self) -> int:
        """Number of devices that hold the stages of one pipeline rank: those of all axes of the mesh but that one."""
        return self.data * self.tensor

    @property
    def world(self) -> int:
        return self.pipeline * self.devices_per_stage

    def pipeline_rank_of(self, rank: int) -> int:
        """Return the pipeline rank of a rank: the pipeline is the outermost axis of the mesh."""
        return rank // self.devices_per_stage

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.chunks

    @property
    def interleaves(self) -> bool:
        """Return True if pipeline ranks may hold several stages each."""
        return SCHEDULES[self.schedule].interleaves

    @property
    def shards(self) -> bool:
        """Return True if FSDP2 shards each stage's optimiser state over its replicas."""
        return self.zero >= 1 and self.data > 1

    @property
    def shards_parameters(self) -> bool:
        """Return True if FSDP2 frees and gathers parameters around each block's forward and backward."""
        return self.zero == 3 and self.data > 1

    @property
    def shard_count(self) -> int:
        """Number of devices that the optimiser's state of one stage is divided over."""
        return self.data if self.shards else 1

    @property
    def runs_forward_twice(self) -> bool:
        """Return True if micro-batches run forward before the step's own forwards, for a loss over all of them."""
        return self.gathers and self.num_microbatches > 1

    @property
    def all_reduces_gradients(self) -> bool:
        """Return True if replicas all-reduce their gradients themselves.

        DistributedDataParallel would have to see every gradient as it is made, and the replay of a captured backward
        does not show them.
        """
        return self.cuda_graphs

    @property
    def uses_ddp(self) -> bool:
        """Return True if DistributedDataParallel all-reduces the gradients, and holds them in its buckets."""
        return self.zero == 0 and self.data > 1 and not self.all_reduces_gradients

    @property
    def makes_gradients_once(self) -> bool:
        """Return True if one backward makes each gradient of a step: one micro-batch, one replica and one stage."""
        return self.num_microbatches == self.data == self.num_stages == 1

    @property
    def can_capture_cuda_graphs(self) -> bool:
        """Return True if weights stay where they are, as a captured CUDA graph needs: FSDP2 moves them."""
        return not self.shards

    @property
    def can_be_block_sparse(self) -> bool:
        """Return True if ranks hold whole weights, as block-sparse ones need: they are not divided over devices yet."""
        return self.tensor == 1 and not self.shards

    @property
    def features(self) -> tuple[str, ...]:
        """Words for all that a plan does beside dividing its step."""
        words = {
            "optimiser state on the host": self.offload_optimizer,
            "CUDA graphs": self.cuda_graphs,
            "block-sparse weights": self.block_sparse,
            "gathered loss": self.gathers,
        }
        return tuple(name for name, applies in words.items() if applies)

    def keeps_weight_copies(self, precision: str) -> bool:
        """Return True if ranks keep bf16 copies of their weights for a whole step.

        They do where neither FSDP2 nor DistributedDataParallel manages the weights.
        """
        return precision == "bf16" and (self.data == 1 or self.cuda_graphs)
