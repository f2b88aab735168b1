"""The hardware that a plan is made for: devices and the links between them, as plain values.

`Cluster.of("h200", gpus=256)` describes a machine that need not exist here; `local_cluster()` looks.
No torch until `here` is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

from workbench.errors import PlanInfeasible, UnknownParameter, suggestion
from workbench.units import gib, is_count, plain


@dataclass(frozen=True)
class Efficiency:
    """What fraction of a data sheet's figures training kernels reach, and what they cost besides.

    Fitted per device (docs/cost.md says against which runs); the defaults are those of an unknown GPU.
    """

    gemm: float = 0.75
    """Share of peak FLOP/s that a large matrix product reaches."""
    gemm_half_flops: float = 2e9
    """A product of this many FLOPs reaches half of `gemm`: share = gemm * f / (f + half)."""
    attention_forward: float = 0.45
    """Share of peak that the fused attention kernel reaches (FlashAttention-2, arXiv:2307.08691, fig. 4)."""
    attention_backward: float = 0.35
    bandwidth: float = 0.85
    """Share of the memory bandwidth that streaming kernels reach."""
    launch_s: float = 6e-6
    """Least time between two kernels when each operation is launched from Python."""
    compiled_launch_s: float = 2.5e-6
    """The same for kernels inside one compiled block."""
    block_forward_s: float = 0.8e-3
    """Least time of the host around one block's forward: hooks, guards, autograd nodes, launches; a layer of BERT-1920
    on the host of 4 H200, where blocks are not measured. The device waits for the host where its own work is
    shorter."""
    block_backward_s: float = 1.0e-3
    replay: float = 0.4
    """Of what selective checkpointing computes again, the share of its time alone that it adds to a compiled backward,
    whose kernels it joins (docs/cost.md)."""
    overlapped_link: float = 0.6
    """Share of a link's bandwidth that collectives reach beside compute, with which they share the device."""
    in_step: float = 1.05
    """A block's time in a training step over its time when a probe runs it: the slowest of the devices counts."""
    host_in_step: float = 0.95
    """The host's time for a block in a training step over its time when a probe runs it; with `action_s`, fitted to two
    pipelines of scaled BERT on 4 H200."""
    action_s: float = 1.0e-3
    """What a pipeline adds to the host's time for each forward and each backward of a stage: the schedule, sends and
    receives."""
    sharded_block_s: float = 1.0e-3
    """What FSDP2 adds to the host's time, to each of a block's forward and backward."""
    collective_s: float = 80e-6
    """What an all-reduce inside a block adds to the host's time: its launch, and streams that wait for each other.
    `benchmarks/collectives.py` saw 54 to 91 µs on 4 H200."""
    graph_s: float = 0.1e-3
    """What the host takes for a block's forward, or its backward, that is recorded and only launched."""
    recorded_action_s: float = 0.6e-3
    """`action_s` where blocks are recorded: Python has less to do at the same time. With `graph_s` from 8 layers of
    scaled BERT in pipelines of 2 H200 (`benchmarks/cuda_graphs.py`): 14.8 ms for 16 actions, 24.9 for 32."""


DATA_SHEET, FITTED, TIMED, CALIBRATED = "data sheet", "fitted", "timed", "calibrated"
"""What a device's speed rests on: nothing but its data sheet; training steps; a product and a copy; `wb.calibrate`."""


@dataclass(frozen=True)
class Device:
    """One accelerator. `peak_flops` maps a precision (`fp32`, `bf16`) to dense FLOP/s."""

    name: str
    type: str
    """`cuda` or `cpu`, as torch names device types."""
    memory_bytes: int
    """What one process can allocate on an otherwise idle device."""
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    """Bytes per second, read plus written."""
    reserved_bytes: int = 0
    """Outside the allocator: CUDA context, libraries' work areas, NCCL's channels."""
    efficiency: Efficiency = Efficiency()
    host_bandwidth: float = 20e9
    """Bytes per second to and from the host's memory, each way (PCIe 4.0 × 16 less overheads)."""
    shared_host_bandwidth: float | None = None
    """What all devices of a node reach together, each way, if that is less; None where it is not known."""
    basis: str = DATA_SHEET
    """What its speed rests on: `DATA_SHEET`, `FITTED`, `TIMED` or `CALIBRATED`."""

    def peak(self, precision: str) -> float:
        """Dense FLOP/s at `precision`; a device without bf16 units computes it at its fp32 rate."""
        return self.peak_flops.get(precision, self.peak_flops["fp32"])

    @property
    def usable_bytes(self) -> int:
        """What tensors can fill: memory less what libraries take and what fragmentation wastes."""
        return max(0, int((self.memory_bytes - self.reserved_bytes) * (1 - FRAGMENTATION)))

    def times(self, share: float) -> Device:
        """With so much of its memory and speed: a process that shares its processor with more or fewer others."""
        return replace(
            self,
            memory_bytes=int(self.memory_bytes * share),
            peak_flops={precision: flops * share for precision, flops in self.peak_flops.items()},
            memory_bandwidth=self.memory_bandwidth * share,
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "peak_flops": dict(self.peak_flops)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Device:
        return Device(**{**value, "efficiency": Efficiency(**value["efficiency"])})


HOST_SHARE = 0.8
"""Of a host's memory, what optimiser state may fill; the rest is the interpreters', the data's and the system's."""
FRAGMENTATION = 0.06
"""Share of a device that the caching allocator cannot hand out. Of 138 GiB on H200 a BERT of 2.5 B parameters filled
132.5 at full speed, and one of 4.8 B 131.8, but 132.3 at half the speed."""


@dataclass(frozen=True)
class Link:
    """What joins devices: `bandwidth` in bytes/s per device and direction, as a collective reaches it."""

    bandwidth: float
    latency_s: float
    paired: float = 1.0
    """Share of the bandwidth that an all-reduce reaches where only two devices take part."""


@dataclass(frozen=True)
class Cluster:
    """Equal devices in nodes: `intra` joins those of one node, `inter` joins nodes (per device)."""

    device: Device
    gpus: int
    """Devices in all; processes, where the device is a CPU."""
    gpus_per_node: int
    intra: Link
    inter: Link
    host_bytes: int | None = None
    """Of the memory of a node's host, what falls to one device; None where it is not known, and then not checked."""

    def __post_init__(self) -> None:
        for name, word in (("gpus", "devices"), ("gpus_per_node", "devices per node")):
            value = plain(getattr(self, name))
            object.__setattr__(self, name, value)
            if not is_count(value):
                raise PlanInfeasible(
                    f"A cluster of {value!r} {word} cannot train anything. Give it at least one, "
                    f'as in Cluster.of("h200", gpus=4), or use local_cluster() for this machine.',
                    gpus=value,
                )

    @property
    def host_offered_bytes(self) -> float:
        """What the optimiser's state of one device may fill of the host's memory."""
        return float("inf") if self.host_bytes is None else HOST_SHARE * self.host_bytes

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    def link(self, span: int) -> Link:
        """The slowest link inside a group of devices whose ranks span `span` consecutive devices."""
        return self.intra if span <= self.gpus_per_node else self.inter

    def group_link(self, size: int, stride: int = 1) -> Link:
        """What a collective over `size` devices, `stride` ranks apart, reaches per device, in the slowest such group.

        Over several nodes, the members in one node each bring their own network card (NCCL runs one ring through
        each), up to what the node's own links carry: the node with fewest of them is the narrowest.
        """
        return self._link_through(_fewest_of_any(self.gpus, self.gpus_per_node, size, stride), size)

    def peers_link(self, firsts: tuple[int, ...], members: int) -> Link:
        """As `group_link`, for the `k`-th devices of several runs of `members` devices, which begin at `firsts`."""
        return self._link_through(_fewest_together(self.gpus_per_node, firsts, members), len(firsts))

    def _link_through(self, together: int, size: int) -> Link:
        """`together`: the fewest members of a group of `size` in one node."""
        if together == size:
            return self.intra
        return Link(min(self.intra.bandwidth, together * self.inter.bandwidth), self.inter.latency_s)

    def hop_link(self, first: int, second: int, members: int) -> Link:
        """What joins devices `first … first + members - 1` to as many from `second` on, one to one."""
        together = (second + members - 1) // self.gpus_per_node == first // self.gpus_per_node
        return self.intra if together else self.inter

    def resized(self, gpus: int) -> Cluster:
        """As many devices of the same kind, in nodes of this size; where there is one node, of the size in which they
        come. Processes of a CPU share what the processes of this cluster share."""
        from workbench.cost.hardware import NODES

        if not is_count(gpus):
            return replace(self, gpus=gpus)  # which refuses it
        largest = max((size for device, size, _, _ in NODES.values() if device == self.device), default=0)
        per_node = self.gpus_per_node if self.nodes > 1 else max(largest, self.gpus_per_node)
        device = self.device.times(self.gpus / gpus) if self.device.type == "cpu" else self.device
        return replace(self, device=device, gpus=gpus, gpus_per_node=min(gpus, per_node))

    def describe(self) -> str:
        """`"4 × H200"`, `"256 × H200 in 32 nodes"`."""
        nodes = f" in {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.gpus} × {self.device.name}{nodes}"

    def __repr__(self) -> str:
        return f"Cluster({self.describe()}, {gib(self.device.memory_bytes)} each)"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "device": self.device.to_json()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Cluster:
        links = {name: Link(**value[name]) for name in ("intra", "inter")}
        return Cluster(**{**value, "device": Device.from_json(value["device"]), **links})

    @staticmethod
    def of(name: str, gpus: int = 8, nodes: int | None = None) -> Cluster:
        """`gpus` devices of a known kind, over `nodes` nodes (as few as hold them, if not given).

        Raises `UnknownParameter` for a device that the hardware table lacks, `PlanInfeasible` for
        counts that make no cluster.
        """
        from workbench.cost.hardware import HOST_BYTES, NODES

        key = str(name).lower().replace("_", "-").replace(" ", "-")
        if key not in NODES:
            raise UnknownParameter(
                f"There is no device {name!r} in the hardware table. {suggestion(key, NODES)}", device=name
            )
        device, largest, intra, inter = NODES[key]
        gpus, nodes = plain(gpus), plain(nodes)
        if not is_count(gpus):
            return Cluster(device, gpus, largest, intra, inter)  # which refuses it
        if nodes is not None and (not is_count(nodes) or gpus % nodes):
            raise PlanInfeasible(
                f"{gpus} GPUs cannot be divided evenly over {nodes!r} nodes. "
                f"Choose a node count that divides {gpus}, or leave nodes out.",
                gpus=gpus,
                nodes=nodes,
            )
        per_node = min(largest, gpus) if nodes is None else gpus // nodes
        return Cluster(device, gpus, per_node, intra, inter, HOST_BYTES[key] // largest)


@lru_cache(maxsize=1024)
def _fewest_together(per_node: int, firsts: tuple[int, ...], members: int) -> int:
    """Of groups `first + k for first in firsts`, `k` below `members`: the fewest of any group in one of its nodes."""
    fewest = len(firsts)
    for place in range(members):
        nodes = [(first + place) // per_node for first in firsts]
        fewest = min(fewest, *map(nodes.count, set(nodes)))
    return fewest


@lru_cache(maxsize=1024)
def _fewest_of_any(gpus: int, per_node: int, size: int, stride: int) -> int:
    """The same for all groups of `size` devices, `stride` ranks apart, that the cluster is made of."""
    span = size * stride
    if per_node % span == 0 or gpus <= per_node:
        return size
    starts = range(0, max(gpus - span, 0) + 1, span)
    return min(_fewest_together(per_node, tuple(range(start, start + span, stride)), stride) for start in starts)
