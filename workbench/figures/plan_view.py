"""Views of a whole plan: headline numbers, stages of the model, memory per device and the schedule of one step.

`show_plan` returns one interactive figure for JupyterLab and exported pages. `plan_html` shows the same facts without a
script, for GitHub and untrusted notebooks.
"""

from __future__ import annotations

import html
from typing import Any

from workbench.figures import partition_view, theme
from workbench.figures.figure import Figure, mimebundle, subplots
from workbench.figures.timeline_view import add_timeline, timeline_height
from workbench.pipeline_schedules import SCHEDULES
from workbench.planning.plan import Plan, Stage
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
    facts = theme.text(theme.listed(f"{name} {value}" for name, value in headline(plan)))
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


def headline(plan: Plan) -> list[tuple[str, str]]:
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
    """Return the representations of a plan that a notebook stores: interactive figure, static HTML and a sentence."""
    return {**mimebundle(show_plan(plan)), "text/html": plan_html(plan), "text/plain": repr(plan)}


def plan_html(plan: Plan) -> str:
    """Return the plan as static HTML with inline styles: no script, nothing to fetch, every name escaped."""
    cards = "".join(
        '<span style="display:inline-block;margin:0 22px 4px 0">'
        f'<span style="color:{theme.MUTED}">{html.escape(name)}</span> <b>{html.escape(value)}</b></span>'
        for name, value in headline(plan)
    )
    swatch = "display:inline-block;width:9px;height:9px"
    key = " ".join(
        '<span style="white-space:nowrap;font-weight:400">'
        f'<span style="{swatch};background:{color}"></span> {label}</span>'
        for label, color in theme.MEMORY_LOOKS.values()
    )
    longest_ms = max(stage.forward_ms + stage.backward_ms for stage in plan.stages)
    largest = max(stage.memory.total for stage in plan.stages)
    scale_bytes = largest if plan.chunks > 1 else max(largest, min(partition_view.limit_of(plan)[0], 4 * largest))
    holder = "a device" if plan.chunks == 1 else f"a stage; each device holds {plan.chunks}"
    rows = "".join(_stage_row(plan, stage, longest_ms, scale_bytes, largest) for stage in plan.stages)
    style = (
        f"font-family:{html.escape(theme.FONT_FAMILY)};color:{theme.INK};background:#fff;padding:12px;max-width:960px"
    )
    return (
        f'<div style="{style}"><div style="font-size:15px;font-weight:600">{html.escape(_heading(plan))}</div>'
        f'<div style="margin:8px 0">{cards}</div>'
        f'<table style="width:100%;table-layout:fixed;border-collapse:collapse;font-size:12px;color:{theme.INK}">'
        f'<tr style="background:#fff;color:{theme.MUTED}"><th style="width:20%"></th>'
        '<th style="width:48%;text-align:left">blocks, as long as their time</th>'
        f'<th style="width:32%;text-align:left">memory of {holder} {key}</th></tr>{rows}</table></div>'
    )


def _stage_row(plan: Plan, stage: Stage, longest_ms: float, scale_bytes: float, largest: int) -> str:
    stage_ms = stage.forward_ms + stage.backward_ms
    num_blocks = stage.end_block - stage.first_block
    first, last = plan.block_names[stage.first_block], plan.block_names[stage.end_block - 1]
    blocks = f"1 block: {first}" if num_blocks == 1 else f"{num_blocks} blocks: {first} … {last}"
    color = theme.series_color(stage.index)
    bar = (
        f'<div style="width:{96 * stage_ms / longest_ms:.1f}%;background:{color};color:{theme.ink_on(color)};'
        'padding:3px 6px;white-space:nowrap;overflow:hidden;box-sizing:border-box" '
        f'title="{html.escape(first)} … {html.escape(last)}">'
        f"{html.escape(blocks)}</div>"
    )
    segments = ""
    for category, (label, shade) in theme.MEMORY_LOOKS.items():
        size = getattr(stage.memory, category)
        width = f"{75 * size / scale_bytes:.2f}%"
        look = f"display:inline-block;height:16px;width:{width};background:{shade}"
        segments += f'<div style="{look}" title="{label} {gib(size, largest)}"></div>'
    return (
        f'<tr style="background:#fff;color:{theme.INK}">'
        f'<td style="text-align:left;white-space:nowrap"><b>stage {stage.index}</b> · {count(stage.parameters)} · '
        f"{duration(stage_ms / 1e3)}</td>"
        f'<td style="text-align:left">{bar}</td>'
        f'<td style="text-align:left;white-space:nowrap">{segments} {gib(stage.memory.total, largest)}</td></tr>'
    )
