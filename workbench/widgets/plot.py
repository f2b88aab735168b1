"""A figure that is replaced whole, many times: one message and one drawing each, where a `FigureWidget` takes several.

A `FigureWidget` brings plotly.js, 5 MB, with every new one, and changes of its traces and its layout are drawn one by
one. This widget keeps its plotly.js, and `Plotly.react` draws what differs from the last figure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import anywidget
import plotly.graph_objects as go
import traitlets

from workbench.figures import theme
from workbench.figures.export import plotly_js

RENDER = """
const Plotly = globalThis.Plotly;
function render({ model, el }) {
  const node = document.createElement("div");
  el.append(node);
  const draw = () => {
    const { data, layout, config } = JSON.parse(model.get("figure"));
    return data ? Plotly.react(node, data, layout, config) : Plotly.purge(node);
  };
  const fit = new ResizeObserver(() => {
    if (node.offsetWidth && node._fullLayout && node._fullLayout.width !== node.offsetWidth) Plotly.Plots.resize(node);
  });
  draw();
  fit.observe(el);
  model.on("change:figure", draw);
  return () => {
    model.off("change:figure", draw);
    fit.disconnect();
    Plotly.purge(node);
  };
}
export default { render };
"""


class Plot(anywidget.AnyWidget):
    """Shows the last figure that was given to `show`, as wide as its place."""

    figure = traitlets.Unicode("{}").tag(sync=True)

    def __init__(self, **options: Any) -> None:
        self._esm = plotly_js() + RENDER
        super().__init__(**options)

    def show(self, figure: go.Figure) -> None:
        """Draw this figure in place of the last."""
        value: Mapping[str, Any] = {**json.loads(figure.to_json()), "config": {**theme.CONFIG, "displayModeBar": False}}
        self.figure = json.dumps(value)
