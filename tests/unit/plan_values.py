"""Profiles, clusters and strategies that the tests of planning share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from cost_values import bert, graph_of, layered_profile
from hypothesis import settings

from workbench.cost import Cluster
from workbench.cost.graph_profiler import profile_graph
from workbench.cost.profile import Profile
from workbench.planning.plan import Plan
from workbench.planning.request import Request
from workbench.planning.search import checked_search
from workbench.planning.stage_costs import ClusterCosts, DeviceCosts
from workbench.strategy import RECOMPUTE, Fixed, Strategy

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

H200 = Cluster.of("h200", gpus=4)
PROFILE = layered_profile()
CAPTURABLE = replace(
    PROFILE, block_types=tuple(replace(cost, capturable=("none", "selective")) for cost in PROFILE.block_types)
)


@cache
def divided_profile() -> Profile:
    """Return the profile of a BERT that tensor parallelism divides."""
    model = bert(hidden_size=1024, num_layers=6, num_heads=16, max_positions=512)
    return profile_graph(graph_of(model, 2, 512), H200.device, "bf16", compiled=True)


def plan_of(
    profile: Any = PROFILE,
    *,
    global_batch: int = 64,
    seq_len: int = 512,
    precision: str = "bf16",
    cluster: Cluster = H200,
    memory_limit_bytes: int | None = None,
    **choices: Any,
) -> Plan:
    request = Request(global_batch, seq_len, cluster, memory_limit_bytes, Fixed(**choices))
    return checked_search(profile, precision, request).plan()


def with_host(block_s: float, action_s: float = 0.0, cluster: Cluster = H200, step_s: float = 0.0) -> Cluster:
    """Return a cluster whose host is busy so long with each direction of a block and of a stage, and with a step."""
    quick = replace(
        cluster.device.efficiency,
        block_forward_s=block_s,
        block_backward_s=block_s,
        action_s=action_s,
        captured_action_s=action_s / 2,
        step_s=step_s,
        sharded_block_s=0.0,
        sharded_collective_s=0.0,
        collective_s=0.0,
    )
    return replace(cluster, device=replace(cluster.device, efficiency=quick))


def costs_of(profile: Profile, cluster: Cluster = H200, modes: Sequence[str] = tuple(RECOMPUTE)) -> ClusterCosts:
    """Return the costs of a model on a cluster, which share nothing with those of a search."""
    return ClusterCosts(DeviceCosts(profile, cluster.device), cluster, modes)


def strategy_of(**choices: Any) -> Strategy:
    """Return a strategy of one device and one micro-batch, with changes."""
    alone: dict[str, Any] = {"pipeline": 1, "data": 1, "tensor": 1, "zero": 0, "schedule": "1f1b", "chunks": 1}
    return Strategy(**{**alone, "micro_batch": 1, "num_microbatches": 1, "recompute": "any", **choices})
