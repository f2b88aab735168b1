"""How a plan divides a model: blocks coloured by stage, and the memory of a device of each stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.figures import theme
from workbench.planning.plan import RECOMPUTE_WORDS, Memory, Plan, Stage
from workbench.tensors import TensorSpec
from workbench.units import GIB, MIB, count, duration, gib

BLOCKS_PER_ROW, BLOCKS_PER_ROW_OF_HUNDREDS = 30, 24
"""More than these in one stage and its blocks wrap into several rows; three digits need wider blocks than two."""

MARGIN_TOP, MARGIN_BOTTOM = 100, 86

SHORT_WORDS = {"embeddings": "emb", "embed_tokens": "emb", "wte": "emb", "predictions": "head", "cls": "head"}

MEMORY_LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimiser",
    "activations": "activations",
    "workspace": "workspace",
}


@dataclass(frozen=True)
class BlockView:
    """What is known of one block beyond its name; `ms` is forward and backward of one micro-batch."""

    parameters: int | None = None
    ms: float | None = None


@dataclass(frozen=True)
class Cell:
    """One block as a rectangle: `row` counts from the top, `start` and `width` in ms."""

    index: int
    row: int
    start: float
    width: float


def partition(
    plan: Plan, blocks: Sequence[BlockView] | None = None, crossing: Mapping[int, Sequence[TensorSpec]] | None = None
) -> go.Figure:
    """The model's blocks in a row per stage, as long as the stage's time, with a device's memory beside it.

    A stage whose row is longer than the others holds the pipeline up. Blocks within a stage are drawn
    equally wide unless `blocks` says what each of them takes (one `BlockView` for every block of the
    plan). Memory is the predicted peak of one device of each pipeline rank, by kind, against the device's
    memory or the limit that the user gave: beside its stage, or in a row of its own where a rank has several
    stages. `crossing` tells, for each stage but the last, which tensors of one micro-batch it sends on
    (`Graph.crossing`); they stand at the end of its row, hover names them.
    """
    rows = rows_per_stage(plan)
    figure = make_subplots(rows=1, cols=2, column_widths=[0.62, 0.38], horizontal_spacing=0.03)
    add_partition(figure, plan, blocks, row=1, col=1)
    if crossing:
        add_crossing(figure, plan, crossing, row=1, col=1)
    add_memory(figure, plan, row=1, col=2)
    figure.update_layout(
        template=theme.TEMPLATE,
        height=partition_height(len(plan.stages), rows) + MARGIN_TOP + MARGIN_BOTTOM,
        title=theme.title(theme.text(f"{plan.model} on {plan.cluster.describe()}"), theme.text(plan.describe())),
        margin={"t": MARGIN_TOP, "b": MARGIN_BOTTOM, "r": 24},
        legend=memory_legend(),
        barmode="stack",
        uniformtext={"mode": "hide", "minsize": 8},
    )
    return figure


# Plotly hides text that does not fit (`uniformtext`) only if the last subplot with bars has text in its bars:
# drawing each subplot forgets the sizes of the one before. Memory, drawn last, therefore carries its figures.


def memory_legend() -> dict[str, object]:
    """The kinds of memory in a row along the lower edge, in the order in which they are stacked."""
    return {
        "orientation": "h",
        "x": 1,
        "xanchor": "right",
        "y": 0.0,
        "yref": "container",
        "yanchor": "bottom",
        "traceorder": "normal",
        "borderwidth": 0,
    }


def rows_per_stage(plan: Plan) -> int:
    most = max(stage.end_block - stage.first_block for stage in plan.stages)
    return math.ceil(most / (BLOCKS_PER_ROW if len(plan.block_names) <= 100 else BLOCKS_PER_ROW_OF_HUNDREDS))


def partition_height(num_stages: int, rows: int) -> int:
    """Pixels of the plot area: lanes of 44 px, thinner where there are many, taller where blocks wrap."""
    lane = max(22, min(44, 480 // num_stages)) if rows == 1 else max(44, 24 * rows)
    return max(56, lane * num_stages)


def cells(stage: Stage, blocks: Sequence[BlockView] | None, rows: int) -> list[Cell]:
    """The stage's blocks laid out left to right, wrapped into `rows` rows of equal numbers."""
    indices = range(stage.first_block, stage.end_block)
    stage_ms = stage.forward_ms + stage.backward_ms
    known = [blocks[i].ms for i in indices] if blocks is not None else [None]
    total = sum(ms or 0.0 for ms in known)
    widths = [
        stage_ms * (blocks[i].ms or 0.0) / total if blocks is not None and total > 0 else stage_ms / len(indices)
        for i in indices
    ]
    per_row = math.ceil(len(indices) / rows)
    laid: list[Cell] = []
    start = 0.0
    for position, (index, width) in enumerate(zip(indices, widths, strict=True)):
        if position % per_row == 0:
            start = 0.0
        laid.append(Cell(index, position // per_row, start, width))
        start += width
    return laid


def add_partition(figure: go.Figure, plan: Plan, blocks: Sequence[BlockView] | None, *, row: int, col: int) -> None:
    """Draw the stages' lanes into one subplot."""
    rows = rows_per_stage(plan)
    laid = [cells(stage, blocks, rows) for stage in plan.stages]
    for stage, stage_cells in zip(plan.stages, laid, strict=True):
        figure.add_trace(_stage_trace(plan, stage, stage_cells, blocks, rows), row=row, col=col)
    longest = max(cell.start + cell.width for stage_cells in laid for cell in stage_cells)
    figure.update_xaxes(
        title_text="forward + backward of one micro-batch (ms)" if rows == 1 else "blocks of each stage, wrapped",
        showticklabels=rows == 1,
        ticks="outside" if rows == 1 else "",
        showgrid=rows == 1,
        range=[0, longest * 1.01],
        row=row,
        col=col,
    )
    figure.update_yaxes(
        tickmode="array",
        tickvals=[stage.index for stage in plan.stages],
        ticktext=[_lane_label(plan, stage) for stage in plan.stages],
        range=[len(plan.stages) - 0.5, -0.5],
        showgrid=False,
        ticklabelstandoff=6,
        row=row,
        col=col,
    )


def add_crossing(
    figure: go.Figure, plan: Plan, crossing: Mapping[int, Sequence[TensorSpec]], *, row: int, col: int
) -> None:
    """Between two stages, what one sends to the other: a small arrow below the upper one's row."""
    rows = rows_per_stage(plan)
    sends = [stage for stage in plan.stages[:-1] if crossing.get(stage.index)]
    longest = max(cell.start + cell.width for stage in plan.stages for cell in cells(stage, None, rows))
    figure.add_trace(
        go.Scatter(
            x=[0.5 * longest] * len(sends),
            y=[stage.index + 0.5 for stage in sends],
            mode="markers",
            marker={
                "symbol": "triangle-down",
                "size": 13,
                "color": theme.INK,
                "line": {"color": "white", "width": 1.5},
            },
            hovertext=[_crossing_hover(stage, crossing[stage.index]) for stage in sends],
            hoverinfo="text",
            cliponaxis=False,
            showlegend=False,
            meta="crossing",
        ),
        row=row,
        col=col,
    )


def _crossing_hover(stage: Stage, specs: Sequence[TensorSpec]) -> str:
    lines = [f"<b>stage {stage.index} → {stage.index + 1}</b>: {gib(stage.send_bytes)} a micro-batch"]
    lines += [f"{theme.text(spec.name)}  {spec.dtype} {' × '.join(map(str, spec.shape))}" for spec in specs[:12]]
    return "<br>".join(lines + ([f"and {len(specs) - 12} more"] if len(specs) > 12 else []))


def _lane_label(plan: Plan, stage: Stage) -> str:
    num_blocks = stage.end_block - stage.first_block
    replicas = f" × {plan.data * plan.tensor}" if plan.data * plan.tensor > 1 else ""
    facts = f"{num_blocks} block{'s' * (num_blocks > 1)} · {count(stage.parameters)}"
    separator = "<br>" if len(plan.stages) <= 10 else " "
    return f"<b>stage {stage.index}</b>{replicas}{separator}<span style='color:{theme.MUTED}'>{facts}</span>"


def _stage_trace(
    plan: Plan, stage: Stage, laid: Sequence[Cell], blocks: Sequence[BlockView] | None, rows: int
) -> go.Bar:
    lane = 0.86
    thick = lane / rows
    color = theme.series_color(stage.index)
    shades = [theme.pale(color, 0.18 if cell.index % 2 else 0.0) for cell in laid]
    top = stage.index - lane / 2
    return go.Bar(
        orientation="h",
        x=[cell.width for cell in laid],
        base=[cell.start for cell in laid],
        y=[top + thick * (cell.row + 0.5) for cell in laid],
        width=[thick * (0.96 if rows == 1 else 0.9)] * len(laid),
        marker={"color": shades, "line": {"color": "white", "width": 1}},
        text=[_short_name(plan.block_names[cell.index], cell.index) for cell in laid],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": [theme.ink_on(shade) for shade in shades], "size": 10},
        hovertext=[_block_hover(plan, stage, cell.index, blocks) for cell in laid],
        hoverinfo="text",
        name=f"stage {stage.index}",
        showlegend=False,
        meta="blocks",
    )


def _short_name(name: str, index: int) -> str:
    """The layer's number where the module path holds one (`bert.encoder.layer.12` → `12`), else its last word."""
    for part in reversed(name.split(" … ")[0].split(".")):
        if part.isdigit():
            return part
    word = name.split(" … ")[0].rsplit(".", 1)[-1] or str(index)
    return theme.text(SHORT_WORDS.get(word, word))


def _block_hover(plan: Plan, stage: Stage, index: int, blocks: Sequence[BlockView] | None) -> str:
    lines = [f"<b>{theme.text(plan.block_names[index])}</b>", f"block {index} · stage {stage.index}"]
    view = blocks[index] if blocks is not None else BlockView()
    if view.parameters is not None:
        lines.append(f"{count(view.parameters)} parameters")
    if view.ms is not None:
        lines.append(f"{duration(view.ms / 1e3)} forward + backward")
    lines.append(
        f"stage: {count(stage.parameters)} parameters, {duration(stage.forward_ms / 1e3)} forward, "
        f"{duration(stage.backward_ms / 1e3)} backward"
    )
    if (recompute := stage.recompute_of(index)) != "none":
        lines.append(RECOMPUTE_WORDS[recompute])
    if stage.index < len(plan.stages) - 1:
        lines.append(f"sends {gib(stage.send_bytes)} a micro-batch to stage {stage.index + 1}")
    return "<br>".join(lines)


def limit_of(plan: Plan) -> tuple[int, str]:
    """What a device may use, and what to call it."""
    device_bytes = int(plan.cluster.device.memory_bytes)
    if plan.memory_limit_bytes is not None and plan.memory_limit_bytes < device_bytes:
        return plan.memory_limit_bytes, f"your limit {gib(plan.memory_limit_bytes)}"
    return device_bytes, f"device {gib(device_bytes)}"


def device_memory(plan: Plan, pipeline_rank: int) -> Memory:
    """What one device of a pipeline rank holds at its peak: all of its stages."""
    held = [stage.memory for stage in plan.stages_of(pipeline_rank)]
    return Memory(*(sum(getattr(memory, item.name) for memory in held) for item in fields(Memory)))


def rank_name(plan: Plan, pipeline_rank: int) -> str:
    """`stage 2`, or `rank 2` where a pipeline rank has several stages."""
    return f"{'stage' if plan.chunks == 1 else 'rank'} {pipeline_rank}"


def stages_held(plan: Plan, pipeline_rank: int) -> str:
    """`stages 2, 6`."""
    return "stages " + ", ".join(str(stage.index) for stage in plan.stages_of(pipeline_rank))


LIMIT_ROOM = 1.25
"""The axis of memory reaches so far beyond a limit that a bar's total can stand there."""
CHARACTER_SHARE = 0.021
"""Of that axis, what a character of a label takes."""
LABEL_SHARE = 0.18
"""Of that axis, what a total takes."""


def add_memory(figure: go.Figure, plan: Plan, *, row: int, col: int) -> None:
    """Draw the memory of one device of each pipeline rank, stacked by kind, against its limit, into one subplot."""
    ranks = list(range(plan.pipeline))
    devices = [device_memory(plan, rank) for rank in ranks]
    unit, _ = _memory_unit(plan)
    least = CHARACTER_SHARE * _memory_range(plan)
    for kind in (item.name for item in fields(Memory)):
        values = [getattr(memory, kind) for memory in devices]
        figure.add_trace(
            go.Bar(
                orientation="h",
                x=[value / unit for value in values],
                y=ranks,
                width=0.62 if plan.chunks == 1 else 0.45,
                name=MEMORY_LABELS[kind],
                marker={"color": theme.MEMORY_COLORS[kind], "line": {"color": "white", "width": 0.5}},
                text=[_if_it_fits(f"{value / unit:.3g}", value / unit, least) for value in values],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                textfont={"color": theme.ink_on(theme.MEMORY_COLORS[kind]), "size": 10},
                hovertext=[
                    f"{rank_name(plan, rank)}: {MEMORY_LABELS[kind]} {gib(value)}"
                    for rank, value in zip(ranks, values, strict=True)
                ],
                hoverinfo="text",
                meta="memory",
            ),
            row=row,
            col=col,
        )
    _add_totals(figure, devices, plan, row=row, col=col)
    _add_limit(figure, plan, row=row, col=col)
    figure.update_yaxes(
        range=[plan.pipeline - 0.5, -0.5],
        showgrid=False,
        showticklabels=plan.chunks > 1,
        side="right",
        ticks="",
        tickmode="array",
        tickvals=ranks,
        ticktext=[f"<b>{rank_name(plan, rank)}</b><br>{stages_held(plan, rank)}" for rank in ranks],
        row=row,
        col=col,
    )


def _if_it_fits(text: str, length: float, least: float) -> str:
    """`least`: what one character takes."""
    return text if length >= least * len(text) else ""


def _memory_unit(plan: Plan) -> tuple[int, str]:
    """Bytes and name of what the axis of memory counts: as totals are written (`gib`)."""
    return (MIB, "MiB") if plan.peak_bytes < 0.1 * GIB else (GIB, "GiB")


def _memory_range(plan: Plan) -> float:
    """Where the axis of memory ends, in its unit."""
    limit, peak = limit_of(plan)[0], plan.peak_bytes
    room = 1.35 * peak
    return (max(room, LIMIT_ROOM * limit) if _is_near(limit, peak) else room) / _memory_unit(plan)[0]


def _is_near(limit: int, peak: int) -> bool:
    return limit <= 4 * peak


def _add_totals(figure: go.Figure, devices: Sequence[Memory], plan: Plan, *, row: int, col: int) -> None:
    """Each at the end of its bar; beyond the limit's line, where they would lie on it."""
    limit, unit = limit_of(plan)[0], _memory_unit(plan)[0]
    ends = [memory.total for memory in devices]
    crossing = [end <= limit <= end + LABEL_SHARE * LIMIT_ROOM * limit for end in ends]
    figure.add_trace(
        go.Scatter(
            x=[(limit if crosses else end) / unit for end, crosses in zip(ends, crossing, strict=True)],
            y=list(range(len(devices))),
            mode="text",
            text=[f" {gib(memory.total)}" for memory in devices],
            textposition="middle right",
            textfont={"color": theme.INK, "size": 11},
            hoverinfo="skip",
            showlegend=False,
            cliponaxis=False,
            meta="totals",
        ),
        row=row,
        col=col,
    )


def _add_limit(figure: go.Figure, plan: Plan, *, row: int, col: int) -> None:
    """The limit as a line where it is near; where the plan uses little of it, a note instead of empty space."""
    limit, name = limit_of(plan)
    peak = plan.peak_bytes
    near, right = _is_near(limit, peak), _memory_range(plan)
    unit, unit_name = _memory_unit(plan)
    figure.update_xaxes(title_text=f"peak of one device ({unit_name})", range=[0, right], row=row, col=col)
    if near:
        figure.add_vline(x=limit / unit, line={"color": theme.ALERT, "width": 2, "dash": "dash"}, row=row, col=col)
    figure.add_annotation(
        x=limit / unit if near else right,
        y=1,
        yref="y domain" if col == 1 else f"y{col} domain",
        yanchor="bottom",
        xanchor="right",
        showarrow=False,
        text=f"{name}{'' if near else f' ({peak / limit:.0%} used)'}",
        font={"color": theme.ALERT, "size": 11},
        row=row,
        col=col,
    )
