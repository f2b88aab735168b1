"""What the user asked of a plan, checked before anything is searched."""

from __future__ import annotations

from dataclasses import dataclass, replace

from workbench.cost.cluster import FRAGMENTATION, Cluster
from workbench.cost.profiles import Profile
from workbench.errors import PlanInfeasible, suggestion
from workbench.planning.plan import INTERLEAVED, RECOMPUTE, SCHEDULES, Candidate
from workbench.units import GIB, gib


@dataclass(frozen=True)
class Runnable:
    """What a runtime runs; a plan that needs more is not offered."""

    schedules: tuple[str, ...] = SCHEDULES
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = RECOMPUTE
    tensor: bool = True
    offload_optimizer: bool = True


RUNNABLE = Runnable()
"""What `workbench.execution` runs today: the one place that says so."""
EVERYTHING = Runnable()
"""What can be priced, whether or not it runs yet."""

ZERO_WORDS = {
    0: "0 (replicate)",
    1: "1 (shard the optimiser)",
    2: "2 (shard gradients and optimiser)",
    3: "3 (shard parameters too)",
}


FIXABLE = (
    "pipeline",
    "data",
    "tensor",
    "zero",
    "micro_batch",
    "recompute",
    "schedule",
    "chunks",
    "offload_optimizer",
)
"""What a user may fix of a plan; the rest is searched."""


@dataclass(frozen=True)
class Request:
    """One search: the batch, the cluster, and the degrees that the user fixed (None leaves them to the search)."""

    global_batch: int
    seq_len: int
    cluster: Cluster
    memory_limit_bytes: int | None = None
    pipeline: int | None = None
    data: int | None = None
    tensor: int | None = None
    zero: int | None = None
    micro_batch: int | None = None
    recompute: str | None = None
    schedule: str | None = None
    chunks: int | None = None
    offload_optimizer: bool | None = None
    runnable: Runnable = RUNNABLE

    def fixed_to(self, row: Candidate) -> Request:
        """This request with every degree fixed as in one row of its search."""
        recompute = row.recompute if row.recompute in RECOMPUTE else self.recompute
        return replace(
            self,
            pipeline=row.pipeline,
            data=row.data,
            tensor=row.tensor,
            zero=row.zero,
            micro_batch=row.micro_batch,
            recompute=recompute,
            schedule=row.schedule,
            chunks=row.chunks,
            offload_optimizer=row.offload_optimizer,
        )

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


def memory_limit_bytes(gibibytes: float | None) -> int | None:
    """Raises `PlanInfeasible` for what is not a size."""
    if gibibytes is None:
        return None
    if isinstance(gibibytes, bool) or not isinstance(gibibytes, (int, float)) or not 0 < gibibytes < float("inf"):
        raise PlanInfeasible(
            f"memory_limit_gib={gibibytes!r} must be a number greater than 0. Give GiB for one device, such as 32.",
            memory_limit_gib=gibibytes,
        )
    return int(gibibytes * GIB)


def check(request: Request, profile: Profile) -> None:
    """Raise `PlanInfeasible` for what no search can satisfy: each in a sentence with the way out."""
    _check_numbers(request)
    _check_runnable(request, profile)
    _check_degrees(request, profile)
    if request.pipeline and request.pipeline > len(profile.blocks):
        raise PlanInfeasible(
            f"pipeline={request.pipeline} asks for more stages than the {len(profile.blocks)} blocks of "
            f"{profile.model}. Choose at most {len(profile.blocks)}.",
            pipeline=request.pipeline,
            blocks=len(profile.blocks),
        )
    _check_batch(request)


DEGREES = ("pipeline", "data", "tensor")


def _check_numbers(request: Request) -> None:
    for name in ("global_batch", "seq_len", *DEGREES, "chunks", "micro_batch", "memory_limit_bytes"):
        value = getattr(request, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise PlanInfeasible(f"{name}={value!r} must be a whole number of at least 1.", **{name: value})


def _check_runnable(request: Request, profile: Profile) -> None:
    runnable = request.runnable
    if request.recompute is not None and request.recompute not in runnable.recompute:
        raise PlanInfeasible(
            f"recompute={request.recompute!r} is not a kind of activation checkpointing that runs here. Choose one of "
            f"{', '.join(map(repr, runnable.recompute))}.",
            recompute=request.recompute,
        )
    if request.zero is not None and (isinstance(request.zero, bool) or request.zero not in runnable.zero_stages):
        raise PlanInfeasible(
            f"zero={request.zero!r} is not a ZeRO stage that runs here. Choose "
            f"{' or '.join(ZERO_WORDS[stage] for stage in runnable.zero_stages)}.",
            zero=request.zero,
        )
    if request.schedule is not None and request.schedule not in runnable.schedules:
        raise PlanInfeasible(
            f"There is no schedule {request.schedule!r}. {suggestion(str(request.schedule), runnable.schedules)}",
            schedule=request.schedule,
        )
    if request.schedule in INTERLEAVED and (request.pipeline == 1 or request.cluster.gpus == 1):
        raise PlanInfeasible(
            f"schedule={request.schedule!r} interleaves the stages of several pipeline ranks, and there is one. Leave "
            f"schedule out, or give the plan a pipeline of at least 2.",
            schedule=request.schedule,
        )
    if request.schedule == "zero_bubble" and profile.compiled:
        raise PlanInfeasible(
            "A zero-bubble schedule splits each block's backward, which the compiler cannot, so that its blocks run "
            "uncompiled. Plan with Experiment(…, compile=False), or choose schedule='interleaved'.",
            schedule=request.schedule,
        )
    if request.schedule == "zero_bubble" and request.zero:
        raise PlanInfeasible(
            f"A zero-bubble schedule leaves weight gradients for later, which zero={request.zero} would reduce before. "
            f"Choose zero=0, or schedule='interleaved'.",
            schedule=request.schedule,
            zero=request.zero,
        )
    if request.chunks is not None and request.chunks > 1 and not _interleaves(request):
        raise PlanInfeasible(
            f"chunks={request.chunks} needs an interleaved schedule, and "
            f"{request.schedule or 'no schedule that runs here'} has one stage a pipeline rank. Leave chunks out.",
            chunks=request.chunks,
        )
    if request.tensor is not None and request.tensor > 1 and not runnable.tensor:
        raise PlanInfeasible(
            f"tensor={request.tensor} does not run here. Leave tensor out, and give those devices to pipeline or data.",
            tensor=request.tensor,
        )
    if request.tensor is not None and not profile.divides(request.tensor):
        degrees = [1, *profile.divided]
        raise PlanInfeasible(
            f"tensor={request.tensor} does not divide most of {profile.model}: attention heads and widths must be "
            f"multiples of it. Choose {'1' if degrees == [1] else 'one of ' + _listed(degrees)}.",
            tensor=request.tensor,
        )
    if request.offload_optimizer and not runnable.offload_optimizer:
        raise PlanInfeasible(
            "offload_optimizer=True does not run here. Leave it out; zero=2 or zero=3 divides the optimiser's state "
            "over the replicas."
        )


def _interleaves(request: Request) -> bool:
    names = request.runnable.schedules if request.schedule is None else (request.schedule,)
    return any(name in INTERLEAVED for name in names)


def _check_degrees(request: Request, profile: Profile) -> None:
    gpus = request.cluster.gpus
    fixed = {name: getattr(request, name) for name in DEGREES if getattr(request, name) is not None}
    for name, degree in fixed.items():
        if gpus % degree:
            raise PlanInfeasible(
                f"{name}={degree} does not divide {gpus} devices. Choose one of {_listed(divisors(gpus))}.",
                **{name: degree, "devices": gpus},
            )
    product = 1
    for degree in fixed.values():
        product *= degree
    tensor_fills = request.runnable.tensor and profile.divides(gpus // product)
    complete = len(fixed) == 3 or ({"pipeline", "data"} <= set(fixed) and not tensor_fills)
    if gpus % product or (complete and product != gpus):
        given = " × ".join(f"{name}={degree}" for name, degree in fixed.items())
        last = "data" if "data" in fixed else next(iter(fixed))
        others = product // fixed[last]
        rest = f"{last}={gpus // others}" if gpus % others == 0 else "degrees whose product divides it"
        raise PlanInfeasible(
            f"{given} uses {product} of {gpus} devices. Give {rest}, or plan for a cluster of {product}.",
            **fixed,
            devices=gpus,
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
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _multiple(number: int, of: int) -> int:
    return max(1, round(number / of)) * of


def _listed(numbers: list[int]) -> str:
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:10], "…", shown[-1]])
