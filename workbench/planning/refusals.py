"""Why a search has no answer, in one sentence with numbers, and the ways out: found by trying them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from workbench.cost.cluster import FRAGMENTATION
from workbench.cost.profiles import Profile
from workbench.errors import PlanInfeasible
from workbench.planning.plan import INTERLEAVED, SCHEDULE_WORDS, Plan
from workbench.planning.pricing import Degrees
from workbench.planning.requests import Request, divisors, listed
from workbench.units import GIB, gib

Works = Callable[[Request], bool]
"""Is there anything to weigh?"""


def nothing_to_weigh(profile: Profile, request: Request, works: Works) -> PlanInfeasible:
    """No degrees satisfy the request, whatever would fit in memory."""
    unscheduled = replace(request, schedule=None, chunks=None)
    what = _unscheduled(profile, request) if not works(unscheduled) else _schedule(profile, request, works)
    ways = list(_ways(profile, request, works))
    return PlanInfeasible(
        f"{what} {_sentence(ways) if ways else 'Leave the degrees to the search.'}",
        global_batch=request.global_batch,
        devices=request.cluster.gpus,
        blocks=len(profile.blocks),
    )


def _unscheduled(profile: Profile, request: Request) -> str:
    given = [f"{name}={value}" for name in ("pipeline", "data", "tensor", "zero") if (value := getattr(request, name))]
    fixed = f" with {', '.join(given)}" if given else ""
    micro, share = "", "an equal share of the batch"
    if request.micro_batch is not None:
        micro, share = f" in micro-batches of {request.micro_batch}", f"{share} in whole micro-batches"
    return (
        f"No division of {request.cluster.gpus} devices{fixed} suits a global batch of {request.global_batch} samples"
        f"{micro} and {len(profile.blocks)} blocks: every replica needs {share}, and every stage a block."
    )


def _schedule(profile: Profile, request: Request, works: Works) -> str:
    """The devices can be divided, but not for this schedule."""
    free = replace(request, schedule=None, chunks=None)
    wanted = divisors(request.cluster.gpus) if request.pipeline is None else [request.pipeline]
    ranks = [degree for degree in wanted if works(replace(free, pipeline=degree))]
    blocks, name = len(profile.blocks), request.schedule or "interleaved"
    if name in INTERLEAVED:
        chunks, pipelines = request.chunks or 2, [p for p in ranks if p > 1]
        words = SCHEDULE_WORDS[name]
        if not pipelines:
            return f"An {words} schedule needs a pipeline of at least 2 ranks, which these degrees leave no room for."
        if min(pipelines) * chunks > blocks:
            least = min(pipelines)
            return (
                f"An {words} schedule with {chunks} stages a pipeline rank cuts a pipeline of {least} into "
                f"{least * chunks} stages, and {profile.model} has {blocks} blocks."
            )
        return (
            f"An {words} schedule passes micro-batches in equal rounds of as many as there are pipeline ranks, and "
            f"{_of_batch(request)} gives no such number."
        )
    return (
        f"1F1B needs at least as many micro-batches as pipeline ranks, and {_of_batch(request)} gives fewer than "
        f"{min(ranks)}."
    )


def _of_batch(request: Request) -> str:
    micro = "" if request.micro_batch is None else f" in micro-batches of {request.micro_batch}"
    return f"a global batch of {request.global_batch}{micro}"


def _ways(profile: Profile, request: Request, works: Works) -> Iterator[str]:
    """One fixed value changed, or the batch, or the number of devices: those that leave something to weigh."""
    gpus, batch = request.cluster.gpus, request.global_batch
    tried: dict[str, list[Any]] = {
        "micro_batch": divisors(batch),
        "chunks": list(range(1, 9)),
        "pipeline": divisors(gpus),
        "data": divisors(gpus),
        "tensor": [1, *profile.divided],
        "zero": list(request.runnable.zero_stages),
        "schedule": list(request.runnable.schedules),
    }
    for name, values in tried.items():
        if getattr(request, name) is not None:
            cleared: dict[str, Any] = {"chunks": None} if name == "schedule" else {}
            found = [v for v in values if works(replace(request, **{**cleared, name: v}))]
            if found:
                yield f"{name}={listed([repr(v) for v in found], last=' or ')}"
    nearby = (batch + sign * step for step in range(1, 2 * gpus) for sign in (1, -1))
    batches = (b for b in nearby if b > 0 and works(replace(request, global_batch=b)))
    if (found_batch := next(batches, None)) is not None:
        yield f"a global batch of {found_batch}"
    if not any(getattr(request, name) for name in ("pipeline", "data", "tensor")):
        fewer = (g for g in range(gpus - 1, 0, -1) if works(replace(request, cluster=replace(request.cluster, gpus=g))))
        if (found_gpus := next(fewer, None)) is not None:
            yield f"{found_gpus} device{'s' * (found_gpus > 1)}"


def _sentence(ways: list[str]) -> str:
    return f"Choose {', or '.join(ways)}."


def too_large(
    profile: Profile, request: Request, options: int, least: tuple[Degrees, float], leanest: str, fits: Works
) -> PlanInfeasible:
    """Nothing fits: `least` needs the fewest bytes, with `leanest` activation checkpointing. `fits` tries another."""
    d, needed = least
    tensor = f"tensor={d.tensor}, " if d.tensor > 1 else ""
    shape = f"pipeline={d.pipeline}, data={d.data}, {tensor}zero={d.zero}, micro_batch={d.micro_batch}"
    host = (", offload_optimizer=True" if d.offload_optimizer else "") + (", cuda_graphs=True" if d.cuda_graphs else "")
    need, offer = apart(needed, request.offered_bytes)
    return PlanInfeasible(
        f"{profile.model} does not fit {request.cluster.describe()}: the smallest of {options} options ({shape}, "
        f"recompute={leanest!r}{host}) needs {need} a device, and {request.offer(offer)}. "
        f"{_more_memory(request, d, needed, fits)}",
        needed_bytes=int(needed),
        offered_bytes=request.offered_bytes,
        options=options,
    )


def host_too_small(profile: Profile, request: Request, needed: float) -> PlanInfeasible:
    """Optimiser state was to live on the host, which has too little memory for it."""
    return PlanInfeasible(
        f"{profile.model} with its optimiser's state on the host does not fit {request.cluster.describe()}: it "
        f"{host_need(needed, request)} fall to one. Leave offload_optimizer out, or give the plan more than "
        f"{request.cluster.gpus} devices.",
        needed_bytes=int(needed),
        offered_bytes=int(request.cluster.host_offered_bytes),
    )


def too_large_to_build(plan: Plan) -> PlanInfeasible | None:
    """A rank builds the whole model: neither a GPU nor the memory of a host has room for one."""
    cluster, whole = plan.cluster, plan.model_bytes
    if cluster.device.type == "cpu" or cluster.host_bytes is None:
        return None
    ranks = min(plan.world, cluster.gpus_per_node)
    offered = ranks * cluster.host_bytes  # they build one after the other, if need be
    if whole <= max(offered, plan.built_on_device_bytes):
        return None
    need, offer = apart(whole, offered)
    return PlanInfeasible(
        f"Every rank of {plan.model} first initialises the whole model, {need} in fp32: on its GPU up to "
        f"{gib(plan.built_on_device_bytes)}, otherwise in the host's memory, of which {offer} fall to the {ranks} "
        f"ranks of a node. Use hosts with more memory.",
        needed_bytes=whole,
        offered_bytes=offered,
    )


def host_need(needed: float, request: Request) -> str:
    """`"needs 70.1 GiB of the host's memory for each device, and 51.2 GiB"`."""
    offered = request.cluster.host_offered_bytes
    if needed <= offered:  # one stage alone would fit, those of one device together do not
        return f"needs more of the host's memory for one device than the {gib(offered)} that"
    need, offer = apart(needed, offered)
    return f"needs at least {need} of the host's memory for each device, and {offer}"


def apart(needed: float, offered: float) -> tuple[str, str]:
    """Both sizes, with as many digits as it takes to tell them apart."""
    if gib(needed) != gib(offered):
        return gib(needed), gib(offered)
    for digits in (2, 3):
        need, offer = f"{needed / GIB:.{digits}f} GiB", f"{offered / GIB:.{digits}f} GiB"
        if need != offer:
            return need, offer
    return f"just over {offer}", offer


def _more_memory(request: Request, least: Degrees, needed: float, fits: Works) -> str:
    ways = []
    device, batch, gpus = request.cluster.device, request.global_batch, request.cluster.gpus
    even = -(-batch // gpus) * gpus
    if even != batch and fits(replace(request, global_batch=even)):
        ways.append(f"choose a global batch of {even}, a multiple of {gpus} devices")
    if request.recompute in ("none", "selective"):
        ways.append("allow activation checkpointing")
    if request.zero is not None and request.zero < 3 and least.data > 1:
        ways.append("allow ZeRO 3")
    if request.offload_optimizer is False and device.type != "cpu":
        ways.append("allow the optimiser's state on the host")
    if request.micro_batch is not None and request.micro_batch > 1:
        ways.append(f"allow micro-batches smaller than {request.micro_batch}")
    if request.pipeline is not None or request.data is not None:
        ways.append("leave the degrees to the search")
    if request.memory_limit_bytes is not None and needed <= device.usable_bytes:
        limit_gib = needed / (1 - FRAGMENTATION) / GIB
        scale = 10 ** max(1, 1 - math.floor(math.log10(limit_gib)))
        ways.append(f"raise the memory limit to at least {math.ceil(scale * limit_gib) / scale:g} GiB")
    words = ("process", "processes") if device.type == "cpu" else ("device", "devices")
    ways.append(f"give the plan more than {gpus} {words[gpus > 1]}")
    text = ", or ".join(ways)
    return text[0].upper() + text[1:] + "."
