"""What one device of a stage holds at its peak, for every possible stage at once.

Matrices are indexed `[i, j]`: the stage made of blocks `i … j - 1`. What resides when:

=========  =====================================  ====================  ==================  =================
ZeRO       parameters, fp32                       compute copies        gradients, fp32     AdamW, fp32 twice
=========  =====================================  ====================  ==================  =================
0          all                                    bf16, per in-flight   all                 all
1          1/data                                 all, all step long    all                 1/data
2          1/data                                 all, all step long    1/data              1/data
3          1/data                                 two blocks at a time  1/data              1/data
=========  =====================================  ====================  ==================  =================

Compute copies: under bf16, autocast casts each fp32 weight once per micro-batch, and the backward needs the
copy (seen on H200 for compiled blocks too). Where a stage has no replicas, copies of the weights of its products are
kept all step long instead. FSDP2 gathers them in bf16 to begin with; with
`reshard_after_forward=False` (ZeRO 1 and 2) they stay through the step, otherwise (ZeRO 3) a block and the one
gathered ahead of it. ZeRO 1 keeps whole gradients until the last micro-batch; from ZeRO 2 on they are reduced after
every micro-batch's backward, so that only one block's are ever whole. In a step of a single micro-batch that holds for
ZeRO 1 too, and gradients come block by block while activations go: where the last block's backward is the fullest
moment, there are none yet but its own. (DistributedDataParallel's buckets are there all the time.) Optimiser state
that is offloaded takes nothing on the device but the part that travels. (ZeRO: arXiv:1910.02054; FSDP2:
torch.distributed.fsdp.fully_shard.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from workbench.cost.profile import BlockCosts, Profile

Array = npt.NDArray[np.float64]

FP32, HALF = 4, 2
ADAMW = 8
"""Two fp32 moments."""
IN_TRANSIT_BYTES = 256 << 20
"""Optimiser state on the device at once, where it lives on the host."""
PREFETCHED_BLOCKS = 2
"""Blocks whole at once under ZeRO 3: the one that runs and the one gathered ahead."""


@dataclass(frozen=True)
class Shares:
    """How the state of a stage is divided and what its schedule holds."""

    zero: int
    data: int
    num_microbatches: int
    offload_optimizer: bool = False
    halves: bool = False
    """bf16 copies of weights are kept for a whole step (`workbench.planning.plan.keeps_halves`)."""
    by_hand: bool = False
    """Replicas average their gradients without DistributedDataParallel (`workbench.planning.plan`)."""

    @property
    def sharded(self) -> bool:
        return self.zero >= 1 and self.data > 1

    @property
    def in_buckets(self) -> bool:
        """DistributedDataParallel has the gradients."""
        return self.zero == 0 and self.data > 1 and not self.all_reduces_gradients

    @property
    def gradient_bytes(self) -> float:
        """Of each trained element on one device, between two micro-batches or when the last one's backward is over."""
        whole = not self.sharded or (self.zero == 1 and self.num_microbatches > 1)
        # DistributedDataParallel's buckets hold a second copy while micro-batches before the last accumulate beside.
        copies = 2 if self.in_buckets and self.num_microbatches > 1 else 1
        return FP32 * copies / (1 if whole else self.data)

    @property
    def coming_bytes(self) -> float:
        """Of these, what is not there yet before a block's backward: all of it, or nothing."""
        return 0.0 if self.in_buckets or self.num_microbatches > 1 else self.gradient_bytes


@dataclass(frozen=True)
class StageState:
    """Bytes for every stage `[i, j]` that stay all step long."""

    parameters: Array
    gradients: Array
    optimizer: Array
    workspace: Array
    """Buffers that do not depend on the schedule."""

    @cached_property
    def total(self) -> Array:
        return np.asarray(self.parameters + self.gradients + self.optimizer + self.workspace)


@dataclass(frozen=True, eq=False)
class Activations:
    """Bytes of stages, mostly for every kind of activation checkpointing: `[kind, i, j]`. Equal to itself only."""

    held: Array
    """Of one whole micro-batch, between its forward and its backward."""
    newest: Array
    """Of the micro-batch that runs, at its own worst moment."""
    least: Activations | None = None
    """`[i, j]`: of each block the least of any kind, less than which no mixture of them holds."""

    def of(self, in_flight: int) -> Array:
        """Of `in_flight` micro-batches, the newest of which runs."""
        return (in_flight - 1) * self.held + self.newest


class ParameterTable:
    """Elements of every possible stage, tied parameters once; made once per profile."""

    def __init__(self, profile: Profile) -> None:
        uses: dict[str, list[int]] = {}
        for index, block in enumerate(profile.blocks):
            for name in block.parameters:
                uses.setdefault(name, []).append(index)
        self.shared = {name: blocks for name, blocks in uses.items() if len(blocks) > 1}
        """Parameters that several blocks use, with those blocks."""
        self.sizes = dict(profile.parameters)
        """Elements of each parameter on one device, before ZeRO."""
        trained = {name: 0 if name in profile.frozen else size for name, size in profile.parameters.items()}
        self.elements = _spans(uses, profile.parameters, len(profile.blocks))
        learning = [bool(profile.block_types[block.block_type].backward) for block in profile.blocks]
        again = {name: [index for index in blocks if learning[index]] for name, blocks in uses.items()}
        self.elements_again = _spans(again, profile.parameters, len(profile.blocks))
        """Of every stage, elements that its backward needs: none of blocks that have no backward."""
        self.trained = _spans(uses, trained, len(profile.blocks))
        self.block_elements = np.array(
            [sum(profile.parameters[name] for name in block.parameters) for block in profile.blocks], dtype=np.float64
        )
        self.block_elements_again = np.where(learning, self.block_elements, 0.0)
        self.block_trained = np.array(
            [sum(trained[name] for name in block.parameters) for block in profile.blocks], dtype=np.float64
        )
        own = [[name for name in block.parameters if name not in self.shared] for block in profile.blocks]
        self.own_trained = np.array([sum(trained[name] for name in names) for names in own], dtype=np.float64)
        """Of every block, elements of trained parameters that no other block uses."""
        sizes = np.array([sum(profile.parameters[name] for name in names) for names in own], dtype=np.float64)
        cast = np.array([profile.block_types[block.block_type].cast_elements for block in profile.blocks])
        self.cast = spans(np.minimum(cast, sizes))
        """Of every stage, elements of weights that matrix products read in bf16; what several blocks use left out."""
        self.largest = _span_max(self.block_elements)
        """Of every stage, elements of its largest block."""
        self.largest_trained = _span_max(self.block_trained)
        """The same of what is trained: the gradients that a block makes."""


def _spans(uses: Mapping[str, list[int]], sizes: Mapping[str, int], blocks: int) -> Array:
    """`[i, j]`: elements that blocks `i … j - 1` need, a parameter used by several of them once."""
    each = np.zeros(blocks + 1)
    again = np.zeros((blocks + 1, blocks + 1))
    for name, indices in uses.items():
        for index in indices:
            each[index + 1] += sizes[name]
        for first, second in pairwise(indices):
            again[: first + 1, second + 1 :] += sizes[name]
    total = each.cumsum()
    return np.asarray(total[None, :] - total[:, None] - again)


def stage_state(profile: Profile, table: ParameterTable, micro_batch: int, shares: Shares) -> StageState:
    """State of every stage for one choice of micro-batch and sharding."""
    sharded = shares.sharded
    divisor = shares.data if sharded else 1
    compute_bytes = 2 if profile.precision == "bf16" else FP32
    largest = table.largest
    parameters = FP32 * table.elements / divisor
    if sharded and shares.zero <= 2:
        parameters = parameters + compute_bytes * table.elements
    elif sharded:
        parameters = parameters + PREFETCHED_BLOCKS * compute_bytes * largest
    elif shares.keeps_weight_copies:
        parameters = parameters + HALF * table.cast
    # One block's gradients whole, and the fp32 buffer that is reduced.
    reduction = ((compute_bytes + FP32) if shares.data > 1 else FP32) * table.largest_trained
    moments = ADAMW * table.trained / divisor
    return StageState(
        parameters=parameters,
        gradients=shares.gradient_bytes * table.trained,
        optimizer=np.minimum(moments, IN_TRANSIT_BYTES) if shares.offload_optimizer else moments,
        workspace=reduction + _boundary(profile, micro_batch, shares.num_microbatches),
    )


def activations(costs: BlockCosts, table: ParameterTable, shares: Shares, kinds: tuple[str, ...]) -> Activations:
    """Of every stage whose blocks are all recomputed alike, by each of `kinds`.

    A stage recomputed in two ways is two such stages, one after the other. Where gradients come block by block, a
    block that is still to run backward holds so much less than the stage's state, which counts all of them.
    """
    copied = not shares.sharded and not shares.keeps_weight_copies
    return _activations(costs, table, kinds, copied=copied, coming_bytes=shares.coming_bytes)


@lru_cache(maxsize=64)
def _activations(
    costs: BlockCosts, table: ParameterTable, kinds: tuple[str, ...], *, copied: bool, coming_bytes: float
) -> Activations:
    """`copied`: with the weights' copies."""
    coming = coming_bytes * table.own_trained
    kept, own = zip(*(_of_blocks(costs, kind, copied=copied) for kind in kinds), strict=True)
    held, newest = zip(*(_held(k - coming, o) for k, o in zip(kept, own, strict=True)), strict=True)
    least = _held(np.minimum.reduce(kept) - coming, np.minimum.reduce(own))
    return Activations(np.stack(held), np.stack(newest), Activations(*least))


def _of_blocks(costs: BlockCosts, recompute: str, *, copied: bool) -> tuple[Array, Array]:
    """What each block keeps for its backward, and what it takes in all at its own worst moment."""
    copies = costs.weight_copy_bytes if copied else np.zeros_like(costs.weight_copy_bytes)
    if recompute == "full":
        kept = costs.input_bytes
        peak = costs.saved_bytes + copies + costs.workspace_bytes
    elif recompute == "selective":
        reduced = np.array([sum(sizes) for sizes in costs.forward_reduced])  # kept besides the partial products
        kept = np.minimum(costs.input_bytes + costs.products_bytes + reduced, costs.saved_bytes + copies)
        peak = costs.saved_bytes + copies + costs.workspace_bytes - (kept - costs.input_bytes)
    else:
        kept = costs.saved_bytes + copies
        peak = costs.workspace_bytes
    return kept, kept + peak


def _held(kept: Array, own: Array) -> tuple[Array, Array]:
    """`[i, j]`: held by one micro-batch in flight, and by the one that runs at its worst moment.

    Backward frees from the last block on, so at block k everything before it is still held.
    """
    total = np.concatenate([[0.0], kept.cumsum()])
    blocks = len(kept)
    held = total[None, :] - total[:, None]
    worst = np.tile(total[:-1] + own, (blocks, 1))
    worst[np.tril_indices(blocks, -1)] = -np.inf
    newest = np.zeros((blocks + 1, blocks + 1))
    newest[:-1, 1:] = np.maximum.accumulate(worst, axis=1) - total[:-1, None]
    return held, np.where(np.isfinite(newest), newest, 0.0)


def _boundary(profile: Profile, micro_batch: int, num_microbatches: int) -> Array:
    """Receive buffers: torch's stages allocate one per micro-batch of the step, for inputs and for gradients."""
    crossing = np.array(profile.crossing_bytes) * micro_batch
    return np.asarray((crossing[:, None] + crossing[None, :]) * (num_microbatches + 1))


def spans(values: Array) -> Array:
    """`[i, j]`: the sum of `values[i:j]`."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(total[None, :] - total[:, None])


def _span_max(values: Array) -> Array:
    """`[i, j]`: the largest of `values[i:j]`."""
    blocks = len(values)
    table = np.tile(values, (blocks, 1))
    table[np.tril_indices(blocks, -1)] = 0.0
    result = np.zeros((blocks + 1, blocks + 1))
    result[:-1, 1:] = np.maximum.accumulate(table, axis=1)
    return result
