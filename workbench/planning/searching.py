"""The verbs of planning: `search` for one plan, `weigh` for the whole table, `what_if` for a slider."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from workbench.cost.cluster import Cluster
from workbench.cost.profiles import Profile
from workbench.errors import checked_keywords
from workbench.planning.plan import Plan
from workbench.planning.planner import checked_search
from workbench.planning.plans import FASTEST_SHOWN, Plans
from workbench.planning.requests import RUNNABLE, Request, Runnable, memory_limit_bytes


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
    cuda_graphs: bool | None = None,
    runnable: Runnable = RUNNABLE,
) -> Plan:
    """The fastest plan that fits, with what was weighed in `Plan.candidates`.

    Searched: pipeline × data × tensor degrees that use all devices, ZeRO stages, schedules and stages a rank,
    activation checkpointing of each stage, optimiser state on the host, CUDA graphs, and micro-batches that divide each
    replica's share; each argument given fixes its own. Stages are cut so that the slowest is as fast as can be within
    memory. `runnable` says what the runtime runs.

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
        cuda_graphs,
        runnable,
    )
    return checked_search(profile, precision, request).plan()


def weigh(profile: Profile, precision: str, request: Request) -> Plans:
    """As `search`, with the table of everything that was weighed."""
    asked = checked_search(profile, precision, request)
    with uncollected():
        best = asked.plan(known=FASTEST_SHOWN)
    return Plans(best, asked.searched, profile, request)


@checked_keywords
def what_if(
    profile: Profile,
    cluster: Cluster,
    *,
    global_batch: int,
    seq_len: int,
    gpus: int | None = None,
    memory_limit_gib: float | None = None,
    pipeline: int | None = None,
    data: int | None = None,
    tensor: int | None = None,
    zero: int | None = None,
    micro_batch: int | None = None,
    recompute: str | None = None,
    schedule: str | None = None,
) -> Plan:
    """The best plan for one position of some sliders; a position seen before is answered from memory.

    Make the profile once and call this for every move:

        profile = api.profile(experiment, cluster)            # captures the model: seconds
        plan = what_if(profile, cluster, global_batch=256, seq_len=512, gpus=8, memory_limit_gib=32)
        show_plan(plan)

    `gpus` plans for as many devices of the cluster's kind (in nodes of their usual size), None for the cluster as it
    is; every other None leaves a choice to the search. Prices of blocks are shared between calls. Raises
    `PlanInfeasible` where nothing fits: show its sentence in place of the picture.
    """
    request = Request(
        global_batch,
        seq_len,
        cluster if gpus is None else cluster.resized(gpus),
        memory_limit_bytes(memory_limit_gib),
        pipeline,
        data,
        tensor,
        zero,
        micro_batch,
        recompute,
        schedule,
    )
    with uncollected():
        return _what_if(profile, request)


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection meanwhile: a full one takes longer than a plan where a model has been captured, and can as
    well come when nobody waits."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@lru_cache(maxsize=512)
def _what_if(profile: Profile, request: Request) -> Plan:
    return checked_search(profile, profile.precision, request).plan()
