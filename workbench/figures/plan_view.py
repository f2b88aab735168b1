"""A whole plan in one figure: headline numbers, stages of the model, memory per device and the schedule of one step."""

from __future__ import annotations

from typing import Any

from workbench.figures import partition_view, theme
from workbench.figures.figure import Figure, mimebundle, subplots
from workbench.figures.timeline_view import add_timeline, timeline_height
from workbench.pipeline_schedules import SCHEDULES
from workbench.planning.plan import Plan
from workbench.planning.prediction import timeline as simulated
from workbench.units import count, duration, gib

GAP_PX, BELOW_TITLES_PX = 124, 56
"""Height between the partition and the timeline, which holds axis titles and a legend, and the legend's place in it."""


def show_plan(plan: Plan) -> Figure:
    """Draw partition, memory and timeline of a plan in one figure."""
    lanes = simulated(plan).lanes
    upper = partition_view.partition_height(plan)
    lower = timeline_height(len(lanes))
    inner = upper + GAP_PX + lower
    figure = subplots(
        rows=2,
        cols=2,
        specs=[[{}, {}], [{"colspan": 2}, None]],
        column_widths=partition_view.COLUMN_WIDTHS,
        row_heights=[upper / (upper + lower), lower / (upper + lower)],
        horizontal_spacing=partition_view.COLUMN_SPACING,
        vertical_spacing=GAP_PX / inner,
    )
    partition_view.add_partition(figure, plan)
    partition_view.add_memory(figure, plan)
    for trace in add_timeline(figure, lanes, row=2, col=1):
        trace.legend = "legend2"
    facts = theme.text(theme.listed(f"{name} {value}" for name, value in _headline(plan)))
    return figure.laid_out(
        height=inner + 180,
        title=theme.title(theme.text(_heading(plan)), facts),
        margin={"t": 104, "b": 76, "r": 16},
        barmode="stack",
        uniformtext={"mode": "hide", "minsize": 8},
        legend={**theme.LEGEND_BELOW, "y": 1 - (upper + BELOW_TITLES_PX) / inner, "yref": "paper", "yanchor": "top"},
        legend2=theme.LEGEND_BELOW,
    )


def _heading(plan: Plan) -> str:
    """Return model, cluster and parallel degrees in words."""
    parts = []
    if plan.pipeline > 1:
        ranks = "" if plan.chunks == 1 else f" on {plan.pipeline} ranks"
        parts.append(f"{len(plan.stages)}-stage pipeline{ranks} ({SCHEDULES[plan.schedule].words})")
    if plan.tensor > 1:
        parts.append(f"tensor parallel {plan.tensor}")
    if plan.data > 1:
        sharding = f", ZeRO {plan.zero}" if plan.zero else ""
        parts.append(f"data parallel {plan.data}{sharding}")
    words = [" × ".join(parts) or "one device"]
    words += [plan.recompute_words()] if plan.recompute != "none" else []
    words += ["CUDA graphs"] if plan.cuda_graphs else []
    words += ["block-sparse weights"] if plan.block_sparse else []
    return f"{plan.model} on {plan.cluster.describe()}: {', '.join(words)}"


def _headline(plan: Plan) -> list[tuple[str, str]]:
    """Return the most important numbers of a plan as (name, value)."""
    predicted = plan.prediction
    limit, _ = partition_view.limit_of(plan)
    rows = [
        ("step", duration(predicted.step_ms / 1e3)),
        ("tokens/s", count(predicted.tokens_per_s)),
        ("peak", f"{gib(plan.peak_bytes)} of {gib(limit)} a device"),
        ("batch", f"{plan.data} × {plan.num_microbatches} × {plan.micro_batch} = {plan.global_batch} samples"),
    ]
    if predicted.mfu is not None:
        rows.insert(2, ("MFU", f"{predicted.mfu:.1%}"))
    if plan.pipeline > 1:
        rows.insert(-1, ("bubble", f"{predicted.bubble_fraction:.1%}"))
    return rows


def plan_mimebundle(plan: Plan) -> dict[str, Any]:
    """Return the representations of a plan that a notebook stores: interactive figure, picture and a sentence."""
    return {**mimebundle(show_plan(plan)), "text/plain": repr(plan)}
