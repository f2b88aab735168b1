"""The verbs of planning: `search` for one plan."""

from __future__ import annotations

from workbench.cost.cluster import Cluster
from workbench.cost.profiles import Profile
from workbench.errors import checked_keywords
from workbench.planning.plan import Plan
from workbench.planning.planner import best_plan
from workbench.planning.requests import RUNNABLE, Request, Runnable


@checked_keywords
def search(
    profile: Profile,
    *,
    global_batch: int,
    seq_len: int,
    precision: str,
    cluster: Cluster,
    memory_limit_bytes: int | None = None,
    pipeline: int | None = None,
    data: int | None = None,
    tensor: int | None = None,
    zero: int | None = None,
    micro_batch: int | None = None,
    recompute: str | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    offload_optimizer: bool | None = None,
    runnable: Runnable = RUNNABLE,
) -> Plan:
    """The fastest plan that fits, with what was weighed in `Plan.candidates`.

    Searched: pipeline × data × tensor degrees that use all devices, ZeRO stages, schedules and stages a rank,
    activation checkpointing of each stage, optimiser state on the host, and micro-batches that divide each replica's
    share; each argument given fixes its own. Stages are cut so that the slowest is as fast as can be within memory.
    `runnable` says what the runtime runs; `EVERYTHING` also weighs what it does not.

    Raises `PlanInfeasible` when nothing fits or the degrees contradict the cluster or the batch, `PlanMismatch`
    when the profile was made for another precision or kind of device.
    """
    request = Request(
        global_batch,
        seq_len,
        cluster,
        memory_limit_bytes,
        pipeline,
        data,
        tensor,
        zero,
        micro_batch,
        recompute,
        schedule,
        chunks,
        offload_optimizer,
        runnable,
    )
    return best_plan(profile, precision, request)
