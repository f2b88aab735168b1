"""What the user asked of a plan, checked before anything is searched."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.cost.cluster import FRAGMENTATION, Cluster
from workbench.cost.profiles import Profile
from workbench.errors import PlanInfeasible, suggestion
from workbench.planning.plan import RECOMPUTE
from workbench.planning.plan import SCHEDULES as SCHEDULE_NAMES
from workbench.planning.schedules import SCHEDULES
from workbench.units import gib


@dataclass(frozen=True)
class Runnable:
    """What a runtime runs; a plan that needs more is not offered."""

    schedules: tuple[str, ...] = SCHEDULE_NAMES
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = RECOMPUTE
    tensor: bool = True
    offload_optimizer: bool = True


RUNNABLE = Runnable(
    schedules=("1f1b", "gpipe"),
    zero_stages=(0, 2, 3),
    recompute=("none", "full"),
    tensor=False,
    offload_optimizer=False,
)
"""What `workbench.execution` runs today: the one place that says so."""
EVERYTHING = Runnable()
"""What can be priced, whether or not it runs yet."""


@dataclass(frozen=True)
class Request:
    """One search: the batch, the cluster, and the degrees that the user fixed (None leaves them to the search)."""

    global_batch: int
    seq_len: int
    cluster: Cluster
    memory_limit_bytes: int | None
    pipeline: int | None
    data: int | None
    zero: int | None
    micro_batch: int | None
    recompute: str | None
    schedule: str

    @property
    def offered_bytes(self) -> int:
        """What the tensors of one device may fill at their peak."""
        usable = self.cluster.device.usable_bytes
        if self.memory_limit_bytes is None:
            return usable
        return min(usable, int(self.memory_limit_bytes * (1 - FRAGMENTATION)))

    def offer(self) -> str:
        """`"each H200 offers 132.7 GiB to tensors"`."""
        limit = "" if self.memory_limit_bytes is None else f" of the {gib(self.memory_limit_bytes)} allowed"
        return f"each {self.cluster.device.name} offers {gib(self.offered_bytes)}{limit} to tensors"


def check(request: Request, profile: Profile) -> None:
    """Raise `PlanInfeasible` for what no search can satisfy: each in a sentence with the way out."""
    _check_numbers(request)
    gpus = request.cluster.gpus
    for name in ("pipeline", "data"):
        degree = getattr(request, name)
        if degree is not None and gpus % degree:
            raise PlanInfeasible(
                f"{name}={degree} does not divide {gpus} devices. Choose one of {_listed(divisors(gpus))}.",
                **{name: degree, "devices": gpus},
            )
    if request.pipeline and request.data and request.pipeline * request.data != gpus:
        raise PlanInfeasible(
            f"pipeline={request.pipeline} × data={request.data} uses {request.pipeline * request.data} of {gpus} "
            f"devices. Give data={gpus // request.pipeline}, or plan for a cluster of "
            f"{request.pipeline * request.data}.",
            pipeline=request.pipeline,
            data=request.data,
            devices=gpus,
        )
    if request.pipeline and request.pipeline > len(profile.blocks):
        raise PlanInfeasible(
            f"pipeline={request.pipeline} asks for more stages than the {len(profile.blocks)} blocks of "
            f"{profile.model}. Choose at most {len(profile.blocks)}.",
            pipeline=request.pipeline,
            blocks=len(profile.blocks),
        )
    _check_batch(request)


def _check_numbers(request: Request) -> None:
    for name in ("global_batch", "seq_len", "pipeline", "data", "micro_batch", "memory_limit_bytes"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise PlanInfeasible(f"{name}={value} must be at least 1.", **{name: value})
    if request.recompute is not None and request.recompute not in RUNNABLE.recompute:
        raise PlanInfeasible(
            f"recompute={request.recompute!r} is not a kind of activation checkpointing that runs here. Choose one of "
            f"{', '.join(map(repr, RUNNABLE.recompute))}.",
            recompute=request.recompute,
        )
    if request.zero is not None and request.zero not in RUNNABLE.zero_stages:
        raise PlanInfeasible(
            f"zero={request.zero} is not a ZeRO stage that runs here. Choose 0 (replicate), 2 (shard gradients and "
            f"optimiser) or 3 (shard parameters too).",
            zero=request.zero,
        )
    if request.schedule not in SCHEDULES:
        raise PlanInfeasible(
            f"There is no schedule {request.schedule!r}. {suggestion(request.schedule, SCHEDULES)}",
            schedule=request.schedule,
        )


def _check_batch(request: Request) -> None:
    batch, micro, data = request.global_batch, request.micro_batch, request.data
    if data is not None and batch % data:
        raise PlanInfeasible(
            f"A global batch of {batch} samples cannot be divided over data={data} replicas. Choose a global batch "
            f"that is a multiple of {data}, such as {_multiple(batch, data)}.",
            global_batch=batch,
            data=data,
        )
    least = micro * (data or 1) if micro is not None else 1
    if micro is not None and batch % least:
        replicas = f" on each of {data} replicas" if data else ""
        choices = _listed(divisors(batch // data if data else batch))
        raise PlanInfeasible(
            f"A global batch of {batch} samples cannot be divided into micro-batches of {micro}{replicas}. Choose one "
            f"of {choices}, or a global batch of {_multiple(batch, least)}.",
            global_batch=batch,
            micro_batch=micro,
        )


def divisors(number: int) -> list[int]:
    """In ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def _multiple(number: int, of: int) -> int:
    return max(1, round(number / of)) * of


def _listed(numbers: list[int]) -> str:
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:10], "…", shown[-1]])
