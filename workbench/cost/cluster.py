"""The cluster that a plan is made for: equal devices in nodes, and the links that their groups communicate over.

`Cluster.of("h200", gpus=256)` describes a machine that need not exist here; `local_cluster()` describes this one.
Importing this loads no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Annotated, Any

from workbench.cost.device import Device, Link
from workbench.cost.hardware import NODES
from workbench.errors import PlanInfeasible, UnknownParameter, suggestion
from workbench.tables import facts_html
from workbench.units import gib, is_count, plain
from workbench.validation import Field, Whole, checked_value

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
        device, largest, intra, inter, host_bytes = NODES[key]
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
