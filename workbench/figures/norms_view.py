"""Maps of layers × steps: sizes of weights, gradients and updates, and what the optimiser lets expect of updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from workbench.base.arguments import checked_arguments
from workbench.base.errors import UnknownParameter, suggestion
from workbench.base.units import many
from workbench.figures import theme
from workbench.figures.figure import Figure, subplots
from workbench.record.columns import NORMS
from workbench.record.norms import BINS, Norms, read_norms
from workbench.runs.registry import load_run
from workbench.runs.run import OneRun

Table = NDArray[np.float64]
COLORS = [
    [share, color]
    for share, color in zip(
        np.linspace(0, 1, 6).tolist(), ("#440154", "#414487", "#2A788E", "#22A884", "#7AD151", "#FDE725"), strict=True
    )
]
"""Viridis, whose lightness rises with the value, also in print and to those who see no red or no green."""
APART = [[0.0, "#0B3C7D"], [0.25, "#5B8FD0"], [0.5, "#F4F4F4"], [0.75, "#E39A52"], [1.0, "#8C3A00"]]
"""Colours of less than expected, of what is inside, and of more."""
MOST_COLUMNS = 200
"""Largest number of recorded steps that are drawn; they are spread evenly over all."""
ROW_PX = (9, 22)
"""Least and largest height of a row."""
NAME_LETTERS = 30
LEAST_SHARE = 1e-4
"""Least share of the elements of a recorded step from which a bin is drawn."""
MOST_SHARE = 0.4
"""Share of the elements at which the colours of a histogram end: the first update of AdamW has all in one bin."""
LARGEST_FACTOR = 5.0
"""Power of 2 at which the colours of the distance from the interval end."""
PANELS = ("measured", "expected", "outside of it by")


@checked_arguments
def norms(run: OneRun, of: str = "updates", layer: str | None = None) -> Figure:
    """Draw how large the updates of each layer are beside what the optimiser lets expect, over the recorded steps.

    The first map has the norm of each update over that of the weights. The second has the middle of what the formulas
    of the optimiser let expect, with the factors of a rule of widths: between gradients that are independent from step
    to step and gradients that are all the same. The third says how far an update lies outside of this interval.

    Args:
        run: a run with `wb.Tracking(norms_every=…)`.
        of: `updates`, or `weights` or `gradients` for the root mean square of their elements.
        layer: name of a layer, to draw its parameters instead of all layers.

    Raises `UnknownParameter` for another layer or table, and `InvalidArgument` for a run that has recorded no norms.
    """
    handle = load_run(run)
    return draw_norms(read_norms(handle.directory.events, handle.name), handle.name, of, layer)


@checked_arguments
def magnitudes(run: OneRun, layer: str, of: str = "updates") -> Figure:
    """Draw a histogram of the elements of one layer by magnitude, as a map of powers of two × recorded steps.

    `of` is `updates`, `weights` or `gradients`. Raises what `norms` raises.
    """
    handle = load_run(run)
    return draw_magnitudes(read_norms(handle.directory.events, handle.name), handle.name, layer, of)


def draw_norms(found: Norms, name: str, of: str = "updates", layer: str | None = None) -> Figure:
    """Draw the maps of `norms` from its values."""
    if of not in NORMS:
        raise UnknownParameter(f"There are no norms of {of!r}. {suggestion(of, NORMS)}")
    rows = found.by_layer()
    if layer is not None:
        if layer not in found.layers:
            raise UnknownParameter(f"There is no layer {layer!r}. {suggestion(layer, rows.layers)}")
        rows = _only(found, [place for place, each in enumerate(found.layers) if each == layer])
    where = f"{theme.text(name)}{f', {theme.text(layer)}' if layer else ''}"
    shown = _spread(len(rows), MOST_COLUMNS)
    if of != "updates":
        table = rows[of] / np.sqrt(np.maximum(1.0, rows.elements))
        figure, words = subplots(1, 1), f"Root mean square of the {of}"
        figure.add_trace(_map(rows, shown, table, "rms"))
        return _finished(figure, rows, shown, theme.title(f"{words} of {where}", _spent(rows)), [])
    with np.errstate(divide="ignore", invalid="ignore"):
        relative, least, most = (rows[table] / rows.weights for table in ("updates", "least", "most"))
        middle, beyond = np.sqrt(least * most), outside(relative, least, most)
    known = bool(np.isfinite(middle).any())
    figure = subplots(1, 3 if known else 1, shared_yaxes=True)
    words = np.vectorize(_hover, otypes=[object])(relative, least, most)
    figure.add_trace(_map(rows, shown, relative, "ratio", words, also=middle, scale=not known), row=1, col=1)
    if known:
        figure.add_trace(_map(rows, shown, middle, "ratio", words, also=relative), row=1, col=2)
        figure.add_trace(_beyond(rows, shown, beyond, words), row=1, col=3)
    said = _verdict(rows, beyond) if known else "No formula says what this optimiser lets expect."
    title = theme.title(f"Updates of {where}, relative to the weights", f"{said} {_spent(rows)}")
    return _finished(figure, rows, shown, title, PANELS if known else [])


def outside(value: Table, least: Table, most: Table) -> Table:
    """Return the power of 2 by which a value lies above or (negative) below an interval; 0 inside, NaN if unknown."""
    with np.errstate(divide="ignore", invalid="ignore"):
        above, below = np.log2(value / most), np.log2(value / least)
    # An end that is met but for rounding, as by the first update of AdamW, is inside.
    near = np.abs(np.stack([above, below])).min(0) < 0.02
    inside = np.where(near, 0.0, np.maximum(0.0, above) + np.minimum(0.0, below))
    return np.asarray(np.where(np.isfinite(value) & np.isfinite(least) & np.isfinite(most), inside, np.nan))


def draw_magnitudes(found: Norms, name: str, layer: str, of: str = "updates") -> Figure:
    """Draw the map of `magnitudes` from its values."""
    counted = found.histogram(of, layer)
    shares_SE = counted / np.maximum(1.0, counted.sum(1, keepdims=True))
    held = np.flatnonzero((shares_SE >= LEAST_SHARE).any(0))
    low, end = (int(held[0]), int(held[-1]) + 1) if len(held) else (0, 1)
    shown = _spread(len(found), MOST_COLUMNS)
    shares = shares_SE[shown, low:end].T
    exponents = [f"2^{BINS[0] + exponent}" for exponent in range(low, end)]
    columns = [f"{found.step[at]:.0f}" for at in shown]
    grid = go.Heatmap(
        x=columns,
        y=exponents,
        z=np.where(shares >= LEAST_SHARE, shares, np.nan),
        colorscale=COLORS,
        zmin=0.0,
        zmax=min(MOST_SHARE, float(shares.max()) or 1.0),
        colorbar={"title": {"text": "share"}, "tickformat": ".0%", "outlinewidth": 0},
        hovertemplate="step %{x}, from %{y}<br>%{z:.3%} of the elements<extra></extra>",
    )
    figure = Figure(grid)
    ticks = exponents[:: max(1, -(-(end - low) // 20))]
    figure.update_yaxes(type="category", tickvals=ticks, title_text="Magnitude", showgrid=False)
    figure.update_xaxes(**_step_axis(columns))
    zeros = f"From each power of 2 to the next; without zeros and bins of less than {LEAST_SHARE:.2%}"
    title = theme.title(f"Elements of the {of} of {theme.text(layer)}, {theme.text(name)}", zeros)
    return figure.laid_out(height=max(360, 130 + 14 * (end - low)), title=title, margin={"t": 84, "r": 90})


def _only(found: Norms, places: Sequence[int]) -> Norms:
    """Return some of the parameters."""
    at = list(places)
    tables: Any = {name: found[name][:, at] for name in (*NORMS, "least", "most")}
    return replace(
        found,
        parameters=tuple(found.parameters[place] for place in at),
        layers=tuple(found.layers[place] for place in at),
        elements=found.elements[at],
        **tables,
    )


def _spread(count: int, most: int) -> list[int]:
    """Return at most `most` positions that are spread evenly over all, with the first and the last."""
    return sorted({round(float(at)) for at in np.linspace(0, count - 1, min(count, most))}) if count else []


def _hover(relative: float, least: float, most: float) -> str:
    said = f"update / weight {relative:.3g}"
    return said if not np.isfinite(least) else f"{said}<br>expected {least:.3g} to {most:.3g}"


def _map(
    rows: Norms,
    shown: Sequence[int],
    table: Table,
    title: str,
    words: Any = None,
    also: Table | None = None,
    scale: bool = True,
) -> go.Heatmap:
    """Return a map of a positive table, coloured by its logarithm; the colours reach over a second table too."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs, others = np.log10(table[shown]), np.log10(table if also is None else also)
    known = np.concatenate([each[np.isfinite(each)] for each in (logs, others)])
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    if high - low < 0.3:  # else noise would have all colours
        low, high = (low + high) / 2 - 0.15, (low + high) / 2 + 0.15
    ticks = np.linspace(low, high, 5)
    bar = {"tickvals": ticks, "ticktext": [f"{10**tick:.2g}" for tick in ticks], "title": {"text": title}}
    hover = np.vectorize(lambda value: f"{value:.3g}", otypes=[object])(table) if words is None else words
    return go.Heatmap(
        x=[f"{rows.step[at]:.0f}" for at in shown],
        y=list(rows.parameters),
        z=np.where(np.isfinite(logs), logs, np.nan).T,
        zmin=low,
        zmax=high,
        colorscale=COLORS,
        showscale=scale,
        colorbar={**bar, "outlinewidth": 0},
        hovertext=hover[shown].T,
        hovertemplate="%{y}<br>step %{x}<br>%{hovertext}<extra></extra>",
    )


def _beyond(rows: Norms, shown: Sequence[int], beyond: Table, words: Any) -> go.Heatmap:
    powers = range(-4, 5, 2)
    named = ["inside" if power == 0 else f"{'×' if power > 0 else '÷'} {2 ** abs(power)}" for power in powers]
    return go.Heatmap(
        x=[f"{rows.step[at]:.0f}" for at in shown],
        y=list(rows.parameters),
        z=beyond[shown].T,
        zmin=-LARGEST_FACTOR,
        zmax=LARGEST_FACTOR,
        colorscale=APART,
        colorbar={"tickvals": list(powers), "ticktext": named, "title": {"text": "factor"}, "outlinewidth": 0},
        hovertext=words[shown].T,
        hovertemplate="%{y}<br>step %{x}<br>%{hovertext}<extra></extra>",
    )


def _step_axis(columns: Sequence[str]) -> dict[str, Any]:
    ticks = [columns[at] for at in _spread(len(columns), 5)]
    labels = [f"{int(tick):,}" for tick in ticks]
    return {"type": "category", "tickvals": ticks, "ticktext": labels, "title_text": "Step", "showgrid": False}


def _finished(
    figure: Figure, rows: Norms, shown: Sequence[int], title: dict[str, Any], panels: Sequence[str]
) -> Figure:
    """Set the axes, the places of the maps and of their bars of colours, and the size."""
    count = len(rows.parameters)
    row_px = max(ROW_PX[0], min(ROW_PX[1], 640 // max(1, count)))
    ticks = _spread(count, max(1, count * row_px // 14))
    names = [rows.parameters[at] for at in ticks]
    shared = _shared_start(rows.parameters)
    labels = [theme.text(theme.short(each[len(shared) :], NAME_LETTERS)) for each in names]
    figure.update_yaxes(type="category", autorange="reversed", tickvals=names, ticktext=labels, showgrid=False)
    figure.update_xaxes(**_step_axis([f"{rows.step[at]:.0f}" for at in shown]))
    if panels:
        domains = [(0.0, 0.26), (0.3, 0.56), (0.7, 0.96)]
        for index, (low, high) in enumerate(domains, start=1):
            figure.update_xaxes(domain=[low, high], col=index)
            # Of the axes and not of the paper, which plotly.js takes before it has made room for the names.
            own = str(index) if index > 1 else ""
            at = {"x": 0.5, "xref": f"x{own} domain", "y": 1.0, "yref": f"y{own} domain", "yanchor": "bottom"}
            figure.add_annotation(text=panels[index - 1], showarrow=False, font={"color": theme.MUTED}, **at)
        for index in (1, 2):
            figure.data[index].colorbar.update(x=domains[index][1], xanchor="left", thickness=14)
            figure.update_yaxes(showticklabels=False, ticks="", col=index + 1)
    top = 92 if panels else 84
    return figure.laid_out(height=max(240, top + 62 + row_px * count), title=title, margin={"t": top, "r": 84, "b": 56})


def _shared_start(names: Sequence[str]) -> str:
    """Return the part of dotted names, up to a dot, that all of them begin with."""
    parts = zip(*(name.split(".")[:-1] for name in names), strict=False)
    alike = takewhile(lambda each: len(set(each)) == 1, parts)
    return "".join(f"{part[0]}." for part in alike) if len(names) > 1 else ""


def _verdict(rows: Norms, beyond: Table) -> str:
    """Return how many layers the last recorded update moved more or less than expected."""
    last, what = beyond[-1], "layer" if rows.parameters == rows.layers else "parameter"
    number, less, more = (int(each.sum()) for each in (np.isfinite(last), last < 0, last > 0))
    at = f"At step {rows.step[-1]:,.0f}"
    if not number:
        return f"{at} nothing is trained of them."
    if not less + more:
        return f"{at} all {many(number, what)} move as the optimiser lets expect."
    verb = {count: "moves" if count == 1 else "move" for count in (less, more)}
    said = " and ".join(f"{count} {verb[count]} {how}" for count, how in ((less, "less"), (more, "more")) if count)
    return f"{at}, of {many(number, what)}, {said} than the optimiser lets expect."


def _spent(rows: Norms) -> str:
    return f"A record takes {float(np.median(rows.spent_s)):.2g} s." if len(rows) else ""
