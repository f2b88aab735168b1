"""A whole plan at one glance: headline numbers, stages on the model, memory per device, one step's schedule.

Two forms of the same facts. `show_plan` is one plain `go.Figure`: interactive in JupyterLab, stored with a
PNG beside it, and alive in an exported page. `plan_html` needs no script at all: it is what GitHub and an
untrusted notebook show.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.figures import theme
from workbench.figures._partition import (
    MEMORY_LABELS,
    BlockView,
    add_memory,
    add_partition,
    limit_of,
    memory_legend,
    partition_height,
    rows_per_stage,
)
from workbench.figures._timeline import Lanes, add_timeline, planned_lanes, timeline_height, timeline_legend
from workbench.figures.pages import mimebundle
from workbench.planning.plan import SCHEDULE_WORDS, Memory, Plan, Stage, recompute_words
from workbench.units import count, duration, gib

GAP_PX = 118
"""Between the partition and the timeline: an axis title and two legends."""


def show_plan(plan: Plan, lanes: Lanes | None = None, blocks: Sequence[BlockView] | None = None) -> go.Figure:
    """Partition, memory and timeline of a plan in one figure; end a cell with it."""
    lanes = planned_lanes(plan) if lanes is None else lanes
    upper = partition_height(len(plan.stages), rows_per_stage(plan))
    lower = timeline_height(len(lanes))
    inner = upper + GAP_PX + lower
    figure = make_subplots(
        rows=2,
        cols=2,
        specs=[[{}, {}], [{"colspan": 2}, None]],
        column_widths=[0.62, 0.38],
        row_heights=[upper / (upper + lower), lower / (upper + lower)],
        horizontal_spacing=0.03,
        vertical_spacing=GAP_PX / inner,
    )
    add_partition(figure, plan, blocks, row=1, col=1)
    add_memory(figure, plan, row=1, col=2)
    _add_timeline(figure, lanes)
    figure.update_layout(
        template=theme.TEMPLATE,
        height=inner + 160,
        title=theme.title(_heading(plan), _subheading(plan)),
        margin={"t": 104, "b": 56, "r": 24},
        barmode="stack",
        uniformtext={"mode": "hide", "minsize": 8},
        legend={**memory_legend(), "y": 1 - (upper + 46) / inner, "yref": "paper", "yanchor": "top"},
        legend2={**timeline_legend()["legend"], "y": lower / inner + 4 / inner, "borderwidth": 0, "x": 1},
    )
    return figure


def _add_timeline(figure: go.Figure, lanes: Lanes) -> None:
    before = len(figure.data)
    add_timeline(figure, lanes, row=2, col=1)
    for trace in figure.data[before:]:
        trace.legend = "legend2"


def _heading(plan: Plan) -> str:
    return theme.text(f"{plan.model} on {plan.cluster.describe()}: {degrees(plan)}")


def _subheading(plan: Plan) -> str:
    return theme.text(" · ".join(f"{name} {value}" for name, value in headline(plan)))


def degrees(plan: Plan) -> str:
    """How the model is divided, in words."""
    parts = []
    if plan.pipeline > 1:
        ranks = "" if plan.chunks == 1 else f" on {plan.pipeline} ranks"
        parts.append(f"{len(plan.stages)}-stage pipeline{ranks} ({SCHEDULE_WORDS[plan.schedule]})")
    if plan.tensor > 1:
        parts.append(f"tensor parallel {plan.tensor}")
    if plan.data > 1:
        sharding = f", ZeRO {plan.zero}" if plan.zero else ""
        parts.append(f"data parallel {plan.data}{sharding}")
    words = [" × ".join(parts) or "one device"]
    words += [recompute_words(plan)] if plan.recompute != "none" else []
    words += ["CUDA graphs"] if plan.cuda_graphs else []
    return ", ".join(words)


def headline(plan: Plan) -> list[tuple[str, str]]:
    """The numbers to read first, as (name, value)."""
    predicted = plan.prediction
    limit, _ = limit_of(plan)
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
    """What a notebook stores for a plan: the interactive figure, `plan_html` for where none is drawn, the sentence."""
    return {**mimebundle(show_plan(plan)), "text/html": plan_html(plan), "text/plain": repr(plan)}


def plan_html(plan: Plan) -> str:
    """The plan as static HTML with inline styles: no script, nothing to fetch, every name escaped."""
    cards = "".join(_card(name, value) for name, value in headline(plan))
    longest_ms = max(stage.forward_ms + stage.backward_ms for stage in plan.stages)
    largest = max(stage.memory.total for stage in plan.stages)
    scale_bytes = largest if plan.chunks > 1 else max(largest, min(limit_of(plan)[0], 4 * largest))
    holder = "a device" if plan.chunks == 1 else f"a stage; each device holds {plan.chunks}"
    rows = "".join(_stage_row(plan, stage, longest_ms, scale_bytes) for stage in plan.stages)
    heading = html.escape(f"{plan.model} on {plan.cluster.describe()}: {degrees(plan)}")
    style = (
        f"font-family:{html.escape(theme.FONT_FAMILY)};color:{theme.INK};background:#fff;padding:12px;max-width:960px"
    )
    return (
        f'<div style="{style}"><div style="font-size:15px;font-weight:600">{heading}</div>'
        f'<div style="margin:8px 0">{cards}</div>'
        f'<table style="width:100%;table-layout:fixed;border-collapse:collapse;font-size:12px;color:{theme.INK}">'
        f'<tr style="background:#fff;color:{theme.MUTED}"><th style="width:20%"></th>'
        '<th style="width:48%;text-align:left">blocks, as long as their time</th>'
        f'<th style="width:32%;text-align:left">memory of {holder} {_memory_key()}</th></tr>{rows}</table></div>'
    )


def _card(name: str, value: str) -> str:
    return (
        '<span style="display:inline-block;margin:0 22px 4px 0">'
        f'<span style="color:{theme.MUTED}">{html.escape(name)}</span> <b>{html.escape(value)}</b></span>'
    )


def _memory_key() -> str:
    return " ".join(
        f'<span style="white-space:nowrap;font-weight:400"><span style="{_swatch(theme.MEMORY_COLORS[kind])}"></span>'
        f" {label}</span>"
        for kind, label in MEMORY_LABELS.items()
    )


def _swatch(color: str) -> str:
    return f"display:inline-block;width:9px;height:9px;background:{color}"


def _stage_row(plan: Plan, stage: Stage, longest_ms: float, scale_bytes: float) -> str:
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
    segments = "".join(_memory_segment(stage.memory, item.name, scale_bytes) for item in fields(Memory))
    return (
        f'<tr style="background:#fff;color:{theme.INK}">'
        f'<td style="text-align:left;white-space:nowrap"><b>stage {stage.index}</b> · {count(stage.parameters)} · '
        f"{duration(stage_ms / 1e3)}</td>"
        f'<td style="text-align:left">{bar}</td>'
        f'<td style="text-align:left;white-space:nowrap">{segments} {gib(stage.memory.total)}</td></tr>'
    )


def _memory_segment(memory: Memory, kind: str, scale_bytes: float) -> str:
    size = getattr(memory, kind)
    style = (
        f"display:inline-block;height:16px;width:{75 * size / scale_bytes:.2f}%;background:{theme.MEMORY_COLORS[kind]}"
    )
    return f'<div style="{style}" title="{MEMORY_LABELS[kind]} {gib(size)}"></div>'
