"""PNG of a figure of curves, drawn with Pillow: for notebooks where no script runs, on machines without Chrome.

It draws lines, markers and end labels over one pair of axes, and a legend. Pillow's own font has Latin characters only;
others are replaced by similar ones, or by a question mark.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.figures import theme
from workbench.figures.curve import Array
from workbench.figures.legend_placement import corner_of

WIDTH_PX = 860
"""Width of a notebook's column: JupyterLab cuts a wider picture off."""
OVERSAMPLING = 3
"""Factor by which the drawing is finer than the PNG, which averages it: Pillow's lines are jagged."""
LEFT, RIGHT, BELOW = 70, 76, 56
"""Margins of the plot, in pixels."""
LINE_PX = 18
SIMILAR = str.maketrans({"×": "x", "–": "-", "→": "->", "≤": "<=", "≥": ">=", "○": "o", "▷": ">", "▲": "^", "✕": "x"})

Point = Sequence[float]


def curves_png(figure: go.Figure, width: int = WIDTH_PX) -> bytes | None:
    """Return a PNG, `width` pixels wide, of a figure of scatter traces over one x axis and one y axis.

    Returns None if Pillow is not installed, or was built without its font.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont

        fonts = {size: ImageFont.load_default(size * OVERSAMPLING) for size in (theme.FONT_PX, theme.TITLE_PX)}
    except ImportError:
        return None
    height = int(figure.layout.height or 480)
    image = Image.new("RGB", (OVERSAMPLING * width, OVERSAMPLING * height), "white")
    _Drawing(ImageDraw.Draw(image), fonts, width, height).draw(figure)
    file = io.BytesIO()
    image.reduce(OVERSAMPLING).quantize(128).save(file, "png", optimize=True)
    return file.getvalue()


@dataclass(frozen=True)
class _Scale:
    """Conversion of an axis' values to pixels; `low` and `high` are decimal logarithms on a logarithmic axis."""

    low: float
    high: float
    start_px: float
    end_px: float
    log: bool

    @classmethod
    def of(cls, axis: Any, columns: Sequence[Any], start_px: float, end_px: float, room: float) -> _Scale:
        """Return the scale with the axis' own range, or else one that holds all values and a share of free room."""
        log = axis.type == "log"
        if axis.range is not None and not axis.autorange:
            return cls(float(axis.range[0]), float(axis.range[1]), start_px, end_px, log)
        values = np.concatenate([np.empty(0), *(np.asarray(column, dtype=np.float64) for column in columns)])
        values = values[np.isfinite(values) & ((values > 0) | (not log))]
        values = np.log10(values) if log else values
        low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
        if axis.rangemode == "tozero" and not log:
            low, high = min(0.0, low), max(0.0, high)
        span = (high - low) or max(abs(high), 1.0)
        return cls(low - room * span, high + (room or 0.01) * span, start_px, end_px, log)

    def __call__(self, values: Any) -> Array:
        numbers = np.asarray(values, dtype=np.float64)
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                numbers = np.log10(numbers)
        share = (numbers - self.low) / (self.high - self.low)
        return np.asarray(self.start_px + share * (self.end_px - self.start_px))

    def ticks(self) -> list[tuple[float, str]]:
        """Return (value, label) of about eight round values."""
        if self.log:
            powers = range(math.floor(self.low), math.ceil(self.high) + 1)
            factors = (1, 2, 3, 4, 5, 6, 8) if self.high - self.low < 1 else (1, 2, 5) if len(powers) < 5 else (1,)
            values = [factor * 10.0**power for power in powers for factor in factors]
            return [(value, f"{value:g}") for value in values if self.low <= math.log10(value) <= self.high]
        least = (self.high - self.low) / 7
        power = 10.0 ** math.floor(math.log10(least))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
        multiples = range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        return [(multiple * step, f"{multiple * step:.6g}") for multiple in multiples]


class _Drawing:
    def __init__(self, pen: Any, fonts: dict[int, Any], width: int, height: int) -> None:
        self._pen, self._fonts, self._width, self._height = pen, fonts, width, height

    def draw(self, figure: go.Figure) -> None:
        layout = figure.layout
        subtitle = re.split(r"<br\s*/?>", str(layout.title.subtitle.text)) if layout.title.subtitle.text else []
        top = 66 + LINE_PX * len(subtitle)
        self._write(16, 14, layout.title.text, size=theme.TITLE_PX)
        for index, line in enumerate(subtitle):
            self._write(16, 40 + LINE_PX * index, line, theme.MUTED)
        traces = [trace for trace in figure.data if trace.type == "scatter" and trace.visible in (None, True)]
        filled = [trace for trace in traces if trace.x is not None and trace.y is not None]
        y = _Scale.of(layout.yaxis, [trace.y for trace in filled], self._height - BELOW, top, room=0.05)
        x = _Scale.of(layout.xaxis, [trace.x for trace in filled], LEFT, self._width - RIGHT, room=0.0)
        for value, label in y.ticks():
            self._line([(x.start_px, float(y(value))), (x.end_px, float(y(value)))], theme.GRID, 1)
            self._write(x.start_px - 8, float(y(value)), label, anchor="rm")
        for value, label in x.ticks():
            self._line([(float(x(value)), y.start_px), (float(x(value)), y.end_px)], theme.GRID, 1)
            self._write(float(x(value)), y.start_px + 8, label, anchor="mt")
        middle = (x.start_px + x.end_px) / 2
        self._write(middle, y.start_px + 30, layout.xaxis.title.text, theme.MUTED, anchor="mt")
        self._write(16, y.end_px - 14, layout.yaxis.title.text, theme.MUTED, anchor="lm")
        for trace in sorted(filled, key=lambda trace: trace.zorder or 0):
            self._draw_trace(trace, np.column_stack([x(trace.x), y(trace.y)]))
        named = [trace for trace in traces if trace.showlegend is not False]
        if len(named) > 1:
            self._draw_legend(named, corner_of(layout.legend), top)

    def _draw_trace(self, trace: Any, points: Array) -> None:
        """Draw one trace at its points in pixels, shape (n, 2)."""
        mode = trace.mode or "lines"
        if "lines" in mode:
            for stretch in _finite_stretches(points):
                self._line([tuple(point) for point in stretch.tolist()], trace.line.color, trace.line.width or 2)
        for index in np.flatnonzero(np.isfinite(points).all(axis=1)).tolist():
            x, y = points[index].tolist()
            if "markers" in mode:
                self._draw_marker(x, y, trace.marker, index)
            if "text" in mode and trace.text is not None:
                shift = {"top right": -9, "bottom right": 9}.get(str(trace.textposition), 0)
                self._write(x + 7, y + shift, trace.text[index], trace.textfont.color, anchor="lm")

    def _draw_marker(self, x: float, y: float, marker: Any, index: int) -> None:
        color, symbol = _item(marker.color, index), _item(marker.symbol, index) or "circle"
        half, edge = float(_item(marker.size, index) or 6) / 2, _item(marker.line.color, index) or color
        left, right, above, below = x - half, x + half, y - half, y + half
        if symbol == "x":
            self._line([(left, above), (right, below)], color, 2)
            self._line([(left, below), (right, above)], color, 2)
        elif symbol == "circle":
            self._pen.ellipse(_fine([(left, above), (right, below)]), color, edge, OVERSAMPLING)
        else:
            up, sideways = [(left, below), (x, above), (right, below)], [(left, above), (right, y), (left, below)]
            self._pen.polygon(_fine(up if symbol == "triangle-up" else sideways), color, edge, OVERSAMPLING)

    def _draw_legend(self, traces: Sequence[Any], corner: str, top: int) -> None:
        names = [_plain(trace.name)[:60] for trace in traces]
        longest = max(self._pen.textlength(name, self._fonts[theme.FONT_PX]) for name in names) / OVERSAMPLING
        left = LEFT + 52 if "left" in corner else self._width - RIGHT - 8 - longest
        if "bottom" in corner:
            top = self._height - BELOW - 16 - LINE_PX * len(names)
        box = [(left - 44, top + 4), (left + longest + 6, top + 12 + LINE_PX * len(names))]
        self._pen.rectangle(_fine(box), "white", theme.GRID, OVERSAMPLING)
        for index, (trace, name) in enumerate(zip(traces, names, strict=True)):
            middle = top + 8 + LINE_PX * (index + 0.5)
            self._line([(left - 36, middle), (left - 8, middle)], trace.line.color or _item(trace.marker.color, 0), 2.2)
            self._write(left, middle, name, anchor="lm")

    def _line(self, points: Sequence[Point], color: str, width: float) -> None:
        self._pen.line(_fine(points), fill=color, width=max(1, round(width * OVERSAMPLING)), joint="curve")

    def _write(
        self, x: float, y: float, words: Any, color: str = theme.INK, size: int = theme.FONT_PX, anchor: str = "la"
    ) -> None:
        self._pen.text(_fine([(x, y)])[0], _plain(words), fill=color, font=self._fonts[size], anchor=anchor)


def _fine(points: Sequence[Point]) -> list[tuple[float, float]]:
    return [(x * OVERSAMPLING, y * OVERSAMPLING) for x, y in points]


def _finite_stretches(points: Array) -> Iterator[Array]:
    """Yield the stretches of two or more finite points: a line breaks off at a missing value."""
    finite = np.isfinite(points).all(axis=1)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], finite, [False]]).astype(np.int8)))
    yield from (points[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True) if end - start > 1)


def _item(value: Any, index: int) -> Any:
    """Return the value of one point: plotly takes one value for all points, or one for each."""
    return value[index] if isinstance(value, list | tuple | np.ndarray) else value


def _plain(text: Any) -> str:
    """Return the text that Plotly's markup shows, in characters that the font has."""
    words = html.unescape(re.sub(r"<[^>]*>", "", str(text or "")))
    return words.translate(SIMILAR).encode("latin-1", "replace").decode("latin-1")
