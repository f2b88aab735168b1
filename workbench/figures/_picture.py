"""A figure of curves as a PNG, drawn without a browser: for places where no script runs and no Chrome is installed.

It draws what `loss_curves` is made of: lines, points and end labels over one pair of axes, and a legend.
Pillow's own font has no signs beyond Latin ones; others are written as their nearest, or as a question mark.
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
from numpy.typing import NDArray

from workbench.figures import theme
from workbench.figures._legend import corner_of
from workbench.figures._series import Array

WIDTH_PX = 860
"""What a notebook's column has room for: JupyterLab cuts a wider picture off."""
FINER = 3
"""The drawing is so many times finer than the PNG, and averaged: Pillow's lines are jagged."""
LEFT, RIGHT, BELOW = 70, 76, 56
LINE_PX = 18
NEAREST = str.maketrans({"×": "x", "–": "-", "→": "->", "≤": "<=", "≥": ">=", "○": "o", "▷": ">", "▲": "^", "✕": "x"})


def curves_png(figure: go.Figure, width: int = WIDTH_PX) -> bytes | None:
    """PNG of a figure of scatter traces over one x and one y axis, `width` pixels wide.

    None if Pillow is not installed, or was built without its font.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont

        fonts = {size: ImageFont.load_default(size * FINER) for size in (theme.FONT_PX, theme.TITLE_PX)}
    except ImportError:
        return None
    height = int(figure.layout.height or 480)
    image = Image.new("RGB", (FINER * width, FINER * height), "white")
    _Drawing(ImageDraw.Draw(image), fonts, width, height).draw(figure)
    image = image.reduce(FINER)
    file = io.BytesIO()
    image.quantize(128).save(file, "png", optimize=True)
    return file.getvalue()


@dataclass(frozen=True)
class _Axis:
    """From values to pixels."""

    low: float
    high: float
    start_px: float
    end_px: float
    log: bool

    def __call__(self, values: Any) -> Array:
        numbers = np.asarray(values, dtype=np.float64)
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                numbers = np.log10(numbers)
        share = (numbers - self.low) / (self.high - self.low)
        return np.asarray(self.start_px + share * (self.end_px - self.start_px))

    def ticks(self) -> list[tuple[float, str]]:
        """(value, how it is written) of about eight round values."""
        if self.log:
            powers = range(math.floor(self.low), math.ceil(self.high) + 1)
            factors = (1, 2, 3, 4, 5, 6, 8) if self.high - self.low < 1 else (1, 2, 5) if len(powers) < 5 else (1,)
            values = [factor * 10.0**power for power in powers for factor in factors]
            return [(value, f"{value:g}") for value in values if self.low <= math.log10(value) <= self.high]
        step = _round_step((self.high - self.low) / 7)
        places = np.arange(math.ceil(self.low / step), math.floor(self.high / step) + 1) * step
        return [(place, f"{place:.6g}") for place in places.tolist()]


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5 × a power of ten that is no smaller."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


class _Drawing:
    def __init__(self, pen: Any, fonts: dict[int, Any], width: int, height: int) -> None:
        self._pen, self._fonts, self._width, self._height = pen, fonts, width, height

    def draw(self, figure: go.Figure) -> None:
        lines = _lines(figure.layout.title.subtitle.text)
        top = 66 + LINE_PX * len(lines)
        self._write(16, 14, _plain(figure.layout.title.text), size=theme.TITLE_PX)
        for index, line in enumerate(lines):
            self._write(16, 40 + LINE_PX * index, line, theme.MUTED)
        traces = [trace for trace in figure.data if trace.type == "scatter" and trace.visible in (None, True)]
        x, y = self._axes(figure, traces, top)
        self._draw_axes(figure, x, y)
        for trace in sorted(traces, key=lambda trace: trace.zorder or 0):
            self._draw_trace(trace, x, y)
        self._draw_legend(
            [trace for trace in traces if trace.showlegend is not False], corner_of(figure.layout.legend), top
        )

    def _axes(self, figure: go.Figure, traces: Sequence[Any], top: int) -> tuple[_Axis, _Axis]:
        layout = figure.layout
        y = _axis(layout.yaxis, [trace.y for trace in traces], (self._height - BELOW, top), room=0.05)
        x = _axis(layout.xaxis, [trace.x for trace in traces], (LEFT, self._width - RIGHT), room=0.0)
        return x, y

    def _draw_axes(self, figure: go.Figure, x: _Axis, y: _Axis) -> None:
        for value, word in y.ticks():
            height = float(y(value))
            self._line([(x.start_px, height), (x.end_px, height)], theme.GRID, 1)
            self._write(x.start_px - 8, height, word, anchor="rm")
        for value, word in x.ticks():
            place = float(x(value))
            self._line([(place, y.start_px), (place, y.end_px)], theme.GRID, 1)
            self._write(place, y.start_px + 8, word, anchor="mt")
        middle = (x.start_px + x.end_px) / 2
        self._write(middle, y.start_px + 30, _plain(figure.layout.xaxis.title.text), theme.MUTED, anchor="mt")
        self._write(16, y.end_px - 14, _plain(figure.layout.yaxis.title.text), theme.MUTED, anchor="lm")

    def _draw_trace(self, trace: Any, x: _Axis, y: _Axis) -> None:
        if trace.x is None or trace.y is None or not len(trace.x):
            return
        points = np.column_stack([x(trace.x), y(trace.y)])
        mode = trace.mode or "lines"
        if "lines" in mode:
            for stretch in _stretches(points):
                self._line([tuple(point) for point in stretch.tolist()], trace.line.color, trace.line.width or 2)
        if "markers" in mode:
            for index, point in enumerate(points.tolist()):
                self._mark(point, trace.marker, index)
        if "text" in mode and trace.text is not None:
            for point, words in zip(points.tolist(), trace.text, strict=False):
                if not np.isfinite(point).all():
                    continue
                shift = {"top right": -9, "bottom right": 9}.get(str(trace.textposition), 0)
                self._write(point[0] + 7, point[1] + shift, _plain(words), trace.textfont.color, anchor="lm")

    def _mark(self, point: Sequence[float], marker: Any, index: int) -> None:
        if not np.isfinite(point).all():
            return
        color, symbol = _at(marker.color, index), str(_at(marker.symbol, index) or "circle")
        half, (x, y) = float(_at(marker.size, index) or 6) / 2, point
        edge = _at(marker.line.color, index) or color
        if symbol == "x":
            self._line([(x - half, y - half), (x + half, y + half)], color, 2)
            self._line([(x - half, y + half), (x + half, y - half)], color, 2)
        elif symbol == "circle":
            self._pen.ellipse(self._px([(x - half, y - half), (x + half, y + half)]), color, edge, FINER)
        else:
            tip = [(x - half, y - half), (x + half, y), (x - half, y + half)]
            up = [(x - half, y + half), (x, y - half), (x + half, y + half)]
            self._pen.polygon(self._px(up if symbol == "triangle-up" else tip), color, edge, FINER)

    def _draw_legend(self, traces: Sequence[Any], corner: str, top: int) -> None:
        if len(traces) < 2:
            return
        names = [_plain(trace.name)[:60] for trace in traces]
        longest = max(self._pen.textlength(name, self._fonts[theme.FONT_PX]) for name in names) / FINER
        left = LEFT + 52 if "left" in corner else self._width - RIGHT - 8 - longest
        right = left + longest
        if "bottom" in corner:
            top = self._height - BELOW - 16 - LINE_PX * len(names)
        box = [(left - 44, top + 4), (right + 6, top + 12 + LINE_PX * len(names))]
        self._pen.rectangle(self._px(box), "white", theme.GRID, FINER)
        for index, (trace, name) in enumerate(zip(traces, names, strict=True)):
            middle = top + 8 + LINE_PX * (index + 0.5)
            self._line([(left - 36, middle), (left - 8, middle)], trace.line.color or _at(trace.marker.color, 0), 2.2)
            self._write(left, middle, name, anchor="lm")

    def _line(self, points: Sequence[tuple[float, ...]], color: str, width: float) -> None:
        self._pen.line(self._px(points), fill=color, width=max(1, round(width * FINER)), joint="curve")

    def _write(
        self, x: float, y: float, words: str, color: str = theme.INK, size: int = theme.FONT_PX, anchor: str = "la"
    ) -> None:
        self._pen.text((x * FINER, y * FINER), words, fill=color, font=self._fonts[size], anchor=anchor)

    def _px(self, points: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
        return [(x * FINER, y * FINER) for x, y in points]


def _axis(given: Any, columns: Sequence[Any], ends: tuple[float, float], room: float) -> _Axis:
    """The axis with the layout's range, or else one that holds every value."""
    log = given.type == "log"
    if given.range is not None and not given.autorange:
        low, high = (float(edge) for edge in given.range)
        return _Axis(low, high, *ends, log)
    known = [np.asarray(column, dtype=np.float64) for column in columns if column is not None and len(column)]
    values = np.concatenate(known) if known else np.array([0.0, 1.0])
    values = values[np.isfinite(values) & ((values > 0) | (not log))]
    if log:
        values = np.log10(values)
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if given.rangemode == "tozero" and not log:
        low, high = min(0.0, low), max(0.0, high)
    span = (high - low) or max(abs(high), 1.0)
    return _Axis(low - room * span, high + (room or 0.01) * span, *ends, log)


def _stretches(points: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
    """The runs of finite points: a line breaks off where a value is missing."""
    finite = np.isfinite(points).all(axis=1)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], finite, [False]]).astype(np.int8)))
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        if end - start > 1:
            yield points[start:end]


def _at(value: Any, index: int) -> Any:
    """Plotly gives one value for all points, or one for each."""
    return value[index] if isinstance(value, list | tuple | np.ndarray) else value


def _lines(text: Any) -> list[str]:
    return [_plain(line) for line in re.split(r"<br\s*/?>", str(text))] if text else []


def _plain(text: Any) -> str:
    """Plotly's markup as the text it shows, in signs that the font has."""
    words = html.unescape(re.sub(r"<[^>]*>", "", str(text or "")))
    return words.translate(NEAREST).encode("latin-1", "replace").decode("latin-1")
