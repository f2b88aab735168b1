"""`wb.plan` and `wb.search`: an experiment is captured and priced, its options are searched and shown as a table."""

from __future__ import annotations

import fnmatch
import html
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Unpack

from workbench.base.arguments import checked_arguments
from workbench.base.display import STYLE, Html, html_table, text_table, waiting
from workbench.base.errors import CaptureError, InvalidArgument, InvalidExperiment, PlanInfeasible, in_words, suggestion
from workbench.base.units import MIB, gib, is_count, milliseconds
from workbench.cost.hardware import FRAGMENTATION, Cluster
from workbench.cost.profile import Profile
from workbench.experiment import Experiment
from workbench.models import Model
from workbench.planning.plan import Candidate, Plan
from workbench.planning.request import Request, checked_cluster, memory_limit_bytes, within_limits_of_optimizer
from workbench.planning.search import Search, checked_search, uncollected
from workbench.strategy import RECOMPUTE, SCHEDULES, Choices, Fixed

if TYPE_CHECKING:
    from torch import nn

    from workbench.capture import Graph
    from workbench.capture.captured_model import CapturedModel, Facts

NOT_ON_TWO = "its forward does not run on two samples"
"""Reason why the batch stays whole of a model that is captured with all of it."""
NOT_GATHERED = ("samples", "sparsity")
"""Fields of an experiment with which the samples of a loss that compares them are not gathered."""
CAPTURE_BATCH = 2
"""Samples of the batch that a model is captured with for planning; costs are linear in the micro-batch."""
MOST_CAPTURED = 4096
"""Largest micro-batch that is captured beyond the global batch, since its samples are made."""


@checked_arguments
def plan(
    experiment: Experiment,
    cluster: Cluster | None = None,
    *,
    memory_limit_gib: float | None = None,
    fresh: bool = False,
    **choices: Unpack[Choices],
) -> Plan:
    """Return the fastest plan that fits, by default for this machine; `wb.search` shows the alternatives.

    `cluster` plans for another machine (`Cluster.of("h200", gpus=256)`). `memory_limit_gib` caps the memory of each
    device, in the plan and while it runs. `choices` fixes any of `workbench.strategy.Choices` (pipeline, data, tensor,
    zero, schedule, chunks, micro_batch, recompute, offload_optimizer, cuda_graphs, block_sparse); the planner searches
    the rest. A model that was captured before, with the same code, libraries and shapes, is read from this machine's
    cache; `fresh` captures it anew.

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
    return search(experiment, cluster, memory_limit_gib=memory_limit_gib, fresh=fresh, **choices).best


@checked_arguments
def search(
    experiment: Experiment,
    cluster: Cluster | None = None,
    *,
    memory_limit_gib: float | None = None,
    fresh: bool = False,
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
    from workbench.capture.stored_captures import captured_anew  # imports torch, which takes a second

    with waiting(f"planning {experiment.model.name}"), captured_anew() if fresh else nullcontext():
        costs, cluster = profile_and_cluster(experiment, cluster, fixed)  # last, because capture takes seconds
        return weigh(costs, costs.precision, Request.of(experiment, cluster, limit, fixed, costs.facts))


def plan_profiled(
    experiment: Experiment, costs: Profile, cluster: Cluster, memory_limit_bytes: int | None = None
) -> Plan:
    """Return what `plan` returns for a model whose profile is there, without another capture."""
    request = Request.of(experiment, cluster, memory_limit_bytes, Fixed(), costs.facts)
    return weigh(costs, costs.precision, request).best


def weigh(profile: Profile, precision: str, request: Request) -> Plans:
    """Search for the fastest plan, and return every option that was considered."""
    search = checked_search(profile, precision, request)
    with uncollected(), waiting(f"weighing plans for {request.cluster.describe()}") as say:
        best = search.plan(num_simulated=FASTEST_SHOWN, say=say)
    return Plans(best, search.searched, profile, request)


# The profile of an experiment's model: captured, priced by the device's constants, corrected by measurements.


@checked_arguments
def profile(experiment: Experiment, cluster: Cluster | None = None) -> Profile:
    """Return what each block of the experiment's model costs on a device of `cluster`, by default of this machine.

    `experiment` says what is trained: model, sequence length, precision, and whether blocks are compiled.

    Where this machine has the cluster's GPU, each block type is measured on it (about a minute, once for each model,
    device and torch version). Elsewhere the device's constants price it.
    """
    return profile_and_cluster(experiment, cluster)[0]


@checked_arguments
def graph(experiment: Experiment, micro_batch: int = CAPTURE_BATCH) -> Graph:
    """Return the experiment's model as a graph of blocks, without weights.

    Args:
        experiment: what is trained; its model is built on the meta device.
        micro_batch: number of samples, from 1, in the shapes of the graph.

    Raises `CaptureError` for a model that cannot be captured, with the line that stands in the way.

    Examples:
        >>> wb.planning.graph(experiment).blocks[0].name
        'bert.embeddings'
    """
    from workbench.capture.captured_model import CapturedModel

    most = max(MOST_CAPTURED, experiment.largest_batch)
    if not 1 <= micro_batch <= most:  # its samples are made, to be followed through forward
        raise InvalidArgument(f"micro_batch={micro_batch:,} is no number of samples to capture. Give 1 to {most:,}.")
    return CapturedModel(experiment, micro_batch).graph


def profile_and_cluster(
    experiment: Experiment, cluster: Cluster | None, fixed: Fixed | None = None
) -> tuple[Profile, Cluster]:
    """Return the profile, and the cluster that it is for: this machine if none was given.

    Raises `PlanInfeasible` for `fixed` choices that the optimiser rules out whatever the capture will show.
    """
    from workbench.measure.block_probes import measured_blocks

    within_limits_of_optimizer(experiment, fixed or Fixed(), "element")
    experiment.reading.check()
    if cluster is not None:
        checked_cluster(cluster)
    with measured_blocks(experiment, cluster) as measured:
        return measured.correct(analytic_profile(experiment, measured.cluster)), measured.cluster


def analytic_profile(experiment: Experiment, cluster: Cluster) -> Profile:
    """Return the profile of the experiment's model by the device's constants, without measurements."""
    from workbench.cost.graph_profiler import profile_graph, with_optimizer
    from workbench.cost.profile import computed_on, with_gathered
    from workbench.cost.sparse_matrices import SparseMatrices

    facts, graph, towers = capture_to_plan(experiment)
    precision, compiled = computed_on(cluster.device, experiment)
    costed = partial(
        profile_graph,
        device=cluster.device,
        precision=precision,
        compiled=compiled,
        deterministic=experiment.numerics.deterministic,
    )
    costs = costed(graph, labelled_share=facts.labelled_share, sparse=SparseMatrices.of(experiment, graph))
    costs = replace(with_optimizer(costs, experiment, graph), facts=facts)
    if not towers:
        return costs
    part, whole = towers
    in_parts = with_optimizer(costed(part), experiment, graph)
    return with_gathered(costs, in_parts, costed(whole), part, whole.micro_batch)


def capture_to_plan(experiment: Experiment) -> tuple[Facts, Graph, Sequence[Graph]]:
    """Capture the experiment's model, and return all that is known of it, and its graph as it is planned.

    The graph has the coupling and the notes of the facts. Where a loss that compares samples can gather them, further
    graphs have that comparison as their last block: of the samples that the model is captured with, and of the batch.

    Raises `CaptureError`, and `InvalidExperiment` for an optimiser that does not suit the model.
    """
    from workbench.capture.blocks.hidden_matrices import matrices_in_words
    from workbench.capture.losses import labelled_share

    try:
        facts, examples = facts_of(experiment, captures=True), experiment.reading.examples()
    except CaptureError as error:
        if not experiment.data.separates_documents or isinstance(experiment.model, Model):
            raise
        raise CaptureError(
            f"{error} With separate_documents=True, forward is also given attention_mask, of shape (B, 1, S, S) and "
            "True where a token may attend to another. A model that takes none of that shape trains without it."
        ) from error
    assert facts.captured is not None
    captured, graph = facts.captured, facts.captured.graph
    if graph.parameter_count <= MOST_TRIED_BY_PLAN:
        check_labels(experiment, experiment.build)
        check_documents(experiment, experiment.build)

    # Patterns of the optimiser: a pattern that matches no parameter is a misspelt name.
    names = list(graph.parameters)
    factors = ("rate_scale", "decay_scale", "eps_scale", "grad_norm_scale", "fused_projections")
    for name in (*factors, "clip_norm", "trained_during", "parameters", "adamw"):
        patterns = getattr(experiment.optimizer, name)
        for pattern in patterns if isinstance(patterns, Mapping | tuple) else ():
            if not fnmatch.filter(names, pattern):
                raise InvalidExperiment(
                    f"The pattern {pattern!r} of {name} matches none of the {len(names)} parameters of "
                    f"{experiment.model.name}. {suggestion(pattern, names)} They are in "
                    "wb.planning.graph(experiment).parameters."
                )

    # Coupling: a batch whose samples the loss compares stays whole, or is gathered, unless the user allowed otherwise.
    coupled, division = facts.coupled or (), captured.division
    notes = [*graph.notes, *([division.note] if division.note else [])]
    if experiment.optimizer.record.updates_matrices:
        notes += matrices_in_words(graph, experiment.optimizer)
    towers: Sequence[Graph] = ()
    if coupled and experiment.numerics.batch_coupling == "allow":
        notes.append(
            f"The loss compares samples of one batch ({coupled[0]}) and batch_coupling is 'allow': it compares those "
            f"of one micro-batch, so that its value depends on the plan."
        )
        coupled = ()
    if coupled:
        asked = [name for name in NOT_GATHERED if getattr(experiment, name) is not None]
        fields = f"Its samples are not gathered over micro-batches in an experiment with {' or '.join(asked)}."
        if graph.micro_batch != CAPTURE_BATCH:
            facts = replace(facts, not_gathered=f"Its samples are not gathered, since {NOT_ON_TWO}.")
        else:
            facts = replace(facts, not_gathered=fields if asked else captured.gathering_obstacle)
        if not facts.not_gathered:
            towers = [captured.tower_and_tail(samples) for samples in (CAPTURE_BATCH, experiment.largest_batch)]
            facts = replace(facts, is_gathering_compared=captured.is_gathering_compared)

    # Prices: labels that a head computes, and what the user's data add to the notes.
    share = experiment.reading.labelled_share() if examples is None else labelled_share(graph, examples)
    notes += [note] if (note := experiment.reading.note()) else []
    planned = replace(graph, coupled=coupled, notes=tuple(notes))
    return replace(facts, labelled_share=share), planned, towers


MOST_TRIED_BY_PLAN = 30_000_000
"""Parameters up to which `check_labels` builds a model to plan it; a larger one is tried by a rank, which has it."""


def check_labels(experiment: Experiment, build: Callable[[], nn.Module]) -> None:
    """Raise `InvalidExperiment` for a user-defined causal model of text that sees the token which it predicts.

    The models of `transformers` shift the labels, which are the inputs. One that does not copies them.
    """
    from workbench.capture.captured_model import random_samples
    from workbench.capture.coupling.division import sees_its_labels

    model, loss = experiment.model, experiment.loss
    if not model.is_user_defined or experiment.reading.objective != "clm":
        return
    if sees_its_labels(build, random_samples(experiment)(2, 0), loss, model.name):
        raise InvalidExperiment(
            f"{model.name} sees the tokens that it predicts, and would learn to copy its input: what its loss expects "
            "of a label depends on the token at the label's own position. Labels of the objective 'clm' are the "
            "inputs, which the model shifts: let the loss compare logits[:, :-1] with labels[:, 1:], and no position "
            "attend to a later one. For other labels give a dataset of your own."
        )


def check_documents(experiment: Experiment, build: Callable[[], nn.Module]) -> None:
    """Raise `InvalidExperiment` for a model that should read documents apart, and does not.

    The named models do, which tests show; other models may overlook the mask or the positions that they are given.
    """
    from workbench.capture.captured_model import random_samples
    from workbench.capture.coupling.division import counts_otherwise, mixes_documents

    model = experiment.model
    if not experiment.data.separates_documents or isinstance(model, Model):
        return
    samples = random_samples(experiment)(2, 0)
    if not model.is_user_defined and counts_otherwise(build, samples, experiment.loss, model.name):
        raise InvalidExperiment(
            f"{model.name} reads a text otherwise if it is given positions from 0 on and a mask, as for each document "
            "with separate_documents=True: it counts from another number, as RoBERTa does, or attends within a window. "
            "Remove separate_documents=True, or take weights of another architecture."
        )
    if mixes_documents(build, samples, experiment.loss, model.name):
        raise InvalidExperiment(
            f"{model.name} does not read the documents of a sample apart, as separate_documents=True asks: the loss of "
            "a document depends on the documents beside it, or on its place in the sample. Let its forward take "
            "attention_mask, of shape (B, 1, S, S) and True where a token may attend to another, and position_ids, of "
            "shape (B, S), if positions are learned, and use both; or remove separate_documents=True."
        )


def facts_of(experiment: Experiment, captured: CapturedModel | None = None, *, captures: bool = False) -> Facts:
    """Return what the gate before a training, and every rank, compare with a plan.

    The model is captured if `captures` says so; the facts of one that is not captured are those that need no capture.
    `captured` is the experiment's model, if there is one. Raises `InvalidExperiment` for an optimiser of the user's
    that cannot train.
    """
    from workbench.capture.captured_model import CapturedModel

    asked, whole = captured or CapturedModel(experiment, CAPTURE_BATCH), experiment.largest_batch
    reach = experiment.optimizer.record.reach
    if reach is None:
        from workbench.optimizers.building import reach_of_update

        reach = reach_of_update(experiment, asked.trained_shapes)
    try:
        return asked.facts(reach, captures=captures)
    except CaptureError as error:
        if captured is not None or error.__cause__ is None or whole == CAPTURE_BATCH:
            raise
        # A forward may need more samples than two, in groups of four, say: then the batch stays whole.
        try:
            facts = CapturedModel(experiment, whole).facts(reach, captures=True)
        except CaptureError:
            raise error from error.__cause__
        return replace(facts, coupled=(f"{NOT_ON_TWO}: {in_words(error.__cause__)}",))


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
