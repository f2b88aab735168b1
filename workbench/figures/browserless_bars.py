"""Bars of a picture that Pillow draws: stacked, side by side or over one another, upright or lying."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.analysis.curve import Array
from workbench.figures import theme
from workbench.figures.browserless_canvas import LINE_PX, Canvas, Point, item_of
from workbench.figures.browserless_scale import Scale

HATCH_PX = 8
"""Distance of the lines of a hatched bar, in pixels."""


@dataclass(frozen=True)
class Bars:
    """The bars of one trace: `places` on the axis along which they stand, and where each starts and ends."""

    trace: Any
    places: Any
    shifts: Array
    widths: Array
    starts: Array
    ends: Array

    @property
    def _lying(self) -> bool:
        return bool(self.trace.orientation == "h")

    def along(self, which: int) -> list[Any]:
        """Return all values on the x axis (0) or the y axis (1)."""
        if (which == 0) == self._lying:
            return [self.starts, self.ends]
        if any(isinstance(place, str) for place in self.places):
            return [self.places]
        middles = np.asarray(self.places, dtype=np.float64)
        return [middles + self.shifts, middles + self.shifts + self.widths]

    def draw(self, canvas: Canvas, x: Scale, y: Scale) -> None:
        along, across = (x, y) if self._lying else (y, x)
        names = across.names
        middles = [names.index(str(place)) if names else float(place) for place in self.places]
        first = across.from_numbers(np.asarray(middles) + self.shifts)
        last = across.from_numbers(np.asarray(middles) + self.shifts + self.widths)
        starts, ends = along.from_numbers(self.starts), along.from_numbers(self.ends)
        look = _Look.of(self.trace)
        for index in range(len(middles)):
            corners = (starts[index], first[index]), (ends[index], last[index])
            if not self._lying:
                corners = (first[index], starts[index]), (last[index], ends[index])
            if np.isfinite(corners).all():
                self._draw_bar(canvas, index, look, *corners)

    def _draw_bar(self, canvas: Canvas, index: int, look: _Look, one: Any, other: Any) -> None:
        (left, right), (top, bottom) = sorted((one[0], other[0])), sorted((one[1], other[1]))
        if right <= left or bottom <= top:
            return
        edge = item_of(look.edge, index) if right - left > 4 and bottom - top > 4 else None
        canvas.rectangle((left, top), (right, bottom), item_of(look.color, index), edge)
        if look.hatch:
            _hatch(canvas, look.hatch, (left, top), (right, bottom))
        words, ink, size = item_of(look.text, index), item_of(look.ink, index), int(item_of(look.size, index))
        if words in (None, ""):
            return
        if look.outside and self._lying:
            canvas.write((right + 4, (top + bottom) / 2), words, ink, size, "lm")
        elif look.outside:
            canvas.write(((left + right) / 2, top - 3), words, ink, size, "md")
        elif canvas.width_of(words, size) <= right - left - 2 and bottom - top >= 0.7 * LINE_PX:
            canvas.write(((left + right) / 2, (top + bottom) / 2), words, ink, size, "mm")


@dataclass(frozen=True)
class _Look:
    """Look of the bars of a trace, each field one value for all or one for each."""

    color: Any
    edge: Any
    hatch: Any
    """Colour of the lines of a hatched bar; None for a plain one."""
    text: Any
    ink: Any
    size: Any
    outside: bool

    @classmethod
    def of(cls, trace: Any) -> _Look:
        pattern, font = trace.marker.pattern, trace.textfont
        hatch = (pattern.fgcolor or theme.AXIS) if pattern.shape else None
        outside = trace.textposition == "outside"
        size = font.size or theme.FONT_PX
        return cls(trace.marker.color, trace.marker.line.color, hatch, trace.text, font.color, size, outside)


def _hatch(canvas: Canvas, color: Any, first: Point, last: Point) -> None:
    (left, top), (right, bottom) = first, last
    for start in np.arange(left - (bottom - top), right, HATCH_PX):
        low, high = max(left, start), min(right, start + bottom - top)
        if high > low:
            canvas.line([(low, bottom - (low - start)), (high, bottom - (high - start))], color, 1)


def bars_of(traces: Sequence[Any], mode: str) -> Mapping[int, Bars]:
    """Return the bars of each trace of bars by its index; `mode` is the layout's `barmode`."""
    grouped: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, trace in enumerate(traces):
        if trace.type == "bar":
            grouped[(trace.xaxis, trace.yaxis)].append(index)
    found: dict[int, Bars] = {}
    for indices in grouped.values():
        ends: dict[Any, float] = defaultdict(float)
        for position, index in enumerate(indices):
            trace = traces[index]
            places, values = (trace.y, trace.x) if trace.orientation == "h" else (trace.x, trace.y)
            values = np.asarray(values, dtype=np.float64)
            starts = np.broadcast_to(np.asarray(trace.base if trace.base is not None else 0.0, float), values.shape)
            if mode in ("stack", "relative") and trace.base is None:
                starts = np.array([ends[place] for place in places])
                for place, value in zip(places, values, strict=True):
                    ends[place] += value
            share = len(indices) if mode == "group" and trace.offset is None else 1
            widths = _each(trace.width if trace.width is not None else 0.8 / share, len(values))
            shift = -0.4 + position * 0.8 / share if share > 1 else -widths / 2
            shifts = _each(shift if trace.offset is None else trace.offset, len(values))
            found[index] = Bars(trace, places, shifts, widths, starts, starts + values)
    return found


def _each(value: Any, length: int) -> Array:
    return np.asarray(np.broadcast_to(np.asarray(value, dtype=np.float64), (length,)))
