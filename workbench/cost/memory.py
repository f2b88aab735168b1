"""The memory of one device of a stage at its peak, for every possible stage at once.

Matrices are indexed `[i, j]`: the stage made of blocks `i … j - 1`. Resident state by ZeRO stage:

=========  =====================================  ====================  ==================  =================
ZeRO       parameters, fp32                       compute copies        gradients, fp32     AdamW, fp32 twice
=========  =====================================  ====================  ==================  =================
0          all                                    bf16, per in-flight   all                 all
1          1/data                                 all, all step long    all                 1/data
2          1/data                                 all, all step long    1/data              1/data
3          1/data                                 two blocks at a time  1/data              1/data
=========  =====================================  ====================  ==================  =================

Under bf16, autocast casts each fp32 weight once per micro-batch, and the backward needs this compute copy. A stage
without replicas keeps copies of the weights of its products all step long instead. FSDP2 all-gathers weights in bf16:
with `reshard_after_forward=False` (ZeRO 1 and 2) they stay through the step, otherwise (ZeRO 3) a block and the next
are whole. ZeRO 1 keeps whole gradients until the last micro-batch; from ZeRO 2 on they are reduced after every
micro-batch's backward, so that only one block's are ever whole. In a step of a single micro-batch this holds for
ZeRO 1 too, and gradients appear block by block while activations are freed: at the last block's backward, usually the
peak, the stage has no gradients but that block's. DistributedDataParallel's buckets exist all the time. Offloaded
optimiser state takes on the device only the part in transit. Gradients of weights that have bf16 copies stay in bf16
where `keeps_bf16_gradients` says so. A moving average of the weights is one more fp32 copy of the trained ones, sharded
as they are. (ZeRO: arXiv:1910.02054; FSDP2: torch.distributed.fsdp.fully_shard.)

The last section is the time in which a stage orthogonalises its matrices, in rounds of as many bytes as are in transit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.cost.hardware import Cluster
from workbench.cost.profile import ADAMW, BlockCosts, ParameterUpdate, Profile
from workbench.strategy import Strategy

Array = npt.NDArray[np.float64]

FP32, BF16 = 4, 2
"""Bytes of one element."""
MASK_BYTES = 1
"""Bytes of one element of the mask of a sparse weight."""
IN_TRANSIT_BYTES = 256 << 20
"""Bytes of optimiser state on the device at once, where it is offloaded to the host."""
PREFETCHED_BLOCKS = 2
"""Blocks that are whole at once under ZeRO 3: the one that runs and the one all-gathered ahead."""


def gradient_bytes(strategy: Strategy) -> float:
    """Return the bytes per trained element on one device of gradients in fp32."""
    whole = not strategy.shards or (strategy.zero == 1 and strategy.num_microbatches > 1)
    # DistributedDataParallel's buckets are a second copy beside the gradients that earlier ones accumulate.
    copies = 2 if strategy.uses_ddp and strategy.num_microbatches > 1 else 1
    return FP32 * copies / (1 if whole else strategy.data)


def keeps_bf16_gradients(profile: Profile, strategy: Strategy) -> bool:
    """Return True if gradients of weights that have bf16 copies stay in bf16, in which the backward makes them.

    They do where a step makes each once and our kernels, which read bf16, make the update.
    """
    copies = strategy.makes_gradients_once and strategy.keeps_weight_copies(profile.precision)
    by_kernel = profile.device_type == "cuda" and profile.optimizer_in_one_pass and not strategy.offload_optimizer
    return copies and by_kernel and profile.sparse is None


def stage_gradients(profile: Profile, table: ParameterTable, strategy: Strategy) -> Array:
    """Return the bytes of the gradients of every stage, between micro-batches and after the last backward."""
    # One stage `[i, j]` has all its gradients at once here; `pending_gradients` takes off those that are still to come.
    saved = (FP32 - BF16) * spans(table.own_cast) if keeps_bf16_gradients(profile, strategy) else 0.0
    return np.asarray(gradient_bytes(strategy) * table.trained - saved)


def pending_gradients(profile: Profile, table: ParameterTable, strategy: Strategy) -> Array:
    """Return the bytes of each block's own gradients that do not exist before its backward: all of them, or none."""
    if strategy.uses_ddp or strategy.num_microbatches > 1:
        return np.zeros_like(table.own_trained)
    saved = (FP32 - BF16) * table.own_cast if keeps_bf16_gradients(profile, strategy) else 0.0
    return np.asarray(gradient_bytes(strategy) * table.own_trained - saved)


@dataclass(frozen=True)
class StageState:
    """Bytes of every stage `[i, j]` that stay all step long."""

    parameters: Array
    gradients: Array
    optimizer: Array
    workspace: Array
    """Bytes of buffers that do not depend on the schedule."""

    @cached_property
    def total(self) -> Array:
        return np.asarray(self.parameters + self.gradients + self.optimizer + self.workspace)


@dataclass(frozen=True, eq=False)
class Activations:
    """Bytes of activations of every stage, by mode of activation checkpointing: `[mode, i, j]`.

    An instance equals only itself, so that it can be the key of a cache.
    """

    held: Array
    """Bytes of one micro-batch between its forward and its backward."""
    newest: Array
    """Bytes of the micro-batch that runs, at its peak."""
    least: Activations | None = None
    """Lower bound `[i, j]` for any mixture of modes: each block with the mode that holds least."""

    def of(self, in_flight: int) -> Array:
        """Return the bytes of `in_flight` micro-batches, the newest of which runs."""
        return (in_flight - 1) * self.held + self.newest

    def with_last(self, nbytes: float) -> Activations:
        """Return these bytes where a last stage has `nbytes` at another moment, when no micro-batch is in flight."""
        least, newest = None if self.least is None else self.least.with_last(nbytes), self.newest.copy()
        newest[..., -1] = np.maximum(newest[..., -1], nbytes)
        return Activations(self.held, newest, least)


class ParameterTable:
    """Numbers of parameters (elements) of every possible stage `[i, j]`, with tied parameters counted once."""

    def __init__(self, profile: Profile) -> None:
        uses: dict[str, list[int]] = {}
        for index, block in enumerate(profile.blocks):
            for name in block.parameters:
                uses.setdefault(name, []).append(index)
        self.shared = {name: blocks for name, blocks in uses.items() if len(blocks) > 1}
        """Indices of the blocks that use a parameter, for parameters that several blocks use."""
        self.sizes = dict(profile.parameters)
        """Elements of each parameter on one device, before ZeRO shards it."""
        trained = {name: 0 if name in profile.frozen else size for name, size in profile.parameters.items()}
        self.elements = _spans(uses, profile.parameters, len(profile.blocks))
        learning = [bool(profile.block_types[block.block_type].backward) for block in profile.blocks]
        again = {name: [index for index in blocks if learning[index]] for name, blocks in uses.items()}
        self.elements_again = _spans(again, profile.parameters, len(profile.blocks))
        """Elements that a stage's backward needs: none of blocks without a backward."""
        self.trained = _spans(uses, trained, len(profile.blocks))
        self.update = UpdateTable(profile, uses, trained, self.trained)
        masked = {name: profile.parameters[name] if name in profile.masked else 0 for name in uses}
        self.masked = _spans(uses, masked, len(profile.blocks))
        """Elements of a stage's sparse weights that are multiplied by masks."""
        patterns = {name: profile.pattern_bytes.get(name, 0.0) for name in uses}
        self.pattern_bytes = _spans(uses, patterns, len(profile.blocks))
        """Bytes of the patterns and indices of a stage's sparse weights, which are not sharded."""
        self.block_elements = np.array(
            [sum(profile.parameters[name] for name in block.parameters) for block in profile.blocks], dtype=np.float64
        )
        self.block_elements_again = np.where(learning, self.block_elements, 0.0)
        self.block_trained = np.array(
            [sum(trained[name] for name in block.parameters) for block in profile.blocks], dtype=np.float64
        )
        own = [[name for name in block.parameters if name not in self.shared] for block in profile.blocks]
        self.own_trained = np.array([sum(trained[name] for name in names) for names in own], dtype=np.float64)
        """Elements of each block's trained parameters that no other block uses."""
        sizes = np.array([sum(profile.parameters[name] for name in names) for names in own], dtype=np.float64)
        cast = np.array([profile.block_types[block.block_type].cast_elements for block in profile.blocks])
        self.cast = spans(np.minimum(cast, sizes))
        """Elements of a stage's weights that products read in bf16, without parameters that several blocks use."""
        self.own_cast = np.minimum(cast, self.own_trained)
        """Elements of each block's trained weights among them."""
        self._shared_elements = self.block_elements - sizes
        """Elements of each block's parameters that other blocks use, too."""
        self.shared_cast = np.maximum(0.0, cast - sizes)
        """Elements of each block's weights that products read in bf16 and other blocks use, too."""
        self.largest = _span_max(self.block_elements)
        """Elements of a stage's largest block."""
        self.largest_trained = _span_max(self.block_trained)
        """Most trained elements of any block of a stage."""

    def of_several(self, elements: Array) -> Array:
        """Return the elements of every stage `[i, j]` in parameters that several of its blocks use, with each use.

        `elements` has a number for each block: how many elements of parameters that any other block uses count there.
        They are divided among these parameters by size.
        """
        result = spans(elements)
        shares = elements / np.maximum(1.0, self._shared_elements)
        for name, indices in self.shared.items():
            neighbours = zip((-1, *indices), indices, (*indices[1:], len(elements)), strict=False)
            for before, index, after in neighbours:  # stages in which it is the only one
                result[before + 1 : index + 1, index + 1 : after + 1] -= shares[index] * self.sizes[name]
        return result


class UpdateTable:
    """Cost of the optimiser for every possible stage `[i, j]`, before ZeRO shards it."""

    def __init__(
        self, profile: Profile, uses: Mapping[str, list[int]], trained: Mapping[str, int], elements: Array
    ) -> None:
        updates = {name: update for name, update in profile.parameter_updates.items() if trained.get(name)}

        def with_own(common: float, own: Callable[[ParameterUpdate], float]) -> Array:
            """Return `common` for each trained element, and what `own` returns for those of parameters in `updates`."""
            more = {name: trained[name] * (own(update) - common) for name, update in updates.items()}
            return np.asarray(common * elements + (total(more) if more else 0.0))

        def total(each: Mapping[str, float]) -> Array:
            return _spans({name: uses[name] for name in each}, each, len(profile.blocks))

        self.state_bytes = with_own(profile.optimizer_state_bytes, lambda update: update.state_bytes)
        self.traffic_bytes = with_own(profile.optimizer_update_bytes, lambda update: update.update_bytes)
        self.traffic_bytes += 3 * profile.average_bytes * elements  # read with the weight, and written
        whole = {name: update for name, update in updates.items() if update.whole_elements}
        sizes = {name: float(update.whole_elements) for name, update in whole.items()}
        flops = {name: update.whole_flops for name, update in whole.items()}
        self.whole_elements = total(sizes)
        """Elements of the matrices that are orthogonalised."""
        self.divided_elements = total({name: size for name, size in sizes.items() if trained[name] < size})
        """Elements of those among them that tensor parallelism divides."""
        self.flops = total(flops)
        """FLOPs with which they are orthogonalised."""
        self.gram_elements = total({name: float(update.gram_elements) for name, update in whole.items()})
        """Elements of their Gram matrices."""
        of_blocks = [max((flops.get(name, 0.0) for name in block.parameters), default=0.0) for block in profile.blocks]
        self.largest_flops = _span_max(np.array(of_blocks))
        """FLOPs of the one among them that takes longest."""
        self.matrices = total(dict.fromkeys(whole, 1.0))
        """Number of them."""
        self.shapes = len({(update.whole_elements, update.whole_flops) for update in whole.values()})
        """Number of their different shapes in the model."""

    def matrices_of(self, whole: Callable[[Array], Array]) -> Matrices:
        """Return the matrices of the stages for which `whole` returns what a value of every possible stage is."""
        return Matrices(
            flops=whole(self.flops),
            elements=whole(self.whole_elements),
            divided_elements=whole(self.divided_elements),
            largest_flops=whole(self.largest_flops),
            gram_elements=whole(self.gram_elements),
            shapes=self.shapes,
        )


def _spans(uses: Mapping[str, list[int]], sizes: Mapping[str, float], blocks: int) -> Array:
    """Return the elements that each stage `[i, j]` needs, a parameter that several of its blocks use once."""
    each = np.zeros(blocks + 1)
    again = np.zeros((blocks + 1, blocks + 1))
    for name, indices in uses.items():
        for index in indices:
            each[index + 1] += sizes[name]
        for first, second in pairwise(indices):  # stages with both count the second use as none
            again[: first + 1, second + 1 :] += sizes[name]
    total = each.cumsum()
    return np.asarray(total[None, :] - total[:, None] - again)


def stage_state(profile: Profile, table: ParameterTable, strategy: Strategy) -> StageState:
    """Return the state of every stage under one strategy."""
    compute_bytes = BF16 if profile.precision == "bf16" else FP32
    parameters = (FP32 * table.elements + profile.average_bytes * table.trained) / strategy.shard_count
    if strategy.shards_parameters:
        parameters = parameters + PREFETCHED_BLOCKS * compute_bytes * table.largest
    elif strategy.shards:
        parameters = parameters + compute_bytes * table.elements
    elif strategy.keeps_weight_copies(profile.precision):
        parameters = parameters + BF16 * table.cast
    # One block's whole gradients, and the fp32 buffer that the reduce-scatter or all-reduce uses.
    reduction = ((compute_bytes + FP32) if strategy.data > 1 else FP32) * table.largest_trained
    moments = table.update.state_bytes / strategy.shard_count
    patterns = MASK_BYTES * table.masked / strategy.shard_count + table.pattern_bytes
    gathered = np.zeros(len(profile.blocks) + 1)
    if profile.tail is not None:
        gathered[-1] = profile.tail.held_bytes
    # Receive buffers: torch's stages allocate one per micro-batch, for inputs and gradients.
    crossing = np.array(profile.crossing_bytes) * strategy.micro_batch
    received = (crossing[:, None] + crossing[None, :]) * (strategy.num_microbatches + 1)
    return StageState(
        parameters=parameters,
        gradients=stage_gradients(profile, table, strategy),
        optimizer=np.minimum(moments, IN_TRANSIT_BYTES) if strategy.offload_optimizer else moments,
        workspace=reduction + patterns + received + gathered,
    )


def activations(
    costs: BlockCosts, table: ParameterTable, strategy: Strategy, profile: Profile, modes: tuple[str, ...]
) -> Activations:
    """Return the activations of every stage whose blocks all use the same of `modes` (keys of `RECOMPUTE`).

    A stage with two modes is two such stages, one after the other. Where gradients appear block by block, a block
    whose backward is still to come holds that much less than the stage's state, which counts all gradients.
    """
    copied = not strategy.shards and not strategy.keeps_weight_copies(profile.precision)
    return _activations(costs, modes, copied=copied, pending=tuple(pending_gradients(profile, table, strategy)))


@lru_cache(maxsize=64)
def _activations(costs: BlockCosts, modes: tuple[str, ...], *, copied: bool, pending: tuple[float, ...]) -> Activations:
    """Return `activations`; `copied` counts autocast's weight copies, `pending` are each block's gradients to come."""
    kept, own = zip(*(_of_blocks(costs, mode, copied=copied) for mode in modes), strict=True)
    held, newest = zip(*(_held(k - pending, o) for k, o in zip(kept, own, strict=True)), strict=True)
    least = _held(np.minimum.reduce(kept) - pending, np.minimum.reduce(own))
    return Activations(np.stack(held), np.stack(newest), Activations(*least))


def _of_blocks(costs: BlockCosts, recompute: str, *, copied: bool) -> tuple[Array, Array]:
    """Return the bytes that each block keeps for its backward, and all that it has at its own peak.

    The last block is not recomputed: its backward follows its forward.
    """
    copies = costs.weight_copy_bytes if copied else np.zeros_like(costs.weight_copy_bytes)
    saved = costs.saved_bytes + copies
    own = saved + costs.workspace_bytes
    if recompute == "none":
        return saved, own
    reduced = np.array([sum(sizes) for sizes in costs.forward_reduced])  # kept beside products' partial results
    selective = np.minimum(costs.input_bytes + costs.products_bytes + reduced, saved)
    runs_as = costs.runs_as[recompute]
    kept = np.select([runs_as == "none", runs_as == "selective"], [saved, selective], costs.input_bytes)
    is_last = np.arange(len(saved)) == len(saved) - 1
    return np.where(is_last, saved, kept), np.where(is_last, own, own + costs.input_bytes)


def _held(kept: Array, own: Array) -> tuple[Array, Array]:
    """Return the bytes `[i, j]` of one micro-batch in flight, and of the running micro-batch at its peak.

    The backward frees activations from the last block on, so at block k all blocks before it still hold theirs.
    """
    total = np.concatenate([[0.0], kept.cumsum()])
    return spans(kept), np.triu(_span_max(total[:-1] + own) - total[:, None], 1)


def spans(values: Array) -> Array:
    """Return the sums of `values[i:j]` at `[i, j]`."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(total[None, :] - total[:, None])


def _span_max(values: Array) -> Array:
    """Return the largest of `values[i:j]` at `[i, j]`; 0 where there are none."""
    blocks = len(values)
    table = np.tile(values, (blocks, 1))
    table[np.tril_indices(blocks, -1)] = -np.inf
    result = np.zeros((blocks + 1, blocks + 1))
    result[:-1, 1:] = np.maximum.accumulate(table, axis=1)
    return np.triu(result, 1)


# The time in which the ranks of a stage orthogonalise its matrices, as `workbench.optimizers.muon` does it.
#
# The ranks that hold a stage share its matrices out; or each does all of them, which is faster where products take less
# time than a collective. The planner decides, and its plan says what ranks do. Numbers may be arrays, one entry for
# each stage.

ROUND_ELEMENTS = IN_TRANSIT_BYTES // ADAMW
"""Number of elements of a round (`workbench.optimizers.adamw.BATCH_ELEMENTS`)."""
GRAM_BYTES = 50
"""Bytes whose transfer takes as long as all that is done to an element of a Gram matrix beside the products: five
copies and two scalings moved 28, in kernels that broadcast. Measured on one H100 with the matrices of BERT of 54 layers
× 1920: 21 ms for 1.2 billion elements. An update now makes one copy and one scaling fewer, which was not timed yet."""
PRODUCTS = 15
"""Number of products that orthogonalise a batch of matrices of one shape: three in each of five iterations."""


@dataclass(frozen=True)
class Matrices:
    """The matrices of a stage, or of each of many stages."""

    flops: Any
    """FLOPs of the products that orthogonalise all of them."""
    elements: Any
    divided_elements: Any
    """Elements of those that the tensor-parallel axis divides."""
    largest_flops: Any
    """FLOPs of the one that takes longest."""
    gram_elements: Any
    """Elements of their Gram matrices, all together."""
    shapes: int
    """Number of different shapes, each of which makes a batch of its own."""


def orthogonalisation_s(matrices: Matrices, strategy: Strategy, cluster: Cluster) -> Any:
    """Return the seconds in which the matrices of a stage are orthogonalised, exchange included, once a step."""
    alone = _products_s(matrices, cluster, 1)
    ranks = strategy.devices_per_stage
    if ranks == 1:
        return alone
    # Shards reach their owners, and results all ranks that hold a shard. Of a matrix that `sources` ranks hold in
    # parts, an owner receives all other parts of its own 1 / ranks of the matrices, and every rank its part of all that
    # others own.
    rows, is_divided = strategy.data if strategy.shards else 1, strategy.shards or strategy.tensor > 1
    whole = (matrices.elements - matrices.divided_elements, rows), (matrices.divided_elements, rows * strategy.tensor)
    moved = sum(
        elements * ((sources - 1) / sources / ranks + (ranks - 1) / ranks / sources) for elements, sources in whole
    )
    link, each = cluster.group_link(ranks, 1), BF16 if cluster.device.type == "cuda" else FP32
    collectives = (2 if is_divided else 1) * np.ceil(matrices.elements / ranks / ROUND_ELEMENTS)
    exchange = collectives * (ranks - 1).bit_length() * link.latency_s + each * moved / link.bandwidth
    shared = _products_s(matrices, cluster, ranks) + exchange
    return shared if is_divided else np.minimum(alone, shared)


def shares_out(matrices: Matrices, strategy: Strategy, cluster: Cluster) -> bool:
    """Return True if the ranks of a stage share its matrices out, False if each orthogonalises all of them."""
    if strategy.devices_per_stage == 1:
        return False
    is_divided = strategy.shards or strategy.tensor > 1
    return is_divided or bool(orthogonalisation_s(matrices, strategy, cluster) < _products_s(matrices, cluster, 1))


def _products_s(matrices: Matrices, cluster: Cluster, ranks: int) -> Any:
    """Return the seconds of the products of the rank that has most to do, where so many ranks share them."""
    device, tuned = cluster.device, cluster.device.efficiency
    flops = np.maximum(matrices.flops / ranks, matrices.largest_flops)
    batches = matrices.shapes + matrices.elements / ranks / ROUND_ELEMENTS
    half = PRODUCTS * batches * tuned.gemm_half_flops * (flops > 0)
    products = (flops + half) / (device.peak("bf16" if device.type == "cuda" else "fp32") * tuned.gemm)
    if device.type == "cpu":  # whose update is run, Gram matrices included, and its traffic counted
        return products
    return products + matrices.gram_elements / ranks * GRAM_BYTES / (device.memory_bandwidth * tuned.bandwidth)
