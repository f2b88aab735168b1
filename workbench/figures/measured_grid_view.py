"""Measured beside predicted steps of a grid's cells."""

from __future__ import annotations

import plotly.graph_objects as go

from workbench.arguments import checked_arguments
from workbench.figures import theme
from workbench.figures.figure import Figure
from workbench.sweeps.measured import MeasuredCell, MeasuredGrid
from workbench.units import duration


@checked_arguments
def predictions(measured: MeasuredGrid) -> Figure:
    """Draw the measured step of each cell of a grid over its predicted step, with the line on which both are equal.

    The planner's choice and the fastest measured cell are marked. Cells that failed stand below the others, at their
    predicted step; their sentence is under the mouse.
    """
    cells, failed = measured.measured(), [cell for cell in measured.cells() if cell.state == "failed"]
    steps = [ms for cell in cells for ms in (cell.predicted_ms, cell.step_ms or 0.0)] + [c.predicted_ms for c in failed]
    least, most = (0.85 * min(steps), 1.18 * max(steps)) if steps else (1.0, 10.0)
    ends = [least, most]
    figure = Figure(theme.curve(ends, ends, "as predicted", theme.AXIS, "dot", hoverinfo="skip"))
    if cells:  # rings lie below the marks, the larger first
        chosen = min(cells, key=lambda cell: cell.predicted_ms)
        figure.add_trace(_ring(cells[0], "fastest measured", theme.series_color(1), 22))
        figure.add_trace(_ring(chosen, "planner's choice", theme.INK, 15))
    figure.add_trace(
        _marks(cells, [cell.step_ms or 0.0 for cell in cells], "measured", theme.series_color(0), "circle")
    )
    if failed:
        figure.add_trace(_marks(failed, [least] * len(failed), "failed", theme.ALERT, "x"))
    figure.update_xaxes(**theme.log_axis((least, most)), title_text="predicted step (ms)")
    figure.update_yaxes(**theme.log_axis((least, most)), title_text="measured step (ms)")
    lines = [theme.text(line) for line in measured.sentences()[:3]]
    title = theme.title(theme.text(measured.path.name), "<br>".join(lines))
    return figure.laid_out(height=510, title=title, margin={"t": 90, "b": 92}, legend=theme.LEGEND_BELOW)


def _marks(
    cells: tuple[MeasuredCell, ...] | list[MeasuredCell], at: list[float], name: str, color: str, symbol: str
) -> go.Scatter:
    marker = {"color": color, "symbol": symbol, "size": 9}
    words = [theme.text(_words(cell)) for cell in cells]
    return theme.marks([cell.predicted_ms for cell in cells], at, name, marker, words)


def _ring(cell: MeasuredCell, name: str, color: str, size: int) -> go.Scatter:
    marker = {"color": color, "symbol": "circle-open", "size": size, "line": {"width": 2}}
    return theme.marks([cell.predicted_ms], [cell.step_ms], name, marker)


def _words(cell: MeasuredCell) -> str:
    predicted = f"{cell.name}: predicted {duration(cell.predicted_ms / 1e3)}"
    return (
        f"{predicted}, {cell.reason}"
        if cell.step_ms is None
        else f"{predicted}, measured {duration(cell.step_ms / 1e3)}"
    )
