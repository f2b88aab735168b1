"""Why a plan is what it is: where its step goes, and what would change it, found by planning again."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from workbench.cost.cluster import Link
from workbench.cost.profiles import Profile
from workbench.errors import PlanInfeasible, PlanMismatch
from workbench.planning.plan import Plan
from workbench.planning.planner import Search
from workbench.planning.requests import FIXABLE, Request
from workbench.units import duration, gib

MEMORY_LIMIT = "memory limit"
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
        lines += [f"{part.name}: {duration(part.ms / 1e3)} ({part.share:.1%}), {part.meaning}." for part in self.parts]
        lines.append(self._memory())
        if not self.changes:
            lines.append("What would change it takes the model's profile: plan.explain(profile), or plan again.")
            return lines
        lines.append(f"Binding constraint: {self.binding or 'none; whatever is loosened, the step stays as long'}.")
        return lines + [self._sentence(change) for change in self.changes]

    def _memory(self) -> str:
        ranks = range(self.plan.pipeline)
        fullest = max(ranks, key=self.plan.device_bytes)
        usable = self.plan.cluster.device.usable_bytes
        limit = min(usable, self.plan.memory_limit_bytes or usable)
        return (
            f"Memory: {gib(self.plan.device_bytes(fullest))} of {gib(limit)} on pipeline rank {fullest}, the fullest."
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
    if profile is None and origin is not None:
        found, request = origin
        assert isinstance(found, Profile)
        assert isinstance(request, Request)
        return Explanation(plan, _parts(plan), tuple(_changes(plan, found, request)))
    if profile is None:
        return Explanation(plan, _parts(plan), ())
    request = Request(plan.global_batch, plan.seq_len, plan.cluster, plan.memory_limit_bytes)
    return Explanation(plan, _parts(plan), tuple(_changes(plan, profile, request)))


def _parts(plan: Plan) -> tuple[Part, ...]:
    found, step = plan.prediction, plan.prediction.step_ms
    rows = (
        ("Compute", found.compute_ms, "forward and backward of the busiest device"),
        ("Exposed communication", found.communication_ms, "what overlap with compute does not hide"),
        ("Bubble", found.bubble_ms, "the busiest device waits for the other stages"),
        ("Optimiser", found.optimizer_ms, "the update, after the last backward"),
    )
    return tuple(Part(name, ms, ms / step, meaning) for name, ms, meaning in rows)


def _changes(plan: Plan, profile: Profile, request: Request) -> list[Change]:
    found = []
    for constraint, words, loosened in _loosened(request):
        try:
            other = Search(profile, loosened).plan()
        except PlanInfeasible:
            continue
        gain = other.prediction.tokens_per_s / plan.prediction.tokens_per_s - 1
        own = constraint == MEMORY_LIMIT or "=" in constraint
        found.append(Change(constraint, words, gain, other, own))
    return sorted(found, key=lambda change: -change.gain)


def _loosened(request: Request) -> Iterator[tuple[str, str, Request]]:
    """Each constraint by name, in words what is loosened, and the request without it."""
    cluster, device = request.cluster, request.cluster.device

    def on(**changes: object) -> Request:
        return replace(request, cluster=replace(cluster, device=replace(device, **changes)))  # type: ignore[arg-type]

    faster = {precision: 2 * flops for precision, flops in device.peak_flops.items()}
    yield "arithmetic", "matrix products ran twice as fast", on(peak_flops=faster)
    wider = on(memory_bandwidth=2 * device.memory_bandwidth)
    yield "memory bandwidth", "memory were read and written twice as fast", wider
    if request.memory_limit_bytes is not None:
        limit = gib(request.memory_limit_bytes)
        yield MEMORY_LIMIT, f"the memory limit of {limit} were lifted", replace(request, memory_limit_bytes=None)
    else:
        yield "memory", "each device had twice the memory", on(memory_bytes=2 * device.memory_bytes)
    if cluster.gpus > 1:
        yield from _faster_links(request)
    larger = replace(request, global_batch=2 * request.global_batch)
    yield "global batch", "the global batch were twice as large", larger
    for name in FIXABLE:
        value = getattr(request, name)
        cleared: dict[str, Any] = {name: None}
        if value is not None:
            yield f"{name}={value!r}", f"{name} were left to the search", replace(request, **cleared)


def _faster_links(request: Request) -> Iterator[tuple[str, str, Request]]:
    cluster = request.cluster

    def twice(link: Link) -> Link:
        return Link(2 * link.bandwidth, link.latency_s / 2)

    inside = replace(request, cluster=replace(cluster, intra=twice(cluster.intra)))
    yield "links in a node", "links inside a node were twice as fast", inside
    if cluster.nodes > 1:
        between = replace(request, cluster=replace(cluster, inter=twice(cluster.inter)))
        yield "links between nodes", "links between nodes were twice as fast", between
