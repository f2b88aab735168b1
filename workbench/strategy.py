"""The choices of a plan, stated once: what a user may fix, what may be combined, and what each choice implies.

`Choices` holds what a user fixes; `Strategy` is one complete set of choices, which plans, candidates and the planner's
cost model share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypedDict, Unpack

from workbench.errors import PlanInfeasible, checked_keywords
from workbench.pipeline_schedules import SCHEDULES, find_schedule
from workbench.units import plain
from workbench.validation import AfterValidator, Count, Field, PlainValidator, TrueOrFalse, Whole, checked_items, known

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
    """One of `workbench.pipeline_schedules.SCHEDULES`."""
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
    def world(self) -> int:
        return self.pipeline * self.data * self.tensor

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

    def keeps_weight_copies(self, precision: str) -> bool:
        """Return True if ranks keep bf16 copies of their weights for a whole step.

        They do where neither FSDP2 nor DistributedDataParallel manages the weights.
        """
        return precision == "bf16" and (self.data == 1 or self.cuda_graphs)
