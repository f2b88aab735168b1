"""Devices and the links between them, as plain values; importing this loads no torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from workbench.base.display import facts_html
from workbench.base.errors import PlanInfeasible, UnknownParameter, suggestion
from workbench.base.units import GIB, gib, is_count, plain
from workbench.base.validation import Field, Whole, checked_value


@dataclass(frozen=True)
class Efficiency:
    """The share of a data sheet's figures that training reaches on a device, and the host's time beside it.

    The defaults are those of a GPU that was never measured; those of the H200 were fitted to measured training steps
    (docs/cost.md).
    """

    gemm: float = 0.75
    """Share of peak FLOP/s that a large matrix product reaches."""
    gemm_half_flops: float = 2e9
    """FLOPs of a product that reaches half of `gemm`: share = gemm * f / (f + gemm_half_flops)."""
    attention_forward: float = 0.45
    """Share of peak that the fused attention kernel's forward reaches (FlashAttention-2, arXiv:2307.08691, fig. 4)."""
    attention_backward: float = 0.35
    """Share of peak that the fused attention kernel's backward reaches."""
    bandwidth: float = 0.85
    """Share of the memory bandwidth that memory-bound kernels reach."""
    launch_s: float = 6e-6
    """Least time between two kernels in seconds, when Python launches each operation."""
    compiled_launch_s: float = 2.5e-6
    """Least time between two kernels of one compiled block, in seconds."""
    block_forward_s: float = 0.8e-3
    """Least host time of one block's forward in seconds: hooks, guards, autograd nodes, launches.

    Used for blocks that were not measured. The value is that of a BERT layer of width 1920 on the host of 4 H200.
    """
    block_backward_s: float = 1.0e-3
    """Least host time of one block's backward, in seconds."""
    selective_recompute: float = 0.4
    """Share of its time alone that selective recomputation adds to a compiled backward, whose kernels it is fused with.

    Measured as 0.30 to 0.42 in three pairs of plans on one H200 (benchmarks/prediction.py).
    """
    overlapped_link: float = 0.6
    """Share of a link's bandwidth that collectives reach while the device also computes."""
    in_step: float = 1.05
    """Ratio of a block's time in a step of several devices to its time in a probe: a step waits for the slowest one."""
    sustained: float = 1.03
    """Ratio of a block's time in training on one device to its time in a probe, at the power limit.

    The clock falls below that of the probe's seconds: nine plans of 10 to 15 steps on one H200 were predicted 1.9 to
    4.2 % too short (benchmarks/README.md). Trainings of minutes lose 3 to 5 % more, which is not priced.
    """
    host_in_step: float = 0.95
    """Ratio of the host's time for a block in a training step to that in a probe.

    Fitted, with `action_s`, to two pipelines of a BERT of 2.5 B parameters on 4 H200.
    """
    action_s: float = 1.0e-3
    """Host time in seconds that a pipeline adds to each forward and backward of a stage: schedule, sends, receives."""
    sharded_block_s: float = 0.8e-3
    """Host time in seconds that FSDP2's hooks add to each forward and backward of a block."""
    sharded_collective_s: float = 1.2e-3
    """Host time in seconds that FSDP2 adds to a block for an all-gather before its forward, and for a reduce-scatter.

    Fitted, with `sharded_block_s`, to the profile of a BERT of 2.5 B parameters under ZeRO 1 on 4 H200
    (benchmarks/README.md); a second all-gather, under ZeRO 3, is prefetched and was not seen to add to it.
    """
    matrix_s: float = 0.15e-3
    """Host time in seconds of an update for each matrix that Muon orthogonalises: launches, stacks, exchange.

    Fitted to BERT-Large under ZeRO 1 on 4 H200: the update of 144 matrices took four hosts 22 ms each, with no device
    busy half of that time.
    """
    collective_s: float = 80e-6
    """Host time in seconds that an all-reduce inside a block adds: its launch and the synchronisation of streams.

    Measured as 54 to 91 µs on 4 H200 (benchmarks/collectives.py).
    """
    stored_product_s: float = 1.3e-3
    """Host time in seconds that a launched product with stored blocks adds to a block's forward and backward together.

    A custom operator and Triton's launcher take the host longer than a dense product. Fitted to one measurement: the 72
    products of BERT-Base with blocks of 32 on one H200, whose step of 121.6 ms waited for the host
    (benchmarks/README.md).
    """
    step_s: float = 4.2e-3
    """Host time in seconds of a step beside its blocks and the matrices of Muon: batch, labels, norms, update, log.

    Fitted to the step of a BERT-Mini on one H200, 7.8 ms, for which the host had been predicted to take 3.5 ms
    (benchmarks/small_steps.py).
    """
    captured_block_s: float = 0.1e-3
    """Host time in seconds to launch the forward or the backward of a block that is captured as a CUDA graph."""
    captured_action_s: float = 0.6e-3
    """Value that replaces `action_s` where blocks are captured as CUDA graphs, in seconds.

    Fitted, with `captured_block_s`, to 8 BERT layers in pipelines of 2 H200 (benchmarks/cuda_graphs.py): 14.8 ms for 16
    actions, 24.9 ms for 32.
    """


DATA_SHEET, FITTED, TIMED, CALIBRATED = "data sheet", "fitted", "timed", "calibrated"
"""Values of `Device.basis`: the data sheet alone; fitted to training steps; one product and one copy timed on this
machine; `wb.measure.calibrate`."""

FRAGMENTATION = 0.06
"""Share of a device's memory that the caching allocator cannot hand out.

Of 138 GiB on H200, a BERT of 2.5 B parameters ran at full speed with 132.5 GiB in use and one of 4.8 B with 131.8 GiB;
with 132.3 GiB the larger one ran at half its speed.
"""


@dataclass(frozen=True)
class Device:
    """One accelerator."""

    name: str
    type: str
    """Device type as torch names it: `cuda` or `cpu`."""
    memory_bytes: int
    """Bytes that one process can allocate on an otherwise idle device."""
    peak_flops: Mapping[str, float] = field(hash=False)
    """Dense FLOP/s by precision (`fp32`, `bf16`)."""
    memory_bandwidth: float
    """Bytes per second, read plus written."""
    reserved_bytes: int = 0
    """Bytes outside the allocator: the CUDA context, work areas of libraries, NCCL's channels."""
    efficiency: Efficiency = Efficiency()
    host_bandwidth: float = 20e9
    """Bytes per second between device and host memory, each way (PCIe 4.0 × 16 less overheads)."""
    shared_host_bandwidth: float | None = None
    """Bytes per second, each way, that all devices of a node reach together, if that is less; None if unknown."""
    basis: str = DATA_SHEET
    """Origin of the speeds: `DATA_SHEET`, `FITTED`, `TIMED` or `CALIBRATED`."""
    measured: str = ""
    """When this machine's speeds were measured and beside how much other work, in words that follow "timed"."""

    def peak(self, precision: str) -> float:
        """Return the dense FLOP/s at `precision`; a device without bf16 units computes bf16 at its fp32 rate."""
        return self.peak_flops.get(precision, self.peak_flops["fp32"])

    @property
    def flops_per_byte(self) -> float:
        """FLOPs that the device can do in bf16 at its peak in the time in which a kernel reads or writes one byte."""
        return self.peak("bf16") / (self.memory_bandwidth * self.efficiency.bandwidth)

    @property
    def usable_bytes(self) -> int:
        """Bytes that tensors can fill: memory less `reserved_bytes`, less what fragmentation wastes."""
        return max(0, int((self.memory_bytes - self.reserved_bytes) * (1 - FRAGMENTATION)))

    def scaled(self, factor: float) -> Device:
        """Return the device with `factor` times the memory and speed: a CPU process that shares its processor."""
        return replace(
            self,
            memory_bytes=int(self.memory_bytes * factor),
            peak_flops={precision: flops * factor for precision, flops in self.peak_flops.items()},
            memory_bandwidth=self.memory_bandwidth * factor,
        )


@dataclass(frozen=True)
class Link:
    """The connection between devices, as a collective uses it."""

    bandwidth: float
    """Bus bandwidth in bytes per second, per device and direction."""
    latency_s: float
    paired: float = 1.0
    """Share of the bandwidth that an all-reduce of only two devices reaches."""


# The hardware table: the figures of data sheets, the links of usual nodes, and the memory of their hosts.

_LIBRARIES = int(1.6 * GIB)
"""Bytes of the CUDA context and of cuBLAS's and NCCL's work areas, measured beside the allocator on H200."""

V100 = Device("V100", "cuda", int(31.7 * GIB), {"fp32": 15.7e12, "fp16": 125e12}, 900e9, _LIBRARIES)
V100_16 = Device("V100 16GB", "cuda", int(15.7 * GIB), {"fp32": 15.7e12, "fp16": 125e12}, 900e9, _LIBRARIES)
A100_40 = Device("A100 40GB", "cuda", int(39.4 * GIB), {"fp32": 19.5e12, "bf16": 312e12}, 1555e9, _LIBRARIES)
A100 = Device("A100", "cuda", int(79.1 * GIB), {"fp32": 19.5e12, "bf16": 312e12}, 2039e9, _LIBRARIES)
H100 = Device(
    "H100",
    "cuda",
    int(79.1 * GIB),
    {"fp32": 67e12, "bf16": 989e12},
    3350e9,
    _LIBRARIES,
    host_bandwidth=54e9,  # PCIe 5.0, measured by wb.measure.calibrate() on one H100
)
H200 = Device(
    "H200",
    "cuda",
    int(139.8 * GIB),
    {"fp32": 67e12, "bf16": 989e12},
    4800e9,
    _LIBRARIES,
    Efficiency(gemm=0.62, gemm_half_flops=4e9, bandwidth=0.80),
    host_bandwidth=55e9,
    shared_host_bandwidth=145e9,  # 36e9 for each of four GPUs, measured in two plans with optimiser state on the host
    basis=FITTED,
)

# Of GeForce cards the bf16 rate is that with fp32 accumulation, half of the one with fp16 that is advertised; RTX A and
# data-centre cards accumulate in fp32 at the full rate.
RTX_3090 = Device("RTX 3090", "cuda", int(23.7 * GIB), {"fp32": 35.6e12, "bf16": 71e12}, 936e9, _LIBRARIES)
RTX_4090 = Device("RTX 4090", "cuda", int(23.6 * GIB), {"fp32": 82.6e12, "bf16": 165.2e12}, 1008e9, _LIBRARIES)
RTX_5090 = Device("RTX 5090", "cuda", int(31.4 * GIB), {"fp32": 104.8e12, "bf16": 209.5e12}, 1792e9, _LIBRARIES)
RTX_A6000 = Device("RTX A6000", "cuda", int(47.5 * GIB), {"fp32": 38.7e12, "bf16": 154.8e12}, 768e9, _LIBRARIES)
RTX_6000_ADA = Device("RTX 6000 Ada", "cuda", int(44.4 * GIB), {"fp32": 91.1e12, "bf16": 364.2e12}, 960e9, _LIBRARIES)
A10 = Device("A10", "cuda", int(22.0 * GIB), {"fp32": 31.2e12, "bf16": 125e12}, 600e9, _LIBRARIES)
L40S = Device("L40S", "cuda", int(44.4 * GIB), {"fp32": 91.6e12, "bf16": 362e12}, 864e9, _LIBRARIES)

PCIE = Link(20e9, 20e-6)
_ONE_NETWORK_CARD = Link(2.6e9, 30e-6)
_PEER_TO_PEER = (PCIE, _ONE_NETWORK_CARD)
# GeForce drivers allow no peer-to-peer copies: everything goes through the host's memory, at half of PCIe's rate.
_THROUGH_THE_HOST = (Link(10e9, 25e-6), _ONE_NETWORK_CARD)
_THROUGH_THE_HOST_5 = (Link(25e9, 25e-6), _ONE_NETWORK_CARD)
# Not measured, but for H200: three quarters of NVLink's 150, 300 and 450 GB/s a direction, and 0.84 of a node's network
# (4 × 100, 8 × 200 and 8 × 400 Gbit/s) over its eight GPUs.
_V100_LINKS = (Link(110e9, 12e-6), Link(5.3e9, 25e-6))
_A100_LINKS = (Link(225e9, 10e-6), Link(21e9, 20e-6))
_H100_LINKS = (Link(340e9, 10e-6), Link(42e9, 20e-6))
_H200_LINKS = (Link(350e9, 7.5e-6, paired=0.8), Link(42e9, 20e-6))
"""Links of H200, measured by wb.measure.calibrate() without NVLink multicast; `paired` by benchmarks/collectives.py."""


class Node(NamedTuple):
    """A usual node of one device."""

    device: Device
    gpus: int
    intra: Link
    """Link inside the node."""
    inter: Link
    """Link between nodes, per GPU."""
    host_bytes: int
    """Bytes of the host's memory: of V100 to H200 in the vendor's own systems (data sheets of DGX-1, DGX A100, DGX H100
    and H200), of cards a usual size."""
    card: str = ""
    """Regular expression that fits the whole name that torch gives the card, in lower case with spaces for hyphens;
    empty where another node of the same card has it."""
    is_timed: bool = False
    """True for cards whose efficiency is measured where they are present (`workbench.measure.detection`)."""

    @classmethod
    def of_card(cls, name: str) -> Node | None:
        """Return the node of a card by torch's name of it (`NVIDIA A100-SXM4-40GB`); None if the table lacks it."""
        plain_name = name.lower().replace("-", " ")
        return next((each for each in NODES.values() if each.card and re.fullmatch(each.card, plain_name)), None)


def _by_nvlink(chip: str) -> str:
    """Return an expression of a chip's cards that NVLink joins; those on PCIe are slower, and so are their links."""
    return rf"(?!.*\b(?:pcie|nvl)\b).*\b{chip}\b.*"


NODES = {
    "v100": Node(V100, 8, *_V100_LINKS, 512 * GIB, _by_nvlink("v100(?!.*16gb)")),
    "v100-32gb": Node(V100, 8, *_V100_LINKS, 512 * GIB),
    "v100-16gb": Node(V100_16, 8, *_V100_LINKS, 512 * GIB, _by_nvlink("v100")),
    "a100": Node(A100, 8, *_A100_LINKS, 2048 * GIB, _by_nvlink("a100(?!.*40gb)")),
    "a100-80gb": Node(A100, 8, *_A100_LINKS, 2048 * GIB),
    "a100-40gb": Node(A100_40, 8, *_A100_LINKS, 1024 * GIB, _by_nvlink("a100")),
    "h100": Node(H100, 8, *_H100_LINKS, 2048 * GIB, _by_nvlink("h100")),
    "h200": Node(H200, 8, *_H200_LINKS, 2048 * GIB, _by_nvlink("h200")),
    "rtx-3090": Node(RTX_3090, 4, *_THROUGH_THE_HOST, 128 * GIB, "nvidia geforce rtx 3090", is_timed=True),
    "rtx-4090": Node(RTX_4090, 4, *_THROUGH_THE_HOST, 256 * GIB, "nvidia geforce rtx 4090", is_timed=True),
    "rtx-5090": Node(RTX_5090, 4, *_THROUGH_THE_HOST_5, 256 * GIB, "nvidia geforce rtx 5090", is_timed=True),
    "rtx-a6000": Node(RTX_A6000, 4, *_PEER_TO_PEER, 256 * GIB, "nvidia rtx a6000", is_timed=True),
    "rtx-6000-ada": Node(RTX_6000_ADA, 4, *_PEER_TO_PEER, 512 * GIB, "nvidia rtx 6000 ada generation", is_timed=True),
    "a10": Node(A10, 8, *_PEER_TO_PEER, 512 * GIB, "nvidia a10", is_timed=True),
    "l40s": Node(L40S, 8, *_PEER_TO_PEER, 1024 * GIB, "nvidia l40s", is_timed=True),
}


# The time of collectives on one link by the α–β model, t = steps · α + volume / bandwidth.
#
# An all-gather or reduce-scatter over g devices moves (g - 1) / g of the bytes whatever the algorithm. Steps are those
# of recursive doubling and halving, log2 g (Thakur, Rabenseifner and Gropp, 2005). A ring takes g - 1, which matters
# for small messages only.

Bytes = TypeVar("Bytes", float, npt.NDArray[np.float64])


def point_to_point_s(num_bytes: Bytes, link: Link) -> Bytes:
    """Return the seconds of one send and its receive."""
    return link.latency_s + num_bytes / link.bandwidth


def all_gather_s(num_bytes: Bytes, group: int, link: Link) -> Bytes:
    """Return the seconds until `group` devices, which hold 1/group of `num_bytes` each, hold all of them."""
    steps = (group - 1).bit_length()  # log2 of the group, rounded up, in whole numbers
    return steps * link.latency_s + num_bytes * (group - 1) / group / link.bandwidth


def reduce_scatter_s(num_bytes: Bytes, group: int, link: Link) -> Bytes:
    """Return the seconds until each device holds 1/group of the sum of all devices' `num_bytes`."""
    return all_gather_s(num_bytes, group, link)


def all_reduce_s(num_bytes: Bytes, group: int, link: Link) -> Bytes:
    """Return the seconds of a reduce-scatter followed by an all-gather."""
    if group == 2:
        num_bytes = num_bytes / link.paired
    return reduce_scatter_s(num_bytes, group, link) + all_gather_s(num_bytes, group, link)


# The cluster that a plan is made for: equal devices in nodes, and the links that their groups communicate over.

MOST_DEVICES = 2**17
"""Largest number of devices in a cluster; the search for plans answers in seconds up to there."""
Devices = Annotated[Whole, Field(ge=1, le=MOST_DEVICES)]
HOST_SHARE = 0.8
"""Share of a host's memory that optimiser state may fill; interpreters, data and the system need the rest."""


@checked_value(error_type=PlanInfeasible)
class Cluster:
    """Equal devices in nodes: `intra` joins the devices of one node, `inter` joins nodes (per device).

    Raises `PlanInfeasible` unless both counts are whole numbers of at least one.
    """

    device: Device
    gpus: Devices
    """Number of devices; of processes, where the device is a CPU."""
    gpus_per_node: Devices
    intra: Link
    inter: Link
    host_bytes: int | None = None
    """Bytes of a node's host memory per device; None if unknown, and then not checked."""

    @property
    def host_offered_bytes(self) -> float:
        """Bytes of host memory that the optimiser state of one device may fill."""
        return float("inf") if self.host_bytes is None else HOST_SHARE * self.host_bytes

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    def group_link(self, size: int, stride: int = 1) -> Link:
        """Return the link, per device, of a collective over `size` devices that are `stride` ranks apart.

        Over several nodes, the members in one node each use their own network card (NCCL runs one ring through each),
        up to the bandwidth inside the node. The node with the fewest members is the bottleneck, and of all such groups
        in the cluster the slowest counts.
        """
        return self._link_through(_fewest_per_node(self.gpus, self.gpus_per_node, size, stride), size)

    def peers_link(self, firsts: tuple[int, ...], members: int) -> Link:
        """Return the slowest link between the `k`-th devices of runs of `members` devices that begin at `firsts`."""
        return self._link_through(_fewest_peers_per_node(self.gpus_per_node, firsts, members), len(firsts))

    def _link_through(self, fewest: int, size: int) -> Link:
        """Return the link of a group of `size` devices whose nodes hold at least `fewest` of them each."""
        if fewest == size:
            return self.intra
        return Link(min(self.intra.bandwidth, fewest * self.inter.bandwidth), self.inter.latency_s)

    def hop_link(self, first: int, second: int, members: int) -> Link:
        """Return the link from devices `first … first + members - 1` to as many from `second` on, one to one."""
        in_one_node = (second + members - 1) // self.gpus_per_node == first // self.gpus_per_node
        return self.intra if in_one_node else self.inter

    def resized(self, gpus: int) -> Cluster:
        """Return a cluster of `gpus` such devices, in nodes of the same size.

        A cluster of one node may grow to the size of node that the hardware table has for its device. CPU processes
        divide the memory and the speed that the processes of this cluster have together.
        """
        if not is_count(gpus):
            return replace(self, gpus=gpus)  # raises
        largest = max((node.gpus for node in NODES.values() if node.device == self.device), default=0)
        per_node = self.gpus_per_node if self.nodes > 1 else max(largest, self.gpus_per_node)
        device = self.device.scaled(self.gpus / gpus) if self.device.type == "cpu" else self.device
        return replace(self, device=device, gpus=gpus, gpus_per_node=min(gpus, per_node))

    def describe(self) -> str:
        """Return words such as `"4 × H200"` or `"256 × H200 in 32 nodes"`."""
        nodes = f" in {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.gpus} × {self.device.name}{nodes}"

    def __repr__(self) -> str:
        return f"Cluster({self.describe()}, {gib(self.device.memory_bytes)} each)"

    def _repr_html_(self) -> str:
        facts = [("memory of a device", gib(self.device.memory_bytes)), ("numbers of the device", self.device.basis)]
        facts += [("inside a node", f"{self.intra.bandwidth / 1e9:,.4g} GB/s a device")]
        facts += [("between nodes", f"{self.inter.bandwidth / 1e9:,.4g} GB/s a device")] if self.nodes > 1 else []
        return facts_html(self.describe(), facts)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Cluster:
        return Cluster(**value)

    @staticmethod
    def of(name: str, gpus: int = 8, nodes: int | None = None) -> Cluster:
        """Return `gpus` devices of the hardware table, in `nodes` nodes (default: as few as hold them).

        Raises `UnknownParameter` for a device that the table lacks and `PlanInfeasible` for counts that make no
        cluster.
        """
        key = str(name).lower().replace("_", "-").replace(" ", "-")
        if key not in NODES:
            raise UnknownParameter(f"There is no device {name!r} in the hardware table. {suggestion(key, NODES)}")
        device, largest, intra, inter, host_bytes, *_ = NODES[key]
        gpus, nodes = plain(gpus), plain(nodes)
        if not is_count(gpus):
            return Cluster(device, gpus, largest, intra, inter)  # raises
        if nodes is not None and (not is_count(nodes) or gpus % nodes):
            raise PlanInfeasible(
                f"{gpus} GPUs cannot be divided evenly over {nodes!r} nodes. "
                f"Choose a node count that divides {gpus}, or leave nodes out."
            )
        per_node = min(largest, gpus) if nodes is None else gpus // nodes
        return Cluster(device, gpus, per_node, intra, inter, host_bytes // largest)


@lru_cache(maxsize=1024)
def _fewest_peers_per_node(per_node: int, firsts: tuple[int, ...], members: int) -> int:
    """Return the fewest members in any node of any group `first + k for first in firsts`, `k` below `members`."""
    fewest = len(firsts)
    for offset in range(min(members, per_node)):  # a shift by a whole node changes no count
        fewest = min(fewest, *Counter((first + offset) // per_node for first in firsts).values())
    return fewest


@lru_cache(maxsize=1024)
def _fewest_per_node(gpus: int, per_node: int, size: int, stride: int) -> int:
    """Return the fewest members in any node of any group of `size` devices, `stride` ranks apart, in the cluster."""
    span = size * stride
    if per_node % span == 0 or gpus <= per_node:
        return size
    repeats = math.lcm(span, per_node)  # groups that far apart lie alike in their nodes
    starts = range(0, min(repeats, max(gpus - span, 0) + 1), span)
    return min(_fewest_peers_per_node(per_node, tuple(range(start, start + span, stride)), stride) for start in starts)
