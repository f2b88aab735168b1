"""The heat map of a grid of plans: predicted speed over two or more choices."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.figures import theme
from workbench.figures.figure import Figure
from workbench.sweeps.grid import Cell, Grid, largest_loss
from workbench.units import duration, gib

SHORT = {"pipeline": "PP", "data": "DP", "tensor": "TP", "zero": "ZeRO"}
ROW_PX, ROOM_PX = 40, 240


def draw_grid(grid: Grid, x: str) -> Figure:
    """Draw a cell for each combination: choice `x` along the width, all others along the height.

    The colour is the speed as a share of the best cell's. A cell shows its step and what the step loses most to. The
    best and the worst cell have a frame. A cell without a plan says by how much it overflows, or nothing where its
    degrees make no plan; the whole reason is under the mouse.
    """
    others = [name for name in grid.varied if name != x]
    short = [SHORT.get(name, name) for name in others]
    rows = list(itertools.product(*(grid.axes[name] for name in others)))
    cells = _table(grid, others, rows, x)
    best = grid.best.step_ms if grid.feasible else np.inf
    heat = go.Heatmap(
        x=[str(value) for value in grid.axes[x]],
        y=[theme.text(" · ".join(f"{n} {v}" for n, v in zip(short, row, strict=True))) for row in rows],
        z=[[best / cell.step_ms if cell.plan is not None else np.nan for cell in line] for line in cells],
        zmin=0,
        zmax=1,
        text=[[_text(cell) for cell in line] for line in cells],
        customdata=[[theme.text(_hover(cell)) for cell in line] for line in cells],
        texttemplate="%{text}",
        hovertemplate="%{customdata}<extra></extra>",
        colorscale="Viridis",
        xgap=2,
        ygap=2,
        colorbar={"title": {"text": "speed"}, "tickformat": ".0%"},
    )
    figure = Figure(heat)
    marked = ((grid.best, theme.INK), (grid.worst, theme.ALERT)) if grid.feasible else ()
    for cell, color in marked:
        row, column = _place(cells, cell)
        corners = {"x0": column - 0.5, "x1": column + 0.5, "y0": row - 0.5, "y1": row + 0.5}
        figure.add_shape(type="rect", line={"color": color, "width": 4}, **corners)
    figure.update_xaxes(type="category", title_text=theme.text(x), showgrid=False)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    subtitle = "<br>".join(theme.text(line) for line in grid.sentences()[:3])
    title = theme.title(theme.text(grid.headline()), subtitle)
    height = ROOM_PX + ROW_PX * max(3, len(rows))
    return figure.laid_out(height=height, title=title, margin={"t": 120}, plot_bgcolor=theme.EMPTY_CELL)


def _table(grid: Grid, others: Sequence[str], rows: Sequence[Sequence[Any]], x: str) -> list[list[Cell]]:
    """Return the cells of each row."""

    def key(choices: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(choices[name] for name in (*others, x))

    found = {key(cell.choices): cell for cell in grid.cells}
    return [[found[(*row, value)] for value in grid.axes[x]] for row in rows]


def _place(cells: Sequence[Sequence[Cell]], wanted: Cell) -> tuple[int, int]:
    return next((at, line.index(wanted)) for at, line in enumerate(cells) if wanted in line)


def _text(cell: Cell) -> str:
    if cell.plan is None:
        return "" if cell.overflow_bytes is None else f"+ {gib(cell.overflow_bytes)}"
    name, share = largest_loss(cell.plan)
    return f"{duration(cell.step_ms / 1e3)}<br>{name} {100 * share:.0f} %"


def _hover(cell: Cell) -> str:
    if cell.plan is None:
        return f"{cell.name}: {cell.reason}"
    return f"{cell.name}: {cell.plan.describe()}, {cell.reason}"
