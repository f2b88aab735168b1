"""`wb.plan` and `wb.search`: from an experiment and a cluster to the fastest plan, and the table of all others."""

from __future__ import annotations

import html
import operator
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Unpack

from workbench.arguments import checked_arguments
from workbench.cost.hardware import FRAGMENTATION, Cluster
from workbench.cost.profile import Profile
from workbench.display import STYLE, Html, html_table, text_table, waiting
from workbench.errors import InvalidArgument, PlanInfeasible
from workbench.experiment import Experiment
from workbench.planning.plan import Candidate, Plan
from workbench.planning.profiling import profile_and_cluster
from workbench.planning.request import Request, memory_limit_bytes, within_limits_of_optimizer
from workbench.planning.search import Search, checked_search, uncollected
from workbench.strategy import RECOMPUTE, SCHEDULES, Choices, Fixed
from workbench.units import MIB, gib, is_count, milliseconds


@checked_arguments
def plan(
    experiment: Experiment,
    cluster: Cluster | None = None,
    *,
    memory_limit_gib: float | None = None,
    **choices: Unpack[Choices],
) -> Plan:
    """Return the fastest plan that fits, by default for this machine; `wb.search` shows the alternatives.

    `cluster` plans for another machine (`Cluster.of("h200", gpus=256)`). `memory_limit_gib` caps the memory of each
    device, in the plan and while it runs. `choices` fixes any of `workbench.strategy.Choices` (pipeline, data, tensor,
    zero, schedule, chunks, micro_batch, recompute, offload_optimizer, cuda_graphs, block_sparse); the planner searches
    the rest.

    Raises `PlanInfeasible` if nothing fits, `CaptureError` if the model cannot be captured, `DataError` if the data
    cannot feed it.

    Examples:
        >>> plan = wb.plan(experiment)
        >>> plan.prediction.step_ms > 0
        True
        >>> elsewhere = wb.plan(experiment, wb.Cluster.of("h200", gpus=2), zero=1)
        >>> elsewhere.zero
        1
    """
    return search(experiment, cluster, memory_limit_gib=memory_limit_gib, **choices).best


@checked_arguments
def search(
    experiment: Experiment,
    cluster: Cluster | None = None,
    *,
    memory_limit_gib: float | None = None,
    **choices: Unpack[Choices],
) -> Plans:
    """Return every plan that the planner considered, as a table; `.best` is the plan that `wb.plan` returns.

    Arguments and errors are those of `wb.plan`.

    Examples:
        >>> plans = wb.search(experiment)
        >>> plans.best.global_batch
        8
        >>> plans[1].prediction.step_ms >= 0
        True
    """
    limit, fixed = memory_limit_bytes(memory_limit_gib), Fixed(**choices)
    within_limits_of_optimizer(experiment, fixed, "element")  # refused at once, whatever the capture will show
    with waiting(f"planning {experiment.model.name}"):
        costs, cluster = profile_and_cluster(experiment, cluster)  # last, because capture takes seconds
        return weigh(costs, costs.precision, Request.of(experiment, cluster, limit, fixed, costs.facts))


def plan_profiled(
    experiment: Experiment, costs: Profile, cluster: Cluster, memory_limit_bytes: int | None = None
) -> Plan:
    """Return what `plan` returns for a model whose profile is there, without another capture."""
    request = Request.of(experiment, cluster, memory_limit_bytes, Fixed(), costs.facts)
    return weigh(costs, costs.precision, request).best


# The table of a search, for a reader who has never seen one.

FASTEST_SHOWN = 14
"""Number of rows shown of options that fit, fastest first."""
MOST_LIMITS = 200
"""Largest number of memory limits of a frontier; each takes a search."""
REJECTED_SHOWN = 6
"""Number of rows shown of options that do not fit, nearest to fitting first."""

COLUMNS = {
    "": "number: plans[number] is that plan",
    "PP": "pipeline-parallel degree: the stages are spread over this many ranks",
    "DP": "data-parallel degree: this many replicas share the global batch",
    "TP": "tensor-parallel degree: this many devices share each matrix product",
    "ZeRO": "what the replicas shard: 0 nothing, 1 the optimiser, 2 also gradients, 3 also parameters",
    "recompute": "activation checkpointing: number of blocks whose activations the backward computes again",
    "schedule": "the order of forwards and backwards; × n: every pipeline rank has n stages",
    "micro-batches": "forwards of one step on one replica, and samples in each",
    "step": "predicted time of one step; ≥: a lower bound, which was enough to rule the option out",
    "memory": "predicted peak of the fullest device",
    "bubble": "share of a step's time during which devices are idle",
    "verdict": "why it was chosen or not",
}

LEGEND = ("PP", "DP", "TP", "ZeRO", "step", "memory", "bubble")
"""Columns that are explained below the table where no mouse can hover over it."""


def weigh(profile: Profile, precision: str, request: Request) -> Plans:
    """Search for the fastest plan, and return every option that was considered."""
    search = checked_search(profile, precision, request)
    with uncollected(), waiting(f"weighing plans for {request.cluster.describe()}") as say:
        best = search.plan(num_simulated=FASTEST_SHOWN, say=say)
    return Plans(best, search.searched, profile, request)


@dataclass(frozen=True)
class Plans:
    """Every option of one search: `plans.best`, and `plans[n]` for row n of the table."""

    best: Plan
    searched: int
    """Number of options; `rows` holds those nearest to the best."""
    profile: Profile = field(repr=False, compare=False)
    request: Request = field(repr=False, compare=False)

    @property
    def rows(self) -> tuple[Candidate, ...]:
        """Candidates: the chosen one first, then the others by their step."""
        return self.best.candidates

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Plan:
        """Return row `number` as a plan of its own; raises `PlanInfeasible` if it does not fit."""
        number = operator.index(number)
        if not -len(self) <= number < len(self):
            raise IndexError(f"There is no row {number}: the table has rows 0 to {len(self) - 1}.")
        row = self.rows[number]
        if row == self.best.candidates[0]:
            return self.best
        return Search(self.profile, self.request.fixed_to(row)).plan()

    def __iter__(self) -> Iterator[Plan]:
        """Yield the plans of the rows that fit, the chosen one first; rows ruled out by a bound are weighed now."""
        for number, row in enumerate(self.rows):
            if row.step_ms is not None:
                with suppress(PlanInfeasible):
                    yield self[number]

    def frontier(self, limits: int = 12) -> tuple[Plan, ...]:
        """Return the fastest plan for each of some memory limits, the leanest first; each can be launched.

        The limits lie between the least memory that any option needs and what a device offers, at equal ratios. A plan
        that is no faster than a leaner one is left out.
        """
        if not is_count(limits) or limits > MOST_LIMITS:
            raise InvalidArgument(f"limits={limits!r:.80} is no number of memory limits. Give 1 to {MOST_LIMITS:,}.")
        try:
            least = checked_search(
                self.profile, self.profile.precision, replace(self.request, memory_limit_bytes=1), False
            )
            needed = least.plan().peak_bytes
        except PlanInfeasible as error:
            needed = int(error.facts["needed_bytes"] / (1 - FRAGMENTATION)) + MIB
        most = max(needed, int(self.request.offered_bytes / (1 - FRAGMENTATION)))
        plans: dict[int, Plan] = {}
        with uncollected():
            for at in range(limits):
                limit = round(needed * (most / needed) ** (at / max(1, limits - 1)))
                with suppress(PlanInfeasible):  # between the least of one stage and that of several on a device
                    request = replace(self.request, memory_limit_bytes=limit)
                    plan = Search(self.profile, request, advises=False).plan()
                    if all(plan.prediction.step_ms < leaner.prediction.step_ms for leaner in plans.values()):
                        plans[limit] = plan
        return tuple(plans.values())

    def shown(self) -> list[tuple[int, Candidate]]:
        """Return the rows that the table shows, with their numbers."""
        numbered = list(enumerate(self.rows))
        fitting = [(n, row) for n, row in numbered if row.step_ms is not None]
        rejected = [(n, row) for n, row in numbered if row.step_ms is None]
        rejected.sort(key=lambda item: item[1].peak_bytes or 0)
        return fitting[:FASTEST_SHOWN] + rejected[:REJECTED_SHOWN]

    def _cells(self) -> list[tuple[str, ...]]:
        return [_cells(number, row, len(self.best.block_names)) for number, row in self.shown()]

    def _heading(self) -> str:
        request = self.request
        return (
            f"{self.best.model} on {request.cluster.describe()}, {request.global_batch} samples of "
            f"{request.seq_len} tokens a step: {self.searched} options weighed, {len(self.shown())} shown; "
            f"{request.offer()}"
        )

    def __repr__(self) -> str:
        table = text_table([tuple(COLUMNS), *self._cells()])
        legend = [f"{name}: {meaning}" for name, meaning in COLUMNS.items() if name in LEGEND]
        return "\n".join([self._heading(), self.best.prediction.basis, table, *legend])

    def _repr_html_(self) -> str:
        titles = [
            Html(f"<span title='{html.escape(words)}'>{html.escape(name)}</span>") for name, words in COLUMNS.items()
        ]
        looks = [
            "font-weight:600" * (row.verdict == "chosen") + "opacity:0.6" * (row.step_ms is None)
            for _, row in self.shown()
        ]
        table = html_table(titles, self._cells(), f"{STYLE};white-space:nowrap", looks)
        legend = " · ".join(
            f"<b>{html.escape(name)}</b> {html.escape(meaning)}" for name, meaning in COLUMNS.items() if name
        )
        return (
            f"<p><b>{html.escape(self._heading())}</b><br>{html.escape(self.best.prediction.basis)}</p>{table}"
            f'<p style="font-size:85%;opacity:0.75;max-width:70em">{legend}</p>'
        )


def _cells(number: int, row: Candidate, blocks: int) -> tuple[str, ...]:
    chunks = f" × {row.chunks}" if row.chunks > 1 else ""
    bound_sign = "" if row.bubble_fraction is not None else "≥ "
    recomputed = {"full": row.full_blocks, "selective": row.selective_blocks}
    each = ", ".join(f"{recompute} in {count}" for recompute, count in recomputed.items() if count)
    mixed = f"{each} of {blocks}" if each else row.recompute
    return (
        str(number),
        str(row.pipeline),
        str(row.data),
        str(row.tensor),
        str(row.zero) + (", optimiser on host" if row.offload_optimizer else ""),
        mixed if row.recompute == "mixed" else row.recompute if row.recompute in RECOMPUTE else "–",
        SCHEDULES[row.schedule].words + chunks if row.pipeline > 1 else "–",
        f"{row.num_microbatches} × {row.micro_batch}"
        + (", CUDA graphs" if row.cuda_graphs else "")
        + (", block-sparse" if row.block_sparse else ""),
        "–" if row.step_ms is None else bound_sign + milliseconds(row.step_ms),
        "–" if row.peak_bytes is None else gib(row.peak_bytes),
        "–" if row.bubble_fraction is None else f"{row.bubble_fraction:.1%}",
        row.verdict,
    )
