"""What every possible stage takes, per micro-batch and per step, for one choice of degrees.

Matrices are indexed `[i, j]`: the stage made of blocks `i … j - 1`. Device mesh: pipeline outermost, then data, tensor
innermost, so that tensor-parallel ranks are neighbours and stages are `data * tensor` devices apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from workbench.cost.cluster import Cluster, Device, Link
from workbench.cost.communication import all_gather_s, all_reduce_s, point_to_point_s, reduce_scatter_s
from workbench.cost.memory import (
    ADAMW,
    FP32,
    HALF,
    Activations,
    ParameterTable,
    Shares,
    StageState,
    activations,
    spans,
    stage_state,
)
from workbench.cost.profiles import ACCUMULATE_BYTES, BlockCosts, Profile
from workbench.planning.checkpointing import Levels, Mixed, Uniform
from workbench.planning.plan import INTERLEAVED, averages_by_hand, keeps_halves

Array = npt.NDArray[np.float64]
Collective = Callable[[Array, int, Link], Array]
"""Seconds for so many bytes in a group over a link: one of `workbench.cost.communication`."""

OVERLAP = 0.8
"""Share of a block's compute time that collectives can hide behind; they wait for each other at the edges."""
INTERFERENCE = 0.3
"""Slow-down of compute by a collective that runs beside it, as a share of the collective's time."""
SPINNING = 0.08
"""Slow-down of GPUs' compute under torch's runtime for several stages a rank, as seen on 2 and 4 H200, interleaved × 4:
7.8 % (scaled BERT: its bubble was as predicted, but actions that follow a receive took longer), 10.2 % (BERT-Large),
6.6 % (GPT-3 1.3B). It posts receives early, and NCCL's kernels wait beside the products; products are as slow where
NCCL is limited to one multiprocessor."""
SHARDING_BANDWIDTH = 0.4
"""Share of the memory's bandwidth that FSDP2's copies into and out of its buffers reach, its sums of gradients and its
casts, a kernel a parameter: 0.41 under ZeRO 1 with two micro-batches, 0.40 under ZeRO 3 (scaled BERT, 2 × H200)."""
LAUNCHED_AGAIN = {"selective": 0.5, "full": 1.0}
"""Of the host's time for a forward, what checkpointing adds to that of a compiled backward where it computes all of it
again: launches, without what surrounds a compiled block (0.55 of 1.2 ms in one profile of 14 layers of BERT-1920 on an
H200), and under full checkpointing the generator's state, kept and put back around attention that draws dropout (0.2 to
1 ms more; selective checkpointing keeps attention's results)."""
AVERAGING_BYTES = 4 * FP32
"""Per gradient, where replicas average when the last backward is over: into a buffer and back."""
LAUNCHED_LATE = 0.5
"""Of the device's time, what the host may take for a micro-batch before its blocks are recorded: what the same launches
take differs by a factor of two between machines and minutes."""
MOST_GRAPHS = 4096
"""Of one rank. Recording took 1 to 2 ms for each."""
GRAPH_BYTES = 256 << 10
"""Of device memory, beside the allocator's, for each graph: 0.2 MB seen (BERT-1920 on H200)."""
REDUCTION_BYTES = 176 << 10
"""The same for each all-reduce in it: 0.6 MB seen of graphs with two."""
OPTIMIZER_BYTES = 4 * FP32 + 3 * FP32 + 3 * FP32
"""Per element: AdamW reads parameter, gradient and two moments and writes three; the norm reads a gradient and
clipping reads and writes it."""


@dataclass(frozen=True)
class Degrees:
    """One point of the search, but for the cut into stages and their activation checkpointing."""

    pipeline: int
    data: int
    tensor: int
    zero: int
    schedule: str
    chunks: int
    """Stages of one pipeline rank."""
    offload_optimizer: bool
    micro_batch: int
    num_microbatches: int
    cuda_graphs: bool = False

    @property
    def stages(self) -> int:
        return self.pipeline * self.chunks

    @property
    def alike(self) -> tuple[object, ...]:
        """The same where a micro-batch takes the same: whatever stages a rank's blocks are cut into, and wherever the
        optimiser's state is."""
        axes = (self.pipeline, self.data, self.tensor, self.zero)
        return (*axes, self.schedule, self.micro_batch, self.num_microbatches, self.cuda_graphs)


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds of some stages, one entry each."""

    forward: Array
    backward: Array
    """One micro-batch's compute, recomputation and waiting for the host included."""
    late: Array
    """Of the two together, waiting for the host."""
    host: Array
    """What the host takes meanwhile."""
    weight: Array
    """Of `backward`, the gradients of weights: what a zero-bubble schedule leaves for later."""
    forward_wait: Array
    backward_wait: Array
    """One micro-batch's exposed communication, FSDP2's copies included."""
    step_wait: Array
    """The same once a step: what the last backward does not hide."""
    optimizer: Array

    @cached_property
    def busy(self) -> Array:
        """One micro-batch in all."""
        return np.asarray(self.forward + self.backward + self.forward_wait + self.backward_wait)

    @cached_property
    def ending(self) -> Array:
        """Once a step, after the last backward."""
        return np.asarray(self.step_wait + self.optimizer)


class DeviceCosts:
    """A profile priced on one kind of device. What few degrees decide is kept, between options and between searches."""

    def __init__(self, profile: Profile, device: Device) -> None:
        self.profile = profile
        self.device = device
        self._costs: dict[tuple[int, int], BlockCosts] = {}
        self._tables: dict[int, ParameterTable] = {}
        self._computes: dict[tuple[object, ...], Compute] = {}
        self._collectives: dict[tuple[object, ...], tuple[Array, Array, Array, Array]] = {}

    def at(self, micro_batch: int, tensor: int) -> BlockCosts:
        if (micro_batch, tensor) not in self._costs:
            self._costs[micro_batch, tensor] = self.profile.on_tensor_axis(tensor).at(micro_batch, self.device)
        return self._costs[micro_batch, tensor]

    def table(self, tensor: int) -> ParameterTable:
        if tensor not in self._tables:
            self._tables[tensor] = ParameterTable(self.profile.on_tensor_axis(tensor))
        return self._tables[tensor]

    def compute(
        self,
        micro_batch: int,
        tensor: int,
        kinds: tuple[str, ...],
        hooks_ms: tuple[float, float],
        link: Link,
        *,
        halves: bool,
        sharded: bool,
        cuda_graphs: bool,
    ) -> Compute:
        """Of one micro-batch; `kinds` of activation checkpointing, `hooks_ms` what the host takes besides for a
        block's forward and backward, `link` joins tensor-parallel ranks, `halves`: blocks are given weights in bf16,
        `sharded`: others add up their gradients, `cuda_graphs`: they are recorded where they can be."""
        key = (micro_batch, tensor, kinds, hooks_ms, link, halves, sharded, cuda_graphs)
        if key not in self._computes:
            costs = self.at(micro_batch, tensor)
            if halves:
                costs = _without_casts(costs)
            if sharded:
                costs = self._without_sums(costs, tensor)
            self._computes[key] = self._compute(costs, tensor, kinds, hooks_ms, link, cuda_graphs)
        return self._computes[key]

    def _without_sums(self, costs: BlockCosts, tensor: int) -> BlockCosts:
        """Where a block's gradients are not added to earlier ones as it makes them."""
        byte_ms = 1e3 / (self.device.memory_bandwidth * self.device.efficiency.bandwidth)
        sums_ms = ACCUMULATE_BYTES * self.table(tensor).block_trained * byte_ms
        return replace(costs, backward_ms=np.maximum(0.0, costs.backward_ms - sums_ms))

    def _compute(
        self,
        costs: BlockCosts,
        tensor: int,
        kinds: tuple[str, ...],
        hooks_ms: tuple[float, float],
        link: Link,
        cuda_graphs: bool,
    ) -> Compute:
        nothing = np.zeros_like(costs.forward_ms)
        again = {"none": nothing, "selective": costs.replay_ms, "full": costs.recompute_ms}
        host_forward, host_backward = (of + hooks for of, hooks in zip(costs.host_ms, hooks_ms, strict=True))
        host = host_forward + host_backward
        launches = np.where(costs.recompute_ms > 0, costs.host_ms[0], 0.0)
        launched = {
            "none": nothing,
            "selective": self.profile.replayed(self.device) * LAUNCHED_AGAIN["selective"] * launches,
            "full": LAUNCHED_AGAIN["full"] * launches,
        }
        if self.device.type == "cpu":  # it is its own host
            costs = replace(costs, forward_ms=costs.forward_ms + host_forward)
            again = {kind: added + host_backward for kind, added in again.items()}
            host, launched = nothing, dict.fromkeys(launched, nothing)
        hosts = {kind: host + launched[kind] for kind in kinds}
        if cuda_graphs:
            replayed = 1e3 * self.device.efficiency.graph_s * np.where(costs.backward_ms > 0, 2.0, 1.0)
            hosts = {kind: np.where(costs.recordable[kind], replayed, of) for kind, of in hosts.items()}
        reduced_forward = _tensor_reductions(costs.forward_reduced, tensor, link)
        reduced_backward = _tensor_reductions(costs.backward_reduced, tensor, link)
        repeated = _tensor_reductions(costs.again_reduced, tensor, link)
        reduced_again = {"none": nothing, "selective": nothing, "full": repeated}
        return Compute(
            forward=spans(costs.forward_ms),
            backward=np.stack([spans(costs.backward_ms + again[kind]) for kind in kinds]),
            host=np.stack([spans(hosts[kind]) for kind in kinds]),
            weight=spans(costs.weight_ms),
            forward_reduced=spans(reduced_forward),
            backward_reduced=np.stack([spans(reduced_backward + reduced_again[kind]) for kind in kinds]),
        )

    def collectives(self, data: int, tensor: int, link: Link) -> tuple[Array, Array, Array, Array]:
        """Milliseconds of the data axis's all-reduce, all-gathers (of a forward, of a backward) and reduce-scatter of
        every stage's parameters."""
        key = (data, tensor, link)
        if key not in self._collectives:
            table = self.table(tensor)
            compute_bytes = HALF if self.profile.precision == "bf16" else FP32

            def of(collective: Collective, elements: Array, of_blocks: Array, each_bytes: int) -> Array:
                """Every block with parameters starts one; what several blocks of a stage share moves once."""
                start_s = collective(np.zeros(1), data, link)
                moving_s = collective(each_bytes * elements, data, link) - start_s
                return np.asarray(1e3 * (spans(np.where(of_blocks > 0, start_s, 0.0)) + moving_s))

            self._collectives[key] = (
                of(all_reduce_s, table.trained, table.block_trained, FP32),
                of(all_gather_s, table.elements, table.block_elements, compute_bytes),
                of(all_gather_s, table.elements_again, table.block_elements_again, compute_bytes),
                of(reduce_scatter_s, table.trained, table.block_trained, FP32),
            )
        return self._collectives[key]


def _without_casts(costs: BlockCosts) -> BlockCosts:
    """Where blocks are given weights in bf16."""
    in_forward, in_backward, in_replay = costs.casts_ms
    return replace(
        costs,
        forward_ms=np.maximum(0.0, costs.forward_ms - in_forward),
        backward_ms=np.maximum(0.0, costs.backward_ms - in_backward),
        recompute_ms=np.maximum(0.0, costs.recompute_ms - in_forward),
        replay_ms=np.maximum(0.0, costs.replay_ms - in_replay),
    )


@dataclass(frozen=True)
class Compute:
    """Milliseconds of one micro-batch in every stage `[i, j]`, with nothing but the tensor axis's communication."""

    forward: Array
    backward: Array
    """`[kind, i, j]`: by each kind of activation checkpointing."""
    weight: Array
    host: Array
    """`[kind, i, j]`: what a GPU's host takes meanwhile for a forward and a backward; nothing where it itself computes.
    """
    forward_reduced: Array
    """All-reduces over the tensor axis: nothing runs beside them."""
    backward_reduced: Array
    """`[kind, i, j]`."""


class Pricer:
    """Prices stages of one model on one cluster."""

    def __init__(self, costs: DeviceCosts, cluster: Cluster, kinds: Sequence[str]) -> None:
        """`kinds` of activation checkpointing that stages may have, fastest first."""
        assert costs.device == cluster.device
        self.profile = costs.profile
        self.cluster = cluster
        self.kinds = tuple(kinds)
        self._costs = costs
        self._wholes: dict[tuple[object, ...], StageTimes] = {}
        self._busy: dict[tuple[object, ...], Array] = {}
        self._send_ms: dict[tuple[object, ...], list[Array]] = {}

    def costs(self, degrees: Degrees) -> BlockCosts:
        return self._costs.at(degrees.micro_batch, degrees.tensor)

    def table(self, degrees: Degrees) -> ParameterTable:
        return self._costs.table(degrees.tensor)

    def shares(self, degrees: Degrees) -> Shares:
        return Shares(
            degrees.zero,
            degrees.data,
            degrees.num_microbatches,
            degrees.offload_optimizer,
            halves=keeps_halves(self.profile.precision, degrees.data, degrees.schedule, degrees.cuda_graphs),
            by_hand=averages_by_hand(degrees.schedule, degrees.cuda_graphs),
        )

    @property
    def elements(self) -> Array:
        """Parameters of every stage, before any sharding."""
        return self._costs.table(1).elements

    def state(self, degrees: Degrees) -> StageState:
        found = stage_state(self.profile, self.table(degrees), degrees.micro_batch, self.shares(degrees))
        if not degrees.cuda_graphs:
            return found
        costs = self.costs(degrees)
        directions = zip(costs.forward_reduced, costs.backward_reduced, strict=True)
        each = 2 * GRAPH_BYTES + REDUCTION_BYTES * np.array([len(f) + len(b) for f, b in directions])
        graphs = degrees.num_microbatches * spans(np.where(costs.recordable["none"], each, 0.0))
        return replace(found, workspace=found.workspace + graphs)

    def records(self, degrees: Degrees) -> bool:
        """Whether the runtime can record blocks: on a GPU, compiled, where FSDP2 does not move their weights and a
        backward is not split."""
        blocks = len(self.profile.blocks) / degrees.pipeline
        return (
            self.profile.compiled
            and any(kind.recordable for kind in self.profile.block_types)
            and self.cluster.device.type == "cuda"
            and (degrees.data == 1 or degrees.zero == 0)
            and degrees.schedule != "zero_bubble"
            and 2 * degrees.num_microbatches * blocks <= MOST_GRAPHS
        )

    def is_launched_late(self, degrees: Degrees) -> bool:
        """Whether a host that launches kernel by kernel may hold up its device."""
        whole = self.whole(degrees)
        return bool(whole.host > LAUNCHED_LATE * (whole.busy - whole.late))

    def activations(self, degrees: Degrees) -> Activations:
        return activations(self.costs(degrees), self.table(degrees), self.shares(degrees), self.kinds)

    def whole(self, degrees: Degrees) -> StageTimes:
        """Of all blocks as one stage, by the first kind, as scalars: what a bound needs."""
        everything, alike = Mixed.everything(len(self.profile.blocks)), degrees.alike
        if alike not in self._wholes:
            self._wholes[alike] = self.times(replace(degrees, offload_optimizer=False), everything)
        found = self._wholes[alike]
        return replace(found, optimizer=self._optimizer(degrees, everything)) if degrees.offload_optimizer else found

    def busy(self, degrees: Degrees) -> Array:
        """`[i, j]`: one micro-batch in all, every block by the first kind."""
        alike = degrees.alike
        if alike not in self._busy:
            self._busy[alike] = self.times(degrees, Uniform()).busy
        return self._busy[alike]

    def times(self, degrees: Degrees, stages: Mixed | Uniform | Levels) -> StageTimes:
        """Of each of `stages`."""
        tensor_link = self.cluster.group_link(degrees.tensor)
        shares = self.shares(degrees)
        found = self._costs.compute(
            degrees.micro_batch,
            degrees.tensor,
            self.kinds,
            self._hooks_ms(degrees),
            tensor_link,
            halves=shares.halves or (shares.sharded and self.profile.precision == "bf16"),
            sharded=shares.sharded,
            cuda_graphs=degrees.cuda_graphs,
        )
        slower = self._slower(degrees)
        forward, backward = slower * stages.whole(found.forward), slower * stages.sum(found.backward)
        in_forward, in_backward, at_end = self._collectives(degrees, stages)
        copies = self._copies(degrees, stages)
        forward_wait = _exposed(in_forward, forward) + stages.whole(found.forward_reduced) + copies[0]
        backward_wait = _exposed(in_backward, backward) + stages.sum(found.backward_reduced) + copies[1]
        alone = self._averaged_late(degrees, stages) * at_end
        undisturbed = self.cluster.device.efficiency.overlapped_link  # the whole of the link is theirs
        step_wait = undisturbed * alone + _exposed(at_end - alone, backward) + copies[2]
        # The host runs ahead of its GPU, from one micro-batch into the next: where it takes longer over all of them,
        # the GPU waits for it in both directions.
        busy = forward + backward + forward_wait + backward_wait + step_wait / degrees.num_microbatches
        host = stages.sum(found.host) + self._actions_ms(degrees)
        late = np.maximum(0.0, host - busy)
        return StageTimes(
            forward=forward + late / 2,
            backward=backward + late / 2,
            late=late,
            host=host,
            weight=slower * stages.whole(found.weight),
            forward_wait=forward_wait,
            backward_wait=backward_wait,
            step_wait=step_wait,
            optimizer=self._optimizer(degrees, stages),
        )

    def whole_state(self, degrees: Degrees) -> float:
        """Bytes of all blocks' parameters, gradients and optimiser state: no pipeline holds less in all."""
        table, shares = self.table(degrees), self.shares(degrees)
        divisor = degrees.data if shares.sharded else 1
        moments = 0.0 if degrees.offload_optimizer else ADAMW / divisor
        elements, trained = float(table.elements[0, -1]), float(table.trained[0, -1])
        return FP32 * elements / divisor + (shares.gradient_bytes + moments) * trained

    def send_ms(self, degrees: Degrees) -> list[Array]:
        """`[s][j]`: one micro-batch, one way, from stage `s` to the next, which begins at block `j`."""
        joined = (degrees.pipeline, degrees.chunks, degrees.data * degrees.tensor, degrees.micro_batch)
        if joined not in self._send_ms:
            self._send_ms[joined] = self._sent_ms(degrees)
        return self._send_ms[joined]

    def _sent_ms(self, degrees: Degrees) -> list[Array]:
        crossing = np.array(self.profile.crossing_bytes) * degrees.micro_batch
        replicas = degrees.data * degrees.tensor
        nothing = np.zeros_like(crossing)
        over: dict[Link, Array] = {}
        rows = []
        for stage in range(degrees.stages - 1):
            here, there = stage % degrees.pipeline, (stage + 1) % degrees.pipeline
            link = boundary_link(self.cluster, replicas, here, there)
            if link not in over:
                over[link] = np.where(crossing > 0, 1e3 * point_to_point_s(crossing, link), 0.0)
            rows.append(nothing if here == there else over[link])
        return [*rows, nothing]

    def tied_ms(self, degrees: Degrees, cuts: tuple[int, ...]) -> float:
        """All-reduces of gradients whose parameter lives on several pipeline ranks, one after the other."""
        shard = degrees.data if degrees.zero >= 1 else 1
        total = 0.0
        replicas = degrees.data * degrees.tensor
        for name, blocks in self.table(degrees).shared.items():
            stages = np.searchsorted(cuts, blocks, side="right") - 1
            holders = np.unique(stages % degrees.pipeline).tolist()
            if len(holders) > 1 and name not in self.profile.frozen:
                link = self.cluster.peers_link(tuple(rank * replicas for rank in holders), replicas)
                size = self.table(degrees).sizes[name]
                total += all_reduce_s(FP32 * size / shard, len(holders), link)
        return 1e3 * total

    def _slower(self, degrees: Degrees) -> float:
        """Compute beside the schedule's own sends and receives."""
        beside = degrees.schedule in INTERLEAVED and degrees.pipeline > 1 and self.cluster.device.type == "cuda"
        return 1 + SPINNING if beside else 1.0

    def _hooks_ms(self, degrees: Degrees) -> tuple[float, float]:
        """The host's time for FSDP2's hooks around one block's forward and backward, where it shards."""
        tuned = self.cluster.device.efficiency
        hooks = tuned.sharded_block_s if degrees.zero >= 1 and degrees.data > 1 else 0.0
        gathered_again = hooks / 2 if degrees.zero == 3 else 0.0
        return 1e3 * hooks, 1e3 * (hooks + gathered_again)

    def _actions_ms(self, degrees: Degrees) -> float:
        """The host's time for a forward and a backward of a stage, besides its blocks'."""
        if degrees.stages == 1 or self.cluster.device.type == "cpu":
            return 0.0
        tuned = self.cluster.device.efficiency
        return 2e3 * (tuned.recorded_action_s if degrees.cuda_graphs else tuned.action_s)

    def _optimizer(self, degrees: Degrees, stages: Mixed | Uniform | Levels) -> Array:
        """Copies of weights that are kept for a step included."""
        device, table = self.cluster.device, self.table(degrees)
        shard = degrees.data if degrees.zero >= 1 else 1
        elements = stages.whole(table.trained) / shard
        traffic = OPTIMIZER_BYTES * elements
        if self.shares(degrees).halves:
            traffic = traffic + (FP32 + HALF) * stages.whole(table.cast)
        seconds = traffic / (device.memory_bandwidth * device.efficiency.bandwidth)
        if degrees.offload_optimizer:
            # Both moments come in, and go out again.
            seconds = seconds + 2 * elements * ADAMW / self._host_bandwidth(degrees)
        return np.asarray(1e3 * seconds)

    def _host_bandwidth(self, degrees: Degrees) -> float:
        """Of one device, while all of its node move optimiser state."""
        device, together = self.cluster.device, self.cluster.device.shared_host_bandwidth
        busy = min(self.cluster.gpus_per_node, degrees.pipeline * degrees.data * degrees.tensor)
        return device.host_bandwidth if together is None else min(device.host_bandwidth, together / busy)

    def _averaged_late(self, degrees: Degrees, stages: Mixed | Uniform | Levels) -> Array:
        """Of the gradients that replicas average once a step, the share for which the last backward is over before."""
        table = self.table(degrees)
        trained = stages.whole(table.trained)
        if not self.shares(degrees).by_hand:
            return np.zeros_like(trained)
        if not degrees.cuda_graphs:
            return np.ones_like(trained)
        own = stages.whole(spans(table.own_trained * self.costs(degrees).recordable["none"]))
        return np.asarray(1 - own / np.maximum(trained, 1))

    def _copies(self, degrees: Degrees, stages: Mixed | Uniform | Levels) -> tuple[Array, Array, Array]:
        """Milliseconds of what a reduction does on the device besides its collectives, FSDP2's above all: in one
        forward, in one backward, at the step's end.

        Before a gather, shards are cast to bf16, and after it parameters copied out of its buffer; gradients are cast
        and copied into a buffer, and what is reduced is added to what earlier micro-batches left. ZeRO 1 adds up whole
        fp32 gradients instead, and copies them once.
        """
        table, micro_batches = self.table(degrees), degrees.num_microbatches
        nothing = np.zeros_like(stages.whole(self.elements))
        device = self.cluster.device
        if self.shares(degrees).by_hand and degrees.data > 1:
            moved = AVERAGING_BYTES * stages.whole(table.trained) * self._averaged_late(degrees, stages)
            return nothing, nothing, 1e3 * moved / (device.memory_bandwidth * device.efficiency.bandwidth)
        if not self.shares(degrees).sharded:
            return nothing, nothing, nothing
        byte_ms = 1e3 / (device.memory_bandwidth * SHARDING_BANDWIDTH)
        half = HALF if self.profile.precision == "bf16" else FP32
        cast = (FP32 + half) / degrees.data if half != FP32 else 0.0
        gather, again = (
            stages.whole(elements) * byte_ms * (cast + 2 * half) for elements in (table.elements, table.elements_again)
        )
        trained = stages.whole(table.trained) * byte_ms
        copied, added = trained * (half + FP32), trained * 3 * FP32 / degrees.data
        later = (micro_batches - 1) / micro_batches
        if degrees.zero == 1 and micro_batches > 1:
            first = half + FP32 if half != FP32 else 0
            summed = trained * (first / micro_batches + (half + 2 * FP32) * later)
            return gather / micro_batches, summed, trained * 2 * FP32
        if degrees.zero == 1:
            return gather, nothing, copied
        if degrees.zero == 2:
            return gather / micro_batches, copied + added * later, nothing
        return gather, again + copied + added * later, nothing

    def _collectives(self, degrees: Degrees, stages: Mixed | Uniform | Levels) -> tuple[Array, Array, Array]:
        """Milliseconds of the data axis's collectives: in one forward, in one backward, at the step's end."""
        data = degrees.data
        nothing = np.zeros_like(stages.whole(self.elements))
        if data == 1:
            return nothing, nothing, nothing
        link = self.cluster.group_link(data, degrees.tensor)
        link = replace(link, bandwidth=link.bandwidth * self.cluster.device.efficiency.overlapped_link)
        reduce, gather, again, scatter = map(stages.whole, self._costs.collectives(data, degrees.tensor, link))
        if degrees.zero == 0:
            return nothing, nothing, reduce
        once = gather / degrees.num_microbatches
        if degrees.zero == 1:
            return once, nothing, scatter
        if degrees.zero == 2:
            return once, scatter, nothing
        return gather, again + scatter, nothing


def _tensor_reductions(sizes: tuple[tuple[float, ...], ...], tensor: int, link: Link) -> Array:
    """Milliseconds of each block's all-reduces of so many bytes over the tensor-parallel axis."""
    if tensor == 1:
        return np.zeros(len(sizes))
    times = {of: 1e3 * sum(all_reduce_s(size, tensor, link) for size in of) for of in set(sizes)}
    return np.array([times[of] for of in sizes])


def boundary_link(cluster: Cluster, replicas: int, here: int, there: int) -> Link:
    """What joins two pipeline ranks, each of `replicas` devices."""
    first, second = sorted((here, there))
    return cluster.hop_link(first * replicas, second * replicas, replicas)


def _exposed(communication: Array, compute: Array) -> Array:
    """What overlap leaves: the part that compute cannot hide, and what hiding costs compute."""
    hidden = np.minimum(communication, OVERLAP * compute)
    return np.asarray(communication - hidden + INTERFERENCE * hidden)
