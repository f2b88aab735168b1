"""Why a search has no answer, in one sentence with numbers, and the ways out, which were tried before."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from workbench.cost.hardware import FRAGMENTATION
from workbench.cost.profile import Profile
from workbench.errors import PlanInfeasible
from workbench.planning.plan import Plan
from workbench.planning.request import Request, divisors, listed
from workbench.strategy import SCHEDULES, ZERO, Strategy, interleaving
from workbench.units import GIB, gib

Works = Callable[[Request], bool]
"""A test of another request: whether it has options, or whether one of them fits."""


def no_options(profile: Profile, request: Request, works: Works) -> PlanInfeasible:
    """Return the reason why no strategy satisfies the request, whatever would fit in memory."""
    unscheduled = request.fixing(schedule=None, chunks=None)
    reason = _schedule(profile, request, works) if works(unscheduled) else _division(profile, request)
    ways = ", or ".join(_ways(profile, request, works))
    return PlanInfeasible(f"{reason} {f'Choose {ways}.' if ways else 'Leave the degrees to the search.'}")


def coupled_samples(profile: Profile, request: Request, outcome: str, works: Works) -> PlanInfeasible:
    """Return the refusal where a model's loss mixes samples and the batch cannot stay whole: `outcome` says why."""
    fixed, batch, gpus = request.fixed, request.global_batch, request.cluster.gpus
    dividing = [f"micro_batch={fixed.micro_batch}"] if fixed.micro_batch not in (None, batch) else []
    dividing += [f"data={fixed.data}"] if (fixed.data or 1) > 1 else []
    ways = [f"leave {' and '.join(dividing)} out"] if dividing else []
    if dividing:
        outcome = f"and {' and '.join(dividing)} divides them"
    else:
        degrees = {pipeline * t for pipeline in range(1, len(profile.blocks) + 1) for t in (1, *profile.divided)}
        fewer = sorted((n for n in degrees if n < gpus), reverse=True)
        devices = next((n for n in (*fewer, 2 * gpus, 4 * gpus) if works(_on(n, request))), None)
        ways += [f"give the plan {_devices(devices)}"] if devices else []
        smaller = next((n for n in divisors(batch)[-2::-1] if works(replace(request, global_batch=n))), None)
        ways += [f"choose a global batch of {smaller}"] if smaller else []
    gathering = f" {profile.not_gathered}" if profile.not_gathered else ""
    if profile.gathered is not None:
        gathering = (
            " They are gathered only with tensor=1 and one stage on each pipeline rank, over micro-batches of two or "
            "more samples."
        )
    text = ", or ".join([*ways, "accept a loss that depends on the plan: batch_coupling='allow' in the experiment"])
    return PlanInfeasible(
        f"The loss of {profile.model} compares samples of one batch ({profile.coupled[0]}), so that all {batch} must "
        f"stay in one micro-batch on one replica, {outcome}.{gathering} {text[0].upper()}{text[1:]}."
    )


def _on(gpus: int, request: Request) -> Request:
    return replace(request, cluster=replace(request.cluster, gpus=gpus))


def _devices(gpus: int) -> str:
    """Return a number of devices, and how a plan gets them."""
    number = f"{gpus} device{'s' * (gpus > 1)}"
    return f"{number} (wb.measure.local_cluster({gpus}) on this machine, gpus={gpus} of another cluster)"


def _division(profile: Profile, request: Request) -> str:
    """Return the reason why the devices cannot be divided."""
    fixed = request.fixed
    given = [f"{name}={fixed[name]}" for name in ("pipeline", "data", "tensor", "zero") if fixed.get(name)]
    words = f" with {', '.join(given)}" if given else ""
    micro, share = "", "an equal share of the batch"
    if fixed.micro_batch is not None:
        micro, share = f" in micro-batches of {fixed.micro_batch}", f"{share} in whole micro-batches"
    return (
        f"No division of {request.cluster.gpus} devices{words} suits a global batch of {request.batch_in_words} samples"
        f"{micro} and {len(profile.blocks)} blocks: every replica needs {share}, and every stage a block."
    )


def _schedule(profile: Profile, request: Request, works: Works) -> str:
    """Return the reason why the devices can be divided, but not for the schedule that was asked for."""
    fixed, free = request.fixed, request.fixing(schedule=None, chunks=None)
    wanted = divisors(request.cluster.gpus) if fixed.pipeline is None else [fixed.pipeline]
    ranks = [degree for degree in wanted if works(free.fixing(pipeline=degree))]
    blocks, schedule = len(profile.blocks), SCHEDULES[fixed.schedule or interleaving()[0]]
    micro = "" if fixed.micro_batch is None else f" in micro-batches of {fixed.micro_batch}"
    batch = f"a global batch of {request.batch_in_words}{micro}"
    if schedule.interleaves:
        chunks, ranks = fixed.chunks or schedule.chunks[0], [degree for degree in ranks if degree > 1]
        if not ranks:
            return f"{schedule.words} needs a pipeline of at least 2 ranks, which these degrees leave no room for."
        if min(ranks) * chunks > blocks:
            return (
                f"{schedule.words} with {chunks} stages on each pipeline rank cuts a pipeline of {min(ranks)} into "
                f"{min(ranks) * chunks} stages, and {profile.model} has {blocks} blocks."
            )
    return f"{schedule.needs_in_words()}, and {batch} gives no such number on {min(ranks)} ranks."


def _ways(profile: Profile, request: Request, works: Works) -> Iterator[str]:
    """Yield one fixed value changed, another batch, or another number of devices: those that leave an option."""
    gpus, batch = request.cluster.gpus, request.global_batch
    tried: dict[str, list[Any]] = {
        "micro_batch": divisors(batch),
        "chunks": list(range(1, 9)),
        "pipeline": divisors(gpus),
        "data": divisors(gpus),
        "tensor": [1, *profile.divided],
        "zero": list(ZERO),
        "block_sparse": [False],
        "schedule": list(SCHEDULES),
    }
    for name, values in tried.items():
        if name in request.fixed:
            cleared: dict[str, Any] = {"chunks": None} if name == "schedule" else {}
            working = [repr(value) for value in values if works(request.fixing(**{**cleared, name: value}))]
            if working:
                yield f"{name}={listed(working, last=' or ')}"
    nearby = (batch + sign * step for step in range(1, 2 * gpus) for sign in (1, -1))
    for other in nearby:
        if other > 0 and works(replace(request, global_batch=other)):
            yield f"a global batch of {other}"
            break
    if not any(request.fixed.get(name) for name in ("pipeline", "data", "tensor")):
        for fewer in range(gpus - 1, 0, -1):
            if works(_on(fewer, request)):
                yield _devices(fewer)
                break


def too_large(
    profile: Profile, request: Request, options: int, least: tuple[Strategy, float, int], fits: Works
) -> PlanInfeasible:
    """Return the refusal where nothing fits.

    `least` is the strategy that needs the fewest bytes, with these bytes and the pipeline rank that needs them.
    """
    strategy, needed, rank = least
    tensor = f"tensor={strategy.tensor}, " if strategy.tensor > 1 else ""
    host = ", offload_optimizer=True" if strategy.offload_optimizer else ""
    graphs = ", cuda_graphs=True" if strategy.cuda_graphs else ""
    graphs += ", block_sparse=True" if strategy.block_sparse else ""
    need, offer = apart(needed, request.offered_bytes)
    return PlanInfeasible(
        f"{profile.model} does not fit {request.cluster.describe()}: the smallest of {options} options "
        f"(pipeline={strategy.pipeline}, data={strategy.data}, {tensor}zero={strategy.zero}, "
        f"micro_batch={strategy.micro_batch}, recompute={strategy.recompute!r}{host}{graphs}) needs {need} a device, "
        f"and {request.offer(offer)}. {_more_memory(request, strategy, needed, fits)}",
        needed_bytes=int(needed),
        offered_bytes=request.offered_bytes,
        fullest=f"stage {rank}" if strategy.chunks == 1 else f"rank {rank} of the pipeline",
    )


def host_too_small(profile: Profile, request: Request, needed: float) -> PlanInfeasible:
    """Return the refusal where the optimiser's state was to live on the host, which has too little memory for it."""
    return PlanInfeasible(
        f"{profile.model} with its optimiser's state on the host does not fit {request.cluster.describe()}: it "
        f"{host_need(needed, request)} fall to one. Leave offload_optimizer out, or give the plan more than "
        f"{request.cluster.gpus} devices.",
        needed_bytes=int(needed),
        offered_bytes=int(request.cluster.host_offered_bytes),
    )


def too_large_to_build(plan: Plan) -> PlanInfeasible | None:
    """Return the refusal where neither a GPU nor its host has room to initialise the whole model, as each rank does."""
    cluster, whole = plan.cluster, plan.model_bytes
    if cluster.device.type == "cpu" or cluster.host_bytes is None:
        return None
    ranks = min(plan.world, cluster.gpus_per_node)
    offered = ranks * cluster.host_bytes  # ranks build one after the other where memory is scarce
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
    """Return, for instance, `"needs at least 70.1 GiB of the host's memory for each device, and 51.2 GiB"`."""
    offered = request.cluster.host_offered_bytes
    if needed <= offered:  # one stage alone would fit, those of one device together do not
        return f"needs more of the host's memory for one device than the {gib(offered)} that"
    need, offer = apart(needed, offered)
    return f"needs at least {need} of the host's memory for each device, and {offer}"


def apart(needed: float, offered: float) -> tuple[str, str]:
    """Return both sizes in words, with as many digits as it takes to tell them apart."""
    if gib(needed) != gib(offered):
        return gib(needed), gib(offered)
    for digits in (2, 3):
        need, offer = f"{needed / GIB:.{digits}f} GiB", f"{offered / GIB:.{digits}f} GiB"
        if need != offer:
            return need, offer
    return f"just over {offer}", offer


def _more_memory(request: Request, least: Strategy, needed: float, fits: Works) -> str:
    """Return the sentence that says which changes make room."""
    ways = []
    fixed, device, batch, gpus = request.fixed, request.cluster.device, request.global_batch, request.cluster.gpus
    even = -(-batch // gpus) * gpus
    if even != batch and fits(replace(request, global_batch=even)):
        ways.append(f"choose a global batch of {even}, a multiple of {gpus} devices")
    if fixed.recompute in ("none", "selective"):
        ways.append("allow activation checkpointing")
    if fixed.zero is not None and fixed.zero < 3 and least.data > 1:
        ways.append("allow ZeRO 3")
    if fixed.offload_optimizer is False and device.type != "cpu":
        ways.append("allow the optimiser's state on the host")
    if fixed.micro_batch is not None and fixed.micro_batch > 1:
        ways.append(f"allow micro-batches smaller than {fixed.micro_batch}")
    if fixed.pipeline is not None or fixed.data is not None:
        ways.append("leave the degrees to the search")
    if request.memory_limit_bytes is not None and needed <= device.usable_bytes:
        limit_gib = needed / (1 - FRAGMENTATION) / GIB
        scale = 10 ** max(1, 1 - math.floor(math.log10(limit_gib)))
        ways.append(f"raise the memory limit to at least {math.ceil(scale * limit_gib) / scale:g} GiB")
    words = ("process", "processes") if device.type == "cpu" else ("device", "devices")
    ways.append(f"give the plan more than {gpus} {words[gpus > 1]}")
    text = ", or ".join(ways)
    return text[0].upper() + text[1:] + "."
