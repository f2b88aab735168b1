"""A `Plan`: how one step of one model is divided over one cluster, and its predicted time and memory.

Plans are pure values. They are stored as JSON with every run.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter
from pydantic import ValidationError as Refusal

from workbench.base.arguments import checked_arguments
from workbench.base.display import facts_html, html_table
from workbench.base.errors import PlanMismatch, WorkbenchError, in_words
from workbench.base.units import count, duration, gib
from workbench.base.validation import first_problem
from workbench.capture.graph import Computation
from workbench.cost.hardware import Cluster
from workbench.cost.memory import FP32
from workbench.cost.profile import Profile
from workbench.planning.request import Request
from workbench.record.rundir import read_json, write_json
from workbench.strategy import RECOMPUTE, SCHEDULES, Strategy

FORMAT = 4
"""Version of a stored plan's fields; plans of other versions are refused."""
BUILD_SHARE = 0.6
"""Fraction of a GPU's memory up to which a rank initialises the whole model on the GPU; larger models are initialised
on the host. Beside the model there is never more than one rank's part of one weight, but initialisers need room too."""


if TYPE_CHECKING:
    from workbench.capture.captured_model import Facts

    Origin = tuple[Profile, Request] | None
else:
    Origin = Any  # is not stored, so that nothing checks it


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
    """Elements of its blocks before any sharding; a tied parameter counts in every stage that holds it."""
    forward_ms: float
    """Forward of one micro-batch, in ms."""
    backward_ms: float
    """Backward of one micro-batch, recomputation included, in ms."""
    send_bytes: int
    """Activations sent to the next stage in one micro-batch's forward; the backward returns as many bytes."""
    recompute: str
    """Activation checkpointing of its first `recompute_first` blocks: one of `RECOMPUTE`."""
    memory: Memory
    recompute_first: int | None = None
    """Number of first blocks that `recompute` holds for; None means all blocks."""
    recompute_rest: str = "none"
    """Activation checkpointing of the other blocks: one of `RECOMPUTE`."""
    host_bytes: int = 0
    """Optimiser state of one of its devices that lives in the host's memory."""
    forward_wait_ms: float = 0.0
    """Part of `forward_ms` that is exposed communication."""
    backward_wait_ms: float = 0.0
    """Part of `backward_ms` that is exposed communication."""
    host_wait_ms: float = 0.0
    """Part of `forward_ms` and `backward_ms` together during which the device waits for the host."""
    overlapped_ms: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Collectives of the data axis that compute hides: in a forward, in a backward, and in the last backward."""
    end_wait_ms: float | None = None
    """Exposed communication once a step, after the last backward; None in plans that did not store it."""
    optimizer_ms: float | None = None
    """The optimiser's update, once a step; None in plans that did not store it."""
    tied_parameters: int = 0
    """Number of its parameters that an earlier stage holds as well."""
    block_shares: tuple[float, ...] = ()
    """Share of each of its blocks in its compute; empty if none computes, and in plans that did not store it."""

    def recompute_of(self, block: int) -> str:
        """Return the activation checkpointing of one of its blocks, given by its index in the model."""
        first = self.recompute_first
        return self.recompute if first is None or block < self.first_block + first else self.recompute_rest


@dataclass(frozen=True)
class Prediction:
    """Predicted time of one step. The parts sum to `step_ms`, as the busiest pipeline rank sees them."""

    step_ms: float
    compute_ms: float
    bubble_ms: float
    communication_ms: float
    """Exposed communication, which compute does not hide; under ZeRO 1 to 3 with FSDP2's copies, casts and gradient
    accumulation."""
    optimizer_ms: float
    bubble_fraction: float
    """Idle share of the simulated pipeline schedule."""
    tokens_per_s: float
    mfu: float | None
    """Model FLOPs utilisation: model FLOPs (PaLM's definition: no recomputation) over the peak FLOPs of all devices;
    None on CPUs."""
    host_ms: float = 0.0
    """Time that the device waits for the host, which needs longer to launch kernels than the device to run them."""
    basis: str = ""
    """Sentence that says what the times are based on."""
    evaluation_s: float = 0.0
    """Seconds of one evaluation of the held-out loss, which is no part of `step_ms`; 0 without `evaluate`."""
    training_s: float = 0.0
    """Seconds of all steps of a training whose batch changes, each with its own; 0 for a batch that does not."""
    orthogonalisation_ms: float = 0.0
    """Part of `optimizer_ms` in which Muon orthogonalises matrices, and ranks exchange them; 0 for other optimisers."""


@dataclass(frozen=True, kw_only=True)
class Candidate(Strategy):
    """One row of the search: a strategy, and the reason why it was not chosen."""

    step_ms: float | None
    """Simulated step time, or a lower bound of it where `bubble_fraction` is None; None where it does not fit."""
    peak_bytes: int | None
    verdict: str
    """`chosen`, or a sentence."""
    bubble_fraction: float | None = None
    """Idle share of the simulated pipeline schedule; None where the step was not simulated."""
    selective_blocks: int = 0
    """Number of blocks with selective activation checkpointing."""
    full_blocks: int = 0
    """Number of blocks with full activation checkpointing."""


@dataclass(frozen=True, kw_only=True)
class Plan(Strategy):
    """A strategy with its stages, its predicted time and memory, and the candidates that it was chosen from."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    model: str
    signature: str
    """`Graph.signature` of the model that the plan was made for."""
    cluster: Cluster
    global_batch: int
    seq_len: int
    precision: str
    """Precision of the computation: `fp32` or `bf16`."""
    block_names: tuple[str, ...]
    stages: tuple[Stage, ...]
    """All stages in the model's order; pipeline rank r holds stages r, r + pipeline, …"""
    memory_limit_bytes: int | None
    """Limit that the user set for each device, None without one."""
    flops_per_step: int
    """Model FLOPs of one step over the whole global batch, forward and backward, without recomputation."""
    prediction: Prediction
    candidates: tuple[Candidate, ...] = ()
    coupled: bool = False
    """True if the loss compares the samples of a batch: an evaluation compares those of `global_batch` samples, too."""
    notes: tuple[str, ...] = ()
    """Sentences on the model that a user may not expect: coupled samples, statistics of BatchNorm."""
    loss_depends: tuple[str, ...] = ()
    """The sentences of `notes` on how the loss depends on the number of micro-batches: state that forward carries."""
    shares_matrices: tuple[bool, ...] = ()
    """True for each pipeline rank whose devices share out the matrices that an optimiser updates as a whole; empty
    without such matrices, and in plans that did not store it."""
    computation: Computation | None = field(default=None, repr=False)
    """Computation of the forward that the plan was made for; None for plans that do not say."""
    chunks: int = field(init=False)
    recompute: str = field(init=False)
    origin: Origin = field(default=None, init=False, repr=False, compare=False)
    """Profile and request of the search that made this plan in this process; not stored."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunks", len(self.stages) // self.pipeline)
        object.__setattr__(self, "recompute", common_recompute(self.recomputed_blocks))

    @property
    def facts(self) -> Facts | None:
        """Facts of the model that the plan was made for, in the process that made it; None elsewhere."""
        return None if self.origin is None else self.origin[0].facts

    @property
    def loss_samples(self) -> int | None:
        """Samples of the loss that is computed over all micro-batches and replicas; None if each has its own."""
        return self.global_batch if self.gathers else None

    @property
    def evaluation_batch(self) -> int:
        """Samples over which a held-out loss is computed at once."""
        return self.global_batch if self.coupled else self.micro_batch

    def stages_of(self, pipeline_rank: int) -> tuple[Stage, ...]:
        """Return the stages that a pipeline rank runs."""
        return self.stages[pipeline_rank :: self.pipeline]

    def shares_matrices_of(self, pipeline_rank: int) -> bool:
        """Return True if each matrix of a pipeline rank is orthogonalised once, False if each of its devices does all.

        Where devices hold parts of matrices, somebody must put them together, and one device does so for each. Plans
        that did not store the choice share them out, too: it changes the time of a step and no result.
        """
        if self.devices_per_stage == 1:
            return False
        is_divided = self.shards or self.tensor > 1
        return is_divided or not self.shares_matrices or self.shares_matrices[pipeline_rank]

    @property
    def recomputed_blocks(self) -> dict[str, int]:
        """Return the number of blocks with each kind of activation checkpointing."""
        each = [s.recompute_of(block) for s in self.stages for block in range(s.first_block, s.end_block)]
        return {recompute: each.count(recompute) for recompute in RECOMPUTE}

    def device_bytes(self, pipeline_rank: int) -> int:
        """Return the predicted peak of one device of a pipeline rank."""
        return sum(stage.memory.total for stage in self.stages_of(pipeline_rank))

    @property
    def peak_bytes(self) -> int:
        """Return the predicted peak of the fullest device."""
        return max(self.device_bytes(rank) for rank in range(self.pipeline))

    @property
    def host_bytes(self) -> int:
        """Return the optimiser state of the fullest device that lives in the host's memory; 0 unless offloaded."""
        return max(sum(stage.host_bytes for stage in self.stages_of(rank)) for rank in range(self.pipeline))

    @property
    def host_traffic_bytes(self) -> int:
        """Return the bytes that cross the link between that device and its host in a step, to the device and back."""
        return 2 * self.host_bytes

    @property
    def parameters(self) -> int:
        """Return the number of the model's parameters; one that several stages hold counts once."""
        return sum(stage.parameters - stage.tied_parameters for stage in self.stages)

    @property
    def model_bytes(self) -> int:
        """Return the size of the whole model as ranks build it: fp32, undivided."""
        return FP32 * self.parameters

    @property
    def built_on_device_bytes(self) -> float:
        """Return the size of the largest model that a rank initialises on its otherwise empty GPU."""
        return BUILD_SHARE * self.cluster.device.memory_bytes

    def to_json(self) -> dict[str, Any]:
        derived = {"chunks", "recompute", "origin"}
        return {"format": FORMAT, **_stored().dump_python(self, mode="json", exclude=derived)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Plan:
        """Return the plan of its JSON; raises `PlanMismatch` for anything else and for plans of another format."""
        try:
            fields = dict(value)
            if (stored := fields.pop("format")) != FORMAT:
                raise PlanMismatch(
                    f"The plan has format {stored} and this version of workbench reads format {FORMAT}. Plan again: "
                    f"wb.plan(experiment)."
                )
            plan = _stored().validate_json(json.dumps(fields), strict=True)
            problem = _arithmetic_problem(plan)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            if isinstance(error, WorkbenchError):
                raise
            said = first_problem(error) if isinstance(error, Refusal) else in_words(error)
            raise PlanMismatch(
                f"This is not a whole plan ({said}). Give what plan.save(path) or a run directory holds, or plan again "
                "with wb.plan(experiment)."
            ) from error
        if problem is not None:
            raise PlanMismatch(f"The plan contradicts itself: {problem} Plan again: wb.plan(experiment).")
        return plan

    @checked_arguments
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as JSON that `Plan.load` reads, and return the file."""
        file = Path(path).expanduser()
        try:
            write_json(file, self.to_json())
        except (OSError, ValueError) as error:  # `ValueError` for a path without a name
            raise PlanMismatch(
                f"The plan cannot be written to {str(file)[:200]}: {error}. Give another path."
            ) from None
        return file

    @staticmethod
    @checked_arguments
    def load(path: str | os.PathLike[str]) -> Plan:
        """Return the plan in a file that `save` wrote, or in a run directory; raises `PlanMismatch` for others."""
        file = Path(path).expanduser()
        try:
            named = file / "plan.json" if file.is_dir() else Path(os.path.realpath(file))
            return Plan.from_json(read_json(named))
        except (OSError, RecursionError, ValueError) as error:
            if isinstance(error, PlanMismatch):
                raise PlanMismatch(f"{file}: {error}") from error.__cause__
            raise PlanMismatch(f"{file} holds no plan ({error}). Write one there: plan.save(path).") from None

    def describe(self) -> str:
        """Return one sentence: `"PP 2 × DP 2 (ZeRO 2), 1F1B, 8 × 4 samples, 213 ms a step, 61.2 GiB a device"`."""
        return f"{self.division()}, {duration(self.prediction.step_ms / 1e3)} a step, {gib(self.peak_bytes)} a device"

    def division(self) -> str:
        """Return how a step is divided: `"PP 2 × DP 2 (ZeRO 2), 1F1B, 8 × 4 samples"`."""
        tensor = f" × TP {self.tensor}" if self.tensor > 1 else ""
        sharding = f" (ZeRO {self.zero})" if self.zero else ""
        chunks = f" × {self.chunks}" if self.chunks > 1 else ""
        extras = [self.recompute_words()] if self.recompute != "none" else []
        return ", ".join(
            (
                f"PP {self.pipeline} × DP {self.data}{tensor}{sharding}",
                f"{SCHEDULES[self.schedule].words}{chunks}",
                f"{self.num_microbatches} × {self.micro_batch} samples",
                *extras,
                *self.features,
            )
        )

    def recompute_words(self) -> str:
        """Return, for instance, `"selective activation checkpointing in 20 of 56 blocks"`."""
        if self.recompute != "mixed":
            return RECOMPUTE[self.recompute]
        blocks, total = self.recomputed_blocks, len(self.block_names)
        if blocks["full"] and blocks["selective"]:
            return f"{RECOMPUTE['full']} in {blocks['full']} and selective in {blocks['selective']} of {total} blocks"
        recompute = "full" if blocks["full"] else "selective"
        return f"{RECOMPUTE[recompute]} in {blocks[recompute]} of {total} blocks"

    def __repr__(self) -> str:
        return f"Plan({self.model} on {self.cluster.describe()}: {self.describe()})"

    def _repr_html_(self) -> str:
        facts = [("division", self.division()), ("step, predicted", duration(self.prediction.step_ms / 1e3))]
        facts += [("tokens/s, predicted", f"{self.prediction.tokens_per_s:,.0f}")]
        facts += [("fullest device, predicted", gib(self.peak_bytes)), *(("note", note) for note in self.notes)]
        stages = [
            (str(s.index), f"{s.first_block} to {s.end_block - 1}", count(s.parameters), gib(s.memory.total))
            for s in self.stages
        ]
        title = f"{self.model} on {self.cluster.describe()}"
        return facts_html(title, facts) + html_table(("stage", "blocks", "parameters", "memory"), stages)


@functools.cache
def _stored() -> TypeAdapter[Plan]:
    """Return what writes plans and checks the type of everything in one that is read."""
    return TypeAdapter(Plan)


def _arithmetic_problem(plan: Plan) -> str | None:
    """Return a sentence on the first number of a plan that does not fit the others, or None if all fit."""
    for name in ("pipeline", "data", "tensor", "num_microbatches", "micro_batch", "global_batch", "seq_len"):
        if getattr(plan, name) < 1:
            return f"{name} is {getattr(plan, name)} and must be a whole number from 1."
    samples = plan.data * plan.num_microbatches * plan.micro_batch
    if samples != plan.global_batch:
        return (
            f"{plan.data} replicas × {plan.num_microbatches} micro-batches × {plan.micro_batch} samples are {samples} "
            f"samples a step, and global_batch is {plan.global_batch}."
        )
    if len(plan.shares_matrices) not in (0, plan.pipeline):
        return f"shares_matrices has {len(plan.shares_matrices)} entries for {plan.pipeline} pipeline ranks."
    if plan.schedule not in SCHEDULES:
        return f"There is no schedule {plan.schedule!r}."
    if not plan.stages or len(plan.stages) % plan.pipeline:
        return f"{len(plan.stages)} stages cannot be divided over {plan.pipeline} pipeline ranks."
    ends = [0, *(stage.end_block for stage in plan.stages)]
    cuts = [(stage.index, stage.first_block) for stage in plan.stages]
    if cuts != list(enumerate(ends[:-1])) or ends != sorted(ends) or ends[-1] != len(plan.block_names):
        return f"Its stages do not hold each of the {len(plan.block_names)} blocks once, in order."
    return None


def common_recompute(blocks: Mapping[str, int]) -> str:
    """Return the kind of activation checkpointing that all blocks have, `mixed` if they differ.

    `blocks` maps each kind to the number of blocks that have it.
    """
    return next((recompute for recompute, count in blocks.items() if count == sum(blocks.values())), "mixed")
