"""What a model costs on a cluster: FLOPs and bytes per block, time by roofline, memory per stage.

    cluster = Cluster.of("h200", gpus=4)                                    # or local_cluster()
    profile(graph, cluster.device, "bf16", compiled=True).at(8, cluster.device).forward_ms

Importing this imports no torch; `profile` does, because it reads a captured graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.cost.cluster import Cluster, Device, Efficiency, Link
from workbench.cost.profiles import BlockCosts, Profile

if TYPE_CHECKING:
    from workbench.cost.profiling import profile

__all__ = ["BlockCosts", "Cluster", "Device", "Efficiency", "Link", "Profile", "profile"]


def __getattr__(name: str) -> object:
    if name == "profile":
        from workbench.cost.profiling import profile

        return profile
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
