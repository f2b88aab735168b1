"""Figures of a plan: blocks coloured by stage, memory of the ranks' devices, the schedule, and a map of the devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from workbench.base.tensors import TensorSpec
from workbench.base.units import count, duration, gib, memory_unit
from workbench.figures import theme
from workbench.figures.figure import Figure, mimebundle, subplots
from workbench.figures.timeline_view import add_timeline, stages_held, timeline_height
from workbench.planning.plan import Plan, Stage
from workbench.planning.prediction import timeline as simulated
from workbench.planning.search import on_fewer_devices
from workbench.strategy import RECOMPUTE, SCHEDULES

BLOCKS_PER_ROW, BLOCKS_PER_ROW_OF_HUNDREDS = 30, 24
"""Number of blocks above which a stage wraps into several rows; numbers of three digits need wider blocks than two."""
MARGIN_TOP, MARGIN_BOTTOM = 116, 104
COLUMN_WIDTHS, COLUMN_SPACING = (0.62, 0.38), 0.05
"""Widths of the columns of blocks and of memory, and the space between them, as shares of the plot's width."""
SHORT_WORDS = {"embeddings": "emb", "embed_tokens": "emb", "wte": "emb", "predictions": "head", "cls": "head"}
MEMORY_ROOM = 1.05
"""End of the memory axis as a multiple of what it shows."""
CHARACTER_SHARE = 0.021
"""Width of a character of a label, as a share of the memory axis."""
MUCH = 0.25
"""Share of a device up to which the axis of its memory ends at the peak."""
POOR = 0.6
"""Share of linear scaling below which a plan says that its batch does not use the devices."""
BELOW_TIMELINE_PX = 44
"""Height between the timeline and its legend, where a map of the devices follows."""
GAP_PX, BELOW_TITLES_PX = 148, 56
"""Height between the partition and the timeline, which holds axis titles and a legend, and the legend's place in it."""


@dataclass(frozen=True)
class BlockRectangle:
    """One block as a rectangle: `row` counts from the top, `start` and `width` are in ms."""

    index: int
    row: int
    start: float
    width: float


def draw_partition(plan: Plan, crossing: Mapping[int, Sequence[TensorSpec]] | None = None) -> Figure:
    """Draw the model's blocks in a row per stage, as long as the stage's time, with a device's memory beside it.

    A stage whose row is longer than the others holds the pipeline up. Memory is the predicted peak of one device of
    each pipeline rank, by category, against the device's memory or the limit that the user gave. It stands beside its
    stage, or in a row of its own if a rank has several stages.

    Args:
        plan: the plan to draw.
        crossing: for each stage but the last, the tensors of one micro-batch that it sends on (`Graph.crossing`). An
            arrow below the stage's row names them on hover.
    """
    figure = subplots(rows=1, cols=2, column_widths=COLUMN_WIDTHS, horizontal_spacing=COLUMN_SPACING)
    add_partition(figure, plan)
    if crossing:  # a small arrow between two stages, whose hover text lists the tensors
        sends = [stage for stage in plan.stages[:-1] if crossing.get(stage.index)]
        rows = _rows_per_stage(plan)
        longest = max(cell.start + cell.width for stage in plan.stages for cell in _cells(stage, rows))
        hover, outline = [], {"color": "white", "width": 1.5}
        for stage in sends:
            specs = crossing[stage.index]
            lines = [f"<b>stage {stage.index} → {stage.index + 1}</b>: {gib(stage.send_bytes)} a micro-batch"]
            lines += [
                f"{theme.text(spec.name)}  {spec.dtype} {' × '.join(map(str, spec.shape))}" for spec in specs[:12]
            ]
            hover.append("<br>".join(lines + ([f"and {len(specs) - 12} more"] if len(specs) > 12 else [])))
        marker = {"symbol": "triangle-down", "size": 13, "color": theme.INK, "line": outline}
        words = {"hovertext": hover, "hoverinfo": "text", "cliponaxis": False, "showlegend": False, "meta": "crossing"}
        x, y = [0.5 * longest] * len(sends), [stage.index + 0.5 for stage in sends]
        figure.add_trace(go.Scatter(x=x, y=y, mode="markers", marker=marker, **words), row=1, col=1)
    add_memory(figure, plan)
    return figure.laid_out(
        height=partition_height(plan) + MARGIN_TOP + MARGIN_BOTTOM,
        title=theme.title(theme.text(f"{plan.model} on {plan.cluster.describe()}"), theme.text(plan.describe())),
        margin={"t": MARGIN_TOP, "b": MARGIN_BOTTOM, "r": 16},
        legend=theme.LEGEND_BELOW,
        barmode="stack",
        uniformtext={"mode": "hide", "minsize": 8},
    )


# plotly.js hides text that does not fit (`uniformtext`) only if the last subplot with bars has text in its bars,
# because drawing a subplot forgets the sizes of the previous one. Therefore memory, drawn last, has text in its bars.


def _rows_per_stage(plan: Plan) -> int:
    """Return the number of rows into which the blocks of each stage wrap."""
    most = max(stage.end_block - stage.first_block for stage in plan.stages)
    return math.ceil(most / (BLOCKS_PER_ROW if len(plan.block_names) <= 100 else BLOCKS_PER_ROW_OF_HUNDREDS))


def partition_height(plan: Plan) -> int:
    """Return the height of the plot area in pixels: 44 per lane, less if there are many, more if blocks wrap."""
    num_stages, rows = len(plan.stages), _rows_per_stage(plan)
    lane = max(22, min(44, 480 // num_stages)) if rows == 1 else max(44, 24 * rows)
    return max(56, lane * num_stages)


def _cells(stage: Stage, rows: int) -> list[BlockRectangle]:
    """Return the stage's blocks laid out left to right, wrapped into `rows` rows of equal numbers."""
    count = stage.end_block - stage.first_block
    shares, per_row = stage.block_shares or (1 / count,) * count, math.ceil(count / rows)
    cells, start = [], 0.0
    for position, share in enumerate(shares):
        start = start if position % per_row else 0.0
        width = share * (stage.forward_ms + stage.backward_ms)
        cells.append(BlockRectangle(stage.first_block + position, position // per_row, start, width))
        start += width
    return cells


def add_partition(figure: Figure, plan: Plan) -> None:
    """Draw a lane of blocks per stage into the subplot of row 1, column 1."""
    rows = _rows_per_stage(plan)
    lanes = [_cells(stage, rows) for stage in plan.stages]
    for stage, cells in zip(plan.stages, lanes, strict=True):
        figure.add_trace(_stage_trace(plan, stage, cells, rows), row=1, col=1)
    longest = max(cell.start + cell.width for cells in lanes for cell in cells)
    figure.update_xaxes(
        title_text="forward + backward of<br>one micro-batch (ms)" if rows == 1 else "blocks of each<br>stage, wrapped",
        showticklabels=rows == 1,
        ticks="outside" if rows == 1 else "",
        showgrid=rows == 1,
        range=[0, longest * 1.01],
        row=1,
        col=1,
    )
    _add_heading(figure, "Blocks", "a number is a layer", subplot=1)
    names = []
    for stage in plan.stages:
        num_blocks = stage.end_block - stage.first_block
        facts = f"{num_blocks} block{'s' * (num_blocks > 1)} · {count(stage.parameters)}"
        name, facts = f"<b>stage {stage.index}</b>", f"<span style='color:{theme.MUTED}'>{facts}</span>"
        if len(plan.stages) > 10:  # one line is too short for the devices, which the map and the hover box name
            names.append(f"{name} {facts}")
        else:
            names.append(f"{name} · {place_in_words(plan, stage.index % plan.pipeline)}<br>{facts}")
    ticks = {"tickmode": "array", "tickvals": list(range(len(names))), "ticktext": names, "ticklabelstandoff": 6}
    figure.update_yaxes(range=[len(names) - 0.5, -0.5], showgrid=False, **ticks, row=1, col=1)


def _stage_trace(plan: Plan, stage: Stage, laid: Sequence[BlockRectangle], rows: int) -> go.Bar:
    lane = 0.86
    thick = lane / rows
    color = theme.stage_color(stage.index, len(plan.stages))
    shades = [theme.pale(color, 0.18 if cell.index % 2 else 0.0) for cell in laid]
    top = stage.index - lane / 2
    tied = f" ({count(stage.tied_parameters)} of them are those of an earlier stage)" if stage.tied_parameters else ""
    facts = (
        f"stage: {count(stage.parameters)} parameters{tied}, {duration(stage.forward_ms / 1e3)} forward, "
        f"{duration(stage.backward_ms / 1e3)} backward"
    )
    is_last = stage.index == len(plan.stages) - 1
    sends = [] if is_last else [f"sends {gib(stage.send_bytes)} a micro-batch to stage {stage.index + 1}"]
    labels, hover = [], []
    for index in (cell.index for cell in laid):
        # The layer's number if the module path holds one (`bert.encoder.layer.12` → `12`), else its last word.
        words = plan.block_names[index].split(" … ")[0].split(".")
        number = next((word for word in reversed(words) if word.isdigit()), None)
        word = words[-1] or str(index)
        labels.append(number or theme.text(SHORT_WORDS.get(word, word)))
        lines = [f"<b>{theme.text(plan.block_names[index])}</b>", f"block {index} · stage {stage.index}", facts]
        lines += [RECOMPUTE[recompute]] if (recompute := stage.recompute_of(index)) != "none" else []
        hover.append("<br>".join(lines + sends))
    return go.Bar(
        orientation="h",
        x=[cell.width for cell in laid],
        base=[cell.start for cell in laid],
        y=[top + thick * (cell.row + 0.5) for cell in laid],
        width=[thick * (0.96 if rows == 1 else 0.9)] * len(laid),
        marker={"color": shades, "line": {"color": "white", "width": 1}},
        text=labels,
        **theme.TEXT_INSIDE,
        textfont={"color": [theme.ink_on(shade) for shade in shades], "size": 10},
        hovertext=hover,
        hoverinfo="text",
        name=f"stage {stage.index}",
        showlegend=False,
        meta="blocks",
    )


def _add_heading(figure: Figure, name: str, words: str, subplot: int) -> None:
    """Write above a subplot, counted from 1, what it shows and what its numbers are."""
    axis = "" if subplot == 1 else str(subplot)
    apart = "<br>" if subplot < 3 else "  "  # the upper two stand side by side
    figure.add_annotation(
        text=f"<b>{name}</b>{apart}<span style='color:{theme.MUTED}'>{theme.text(words)}</span>",
        x=0,
        xref=f"x{axis} domain",
        xanchor="left",
        y=1,
        yref=f"y{axis} domain",
        yanchor="bottom",
        yshift=4,
        align="left",
        showarrow=False,
        font={"size": theme.FONT_PX},
    )


def limit_of(plan: Plan) -> tuple[int, str]:
    """Return the memory that a device may use, in bytes, and its name for a label."""
    device_bytes = int(plan.cluster.device.memory_bytes)
    if plan.memory_limit_bytes is not None and plan.memory_limit_bytes < device_bytes:
        return plan.memory_limit_bytes, f"your {gib(plan.memory_limit_bytes)}"
    return device_bytes, gib(device_bytes)


def add_memory(figure: Figure, plan: Plan) -> None:
    """Draw the memory of one device of each pipeline rank against its limit into the subplot of row 1, column 2.

    The axis is the device. Where a device uses less than `MUCH` of it, the axis ends at the peak.
    """
    place: Any = {"row": 1, "col": 2}
    ranks = list(range(plan.pipeline))
    peak, (limit, limit_name) = plan.peak_bytes, limit_of(plan)
    unit_name, unit, _ = memory_unit(peak)  # in which `gib` writes the totals
    is_beyond = peak <= MUCH * limit
    end = MEMORY_ROOM * (peak if is_beyond else max(peak, limit)) / unit
    # The categories, stacked.
    for category, (label, color) in theme.MEMORY_LOOKS.items():
        values = [sum(getattr(stage.memory, category) for stage in plan.stages_of(rank)) for rank in ranks]
        texts = [(value / unit, f"{value / unit:.3g}") for value in values]
        bars = go.Bar(
            orientation="h",
            x=[value / unit for value in values],
            y=ranks,
            width=0.62 if plan.chunks == 1 else 0.45,
            name=label,
            marker={"color": color, "line": {"color": "white", "width": 0.5}},
            text=[text if length >= CHARACTER_SHARE * end * len(text) else "" for length, text in texts],
            textfont={"color": theme.ink_on(color), "size": 10},
            hovertext=[f"{stages_held(plan, rank)}: {label} {gib(values[rank], peak)}" for rank in ranks],
            hoverinfo="text",
            meta="memory",
            **theme.TEXT_INSIDE,
        )
        figure.add_trace(bars, **place)
    if not is_beyond:
        figure.add_vline(x=limit / unit, line={"color": theme.ALERT, "width": 2, "dash": "dash"}, **place)
    title = (
        f"peak of a device<br>({unit_name})"
        if is_beyond
        else f"peak of a device ({unit_name});<br>dashed: {limit_name}"
    )
    figure.update_xaxes(title_text=title, range=[0, end], **place)
    _add_heading(figure, "Memory", f"{peak / limit:.0%} of {limit_name}", subplot=2)
    # The total of each rank stands at the right.
    names = [gib(plan.device_bytes(rank), peak) for rank in ranks]
    if plan.chunks > 1:
        names = [f"{names[rank]}<br>{stages_held(plan, rank)}" for rank in ranks]
    ticks = {"tickmode": "array", "tickvals": ranks, "ticktext": names, "ticks": ""}
    figure.update_yaxes(range=[plan.pipeline - 0.5, -0.5], showgrid=False, side="right", **ticks, **place)


# The map of ranks: nodes and their devices, coloured by stage, with the links between stages. On the device mesh
# tensor-parallel ranks are neighbours, then replicas, then pipeline ranks: a pipeline rank's devices are consecutive.

MOST_CELLS = 1024
"""Largest number of devices that are drawn one by one; of more, a cell is a node."""
NODES_A_ROW = 64
"""Number of nodes in a row, where a cell is a node."""
LYING_NODES = 4
"""Largest number of nodes that are drawn as rows; of more, each is a column."""
CELL_PX, CELL_WIDTH, CELL_HEIGHT = 22, 0.9, 0.76
"""Height of a row in pixels, and the size of a cell as a share of its column and its row; links lie between them."""
WORDS_LETTERS = 44
"""Letters of a line of words below the map."""


@dataclass(frozen=True)
class MapCell:
    """One device, or the first of a node, in a column and a row of the map."""

    device: int
    column: int
    row: int


def device_cells(plan: Plan) -> list[MapCell]:
    """Return the cells of the map; none for a single device, or for more nodes than a map can show."""
    cluster = plan.cluster
    count, size = cluster.gpus, cluster.gpus_per_node
    if count == 1 or cluster.nodes > MOST_CELLS:
        return []
    if count > MOST_CELLS:
        return [MapCell(node * size, node % NODES_A_ROW, node // NODES_A_ROW) for node in range(cluster.nodes)]
    places = [(device, device // size, device % size) for device in range(count)]
    if cluster.nodes <= LYING_NODES:
        return [MapCell(device, place, node) for device, node, place in places]
    return [MapCell(device, node, place) for device, node, place in places]


def place_in_words(plan: Plan, rank: int) -> str:
    """Return the devices of a pipeline rank, such as `"GPUs 0–3"`, `"node 1, GPUs 0–3"` or `"nodes 0–3"`."""
    size, count = plan.cluster.gpus_per_node, plan.devices_per_stage
    first, last = rank * count, (rank + 1) * count - 1
    word = _device_word(plan)
    if plan.cluster.nodes == 1:
        return _numbered(word, first, last)
    if first // size == last // size and count < size:
        return f"node {first // size}, {_numbered(word, first % size, last % size)}"
    return _numbered("node", first // size, last // size)


def _device_word(plan: Plan) -> str:
    """Return what a device of the plan is called: all CPU processes share the cores of their machine."""
    return "process" if plan.cluster.device.type == "cpu" else "GPU"


def _numbered(word: str, first: int, last: int) -> str:
    several = f"{word}es" if word == "process" else f"{word}s"
    return f"{word} {first}" if first == last else f"{several} {first}–{last}"


def crossing_hops(plan: Plan) -> list[tuple[int, int]]:
    """Return the neighbouring pipeline ranks of which a device of one and its peer are in different nodes."""
    count, size = plan.devices_per_stage, plan.cluster.gpus_per_node
    hops = _hops(plan)
    return [
        (here, there)
        for here, there in hops
        if any((here * count + i) // size != (there * count + i) // size for i in range(count))
    ]


def _hops(plan: Plan) -> list[tuple[int, int]]:
    hops = [(rank, rank + 1) for rank in range(plan.pipeline - 1)]
    return [*hops, (plan.pipeline - 1, 0)] if plan.chunks > 1 and plan.pipeline > 1 else hops


def words_below(plan: Plan) -> str:
    """Return what the map shows, in lines of Plotly markup."""
    crossing, hops = crossing_hops(plan), _hops(plan)
    size, count = plan.cluster.gpus_per_node, plan.devices_per_stage
    # Which links between stages cross nodes, and over how many nodes the replicas of a stage are spread.
    words = ["all devices are in one node"] if plan.cluster.nodes == 1 else []
    if not words and hops and len(crossing) == len(hops):
        words.append(f"{'every' if len(hops) > 1 else 'the'} link between stages crosses nodes")
    elif not words and hops:
        named = ", ".join(f"{here} → {there}" for here, there in crossing[:4]) + (", …" if len(crossing) > 4 else "")
        words.append(
            f"the links between stages {named} cross nodes" if crossing else "no link between stages crosses nodes"
        )
    for name, degree, stride in (("replicas", plan.data, plan.tensor), ("tensor-parallel ranks", plan.tensor, 1)):
        if degree > 1 and plan.cluster.nodes > 1:
            groups = range(0, plan.cluster.gpus - (degree - 1) * stride, stride if name != "replicas" else count)
            most = max(len({(first + k * stride) // size for k in range(degree)}) for first in groups)
            words.append(f"the {degree} {name} of a stage are in {'one node' if most == 1 else f'{most} nodes'}")
    links = "; ".join(words)
    said = [f"{links[:1].upper()}{links[1:]}."]
    said.append("Numbers are stages." if plan.chunks == 1 else "Numbers are pipeline ranks, each with several stages.")
    if plan.pipeline > 1:
        replica = ", of the first replica" if count > 1 else ""
        said.append(f"Lines join stages{replica}{', and are dotted between nodes' if crossing else ''}.")
    return theme.broken(theme.text(" ".join(said)), WORDS_LETTERS)


def add_map(figure: Figure, plan: Plan, cells: Sequence[MapCell], row: int) -> None:
    """Draw the map into the subplot of a row, column 1."""
    place = {"row": row, "col": 1}
    count, device = plan.devices_per_stage, _device_word(plan)
    by_rank: dict[int, list[MapCell]] = {}
    for cell in cells:
        by_rank.setdefault(min(cell.device // count, plan.pipeline - 1), []).append(cell)
    for rank, own in by_rank.items():
        color = theme.stage_color(rank, plan.pipeline)
        stages, hover = ", ".join(str(stage.index) for stage in plan.stages_of(rank)), []
        for cell in own:
            within, size = cell.device % count, plan.cluster.gpus_per_node
            words = [f"<b>node {cell.device // size}, {device} {cell.device % size}</b>"]
            words += [f"rank {cell.device}: {'stages' if ',' in stages else 'stage'} {stages}"]
            words += [f"replica {within // plan.tensor}"] if plan.data > 1 else []
            words += [f"tensor-parallel rank {within % plan.tensor}"] if plan.tensor > 1 else []
            hover.append("<br>".join(words))
        bars = go.Bar(
            orientation="h",
            base=[cell.column - CELL_WIDTH / 2 for cell in own],
            x=[CELL_WIDTH] * len(own),
            y=[cell.row for cell in own],
            width=CELL_HEIGHT,
            marker={"color": color, "line": {"width": 0}},
            text=[stages if len(stages) < 4 else str(rank)] * len(own),
            textfont={"color": theme.ink_on(color), "size": 10},
            hovertext=hover,
            hoverinfo="text",
            showlegend=False,
            meta="map",
            **theme.TEXT_INSIDE,
        )
        figure.add_trace(bars, **place)
    # A line joins the first device of each pipeline rank to that of the next, between the cells.
    at, crossing = {cell.device: cell for cell in cells}, crossing_hops(plan)
    for here, there in _hops(plan):
        ends = [at[rank * count] for rank in (here, there) if rank * count in at]
        if len(ends) == 2:
            crosses = (here, there) in crossing
            look = {"color": theme.ALERT if crosses else theme.INK, "width": 2, "dash": "dot" if crosses else "solid"}
            said = f"stage {here} → {there}: {'between nodes' if crosses else 'inside a node'}"
            along_row = ends[0].row == ends[1].row
            x, y = [cell.column - 0.5 * (not along_row) for cell in ends], [cell.row - 0.5 * along_row for cell in ends]
            line = go.Scatter(x=x, y=y, mode="lines+markers", line=look, marker={"size": 6, "color": look["color"]})
            figure.add_trace(line.update(hovertext=said, hoverinfo="text", showlegend=False, meta="link"), **place)
    columns, rows = 1 + max(cell.column for cell in cells), 1 + max(cell.row for cell in cells)
    lying = plan.cluster.nodes <= LYING_NODES
    names = (device, "node") if lying else ("node", device)
    if len(cells) < plan.cluster.gpus:
        names = ("node", "")
    # A cell may be 9 pixels wide, and the label of the first one is as wide as four.
    ticks = [0, columns - 1] if columns > 4 else [0]
    figure.update_xaxes(
        title_text=words_below(plan),
        range=[-0.7, max(columns, 16) - 0.4],
        tickvals=ticks,
        ticktext=[f"{names[0]} {column}" if column == 0 else str(column) for column in ticks],
        showgrid=False,
        **place,
    )
    figure.update_yaxes(
        range=[rows - 0.5, -0.7],
        tickvals=list(range(rows)),
        ticktext=[f"{names[1]} {number}" if names[1] else "" for number in range(rows)],
        showgrid=False,
        **place,
    )


# All of them in one figure, which is what a notebook shows of a plan.


def show_plan(plan: Plan, fewer: Plan | None = None) -> Figure:
    """Draw partition, memory, timeline and place of a plan in one figure.

    Args:
        plan: the plan to draw.
        fewer: the best plan on fewer devices, with which its speed is compared in the subtitle
            (`workbench.planning.search.on_fewer_devices`).
    """
    step, cells = simulated(plan), device_cells(plan)
    heights = [partition_height(plan), timeline_height(step)]
    heights += [max(36, CELL_PX * (1 + max(cell.row for cell in cells)))] if cells else []
    gaps = [GAP_PX, *([GAP_PX] if cells else [])]
    inner = sum(heights) + sum(gaps)
    figure = subplots(
        rows=len(heights),
        cols=2,
        specs=[[{}, {}], *([{"colspan": 2}, None] for _ in heights[1:])],
        column_widths=COLUMN_WIDTHS,
        row_heights=[height / sum(heights) for height in heights],
        horizontal_spacing=COLUMN_SPACING,
        vertical_spacing=GAP_PX / inner,
    )
    upper = heights[0]
    add_partition(figure, plan)
    add_memory(figure, plan)
    for trace in add_timeline(figure, step, row=2, col=1):
        trace.legend = "legend2"
    _add_heading(figure, "One step", "a number is a micro-batch", subplot=3)
    if cells:
        add_map(figure, plan, cells, row=3)
    facts = theme.text(theme.in_one_line(f"{name} {value}" for name, value in _headline(plan)))
    alert = "The loss depends on this division of the batch: see plan.notes" if plan.loss_depends else None
    gain_in_words = None
    if fewer is not None:  # how much faster the plan is than that on fewer devices, in red where it is little
        few, many = fewer.cluster.gpus, plan.cluster.gpus
        gain, times = plan.prediction.tokens_per_s / fewer.prediction.tokens_per_s, many // few
        gain_in_words = f"from {few} to {many} devices (× {times}): {gain:.2g} times the tokens/s"
        if gain <= POOR * times:
            poor = f"The batch is too small for {many} devices: {gain:.2g} times the tokens/s of {few}"
            gain_in_words = _alert(poor)
    below = [line for line in (gain_in_words, alert and _alert(alert), facts) if line]
    further = 18 * max(0, len(below) - 2)
    words = 18 * words_below(plan).count("<br>") if cells else 0
    return figure.laid_out(
        height=inner + (154 + words if cells else 196) + further,
        title=theme.title(theme.text(_heading(plan)), "<br>".join(below)),
        margin={"t": 120 + further, "b": 34 + words if cells else 76, "r": 16},
        barmode="stack",
        uniformtext={"mode": "hide", "minsize": 8},
        legend=_legend_at(1 - (upper + BELOW_TITLES_PX) / inner),
        legend2=_legend_at(1 - (upper + GAP_PX + heights[1] + BELOW_TIMELINE_PX) / inner),
    )


def _legend_at(y: float) -> dict[str, Any]:
    return {**theme.LEGEND_BELOW, "y": y, "yref": "paper", "yanchor": "top"}


def _alert(words: str) -> str:
    return f"<b><span style='color:{theme.ALERT}'>{words}</span></b>"


def _heading(plan: Plan) -> str:
    """Return model, cluster and parallel degrees in words."""
    parts = []
    if plan.pipeline > 1:
        ranks = "" if plan.chunks == 1 else f" on {plan.pipeline} pipeline ranks"
        parts.append(f"{len(plan.stages)}-stage pipeline{ranks} ({SCHEDULES[plan.schedule].words})")
    if plan.tensor > 1:
        parts.append(f"tensor parallel {plan.tensor}")
    if plan.data > 1:
        sharding = f", ZeRO {plan.zero}" if plan.zero else ""
        parts.append(f"data parallel {plan.data}{sharding}")
    words = [" × ".join(parts) or "one device"]
    words += [plan.recompute_words()] if plan.recompute != "none" else []
    return f"{plan.model} on {plan.cluster.describe()}: {', '.join([*words, *plan.features])}"


def _headline(plan: Plan) -> list[tuple[str, str]]:
    """Return the most important numbers of a plan as (name, value)."""
    predicted = plan.prediction
    limit, _ = limit_of(plan)
    # Such as "512 samples = 32 replicas × 4 micro-batches × 4 samples".
    factors = (
        (plan.data, "replica", "s"),
        (plan.num_microbatches, "micro-batch", "es"),
        (plan.micro_batch, "sample", "s"),
    )
    divided = " × ".join(f"{number} {one}{more if number > 1 else ''}" for number, one, more in factors)
    tied = sum(stage.tied_parameters for stage in plan.stages)
    rows = [
        ("parameters", count(plan.parameters) + (f", {count(tied)} of them (tied) in two stages" if tied else "")),
        ("predicted step", duration(predicted.step_ms / 1e3)),
        ("tokens/s", count(predicted.tokens_per_s)),
        ("peak", f"{gib(plan.peak_bytes)} of {gib(limit)} a device"),
        ("batch", f"{plan.global_batch} samples = {divided}"),
    ]
    if predicted.mfu is not None:
        rows.insert(3, ("MFU", f"{predicted.mfu:.1%}"))
    if plan.pipeline > 1:
        own = predicted.bubble_ms / predicted.step_ms
        rows.insert(-1, ("bubble", f"{predicted.bubble_fraction:.1%} of all pipeline ranks, {own:.1%} of the busiest"))
    parts = {
        "compute": predicted.compute_ms,
        "waiting for the host": predicted.host_ms,
        "exposed communication": predicted.communication_ms,
        "the bubble": predicted.bubble_ms,
        "the update": predicted.optimizer_ms,
    }
    longest = max(parts, key=parts.__getitem__)
    rows.insert(
        2, ("longest part", f"{longest}, {parts[longest] / predicted.step_ms:.0%} of the busiest device's step")
    )
    return rows


def plan_mimebundle(plan: Plan) -> dict[str, Any]:
    """Return the representations of a plan that a notebook stores: interactive figure, picture and a sentence."""
    return {**mimebundle(show_plan(plan, on_fewer_devices(plan))), "text/plain": repr(plan)}
