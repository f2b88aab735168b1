"""`Profile`: what every block of a model costs, as numbers that know neither torch nor a device.

Costs are kernels with FLOPs and bytes *per sample*, plus what does not grow with the micro-batch (weights read,
cast and accumulated). `Profile.at` prices them for one micro-batch on one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.cost.device import Device

Array = npt.NDArray[np.float64]

GEMM, ATTENTION, STREAM = "gemm", "attention", "stream"
RECOMPUTE = ("none", "selective", "full")
"""What a block's backward computes again: nothing; what is cheap in FLOPs and large in bytes (outputs of matrix
products and attention are kept); or everything from the block's inputs."""

ACCUMULATE_BYTES = 12
"""Per gradient element and micro-batch: read the new and the old, write the sum, fp32."""
CASTS_FORWARD_BYTES, CASTS_BACKWARD_BYTES = 6, 3
"""Per element of a weight: what autocast's casts read and write in a micro-batch beyond what is read and written where
bf16 copies are kept for a step. A forward casts each weight; the backward's share makes up the difference that was seen
in all (9 layers of BERT-1920, 4 micro-batches of 16 × 512 tokens, H200: 188.5 and 185.2 ms a step)."""


@dataclass(frozen=True)
class Kernel:
    """One or more equal launches on the device."""

    family: str
    """`gemm`, `attention` (fused), or `stream` (bound by memory)."""
    flops: float
    """Per sample, all launches together."""
    bytes: float
    """Read and written, per sample."""
    fixed_bytes: float
    """Read and written whatever the micro-batch: weights."""
    launches: int = 1
    weight_gradient: bool = False
    """A backward product whose result only the optimiser needs."""
    again: bool = True
    """Of a forward: the backward reads what depends on it, so that checkpointing computes it again."""

    def seconds(self, micro_batch: int, device: Device, precision: str, *, backward: bool, compiled: bool) -> float:
        """Roofline: the longer of arithmetic and memory traffic, plus a launch each."""
        tuned = device.efficiency
        flops = self.flops * micro_batch
        traffic = self.bytes * micro_batch + self.fixed_bytes
        share = tuned.gemm
        if self.family == GEMM and flops > 0:
            each = flops / self.launches
            share = tuned.gemm * each / (each + tuned.gemm_half_flops)
        elif self.family == ATTENTION:
            share = tuned.attention_backward if backward else tuned.attention_forward
        arithmetic = flops / (device.peak(precision) * share)
        launch = tuned.compiled_launch_s if compiled else tuned.launch_s
        return max(arithmetic, traffic / (device.memory_bandwidth * tuned.bandwidth)) + self.launches * launch


@dataclass(frozen=True)
class BlockTypeCost:
    """One kind of block; bytes and FLOPs per sample unless they say otherwise."""

    block_type: str
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    model_flops: float
    """Forward FLOPs of matrix products and attention."""
    saved_bytes: float
    """Held from a block's forward to its backward."""
    workspace_bytes: float
    """Held besides, at the block's own peak in forward or backward."""
    weight_copy_bytes: float
    """bf16 copies of fp32 weights that autocast makes and the backward needs; per micro-batch in flight."""
    cast_elements: float = 0.0
    """Of weights that autocast casts for matrix products."""
    products_bytes: float = 0.0
    """Results of matrix products and attention that the backward needs: what selective activation checkpointing keeps
    besides the inputs."""
    forward_reduced_bytes: tuple[float, ...] = ()
    """Of each all-reduce over the tensor-parallel axis in one forward."""
    recompute_reduced_bytes: tuple[float, ...] = ()
    """Of those, what full activation checkpointing repeats."""
    backward_reduced_bytes: tuple[float, ...] = ()
    model_backward_flops: float = 0.0
    """As `model_flops`: twice as many, but for products of which one side takes no gradient."""
    capturable: tuple[str, ...] = ()
    """Kinds of activation checkpointing under which what it launches can be recorded and replayed."""


@dataclass(frozen=True)
class BlockCost:
    """One block: its kind (an index into `Profile.block_types`), parameters and inputs."""

    name: str
    block_type: int
    parameters: tuple[str, ...]
    input_bytes: float
    """Values received for the first time, per sample: what checkpointing keeps."""


@dataclass(frozen=True)
class DividedCosts:
    """The model on one device of a tensor-parallel axis."""

    block_types: tuple[BlockTypeCost, ...]
    """One for each of `Profile.block_types`."""
    parameters: Mapping[str, int] = field(hash=False)
    """Canonical name -> elements on the device."""


@dataclass(frozen=True)
class TimeRatios:
    """Measured over priced time of one kind of block, at ascending micro-batches."""

    micro_batches: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def at(self, micro_batch: int) -> tuple[float, float]:
        """Of a forward and of a backward: between two micro-batches by their logarithm, beyond the ends as at them."""
        where, points = np.log2(micro_batch), np.log2(self.micro_batches)
        return float(np.interp(where, points, self.forward)), float(np.interp(where, points, self.backward))


@dataclass(frozen=True, eq=False)
class BlockCosts:
    """Every block at one micro-batch: arrays with one entry a block. Equal to itself only, so that it can be a key."""

    forward_ms: Array
    """On the device; its host may take longer."""
    backward_ms: Array
    host_ms: tuple[Array, Array]
    """What the host takes for a forward and a backward: as measured, else `Efficiency.block_forward_s` and its like."""
    weight_ms: Array
    """Of `backward_ms`, gradients of weights: what a zero-bubble schedule leaves for later."""
    full_recompute_ms: Array
    """What full activation checkpointing computes again: of the forward, what the backward needs."""
    selective_recompute_ms: Array
    """What selective activation checkpointing adds: all of that but matrix products and attention, where a compiler
    joins it with the backward's own (`Efficiency.replay`)."""
    casts_ms: tuple[Array, Array, Array]
    """Of `forward_ms` (and `full_recompute_ms`), `backward_ms` and `selective_recompute_ms`, autocast's casts of weights: nothing where
    blocks are given bf16 weights."""
    saved_bytes: Array
    workspace_bytes: Array
    weight_copy_bytes: Array
    input_bytes: Array
    products_bytes: Array
    capturable: Mapping[str, npt.NDArray[np.bool_]]
    """By each kind of activation checkpointing, the blocks that can be recorded."""
    forward_reduced: tuple[tuple[float, ...], ...]
    """Of each block, bytes of each all-reduce over the tensor-parallel axis."""
    recompute_reduced: tuple[tuple[float, ...], ...]
    backward_reduced: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Profile:
    """The costs of one captured model under one precision."""

    model: str
    signature: str
    precision: str
    device_type: str
    """`cuda` or `cpu`: which kernels were assumed."""
    compiled: bool
    block_types: tuple[BlockTypeCost, ...]
    blocks: tuple[BlockCost, ...]
    parameters: Mapping[str, int] = field(hash=False)
    """Canonical name -> elements."""
    frozen: frozenset[str]
    crossing_bytes: tuple[float, ...]
    """`crossing_bytes[c]` is sent forward, per sample, when a stage ends before block `c`."""
    divided: Mapping[int, DividedCosts] = field(default_factory=dict, hash=False)
    """By tensor-parallel degree, those that divide most of the model."""
    labelled_share: float = 1.0
    """Of the labels, how many are not ignored on average: what a head that runs over their rows only is priced for."""
    deterministic: bool = False
    """Blocks are measured with deterministic kernels; constants are those of others."""
    code: str = ""
    """Digest of what the blocks compute: measurements of other code are of another model, whatever its parameters."""
    measured_on: str = ""
    """The device (`Device.name`) whose `time_ratios` these are; empty where nothing was measured."""
    time_ratios: Mapping[int, TimeRatios] = field(default_factory=dict, hash=False)
    """By kind."""
    hosts: Mapping[int, tuple[float, float]] = field(default_factory=dict, hash=False)
    """By kind, milliseconds of the host for a forward and a backward, where measured."""

    @property
    def parameter_count(self) -> int:
        return sum(self.parameters.values())

    @property
    def flops_per_sample(self) -> float:
        """Model FLOPs of one sample's forward and backward, without recomputation (PaLM, arXiv:2204.02311, app. B)."""
        kinds = (self.block_types[block.block_type] for block in self.blocks)
        return sum(kind.model_flops + kind.model_backward_flops for kind in kinds)

    def divides(self, tensor: int) -> bool:
        """Can the model be divided over so many tensor-parallel ranks?"""
        return tensor == 1 or tensor in self.divided

    def on_tensor_axis(self, degree: int) -> Profile:
        """The profile of what one device of a tensor-parallel axis computes and holds."""
        if degree == 1:
            return self
        found = self.divided[degree]
        return replace(self, block_types=found.block_types, parameters=found.parameters, divided={})

    @cached_property
    def _kind_of_block(self) -> npt.NDArray[np.intp]:
        return np.array([block.block_type for block in self.blocks], dtype=np.intp)

    def at(self, micro_batch: int, device: Device) -> BlockCosts:
        """Time and memory of each block for `micro_batch` samples on `device`; each kind is priced once."""
        times = [self._kind_ms(kind, micro_batch, device) for kind in range(len(self.block_types))]
        forward, backward, weight, recompute, replay = np.array(times).T
        host_forward, host_backward = np.array([self._host_ms(kind, device) for kind in range(len(self.block_types))]).T
        memory = np.array(
            [(k.saved_bytes, k.workspace_bytes, k.weight_copy_bytes, k.products_bytes) for k in self.block_types]
        ).T
        of = self._kind_of_block
        cast = np.array([kind.cast_elements for kind in self.block_types])[of]
        element_ms = 1e3 / (device.memory_bandwidth * device.efficiency.bandwidth)
        return BlockCosts(
            forward_ms=forward[of],
            backward_ms=backward[of],
            host_ms=(host_forward[of], host_backward[of]),
            weight_ms=weight[of],
            full_recompute_ms=recompute[of],
            selective_recompute_ms=replay[of],
            casts_ms=(
                CASTS_FORWARD_BYTES * cast * element_ms,
                CASTS_BACKWARD_BYTES * cast * element_ms,
                self.selective_recompute_share(device) * CASTS_FORWARD_BYTES * cast * element_ms,
            ),
            saved_bytes=memory[0][of] * micro_batch,
            workspace_bytes=memory[1][of] * micro_batch,
            weight_copy_bytes=memory[2][of],
            input_bytes=np.array([block.input_bytes for block in self.blocks]) * micro_batch,
            products_bytes=memory[3][of] * micro_batch,
            capturable={
                recompute: np.array([recompute in kind.capturable for kind in self.block_types])[of]
                for recompute in RECOMPUTE
            },
            forward_reduced=_reduced(self, "forward_reduced_bytes", micro_batch),
            recompute_reduced=_reduced(self, "recompute_reduced_bytes", micro_batch),
            backward_reduced=_reduced(self, "backward_reduced_bytes", micro_batch),
        )

    def priced_ms(self, kind: int, micro_batch: int, device: Device) -> tuple[float, float]:
        """Forward and backward of one kind of block by the device's constants alone."""
        return _kind_ms(self, self.block_types[kind], micro_batch, device)[:2]

    def _kind_ms(self, kind: int, micro_batch: int, device: Device) -> tuple[float, float, float, float, float]:
        times = _kind_ms(self, self.block_types[kind], micro_batch, device)
        if self.measured_on != device.name or kind not in self.time_ratios:
            return times
        forward, backward = self.time_ratios[kind].at(micro_batch)
        return times[0] * forward, times[1] * backward, times[2] * backward, times[3] * forward, times[4] * forward

    def _host_ms(self, kind: int, device: Device) -> tuple[float, float]:
        tuned = device.efficiency
        forward, backward = 1e3 * tuned.block_forward_s, 1e3 * tuned.block_backward_s
        if self.measured_on == device.name and kind in self.measured_host_ms:
            forward, backward = (tuned.host_in_step * host for host in self.measured_host_ms[kind])
        cost, each = self.block_types[kind], 1e3 * tuned.collective_s
        return (
            forward + each * len(cost.forward_reduced_bytes),
            backward + each * len(cost.backward_reduced_bytes) if cost.backward else 0.0,
        )

    def selective_recompute_share(self, device: Device) -> float:
        """Of what selective checkpointing computes again, the share of its time alone that it takes."""
        return device.efficiency.selective_recompute if self.compiled else 1.0

    def to_json(self) -> dict[str, Any]:
        fields = {**asdict(self), "parameters": dict(self.parameters), "frozen": sorted(self.frozen)}
        fields["divided"] = {str(degree): asdict(costs) for degree, costs in self.divided.items()}
        fields["time_ratios"] = {str(kind): asdict(time_ratios) for kind, time_ratios in self.time_ratios.items()}
        fields["hosts"] = {str(kind): list(times) for kind, times in self.measured_host_ms.items()}
        return fields

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Profile:
        fields = dict(value)
        fields["block_types"] = tuple(_kind_from_json(kind) for kind in fields["block_types"])
        fields["blocks"] = tuple(BlockCost(**{**b, "parameters": tuple(b["parameters"])}) for b in fields["blocks"])
        fields["frozen"] = frozenset(fields["frozen"])
        fields["crossing_bytes"] = tuple(fields["crossing_bytes"])
        fields["divided"] = {
            int(degree): DividedCosts(tuple(map(_kind_from_json, costs["block_types"])), costs["parameters"])
            for degree, costs in fields.get("divided", {}).items()
        }
        fields["time_ratios"] = {
            int(kind): TimeRatios(**{name: tuple(values) for name, values in time_ratios.items()})
            for kind, time_ratios in fields.get("time_ratios", {}).items()
        }
        fields["hosts"] = {int(kind): tuple(times) for kind, times in fields.get("hosts", {}).items()}
        return Profile(**fields)


def _reduced(profile: Profile, name: str, micro_batch: int) -> tuple[tuple[float, ...], ...]:
    of_kinds = [tuple(size * micro_batch for size in getattr(kind, name)) for kind in profile.block_types]
    return tuple(of_kinds[block.block_type] for block in profile.blocks)


def _kind_ms(
    profile: Profile, kind: BlockTypeCost, micro_batch: int, device: Device
) -> tuple[float, float, float, float, float]:
    """Forward, backward, of that the weights' gradients, and what full and selective checkpointing add."""

    def total(kernels: Iterable[Kernel], backward: bool) -> float:
        return 1e3 * sum(
            k.seconds(micro_batch, device, profile.precision, backward=backward, compiled=profile.compiled)
            for k in kernels
        )

    weights = [kernel for kernel in kind.backward if kernel.weight_gradient]
    again = [kernel for kernel in kind.forward if kernel.again]
    replayed = [kernel for kernel in again if kernel.family == STREAM]
    forward, backward = total(kind.forward, False), total(kind.backward, True)
    replay = profile.selective_recompute_share(device) * total(replayed, False)
    return forward, backward, total(weights, True), total(again, False), replay


def _kind_from_json(value: Mapping[str, Any]) -> BlockTypeCost:
    kernels = {name: tuple(Kernel(**kernel) for kernel in value[name]) for name in ("forward", "backward")}
    names = ("forward_reduced_bytes", "recompute_reduced_bytes", "backward_reduced_bytes")
    reduced = {name: tuple(value.get(name, ())) for name in (*names, "capturable")}
    return BlockTypeCost(**{**value, **kernels, **reduced})
