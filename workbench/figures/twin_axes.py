"""Words, colours and axes of a static twin: Plotly's markup and values as matplotlib takes them, and readable ticks."""

from __future__ import annotations

import html
import math
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import MaxNLocator

from workbench.analysis.curve import Array
from workbench.figures import theme

TICK_PX = (66, 30)
"""Smallest distance between two labels of an x axis and of a y axis, in pixels."""
MANTISSAS = ((1, 2, 3, 4, 6, 8), (1, 2, 5), (1, 3), (1,))
"""Leading digits of the ticks of a logarithmic axis; the first row whose labels have room is taken."""
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
Color = str | tuple[float, ...]


@cache
def font(size: int = theme.FONT_PX, bold: bool = False) -> FontProperties:
    """Return the font of twins, which comes with matplotlib, so that a twin looks the same on every machine."""
    return FontProperties(family="DejaVu Sans", size=size, weight="bold" if bold else "normal")


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont(font())).get_charmap())


@lru_cache(4096)
def plain(markup: str) -> tuple[str, bool]:
    """Return the text of Plotly's markup, and True if most of it is bold; characters without a glyph become `?`."""
    bold = sum(map(len, re.findall(r"<b>(.*?)</b>", markup))) > 0.4 * len(re.sub(r"<[^>]*>", "", markup))
    text = html.unescape(re.sub(r"<[^>]*>", "", re.sub(r"<br\s*/?>", "\n", markup))).replace("\u200b", "")
    return "".join(c if c == "\n" or ord(c) in _glyphs() else "?" for c in text), bold


@lru_cache(4096)
def width_of(markup: str, size: int = theme.FONT_PX) -> float:
    """Return the width of the widest line of a text, in pixels."""
    text, bold = plain(markup)
    face = get_font(findfont(font(size, bold)))
    face.set_size(size, 72)
    widths = []
    for line in text.split("\n"):
        face.set_text(line, 0.0)
        widths.append(face.get_width_height()[0] / 64)
    return max(widths)


def widest(markups: Iterable[Any]) -> float:
    """Return the width of the widest of several texts, in pixels."""
    return max((width_of(str(markup)) for markup in markups), default=0.0)


def wrapped(markup: Any, width_px: float, size: int) -> list[str]:
    """Return the lines of a text, each at most `width_px` wide."""
    lines: list[str] = []
    for line in re.split(r"<br\s*/?>", str(markup or "")):
        share = width_px / max(1.0, width_of(line, size))
        lines += [line] if share >= 1 else textwrap.wrap(line, int(len(line) * share), break_on_hyphens=False)
    return [line for line in lines if line]


def color_of(value: Any) -> Color:
    """Return a colour as matplotlib takes it, from Plotly's `rgb(…)`, `rgba(…)` or a name."""
    channels = re.fullmatch(r"rgba?\((.*)\)", str(value))
    if channels is None:
        return str(value or theme.INK)
    red, green, blue, *opacity = map(float, channels.group(1).split(","))
    return (red / 255, green / 255, blue / 255, *opacity)


def color_map(scale: Any, backwards: bool) -> LinearSegmentedColormap:
    """Return the colours of Plotly's `colorscale`, a list of (share, colour)."""
    colors = LinearSegmentedColormap.from_list("scale", [(share, color_of(color)) for share, color in scale])
    return colors.reversed() if backwards else colors


def item_of(value: Any, index: int) -> Any:
    """Return the value of one point: Plotly takes one value for all points, or one for each."""
    return value[index] if isinstance(value, list | tuple | np.ndarray) else value


def words_of(values: Any) -> Any:
    """Return values along an axis; words of two levels become one word of two lines."""
    if values is not None and len(values) == 2 and all(np.ndim(level) == 1 for level in values):
        return ["<br>".join(map(str, words)) for words in zip(*values, strict=True)]
    return values


@dataclass
class TwinAxis:
    """One axis of a figure: its layout, and the words along it, which stand at 0, 1, 2, …"""

    layout: Any
    vertical: bool
    names: tuple[str, ...]
    low: float = 0.0
    high: float = 1.0

    @classmethod
    def of(cls, layout: Any, vertical: bool, columns: Iterable[Any]) -> TwinAxis:
        """Return an axis that knows the words among its values, in their order."""
        given = [value for column in columns if np.ndim(column) == 1 for value in column]
        if layout.type not in ("category", "multicategory"):
            given = [value for value in given if isinstance(value, str)]
        return cls(layout, vertical, tuple(dict.fromkeys(map(str, given))))

    @property
    def log(self) -> bool:
        return bool(self.layout.type == "log")

    @property
    def domain(self) -> tuple[float, float]:
        """The share of the plots' area that the axis takes."""
        return self.layout.domain or (0.0, 1.0)

    def numbers(self, values: Any) -> Array:
        """Return the position of each value; NaN for a missing one."""
        if self.names:
            places = {name: at for at, name in enumerate(self.names)}
            return np.array([places.get(str(value), math.nan) for value in values], dtype=np.float64)
        return np.asarray(values, dtype=np.float64)

    def fit(self, low: float, high: float, padding: float, least: float) -> None:
        """Set the ends: the layout's own range, or else from `low` to `high` and some room; `least` is above zero."""
        layout = self.layout
        if layout.range is not None and not layout.autorange:
            low, high = (10.0**end if self.log else float(end) for end in layout.range)
        elif self.names:
            low, high = -0.5, len(self.names) - 0.5
        elif not low <= high or math.isinf(high - low):
            low, high = (1.0, 10.0) if self.log else (0.0, 1.0)
        elif self.log:
            low = low if low > 0 else least
            ratio = (high / low) ** padding if high > low else 2.0
            low, high = low / ratio, high * ratio
        else:
            from_zero = layout.rangemode == "tozero"
            low, high = (min(0.0, low), max(0.0, high)) if from_zero else (low, high)
            room = padding * ((high - low) or abs(high) or 1.0)
            low, high = low - room * (not from_zero or low < 0), high + room
        self.low, self.high = (high, low) if layout.autorange == "reversed" else (low, high)

    def ticks(self, length_px: float) -> tuple[list[float], list[str]]:
        """Return positions and labels of the ticks: the layout's own, the axis' words, or round values."""
        layout, (low, high) = self.layout, sorted((self.low, self.high))
        if layout.tickvals is not None:
            values = self.numbers(layout.tickvals).tolist()
            labels = [str(text) for text in (layout.tickvals if layout.ticktext is None else layout.ticktext)]
        elif self.names:
            most = 99 if self.vertical else max(6, int(length_px / len(self.names) / 8))
            values, labels = list(map(float, range(len(self.names)))), [theme.short(n, most) for n in self.names]
        else:
            values = self._round_values(low, high, length_px)
            labels = [written(value, str(layout.tickformat or "")) for value in values]
        if layout.showticklabels is False:
            labels = [""] * len(values)
        margin = 1e-9 * (high - low)
        inside = [at for at, value in enumerate(values) if low - margin <= value <= high + margin]
        return [values[at] for at in inside], [labels[at] for at in inside]

    def _round_values(self, low: float, high: float, length_px: float) -> list[float]:
        gap_px = TICK_PX[self.vertical]
        if self.log and high / low >= 3:
            decade_px = length_px / math.log10(high / low)
            room = [m for m in MANTISSAS if np.diff(np.log10([*m, 10])).min() * decade_px >= 0.8 * gap_px]
            every = max(1, math.ceil(gap_px / decade_px))
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            return [m * 10.0**power for power in powers if power % every == 0 for m in (*room, MANTISSAS[-1])[0]]
        bins = min(max(2, int(length_px / gap_px)), int(self.layout.nticks or 7))
        steps = MaxNLocator(bins, steps=[1, 2, 5, 10], integer=self.layout.dtick == 1, min_n_ticks=1)
        return [float(value) for value in steps.tick_values(low, high)]


def written(value: float, tick_format: str = "") -> str:
    """Return a tick's label: percent or a prefix such as k where the format asks for it, else six digits at most."""
    if tick_format.endswith("%"):
        return f"{100 * value:.3g}%"
    if tick_format == ",":
        return f"{value:,.6g}"
    for size, prefix in PREFIXES if "s" in tick_format or abs(value) >= 1e5 else ():
        if abs(value) >= size:
            return f"{value / size:.4g}{prefix}"
    words = f"{value:.0e}" if 0 < abs(value) < 1e-3 and float(f"{value:.0e}") == value else f"{value:.6g}"
    return words.replace("e-0", "e-").replace("e+0", "e")


def parted(heights: Array, gap: float, low: float, high: float) -> Array:
    """Return heights at least `gap` apart, as far as they fit between `low` and `high`, in the order of the given."""
    order = np.argsort(heights, kind="stable")
    places = np.array(heights, dtype=np.float64)[order] - gap * np.arange(len(order))  # apart means rising here
    middle = (np.maximum.accumulate(places) + np.minimum.accumulate(places[::-1])[::-1]) / 2
    most = high - gap * (len(order) - 1)
    answer = np.empty(len(order))
    answer[order] = np.clip(middle, low, max(low, most)) + gap * np.arange(len(order))
    return answer
