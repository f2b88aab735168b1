"""Map of a plan's ranks: nodes and their devices, coloured by stage, with the links between stages.

On the device mesh tensor-parallel ranks are neighbours, then replicas, then pipeline ranks. A pipeline rank's devices
are therefore consecutive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from workbench.figures import theme
from workbench.figures.figure import Figure
from workbench.planning.plan import Plan

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
class Cell:
    """One device, or the first of a node, in a column and a row of the map."""

    device: int
    column: int
    row: int


def device_cells(plan: Plan) -> list[Cell]:
    """Return the cells of the map; none for a single device, or for more nodes than a map can show."""
    cluster = plan.cluster
    count, size = cluster.gpus, cluster.gpus_per_node
    if count == 1 or cluster.nodes > MOST_CELLS:
        return []
    if count > MOST_CELLS:
        return [Cell(node * size, node % NODES_A_ROW, node // NODES_A_ROW) for node in range(cluster.nodes)]
    places = [(device, device // size, device % size) for device in range(count)]
    if cluster.nodes <= LYING_NODES:
        return [Cell(device, place, node) for device, node, place in places]
    return [Cell(device, node, place) for device, node, place in places]


def map_height(cells: Sequence[Cell]) -> int:
    """Return the height of the map in pixels."""
    return max(36, CELL_PX * (1 + max(cell.row for cell in cells)))


def _per_rank(plan: Plan) -> int:
    """Return the number of devices of a pipeline rank."""
    return plan.data * plan.tensor


def place_in_words(plan: Plan, rank: int) -> str:
    """Return the devices of a pipeline rank, such as `"GPUs 0–3"`, `"node 1, GPUs 0–3"` or `"nodes 0–3"`."""
    size, count = plan.cluster.gpus_per_node, _per_rank(plan)
    first, last = rank * count, (rank + 1) * count - 1
    word = "process" if plan.cluster.device.type == "cpu" else "GPU"
    if plan.cluster.nodes == 1:
        return _numbered(word, first, last)
    if first // size == last // size and count < size:
        return f"node {first // size}, {_numbered(word, first % size, last % size)}"
    return _numbered("node", first // size, last // size)


def _numbered(word: str, first: int, last: int) -> str:
    several = f"{word}es" if word == "process" else f"{word}s"
    return f"{word} {first}" if first == last else f"{several} {first}–{last}"


def crossing_hops(plan: Plan) -> list[tuple[int, int]]:
    """Return the neighbouring pipeline ranks of which a device of one and its peer are in different nodes."""
    count, size = _per_rank(plan), plan.cluster.gpus_per_node
    hops = _hops(plan)
    return [
        (here, there)
        for here, there in hops
        if any((here * count + i) // size != (there * count + i) // size for i in range(count))
    ]


def _hops(plan: Plan) -> list[tuple[int, int]]:
    hops = [(rank, rank + 1) for rank in range(plan.pipeline - 1)]
    return [*hops, (plan.pipeline - 1, 0)] if plan.chunks > 1 and plan.pipeline > 1 else hops


def links_in_words(plan: Plan) -> str:
    """Return which links between stages cross nodes, and over how many nodes the replicas of a stage are spread."""
    if plan.cluster.nodes == 1:
        return "All devices are in one node."
    words, crossing, hops = [], crossing_hops(plan), _hops(plan)
    if hops and len(crossing) == len(hops):
        words.append(
            "every link between stages crosses nodes" if len(hops) > 1 else "the link between stages crosses nodes"
        )
    elif hops:
        named = ", ".join(f"{here} → {there}" for here, there in crossing[:4]) + (", …" if len(crossing) > 4 else "")
        words.append(
            f"the links between stages {named} cross nodes" if crossing else "no link between stages crosses nodes"
        )
    size, count = plan.cluster.gpus_per_node, _per_rank(plan)
    for name, degree, stride in (("replicas", plan.data, plan.tensor), ("tensor-parallel ranks", plan.tensor, 1)):
        if degree > 1:
            groups = range(0, plan.cluster.gpus - (degree - 1) * stride, stride if name != "replicas" else count)
            most = max(len({(first + k * stride) // size for k in range(degree)}) for first in groups)
            words.append(f"the {degree} {name} of a stage are in {'one node' if most == 1 else f'{most} nodes'}")
    said = "; ".join(words)
    return f"{said[:1].upper()}{said[1:]}."


def words_below(plan: Plan) -> str:
    """Return what the map shows, in lines of Plotly markup."""
    said = [links_in_words(plan)]
    said.append("Numbers are stages." if plan.chunks == 1 else "Numbers are pipeline ranks, each with several stages.")
    if plan.pipeline > 1:
        replica = ", of the first replica" if _per_rank(plan) > 1 else ""
        said.append(f"Lines join stages{replica}{', and are dotted between nodes' if crossing_hops(plan) else ''}.")
    return theme.broken(theme.text(" ".join(said)), WORDS_LETTERS)


def add_map(figure: Figure, plan: Plan, cells: Sequence[Cell], row: int) -> None:
    """Draw the map into the subplot of a row, column 1."""
    place = {"row": row, "col": 1}
    count = _per_rank(plan)
    by_rank: dict[int, list[Cell]] = {}
    for cell in cells:
        by_rank.setdefault(min(cell.device // count, plan.pipeline - 1), []).append(cell)
    for rank, own in by_rank.items():
        color = theme.series_color(rank)
        stages = ", ".join(str(stage.index) for stage in plan.stages_of(rank))
        bars = go.Bar(
            orientation="h",
            base=[cell.column - CELL_WIDTH / 2 for cell in own],
            x=[CELL_WIDTH] * len(own),
            y=[cell.row for cell in own],
            width=CELL_HEIGHT,
            marker={"color": color, "line": {"width": 0}},
            text=[stages if len(stages) < 4 else str(rank)] * len(own),
            textfont={"color": theme.ink_on(color), "size": 10},
            hovertext=[_hover(plan, cell.device, stages) for cell in own],
            hoverinfo="text",
            showlegend=False,
            meta="map",
            **theme.TEXT_INSIDE,
        )
        figure.add_trace(bars, **place)
    _add_links(figure, plan, {cell.device: cell for cell in cells}, place)
    columns, rows = 1 + max(cell.column for cell in cells), 1 + max(cell.row for cell in cells)
    lying = plan.cluster.nodes <= LYING_NODES
    names = ("GPU", "node") if lying else ("node", "GPU")
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


def _add_links(figure: Figure, plan: Plan, at: Mapping[int, Cell], place: Mapping[str, int]) -> None:
    """Draw a line from the first device of each pipeline rank to that of the next, between the cells."""
    count = _per_rank(plan)
    crossing = set(crossing_hops(plan))
    for here, there in _hops(plan):
        ends = [at[rank * count] for rank in (here, there) if rank * count in at]
        if len(ends) == 2:
            crosses = (here, there) in crossing
            look = {"color": theme.ALERT if crosses else theme.INK, "width": 2, "dash": "dot" if crosses else "solid"}
            words = f"stage {here} → {there}: {'between nodes' if crosses else 'inside a node'}"
            along_row = ends[0].row == ends[1].row
            x, y = [cell.column - 0.5 * (not along_row) for cell in ends], [cell.row - 0.5 * along_row for cell in ends]
            line = go.Scatter(x=x, y=y, mode="lines+markers", line=look, marker={"size": 6, "color": look["color"]})
            figure.add_trace(line.update(hovertext=words, hoverinfo="text", showlegend=False, meta="link"), **place)


def _hover(plan: Plan, device: int, stages: str) -> str:
    count, size = _per_rank(plan), plan.cluster.gpus_per_node
    within = device % count
    several = "stages" if "," in stages else "stage"
    words = [f"<b>node {device // size}, device {device % size}</b>", f"rank {device}: {several} {stages}"]
    words += [f"replica {within // plan.tensor}"] if plan.data > 1 else []
    words += [f"tensor-parallel rank {within % plan.tensor}"] if plan.tensor > 1 else []
    return "<br>".join(words)
