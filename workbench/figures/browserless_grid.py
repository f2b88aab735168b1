"""Heat maps and parallel coordinates of a picture that Pillow draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.analysis.curve import Array
from workbench.figures import theme
from workbench.figures.browserless_canvas import Canvas
from workbench.figures.browserless_scale import Scale, written

GAP_PX = 1
"""Half of the gap between two cells of a heat map that does not give its gap, in pixels."""
BAR_PX = 12
"""Width of a colour bar, in pixels."""


def draw_heat_map(canvas: Canvas, trace: Any, x: Scale, y: Scale) -> None:
    """Draw cells of colour with their texts, and a colour bar with the least and the greatest value."""
    grid = np.asarray(trace.z, dtype=np.float64)
    colors, low, high = _colors(grid.ravel(), trace.colorscale, bool(trace.reversescale), (trace.zmin, trace.zmax))
    across, up = (GAP_PX if gap is None else gap / 2 for gap in (trace.xgap, trace.ygap))
    for position, color in enumerate(colors):
        row, column = divmod(position, grid.shape[1])
        left, right = x.from_numbers([column - 0.5, column + 0.5])
        bottom, top = y.from_numbers([row - 0.5, row + 0.5])
        if color is not None:
            canvas.rectangle((left + across, top + up), (right - across, bottom - up), color)
        if trace.text is not None:  # a cell without a value may say why
            ink = theme.INK if color is None else _ink_on(color)
            canvas.write(((left + right) / 2, (top + bottom) / 2), trace.text[row][column], ink, anchor="mm")
    left = x.end_px + 12
    for step, color in enumerate(_colors(np.linspace(low, high, 64), trace.colorscale, bool(trace.reversescale))[0]):
        edges = [y.start_px + share * (y.end_px - y.start_px) for share in (step / 64, (step + 1) / 64)]
        canvas.rectangle((left, edges[0]), (left + BAR_PX, edges[1]), color)
    if trace.colorbar.ticktext is not None:
        for value, word in zip(trace.colorbar.tickvals, trace.colorbar.ticktext, strict=True):
            at = y.start_px + (value - low) / (high - low) * (y.end_px - y.start_px)
            canvas.write((left + BAR_PX + 6, at), word, theme.MUTED, anchor="lm")
        return
    canvas.write((left, y.start_px + 4), f"{low:.4g}", theme.MUTED, anchor="la")
    canvas.write((left, y.end_px - 4), f"{high:.4g}", theme.MUTED, anchor="ld")


def draw_parallel_coordinates(canvas: Canvas, trace: Any, frame: Sequence[float]) -> None:
    """Draw an upright axis for each dimension, and a line for each row through its values."""
    left, top, right, bottom = frame
    places = np.linspace(left, right - 16, len(trace.dimensions))
    columns = []
    for place, dimension in zip(places, trace.dimensions, strict=True):
        values = np.asarray(dimension.values, dtype=np.float64)
        low, high = dimension.range or (values.min(), values.max())
        scale = Scale(float(low), float(high) if high > low else float(low) + 1, bottom, top + 24)
        columns.append(scale(values))
        canvas.write((place, top), dimension.label, anchor="md")
    colors = _colors(np.asarray(trace.line.color), trace.line.colorscale, bool(trace.line.reversescale))[0]
    for row, color in enumerate(colors):
        canvas.line(np.column_stack([places, [column[row] for column in columns]]), color or theme.AXIS, 1.5)
    for place, dimension in zip(places, trace.dimensions, strict=True):
        canvas.line([(place, top + 24), (place, bottom)], theme.AXIS, 1)
        values = np.asarray(dimension.values, dtype=np.float64)
        low, high = dimension.range or (values.min(), values.max())
        scale = Scale(float(low), float(high) if high > low else float(low) + 1, bottom, top + 24)
        ticks = dimension.tickvals if dimension.tickvals is not None else (low, high)
        words = dimension.ticktext if dimension.ticktext is not None else [written(float(f"{t:.4g}")) for t in ticks]
        for tick, word in zip(ticks, words, strict=True):
            canvas.write((place + 5, float(scale(tick))), word, anchor="lm")


def _colors(
    values: Array, scale: Any, backwards: bool, ends: tuple[float | None, float | None] = (None, None)
) -> tuple[list[str | None], float, float]:
    """Return the colour of each value, None where it is missing, and the ends of the scale: least and greatest value.

    `ends` replaces them where it is not None.
    """
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    low, high = (found if given is None else float(given) for given, found in zip(ends, (low, high), strict=True))
    shares = np.clip((values - low) / ((high - low) or 1.0), 0.0, 1.0)
    shares = 1 - shares if backwards else shares
    places = [place for place, _ in scale]
    channels = zip(*(_channels(color) for _, color in scale), strict=True)
    mixed = np.column_stack([np.interp(shares, places, channel) for channel in channels])
    colors = [f"rgb({red:.0f}, {green:.0f}, {blue:.0f})" for red, green, blue in mixed]
    return [color if np.isfinite(value) else None for color, value in zip(colors, values, strict=True)], low, high


def _channels(color: str) -> tuple[int, ...]:
    """Return red, green and blue of `#rrggbb` or `rgb(red, green, blue)`."""
    return theme.rgb(color) if color.startswith("#") else tuple(map(int, color[4:-1].split(",")))


def _ink_on(color: str) -> str:
    red, green, blue = (int(float(part)) for part in color[4:-1].split(","))
    return theme.ink_on(f"#{red:02x}{green:02x}{blue:02x}")
