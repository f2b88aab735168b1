"""What every possible stage takes, per micro-batch and per step, for one choice of degrees.

Matrices are indexed `[i, j]`: the stage made of blocks `i … j - 1`. Device mesh: pipeline outermost, data inside,
so that replicas of a stage are neighbours and stages are `data` devices apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workbench.cost.cluster import Cluster, Link
from workbench.cost.communication import all_gather_s, all_reduce_s, point_to_point_s, reduce_scatter_s
from workbench.cost.memory import FP32, ParameterTable, Shares, StageMemory, stage_memory
from workbench.cost.profiles import BlockCosts, Profile

Array = npt.NDArray[np.float64]

OVERLAP = 0.8
"""Share of a block's compute time that collectives can hide behind; they wait for each other at the edges."""
INTERFERENCE = 0.3
"""Slow-down of compute by a collective that runs beside it, as a share of the collective's time."""
OPTIMIZER_BYTES = 4 * FP32 + 3 * FP32 + 3 * FP32
"""Per element: AdamW reads parameter, gradient and two moments and writes three; the norm reads a gradient and
clipping reads and writes it."""


@dataclass(frozen=True)
class Degrees:
    """One point of the search."""

    pipeline: int
    data: int
    zero: int
    recompute: str
    micro_batch: int
    num_microbatches: int


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds of every stage `[i, j]`."""

    forward: Array
    backward: Array
    """One micro-batch's compute, recomputation included."""
    forward_wait: Array
    backward_wait: Array
    """One micro-batch's exposed communication."""
    step_wait: Array
    """Exposed communication once a step: what the last backward does not hide."""
    optimizer: Array
    send: Array
    """One micro-batch over the boundary before block `i`, one way."""

    @property
    def busy(self) -> Array:
        return self.forward + self.backward + self.forward_wait + self.backward_wait


class Pricer:
    """Prices stages of one model on one cluster; remembers what choices share."""

    def __init__(self, profile: Profile, cluster: Cluster) -> None:
        self.profile = profile
        self.cluster = cluster
        self.table = ParameterTable(profile)
        self._costs: dict[int, BlockCosts] = {}

    def costs(self, micro_batch: int) -> BlockCosts:
        if micro_batch not in self._costs:
            self._costs[micro_batch] = self.profile.at(micro_batch, self.cluster.device)
        return self._costs[micro_batch]

    def memory(self, degrees: Degrees) -> StageMemory:
        shares = Shares(degrees.zero, degrees.data, degrees.recompute, degrees.num_microbatches)
        costs = self.costs(degrees.micro_batch)
        return stage_memory(self.profile, self.table, costs, degrees.micro_batch, shares)

    def times(self, degrees: Degrees) -> StageTimes:
        costs = self.costs(degrees.micro_batch)
        again = costs.forward_ms if degrees.recompute == "full" else 0.0
        host_forward, host_backward = self._host_ms(degrees)
        # A GPU works while its host prepares the next block; a CPU is its own host.
        joined = np.add if self.cluster.device.kind == "cpu" else np.maximum
        forward = spans(joined(costs.forward_ms, host_forward))
        backward = spans(joined(costs.backward_ms + again, host_backward))
        in_forward, in_backward, at_end = self._collectives(degrees)
        return StageTimes(
            forward=forward,
            backward=backward,
            forward_wait=_exposed(in_forward, forward),
            backward_wait=_exposed(in_backward, backward),
            step_wait=_exposed(at_end, backward),
            optimizer=self._optimizer(degrees),
            send=self._send(degrees),
        )

    def _host_ms(self, degrees: Degrees) -> tuple[float, float]:
        """The host's time for one block's forward and backward, with FSDP2's hooks where it shards."""
        tuned = self.cluster.device.efficiency
        hooks = tuned.sharded_block_s if degrees.zero >= 2 and degrees.data > 1 else 0.0
        gathered_again = hooks / 2 if degrees.zero == 3 else 0.0
        forward, backward = tuned.block_forward_s + hooks, tuned.block_backward_s + hooks + gathered_again
        return 1e3 * forward, 1e3 * backward

    def tied_ms(self, degrees: Degrees, cuts: tuple[int, ...]) -> float:
        """All-reduces of gradients whose parameter lives in several stages, one after the other."""
        shard = degrees.data if degrees.zero >= 2 else 1
        link = self._pipeline_link(degrees)
        total = 0.0
        for name, blocks in self.table.shared.items():
            holders = np.unique(np.searchsorted(cuts, blocks, side="right"))
            if len(holders) > 1:
                total += all_reduce_s(FP32 * self.profile.parameters[name] / shard, len(holders), link)
        return 1e3 * total

    def _pipeline_link(self, degrees: Degrees) -> Link:
        return self.cluster.link(degrees.pipeline * degrees.data)

    def _send(self, degrees: Degrees) -> Array:
        link = self._pipeline_link(degrees)
        crossing = np.array(self.profile.crossing_bytes) * degrees.micro_batch
        return np.array([1e3 * point_to_point_s(nbytes, link) if nbytes else 0.0 for nbytes in crossing])

    def _optimizer(self, degrees: Degrees) -> Array:
        device = self.cluster.device
        shard = degrees.data if degrees.zero >= 2 else 1
        rate = device.memory_bandwidth * device.efficiency.bandwidth
        return np.asarray(1e3 * self.table.trained * OPTIMIZER_BYTES / shard / rate)

    def _collectives(self, degrees: Degrees) -> tuple[Array, Array, Array]:
        """Milliseconds of the data axis's collectives: in one forward, in one backward, at the step's end."""
        data, link = degrees.data, self.cluster.link(degrees.data)
        nothing = np.zeros_like(self.table.elements)
        if data == 1:
            return nothing, nothing, nothing
        compute_bytes = 2 if self.profile.precision == "bf16" else FP32
        sizes = self.table.block_elements

        def each(seconds: list[float]) -> Array:
            return spans(1e3 * np.array(seconds))

        gather = each([all_gather_s(compute_bytes * size, data, link) for size in sizes])
        scatter = each([reduce_scatter_s(FP32 * size, data, link) for size in sizes])
        if degrees.zero == 0:
            return nothing, nothing, each([all_reduce_s(FP32 * size, data, link) for size in sizes])
        if degrees.zero == 2:
            return gather / degrees.num_microbatches, scatter, nothing
        return gather, gather + scatter, nothing


def _exposed(communication: Array, compute: Array) -> Array:
    """What overlap leaves: the part that compute cannot hide, and what hiding costs compute."""
    hidden = np.minimum(communication, OVERLAP * compute)
    return np.asarray(communication - hidden + INTERFERENCE * hidden)


def spans(values: Array) -> Array:
    """`[i, j]`: the sum of `values[i:j]`."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(total[None, :] - total[:, None])
