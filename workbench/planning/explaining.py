"""Why a plan is what it is: where its step goes, and what would change it, found by planning again."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.cost.cluster import FRAGMENTATION, Efficiency, Link
from workbench.cost.profiles import RECOMPUTE, Profile
from workbench.errors import PlanInfeasible, PlanMismatch
from workbench.planning.plan import Plan
from workbench.planning.planner import Search, check_profile
from workbench.planning.requests import FIXABLE, Request
from workbench.units import duration, gib

MEMORY_LIMIT = "memory limit"
NOTHING = 1e-9
"""Share of a step that is rounding."""
GLOSSARY = (
    "PP: the parts that the model is cut into; DP: the replicas that share the batch; TP: the devices that share each "
    "matrix product; n × m samples: n micro-batches of m on each replica."
)
HOST = "which launches blocks more slowly than the busiest device runs them: larger micro-batches need it less"
WORTH_NAMING = 0.005
"""Relative gain below which loosening a constraint changes nothing worth saying."""


@dataclass(frozen=True)
class Part:
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
    """What was loosened, in words: `"each device had twice the memory"`."""
    gain: float
    """Relative gain in tokens per second."""
    plan: Plan
    set_by_user: bool
    """A limit or a degree that was asked for."""
    kind: str = ""
    """`compute`, `memory`, `link`, `divisibility`, `batch`, or `request`: a degree that was asked for."""


@dataclass(frozen=True)
class Explanation:
    """Where a plan's step goes, what binds it, and what would change it; prints as sentences."""

    plan: Plan
    parts: tuple[Part, ...]
    changes: tuple[Change, ...]
    """Every constraint that was loosened, the largest gain first."""

    @property
    def binding(self) -> str | None:
        """The constraint whose loosening gains most, of those that the user set if one of them gains anything, else of
        the hardware's and the experiment's; None where none gains anything."""
        gaining = [change for change in self.changes if change.gain > WORTH_NAMING]
        gaining.sort(key=lambda change: not change.set_by_user)
        return gaining[0].constraint if gaining else None

    def sentences(self) -> list[str]:
        plan = self.plan
        lines = [f"{plan.model} on {plan.cluster.describe()}: {plan.describe()}."]
        lines += [plan.prediction.basis] if plan.prediction.basis else []
        lines += [f"{part.name}: {_milliseconds(part.ms)} ({part.share:.1%}), {part.meaning}." for part in self.parts]
        lines.append(self._memory())
        if not self.changes:
            lines.append("What would change it takes the model's profile: plan.explain(profile), or plan again.")
            return lines
        lines.append(self._binds())
        return [*lines, *(self._sentence(change) for change in self.changes), GLOSSARY]

    def _binds(self) -> str:
        """What binds, of which kind, and the step without it."""
        found = next((change for change in self.changes if change.constraint == self.binding), None)
        if found is None:
            return "Binding constraint: none; whatever is loosened, the step stays as long."
        if found.constraint == MEMORY_LIMIT:
            name = f"your memory limit of {gib(self.plan.memory_limit_bytes or 0)}"
        elif found.set_by_user:
            name = f"{found.constraint}, which you asked for"
        else:
            name = found.constraint if found.constraint == found.kind else f"{found.constraint} ({found.kind})"
        step = found.plan.prediction.step_ms * self.plan.global_batch / found.plan.global_batch
        return (
            f"Binding constraint: {name}. If {found.loosened}, {self.plan.global_batch} samples would take "
            f"{_milliseconds(step)} instead of {_milliseconds(self.plan.prediction.step_ms)}."
        )

    def _memory(self) -> str:
        ranks = range(self.plan.pipeline)
        fullest = max(ranks, key=self.plan.device_bytes)
        usable = self.plan.cluster.device.usable_bytes
        limit = self.plan.memory_limit_bytes
        offered = usable if limit is None else min(usable, limit * (1 - FRAGMENTATION))
        return (
            f"Memory: {gib(self.plan.device_bytes(fullest))} of the {gib(offered)} that tensors may fill, on a device "
            f"of pipeline rank {fullest}, the fullest."
        )

    def _sentence(self, change: Change) -> str:
        if change.gain <= WORTH_NAMING:
            return f"If {change.loosened}: nothing to gain."
        same = change.plan.division() == self.plan.division()
        how = "with the same plan" if same else f"with {change.plan.division()}"
        return f"If {change.loosened}: {change.gain:.1%} more tokens/s, {how}."

    def __repr__(self) -> str:
        return "\n".join(self.sentences())

    def _repr_html_(self) -> str:
        first, *rest = (html.escape(sentence) for sentence in self.sentences())
        return f"<p><b>{first}</b></p><ul>{''.join(f'<li>{sentence}</li>' for sentence in rest)}</ul>"


def explain(plan: Plan, profile: Profile | None = None) -> Explanation:
    """See `Plan.explain`."""
    origin = plan.origin
    if profile is not None and profile.signature != plan.signature:
        raise PlanMismatch(
            f"The plan was made for {plan.model} (signature {plan.signature}), and the profile is of {profile.model} "
            f"({profile.signature}). Make the profile of the same model, or plan again.",
            planned=plan.signature,
            profiled=profile.signature,
        )
    if profile is not None:
        check_profile(profile, plan.precision, plan.cluster)
    if origin is not None and profile in (None, origin[0]):
        found, request = origin
        assert isinstance(found, Profile)
        assert isinstance(request, Request)
        return Explanation(plan, _parts(plan), tuple(_changes(plan, found, request)))
    if profile is None:
        return Explanation(plan, _parts(plan), ())
    request = Request(plan.global_batch, plan.seq_len, plan.cluster, plan.memory_limit_bytes)
    free = Search(profile, request).plan()
    if free.division() == plan.division():
        return Explanation(plan, _parts(plan), tuple(_changes(plan, profile, request)))
    changes = [*_changes(plan, profile, _as_divided(plan, request), ()), _freed(plan, free)]
    return Explanation(plan, _parts(plan), tuple(sorted(changes, key=lambda change: -change.gain)))


def _as_divided(plan: Plan, request: Request) -> Request:
    """The request with every degree fixed as the plan has it."""
    degrees: dict[str, Any] = {name: getattr(plan, name) for name in FIXABLE}
    if plan.recompute not in RECOMPUTE:
        del degrees["recompute"]
    return replace(request, **degrees)


def _freed(plan: Plan, free: Plan) -> Change:
    gain = free.prediction.tokens_per_s / plan.prediction.tokens_per_s - 1
    return Change("degrees", "all degrees were left to the search", gain, free, False, "request")


def _parts(plan: Plan) -> tuple[Part, ...]:
    found, step = plan.prediction, plan.prediction.step_ms
    graphs = "" if plan.cuda_graphs else ", and CUDA graphs"
    copies = ", and FSDP2's copies, casts and sums around it" if plan.shards else ""
    rows = (
        ("Compute", found.compute_ms, "forward and backward of the busiest device"),
        *([("Waiting for the host", found.host_ms, HOST + graphs)] if found.host_ms > NOTHING * step else []),
        ("Exposed communication", found.communication_ms, f"what overlap with compute does not hide{copies}"),
        ("Bubble", found.bubble_ms, "the busiest device waits for the other stages"),
        ("Optimiser", found.optimizer_ms, "the update, after the last backward"),
    )
    shown = ((name, ms if abs(ms) > NOTHING * step else 0.0, meaning) for name, ms, meaning in rows)
    return tuple(Part(name, ms, ms / step, meaning) for name, ms, meaning in shown)


def _changes(plan: Plan, profile: Profile, request: Request, asked_for: Sequence[str] = FIXABLE) -> list[Change]:
    """Each constraint loosened; of the degrees that are fixed, those `asked_for`."""
    found = []
    for constraint, kind, words, loosened in _loosened(request, asked_for):
        try:
            other = Search(profile, loosened).plan()
        except PlanInfeasible:
            continue
        gain = other.prediction.tokens_per_s / plan.prediction.tokens_per_s - 1
        own = constraint == MEMORY_LIMIT or "=" in constraint
        found.append(Change(constraint, words, gain, other, own, kind))
    return sorted(found, key=lambda change: -change.gain)


def _loosened(request: Request, asked_for: Sequence[str]) -> Iterator[tuple[str, str, str, Request]]:
    """Each constraint by name and kind, in words what is loosened, and the request without it."""
    cluster, device = request.cluster, request.cluster.device

    def on(**changes: object) -> Request:
        return replace(request, cluster=replace(cluster, device=replace(device, **changes)))  # type: ignore[arg-type]

    faster = {precision: 2 * flops for precision, flops in device.peak_flops.items()}
    yield "arithmetic", "compute", "matrix products ran twice as fast", on(peak_flops=faster)
    wider = on(memory_bandwidth=2 * device.memory_bandwidth)
    yield "memory bandwidth", "compute", "memory were read and written twice as fast", wider
    if device.type != "cpu":
        yield "host", "compute", "the host were twice as fast", on(efficiency=_faster_host(device.efficiency))
    if request.memory_limit_bytes is not None:
        limit = gib(request.memory_limit_bytes)
        lifted = replace(request, memory_limit_bytes=None)
        yield MEMORY_LIMIT, "memory", f"the memory limit of {limit} were lifted", lifted
    else:
        yield "memory", "memory", "each device had twice the memory", on(memory_bytes=2 * device.memory_bytes)
    if cluster.gpus > 1:
        yield from _faster_links(request)
    larger = replace(request, global_batch=2 * request.global_batch)
    yield "global batch", "batch", "the global batch were twice as large", larger
    if request.global_batch % cluster.gpus:
        even = max(1, round(request.global_batch / cluster.gpus)) * cluster.gpus
        words = f"the global batch were {even}, a multiple of {cluster.gpus} devices"
        yield "divisibility", "divisibility", words, replace(request, global_batch=even)
    for name in asked_for:
        value = getattr(request, name)
        cleared: dict[str, Any] = {name: None}
        if value is not None:
            yield f"{name}={value!r}", "request", f"{name} were left to the search", replace(request, **cleared)


def _faster_host(tuned: Efficiency) -> Efficiency:
    of_blocks = ("block_forward_s", "block_backward_s", "host_in_step", "sharded_block_s", "graph_s")
    times = (*of_blocks, "action_s", "recorded_action_s", "collective_s")
    return replace(tuned, **{name: getattr(tuned, name) / 2 for name in times})


def _faster_links(request: Request) -> Iterator[tuple[str, str, str, Request]]:
    cluster = request.cluster

    def twice(link: Link) -> Link:
        return replace(link, bandwidth=2 * link.bandwidth, latency_s=link.latency_s / 2)

    inside = replace(request, cluster=replace(cluster, intra=twice(cluster.intra)))
    yield "links in a node", "link", "links inside a node were twice as fast", inside
    if cluster.nodes > 1:
        between = replace(request, cluster=replace(cluster, inter=twice(cluster.inter)))
        yield "links between nodes", "link", "links between nodes were twice as fast", between


def _milliseconds(ms: float) -> str:
    """`"1,421 ms"`: as exact as the difference between two plans."""
    if ms >= 1e5:
        return duration(ms / 1e3)
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
