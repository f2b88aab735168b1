"""One search as the user asked for it, and its refusals: what no search can satisfy, and what this one did not find.

A refusal says what happened, with numbers, and then the ways out, which were tried before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from workbench.algorithms import ELEMENT, MODEL, TENSOR
from workbench.base.errors import PlanInfeasible
from workbench.base.units import GIB, gib, plain
from workbench.base.validation import Count, LargeCount, PlainValidator, checked_value
from workbench.cost.hardware import FRAGMENTATION, Cluster
from workbench.cost.profile import Profile
from workbench.experiment import Experiment
from workbench.strategy import DEGREES, RECOMPUTE, SCHEDULES, ZERO, Choices, Fixed, Strategy, interleaving

if TYPE_CHECKING:
    from workbench.capture.captured_model import Facts


def checked_cluster(cluster: Any) -> Cluster:
    """Return the cluster; raise `PlanInfeasible` for anything else."""
    if not isinstance(cluster, Cluster):
        raise PlanInfeasible(
            f'cluster={cluster!r} is not a Cluster. Give wb.Cluster.of("h200", gpus=4), or '
            f"wb.measure.local_cluster() for this machine."
        )
    return cluster


@checked_value(error_type=PlanInfeasible)
class Request:
    """One search: the batch, the cluster, and the choices that the user fixed."""

    global_batch: Count
    seq_len: Count
    cluster: Annotated[Cluster, PlainValidator(checked_cluster)]
    memory_limit_bytes: LargeCount | None = None
    fixed: Fixed = field(default_factory=Fixed)
    ramp: tuple[tuple[int, int], ...] = ()
    """Samples of each stretch of a batch that changes, of which `global_batch` is the largest, and its steps."""
    evaluated: int = 0
    """Held-out samples of one evaluation, over all its sets; 0 without an evaluation."""

    @staticmethod
    def of(
        experiment: Experiment, cluster: Cluster, memory_limit_bytes: int | None, fixed: Fixed, facts: Facts | None
    ) -> Request:
        """Return the search for an experiment's plan, with the choices that its optimiser leaves no choice about.

        Raises `PlanInfeasible` for a choice that the optimiser rules out.
        """
        from workbench.data import held_out

        fixed = within_limits_of_optimizer(experiment, fixed, "element" if facts is None else facts.reach)
        batches = experiment.batches
        # Epochs that have not been counted have as many steps as the table tells, and one of the last stretch.
        steps = batches.stretches[-1][0] + 1 if experiment.steps is None else experiment.steps
        ramp = tuple(batches.lengths(steps)) if len(batches.stretches) > 1 else ()
        evaluated = 0
        if experiment.evaluation is not None:
            is_counted = experiment.eval_data is not None and experiment.eval_data.is_user_defined
            evaluated = len(held_out(experiment)) if is_counted else experiment.evaluation.samples
            evaluated *= 1 + len(experiment.held_out_sets)
        return Request(
            experiment.largest_batch, experiment.seq_len, cluster, memory_limit_bytes, fixed, ramp, evaluated
        )

    @property
    def batches(self) -> tuple[int, ...]:
        """All sizes of a batch, each once; every strategy must divide all of them."""
        return tuple(dict.fromkeys((self.global_batch, *(batch for batch, _ in self.ramp))))

    @property
    def common_batch(self) -> int:
        """Greatest common divisor of all sizes of a batch."""
        return math.gcd(*self.batches)

    @property
    def batch_in_words(self) -> str:
        """Sizes of a batch for sentences: `"16"`, or `"4, 8 and 16"`."""
        return listed(sorted(self.batches), last=" and ")

    def fixing(self, **choices: Unpack[Choices]) -> Request:
        """Return this request with some choices fixed to other values, or left to the search where they are None."""
        return replace(self, fixed=Fixed(**{**self.fixed, **choices}))

    def fixed_to(self, strategy: Strategy) -> Request:
        """Return this request with every choice fixed as in `strategy`, apart from a mixture of checkpointing."""
        choices: dict[str, Any] = {name: getattr(strategy, name) for name in Choices.__annotations__}
        if strategy.recompute not in RECOMPUTE:
            choices["recompute"] = self.fixed.recompute
        return self.fixing(**choices)

    @property
    def offered_bytes(self) -> int:
        """Return the bytes that the tensors of one device may fill at their peak."""
        usable = self.cluster.device.usable_bytes
        if self.memory_limit_bytes is None:
            return usable
        return min(usable, int(self.memory_limit_bytes * (1 - FRAGMENTATION)))

    def offer(self, size: str | None = None) -> str:
        """Return, for instance, `"each H200 offers 132.7 GiB to tensors"`; `size` replaces the size in words."""
        size = size or gib(self.offered_bytes)
        if self.memory_limit_bytes is None or self.offered_bytes == self.cluster.device.usable_bytes:
            return f"each {self.cluster.device.name} offers {size} to tensors"
        return f"your limit of {gib(self.memory_limit_bytes)} leaves {size} to tensors"


def memory_limit_bytes(gibibytes: float | None) -> int | None:
    """Return a limit in bytes; raises `PlanInfeasible` for a value that is not a size."""
    if gibibytes is None:
        return None
    gibibytes = plain(gibibytes)
    if isinstance(gibibytes, bool) or not isinstance(gibibytes, (int, float)) or not 0 < gibibytes < float("inf"):
        raise PlanInfeasible(
            f"memory_limit_gib={gibibytes!r} must be a number greater than 0. Give GiB for one device, such as 32."
        )
    return max(1, int(gibibytes * GIB))


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _multiple(number: int, of: int) -> int:
    return max(1, round(number / of)) * of


def listed(values: Sequence[Any], last: str = ", ") -> str:
    """Return `"1, 2, 4"`; of more than twelve values the first ten and the last."""
    shown = [str(value) for value in values]
    shown = shown if len(shown) <= 12 else [*shown[:10], "…", shown[-1]]
    return last.join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)


# Rules: what no search can satisfy, in the order in which they are looked at.

Words = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """Something that must not be asked for: when it is, the sentence that says so, and a way out."""

    when: Callable[..., Words | bool | None]
    """Return the words of the sentence and of the way out, or True, if the rule is broken."""
    sentence: str
    way_out: str


def first_broken(rules: Iterable[Rule], *case: Any, **words: Any) -> str | None:
    """Return the sentence of the first rule that a case breaks, with its way out; None if it breaks none."""
    for rule in rules:
        if found := rule.when(*case):
            return f"{rule.sentence} {rule.way_out}".format_map({**words, **({} if found is True else found)})
    return None


def check(request: Request, profile: Profile) -> None:
    """Raise `PlanInfeasible` for a request that no search can satisfy, with the way out."""
    words = dict.fromkeys(Choices.__annotations__) | request.fixed
    words |= {"model": profile.model, "device": request.cluster.device.name, "gpus": request.cluster.gpus}
    if (said := first_broken(RULES, request, profile, **words)) is not None:
        raise PlanInfeasible(said)


def _undivided_model(request: Request, profile: Profile) -> Words | None:
    tensor, degrees = request.fixed.tensor, [1, *profile.divided]
    if tensor is None or profile.divides(tensor):
        return None
    return {"degrees": "1" if degrees == [1] else "one of " + listed(degrees)}


def _uncaptured_graphs(request: Request, profile: Profile) -> Words | None:
    fixed, device = request.fixed, request.cluster.device
    obstacles = {
        f"a {device.name} has no CUDA": device.type != "cuda",
        "the code that the compiler made is captured, and compile is False": not profile.compiled,
        f"under zero={fixed.zero} FSDP2 moves weights from step to step": bool(fixed.zero),
        "graphs are captured for one number of micro-batches, and the batch changes": bool(request.ramp),
    }
    obstacle = next((obstacle for obstacle, applies in obstacles.items() if applies), None)
    return {"obstacle": obstacle} if fixed.cuda_graphs and obstacle else None


def _interleaves(request: Request) -> bool:
    fixed = request.fixed
    return (fixed.chunks or 1) > 1 if fixed.schedule is None else SCHEDULES[fixed.schedule].interleaves


def _one_rank_interleaved(request: Request, _: Profile) -> Words | None:
    fixed, gpus = request.fixed, request.cluster.gpus
    all_data = fixed.data is not None and fixed.pipeline is None and fixed.data * (fixed.tensor or 1) == gpus
    if not _interleaves(request) or not (gpus == 1 or fixed.pipeline == 1 or all_data):
        return None
    choice = "schedule" if fixed.schedule else "chunks"
    why = "this cluster has one device" if gpus == 1 else "these degrees make one"
    return {"choice": choice, "value": repr(fixed[choice]), "why": why}


def _uneven_degree(request: Request, _: Profile) -> Words | None:
    gpus = request.cluster.gpus
    uneven = ((name, request.fixed[name]) for name in DEGREES if name in request.fixed and gpus % request.fixed[name])
    return next(({"name": name, "degree": d, "degrees": listed(divisors(gpus))} for name, d in uneven), None)


def _other_devices(request: Request, profile: Profile) -> Words | None:
    gpus = request.cluster.gpus
    fixed = {name: request.fixed[name] for name in DEGREES if name in request.fixed}
    product = math.prod(fixed.values())
    complete = len(fixed) == 3 or ({"pipeline", "data"} <= set(fixed) and not profile.divides(gpus // product))
    if gpus % product == 0 and (not complete or product == gpus):
        return None
    last = "data" if "data" in fixed else next(iter(fixed))
    others = product // fixed[last]
    rest = f"{last}={gpus // others}" if gpus % others == 0 else "degrees whose product divides it"
    return {"given": _product_in_words(fixed), "product": product, "rest": rest}


def _product_in_words(degrees: Mapping[str, int]) -> str:
    return " × ".join(f"{name}={degree}" for name, degree in degrees.items())


def _one_replica_sharded(request: Request, _: Profile) -> Words | None:
    fixed, gpus = request.fixed, request.cluster.gpus
    if not fixed.zero or (fixed.data != 1 and (fixed.pipeline or 1) * (fixed.tensor or 1) != gpus):
        return None
    names = _product_in_words({name: fixed[name] for name in ("pipeline", "tensor") if fixed.get(name)})
    left = f"{names} on {gpus} devices leaves one" if gpus > 1 else "one device holds one"
    return {"why": "data=1 makes one" if fixed.data == 1 else left}


def _masked_weights(request: Request, profile: Profile) -> Words | None:
    fixed = request.fixed
    sparse = profile.sparse
    obstacle = "the experiment has dense weights" if sparse is None else sparse.obstacle_on(request.cluster.device)
    for name, undivided in (("zero", 0), ("tensor", 1)):
        if (fixed.get(name) or 0) > undivided:
            obstacle = obstacle or f"{name}={fixed[name]} divides each weight over devices, which hold whole ones then"
    return {"obstacle": obstacle} if fixed.block_sparse and obstacle else None


def _more_stages_than_blocks(request: Request, profile: Profile) -> Words | None:
    blocks = profile.most_stages
    if (request.fixed.pipeline or 0) <= blocks:
        return None
    whole = f"{profile.model} is one block"  # the beginning of a note of capture
    notes = "".join(f" {note}" for note in profile.notes if note.startswith(whole))
    return {"blocks": f"{blocks} block{'s' * (blocks > 1)}", "most": blocks, "notes": notes}


def _uneven_replicas(request: Request, _: Profile) -> Words | None:
    batch, data = _least_even_batch(request), request.fixed.data
    return {"batch": batch, "even": _multiple(batch, data)} if data is not None and batch % data else None


def _uneven_micro_batches(request: Request, _: Profile) -> Words | None:
    batch, data, micro = _least_even_batch(request), request.fixed.data, request.fixed.micro_batch
    least = micro * (data or 1) if micro is not None else 1
    if batch % least == 0:
        return None
    replicas = f" on each of {data} replicas" if data and data > 1 else ""
    choices = listed(divisors(batch // data if data else batch))
    return {"batch": batch, "replicas": replicas, "choices": choices, "even": _multiple(batch, least)}


def _least_even_batch(request: Request) -> int:
    """Return, of the sizes of a batch, one that the replicas' micro-batches do not divide if there is any."""
    share = (request.fixed.micro_batch or 1) * (request.fixed.data or 1)
    return max(request.batches, key=lambda batch: batch % share)


RULES = (
    Rule(
        _undivided_model,
        "tensor={tensor} does not divide most of {model}: attention heads and widths must be multiples of it.",
        "Choose {degrees}.",
    ),
    Rule(
        lambda request, _: request.fixed.offload_optimizer and request.cluster.device.type == "cpu",
        "offload_optimizer=True moves the optimiser's state to the host's memory, where a {device} has it already.",
        "Leave it out.",
    ),
    Rule(
        _uncaptured_graphs,
        "cuda_graphs=True does not run here: {obstacle}.",
        "Remove cuda_graphs=True to search plans without.",
    ),
    Rule(
        lambda request, _: (
            (request.fixed.chunks or 1) > 1
            and not _interleaves(request)
            and {"others": " or ".join(map(repr, interleaving()))}
        ),
        "chunks={chunks} needs an interleaved schedule, and {schedule} has one stage on each pipeline rank.",
        "Leave chunks out, or choose schedule={others}.",
    ),
    Rule(
        _one_rank_interleaved,
        "{choice}={value} interleaves the stages of several pipeline ranks, and {why}.",
        "Leave {choice} out, or give the plan a pipeline of at least 2.",
    ),
    Rule(_uneven_degree, "{name}={degree} does not divide {gpus} devices.", "Choose one of {degrees}."),
    Rule(
        _other_devices,
        "{given} uses {product} of {gpus} devices.",
        "Give {rest}, or plan for a cluster of {product}.",
    ),
    Rule(
        _one_replica_sharded,
        "zero={zero} shards over data-parallel replicas, and {why}.",
        "Leave zero out, or make room for data=2.",
    ),
    Rule(
        _masked_weights,
        "block_sparse=True does not run here: {obstacle}.",
        "Remove block_sparse=True to search plans with masked weights.",
    ),
    Rule(
        _more_stages_than_blocks,
        "pipeline={pipeline} asks for more stages than the {blocks} of {model}.",
        "Choose at most {most}.{notes}",
    ),
    Rule(
        _uneven_replicas,
        "A global batch of {batch} samples cannot be divided over data={data} replicas.",
        "Choose a global batch that is a multiple of {data}, such as {even}.",
    ),
    Rule(
        _uneven_micro_batches,
        "A global batch of {batch} samples cannot be divided into micro-batches of {micro_batch}{replicas}.",
        "Choose one of {choices}, or a global batch of {even}.",
    ),
    Rule(
        lambda request, profile: (
            bool(request.ramp and profile.coupled)
            and {"operation": (profile.coupled or [""])[0], "batches": request.batch_in_words}
        ),
        "The loss of {model} compares samples of one batch ({operation}), and a step has {batches} samples: such a "
        "loss is computed over a batch of one size.",
        "Give one global_batch, or accept a loss that depends on the plan: batch_coupling='allow' in the experiment.",
    ),
)
"""Requests that no search can satisfy: each raises `PlanInfeasible`."""


# Limits that the optimiser sets: its state may have to stay on the device, and its tensors undivided.

NEEDED_WHOLE: Mapping[str, Mapping[str, int]] = {
    ELEMENT: {},
    TENSOR: {"zero": 0, "tensor": 1},
    MODEL: {"zero": 0, "tensor": 1, "pipeline": 1},
}
"""Degrees and ZeRO stage that a plan must have, by what an update of one element reads (`Facts.reach`)."""


def divided_in_spite_of(reach: str, strategy: Strategy | Fixed) -> Words | None:
    """Return the first degree or stage by which a plan, or choices for one, divide what the optimiser needs whole."""
    for name, needed in NEEDED_WHOLE[reach].items():
        if (given := getattr(strategy, name) or 0) > needed:
            why = "its update of a tensor differs from its updates of the tensor's halves"
            why = "its update of one parameter depends on other parameters" if name == "pipeline" else why
            return {"name": name, "given": given, "needed": needed, "why": why}
    return None


OPTIMIZER_RULES = (
    Rule(
        lambda _, fixed, reach: divided_in_spite_of(reach, fixed),
        "{name}={given} divides what the optimizer of {optimizer} needs whole: {why}.",
        "Choose {name}={needed}, or leave it out.",
    ),
    Rule(
        lambda experiment, fixed, _: fixed.offload_optimizer and not experiment.optimizer.record.can_be_offloaded,
        "offload_optimizer=True keeps AdamW's moments in the host's memory, and the experiment trains with "
        "{optimizer}, whose state stays on the device.",
        "Leave offload_optimizer out, or choose optimizer='adamw'.",
    ),
)
"""Choices that the experiment's optimiser rules out: each raises `PlanInfeasible`."""


def within_limits_of_optimizer(experiment: Experiment, fixed: Fixed, reach: str) -> Fixed:
    """Return the choices with those that the optimiser leaves no choice about; raise `PlanInfeasible` if they differ.

    `reach` is that of an update (`Facts.reach`).
    """
    said = first_broken(OPTIMIZER_RULES, experiment, fixed, reach, optimizer=experiment.optimizer.name)
    if said is not None:
        raise PlanInfeasible(said)
    on_device = {} if experiment.optimizer.record.can_be_offloaded else {"offload_optimizer": False}
    return Fixed(**{**fixed, **NEEDED_WHOLE[reach], **on_device})


# Refusals of a search that found nothing.

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
    gathering = f" {profile.undivided_because}" if profile.undivided_because else ""
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
    fixed, device, batch, gpus = request.fixed, request.cluster.device, request.global_batch, request.cluster.gpus
    even = -(-batch // gpus) * gpus
    limit_gib = needed / (1 - FRAGMENTATION) / GIB
    scale = 10 ** max(1, 1 - math.floor(math.log10(limit_gib)))  # at least one digit behind the point, rounded up
    words = ("process", "processes") if device.type == "cpu" else ("device", "devices")
    ways = {
        f"choose a global batch of {even}, a multiple of {gpus} devices": (
            even != batch and fits(replace(request, global_batch=even))
        ),
        "allow activation checkpointing": fixed.recompute in ("none", "selective"),
        "allow ZeRO 3": fixed.zero is not None and fixed.zero < 3 and least.data > 1,
        "allow the optimiser's state on the host": fixed.offload_optimizer is False and device.type != "cpu",
        f"allow micro-batches smaller than {fixed.micro_batch}": (fixed.micro_batch or 1) > 1,
        "leave the degrees to the search": fixed.pipeline is not None or fixed.data is not None,
        f"raise the memory limit to at least {math.ceil(scale * limit_gib) / scale:g} GiB": (
            request.memory_limit_bytes is not None and needed <= device.usable_bytes
        ),
        f"give the plan more than {gpus} {words[gpus > 1]}": True,
    }
    text = ", or ".join(way for way, makes_room in ways.items() if makes_room)
    return text[0].upper() + text[1:] + "."
