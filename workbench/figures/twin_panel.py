"""One pair of axes of a static twin: lines, markers, areas, error bars, bars, heat maps and parallel coordinates."""

from __future__ import annotations

import html
import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from workbench.analysis.curve import Array
from workbench.figures import theme

# Plotly's markup, colours and values as matplotlib takes them, and axes with readable ticks.

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
def text_of(markup: str) -> tuple[str, bool]:
    """Return the text of Plotly's markup, and True if most of it is bold; characters without a glyph become `?`."""
    bold = sum(map(len, re.findall(r"<b>(.*?)</b>", markup))) > 0.4 * len(re.sub(r"<[^>]*>", "", markup))
    text = html.unescape(re.sub(r"<[^>]*>", "", re.sub(r"<br\s*/?>", "\n", markup))).replace("\u200b", "")
    return "".join(c if c == "\n" or ord(c) in _glyphs() else "?" for c in text), bold


@lru_cache(4096)
def width_of(markup: str, size: int = theme.FONT_PX) -> float:
    """Return the width of the widest line of a text, in pixels."""
    text, bold = text_of(markup)
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
            gap_px = TICK_PX[self.vertical]
            if self.log and high / low >= 3:
                decade_px = length_px / math.log10(high / low)
                room = [m for m in MANTISSAS if np.diff(np.log10([*m, 10])).min() * decade_px >= 0.8 * gap_px]
                every, digits = max(1, math.ceil(gap_px / decade_px)), (*room, MANTISSAS[-1])[0]
                powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
                values = [m * 10.0**power for power in powers if power % every == 0 for m in digits]
            else:
                bins = min(max(2, int(length_px / gap_px)), int(layout.nticks or 7))
                of_ranks = layout.dtick == 1
                steps = MaxNLocator(bins, steps=[1, 2, 5, 10], integer=of_ranks, min_n_ticks=1 if of_ranks else 2)
                values = [float(value) for value in steps.tick_values(low, high)]
            labels = [tick_label(value, str(layout.tickformat or "")) for value in values]
        if layout.showticklabels is False:
            labels = [""] * len(values)
        margin = 1e-9 * (high - low)
        inside = [at for at, value in enumerate(values) if low - margin <= value <= high + margin]
        return [values[at] for at in inside], [labels[at] for at in inside]


def tick_label(value: float, tick_format: str = "") -> str:
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


MARKERS = {"diamond": "D", "square": "s", "triangle-up": "^", "triangle-down": "v", "triangle-right": ">", "x": "X"}
"""matplotlib's marker of each symbol but the circle."""
DASHES = {"dash": (4.5, 3), "dot": (1, 2), "dashdot": (4.5, 2, 1, 2), "longdash": (7, 3)}
"""Lengths of dashes and gaps, in widths of the line."""
ALIGNED = {"left": ("right", -7), "right": ("left", 7), "center": ("center", 0)}
RAISED = {"top": ("bottom", 3), "bottom": ("top", -3), "middle": ("center_baseline", 0)}


def line_look(line: Any) -> dict[str, Any]:
    """Return colour, width and dashes of a Plotly line, and no marker."""
    dashes, width = DASHES.get(str(line.dash)), 2.0 if line.width is None else line.width
    style = (0, dashes) if dashes else "-"
    return {"color": color_of(line.color), "linewidth": width, "linestyle": style, "marker": ""}


@dataclass(eq=False)
class TwinPanel:
    """One pair of axes. What is drawn may leave something in `later`, for when the axes have their place and ends."""

    axes: Axes
    x: TwinAxis
    y: TwinAxis
    later: list[Callable[[], None]] = field(default_factory=list)
    bar_ends: dict[float, float] = field(default_factory=lambda: defaultdict(float))

    def points(self, trace: Any) -> Array:
        """Return the positions of a trace's points, shape (n, 2); x or y are 0, 1, 2, … if the trace lacks them."""
        x, y = words_of(trace.x), words_of(trace.y)
        x = range(len(y if y is not None else ())) if x is None else x
        return np.column_stack([self.x.numbers(x), self.y.numbers(range(len(x)) if y is None else y)])

    def pixels(self, points: Any) -> Array:
        """Return positions as pixels from the picture's lower left corner."""
        return np.asarray(self.axes.transData.transform(points))

    def write(
        self, at: Any, markup: Any, color: Any, size: int, shift: tuple[float, float] = (0, 0), **look: Any
    ) -> None:
        """Write words at a position, moved by some pixels; they may leave the axes."""
        words, bold = text_of(str(markup))
        look |= {"xytext": shift, "textcoords": "offset points", "annotation_clip": False, "parse_math": False}
        self.axes.annotate(words, at, color=color_of(color), fontproperties=font(size, bold), **look)

    def draw_scatter(self, trace: Any, order: float, words: bool = True) -> Any:
        """Draw area, line, error bars, markers and words of a trace; return what shows its look in a legend."""
        points, mode = self.points(trace), trace.mode or "lines"
        shown: list[Any] = []
        if trace.fill == "toself":
            pieces = np.split(points, np.flatnonzero(~np.isfinite(points).all(axis=1)))
            areas = [piece[np.isfinite(piece).all(axis=1)] for piece in pieces]
            fill = PolyCollection([a for a in areas if len(a) > 2], facecolors=color_of(trace.fillcolor), linewidths=0)
            shown.append(self.axes.add_collection(fill))
        if "lines" in mode and trace.line.width != 0:
            how: Any = {"drawstyle": "steps-post"} if trace.line.shape == "hv" else {"solid_joinstyle": "round"}
            shown += self.axes.plot(*points.T, **how, **line_look(trace.line))
        for which, spread in enumerate((trace.error_x, trace.error_y)):
            if spread.array is not None and spread.visible is not False:
                ends = np.stack([points, points])
                ends[0, :, which] -= np.asarray(spread.array if spread.arrayminus is None else spread.arrayminus)
                ends[1, :, which] += np.asarray(spread.array)
                color = color_of(spread.color or item_of(trace.marker.color, 0))
                bars = LineCollection(list(ends.swapaxes(0, 1)), colors=[color], linewidths=spread.thickness or 2)
                self.axes.add_collection(bars).set_zorder(order)
        if "markers" in mode:
            marker, groups = trace.marker, defaultdict[str, list[int]](list)
            for index in range(len(points)):
                groups[str(item_of(marker.symbol, index) or "circle")].append(index)
            for symbol, indices in groups.items():
                sizes, edges = marker.size or 6, marker.line.color or marker.color
                fills = [color_of(item_of(marker.color, at)) for at in indices]
                marks = self.axes.scatter(
                    points[indices, 0],
                    points[indices, 1],
                    s=[item_of(sizes, at) ** 2 * (0.6 if "diamond" in symbol else 1.0) for at in indices],
                    marker=MARKERS.get(symbol.removesuffix("-open"), "o"),
                    facecolors="none" if "-open" in symbol else fills,
                    edgecolors=[color_of(item_of(edges, at)) for at in indices],
                    linewidths=item_of(marker.line.width, 0) or ("-open" in symbol) * 1.0,
                    clip_on=False,
                )
                self.later.append(partial(self._hide_outside, marks))
                shown.append(marks)
        for artist in shown:
            artist.set_zorder(order)
        if words and "text" in mode and trace.text is not None:
            up, across = str(trace.textposition or "middle center").split()
            (ha, right), (va, above) = ALIGNED[across], RAISED[up]
            for at in np.flatnonzero(np.isfinite(points).all(axis=1)).tolist():
                ink, size = item_of(trace.textfont.color, at), item_of(trace.textfont.size, at) or theme.FONT_PX
                look = {"ha": ha, "va": va, "zorder": order}
                self.write(points[at], item_of(trace.text, at), ink, int(size), (right, above), **look)
        return tuple(shown) if len(shown) > 1 else shown[0] if shown else None

    def _hide_outside(self, marks: Any) -> None:
        """Hide the marks that lie beyond the ends of the axes; those at an end are whole."""
        places = np.array(marks.get_offsets(), dtype=np.float64)
        for along, axis in enumerate((self.x, self.y)):
            low, high = sorted((axis.low, axis.high))
            room = 1e-9 * (high - low)
            places[(places[:, along] < low - room) | (places[:, along] > high + room)] = math.nan
        marks.set_offsets(places)

    def draw_bars(self, trace: Any, order: float, mode: str, position: int, number: int) -> Any:
        """Draw the bars of the trace at `position` among `number` traces of bars on these axes; `mode` is `barmode`."""
        lying, marker = trace.orientation == "h", trace.marker
        places, values = self.points(trace).T[:: -1 if lying else 1]
        starts = np.broadcast_to(np.asarray(0.0 if trace.base is None else trace.base, float), values.shape)
        if mode == "stack" and trace.base is None:
            starts = np.array([self.bar_ends[place] for place in places])
            for place, value in zip(places, values, strict=True):
                self.bar_ends[place] += value
        share = number if mode == "group" and trace.offset is None else 1
        width = np.asarray(0.8 / share if trace.width is None else trace.width, dtype=np.float64)
        shift = (position * width - 0.4 if share > 1 else -width / 2) if trace.offset is None else trace.offset
        first = places + np.asarray(shift, dtype=np.float64)
        along, across = np.stack([starts, starts + values]), np.stack([first, first + width])
        x, y = (along, across) if lying else (across, along)
        corners = np.stack([x[[0, 1, 1, 0]], y[[0, 0, 1, 1]]], axis=-1).swapaxes(0, 1)
        known = np.isfinite(corners).all(axis=(1, 2))
        if trace.text is not None and len(values):
            self.later.append(lambda: self._write_in_bars(trace, corners, order + 0.5))
        if marker.pattern.shape:  # one path of all bars: a hatch for each would take seconds
            path, look = Path.make_compound_path_from_polys(corners[known]), {"hatchcolor": marker.pattern.fgcolor}
            hatched = PathPatch(path, facecolor=color_of(marker.color), hatch="////", linewidth=0, zorder=order, **look)
            self.axes.update_datalim(corners[known].reshape(-1, 2))  # `add_patch` would look for curves in the path
            return self.axes.add_artist(hatched)
        colors, edge = marker.color, color_of(item_of(marker.line.color, 0)) if marker.line.color else "none"
        colors = [color_of(color) for color in colors] if isinstance(colors, tuple) else color_of(colors)
        look = {"facecolors": colors, "edgecolors": edge, "linewidths": marker.line.width or 0.0, "zorder": order}
        return self.axes.add_collection(PolyCollection(corners[known], **look))

    def _write_in_bars(self, trace: Any, corners: Array, order: float) -> None:
        """Write the words in or at the end of the bars; inside only where they fit."""
        boxes = self.pixels(corners.reshape(-1, 2)).reshape(-1, 4, 2)
        room, middle = np.ptp(boxes, axis=1), corners.mean(axis=1)
        lying, outside = trace.orientation == "h", trace.textposition == "outside"
        sizes, inks = trace.textfont.size, trace.textfont.color
        look: dict[str, Any] = {"zorder": order, "rotation": -(trace.textangle or 0)}
        for at, markup in enumerate(map(str, trace.text)):
            ink, size = item_of(inks, at), int(item_of(sizes, at) or theme.FONT_PX)
            if outside and lying:
                self.write((corners[at, 2, 0], middle[at, 1]), markup, ink, size, (4, 0), va="center_baseline", **look)
            elif outside:
                self.write((middle[at, 0], corners[at, 2, 1]), markup, ink, size, (0, 3), ha="center", **look)
            elif markup and width_of(markup, size) <= room[at, 0] - 4 and size <= room[at, 1]:
                self.write(middle[at], markup, ink, size, ha="center", va="center_baseline", **look)

    def draw_heat_map(self, trace: Any, order: float) -> Any:
        """Draw cells of colour with their words; return what a colour bar needs. A cell without a value is empty."""
        x, y = self.x.numbers(words_of(trace.x)), self.y.numbers(words_of(trace.y))
        edges = [np.append(places - 0.5, places[-1] + 0.5) for places in (x, y)]
        grid = np.ma.masked_invalid(np.asarray(trace.z, dtype=np.float64))
        look = {"cmap": color_map(trace.colorscale, bool(trace.reversescale)), "vmin": trace.zmin, "vmax": trace.zmax}
        look |= {"edgecolors": "white", "linewidth": trace.xgap} if trace.xgap else {"edgecolors": "none"}
        mesh = self.axes.pcolormesh(*edges, grid, shading="flat", zorder=order, **look)
        if trace.text is not None:
            self.later.append(lambda: self._write_in_cells(trace.text, mesh.to_rgba(grid), x, y, order + 0.5))
        return mesh

    def _write_in_cells(self, texts: Any, colors: Array, x: Array, y: Array, order: float) -> None:
        """Write the text of each cell in an ink that reads on its colour, smaller where the cell is narrow."""
        cell_px = self.axes.bbox.width / abs(self.x.high - self.x.low)
        for (row, column), (*rgb, opacity) in zip(np.ndindex(len(y), len(x)), colors.reshape(-1, 4), strict=True):
            if markup := str(texts[row][column] or ""):
                red, green, blue = (round(255 * float(channel)) for channel in rgb)
                ink = theme.ink_on(f"#{red:02x}{green:02x}{blue:02x}") if opacity else theme.INK
                size = max(7, min(theme.FONT_PX, int(theme.FONT_PX * (cell_px - 4) / width_of(markup))))
                self.write((x[column], y[row]), markup, ink, size, ha="center", va="center", zorder=order)

    def draw_parallel_coordinates(self, trace: Any) -> None:
        """Draw an upright axis for each dimension, and a line for each row through its values."""
        places, columns = np.linspace(0.06, 0.94, len(trace.dimensions)), []
        for at, dimension in zip(places, trace.dimensions, strict=True):
            values = np.asarray(dimension.values, dtype=np.float64)
            low, high = dimension.range or (values.min(), values.max())
            span = (high - low) or 1.0
            columns.append((values - low) / span)
            ticks = np.linspace(low, high, 5) if dimension.tickvals is None else dimension.tickvals
            words = [f"{tick:.4g}" for tick in ticks] if dimension.ticktext is None else dimension.ticktext
            self.axes.plot([at, at], [0, 1], color=theme.AXIS, linewidth=1, linestyle="-", marker="", clip_on=False)
            box = {"boxstyle": "square,pad=0.1", "facecolor": (1, 1, 1, 0.75), "edgecolor": "none"}
            for tick, word in zip(ticks, words, strict=True):
                self.write((at, (tick - low) / span), word, None, 11, (5, 0), va="center", bbox=box, zorder=4)
            self.write((at, 1), f"<b>{dimension.label}</b>", None, 12, (0, 12), ha="center")
        look: dict[str, Any] = {"array": np.asarray(trace.line.color, dtype=np.float64), "linewidths": 1.5, "zorder": 1}
        colors = color_map(trace.line.colorscale, bool(trace.line.reversescale))
        rows = [np.column_stack([places, row]) for row in np.transpose(columns)]
        self.axes.add_collection(LineCollection(rows, cmap=colors, **look))
        self.axes.update_datalim([(0, 0), (1, 1)])
