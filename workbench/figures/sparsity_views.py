"""Figures of sparse training: loss against cost, one pattern as it moves, and what all patterns have explored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from workbench.analysis.pareto import ParetoPoint, pareto_front
from workbench.figures import theme
from workbench.figures.figure import Figure, subplots
from workbench.runs.records.patterns import Patterns
from workbench.units import count

SYMBOLS = {"dense": "circle", "static": "square", "dynamic": "diamond"}
LOOKS = {"absent": "#F3F4F6", "stayed": "#0072B2", "regrown": "#D55E00", "pruned": "#F2C9A8"}
"""Colour of a block by what the last update did with it."""
MOST_FRAMES = 60
"""Largest number of positions of the slider."""


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


def pattern(patterns: Patterns, name: str) -> Figure:
    """Draw the pattern of one weight with a slider over the updates; blocks that an update moved have other colours."""
    frames = np.unique(np.linspace(0, len(patterns) - 1, min(MOST_FRAMES, len(patterns))).round().astype(int))
    pairs = [(patterns.pictures[at], patterns.pictures[max(0, at - 1)]) for at in frames.tolist()]
    states = [np.where(now, np.where(before, 1, 2), np.where(before, 3, 0)) for now, before in pairs]  # as in `LOOKS`
    last, shown = len(LOOKS), len(states) // 2  # the last updates hardly move a block
    scale = [(edge / last, color) for at, color in enumerate(LOOKS.values()) for edge in (at, at + 1)]
    grids = [
        go.Heatmap(
            x=list(range(state.shape[1])),
            y=list(range(state.shape[0])),
            z=state,
            zmin=-0.5,
            zmax=last - 0.5,
            colorscale=scale,
            xgap=1 if state.shape[1] <= 32 else 0,
            ygap=1 if state.shape[0] <= 32 else 0,
            visible=at == shown,
            colorbar={"tickvals": list(range(last)), "ticktext": list(LOOKS), "outlinewidth": 0, "len": 0.6},
            hovertemplate="row %{y}, column %{x}<extra></extra>",
        )
        for at, state in enumerate(states)
    ]
    figure = Figure(grids)
    figure.update_xaxes(title_text="Column of blocks", constrain="domain", showgrid=False)
    figure.update_yaxes(title_text="Row of blocks", autorange="reversed", scaleanchor="x", showgrid=False)
    steps = [
        {
            "label": count(patterns.step[at]),
            "method": "update",
            "args": [{"visible": [other == index for other in range(len(frames))]}],
        }
        for index, at in enumerate(frames)
    ]
    slider = {"steps": steps, "active": shown, "currentvalue": {"prefix": "after step "}, "pad": {"t": 40}}
    subtitle = f"{theme.text(patterns.weight)}, its first {states[-1].shape[0]} × {states[-1].shape[1]} blocks"
    title = theme.title(f"The pattern of {theme.text(name)} as it moves", subtitle)
    return figure.laid_out(height=620, title=title, sliders=[slider])


def exploration(patterns: Mapping[str, Patterns]) -> Figure:
    """Draw the share of blocks that each run has explored so far, and the share that its updates replace."""
    panels = (("explored", "Explored share of the blocks"), ("prune_ratio", "Prune ratio"))
    figure = subplots(1, 2, subplot_titles=[title for _, title in panels])
    for index, (name, columns) in enumerate(patterns.items()):
        for panel, (column, _) in enumerate(panels, start=1):
            look = theme.series_color(index), theme.series_dash(index)
            shown = {"legendgroup": name, "showlegend": panel == 1}
            trace = theme.curve(columns.step, columns[column], theme.text(theme.short(name)), *look, **shown)
            figure.add_trace(trace.update(mode="lines" if len(columns) > 1 else "markers"), row=1, col=panel)
    figure.update_xaxes(title_text="Step", rangemode="tozero")
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    words = "Blocks that are or once were present, over all sparse weights"
    return figure.with_legend_below(380, "How the patterns explore", words)
