"""Figures that change while they are looked at: the page draws the last state that it was given, whenever it can.

Plotly's own `FigureWidget` sends changes, and a page that was not ready for one never learns of it: one that is still
drawing for the first time, or was loaded again. It also answers every change with all that plotly.js made of it. Here
everything is state: whatever is lost or late, the next drawing has it, and many changes in a row are one drawing.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import Any

import anywidget
import numpy as np
import plotly.graph_objects as go
import traitlets
from plotly.utils import PlotlyJSONEncoder

from workbench.figures import theme
from workbench.figures.pages import plotly_js

COLUMNS = ("x", "y", "customdata")
"""Of a trace: what is sent as bytes where it is an array of numbers."""

LIBRARY = "if (!globalThis.workbenchPlotly) {{ {source}\nglobalThis.workbenchPlotly = globalThis.Plotly; }}\n"
"""Every widget brings plotly.js; the first of a page runs it."""

RENDER = """
function bytes(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const letters = atob(text), values = new Uint8Array(letters.length);
  for (let at = 0; at < values.length; at++) values[at] = letters.charCodeAt(at);
  return values;
}

function decoded(trace) {
  for (const [name, column] of Object.entries(trace)) {
    if (typeof column?.float64 !== "string") continue;
    const values = new Float64Array(bytes(column.float64).buffer), width = column.width;
    trace[name] = !width ? values
      : Array.from({ length: values.length / width }, (_, row) => values.subarray(row * width, (row + 1) * width));
  }
  return trace;
}

function render({ model, el }) {
  const Plotly = globalThis.workbenchPlotly;
  const node = document.createElement("div");
  el.append(node);
  const kept = [];  // of each trace, the text that it came as, and itself
  let timer = null, behind = true, ended = 0, took = 0, width = 0, listens = false, gone = false;

  const trace = index => {
    const text = model.get(`trace_${index}`);
    if (kept[index]?.text !== text) kept[index] = { text, value: decoded(JSON.parse(text)) };
    return { ...kept[index].value };
  };

  const draw = () => {
    timer = null;
    if (gone || !node.offsetWidth) return;  // off the page: the observer asks when it is there
    if (node._dragging) return ask(50);
    const started = performance.now();
    const { traces, data, layout, config } = JSON.parse(model.get("figure"));
    behind = false;
    if (!layout) return;
    width = node.offsetWidth;
    const shown = data ?? Array.from({ length: traces }, (_, index) => trace(index));
    Plotly.react(node, shown, { ...layout, width, autosize: false }, { ...config, responsive: false });
    if (!listens) {
      node.on("plotly_afterplot", tell);
      setTimeout(ask, 1000);  // plotly.js is twice as fast the second time: not when somebody waits for it
      setTimeout(rehearse, 1500);
      listens = true;
    }
    ended = performance.now();
    took = ended - started;
  };

  const rehearse = () => {  // out of sight, once
    const text = model.get("rehearsal");
    if (gone || !text) return;
    if (timer !== null) return setTimeout(rehearse, 1000);
    const { data, layout, config } = JSON.parse(text);
    const stage = document.createElement("div");
    stage.style = `position:absolute;visibility:hidden;left:-9999px;width:${width}px`;
    document.body.append(stage);
    Plotly.newPlot(stage, data, { ...layout, width, autosize: false }, { ...config, responsive: false });
    Plotly.purge(stage);
    stage.remove();
    model.set("rehearsal", "");
    model.save_changes();
  };

  const ask = (after = 0) => {  // after a drawing, the page has as long for other things
    behind = true;
    if (timer !== null) return;
    const wait = Math.max(after, ended + took - performance.now());
    timer = wait > 0 ? setTimeout(draw, wait) : 0;
    if (timer === 0) queueMicrotask(draw);  // when all that came with one message is in place
  };

  const changed = () => ask();
  const { traces: count = 0 } = JSON.parse(model.get("figure"));
  const states = ["figure", ...Array.from({ length: count }, (_, index) => `trace_${index}`)];

  const tell = () => {  // plotly_relayout comes later than the drawing that it reports
    const { range, autorange } = node._fullLayout.xaxis ?? {};
    const seen = autorange || !range ? null : range.map(Number);
    if (JSON.stringify(seen) === JSON.stringify(model.get("visible"))) return;
    model.set("visible", seen);
    model.save_changes();
  };

  const fit = new ResizeObserver(() => {
    if (node.offsetWidth && (behind || node.offsetWidth !== width)) ask();
  });

  if (model.get("visible")) {  // a page that was loaded again shows the whole
    model.set("visible", null);
    model.save_changes();
  }
  draw();
  fit.observe(el);
  states.forEach(name => model.on(`change:${name}`, changed));
  return () => {
    states.forEach(name => model.off(`change:${name}`, changed));
    fit.disconnect();
    clearTimeout(timer);
    gone = true;
    Plotly.purge(node);
  };
}
export default { render };
"""


class Plot(anywidget.AnyWidget):
    """Shows the last figure that was given to `show`, as wide as its place."""

    figure = traitlets.Unicode("{}").tag(sync=True)
    visible = traitlets.Any(None).tag(sync=True)
    """Low and high end of the first x axis where the user zoomed in, of a log axis in powers of ten; or None."""

    rehearsal = traitlets.Unicode("").tag(sync=True)

    def __init__(self, **options: Any) -> None:
        self._esm = LIBRARY.format(source=plotly_js()) + RENDER
        super().__init__(**options)

    def show(self, figure: go.Figure) -> None:
        """Draw this figure in place of the last."""
        self.figure = _whole(figure)

    def rehearse(self, figure: go.Figure) -> None:
        """Draw this figure once, out of sight and soon after the first one: code that a browser has not run yet takes
        several times as long, and the first figure of its kind should not."""
        self.rehearsal = _whole(figure)


class GrowingPlot(Plot):
    """A figure whose traces change, not their number; only those that changed are sent. Make one by `growing`."""

    def show(self, figure: go.Figure, changed: Iterable[int] | None = None) -> None:
        """Draw the figure as it is now; `changed` names the traces that may have changed (default: all)."""
        numbers = range(len(figure.data)) if changed is None else changed
        with self.hold_sync():
            self.figure = _frame(figure, json.loads(self.figure)["config"])
            for number in numbers:
                setattr(self, _trait(number), _sent(figure.data[number]))


def growing(figure: go.Figure, **config: Any) -> GrowingPlot:
    """A widget that holds the whole figure from its first message on; `config` is plotly's, beside `theme.CONFIG`."""
    traces = {_trait(number): _sent(trace) for number, trace in enumerate(figure.data)}
    kind = type("GrowingPlot", (GrowingPlot,), {name: traitlets.Unicode().tag(sync=True) for name in traces})
    widget: GrowingPlot = kind(figure=_frame(figure, {**theme.CONFIG, **config}), **traces)
    return widget


def _whole(figure: go.Figure) -> str:
    return json.dumps({**json.loads(figure.to_json()), "config": {**theme.CONFIG, "displayModeBar": False}})


def _trait(number: int) -> str:
    return f"trace_{number}"


def _frame(figure: go.Figure, config: dict[str, Any]) -> str:
    layout = figure.layout.to_plotly_json()
    return json.dumps({"traces": len(figure.data), "layout": layout, "config": config}, cls=PlotlyJSONEncoder)


def _sent(trace: Any) -> str:
    fields = trace.to_plotly_json()
    for name in COLUMNS:
        if isinstance(fields.get(name), np.ndarray) and fields[name].dtype.kind in "fiu":
            fields[name] = _packed(fields[name])
    return json.dumps(fields, cls=PlotlyJSONEncoder)


def _packed(values: Any) -> dict[str, Any]:
    """An array as the page reads it; `width` is that of a row, of a table."""
    packed = {"float64": base64.b64encode(np.ascontiguousarray(values, dtype="<f8").tobytes()).decode()}
    return packed if values.ndim == 1 else {**packed, "width": values.shape[1]}
