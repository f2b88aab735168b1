"""Plotly figures as widgets whose whole figure is state: the page draws the last state it has, whenever it can.

Plotly's `FigureWidget` sends changes instead. A page that is not ready for one (it is still drawing for the first time,
or was loaded again) never learns of it, and every change is answered with all that plotly.js made of it. A widget of
this module sends its state again with the next change, and the page draws many changes in a row as one (`plot.js`).

anywidget allows the module of a widget two seconds to load; a page on a busy machine that also has to receive and parse
plotly.js (4.8 MB) exceeds them, and shows no figure at all. Therefore the module of a plot is `plot.js` alone, and
plotly.js is the state of one hidden widget per kernel, to which all plots refer.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as widgets
import numpy as np
import plotly.graph_objects as go
import traitlets
from plotly.utils import PlotlyJSONEncoder

from workbench.figures import theme
from workbench.figures.figure import accessible_name, plotly_js

COLUMNS = ("x", "y", "customdata")
"""Fields of a trace that are sent as bytes where they are arrays of numbers."""


class PlotlyLibrary(widgets.Widget):
    """A widget without a view that holds plotly.js for all plots of a kernel. `plotly_library` makes it."""

    packed = traitlets.Bytes().tag(sync=True)
    """The source of plotly.js, compressed with gzip."""


def plotly_library() -> PlotlyLibrary:
    """Return this kernel's only holder of plotly.js; a new one if the last was closed (`Widget.close_all`)."""
    library = _holder()
    if library.comm is None:
        _holder.cache_clear()
        library = _holder()
    return library


@cache
def _holder() -> PlotlyLibrary:
    # The lowest level takes a third of the time of the usual one, for a sixth more bytes.
    return PlotlyLibrary(packed=gzip.compress(plotly_js().encode(), compresslevel=1))


class Plot(anywidget.AnyWidget):
    """A widget that shows the last figure given to `show`, as wide as the room it has."""

    _esm = Path(__file__).with_name("plot.js").read_text(encoding="utf-8")

    library = traitlets.Instance(PlotlyLibrary).tag(sync=True, **widgets.widget_serialization)
    """The holder of plotly.js, which the first plot of a page loads."""
    figure = traitlets.Unicode("{}").tag(sync=True)
    """The figure as JSON."""
    visible = traitlets.Any(None).tag(sync=True)
    """Low and high end of the zoomed first x axis (powers of ten on a log axis); None shows the whole axis."""
    tells_hover = traitlets.Bool(False).tag(sync=True)
    """True if `hovered` follows the pointer."""
    hovered = traitlets.Any(None).tag(sync=True)
    """Value of the x axis under the pointer, or None before the pointer was over a point."""
    rehearsal = traitlets.Unicode("").tag(sync=True)
    """A figure that the page draws once out of sight; the page empties it afterwards."""

    def __init__(self, **options: Any) -> None:
        super().__init__(library=plotly_library(), **options)

    def show(self, figure: go.Figure) -> None:
        """Draw a figure in place of the last one."""
        self.figure = _figure_json(figure)

    def rehearse(self, figure: go.Figure) -> None:
        """Draw a figure once, out of sight and soon after the first one.

        Code that a browser has not run yet takes several times as long; a rehearsal spares the user that wait.
        """
        self.rehearsal = _figure_json(figure)


class GrowingPlot(Plot):
    """A plot with a fixed number of traces, of which only the changed ones are sent. `growing_plot` makes one."""

    def redraw(self, layout: go.Layout, traces: Mapping[int, Any]) -> None:
        """Draw the figure with this layout and these traces, by their index; the others stay as they are."""
        frame = json.loads(self.figure)
        with self.hold_sync():
            self.figure = _frame_json(layout, frame["traces"], frame["config"])
            for index, trace in traces.items():
                setattr(self, f"trace_{index}", _trace_json(trace))


def growing_plot(layout: go.Layout, shown: Sequence[Any], **config: Any) -> GrowingPlot:
    """Return a widget that holds the whole figure, its layout and the traces shown, from its first message on.

    `config` holds options of plotly.js, which override those of `theme.CONFIG`.
    """
    traces = {f"trace_{index}": _trace_json(trace) for index, trace in enumerate(shown)}
    widget_class = type("GrowingPlot", (GrowingPlot,), {name: traitlets.Unicode().tag(sync=True) for name in traces})
    frame = _frame_json(layout, len(traces), {**theme.CONFIG, **config})
    widget: GrowingPlot = widget_class(figure=frame, **traces)
    return widget


def _figure_json(figure: go.Figure) -> str:
    value = json.loads(figure.to_json())
    config = {**theme.CONFIG, "displayModeBar": False}
    return json.dumps({**value, "config": config, "name": accessible_name(value["layout"])})


def _frame_json(layout: go.Layout, traces: int, config: dict[str, Any]) -> str:
    """Return all of a figure but its traces, of which it says the number."""
    shown = layout.to_plotly_json()
    frame = {"traces": traces, "layout": shown, "config": config, "name": accessible_name(shown)}
    return json.dumps(frame, cls=PlotlyJSONEncoder)


def _trace_json(trace: Any) -> str:
    """Return a trace as `plot.js` reads it: columns of numbers are base64 of float64, tables with their row width."""
    fields = trace.to_plotly_json()
    for name in COLUMNS:
        values = fields.get(name)
        if isinstance(values, np.ndarray) and values.dtype.kind in "fiu":
            column: dict[str, Any] = {
                "float64": base64.b64encode(np.ascontiguousarray(values, dtype="<f8").tobytes()).decode()
            }
            fields[name] = column if values.ndim == 1 else {**column, "width": values.shape[1]}
    return json.dumps(fields, cls=PlotlyJSONEncoder)
