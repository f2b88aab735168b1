"""`Profile`: the cost of every block of a model, as numbers that need neither torch nor a device.

Costs are kernels with FLOPs and bytes *per sample*, plus what does not grow with the micro-batch (weights read, cast
and accumulated). `Profile.at` turns them into time and memory for one micro-batch on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.cost.hardware import Device, Link, all_gather_s
from workbench.strategy import RECOMPUTE

if TYPE_CHECKING:
    from workbench.capture.captured_model import Facts
    from workbench.capture.graph import Graph
    from workbench.experiment import Experiment

Array = npt.NDArray[np.float64]

GEMM, ATTENTION, STREAM = "gemm", "attention", "stream"
"""Families of kernels: matrix products, fused attention, and those bound by memory."""

ADAMW = 8
"""Bytes of AdamW's state per element: two fp32 moments."""
ADAMW_UPDATE = 28
"""Bytes per element that AdamW's fused update moves: it reads parameter, gradient and two moments and writes three."""
MUON_UPDATE = 24
"""Bytes that Muon's two kernels read and write per element: 14 of gradient, momentum and direction, and 10 of weight
and update."""
LIMITED_CLOCK = 0.98
"""Ratio of a probe's clock to the highest of a model's probes below which the device is taken to be power-limited."""
ACCUMULATE_BYTES = 12
"""Bytes of gradient accumulation per element and micro-batch: two fp32 reads and one write."""
CASTS_FORWARD_BYTES, CASTS_BACKWARD_BYTES = 6, 8
"""Bytes per weight element and micro-batch that autocast's casts move beyond what kept bf16 weight copies would.

A forward reads fp32 and writes bf16. A backward casts the gradient to fp32 (6 bytes) and adds that (12), where one
kernel adds the bf16 gradient of a copy (10). On 4 H100, 14 layers of a BERT of width 1920 took 13.9 to 14.3 ms backward
with 4 samples of 512 tokens, which 8 bytes predict as 14.3 ms, and 3 bytes as 15.3.
"""


@dataclass(frozen=True)
class ParameterUpdate:
    """Memory and work that the optimiser needs for one parameter."""

    state_bytes: float
    """Bytes of state per element."""
    update_bytes: float
    """Bytes that the update reads and writes per element."""
    whole_flops: float = 0.0
    """FLOPs of matrix products over the whole tensor, which one of the devices that hold a part of it computes."""
    whole_elements: int = 0
    """Elements of the whole tensor, where these products need it whole."""
    gram_elements: int = 0
    """Elements of the Gram matrices that these products make."""


class RelativeTime(NamedTuple):
    """The time of a product with stored blocks over that of the dense product, in two parts that add up."""

    arithmetic: float = 1.0
    """Time of the arithmetic, which shrinks with the stored blocks."""
    traffic: float = 0.0
    """Time of reading and writing activations, over `Device.flops_per_byte`."""

    def on(self, device: Device) -> float:
        """Return the time over that of the dense product on `device`."""
        return self.arithmetic + self.traffic * device.flops_per_byte


DENSE = RelativeTime()


def break_even_sparsity(products: tuple[RelativeTime, RelativeTime], device: Device) -> float:
    """Return the sparsity from which block-sparse products are predicted to be faster than dense ones on `device`.

    `products` are the times with none and with all blocks stored. It is 1 where they are never faster.
    """
    none, whole = (times.on(device) for times in products)
    return min(1.0, max(0.0, 1 - (1 - none) / (whole - none)))


@dataclass(frozen=True)
class Kernel:
    """One or more equal launches on the device."""

    family: str
    """`gemm`, `attention` or `stream`."""
    flops: float
    """FLOPs per sample of all launches together."""
    bytes: float
    """Bytes read and written per sample."""
    fixed_bytes: float
    """Bytes read and written for any micro-batch: weights."""
    launches: int = 1
    recomputed: bool = True
    """True for a forward kernel that full activation checkpointing repeats, because the backward needs its result."""
    relative: RelativeTime = DENSE
    """Time over that of a dense product of these FLOPs; block-sparse products leave blocks out."""

    def seconds(self, micro_batch: int, device: Device, precision: str, *, backward: bool, compiled: bool) -> float:
        """Return the time by roofline: the longer of arithmetic and memory traffic, plus the launches."""
        tuned = device.efficiency
        flops = self.flops * micro_batch
        traffic = self.bytes * micro_batch + self.fixed_bytes
        share = tuned.gemm
        # A small product does not fill the device: its rate rises with its size, to half the best at `gemm_half_flops`.
        if self.family == GEMM and flops > 0:
            each = flops / self.launches
            share = tuned.gemm * each / (each + tuned.gemm_half_flops)
        elif self.family == ATTENTION:
            share = tuned.attention_backward if backward else tuned.attention_forward
        arithmetic = self.relative.on(device) * flops / (device.peak(precision) * share)
        launch = tuned.compiled_launch_s if compiled else tuned.launch_s
        return max(arithmetic, traffic / (device.memory_bandwidth * tuned.bandwidth)) + self.launches * launch


@dataclass(frozen=True)
class BlockTypeCost:
    """The cost of one block type; bytes and FLOPs are per sample unless stated otherwise."""

    block_type: str
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    model_flops: float
    """Forward FLOPs of matrix products and attention."""
    saved_bytes: float
    """Bytes held from a block's forward to its backward."""
    workspace_bytes: float
    """Further bytes that exist at the block's own peak in forward or backward."""
    weight_copy_bytes: float
    """Bytes of bf16 weight copies that autocast makes and the backward needs; per micro-batch in flight."""
    cast_elements: float = 0.0
    """Elements of weights that autocast casts for matrix products."""
    products_bytes: float = 0.0
    """Bytes that selective checkpointing keeps besides the inputs: results of products and attention."""
    forward_reduced_bytes: tuple[float, ...] = ()
    """Bytes of each all-reduce over the tensor-parallel axis in one forward."""
    recompute_reduced_bytes: tuple[float, ...] = ()
    """Bytes of those all-reduces that full activation checkpointing repeats."""
    backward_reduced_bytes: tuple[float, ...] = ()
    """Bytes of each all-reduce over the tensor-parallel axis in one backward."""
    model_backward_flops: float = 0.0
    """Backward FLOPs: twice `model_flops`, less for products of which one side takes no gradient."""
    capturable: tuple[str, ...] = ()
    """Modes of activation checkpointing (`RECOMPUTE`) under which the block can be captured as a CUDA graph."""
    runs_as: tuple[tuple[str, str], ...] = tuple((mode, mode) for mode in RECOMPUTE)
    """Pairs of a mode that is asked for and the one that the block runs (`capture.blocks.recomputation`)."""

    @property
    def stored_products(self) -> int:
        """The number of products with stored blocks in the forward."""
        return sum(kernel.relative != DENSE for kernel in self.forward)


@dataclass(frozen=True)
class BlockCost:
    """One block of the model: its type, its parameters and its inputs."""

    name: str
    block_type: int
    """Index into `Profile.block_types`."""
    parameters: tuple[str, ...]
    input_bytes: float
    """Bytes per sample of values that it is the first block to receive; checkpointing keeps them."""
    opaque: tuple[str, ...] = ()
    """Labels of its opaque calls, which run the user's code as written."""
    measured_as: int | None = None
    """Index of the block whose measurement counts for this one: the first whose code costs the same. The two may be of
    different block types, since they receive other dtypes. None for the block itself."""


@dataclass(frozen=True)
class DividedCosts:
    """The model on one rank of a tensor-parallel axis."""

    block_types: tuple[BlockTypeCost, ...]
    """Cost of each of `Profile.block_types`."""
    parameters: Mapping[str, int] = field(hash=False)
    """Elements on the rank by canonical name."""


@dataclass(frozen=True)
class SparseCosts:
    """The sparse weights of a model, and its costs where they are stored and multiplied without absent blocks."""

    sparsity: float
    block: int
    """Rows and columns of a block."""
    blocks: Mapping[str, int] = field(hash=False)
    """Number of blocks, present or absent, of each sparse weight by name."""
    absent_flops: float
    """FLOPs per sample, forward and backward, of products with absent blocks."""
    products: tuple[RelativeTime, RelativeTime] | None = None
    """Times of all products with none and with all of the blocks stored; None without kernels for such blocks."""
    obstacle: str = ""
    """Clause that says why the weights can only be masked; empty if they can be block-sparse."""
    block_types: tuple[BlockTypeCost, ...] = ()
    """Cost of each of `Profile.block_types` with block-sparse weights."""
    parameters: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Stored elements of every parameter by name."""
    index_bytes: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Bytes of the index of each sparse weight by name."""

    def obstacle_on(self, device: Device, precision: str = "bf16") -> str:
        """Return why plans for a device do not store the weights without absent blocks, as a clause; empty if they may.

        `precision` is that of plans which nobody asked for: the rates of block-sparse products are known in bf16 alone.
        """
        if self.obstacle:
            return self.obstacle
        if device.type != "cuda":
            return f"block-sparse kernels need a CUDA device, and a {device.name} is none"
        if "bf16" not in device.peak_flops:
            return f"block-sparse kernels need a GPU that multiplies in bf16, and a {device.name} does not"
        is_measured = precision == "bf16"
        return "" if is_measured else f"the rates of block-sparse products are measured in bf16 and not in {precision}"


@dataclass(frozen=True)
class TailCosts:
    """The part of a loss that compares samples, which runs once a step over the whole batch."""

    profile: Profile
    """Costs of the whole batch, of which the last block is that part."""
    samples: int
    gathered_bytes: float
    """Bytes of the values that are gathered over micro-batches and replicas, of all samples."""
    is_compared: bool
    """True if numbers were compared with those of the model's own forward, which is too large for it otherwise."""

    def ms_and_bytes(self, device: Device) -> tuple[float, float]:
        """Return the time of forward and backward, and the memory at their peak."""
        costs = self.profile.at(self.samples, device)
        return float(costs.forward_ms[-1] + costs.backward_ms[-1]), float(
            costs.saved_bytes[-1] + costs.workspace_bytes[-1]
        )

    def exchange_ms(self, replicas: int, link: Link) -> float:
        """Return the time in which replicas all-gather the values, once a step."""
        return 1e3 * all_gather_s(self.gathered_bytes, replicas, link) if replicas > 1 else 0.0

    @property
    def held_bytes(self) -> float:
        """Bytes that the last stage holds of the values and of their gradients."""
        return 2 * self.gathered_bytes


def with_gathered(whole: Profile, towers: Profile, at_once: Profile, part: Graph, samples: int) -> Profile:
    """Return a profile with the costs of gathering its loss over micro-batches and replicas.

    `towers` is the profile of `part`, whose last block is the tail of the loss, and `at_once` that of the whole batch
    of `samples` samples.
    """
    # The tail runs once over the whole batch, and is priced by `TailCosts`: as a block of a micro-batch it is free.
    free = BlockTypeCost(part.blocks[-1].block_type, (), (), 0.0, 0.0, 0.0, 0.0)
    last = replace(towers.blocks[-1], block_type=len(towers.block_types), input_bytes=0.0, measured_as=None)
    is_compared = whole.facts is not None and whole.facts.is_gathering_compared
    of_part = sum(part.values[rows.name].nbytes for rows in part.gathered)
    gathered = replace(
        towers,
        blocks=(*towers.blocks[:-1], last),
        block_types=(*towers.block_types, free),
        coupled=(),
        divided={},
        tail=TailCosts(at_once, samples, samples * (of_part / part.micro_batch), is_compared),
    )
    return replace(whole, gathered=gathered)


@dataclass(frozen=True)
class TimeRatios:
    """Measured over analytic time of one block type, at ascending micro-batches."""

    micro_batches: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def at(self, micro_batch: int) -> tuple[float, float]:
        """Return the ratios of forward and backward, interpolated over log2 of the micro-batch, constant outside."""
        where, points = np.log2(micro_batch), np.log2(self.micro_batches)
        return float(np.interp(where, points, self.forward)), float(np.interp(where, points, self.backward))


@dataclass(frozen=True, eq=False)
class BlockCosts:
    """Time and memory of every block at one micro-batch: arrays with one entry per block.

    An instance equals only itself, so that it can be the key of a cache.
    """

    forward_ms: Array
    """Time on the device; its host may take longer."""
    backward_ms: Array
    host_ms: tuple[Array, Array]
    """Time of the host for a forward and a backward: measured, or from `Efficiency.block_forward_s` and its like."""
    full_recompute_ms: Array
    """Time of what full activation checkpointing recomputes: the part of the forward that the backward needs.

    It is 0 for the model's last block, which is never recomputed, because its backward follows its forward.
    """
    selective_recompute_ms: Array
    """Time that selective activation checkpointing adds: `full_recompute_ms` without matrix products and attention.

    A compiler fuses it with the backward's own kernels (`Efficiency.selective_recompute`).
    """
    casts_ms: tuple[Array, Array, Array]
    """Time of autocast's weight casts in `forward_ms` (and `full_recompute_ms`), `backward_ms` and
    `selective_recompute_ms`; blocks with bf16 weight copies do without."""
    saved_bytes: Array
    workspace_bytes: Array
    weight_copy_bytes: Array
    input_bytes: Array
    products_bytes: Array
    capturable: Mapping[str, npt.NDArray[np.bool_]]
    """Blocks that can be captured as CUDA graphs, by mode of activation checkpointing."""
    runs_as: Mapping[str, npt.NDArray[np.str_]]
    """The mode that each block runs, by the mode that is asked for."""
    forward_reduced: tuple[tuple[float, ...], ...]
    """Bytes of each all-reduce over the tensor-parallel axis, for each block."""
    recompute_reduced: tuple[tuple[float, ...], ...]
    backward_reduced: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Profile:
    """The costs of one captured model under one precision."""

    model: str
    signature: str
    precision: str
    device_type: str
    """Device type (`cuda` or `cpu`) whose kernels were assumed."""
    compiled: bool
    block_types: tuple[BlockTypeCost, ...]
    blocks: tuple[BlockCost, ...]
    parameters: Mapping[str, int] = field(hash=False)
    """Elements by canonical name."""
    frozen: frozenset[str]
    """Parameters that get no gradient."""
    crossing_bytes: tuple[float, ...]
    """Bytes per sample that a stage sends forward if it ends before block `c`, at index `c`."""
    divided: Mapping[int, DividedCosts] = field(default_factory=dict, hash=False)
    """Costs by tensor-parallel degree, for the degrees that divide most of the model."""
    labelled_share: float = 1.0
    """Average share of labels that are not ignored; a head that runs over their rows is priced for it."""
    deterministic: bool = False
    """True if measurements must use deterministic kernels; constants are those of the others."""
    code: str = ""
    """Digest of the blocks' code: measurements of other code are of another model, whatever its parameters."""
    coupled: tuple[str, ...] = ()
    """Operations that mix the samples of a batch: plans must keep the global batch in one micro-batch."""
    notes: tuple[str, ...] = ()
    """Sentences of capture on what a user may not expect, for the plan."""
    notes_if_divided: tuple[str, ...] = ()
    notes_if_accumulated: tuple[str, ...] = ()
    """Sentences of `Graph` that hold where a plan divides the batch, or a replica's share of it."""
    optimizer_state_bytes: float = ADAMW
    """Bytes of the optimiser's state per trained element."""
    optimizer_update_bytes: float = ADAMW_UPDATE
    """Bytes that one update of the optimiser reads and writes per trained element."""
    optimizer_in_one_pass: bool = True
    """True if an update on a GPU clips gradients and writes the weights' bf16 copies, as our kernels do."""
    average_bytes: float = 0.0
    """Bytes of the moving average of weights per trained element, which is sharded as the weights are."""
    parameter_updates: Mapping[str, ParameterUpdate] = field(default_factory=dict, hash=False)
    """Parameters by name that the optimiser treats otherwise than these two figures say."""
    sparse: SparseCosts | None = None
    """Costs of sparse weights; None if the experiment has dense ones."""
    is_block_sparse: bool = False
    """True if the costs are those of block-sparse weights; sparse weights are masked otherwise."""
    measured_on: str = ""
    """`Device.name` that `time_ratios` were measured on; empty if nothing was measured."""
    time_ratios: Mapping[int, TimeRatios] = field(default_factory=dict, hash=False)
    """Measured over analytic time by index of the block type."""
    replayed: tuple[tuple[int, float], ...] = ()
    """Measured time of captured blocks over that of others, at ascending micro-batches."""
    is_power_limited: bool = False
    """True if the device's clock fell while the largest micro-batches were measured."""
    measured_host_ms: Mapping[int, tuple[float, float]] = field(default_factory=dict, hash=False)
    """Milliseconds of the host for a forward and a backward by index of the block type, where measured."""
    gathered: Profile | None = field(default=None, repr=False, hash=False)
    """Costs with a loss over all micro-batches and replicas; None where it cannot be gathered, or need not be."""
    tail: TailCosts | None = field(default=None, repr=False, hash=False)
    """Costs of the last block of a gathered loss, which are no part of `block_types`; None in other profiles."""
    facts: Facts | None = field(default=None, repr=False, compare=False)
    """Facts of the model; None for costs of a graph that no experiment describes."""

    @property
    def parameter_count(self) -> int:
        return sum(self.parameters.values())

    @property
    def flops_per_sample(self) -> float:
        """Model FLOPs of one sample's forward and backward, without recomputation (PaLM, arXiv:2204.02311, app. B)."""
        costs = (self.block_types[block.block_type] for block in self.blocks)
        return sum(cost.model_flops + cost.model_backward_flops for cost in costs)

    @property
    def masked(self) -> Collection[str]:
        """Names of the parameters that are multiplied by masks."""
        return () if self.sparse is None or self.is_block_sparse else self.sparse.blocks.keys()

    @property
    def pattern_bytes(self) -> Mapping[str, float]:
        """Bytes of pattern and index by name of the sparse weight; each rank that holds a shard has them all."""
        if self.sparse is None:
            return {}
        index = self.sparse.index_bytes if self.is_block_sparse else {}
        return {name: blocks + index.get(name, 0.0) for name, blocks in self.sparse.blocks.items()}

    @cached_property
    def block_sparse(self) -> Profile | None:
        """The profile with block-sparse weights, or None if there is none; one object, which caches know."""
        if self.sparse is None or not self.sparse.block_types:
            return None
        costs = self.sparse
        return replace(
            self, block_types=costs.block_types, parameters=costs.parameters, divided={}, is_block_sparse=True
        )

    def forms(self, device: Device, block_sparse: bool | None) -> list[Profile]:
        """Return the profiles that plans for a device may choose from: of dense or masked weights, and of block-sparse.

        `block_sparse` is what the user fixed.
        """
        forms = [] if block_sparse else [self]
        if block_sparse is not False and self.sparse is not None and self.block_sparse is not None:
            obstacle = self.sparse.obstacle_on(device, "bf16" if block_sparse else self.precision)
            forms += [] if obstacle else [self.block_sparse]
        return forms

    @property
    def most_stages(self) -> int:
        """Blocks that can be stages of their own; the tail of a gathered loss is one more than the model has."""
        return len((self.gathered or self).blocks)

    @property
    def undivided_because(self) -> str:
        """Sentence that says why a loss that compares samples cannot gather them, or cannot in every plan."""
        if self.gathered is not None:
            return (
                "They are gathered only with tensor=1 and one stage on each pipeline rank, over micro-batches of two "
                "or more samples."
            )
        return (self.facts and self.facts.not_gathered) or ""

    def divides(self, tensor: int) -> bool:
        """Return True if the model can be divided over `tensor` tensor-parallel ranks."""
        return tensor == 1 or tensor in self.divided

    def on_tensor_axis(self, degree: int) -> Profile:
        """Return the profile of what one rank of a tensor-parallel axis computes and holds."""
        if degree == 1:
            return self
        rank = self.divided[degree]
        return replace(self, block_types=rank.block_types, parameters=rank.parameters, divided={})

    @cached_property
    def _type_of_block(self) -> npt.NDArray[np.intp]:
        return np.array([block.block_type for block in self.blocks], dtype=np.intp)

    def at(self, micro_batch: int, device: Device) -> BlockCosts:
        """Return time and memory of each block for `micro_batch` samples on `device`."""
        of, tuned, is_measured = self._type_of_block, device.efficiency, self.measured_on == device.name
        device_ms, host_ms = [], []
        for index, cost in enumerate(self.block_types):
            # Analytic times, corrected by what was measured on this device.
            times = self._analytic_ms(cost, micro_batch, device)
            if is_measured and index in self.time_ratios:
                ratios = self.time_ratios[index].at(micro_batch)
                times = times[0] * ratios[0], times[1] * ratios[1], times[2] * ratios[0], times[3] * ratios[0]
            again = dict(zip(("none", "full", "selective"), (0.0, *times[2:]), strict=True))
            modes = dict(cost.runs_as)
            device_ms.append((*times[:2], again[modes["full"]], again[modes["selective"]]))
            launching = 1e3 * tuned.block_forward_s, 1e3 * tuned.block_backward_s
            if is_measured and index in self.measured_host_ms:
                measured = self.measured_host_ms[index]
                launching = tuned.host_in_step * measured[0], tuned.host_in_step * measured[1]
            if stored := cost.stored_products:
                more = 1e3 * tuned.stored_product_s * stored
                launching = launching[0] + more / 3, launching[1] + 2 * more / 3
            each = 1e3 * tuned.collective_s
            of_backward = launching[1] + each * len(cost.backward_reduced_bytes) if cost.backward else 0.0
            host_ms.append((launching[0] + each * len(cost.forward_reduced_bytes), of_backward))
        forward, backward, full, selective = np.array(device_ms).T[:, of]
        full[-1] = selective[-1] = 0.0  # the last block is not recomputed
        host_forward, host_backward = np.array(host_ms).T[:, of]
        figures = ("saved_bytes", "workspace_bytes", "weight_copy_bytes", "products_bytes", "cast_elements")
        rows = [[getattr(cost, figure) for figure in figures] for cost in self.block_types]
        saved, workspace, weight_copies, products, cast = np.array(rows).T[:, of]
        element_ms = 1e3 / (device.memory_bandwidth * tuned.bandwidth)
        capturable, runs_as = {}, {}
        for mode in RECOMPUTE:
            runs_as[mode] = np.array([dict(cost.runs_as)[mode] for cost in self.block_types])[self._type_of_block]
            capturable[mode] = np.array([mode in cost.capturable for cost in self.block_types])[self._type_of_block]
            capturable[mode][-1] = "none" in self.block_types[self.blocks[-1].block_type].capturable
        return BlockCosts(
            forward_ms=forward,
            backward_ms=backward,
            host_ms=(host_forward, host_backward),
            full_recompute_ms=full,
            selective_recompute_ms=selective,
            casts_ms=(
                CASTS_FORWARD_BYTES * cast * element_ms,
                CASTS_BACKWARD_BYTES * cast * element_ms,
                self.selective_recompute_share(device) * CASTS_FORWARD_BYTES * cast * element_ms,
            ),
            saved_bytes=saved * micro_batch,
            workspace_bytes=workspace * micro_batch,
            weight_copy_bytes=weight_copies,
            input_bytes=np.array([block.input_bytes for block in self.blocks]) * micro_batch,
            products_bytes=products * micro_batch,
            capturable=capturable,
            runs_as=runs_as,
            forward_reduced=self._reduced("forward_reduced_bytes", micro_batch),
            recompute_reduced=(*self._reduced("recompute_reduced_bytes", micro_batch)[:-1], ()),
            backward_reduced=self._reduced("backward_reduced_bytes", micro_batch),
        )

    def analytic_ms(self, block_type: int, micro_batch: int, device: Device) -> tuple[float, float]:
        """Return forward and backward time of one block type by the device's constants alone."""
        return self._analytic_ms(self.block_types[block_type], micro_batch, device)[:2]

    def in_step(self, device: Device, *, devices: int) -> Array:
        """Return the ratio of each block's time in a step of so many devices to `at`'s: 1 unless it was measured."""
        measured = np.isin(self._type_of_block, list(self.time_ratios)) & (self.measured_on == device.name)
        alone = device.efficiency.sustained if self.is_power_limited else 1.0
        return np.where(measured, device.efficiency.in_step if devices > 1 else alone, 1.0)

    def replayed_share(self, micro_batch: int, device: Device) -> float:
        """Return the ratio of captured blocks' time to `at`'s, interpolated over log2 of the micro-batch."""
        if self.measured_on != device.name or not self.replayed:
            return 1.0
        sizes, ratios = zip(*self.replayed, strict=True)
        return float(np.interp(np.log2(micro_batch), np.log2(sizes), ratios))

    def selective_recompute_share(self, device: Device) -> float:
        """Return the share of its time alone that selective recomputation adds to a backward."""
        return device.efficiency.selective_recompute if self.compiled else 1.0

    def _analytic_ms(self, cost: BlockTypeCost, micro_batch: int, device: Device) -> tuple[float, float, float, float]:
        """Return the time of forward, backward, full and selective recomputation."""

        def total(kernels: Iterable[Kernel], backward: bool) -> float:
            return 1e3 * sum(
                kernel.seconds(micro_batch, device, self.precision, backward=backward, compiled=self.compiled)
                for kernel in kernels
            )

        full = [kernel for kernel in cost.forward if kernel.recomputed]
        selective = [kernel for kernel in full if kernel.family == STREAM]
        return (
            total(cost.forward, False),
            total(cost.backward, True),
            total(full, False),
            self.selective_recompute_share(device) * total(selective, False),
        )

    def _reduced(self, name: str, micro_batch: int) -> tuple[tuple[float, ...], ...]:
        of_types = [tuple(size * micro_batch for size in getattr(cost, name)) for cost in self.block_types]
        return tuple(of_types[block.block_type] for block in self.blocks)


def computed_on(device: Device, experiment: Experiment) -> tuple[str, bool]:
    """Return the precision that an experiment computes in on a device, and whether its blocks are compiled there.

    Unless the experiment says otherwise, GPUs compute in bf16 and compile, and CPUs do neither.
    """
    on_gpu, asked, compiles = device.type == "cuda", experiment.precision, experiment.numerics.compile
    precision = asked if asked != "auto" else "bf16" if on_gpu else "fp32"
    return precision, on_gpu if compiles is None else compiles


# A profile corrected by blocks that were measured; `workbench.measure.block_probes` obtains the measurements.
#
# Times: the ratio of measured to analytic time is interpolated over the logarithm of the micro-batch and applied to the
# analytic time, so that one measurement serves every tensor-parallel degree; so is the share of it that captured blocks
# take. The host's time hardly depends on the micro-batch, so the least measured one counts. Memory: a line through the
# bytes held at each micro-batch (its slope per sample, its offset per block) replaces the bytes counted on the meta
# device.


@dataclass(frozen=True)
class BlockMeasurement:
    """The time and memory of one block type, run at one micro-batch."""

    first_block: int
    """Index of the first block of this type in the model."""
    micro_batch: int
    forward_ms: float
    backward_ms: float
    held_bytes: float
    """Bytes that the forward leaves for the backward."""
    workspace_bytes: float
    """Further bytes at the peak of forward or backward, without the gradients of parameters."""
    forward_host_ms: float = 0.0
    """Time that the host is busy with the forward if it does not wait for the device; 0 on a CPU."""
    backward_host_ms: float = 0.0
    clock_mhz: int | None = None
    """Clock of the device at the end, lower at its power limit; None if unknown."""
    replayed: float = 1.0
    """Ratio of the model's blocks' time when one CUDA graph launches them to their time launched kernel by kernel.

    A graph's kernels follow each other sooner. It is one figure for each micro-batch, and 1 if nothing was captured.
    """


def corrected_profile(profile: Profile, device: Device, measurements: Sequence[BlockMeasurement]) -> Profile:
    """Return `profile` with the times and bytes measured on `device`; other block types stay analytic."""
    points_of: dict[int, list[BlockMeasurement]] = {}
    priced_by = dict[int, set[int]]()  # block types for which a measurement counts, by its first block
    for index, block in enumerate(profile.blocks):
        for measured in {index, index if block.measured_as is None else block.measured_as}:
            priced_by.setdefault(measured, set()).add(block.block_type)
    for measurement in sorted(measurements, key=lambda one: one.micro_batch):
        for block_type in priced_by[measurement.first_block]:
            points_of.setdefault(block_type, []).append(measurement)
    whole = profile.block_types
    corrected = {index: _with_memory(whole[index], points) for index, points in points_of.items()}

    def parts(costs: Sequence[BlockTypeCost], memory: Callable[..., BlockTypeCost]) -> tuple[BlockTypeCost, ...]:
        return tuple(
            memory(whole[index], part, corrected[index]) if index in corrected else part
            for index, part in enumerate(costs)
        )

    divided = {
        degree: DividedCosts(parts(costs.block_types, partial(_divided_memory, degree)), costs.parameters)
        for degree, costs in profile.divided.items()
    }
    host_ms = {
        index: [(point.forward_host_ms, point.backward_host_ms) for point in points if point.forward_host_ms > 0]
        for index, points in points_of.items()
    }
    ratios = {}
    for index, points in points_of.items():
        sizes = tuple(point.micro_batch for point in points)
        analytic = [profile.analytic_ms(index, size, device) for size in sizes]
        forward = (_ratio(point.forward_ms, ms) for point, (ms, _) in zip(points, analytic, strict=True))
        backward = (_ratio(point.backward_ms, ms) for point, (_, ms) in zip(points, analytic, strict=True))
        ratios[index] = TimeRatios(sizes, tuple(forward), tuple(backward))
    clocks = [one.clock_mhz for one in measurements if one.clock_mhz is not None]
    sparse = profile.sparse
    if sparse is not None:
        sparse = replace(sparse, block_types=parts(sparse.block_types, _sparse_memory))
    gathered = profile.gathered
    if gathered is not None:
        types = [[p.block_types[block.block_type].block_type for block in p.blocks] for p in (profile, gathered)]
        shared = [one for one in measurements if types[0][one.first_block] == types[1][one.first_block]]
        gathered = corrected_profile(gathered, device, shared)
    return replace(
        profile,
        gathered=gathered,
        block_types=tuple(corrected.get(index, cost) for index, cost in enumerate(whole)),
        divided=divided,
        sparse=sparse,
        measured_on=device.name,
        time_ratios=ratios,
        replayed=tuple(sorted({one.micro_batch: one.replayed for one in measurements}.items())),
        is_power_limited=min(clocks, default=0) < LIMITED_CLOCK * max(clocks, default=0),
        measured_host_ms={index: min(times, key=sum) for index, times in host_ms.items() if times},
    )


def _ratio(measured: float, analytic: float) -> float:
    return measured / analytic if measured > 0 and analytic > 0 else 1.0


def _with_memory(cost: BlockTypeCost, points: Sequence[BlockMeasurement]) -> BlockTypeCost:
    """Return `cost` with measured memory, or as it is where no allocator was asked (on a CPU)."""
    if not any(point.held_bytes or point.workspace_bytes for point in points):
        return cost
    largest = points[-1]
    # The best line by relative errors; one through zero where there is one point, or where either were negative.
    per_sample, offset = largest.held_bytes / largest.micro_batch, 0.0
    if len(points) > 1:
        samples = np.array([point.micro_batch for point in points], dtype=np.float64)
        line = np.polyfit(samples, np.array([point.held_bytes for point in points]), 1, w=1 / samples)
        is_plausible = line[0] > 0 and line[1] >= 0
        per_sample, offset = (float(line[0]), float(line[1])) if is_plausible else (max(0.0, per_sample), 0.0)
    return replace(
        cost,
        saved_bytes=per_sample,
        weight_copy_bytes=offset,
        workspace_bytes=largest.workspace_bytes / largest.micro_batch,
        products_bytes=min(cost.products_bytes, per_sample),
    )


def _divided_memory(degree: int, counted: BlockTypeCost, part: BlockTypeCost, measured: BlockTypeCost) -> BlockTypeCost:
    """Return `part`, one of `degree` tensor-parallel ranks, with its memory corrected as the whole block's was.

    Bytes change in proportion, but for saved bytes. The values that a compiler does without lie between two products,
    mostly in an activation function, where tensor parallelism divides the block. They are therefore taken off the
    divided share first; the share that all ranks hold alike stays.
    """
    divided = (counted.saved_bytes - part.saved_bytes) * degree / (degree - 1)
    if divided <= 0 or not 0 < measured.saved_bytes < counted.saved_bytes:
        saved_bytes = part.saved_bytes * _ratio(measured.saved_bytes, counted.saved_bytes)
    else:
        left_out = counted.saved_bytes - measured.saved_bytes
        saved_bytes = part.saved_bytes - min(left_out, divided) / degree - max(0.0, left_out - divided)
    return replace(
        part,
        saved_bytes=saved_bytes,
        workspace_bytes=part.workspace_bytes * _ratio(measured.workspace_bytes, counted.workspace_bytes),
        products_bytes=part.products_bytes * _ratio(measured.products_bytes, counted.products_bytes),
        weight_copy_bytes=measured.weight_copy_bytes * _ratio(part.weight_copy_bytes, counted.weight_copy_bytes),
    )


def _sparse_memory(counted: BlockTypeCost, part: BlockTypeCost, measured: BlockTypeCost) -> BlockTypeCost:
    """Return `part`, the block with block-sparse weights, with the measured activations; they are those of a dense one.

    Weight copies change in proportion.
    """
    return replace(
        part,
        saved_bytes=measured.saved_bytes,
        workspace_bytes=measured.workspace_bytes,
        products_bytes=measured.products_bytes,
        weight_copy_bytes=measured.weight_copy_bytes * _ratio(part.weight_copy_bytes, counted.weight_copy_bytes),
    )
