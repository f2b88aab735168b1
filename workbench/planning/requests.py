"""What the user asked of a plan, checked before anything is searched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from workbench.cost.cluster import FRAGMENTATION, Cluster
from workbench.cost.profiles import RECOMPUTE, Profile
from workbench.errors import PlanInfeasible, suggestion
from workbench.planning.plan import INTERLEAVED, SCHEDULES, Candidate
from workbench.units import GIB, gib, is_count, plain


@dataclass(frozen=True)
class Runnable:
    """What a runtime runs; a plan that needs more is not offered."""

    schedules: tuple[str, ...] = SCHEDULES
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = RECOMPUTE
    tensor: bool = True
    offload_optimizer: bool = True
    cuda_graphs: bool = True
    """Without, they are for those who ask."""


RUNNABLE = Runnable()
"""What `workbench.execution` runs today, which is all that can be priced: the one place that says so."""

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
    "cuda_graphs",
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
    cuda_graphs: bool | None = None
    runnable: Runnable = RUNNABLE

    def __post_init__(self) -> None:
        for name in ("global_batch", "seq_len", "memory_limit_bytes", *FIXABLE):
            object.__setattr__(self, name, plain(getattr(self, name)))

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
            cuda_graphs=row.cuda_graphs,
        )

    @property
    def offered_bytes(self) -> int:
        """What the tensors of one device may fill at their peak."""
        usable = self.cluster.device.usable_bytes
        if self.memory_limit_bytes is None:
            return usable
        return min(usable, int(self.memory_limit_bytes * (1 - FRAGMENTATION)))

    def offer(self, size: str | None = None) -> str:
        """`"each H200 offers 132.7 GiB to tensors"`; `size` is what it offers, in other words."""
        size = size or gib(self.offered_bytes)
        if self.memory_limit_bytes is None or self.offered_bytes == self.cluster.device.usable_bytes:
            return f"each {self.cluster.device.name} offers {size} to tensors"
        return f"your limit of {gib(self.memory_limit_bytes)} leaves {size} to tensors"


def memory_limit_bytes(gibibytes: float | None) -> int | None:
    """Raises `PlanInfeasible` for what is not a size."""
    if gibibytes is None:
        return None
    gibibytes = plain(gibibytes)
    if isinstance(gibibytes, bool) or not isinstance(gibibytes, (int, float)) or not 0 < gibibytes < float("inf"):
        raise PlanInfeasible(
            f"memory_limit_gib={gibibytes!r} must be a number greater than 0. Give GiB for one device, such as 32.",
            memory_limit_gib=gibibytes,
        )
    return max(1, int(gibibytes * GIB))


def check_cluster(cluster: object) -> None:
    """Raises `PlanInfeasible` for what is no cluster."""
    if not isinstance(cluster, Cluster):
        raise PlanInfeasible(
            f'cluster={cluster!r} is not a Cluster. Give wb.Cluster.of("h200", gpus=4), or wb.local_cluster() for this '
            f"machine.",
            cluster=cluster,
        )


def check(request: Request, profile: Profile) -> None:
    """Raise `PlanInfeasible` for what no search can satisfy: each in a sentence with the way out."""
    _check_numbers(request)
    _check_runnable(request, profile)
    _check_schedule(request, profile)
    _check_degrees(request, profile)
    _check_sharding(request)
    if request.pipeline and request.pipeline > len(profile.blocks):
        raise PlanInfeasible(
            f"pipeline={request.pipeline} asks for more stages than the {len(profile.blocks)} "
            f"block{'s' * (len(profile.blocks) > 1)} of {profile.model}. Choose at most {len(profile.blocks)}.",
            pipeline=request.pipeline,
            blocks=len(profile.blocks),
        )
    _check_batch(request)


DEGREES = ("pipeline", "data", "tensor")
MEANINGS = {
    "global_batch": "the samples of one step",
    "seq_len": "the tokens of one sample",
    "pipeline": "how many parts the model is cut into",
    "data": "how many replicas share the global batch",
    "tensor": "how many devices share each matrix product",
    "chunks": "how many stages one pipeline rank has",
    "micro_batch": "the samples of one forward on one replica",
    "memory_limit_bytes": "what one device may use",
}
OPTIONAL = {*DEGREES, "chunks", "micro_batch", "memory_limit_bytes"}


def _check_numbers(request: Request) -> None:
    for name, meaning in MEANINGS.items():
        value = getattr(request, name)
        if value is None and name in OPTIONAL:
            continue
        if not is_count(value):
            raise PlanInfeasible(
                f"{name}={value!r} must be a whole number of at least 1: {meaning}."
                + (" Leave it out to have it searched." if name in {*DEGREES, "chunks", "micro_batch"} else ""),
                **{name: value},
            )
    if request.offload_optimizer is not None and not isinstance(request.offload_optimizer, bool):
        raise PlanInfeasible(
            f"offload_optimizer={request.offload_optimizer!r} must be True or False: whether the optimiser's state "
            f"lives in the host's memory. Leave it out to have it searched.",
            offload_optimizer=request.offload_optimizer,
        )
    if request.cuda_graphs is not None and not isinstance(request.cuda_graphs, bool):
        raise PlanInfeasible(
            f"cuda_graphs={request.cuda_graphs!r} must be True or False: whether what blocks launch is recorded once "
            f"and replayed. Leave it out for plans without.",
            cuda_graphs=request.cuda_graphs,
        )


def _check_runnable(request: Request, profile: Profile) -> None:
    runnable = request.runnable
    if request.recompute is not None and request.recompute not in runnable.recompute:
        raise PlanInfeasible(
            f"recompute={request.recompute!r} is not a kind of activation checkpointing that runs here. Choose one of "
            f"{', '.join(map(repr, runnable.recompute))}.",
            recompute=request.recompute,
        )
    if request.zero is not None and (type(request.zero) is not int or request.zero not in runnable.zero_stages):
        raise PlanInfeasible(
            f"zero={request.zero!r} is not a ZeRO stage that runs here. Choose one of "
            f"{', '.join(ZERO_WORDS[stage] for stage in runnable.zero_stages)}.",
            zero=request.zero,
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
            f"multiples of it. Choose {'1' if degrees == [1] else 'one of ' + listed(degrees)}.",
            tensor=request.tensor,
        )
    if request.offload_optimizer and request.cluster.device.type == "cpu":
        raise PlanInfeasible(
            f"offload_optimizer=True moves the optimiser's state to the host's memory, where a "
            f"{request.cluster.device.name} has it already. Leave it out.",
            offload_optimizer=True,
        )
    if request.offload_optimizer and not runnable.offload_optimizer:
        raise PlanInfeasible(
            "offload_optimizer=True does not run here. Leave it out; zero=2 or zero=3 divides the optimiser's state "
            "over the replicas."
        )
    if request.cuda_graphs:
        _check_cuda_graphs(request, profile)


def _check_cuda_graphs(request: Request, profile: Profile) -> None:
    """That blocks of some plan can be recorded."""
    reasons = {
        f"a {request.cluster.device.name} has no CUDA": request.cluster.device.type != "cuda",
        "blocks are recorded as the compiler made them, and compile is False": not profile.compiled,
        f"under zero={request.zero} FSDP2 moves weights from step to step": bool(request.zero),
        f"schedule={request.schedule!r} runs blocks in halves": request.schedule == "zero_bubble",
    }
    for reason, holds in reasons.items():
        if holds:
            raise PlanInfeasible(f"cuda_graphs=True does not run here: {reason}. Leave it out.", cuda_graphs=True)


def _check_schedule(request: Request, profile: Profile) -> None:
    runnable = request.runnable
    if request.schedule is not None and request.schedule not in runnable.schedules:
        near = suggestion(str(request.schedule).lower(), runnable.schedules)
        raise PlanInfeasible(f"There is no schedule {request.schedule!r}. {near}", schedule=request.schedule)
    if request.chunks is not None and request.chunks > 1 and not _interleaves(request):
        raise PlanInfeasible(
            f"chunks={request.chunks} needs an interleaved schedule, and "
            f"{request.schedule or 'no schedule that runs here'} has one stage a pipeline rank. Leave chunks out, or "
            f"choose schedule='interleaved'.",
            chunks=request.chunks,
        )
    if (request.schedule in INTERLEAVED or (request.chunks or 1) > 1) and _ranks(request) == 1:
        what = f"schedule={request.schedule!r}" if request.schedule else f"chunks={request.chunks}"
        why = "this cluster has one device" if request.cluster.gpus == 1 else "these degrees make one"
        raise PlanInfeasible(
            f"{what} interleaves the stages of several pipeline ranks, and {why}. Leave {what.split('=')[0]} out, or "
            f"give the plan a pipeline of at least 2.",
            schedule=request.schedule,
            chunks=request.chunks,
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


def _ranks(request: Request) -> int | None:
    """The pipeline degree, where the request leaves one only."""
    if request.pipeline is not None or request.data is None:
        return 1 if request.cluster.gpus == 1 else request.pipeline
    others = request.data * (request.tensor or 1)
    return 1 if others == request.cluster.gpus else None


def _check_sharding(request: Request) -> None:
    """ZeRO on a single replica is asking for two things at once."""
    if not request.zero:
        return
    gpus, others = request.cluster.gpus, (request.pipeline or 1) * (request.tensor or 1)
    if request.data == 1 or others == gpus:
        names = " × ".join(
            f"{name}={getattr(request, name)}" for name in ("pipeline", "tensor") if getattr(request, name)
        )
        left = f"{names} on {gpus} devices leaves one" if gpus > 1 else "one device holds one"
        why = "data=1 makes one" if request.data == 1 else left
        raise PlanInfeasible(
            f"zero={request.zero} shards over data-parallel replicas, and {why}. Leave zero out, or make room for "
            f"data=2.",
            zero=request.zero,
            devices=gpus,
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
                f"{name}={degree} does not divide {gpus} devices. Choose one of {listed(divisors(gpus))}.",
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
        replicas = f" on each of {data} replicas" if data and data > 1 else ""
        choices = listed(divisors(batch // data if data else batch))
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


def listed(values: list[Any], last: str = ", ") -> str:
    """`"1, 2, 4"`; of many, the first ten and the last."""
    shown = [str(value) for value in values]
    shown = shown if len(shown) <= 12 else [*shown[:10], "…", shown[-1]]
    return last.join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)
