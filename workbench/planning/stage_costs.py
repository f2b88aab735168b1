"""Time and memory of every possible stage: on one device, on a cluster, and under one strategy.

Matrices are indexed `[i, j]`: the stage made of blocks `i … j - 1`. A search weighs thousands of strategies, so that
each figure is made as few times as possible: `DeviceCosts` holds what all searches of a profile share, `ClusterCosts`
what all strategies of a search share, and `StrategyCosts` what one strategy adds.

On the device mesh tensor-parallel ranks are neighbours, and stages are `data * tensor` devices apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from workbench.base.arguments import memoised
from workbench.cost.hardware import (
    Cluster,
    Device,
    Link,
    all_gather_s,
    all_reduce_s,
    point_to_point_s,
    reduce_scatter_s,
)
from workbench.cost.memory import (
    BF16,
    FP32,
    MASK_BYTES,
    Activations,
    ParameterTable,
    StageState,
    activations,
    keeps_bf16_gradients,
    orthogonalisation_s,
    spans,
    stage_gradients,
    stage_state,
)
from workbench.cost.profile import (
    ACCUMULATE_BYTES,
    ADAMW,
    CASTS_BACKWARD_BYTES,
    CASTS_FORWARD_BYTES,
    BlockCosts,
    Profile,
)
from workbench.strategy import Strategy

Array = npt.NDArray[np.float64]
Collective = Callable[[Array, int, Link], Array]
"""A function of `workbench.cost.hardware`: seconds for so many bytes in a group over a link."""

RELAUNCHED = {"selective": 0.5, "full": 1.0}
"""Fraction of the host's time for a forward that activation checkpointing adds to a compiled backward in which it
computes all of the forward again. Selective: launches, without what surrounds a compiled block (0.55 of 1.2 ms in one
profile of 14 layers of BERT-1920 on an H200). Full: also the random generator's state, which is saved and restored
around attention with dropout (0.2 to 1 ms more; selective checkpointing keeps attention's results)."""
OVERLAP = 0.8
"""Fraction of a block's compute time that collectives can hide behind; at its edges they wait for each other."""
INTERFERENCE = 0.3
"""Slow-down of compute by a collective that runs beside it, as a fraction of the collective's time."""
INTERLEAVED_SLOWDOWN = 0.08
"""Fraction by which GPUs compute more slowly under torch's runtime for several stages per rank. Measured on 2 and 4
H200 with 4 stages per rank: 7.8 % (scaled BERT), 10.2 % (BERT-Large), 6.6 % (GPT-3 1.3B). The runtime posts receives
early, and NCCL's kernels wait beside the matrix products."""
REDUCTION_GAP_MS = 0.04
"""Milliseconds that a GPU stands still around an all-reduce of tensor-parallel ranks: between the kernels before it,
NCCL's on a stream of its own, and those after it. Profiled on 2 H200 with GPT-3 1.3B, blocks captured as CUDA graphs:
115 ms of a step with 3,104 all-reduces, 39 ms of one with 776 (0.037 and 0.050 each)."""
SHARDING_BANDWIDTH = 0.4
"""Fraction of the memory bandwidth that FSDP2 reaches in copies into and out of its buffers, gradient accumulation and
casts, with one kernel per parameter. Measured on 2 H200 with scaled BERT: 0.41 under ZeRO 1 with two micro-batches,
0.40 under ZeRO 3."""
ALL_REDUCE_COPY_BYTES = 4 * FP32
"""Bytes read and written for each gradient that replicas all-reduce after the last backward: into a buffer and back."""
HOST_BOUND = 0.5
"""Fraction of the device's time for a micro-batch from which on the host's launches are a risk, so that CUDA graphs are
tried: the same launches differ by a factor of two between machines and minutes."""
MOST_GRAPHS = 4096
"""Largest number of CUDA graphs of one rank. Capturing takes 1 to 2 ms for each."""
GRAPH_BYTES = 256 << 10
"""Device memory outside of the allocator for each CUDA graph: 0.2 MB measured with BERT-1920 on an H200."""
GRAPH_ALL_REDUCE_BYTES = 176 << 10
"""Device memory outside of the allocator for each all-reduce in a CUDA graph: graphs with two took 0.6 MB in all."""
NORM_BYTES = FP32
"""Bytes read for each trained element by the norm of the gradient."""
CLIP_BYTES = 2 * FP32
"""Bytes read and written for each trained element by clipping, where the optimiser's update does not clip."""
MASKING_BYTES = 2 * (2 * FP32 + MASK_BYTES)
"""Bytes read and written in a step for each element of a masked weight: its gradient and then its value are read,
multiplied by the mask and written."""


# Stages and their activation checkpointing.
#
# Level 0 recomputes every block of a stage in the first mode (none, say). Each further level moves one block to the
# next mode: the first block, then the second, …; after all of them, the first again to the mode after that (selective,
# then full). So a stage has at most two modes, the heavier one in its first blocks: their own worst moment comes when
# the blocks after them are freed. (Megatron-LM's `--recompute-num-layers` counts from the first layer, too.)
#
# For time and bytes, which add up along a stage, consecutive blocks of one mode are a stage of their own: `[i, j]` with
# two modes is `[i, middle]` in one mode and `[middle, j]` in the other.


class Stages(Protocol):
    """Stages that costs are summed over, in whatever arrangement: one number for each."""

    def whole(self, matrix: Array) -> Array:
        """Return, for each stage, a value of `matrix[i, j]` that does not depend on recomputation."""

    def sum(self, matrices: Array) -> Array:
        """Return, for each stage, the sum over its blocks of `matrices[mode, i, j]`."""


@dataclass(frozen=True)
class MixedStages:
    """Stages as arrays of one shape: blocks `first … middle - 1` of each are recomputed in mode `heavier`, and blocks
    `middle … end - 1` in mode `lighter`. Plain numbers make one stage."""

    first: Any
    middle: Any
    end: Any
    heavier: Any
    lighter: Any

    @staticmethod
    def at(first: Any, end: Any, level: Any) -> MixedStages:
        """Return stages `[first, end]` at their levels."""
        blocks = end - first
        lighter = np.maximum(level - 1, 0) // blocks
        middle = first + level - lighter * blocks
        return MixedStages(first, middle, end, np.where(middle > first, lighter + 1, lighter), lighter)

    @staticmethod
    def whole_model(blocks: int) -> MixedStages:
        """Return all blocks as one stage in the first mode."""
        return MixedStages(0, blocks, blocks, 0, 0)

    @staticmethod
    def every(blocks: int) -> MixedStages:
        """Return every stage `[i, j]` with all of its blocks in the first mode: matrices as they are."""
        first, end = np.indices((blocks + 1, blocks + 1))
        return MixedStages(first, end, end, 0, 0)

    def whole(self, matrix: Array) -> Array:
        return np.asarray(matrix[self.first, self.end])

    def sum(self, matrices: Array) -> Array:
        early, late = self.positions(matrices.shape[-1])
        return np.asarray(matrices.take(early) + matrices.take(late))

    def activations(self, of_modes: Activations) -> Activations:
        return joined(of_modes, *self.positions(of_modes.held.shape[-1]))

    def positions(self, ends: int) -> tuple[Any, Any]:
        """Return the flat positions in matrices `[mode, i, j]` of each stage's earlier and later blocks."""
        early = (self.heavier * ends + self.first) * ends + self.middle
        return early, (self.lighter * ends + self.middle) * ends + self.end


def joined(of_modes: Activations, early: Any, late: Any) -> Activations:
    """Return the activations of stages in two modes.

    While the later blocks run backward, the earlier ones hold their activations; when those run, the later ones are
    freed.
    """
    early_held = of_modes.held.take(early)
    return Activations(
        held=early_held + of_modes.held.take(late),
        newest=np.maximum(of_modes.newest.take(early), early_held + of_modes.newest.take(late)),
    )


@dataclass(frozen=True)
class Cut:
    """The stages of one option."""

    cuts: tuple[int, ...]
    levels: tuple[int, ...]
    """Level of activation checkpointing of each stage: see `workbench.planning.stage_costs`."""
    peaks: tuple[float, ...] = ()
    """Bytes of one device of each pipeline rank."""

    @cached_property
    def stages(self) -> MixedStages:
        return MixedStages.at(np.array(self.cuts[:-1]), np.array(self.cuts[1:]), np.array(self.levels))


# One device: times of a micro-batch, which all searches of a profile share.


@dataclass(frozen=True)
class Compute:
    """Milliseconds of one micro-batch in every stage `[i, j]`, with no communication but the tensor axis's.

    Matrices `[mode, i, j]` have one layer for each mode of activation checkpointing.
    """

    forward: Array
    backward: Array
    """Backward with recomputation, `[mode, i, j]`."""
    host: Array
    """Host's time for a forward and a backward, `[mode, i, j]`; 0 on a CPU, which is its own host."""
    forward_reduced: Array
    """All-reduces over the tensor axis in the forward; nothing runs beside them."""
    backward_reduced: Array
    """All-reduces over the tensor axis in the backward, `[mode, i, j]`."""


@dataclass(frozen=True, eq=False)
class DeviceCosts:
    """A profile priced on one device. Every method caches its results."""

    profile: Profile
    device: Device

    @memoised
    def blocks(self, micro_batch: int, tensor: int) -> BlockCosts:
        """Return the costs of each block."""
        return self.profile.on_tensor_axis(tensor).at(micro_batch, self.device)

    @memoised
    def table(self, tensor: int) -> ParameterTable:
        """Return the parameters of every stage."""
        return ParameterTable(self.profile.on_tensor_axis(tensor))

    @memoised
    def compute(
        self,
        micro_batch: int,
        tensor: int,
        modes: tuple[str, ...],
        hooks_ms: tuple[float, float] | None,
        link: Link,
        *,
        low_precision: bool,
        cuda_graphs: bool,
        devices: int,
    ) -> Compute:
        """Return the times of one micro-batch.

        `modes` are those of activation checkpointing; `hooks_ms` the host's time for FSDP2's hooks around a block's
        forward and backward, None where FSDP2 does not accumulate gradients; `link` joins tensor-parallel ranks. With
        `low_precision` blocks receive bf16 weights; with `cuda_graphs` blocks are captured where they can be;
        `devices` are those of the step.
        """
        costs = self.blocks(micro_batch, tensor)
        pace = self.profile.in_step(self.device, devices=devices)
        replayed = self.profile.replayed_share(micro_batch, self.device) if cuda_graphs else 1.0
        pace = pace * np.where(costs.capturable["none"], replayed, 1.0)
        on_device = ("forward_ms", "backward_ms", "full_recompute_ms", "selective_recompute_ms")
        costs = replace(costs, **{name: pace * getattr(costs, name) for name in on_device})
        table, is_sharded = self.table(tensor), hooks_ms is not None
        byte_ms = 1e3 / (self.device.memory_bandwidth * self.device.efficiency.bandwidth)
        if low_precision:
            costs = _without_casts(costs)
        if is_sharded:
            # FSDP2 adds gradients to earlier ones by itself.
            accumulated = ACCUMULATE_BYTES * table.block_trained
            if low_precision:  # in bf16, where weights are
                accumulated = accumulated - (FP32 - BF16) * table.own_cast
            costs = replace(costs, backward_ms=np.maximum(0.0, costs.backward_ms - accumulated * byte_ms))
        nothing = np.zeros_like(costs.forward_ms)
        again = {"none": nothing, "selective": costs.selective_recompute_ms, "full": costs.full_recompute_ms}
        hooks = hooks_ms or (0.0, 0.0)
        host_forward, host_backward = (ms + more for ms, more in zip(costs.host_ms, hooks, strict=True))
        host = host_forward + host_backward
        launches = np.where(costs.full_recompute_ms > 0, costs.host_ms[0], 0.0)
        relaunched = {
            "none": nothing,
            "selective": self.profile.selective_recompute_share(self.device) * RELAUNCHED["selective"] * launches,
            "full": RELAUNCHED["full"] * launches,
        }
        if self.device.type == "cpu":
            costs = replace(costs, forward_ms=costs.forward_ms + host_forward)
            again = {mode: added + host_backward for mode, added in again.items()}
            host, relaunched = nothing, dict.fromkeys(relaunched, nothing)
        hosts = {mode: host + relaunched[mode] for mode in modes}
        if cuda_graphs:
            # Two launches, and one of a block that has no backward.
            replays_ms = 1e3 * self.device.efficiency.captured_block_s * np.where(costs.backward_ms > 0, 2.0, 1.0)
            hosts = {mode: np.where(costs.capturable[mode], replays_ms, ms) for mode, ms in hosts.items()}
        gap_ms = REDUCTION_GAP_MS if self.device.type == "cuda" else 0.0
        reduced, repeated, of_forward = (
            _tensor_reductions(sizes, tensor, link, gap_ms)
            for sizes in (costs.backward_reduced, costs.recompute_reduced, costs.forward_reduced)
        )
        reduced_again = {"none": nothing, "selective": nothing, "full": repeated}
        forward = spans(costs.forward_ms)
        backward = np.stack([spans(costs.backward_ms + again[mode]) for mode in modes])
        if low_precision and not is_sharded:  # weights that several blocks read have no copies
            recast = np.append(table.shared_cast[:-1], 0.0)  # the last block is not recomputed
            cast_ms, again_ms = (table.of_several(elements) * byte_ms for elements in (table.shared_cast, recast))
            shares = {"none": 0.0, "selective": self.profile.selective_recompute_share(self.device), "full": 1.0}
            forward = forward + CASTS_FORWARD_BYTES * cast_ms
            backward = backward + CASTS_BACKWARD_BYTES * cast_ms
            backward = backward + CASTS_FORWARD_BYTES * np.multiply.outer([shares[mode] for mode in modes], again_ms)
        if cuda_graphs:  # their gradients are copied out of a graph before they are added up
            copied = np.where(costs.capturable["none"], table.block_trained - table.own_trained, 0.0)
            backward = backward + 2 * FP32 * byte_ms * table.of_several(copied)
        return Compute(
            forward=forward,
            backward=backward,
            host=np.stack([spans(hosts[mode]) for mode in modes]),
            forward_reduced=spans(of_forward),
            backward_reduced=np.stack([spans(reduced + reduced_again[mode]) for mode in modes]),
        )

    @memoised
    def collectives(self, data: int, tensor: int, link: Link) -> tuple[Array, Array, Array, Array]:
        """Return the milliseconds of the data axis's collectives over every stage's parameters.

        They are the all-reduce, the all-gather of a forward, the all-gather of a backward, and the reduce-scatter.
        """
        table = self.table(tensor)
        compute_bytes = BF16 if self.profile.precision == "bf16" else FP32

        def times(collective: Collective, elements: Array, of_blocks: Array, each_bytes: int) -> Array:
            # Every block with parameters starts a collective; what several blocks of a stage share moves once.
            start_s = collective(np.zeros(1), data, link)
            moving_s = collective(each_bytes * elements, data, link) - start_s
            return np.asarray(1e3 * (spans(np.where(of_blocks > 0, start_s, 0.0)) + moving_s))

        return (
            times(all_reduce_s, table.trained, table.block_trained, FP32),
            times(all_gather_s, table.elements, table.block_elements, compute_bytes),
            times(all_gather_s, table.elements_again, table.block_elements_again, compute_bytes),
            times(reduce_scatter_s, table.trained, table.block_trained, FP32),
        )


@lru_cache(maxsize=8)
def device_costs(profile: Profile, device: Device) -> DeviceCosts:
    """Return the costs that all searches of one profile on one device share, so that a slider answers quickly."""
    return DeviceCosts(profile, device)


def _without_casts(costs: BlockCosts) -> BlockCosts:
    """Return the costs of blocks that receive their weights in bf16."""
    in_forward, in_backward, in_recompute = costs.casts_ms
    return replace(
        costs,
        forward_ms=np.maximum(0.0, costs.forward_ms - in_forward),
        backward_ms=np.maximum(0.0, costs.backward_ms - in_backward),
        full_recompute_ms=np.maximum(0.0, costs.full_recompute_ms - in_forward),
        selective_recompute_ms=np.maximum(0.0, costs.selective_recompute_ms - in_recompute),
    )


def _tensor_reductions(sizes: tuple[tuple[float, ...], ...], tensor: int, link: Link, gap_ms: float) -> Array:
    """Return the milliseconds of each block's all-reduces, of so many bytes each, over the tensor axis."""
    if tensor == 1:
        return np.zeros(len(sizes))
    times = {block: sum(1e3 * all_reduce_s(size, tensor, link) + gap_ms for size in block) for block in set(sizes)}
    return np.array([times[block] for block in sizes])


# One cluster, and one strategy on it.


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds of some stages, one entry each."""

    forward: Array
    """Compute of one micro-batch's forward, host-bound wait included."""
    backward: Array
    """Compute of one micro-batch's backward, recomputation and host-bound wait included."""
    host_wait: Array
    """Part of `forward` + `backward` during which the device waits for the host."""
    host: Array
    """Host's time for one micro-batch."""
    forward_wait: Array
    """Exposed communication of one micro-batch's forward, FSDP2's copies included."""
    backward_wait: Array
    """Exposed communication of one micro-batch's backward, FSDP2's copies included."""
    step_wait: Array
    """Exposed communication once a step, after the last backward."""
    optimizer: Array
    """Optimiser's update, once a step."""
    orthogonalisation: Array
    """Part of it in which Muon orthogonalises matrices."""

    @cached_property
    def busy(self) -> Array:
        """Total of one micro-batch."""
        return np.asarray(self.forward + self.backward + self.forward_wait + self.backward_wait)

    @cached_property
    def ending(self) -> Array:
        """Total of what follows the last backward."""
        return np.asarray(self.step_wait + self.optimizer)


class ClusterCosts:
    """Costs of one model on one cluster, from which those of each strategy are made."""

    def __init__(self, device: DeviceCosts, cluster: Cluster, modes: Sequence[str]) -> None:
        """`modes` of activation checkpointing that stages may have, fastest first."""
        assert device.device == cluster.device
        self.profile = device.profile
        self.device = device
        self.cluster = cluster
        self.modes = tuple(modes)

    def of(self, strategy: Strategy) -> StrategyCosts:
        """Return the costs of a strategy."""
        return StrategyCosts(self, strategy)

    @memoised
    def whole(self, strategy: Strategy) -> StageTimes:
        """Return the times of all blocks as one stage in the first mode, as scalars."""
        return self.of(strategy).times(MixedStages.whole_model(len(self.profile.blocks)))

    @memoised
    def whole_update(self, strategy: Strategy) -> Array:
        """Return the milliseconds, a scalar, of the update of all blocks as one stage."""
        return self.of(strategy)._optimizer(MixedStages.whole_model(len(self.profile.blocks)))

    @memoised
    def busy(self, strategy: Strategy) -> Array:
        """Return `[i, j]`: the total time of one micro-batch, with every block in the first mode."""
        return self.of(strategy).times(MixedStages.every(len(self.profile.blocks))).busy

    @memoised
    def send_ms(self, pipeline: int, chunks: int, replicas: int, micro_batch: int) -> list[Array]:
        """Return `[s][j]`: the time to send one micro-batch one way, from stage `s` to one that begins at block `j`."""
        crossing = np.array(self.profile.crossing_bytes) * micro_batch
        nothing = np.zeros_like(crossing)
        over: dict[Link, Array] = {}
        rows = []
        for stage in range(pipeline * chunks - 1):
            here, there = stage % pipeline, (stage + 1) % pipeline
            link = boundary_link(self.cluster, replicas, here, there)
            if link not in over:
                over[link] = np.where(crossing > 0, 1e3 * point_to_point_s(crossing, link), 0.0)
            rows.append(nothing if here == there else over[link])
        return [*rows, nothing]


class StrategyCosts:
    """Time and memory of every stage under one strategy, from the costs of its blocks."""

    def __init__(self, model: ClusterCosts, strategy: Strategy) -> None:
        self.model = model
        self.strategy = strategy
        self.profile, self.cluster = model.profile, model.cluster
        self.blocks = model.device.blocks(strategy.micro_batch, strategy.tensor)
        self.table = model.device.table(strategy.tensor)

    @cached_property
    def _alike(self) -> Strategy:
        """Strategy that stands for all whose micro-batches take the same time: the number of stages per rank and the
        place of the optimiser's state make no difference to a micro-batch."""
        of_update = self.strategy.makes_gradients_once  # which gradients a backward leaves depends on the update
        stands_for_itself = self.strategy.chunks == 1 and (of_update or not self.strategy.offload_optimizer)
        return self.strategy if stands_for_itself else replace(self.strategy, chunks=1, offload_optimizer=False)

    @cached_property
    def whole(self) -> StageTimes:
        """Times of all blocks as one stage in the first mode, as scalars: a lower bound starts from them."""
        whole = self.model.whole(self._alike)
        if not self.strategy.offload_optimizer:
            return whole
        # The update does not depend on how a step's micro-batches run.
        of_step = replace(self.strategy, schedule="gpipe", chunks=1, micro_batch=1, num_microbatches=1)
        return replace(whole, optimizer=self.model.whole_update(of_step))

    @property
    def busy(self) -> Array:
        """`[i, j]`: total time of one micro-batch, with every block in the first mode."""
        return self.model.busy(self._alike)

    @property
    def send_ms(self) -> list[Array]:
        """`[s][j]`: time to send one micro-batch, one way, from stage `s` to the next, which begins at block `j`."""
        strategy = self.strategy
        return self.model.send_ms(strategy.pipeline, strategy.chunks, strategy.devices_per_stage, strategy.micro_batch)

    # Memory

    def state(self) -> StageState:
        """Return the bytes of every stage that stay allocated for the whole step."""
        state = stage_state(self.profile, self.table, self.strategy)
        if not self.strategy.cuda_graphs:
            return state
        reductions = zip(self.blocks.forward_reduced, self.blocks.backward_reduced, strict=True)
        each = 2 * GRAPH_BYTES + GRAPH_ALL_REDUCE_BYTES * np.array([len(f) + len(b) for f, b in reductions])
        graphs = self.strategy.num_microbatches * spans(np.where(self.blocks.capturable["none"], each, 0.0))
        return replace(state, workspace=state.workspace + graphs)

    def activations(self) -> Activations:
        """Return the bytes of activations of every stage, for each mode."""
        found = activations(self.blocks, self.table, self.strategy, self.profile, self.model.modes)
        tail = self.profile.tail
        return found if tail is None else found.with_last(tail.ms_and_bytes(self.cluster.device)[1])

    @property
    def state_bytes(self) -> float:
        """Bytes of all blocks' parameters, gradients and optimiser state, which the ranks of a pipeline share."""
        gradients = stage_gradients(self.profile, self.table, self.strategy)[0, -1]
        moments = 0.0 if self.strategy.offload_optimizer else self.table.update.state_bytes[0, -1]
        return float((FP32 * self.table.elements[0, -1] + moments) / self.strategy.shard_count + gradients)

    # CUDA graphs

    @property
    def can_capture(self) -> bool:
        """Return True if the runtime can capture blocks as CUDA graphs: compiled blocks on a GPU, not too many."""
        blocks = len(self.profile.blocks) / self.strategy.pipeline
        return (
            self.profile.compiled
            and any(block.capturable for block in self.profile.block_types)
            and self.cluster.device.type == "cuda"
            and self.strategy.can_capture_cuda_graphs
            and 2 * self.strategy.num_microbatches * blocks <= MOST_GRAPHS
        )

    @property
    def is_host_bound(self) -> bool:
        """Return True if a host that launches kernel by kernel may hold up its device."""
        return bool(self.whole.host > HOST_BOUND * (self.whole.busy - self.whole.host_wait))

    def times(self, stages: Stages) -> StageTimes:
        """Return the times of each of `stages`."""
        compute = self._compute
        slows = self.strategy.interleaves and self.strategy.pipeline > 1 and self.cluster.device.type == "cuda"
        slowdown = 1 + INTERLEAVED_SLOWDOWN if slows else 1.0  # by sends and receives beside compute
        runs = 2 if self.strategy.runs_forward_twice else 1
        forward, backward = slowdown * stages.whole(compute.forward), slowdown * stages.sum(compute.backward)
        in_forward, in_backward, at_end = self._collectives(stages)
        copies = self._copies(stages)
        forward_wait = runs * (_exposed(in_forward, forward) + stages.whole(compute.forward_reduced) + copies[0])
        forward = runs * forward
        backward_wait = _exposed(in_backward, backward) + stages.sum(compute.backward_reduced) + copies[1]
        # What replicas all-reduce after the last backward has the whole link for itself.
        alone = self._reduced_after_backward(stages) * at_end
        undisturbed = self.cluster.device.efficiency.overlapped_link
        step_wait = undisturbed * alone + _exposed(at_end - alone, backward) + copies[2]
        if (tail := self.profile.tail) is not None:  # while the last stage computes the loss, the others wait
            backward = backward + tail.ms_and_bytes(self.cluster.device)[0] / self.strategy.num_microbatches
            data, link = self.strategy.data, self.cluster.group_link(self.strategy.data, self.strategy.tensor)
            step_wait = step_wait + tail.exchange_ms(data, link)
        # The host runs ahead of its GPU, from one micro-batch into the next and through the update: where it takes
        # longer over all of them, the GPU waits for it in both directions. An update by Muon launches kernels for each
        # matrix; that of AdamW is part of what the host does once a step.
        optimizer, launched = self._optimizer(stages), 1e3 * self.cluster.device.efficiency.matrix_s
        matrices = stages.whole(self.table.update.matrices)
        once = 0.0 if self.cluster.device.type == "cpu" else 1e3 * self.cluster.device.efficiency.step_s
        of_update = np.where(matrices > 0, launched * matrices - optimizer, 0.0)
        update_wait = (once / self.strategy.chunks + of_update) / self.strategy.num_microbatches
        busy = forward + backward + forward_wait + backward_wait + step_wait / self.strategy.num_microbatches
        tuned, acts = self.cluster.device.efficiency, self.strategy.pipeline > 1 and self.cluster.device.type != "cpu"
        action_s = tuned.captured_action_s if self.strategy.cuda_graphs else tuned.action_s
        # `compute.host` is that of a forward and a backward, so that a second forward adds half; an action each, in ms.
        host = (1 + runs) / 2 * stages.sum(compute.host) + (2e3 * action_s if acts else 0.0)
        host_wait = np.maximum(0.0, host + update_wait - busy)
        return StageTimes(
            # Where in the step the GPU waits is not known; half and half keeps the length and the order of actions.
            forward=forward + host_wait / 2,
            backward=backward + host_wait / 2,
            host_wait=host_wait,
            host=host,
            forward_wait=forward_wait,
            backward_wait=backward_wait,
            step_wait=step_wait,
            optimizer=optimizer,
            orthogonalisation=self._orthogonalisation(stages),
        )

    @cached_property
    def _compute(self) -> Compute:
        strategy, tuned = self.strategy, self.cluster.device.efficiency
        hooks, launched = 1e3 * tuned.sharded_block_s, 1e3 * tuned.sharded_collective_s
        # Under ZeRO 1 and 2 one forward of a step all-gathers, and under ZeRO 1 one backward reduces.
        gathers, scatters = (1 if strategy.zero >= least else 1 / strategy.num_microbatches for least in (3, 2))
        is_bf16 = self.profile.precision == "bf16"
        compute = self.model.device.compute(
            strategy.micro_batch,
            strategy.tensor,
            self.model.modes,
            (hooks + launched * gathers, hooks + launched * scatters) if strategy.shards else None,
            self.cluster.group_link(strategy.tensor),
            low_precision=is_bf16 and (strategy.shards or strategy.keeps_weight_copies(self.profile.precision)),
            cuda_graphs=strategy.cuda_graphs,
            devices=strategy.world,
        )
        if not keeps_bf16_gradients(self.profile, strategy):
            return compute
        # One backward makes each gradient: those of weights with bf16 copies stay in bf16, and are added to nothing.
        device, saved = self.cluster.device, (ACCUMULATE_BYTES - BF16) * spans(self.table.own_cast)
        byte_ms = 1e3 / (device.memory_bandwidth * device.efficiency.bandwidth)
        return replace(compute, backward=np.maximum(0.0, compute.backward - saved * byte_ms))

    def _optimizer(self, stages: Stages) -> Array:
        """Return the milliseconds of the optimiser's update, with the casts of weight copies that are kept.

        An update is bound by memory: it takes as long as its bytes take at the device's bandwidth.
        """
        device = self.cluster.device
        traffic = _update_bytes(stages, self.profile, self.table, self.strategy)
        seconds = traffic / (device.memory_bandwidth * device.efficiency.bandwidth)
        if self.strategy.offload_optimizer:
            # Both moments travel to the device and back, while all devices of the node do the same.
            busy = min(self.cluster.gpus_per_node, self.strategy.world)
            together = device.shared_host_bandwidth
            bandwidth = device.host_bandwidth if together is None else min(device.host_bandwidth, together / busy)
            elements = stages.whole(self.table.trained) / self.strategy.shard_count
            seconds = seconds + 2 * elements * ADAMW / bandwidth
        return np.asarray(1e3 * seconds + self._orthogonalisation(stages))

    def _orthogonalisation(self, stages: Stages) -> Array:
        """Return the milliseconds in which Muon orthogonalises the stages' matrices; 0 for other optimisers."""
        update = self.table.update
        if not update.shapes:
            return np.zeros_like(stages.whole(update.flops))
        return np.asarray(1e3 * orthogonalisation_s(update.matrices_of(stages.whole), self.strategy, self.cluster))

    def _reduced_after_backward(self, stages: Stages) -> Array:
        """Return the fraction of the gradients reduced once a step whose all-reduce waits for the last backward."""
        trained = stages.whole(self.table.trained)
        if not self.strategy.cuda_graphs:
            return np.zeros_like(trained)
        own = stages.whole(spans(self.table.own_trained * self.blocks.capturable["none"]))
        return np.asarray(1 - own / np.maximum(trained, 1))

    def _copies(self, stages: Stages) -> tuple[Array, Array, Array]:
        """Return the milliseconds of copies and casts around collectives: in a forward, a backward, at the step's end.

        Before an all-gather FSDP2 casts shards to bf16, and after it copies parameters out of its buffer; it casts and
        copies gradients into a buffer, and adds what is reduced to what earlier micro-batches left. Under ZeRO 1
        whole fp32 gradients are accumulated instead, and copied once.
        """
        strategy, table, device = self.strategy, self.table, self.cluster.device
        nothing = np.zeros_like(stages.whole(table.elements))
        if strategy.all_reduces_gradients and strategy.data > 1:
            moved = ALL_REDUCE_COPY_BYTES * stages.whole(table.trained) * self._reduced_after_backward(stages)
            return nothing, nothing, 1e3 * moved / (device.memory_bandwidth * device.efficiency.bandwidth)
        if not strategy.shards:
            return nothing, nothing, nothing
        byte_ms = 1e3 / (device.memory_bandwidth * SHARDING_BANDWIDTH)
        half = BF16 if self.profile.precision == "bf16" else FP32
        cast = (FP32 + half) / strategy.data if half != FP32 else 0.0
        gather, again = (
            stages.whole(elements) * byte_ms * (cast + 2 * half) for elements in (table.elements, table.elements_again)
        )
        trained = stages.whole(table.trained) * byte_ms
        copied, added = trained * (half + FP32), trained * 3 * FP32 / strategy.data
        micro_batches = strategy.num_microbatches
        later = (micro_batches - 1) / micro_batches
        if strategy.zero == 1 and micro_batches > 1:
            first = half + FP32 if half != FP32 else 0
            accumulated = trained * (first / micro_batches + (half + 2 * FP32) * later)
            return gather / micro_batches, accumulated, trained * 2 * FP32
        if strategy.zero == 1:
            return gather, nothing, copied
        if strategy.zero == 2:
            return gather / micro_batches, copied + added * later, nothing
        return gather, again + copied + added * later, nothing

    def _collectives(self, stages: Stages) -> tuple[Array, Array, Array]:
        """Return the milliseconds of the data axis's collectives: in a forward, in a backward, at the step's end."""
        strategy = self.strategy
        nothing = np.zeros_like(stages.whole(self.table.elements))
        if strategy.data == 1:
            return nothing, nothing, nothing
        link = self.cluster.group_link(strategy.data, strategy.tensor)
        link = replace(link, bandwidth=link.bandwidth * self.cluster.device.efficiency.overlapped_link)
        collectives = self.model.device.collectives(strategy.data, strategy.tensor, link)
        reduce, gather, again, scatter = map(stages.whole, collectives)
        once = gather / strategy.num_microbatches
        return {
            0: (nothing, nothing, reduce),
            1: (once, nothing, scatter),
            2: (once, scatter, nothing),
            3: (gather, again + scatter, nothing),
        }[strategy.zero]

    def tied_ms(self, cuts: tuple[int, ...]) -> float:
        """Return the time to all-reduce, one by one, gradients whose parameter lives on several pipeline ranks."""
        strategy, total = self.strategy, 0.0
        devices = strategy.devices_per_stage
        for name, blocks in self.table.shared.items():
            stages = np.searchsorted(cuts, blocks, side="right") - 1
            holders = np.unique(stages % strategy.pipeline).tolist()
            if len(holders) > 1 and name not in self.profile.frozen:
                link = self.cluster.peers_link(tuple(rank * devices for rank in holders), devices)
                total += all_reduce_s(FP32 * self.table.sizes[name] / strategy.shard_count, len(holders), link)
        return 1e3 * total


def overlapped(costs: StrategyCosts, stages: Stages) -> tuple[Array, Array, Array]:
    """Return the milliseconds of the data axis's collectives that compute hides, which `StrategyCosts.times` omits.

    They lie in a forward, in a backward, and in the last backward.
    """
    in_forward, in_backward, at_end = costs._collectives(stages)
    forward, backward = stages.whole(costs._compute.forward), stages.sum(costs._compute.backward)
    alone = costs._reduced_after_backward(stages) * at_end
    pairs = ((in_forward, forward), (in_backward, backward), (at_end - alone, backward))
    first, second, third = (np.minimum(collective, OVERLAP * compute) for collective, compute in pairs)
    return first, second, third


def _update_bytes(stages: Stages, profile: Profile, table: ParameterTable, strategy: Strategy) -> Array:
    """Return the bytes that the norm, the update, masks and casts of weight copies move in the device's memory."""
    on_gpu = profile.device_type == "cuda" and not strategy.offload_optimizer
    in_one_pass = on_gpu and profile.optimizer_in_one_pass
    clipping = (NORM_BYTES if in_one_pass else NORM_BYTES + CLIP_BYTES) * stages.whole(table.trained)
    masking = MASKING_BYTES * stages.whole(table.masked)
    traffic = (stages.whole(table.update.traffic_bytes) + clipping + masking) / strategy.shard_count
    if strategy.keeps_weight_copies(profile.precision):
        traffic = traffic + (BF16 if in_one_pass else FP32 + BF16) * stages.whole(table.cast)
    if keeps_bf16_gradients(profile, strategy):  # the norm and the update read them
        traffic = traffic - 2 * (FP32 - BF16) * stages.whole(spans(table.own_cast))
    return np.asarray(traffic)


def boundary_link(cluster: Cluster, replicas: int, here: int, there: int) -> Link:
    """Return the link that joins two pipeline ranks of `replicas` devices each."""
    first, second = sorted((here, there))
    return cluster.hop_link(first * replicas, second * replicas, replicas)


def _exposed(communication: Array, compute: Array) -> Array:
    """Return what overlap leaves of communication: what compute cannot hide, and what hiding costs compute."""
    hidden = np.minimum(communication, OVERLAP * compute)
    return np.asarray(communication - hidden + INTERFERENCE * hidden)
