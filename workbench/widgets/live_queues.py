"""Sweeps and measured grids while their runs train: tables, figures, and a button for each run at work."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
from IPython.display import HTML, display

from workbench.display import Html, html_table
from workbench.figures.figure import mimebundle
from workbench.figures.sweep_view import (
    Losses,
    axes_of_heat_map,
    draw_heat_map,
    draw_seed_bands,
    predictions,
    read_losses,
)
from workbench.runs.run import Run
from workbench.sweeps.grid import MeasuredGrid
from workbench.sweeps.sweep import Row, Sweep
from workbench.widgets.dashboard import DashboardRow, name_width, swatch
from workbench.widgets.live_widget import LiveWidget
from workbench.widgets.plot import Plot
from workbench.widgets.run_reader import RunReader

SWEEP_S, GRID_S = 0.5, 1.0
"""Seconds between two looks at the directory of a sweep, and of a grid."""
MAX_ROWS = 50
"""Largest number of configurations in the table; the best come first."""


class LiveSweep(LiveWidget):
    """A sweep that updates itself until it has ended. `close()` removes it from the page; the sweep goes on."""

    def __init__(self, sweep: Sweep, refresh_s: float = SWEEP_S) -> None:
        super().__init__(refresh_s, f"wb.sweeps.load_sweep({str(sweep.path)!r})")
        self._sweep = sweep
        self._readers: dict[tuple[Path, int], tuple[RunReader, DashboardRow]] = {}
        self._ended: set[Path] = set()
        self._losses: dict[Path, Losses] = {}
        self._rows: Sequence[Row] = ()
        self._head, self._foot = widgets.HTML(), widgets.HTML()
        self._at_work = widgets.VBox()
        self._table = widgets.HTML(layout={"flex": "1 1 360px", "margin": "0 16px 0 0"})
        self._heat_map, self._curves = Plot(layout={"flex": "1 1 460px", "min_width": "0"}), Plot()
        results = widgets.HBox((self._table, self._heat_map), layout={"flex_flow": "row wrap"})
        self.children = (self._head, self._at_work, self._curves, results, self._foot, self.note, self.hider)
        self.update()
        self.follow()

    def update(self) -> bool:
        """Read the sweep's directory and draw what it holds; return True if the sweep has ended."""
        ended = self.is_over()  # asked before the last look at the results
        self._rows = self._sweep.rows()
        for row in self._rows:
            for run in row.runs:
                if run not in row.at_work and run.path not in self._ended:
                    self._losses[run.path] = read_losses(run)
                    self._ended.add(run.path)
        at_work = [(row, run) for row in self._rows for run in row.at_work if run.directory.experiment.exists()]
        self._ended.difference_update(run.path for _, run in at_work)  # `resume` goes on with runs that had ended
        boxes = [self._read(row, run) for row, run in at_work]
        boxes = [box for box in boxes if box.layout.display != "none"]
        if list(self._at_work.children) != boxes:
            self._at_work.children = boxes
        self._head.value = f"<b>{html.escape(self._sweep.headline())}</b>"
        self._foot.value = _small(self._sweep.footline())
        self._table.value = table_html(self._sweep, self._rows)
        heat_map, curves = self._figures()
        self._heat_map.show(heat_map)
        self._curves.show(curves)
        return ended

    def is_over(self) -> bool:
        """Return True if the sweep has ended."""
        return not self._sweep.alive

    def _read(self, row: Row, run: Run) -> widgets.HBox:
        """Read a run at work, and return its row with the button that stops it.

        A run that was set aside and begun again has another reader. One that has ended, but whose end the sweep has not
        noted, has no button.
        """
        key = run.path, run.path.stat().st_ino
        if key not in self._readers:
            reader, width_px = RunReader(run.path), name_width([_name(each, run) for each in self._rows])
            self._readers[key] = reader, DashboardRow(reader, row.index, name_px=width_px)  # rows have one width
        reader, shown = self._readers[key]
        snapshot = replace(reader.read(), name=_name(row, run))
        shown.show(snapshot)
        shown.box.layout.display = "none" if snapshot.status.final else None
        assert snapshot.evaluations is not None
        self._losses[run.path] = snapshot.history, snapshot.evaluations
        return shown.box

    def _losses_of(self, run: Run) -> Losses:
        return self._losses[run.path] if run.path in self._losses else read_losses(run)

    def _figures(self) -> tuple[go.Figure, go.Figure]:
        return figures(self._sweep, self._rows, self._losses_of)

    def twin(self) -> tuple[Any, ...]:
        """Return the table, the heat map and the curves."""
        return static_html(self._sweep, self._rows), *map(self.bundle, self._figures())


def _name(row: Row, run: Run) -> str:
    """Return the values of a configuration, and the seed of a run, in words."""
    return ", ".join(f"{name} {value}" for name, value in {**row.values, "seed": run.config["seed"]}.items())


def figures(sweep: Sweep, rows: Sequence[Row], read: Any = read_losses) -> tuple[go.Figure, go.Figure]:
    """Return the heat map of a sweep and its curves."""
    x, y = axes_of_heat_map(list(sweep.axes))
    return draw_heat_map(sweep, rows, x, y), draw_seed_bands(sweep, rows, read)


def static_html(sweep: Sweep, rows: Sequence[Row]) -> str:
    """Return state, table and notes of a sweep as HTML."""
    head = f"<b>{html.escape(sweep.headline())}</b>"
    return f"<div>{head}{table_html(sweep, rows)}{_small(sweep.footline())}</div>"


def table_html(sweep: Sweep, rows: Sequence[Row]) -> str:
    """Return the best configurations as an HTML table, each with the colour of its curve."""
    head, *cells = sweep.cells(rows[:MAX_ROWS])
    keys = [Html(swatch(row.index)) for row in rows]
    lines = [(key, *texts) for key, texts in zip(keys, cells, strict=False)]
    look = "style='margin:4px 0;font-size:12px;white-space:nowrap'"
    table = html_table(("", *head), lines, "text-align:left;padding:1px 12px 1px 0", attributes=look)
    more = _small(f"and {len(rows) - MAX_ROWS} other configurations") if len(rows) > MAX_ROWS else ""
    return f"<div style='max-height:360px;overflow:auto;line-height:1.4'>{table}{more}</div>"


def _small(text: str) -> str:
    return f"<div style='font-size:12px;line-height:1.5'>{html.escape(text)}</div>"


class LiveGrid(LiveWidget):
    """A measured grid that fills as its cells end. `close()` removes it from the page; the measurement goes on."""

    def __init__(self, measured: MeasuredGrid) -> None:
        super().__init__(GRID_S, f"wb.sweeps.load_grid({str(measured.path)!r})")
        self._measured = measured
        self._words, self._plot = widgets.HTML(), Plot()
        self._seen: tuple[int, int] | None = None
        self.children = (self._plot, self._words, self.note, self.hider)
        self.update()
        self.follow()

    def update(self) -> bool:
        """Draw the grid when a cell has begun or ended; return True if the measurement has ended."""
        ended = self.is_over()  # asked before the last look at the results
        seen = len(self._measured.runs), len(self._measured.results())
        if seen != self._seen or ended:  # other looks would take time from the steps that are measured
            self._seen = seen
            self._words.value = self._measured._repr_html_()
            self._plot.show(predictions(self._measured))
        return ended

    def is_over(self) -> bool:
        """Return True if the measurement has ended."""
        return not self._measured.alive

    def twin(self) -> tuple[Any, ...]:
        """Return the table and the figure."""
        return self._words.value, self.bundle(predictions(self._measured))


def show_queue(queue: Sweep | MeasuredGrid) -> None:
    """Display a queue in a notebook: a widget that updates itself while the queue is at work, else plain outputs."""
    if queue.alive:
        (LiveSweep(queue) if isinstance(queue, Sweep) else LiveGrid(queue))._ipython_display_()
        return
    if isinstance(queue, Sweep):
        rows = queue.rows()
        page, shown = static_html(queue, rows), [*figures(queue, rows)]
    else:
        page, shown = queue._repr_html_(), [predictions(queue)]
    display(HTML(page))
    for figure in shown:
        display(mimebundle(figure), raw=True)
