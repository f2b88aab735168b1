"""The Pareto figure of sparse training: held-out loss against FLOPs and, beside it, against seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from workbench.analysis.pareto import ParetoPoint, pareto_front
from workbench.figures import theme
from workbench.figures.figure import Figure, subplots

SYMBOLS = {"dense": "circle", "static": "square", "dynamic": "diamond"}


def pareto(points: Sequence[ParetoPoint], published: Mapping[str, tuple[float, float]] | None = None) -> Figure:
    """Draw the held-out loss of each configuration against its FLOPs and against its seconds.

    A line joins the configurations of each panel that none beats in both cost and loss; bars reach over the seeds.
    `published` adds results of others, each a GFLOP of a sequence and a loss, in grey to the first panel.
    """
    figure = subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.04)
    gflop, losses = zip(*published.values(), strict=True) if published else ((), ())
    if published:
        names = list(map(theme.text, published))
        grey = {"color": theme.AXIS, "symbol": "circle-open", "size": 8}
        mark = {"x": gflop, "y": losses, "text": names, "mode": "markers", "marker": grey, "name": "published"}
        figure.add_trace(go.Scatter(**mark, hovertemplate="%{text}<br>%{x} GFLOP<br>%{y}<extra></extra>"), row=1, col=1)
    for panel, cost in enumerate(("gflop", "seconds"), start=1):
        figure.add_trace(_front(points, cost, showlegend=panel == 1), row=1, col=panel)
        for index, point in enumerate(points):
            figure.add_trace(_marker(point, getattr(point, cost), index, showlegend=panel == 1), row=1, col=panel)
    words = "GFLOP of a sequence: layers, and head at labelled positions"
    costs = (words, [*gflop, *(point.gflop for point in points)]), ("Training time (s)", [at.seconds for at in points])
    for column, (words, values) in enumerate(costs, start=1):
        figure.update_xaxes(**theme.log_axis(values), title_text=words, col=column)
    figure.update_yaxes(title_text="Held-out loss", col=1)
    words = "Where weights are masked, absent blocks are computed too, and fewer FLOPs take no fewer seconds"
    return figure.with_legend_below(400, "Loss against cost: FLOPs and wall time", words)


def _marker(point: ParetoPoint, cost: float, index: int, showlegend: bool) -> go.Scatter:
    name, loss = theme.text(point.name), point.loss
    ends = {"array": [max(point.losses) - loss], "arrayminus": [loss - min(point.losses)], "symmetric": False}
    bars = {**ends, "visible": len(point.losses) > 1, "thickness": 2}
    marker = {"color": theme.series_color(index), "symbol": SYMBOLS[point.group], "size": 11}
    shown = {"legendgroup": point.name, "showlegend": showlegend, "name": name, "error_y": bars, "marker": marker}
    hover = f"{name}<br>%{{x:.4g}}<br>%{{y:.4g}}<extra></extra>"
    return go.Scatter(x=[cost], y=[loss], mode="markers", hovertemplate=hover, **shown)


def _front(points: Sequence[ParetoPoint], cost: str, showlegend: bool) -> go.Scatter:
    """Return the line through the points that no other beats in both cost and loss."""
    front = pareto_front([(getattr(point, cost), point.loss) for point in points])
    x, y = ([pair[which] for pair in front] for which in (0, 1))
    shown = {"legendgroup": "front", "showlegend": showlegend, "hoverinfo": "skip"}
    return theme.curve(x, y, "Pareto front", theme.MUTED, "dot", 1, **shown)
