"""Times of one micro-batch in every possible stage on one device, shared by all strategies and searches.

Matrices are indexed `[i, j]`: the stage made of blocks `i … j - 1`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from workbench.arguments import memoised
from workbench.cost.hardware import Device, Link, all_gather_s, all_reduce_s, reduce_scatter_s
from workbench.cost.memory import BF16, FP32, ParameterTable, spans
from workbench.cost.profile import ACCUMULATE_BYTES, BlockCosts, Profile

Array = npt.NDArray[np.float64]
Collective = Callable[[Array, int, Link], Array]
"""A function of `workbench.cost.hardware`: seconds for so many bytes in a group over a link."""

RELAUNCHED = {"selective": 0.5, "full": 1.0}
"""Fraction of the host's time for a forward that activation checkpointing adds to a compiled backward in which it
computes all of the forward again. Selective: launches, without what surrounds a compiled block (0.55 of 1.2 ms in one
profile of 14 layers of BERT-1920 on an H200). Full: also the random generator's state, which is saved and restored
around attention with dropout (0.2 to 1 ms more; selective checkpointing keeps attention's results)."""


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


def without_accumulation(compute: Compute, table: ParameterTable, device: Device) -> Compute:
    """Return the times if backwards do not add gradients of weights with bf16 copies, which are bf16, in fp32."""
    saved = (ACCUMULATE_BYTES - BF16) * spans(table.own_cast)
    byte_ms = 1e3 / (device.memory_bandwidth * device.efficiency.bandwidth)
    return replace(compute, backward=np.maximum(0.0, compute.backward - saved * byte_ms))


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
        costs = _paced(costs, pace * np.where(costs.capturable["none"], replayed, 1.0))
        if low_precision:
            costs = _without_casts(costs)
        if hooks_ms is not None:
            # FSDP2 adds gradients to earlier ones by itself.
            byte_ms = 1e3 / (self.device.memory_bandwidth * self.device.efficiency.bandwidth)
            accumulation_ms = ACCUMULATE_BYTES * self.table(tensor).block_trained * byte_ms
            costs = replace(costs, backward_ms=np.maximum(0.0, costs.backward_ms - accumulation_ms))
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
            replays_ms = 1e3 * self.device.efficiency.captured_block_s * np.where(costs.backward_ms > 0, 2.0, 1.0)
            hosts = {mode: np.where(costs.capturable[mode], replays_ms, ms) for mode, ms in hosts.items()}
        reduced = _tensor_reductions(costs.backward_reduced, tensor, link)
        repeated = _tensor_reductions(costs.recompute_reduced, tensor, link)
        reduced_again = {"none": nothing, "selective": nothing, "full": repeated}
        return Compute(
            forward=spans(costs.forward_ms),
            backward=np.stack([spans(costs.backward_ms + again[mode]) for mode in modes]),
            host=np.stack([spans(hosts[mode]) for mode in modes]),
            forward_reduced=spans(_tensor_reductions(costs.forward_reduced, tensor, link)),
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


def _paced(costs: BlockCosts, pace: Array) -> BlockCosts:
    """Return the costs of blocks whose device takes `pace` times as long."""
    names = ("forward_ms", "backward_ms", "full_recompute_ms", "selective_recompute_ms")
    return replace(costs, **{name: pace * getattr(costs, name) for name in names})


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


def _tensor_reductions(sizes: tuple[tuple[float, ...], ...], tensor: int, link: Link) -> Array:
    """Return the milliseconds of each block's all-reduces, of so many bytes each, over the tensor axis."""
    if tensor == 1:
        return np.zeros(len(sizes))
    times = {block: 1e3 * sum(all_reduce_s(size, tensor, link) for size in block) for block in set(sizes)}
    return np.array([times[block] for block in sizes])
