"""A measured grid while it is measured: measured over predicted steps, its sentences and a table."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets
from IPython.display import HTML, display

from workbench.figures.figure import mimebundle
from workbench.figures.measured_grid_view import predictions
from workbench.sweeps.measured import MeasuredGrid
from workbench.widgets.live_widget import LiveWidget
from workbench.widgets.plot import Plot

REFRESH_S = 1.0
"""Seconds between two looks at the grid's directory."""


class LiveGrid(LiveWidget):
    """A measured grid that fills as its cells end. `close()` removes it from the page; the measurement goes on."""

    def __init__(self, measured: MeasuredGrid, refresh_s: float = REFRESH_S) -> None:
        super().__init__(refresh_s, f"wb.sweeps.load_grid({str(measured.path)!r})")
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


def show_grid(measured: MeasuredGrid) -> None:
    """Display a measured grid in a notebook: a widget that updates itself while it is measured, else plain outputs."""
    if measured.alive:
        LiveGrid(measured)._ipython_display_()
    else:
        display(HTML(measured._repr_html_()))
        display(mimebundle(predictions(measured)), raw=True)
