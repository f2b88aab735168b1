"""The explanation of a plan: where its step goes, and what would change it, by planning again."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass, replace

from workbench.base.arguments import checked_arguments
from workbench.base.errors import PlanInfeasible, PlanMismatch
from workbench.base.units import gib, milliseconds
from workbench.cost.hardware import FRAGMENTATION, Link
from workbench.cost.profile import Profile
from workbench.planning.plan import Plan
from workbench.planning.request import Request
from workbench.planning.search import Search, check_profile

MEMORY_LIMIT = "memory limit"
NOTHING = 1e-9
"""Fraction of a step below which a part is rounding."""
GLOSSARY = (
    "PP: ranks that the model's stages are spread over; DP: replicas that share the batch; TP: devices that share each "
    "matrix product; n × m samples: n micro-batches of m on each replica."
)
HOST = "which launches blocks more slowly than the busiest device runs them: larger micro-batches need it less"
WORTH_NAMING = 0.005
"""Relative gain below which loosening a constraint is not worth mentioning."""


@dataclass(frozen=True)
class StepPart:
    """One part of a predicted step."""

    name: str
    ms: float
    share: float
    meaning: str


@dataclass(frozen=True)
class Change:
    """One constraint loosened, and the plan that is best then."""

    constraint: str
    loosened: str
    """The condition in words: `"each device had twice the memory"`."""
    gain: float
    """Relative gain in tokens per second."""
    plan: Plan
    set_by_user: bool
    """True for a limit or a choice that was asked for."""
    category: str = ""
    """`compute`, `memory`, `link`, `divisibility`, `batch`, or `request`: a choice that was asked for."""


@dataclass(frozen=True)
class Explanation:
    """Parts of a plan's step, the binding constraint, and what would change the plan; prints as sentences."""

    plan: Plan
    parts: tuple[StepPart, ...]
    changes: tuple[Change, ...]
    """Every constraint that was loosened, the largest gain first."""

    @property
    def binding(self) -> str | None:
        """Constraint whose loosening gains most: of those that the user set if one of them gains anything, otherwise of
        the hardware's and the experiment's; None where none gains anything."""
        gaining = [change for change in self.changes if change.gain > WORTH_NAMING]
        gaining.sort(key=lambda change: not change.set_by_user)
        return gaining[0].constraint if gaining else None

    def sentences(self) -> list[str]:
        plan, usable = self.plan, self.plan.cluster.device.usable_bytes
        lines = [f"{plan.model} on {plan.cluster.describe()}: {plan.describe()}."]
        lines += [plan.prediction.basis] if plan.prediction.basis else []
        lines += plan.notes
        lines += [f"{part.name}: {milliseconds(part.ms)} ({part.share:.1%}), {part.meaning}." for part in self.parts]
        fullest, limit = max(range(plan.pipeline), key=plan.device_bytes), plan.memory_limit_bytes
        offered = usable if limit is None else min(usable, limit * (1 - FRAGMENTATION))
        lines.append(
            f"Memory: {gib(plan.device_bytes(fullest))} of the {gib(offered)} that tensors may fill, on a device of "
            f"pipeline rank {fullest}, the fullest."
        )
        if not self.changes:
            lines.append("To learn what would change it, give the model's profile: wb.planning.explain(plan, profile).")
            return lines

        # The binding constraint, and the step without it.
        bound = next((change for change in self.changes if change.constraint == self.binding), None)
        if bound is None:
            lines.append("Binding constraint: none; whatever is loosened, the step stays as long.")
        else:
            name = bound.constraint
            if name == MEMORY_LIMIT:
                name = f"your memory limit of {gib(plan.memory_limit_bytes or 0)}"
            elif bound.set_by_user:
                name = f"{name}, which you asked for"
            elif name != bound.category:
                name = f"{name} ({bound.category})"
            step = bound.plan.prediction.step_ms * plan.global_batch / bound.plan.global_batch
            lines.append(
                f"Binding constraint: {name}. If {bound.loosened}, {plan.global_batch} samples would take "
                f"{milliseconds(step)} instead of {milliseconds(plan.prediction.step_ms)}."
            )

        # What each constraint costs: the gain of the best plan without it.
        for change in self.changes:
            how = f"with {change.plan.division()}"
            how = "with the same plan" if change.plan.division() == plan.division() else how
            gains = change.gain > WORTH_NAMING
            gain = f" {change.gain:.1%} more tokens/s, {how}." if gains else " nothing to gain."
            lines.append(f"If {change.loosened}:{gain}")
        return [*lines, GLOSSARY]

    def __repr__(self) -> str:
        return "\n".join(self.sentences())

    def _repr_html_(self) -> str:
        first, *rest = (html.escape(sentence) for sentence in self.sentences())
        return f"<p><b>{first}</b></p><ul>{''.join(f'<li>{sentence}</li>' for sentence in rest)}</ul>"


@checked_arguments
def explain(plan: Plan, profile: Profile | None = None) -> Explanation:
    """Explain where the step goes, which constraint binds, and what would change the plan.

    The search runs again with one constraint loosened at a time. A plan that was read from a file needs the model's
    `profile` for that. Raises `PlanMismatch` for a profile of another model.
    """
    if profile is not None and profile.signature != plan.signature:
        raise PlanMismatch(
            f"The plan was made for {plan.model} (signature {plan.signature}), and the profile is of {profile.model} "
            f"({profile.signature}). Make the profile of the same model, or plan again."
        )
    if profile is not None:
        check_profile(profile, plan.precision, plan.cluster)
    return Explanation(plan, _parts(plan), tuple(sorted(_changes(plan, profile), key=lambda change: -change.gain)))


def _parts(plan: Plan) -> tuple[StepPart, ...]:
    predicted, step = plan.prediction, plan.prediction.step_ms
    graphs = "" if plan.cuda_graphs else ", and CUDA graphs"
    muon = predicted.orthogonalisation_ms
    matrices = f", {milliseconds(muon)} ({muon / step:.1%}) of it to orthogonalise Muon's matrices" if muon else ""
    copies = ", and FSDP2's copies, casts and gradient accumulation around it" if plan.shards else ""
    idle = ""  # of all devices, which is longer than the busiest one waits where stages are uneven
    if plan.pipeline > 1:
        share = plan.prediction.bubble_fraction
        idle = f"; from the first forward to the last backward, all devices are idle {share:.1%}"
    rows = (
        ("Compute", predicted.compute_ms, "forward and backward of the busiest device"),
        *([("Waiting for the host", predicted.host_ms, HOST + graphs)] if predicted.host_ms > NOTHING * step else []),
        ("Exposed communication", predicted.communication_ms, f"what overlap with compute does not hide{copies}"),
        ("Bubble", predicted.bubble_ms, f"the busiest device waits for the other stages{idle}"),
        ("Optimiser", predicted.optimizer_ms, f"the update, after the last backward{matrices}"),
    )
    shown = ((name, ms if abs(ms) > NOTHING * step else 0.0, meaning) for name, ms, meaning in rows)
    return tuple(StepPart(name, ms, ms / step, meaning) for name, ms, meaning in shown)


def _changes(plan: Plan, profile: Profile | None) -> list[Change]:
    """Return the plan's changes: by its own request where it is known, otherwise with its choices held."""
    if plan.origin is not None and profile in (None, plan.origin[0]):
        return _loosened_plans(plan, *plan.origin, asked=True)
    if profile is None:
        return []
    request = Request(plan.global_batch, plan.seq_len, plan.cluster, plan.memory_limit_bytes)
    free = Search(profile, request).plan()
    if free.division() == plan.division():
        return _loosened_plans(plan, profile, request, asked=True)
    gain = free.prediction.tokens_per_s / plan.prediction.tokens_per_s - 1
    freed = Change("degrees", "all degrees were left to the search", gain, free, False, "request")
    return [*_loosened_plans(plan, profile, request.fixed_to(plan), asked=False), freed]


def _loosened_plans(plan: Plan, profile: Profile, request: Request, *, asked: bool) -> list[Change]:
    """Return each constraint loosened, with the plan that is best then; `asked` also frees the choices one by one."""
    loosened = list(_loosened(request))
    for name, value in request.fixed.items() if asked else ():
        words = f"{name} were left to the search"
        loosened.append((f"{name}={value!r}", "request", words, request.fixing(**{name: None})))
    changes = []
    for constraint, category, words, other_request in loosened:
        try:
            other = Search(profile, other_request).plan()
        except PlanInfeasible:
            continue
        gain = other.prediction.tokens_per_s / plan.prediction.tokens_per_s - 1
        set_by_user = category == "request" or constraint == MEMORY_LIMIT
        changes.append(Change(constraint, words, gain, other, set_by_user, category))
    return changes


Loosened = tuple[str, str, str, Request]
"""A constraint by name and category, the condition in words, and the request without the constraint."""


def _loosened(request: Request) -> Iterator[Loosened]:
    """Yield the request with each limit of the hardware and of the batch loosened."""
    cluster, device, batch, gpus = request.cluster, request.cluster.device, request.global_batch, request.cluster.gpus

    def on(**changes: object) -> Request:
        return replace(request, cluster=replace(cluster, device=replace(device, **changes)))  # type: ignore[arg-type]

    def twice(link: Link) -> Link:
        return replace(link, bandwidth=2 * link.bandwidth, latency_s=link.latency_s / 2)

    faster = {precision: 2 * flops for precision, flops in device.peak_flops.items()}
    yield "arithmetic", "compute", "matrix products ran twice as fast", on(peak_flops=faster)
    wider = on(memory_bandwidth=2 * device.memory_bandwidth)
    yield "memory bandwidth", "compute", "memory were read and written twice as fast", wider
    if device.type != "cpu":
        of_blocks = ("block_forward_s", "block_backward_s", "host_in_step", "captured_block_s")
        of_shards = ("sharded_block_s", "sharded_collective_s", "matrix_s")
        times = (*of_blocks, *of_shards, "action_s", "captured_action_s", "collective_s")
        halved = {name: getattr(device.efficiency, name) / 2 for name in times}
        yield "host", "compute", "the host were twice as fast", on(efficiency=replace(device.efficiency, **halved))
    if request.memory_limit_bytes is not None:
        words = f"the memory limit of {gib(request.memory_limit_bytes)} were lifted"
        yield MEMORY_LIMIT, "memory", words, replace(request, memory_limit_bytes=None)
    else:
        yield "memory", "memory", "each device had twice the memory", on(memory_bytes=2 * device.memory_bytes)
    if cluster.gpus > 1:
        inside = replace(request, cluster=replace(cluster, intra=twice(cluster.intra)))
        yield "links in a node", "link", "links inside a node were twice as fast", inside
    if cluster.nodes > 1:
        between = replace(request, cluster=replace(cluster, inter=twice(cluster.inter)))
        yield "links between nodes", "link", "links between nodes were twice as fast", between
    larger = replace(request, global_batch=2 * batch)
    yield "global batch", "batch", "the global batch were twice as large", larger
    if batch % gpus:
        even = max(1, round(batch / gpus)) * gpus
        words = f"the global batch were {even}, a multiple of {gpus} devices"
        yield "divisibility", "divisibility", words, replace(request, global_batch=even)
