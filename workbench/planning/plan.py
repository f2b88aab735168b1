"""A `Plan`: how one step of one model is divided over one cluster, and what that is predicted to cost.

Pure values; a plan is JSON, and is stored with every run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cost.cluster import Cluster
from workbench.cost.memory import FP32
from workbench.cost.profiles import RECOMPUTE, Profile
from workbench.errors import PlanMismatch
from workbench.rundir import write_json
from workbench.units import duration, gib

if TYPE_CHECKING:
    from workbench.planning.explaining import Explanation

FORMAT = 3
"""1 had `recompute` as a truth value, 2 the same for all blocks of a stage; such plans are still read."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
INTERLEAVED = ("interleaved", "zero_bubble")
"""Schedules under which a pipeline rank may hold several stages."""
BUILD_SHARE = 0.6
"""Models up to this share of a GPU's memory are initialised on it; larger ones on the host. Beside a model stands no
more than one weight's part of it, but initialisers may need room too."""


def keeps_halves(precision: str, data: int, schedule: str, cuda_graphs: bool) -> bool:
    """Do ranks keep bf16 copies of their weights for a whole step? Where neither FSDP2 nor DistributedDataParallel has
    the weights in hand, and gradients come with the backward."""
    return precision == "bf16" and (data == 1 or cuda_graphs) and schedule != "zero_bubble"


def averages_by_hand(schedule: str, cuda_graphs: bool) -> bool:
    """Do replicas average their gradients without DistributedDataParallel (and FSDP2)? It would have to see every
    gradient come, as it does not where a backward is in halves or was recorded."""
    return schedule == "zero_bubble" or cuda_graphs


@dataclass(frozen=True)
class Memory:
    """Predicted bytes of one stage on one of its devices, at that device's peak.

    Under an interleaved schedule a device holds several stages, and its peak is the sum of theirs.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int
    """Library and communication buffers, the largest temporary, fragmentation."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.workspace


@dataclass(frozen=True)
class Stage:
    """Blocks `first_block` … `end_block - 1`, run by every device of pipeline rank `index % Plan.pipeline`."""

    index: int
    first_block: int
    end_block: int
    parameters: int
    """Elements of its blocks before any sharding, each tied parameter counted in every stage that holds it."""
    forward_ms: float
    """One micro-batch."""
    backward_ms: float
    """One micro-batch, recomputation included."""
    send_bytes: int
    """To the next stage, one micro-batch, forward; the backward returns as much."""
    recompute: str
    """One of `RECOMPUTE`: of its first `recompute_first` blocks."""
    memory: Memory
    weight_ms: float = 0.0
    """Of `backward_ms`, the gradients of weights, which a zero-bubble schedule leaves for later."""
    recompute_first: int | None = None
    """None: all of its blocks."""
    recompute_rest: str = "none"
    """One of `RECOMPUTE`: of the blocks after those."""

    def recompute_of(self, block: int) -> str:
        """One of `RECOMPUTE`, of one of its blocks (by its index in the model)."""
        first = self.recompute_first
        return self.recompute if first is None or block < self.first_block + first else self.recompute_rest


@dataclass(frozen=True)
class Prediction:
    """Where a predicted step goes; the parts sum to `step_ms`, as seen by the busiest pipeline rank."""

    step_ms: float
    compute_ms: float
    bubble_ms: float
    communication_ms: float
    """Exposed: what overlap does not hide; under ZeRO 1 to 3 with the copies, casts and sums of FSDP2."""
    optimizer_ms: float
    bubble_fraction: float
    """Idle share of the pipeline's schedule, by simulation."""
    tokens_per_s: float
    mfu: float | None
    """Model FLOPs (PaLM's definition: no recomputation) over peak FLOPs of all devices; None on CPUs."""
    host_ms: float = 0.0
    """Waiting for the host, whose launches take longer than what they launch."""
    basis: str = ""
    """What the times come from, as a sentence; empty in plans of earlier versions."""


@dataclass(frozen=True)
class Candidate:
    """One row of the search: what was weighed, and why it was not chosen."""

    pipeline: int
    data: int
    tensor: int
    zero: int
    recompute: str
    """One of `RECOMPUTE` if all blocks agree, else `mixed`; `any` where no cut was chosen."""
    schedule: str
    chunks: int
    """Stages of one pipeline rank."""
    offload_optimizer: bool
    micro_batch: int
    step_ms: float | None
    peak_bytes: int | None
    verdict: str
    """`chosen`, or a sentence."""
    bubble_fraction: float | None = None
    """Where the step was simulated."""
    selective_blocks: int = 0
    """Blocks recomputed selectively, where a cut was chosen."""
    full_blocks: int = 0
    """Blocks recomputed as a whole."""
    cuda_graphs: bool = False


@dataclass(frozen=True)
class Plan:
    """Degrees, stages and schedule. `pipeline * data * tensor` devices are used.

    Ranks on the device mesh: pipeline outermost, then data, then tensor; rank = (p * data + d) * tensor + t.
    """

    model: str
    signature: str
    """`Graph.signature` of the model that it was made for."""
    cluster: Cluster
    global_batch: int
    seq_len: int
    precision: str
    """`fp32` or `bf16`, resolved."""
    pipeline: int
    data: int
    tensor: int
    zero: int
    """ZeRO stage of the data-parallel axis: 0 replicates, 1 shards the optimiser's state, 2 also gradients, 3 also
    parameters."""
    schedule: str
    """One of `SCHEDULES`. The interleaved ones have `pipeline * chunks` stages; the others one a pipeline rank."""
    micro_batch: int
    """Samples of one micro-batch on one data-parallel replica."""
    num_microbatches: int
    """Micro-batches of one step on one replica: `global_batch / (data * micro_batch)`."""
    block_names: tuple[str, ...]
    stages: tuple[Stage, ...]
    memory_limit_bytes: int | None
    """What the user allowed per device, where that is less than the device has."""
    flops_per_step: int
    """Model FLOPs of one step over the whole global batch, forward and backward, without recomputation."""
    prediction: Prediction
    candidates: tuple[Candidate, ...] = ()
    offload_optimizer: bool = False
    """Optimiser state lives in the host's memory."""
    cuda_graphs: bool = False
    """What a block launches is recorded once and replayed (`workbench.execution.blocks.cuda_graphs`)."""

    @property
    def chunks(self) -> int:
        """Stages of one pipeline rank."""
        return len(self.stages) // self.pipeline

    def stages_of(self, pipeline_rank: int) -> tuple[Stage, ...]:
        """The stages that a pipeline rank runs."""
        return self.stages[pipeline_rank :: self.pipeline]

    @property
    def recompute(self) -> str:
        """One of `RECOMPUTE` if all blocks agree, else `mixed`."""
        return recompute_of_all(self.recomputed_blocks, len(self.block_names))

    @property
    def recomputed_blocks(self) -> dict[str, int]:
        """How many blocks are recomputed by each of `RECOMPUTE`."""
        each = [s.recompute_of(block) for s in self.stages for block in range(s.first_block, s.end_block)]
        return {kind: each.count(kind) for kind in RECOMPUTE}

    def device_bytes(self, pipeline_rank: int) -> int:
        """Predicted peak of one device of a pipeline rank."""
        return sum(stage.memory.total for stage in self.stages_of(pipeline_rank))

    @property
    def world(self) -> int:
        return self.pipeline * self.data * self.tensor

    @property
    def model_bytes(self) -> int:
        """Of the whole model as it is built: fp32, undivided."""
        return FP32 * sum(stage.parameters for stage in self.stages)

    @property
    def built_on_device_bytes(self) -> float:
        """The largest model that a rank initialises on its GPU, where nothing else is on it."""
        return BUILD_SHARE * self.cluster.device.memory_bytes

    @property
    def shards(self) -> bool:
        """Does FSDP2 divide each stage's state over its replicas?"""
        return self.zero > 0 and self.data > 1

    @property
    def keeps_halves(self) -> bool:
        """See the function."""
        return keeps_halves(self.precision, self.data, self.schedule, self.cuda_graphs)

    @property
    def averages_by_hand(self) -> bool:
        """See the function."""
        return averages_by_hand(self.schedule, self.cuda_graphs)

    @property
    def peak_bytes(self) -> int:
        """Of the fullest device."""
        return max(self.device_bytes(rank) for rank in range(self.pipeline))

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self), "cluster": self.cluster.to_json()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Plan:
        """Raises `PlanMismatch` for what is not a plan, or is one of a later format."""
        try:
            fields = _upgraded(value)
            fields["cluster"] = Cluster.from_json(fields["cluster"])
            fields["block_names"] = tuple(fields["block_names"])
            fields["stages"] = tuple(Stage(**{**s, "memory": Memory(**s["memory"])}) for s in fields["stages"])
            fields["prediction"] = Prediction(**fields["prediction"])
            fields["candidates"] = tuple(Candidate(**c) for c in fields["candidates"])
            return Plan(**fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise PlanMismatch(
                f"This is not a whole plan ({type(error).__name__}: {error}). Give what plan.save(path) or a run "
                f"directory holds, or plan again with wb.plan(experiment)."
            ) from error

    def save(self, path: str | os.PathLike[str]) -> Path:
        """As JSON that `wb.load_plan` reads."""
        file = Path(path).expanduser()
        write_json(file, self.to_json())
        return file

    @property
    def origin(self) -> tuple[object, object] | None:
        """Profile and request of the search that made this plan, in this process; not stored, not compared."""
        found: tuple[object, object] | None = self.__dict__.get("_origin")
        return found

    def explain(self, profile: Profile | None = None) -> Explanation:
        """Where the step goes, which constraint binds, and what would change the choice: by planning again with one
        constraint loosened at a time.

        A plan that was read from a file needs the model's `profile` for the latter. Raises `PlanMismatch` for a
        profile of another model.
        """
        from workbench.planning.explaining import explain

        return explain(self, profile)

    def describe(self) -> str:
        """One sentence: `"PP 2 × DP 2 (ZeRO 2), 1F1B, 8 × 4 samples, 213 ms a step, 61.2 GiB a device"`."""
        return f"{self.division()}, {duration(self.prediction.step_ms / 1e3)} a step, {gib(self.peak_bytes)} a device"

    def division(self) -> str:
        """How a step is divided, without what it costs: `"PP 2 × DP 2 (ZeRO 2), 1F1B, 8 × 4 samples"`."""
        tensor = f" × TP {self.tensor}" if self.tensor > 1 else ""
        sharding = f" (ZeRO {self.zero})" if self.zero else ""
        chunks = f" × {self.chunks}" if self.chunks > 1 else ""
        extras = [recompute_words(self)] if self.recompute != "none" else []
        extras += ["optimiser state on the host"] if self.offload_optimizer else []
        extras += ["CUDA graphs"] if self.cuda_graphs else []
        return ", ".join(
            (
                f"PP {self.pipeline} × DP {self.data}{tensor}{sharding}",
                f"{SCHEDULE_WORDS[self.schedule]}{chunks}",
                f"{self.num_microbatches} × {self.micro_batch} samples",
                *extras,
            )
        )

    def __repr__(self) -> str:
        return f"Plan({self.model} on {self.cluster.describe()}: {self.describe()})"


SCHEDULE_WORDS = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved 1F1B", "zero_bubble": "zero-bubble"}
RECOMPUTE_WORDS = {
    "none": "no activation checkpointing",
    "selective": "selective activation checkpointing",
    "full": "activation checkpointing",
}


def recompute_of_all(blocks: Mapping[str, int], total: int) -> str:
    """The kind by which all blocks are recomputed, `mixed` if there is none; `blocks` says how many are by each."""
    return next((kind for kind, count in blocks.items() if count == total), "mixed")


def recompute_words(plan: Plan) -> str:
    """`"selective activation checkpointing in 20 of 56 blocks"`."""
    if plan.recompute != "mixed":
        return RECOMPUTE_WORDS[plan.recompute]
    full, selective, total = plan.recomputed_blocks["full"], plan.recomputed_blocks["selective"], len(plan.block_names)
    if full and selective:
        return f"{RECOMPUTE_WORDS['full']} in {full} and selective in {selective} of {total} blocks"
    kind, count = ("full", full) if full else ("selective", selective)
    return f"{RECOMPUTE_WORDS[kind]} in {count} of {total} blocks"


def _upgraded(value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a stored plan, whatever format it was stored in."""
    fields = {key: item for key, item in value.items() if key != "format"}
    if value.get("format", 1) > FORMAT:
        raise PlanMismatch(
            f"The plan has format {value['format']} and this version of workbench reads up to {FORMAT}. Update "
            f"workbench, or plan again with wb.plan(experiment).",
            format=value["format"],
        )
    if value.get("format", 1) == 1:
        words = {False: "none", True: "full"}
        fields["stages"] = [{**stage, "recompute": words[stage["recompute"]]} for stage in fields["stages"]]
        added = {"tensor": 1, "schedule": fields["schedule"], "chunks": 1, "offload_optimizer": False}
        fields["candidates"] = [
            {**row, **added, "recompute": words[row["recompute"]]} for row in fields.get("candidates", ())
        ]
    return fields
