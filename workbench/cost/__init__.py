"""The cost of a model on a cluster: FLOPs and bytes per block, time by roofline, memory per stage.

    cluster = Cluster.of("h200", gpus=4)
    profile = profile_graph(graph, cluster.device, "bf16", compiled=True)      # workbench.cost.graph_profiler
    profile.at(8, cluster.device).forward_ms

Importing this loads no torch; `workbench.cost.graph_profiler` does, because it runs a graph on the meta device.
"""

from workbench.cost.hardware import Cluster, Device, Efficiency, Link
from workbench.cost.profile import BlockCosts, Profile

__all__ = ["BlockCosts", "Cluster", "Device", "Efficiency", "Link", "Profile"]
