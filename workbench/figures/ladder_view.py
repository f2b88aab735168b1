"""Figures of a scaling law: the loss of each size over tokens, and the difference of pairs over tokens a parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
import plotly.graph_objects as go

from workbench.analysis.curve import Array
from workbench.analysis.ladder import LadderPoint, ScalingLaw
from workbench.analysis.laws import KAPLAN
from workbench.arguments import checked_arguments
from workbench.errors import InvalidArgument
from workbench.figures import theme
from workbench.figures.figure import Figure
from workbench.units import count

POINTS = 60
"""Number of points of a curve of the law."""
OTHERS = ("square-open", "diamond-open", "circle-open", "triangle-up-open", "cross-open")
"""Symbols of other results; open ones are seen where they lie on each other."""
Pair = tuple[float, float]
"""Parameters of a smaller and a larger model, without embeddings."""


@checked_arguments
def ladder(law: ScalingLaw, predicted: Sequence[LadderPoint] = ()) -> Figure:
    """Draw the held-out loss over the tokens: ends of runs, and the law with its interval for each size.

    Args:
        law: the fitted law.
        predicted: ends of runs that the law has not seen, as open diamonds; the lines of their sizes are dashed.
    """
    figure = Figure()
    budgets = np.array([point.tokens for point in (*law.points, *predicted)])
    tokens = np.geomspace(budgets.min() / 1.3, budgets.max() * 2, POINTS)
    for index, size in enumerate(sorted({point.parameters for point in (*law.points, *predicted)})):
        seen = [point for point in law.points if point.parameters == size]
        color, group = theme.series_color(index), {"legendgroup": str(index)}
        loss, low, high = law.losses(size, tokens)
        figure.add_trace(theme.band(tokens, low, high, color, **group))
        name = f"{count(size)} parameters{'' if seen else ', predicted'}"
        figure.add_trace(theme.curve(tokens, loss, name, color, "solid" if seen else "dash", meta="line", **group))
        shown = seen or [point for point in predicted if point.parameters == size]
        marker = {"color": color, "size": 8 if seen else 10, "symbol": "circle" if seen else "diamond-open"}
        x, y = [point.tokens for point in shown], [point.loss for point in shown]
        marks = {"mode": "markers", "marker": marker, "name": f"{count(size)}, runs", "showlegend": False, **group}
        figure.add_trace(go.Scatter(x=x, y=y, hovertemplate="%{x:.4g} tokens<br>%{y:.4g}<extra></extra>", **marks))
    figure.update_xaxes(type="log", title_text="Tokens")
    figure.update_yaxes(type="log", tickformat=theme.LOG_TICKS, title_text="Held-out loss in nats")
    words = "Ends of runs, the law, and its 90 % interval"
    words += "; dashed and open: predicted without these runs" if predicted else ""
    return figure.with_legend_below(440, "The ladder: loss over tokens for each size", words)


@checked_arguments
def pair_difference(
    law: ScalingLaw,
    pairs: Mapping[str, Pair],
    real: Mapping[str, Pair] | None = None,
    others: Mapping[str, Pair] | None = None,
    predicted: Sequence[LadderPoint] = (),
) -> Figure:
    """Draw by how many nats the larger model of each pair is lower, over the tokens per parameter of the larger model.

    Args:
        law: the fitted law.
        pairs: parameters of the smaller and the larger model of each trained pair, by name; marks are means over runs
            of equal tokens, and bars reach from the closest two runs to the farthest.
        real: pairs that the law is extrapolated to, with its interval, beside Kaplan et al.'s published law.
        others: other results by name: tokens per parameter of the larger model, and nats.
        predicted: ends of runs that the law has not seen.
    """
    if not pairs:
        raise InvalidArgument("pairs is empty. Give the parameters of a smaller and a larger model.")
    figure = Figure()
    for index, (name, (small, large)) in enumerate(pairs.items()):
        of_size = [[p for p in (*law.points, *predicted) if p.parameters == size] for size in (small, large)]
        budgets = sorted({p.tokens for p in of_size[0]} & {p.tokens for p in of_size[1]})
        losses = [[[p.loss for p in side if p.tokens == at] for side in of_size] for at in budgets]
        mean = np.array([np.mean(few) - np.mean(many) for few, many in losses])
        up = np.array([max(few) - min(many) for few, many in losses]) - mean
        down = mean - np.array([min(few) - max(many) for few, many in losses])
        color, group = theme.series_color(index), {"legendgroup": str(index), "name": theme.text(name)}
        bars = {"array": up, "arrayminus": down, "symmetric": False, "thickness": 1.5}
        seen = any(point.parameters == large for point in law.points)
        marker = {"color": color, "size": 9, "symbol": "circle" if seen else "diamond-open"}
        at = np.array(budgets) / large
        figure.add_trace(
            go.Scatter(x=at, y=mean, error_y=bars, mode="markers", marker=marker, showlegend=False, **group)
        )
        if budgets:
            tokens = np.geomspace(min(budgets) / 1.5, max(budgets) * 1.5, POINTS)
            _add_law(figure, law, (small, large), tokens, color, "solid" if seen else "dash", group)
    for index, (name, (small, large)) in enumerate((real or {}).items(), start=len(pairs)):
        color, group = theme.series_color(index), {"legendgroup": str(index)}
        tokens = np.geomspace(0.003, 100, POINTS) * large
        extrapolated = {**group, "name": f"{theme.text(name)}, extrapolated"}
        _add_law(figure, law, (small, large), tokens, color, "dash", extrapolated)
        published = {"legendgroup": f"{index} published", "meta": "line"}
        x, y, words = tokens / large, KAPLAN.difference(small, large, tokens), f"{theme.text(name)}, Kaplan et al."
        figure.add_trace(theme.curve(x, y, words, color, "dot", 1.5, **published))
    for symbol, (name, (tokens_each, nats)) in zip(cycle(OTHERS), (others or {}).items(), strict=False):
        grey = {"color": theme.AXIS, "symbol": symbol, "size": 9, "line": {"width": 2}}
        figure.add_trace(go.Scatter(x=[tokens_each], y=[nats], mode="markers", marker=grey, name=theme.text(name)))
    figure.add_hline(y=0, line={"color": theme.AXIS, "width": 1})
    figure.update_xaxes(type="log", title_text="Tokens for each parameter of the larger model, without embeddings")
    figure.update_yaxes(title_text="Nats by which the larger model is lower")
    words = "Marks: runs, bars from the closest two to the farthest; lines: the law, with its 90 % interval"
    return figure.with_legend_below(440, "How much lower the larger model of a pair ends", words)


def _add_law(
    figure: Figure, law: ScalingLaw, pair: Pair, tokens: Array, color: str, dash: str, group: dict[str, str]
) -> None:
    value, low, high = law.differences(*pair, tokens)
    x = tokens / pair[1]
    figure.add_trace(theme.band(x, low, high, color, **group))
    figure.add_trace(theme.curve(x, value, color=color, dash=dash, meta="line", **group))
