"""A `Plan`: how one step of one model is divided over one cluster, and what that is predicted to cost.

Pure values; a plan is JSON, and is stored with every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from workbench.cost.cluster import Cluster
from workbench.units import duration, gib

FORMAT = 1


@dataclass(frozen=True)
class Memory:
    """Predicted bytes on one device of a stage at its peak."""

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
    """Blocks `first_block` … `end_block - 1`, run by every device of pipeline rank `index % pipeline`."""

    index: int
    first_block: int
    end_block: int
    parameters: int
    """Elements resident, each tied parameter counted in every stage that holds it."""
    forward_ms: float
    """One micro-batch."""
    backward_ms: float
    """One micro-batch, recomputation included."""
    send_bytes: int
    """To the next stage, one micro-batch, forward; the backward returns as much."""
    recompute: bool
    memory: Memory


@dataclass(frozen=True)
class Prediction:
    """Where a predicted step goes; the parts sum to `step_ms`, as seen by the busiest pipeline rank."""

    step_ms: float
    compute_ms: float
    bubble_ms: float
    communication_ms: float
    """Exposed: what overlap does not hide."""
    optimizer_ms: float
    bubble_fraction: float
    """Idle share of the pipeline's schedule, by simulation."""
    tokens_per_s: float
    mfu: float | None
    """Model FLOPs (PaLM's definition: no recomputation) over peak FLOPs of all devices; None on CPUs."""


@dataclass(frozen=True)
class Candidate:
    """One row of the search: what was weighed, and why it was not chosen."""

    pipeline: int
    data: int
    zero: int
    recompute: bool
    micro_batch: int
    step_ms: float | None
    peak_bytes: int | None
    verdict: str
    """`chosen`, or a sentence."""


@dataclass(frozen=True)
class Plan:
    """Degrees, stages and schedule. `pipeline * data * tensor` devices are used."""

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
    """ZeRO stage of the data-parallel axis: 0 replicates, 2 shards gradients and optimiser, 3 also parameters."""
    schedule: str
    """`1f1b` or `gpipe`."""
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

    @property
    def world(self) -> int:
        return self.pipeline * self.data * self.tensor

    @property
    def peak_bytes(self) -> int:
        return max(stage.memory.total for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self), "cluster": self.cluster.to_json()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Plan:
        fields = {key: item for key, item in value.items() if key != "format"}
        fields["cluster"] = Cluster.from_json(fields["cluster"])
        fields["block_names"] = tuple(fields["block_names"])
        fields["stages"] = tuple(Stage(**{**s, "memory": Memory(**s["memory"])}) for s in fields["stages"])
        fields["prediction"] = Prediction(**fields["prediction"])
        fields["candidates"] = tuple(Candidate(**c) for c in fields["candidates"])
        return Plan(**fields)

    def describe(self) -> str:
        """One sentence: `"PP 2 × DP 2 (ZeRO 2), 1F1B, 8 × 4 samples, 213 ms a step, 61.2 GiB"`."""
        sharding = f" (ZeRO {self.zero})" if self.zero else ""
        recompute = ", activation checkpointing" if any(s.recompute for s in self.stages) else ""
        return (
            f"PP {self.pipeline} × DP {self.data}{sharding}, {self.schedule.upper()}, "
            f"{self.num_microbatches} × {self.micro_batch} samples{recompute}, "
            f"{duration(self.prediction.step_ms / 1e3)} a step, {gib(self.peak_bytes)} a device"
        )

    def __repr__(self) -> str:
        return f"Plan({self.model} on {self.cluster.describe()}: {self.describe()})"
