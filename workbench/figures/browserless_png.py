"""PNG of a figure, drawn with Pillow: for notebooks where no script runs, on machines without Chrome.

It draws what the figures of this package consist of: lines, markers, areas, bars, heat maps and parallel coordinates in
any number of subplots, with their axes, annotations and legends. Menus are left out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.analysis.curve import Array
from workbench.figures import theme
from workbench.figures.browserless_bars import Bars, bars_of
from workbench.figures.browserless_canvas import LINE_PX, Canvas, item_of
from workbench.figures.browserless_grid import draw_heat_map, draw_parallel_coordinates
from workbench.figures.browserless_scale import Scale, category_names
from workbench.figures.legend_placement import corner_of

WIDTH_PX = 860
"""Width of a notebook's column: JupyterLab cuts a wider picture off."""
TYPES = ("scatter", "bar", "heatmap", "parcoords")
"""Types of traces that can be drawn."""
LEFT, RIGHT, BELOW = 64, 32, 56
"""Smallest margins of the plots, in pixels."""
ANCHORS = {
    "left": "l",
    "center": "m",
    "right": "r",
    "top": "a",
    "middle": "m",
    "bottom": "d",
}
"""Pillow's letters for Plotly's anchors."""


def figure_png(figure: go.Figure, width: int = WIDTH_PX) -> bytes | None:
    """Return a PNG of a figure, `width` pixels wide.

    Returns None if a trace is of a type that is not drawn here, and if Pillow is not installed or has no font.
    """
    if any(trace.type not in TYPES for trace in figure.data):
        return None
    try:
        canvas = Canvas(width, int(figure.layout.height or 480))
    except ImportError:
        return None
    _Drawing(canvas, figure).draw()
    return canvas.png()


@dataclass(frozen=True)
class _Panel:
    """One pair of axes with its scales."""

    x: Scale
    y: Scale
    x_axis: Any
    y_axis: Any

    def points(self, x: Any, y: Any) -> Any:
        """Return pixels of shape (n, 2)."""
        return np.column_stack([np.atleast_1d(self.x(x)), np.atleast_1d(self.y(y))])


@dataclass(frozen=True)
class _MarkerLook:
    """Look of the markers of a trace, each field one value for all or one for each; `at` gives that of one marker."""

    color: Any
    edge: Any
    symbol: Any
    size: Any

    @classmethod
    def of(cls, marker: Any) -> _MarkerLook:
        return cls(marker.color, marker.line.color or marker.color, marker.symbol or "circle", marker.size or 6)

    def at(self, index: int) -> _MarkerLook:
        return _MarkerLook(*(item_of(value, index) for value in (self.color, self.edge, self.symbol, self.size)))


class _Drawing:
    def __init__(self, canvas: Canvas, figure: go.Figure) -> None:
        self._canvas, self._layout = canvas, figure.layout
        self._traces = [trace for trace in figure.data if trace.visible in (None, True)]
        self._bars: Mapping[int, Bars] = bars_of(self._traces, figure.layout.barmode or "group")
        self._pairs = list(dict.fromkeys(self._axes_of(trace) for trace in self._traces)) or [("x", "y")]
        self._subtitle = re.split(r"<br\s*/?>", str(self._layout.title.subtitle.text or "")) if self._title() else []
        self._frame = self._room_for_plots()
        self._panels = {pair: self._panel(*pair) for pair in self._pairs}

    def _title(self) -> str:
        return str(self._layout.title.text or "")

    def _axes_of(self, trace: Any) -> tuple[str, str]:
        return ("", "") if trace.type == "parcoords" else (trace.xaxis or "x", trace.yaxis or "y")

    def _axis(self, name: str) -> Any:
        return self._layout[f"{name[:1]}axis{name[1:]}"]

    def _room_for_plots(self) -> tuple[float, float, float, float]:
        """Return left, top, right and bottom edge of the area in which the axes have their domains."""
        margin, lines = self._layout.margin, len([line for line in self._subtitle if line])
        top: float = max(
            66 + LINE_PX * lines if self._title() else 40, (margin.t or 0) if self._layout.annotations else 0
        )
        left: float = LEFT
        right: float = max(RIGHT, margin.r or 0)
        for _, name in self._pairs:
            if name:
                axis = self._axis(name)
                names = category_names(axis, self._columns("xy".index(name[0]), name))
                words = [str(text) for text in axis.ticktext or names] if axis.showticklabels is not False else []
                width = 16 + max((self._canvas.width_of(text) for text in words), default=0)
                right = max(right, width) if axis.side == "right" else right
                left = max(left, width) if axis.side != "right" else left
        if any(trace.type == "heatmap" for trace in self._traces):
            right += 40 + max(map(self._canvas.width_of, _colorbar_words(self._traces)), default=0)
            rows = [str(word) for trace in self._traces for word in trace.y]
            left = max(left, 16 + max(map(self._canvas.width_of, rows), default=0))
        return left, top, self._canvas.width - right - 12, self._canvas.height - max(BELOW, margin.b or 0)

    def _panel(self, x_name: str, y_name: str) -> _Panel:
        left, top, right, bottom = self._frame
        if not x_name:
            return _Panel(Scale(0, 1, left, right), Scale(0, 1, bottom, top), self._layout.xaxis, self._layout.yaxis)
        x_axis, y_axis = self._axis(x_name), self._axis(y_name)
        across, up = x_axis.domain or (0, 1), y_axis.domain or (0, 1)
        x_px = [left + share * (right - left) for share in across]
        y_px = [bottom - share * (bottom - top) for share in up]
        x_columns, y_columns = self._columns(0, x_name), self._columns(1, y_name)
        has_bars = any(trace.type == "bar" for trace in self._traces if self._axes_of(trace)[1] == y_name)
        x = Scale.of(x_axis, x_columns, (x_px[0], x_px[1]), room=0.0)
        return _Panel(
            x, Scale.of(y_axis, y_columns, (y_px[0], y_px[1]), room=0.02 if has_bars else 0.05), x_axis, y_axis
        )

    def _columns(self, which: int, name: str) -> list[Any]:
        """Return all values along an axis, `which` is 0 for x and 1 for y."""
        columns: list[Any] = []
        for index, trace in enumerate(self._traces):
            own = self._axes_of(trace)[which]
            if own != name and (not own or (self._axis(own).matches or own) != (self._axis(name).matches or name)):
                continue
            if trace.type == "bar":
                columns += self._bars[index].along(which)
            else:
                value = _edges(_x_of(trace) if which == 0 else _y_of(trace), trace.type)
                columns += [value] if value is not None else []
                columns += _error_bar_ends(trace, which)
        if columns and not category_names(self._axis(name), columns):  # shapes lie inside the axes, as Plotly has it
            refs = [((s.xref, s.x0, s.x1), (s.yref, s.y0, s.y1))[which] for s in self._layout.shapes]
            columns += [ends for ref, *ends in refs if ref == name]
        return columns

    def draw(self) -> None:
        self._canvas.write((16, 14), self._title(), size=theme.TITLE_PX)
        for index, line in enumerate(self._subtitle):
            self._canvas.write((16, 40 + LINE_PX * index), line, theme.MUTED)
        for pair, panel in self._panels.items():
            if pair != ("", ""):
                self._draw_axes(panel)
        order = sorted(range(len(self._traces)), key=lambda index: getattr(self._traces[index], "zorder", 0) or 0)
        for index in order:
            self._draw_trace(index, self._traces[index])
        for shape in self._layout.shapes or ():
            self._draw_shape(shape)
        for annotation in self._layout.annotations or ():
            self._draw_annotation(annotation)
        self._draw_legends()

    def _draw_axes(self, panel: _Panel) -> None:
        x, y, canvas = panel.x, panel.y, self._canvas
        for at, label in y.ticks(panel.y_axis):
            if panel.y_axis.showgrid is not False:
                canvas.line([(x.start_px, at), (x.end_px, at)], theme.GRID, 1)
            if panel.y_axis.side == "right":
                canvas.write((x.end_px + 8, at), label, anchor="lm")
            else:
                canvas.write((x.start_px - 8, at), label, anchor="rm")
        for at, label in x.ticks(panel.x_axis):
            if panel.x_axis.showgrid is not False:
                canvas.line([(at, y.start_px), (at, y.end_px)], theme.GRID, 1)
            canvas.write((at, y.start_px + 8), label, anchor="ma")
        canvas.write(((x.start_px + x.end_px) / 2, y.start_px + 28), panel.x_axis.title.text, theme.MUTED, anchor="ma")
        canvas.write((max(16, x.start_px - 48), y.end_px - 14), panel.y_axis.title.text, theme.MUTED, anchor="lm")

    def _draw_trace(self, index: int, trace: Any) -> None:
        panel = self._panels[self._axes_of(trace)]
        if trace.type == "bar":
            self._bars[index].draw(self._canvas, panel.x, panel.y)
        elif trace.type == "heatmap":
            draw_heat_map(self._canvas, trace, panel.x, panel.y)
        elif trace.type == "parcoords":
            draw_parallel_coordinates(self._canvas, trace, self._frame)
        elif trace.y is not None and len(trace.y):
            self._draw_scatter(trace, panel)

    def _draw_scatter(self, trace: Any, panel: _Panel) -> None:
        points, x, y = panel.points(_x_of(trace), _y_of(trace)), panel.x, panel.y
        if panel.x_axis.range is None and panel.y_axis.range is None:
            self._draw_lines(trace, points)
        else:  # the range may leave points out
            with self._canvas.clipped((x.start_px, y.start_px), (x.end_px, y.end_px)):
                self._draw_lines(trace, points)
        _draw_error_bars(self._canvas, trace, panel, points)
        mode, known = trace.mode or "lines", np.isfinite(points).all(axis=1)
        if "markers" in mode:
            look = _MarkerLook.of(trace.marker)
            for index in np.flatnonzero(known).tolist():
                self._draw_marker(points[index, 0], points[index, 1], look.at(index))
        if "text" in mode and trace.text is not None:
            shift = {"top right": -9, "bottom right": 9}.get(str(trace.textposition), 0)
            words, color, size = trace.text, trace.textfont.color, trace.textfont.size or theme.FONT_PX
            for index in np.flatnonzero(known).tolist():
                at = points[index, 0] + 7, points[index, 1] + shift
                self._canvas.write(at, item_of(words, index), item_of(color, index), int(item_of(size, index)), "lm")

    def _draw_lines(self, trace: Any, points: Any) -> None:
        if trace.fill == "toself":
            self._canvas.polygon(points, trace.fillcolor)
        if "lines" in (trace.mode or "lines") and trace.line.width != 0:
            if trace.line.shape == "hv":  # each value holds until the next one
                corners = np.repeat(points, 2, axis=0)
                points = np.column_stack([corners[1:, 0], corners[:-1, 1]])
            self._canvas.line(points, trace.line.color, trace.line.width or 2, trace.line.dash)

    def _draw_marker(self, x: float, y: float, look: _MarkerLook) -> None:
        half, is_open = look.size / 2, str(look.symbol).endswith("-open")
        color, symbol = "rgba(0, 0, 0, 0)" if is_open else look.color, str(look.symbol).removesuffix("-open")
        left, right, above, below = x - half, x + half, y - half, y + half
        corners = {
            "triangle-up": [(left, below), (x, above), (right, below)],
            "triangle-down": [(left, above), (x, below), (right, above)],
            "triangle-right": [(left, above), (right, y), (left, below)],
            "diamond": [(x, above), (right, y), (x, below), (left, y)],
            "square": [(left, above), (right, above), (right, below), (left, below)],
        }
        if symbol == "x":
            self._canvas.line([(left, above), (right, below)], color, 2)
            self._canvas.line([(left, below), (right, above)], color, 2)
        elif symbol in corners:
            self._canvas.polygon(corners[symbol], color, look.edge)
        else:
            self._canvas.ellipse((x, y), half, color, look.edge)

    def _place(self, reference: str, value: Any, which: int) -> float:
        """Return the pixel of a position that refers to the paper, to an axis or to the domain of an axis."""
        left, top, right, bottom = self._frame
        if reference == "paper":
            return float(left + value * (right - left) if which == 0 else bottom - value * (bottom - top))
        name = reference.split()[0]
        panel = next((panel for pair, panel in self._panels.items() if pair[which] == name), None)
        scale = next(iter(self._panels.values())) if panel is None else panel
        axis = scale.x if which == 0 else scale.y
        if reference.endswith("domain"):
            return float(axis.start_px + value * (axis.end_px - axis.start_px))
        is_position = bool(axis.names) and not isinstance(value, str)
        return float(axis.from_numbers(value) if is_position else axis(value))

    def _draw_shape(self, shape: Any) -> None:
        x_of, y_of = str(shape.xref or "x"), str(shape.yref or "y")
        first = self._place(x_of, shape.x0, 0), self._place(y_of, shape.y0, 1)
        last = self._place(x_of, shape.x1, 0), self._place(y_of, shape.y1, 1)
        if shape.type == "rect":
            self._canvas.rectangle(first, last, shape.fillcolor or "rgba(0, 0, 0, 0)", shape.line.color)
        elif shape.type == "line":
            self._canvas.line([first, last], shape.line.color, shape.line.width or 2, shape.line.dash)

    def _draw_annotation(self, note: Any) -> None:
        x = self._place(str(note.xref or "paper"), note.x, 0)
        y = self._place(str(note.yref or "paper"), note.y, 1)
        across = ANCHORS.get(str(note.xanchor), "m")
        up = ANCHORS.get(str(note.yanchor), "m")
        y += {"d": -3, "a": 3}.get(up, 0)
        self._canvas.write((x, y), note.text, note.font.color, int(note.font.size or theme.FONT_PX), across + up)

    def _draw_legends(self) -> None:
        named: dict[str, list[Any]] = defaultdict(list)
        for trace in self._traces:
            if trace.type in ("scatter", "bar") and trace.name and trace.showlegend is not False:
                named[str(trace.legend or "legend")].append(trace)
        if self._layout.showlegend is False or sum(map(len, named.values())) < 2:
            return
        for name, traces in named.items():
            legend = self._layout[name]
            if legend.orientation == "h":
                self._draw_row_of_names(traces, self._top_of_row(legend))
            else:
                self._draw_box_of_names(traces, corner_of(legend))

    def _top_of_row(self, legend: Any) -> float:
        _, top, _, bottom = self._frame
        at = self._canvas.height * (1 - legend.y) if legend.yref == "container" else bottom - legend.y * (bottom - top)
        return float(at - (LINE_PX if legend.yanchor == "bottom" else 0)) - (4 if legend.yref == "container" else 0)

    def _draw_row_of_names(self, traces: Sequence[Any], top: float) -> None:
        end = float(self._frame[2])
        for trace in reversed(traces):
            width = self._canvas.width_of(trace.name)
            if end - width < self._frame[0]:  # the names before this one stand in a row above
                end, top = float(self._frame[2]), top - LINE_PX
            end -= width
            self._canvas.write((end, top + LINE_PX / 2), trace.name, anchor="lm")
            self._draw_key(trace, end - 22, end - 6, top + LINE_PX / 2)
            end -= 36

    def _draw_box_of_names(self, traces: Sequence[Any], corner: str) -> None:
        _, top, right, bottom = self._frame
        names = [str(trace.name)[:60] for trace in traces]
        longest = max(map(self._canvas.width_of, names))
        left = self._frame[0] + 52 if "left" in corner else right - 8 - longest
        if "bottom" in corner:
            top = bottom - 16 - LINE_PX * len(names)
        size = longest + 6, 12 + LINE_PX * len(names)
        self._canvas.rectangle((left - 44, top + 4), (left + size[0], top + size[1]), "white", theme.GRID)
        for index, (trace, name) in enumerate(zip(traces, names, strict=True)):
            middle = top + 8 + LINE_PX * (index + 0.5)
            self._draw_key(trace, left - 36, left - 8, middle)
            self._canvas.write((left, middle), name, anchor="lm")

    def _draw_key(self, trace: Any, left: float, right: float, middle: float) -> None:
        if trace.type == "bar" or trace.fill == "toself":
            color = item_of(trace.marker.color, 0) if trace.type == "bar" else trace.fillcolor
            self._canvas.rectangle((right - 12, middle - 6), (right, middle + 6), color, theme.GRID)
        elif "lines" in (trace.mode or "lines"):
            self._canvas.line([(left, middle), (right, middle)], trace.line.color, 2.2, trace.line.dash)
        else:
            self._draw_marker((left + right) / 2, middle, _MarkerLook.of(trace.marker).at(0))


def _x_of(trace: Any) -> Any:
    """Return the x values of a trace, which are 0, 1, 2, … if it gives none."""
    return np.arange(len(trace.y)) if trace.x is None and trace.y is not None else trace.x


def _edges(values: Any, trace_type: str) -> Any:
    """Return the values of a trace, or the outer edges of a heat map whose cells stand at numbers."""
    if trace_type != "heatmap" or isinstance(values[0], str):
        return values
    return [values[0] - 0.5, *values, values[-1] + 0.5]


def _error_bar_ends(trace: Any, which: int) -> list[Array]:
    """Return both ends of each error bar, `which` is 0 for bars along x and 1 along y; nothing without error bars."""
    spread = (trace.error_x, trace.error_y)[which] if trace.type == "scatter" else None
    if spread is None or spread.array is None or spread.visible is False:
        return []
    values = np.asarray((trace.x, trace.y)[which], dtype=np.float64)
    plus = np.asarray(spread.array, dtype=np.float64)
    minus = plus if spread.arrayminus is None else np.asarray(spread.arrayminus, dtype=np.float64)
    return [values - minus, values + plus]


def _draw_error_bars(canvas: Canvas, trace: Any, panel: _Panel, points: Array) -> None:
    for which, scale in enumerate((panel.x, panel.y)):
        spread, ends = (trace.error_x, trace.error_y)[which], _error_bar_ends(trace, which)
        for point, *bar in zip(points, *map(scale, ends), strict=True) if ends else ():
            corners = np.array([point, point])
            corners[:, which] = bar
            canvas.line(corners, spread.color or trace.marker.color, 2)


def _colorbar_words(traces: Sequence[Any]) -> list[str]:
    """Return the words beside the colour bars of heat maps that have words in place of numbers."""
    return [str(word) for trace in traces if trace.type == "heatmap" for word in trace.colorbar.ticktext or ()]


def _y_of(trace: Any) -> Any:
    """Return the y values of a trace; words of two levels become one word each."""
    if trace.y is not None and len(trace.y) == 2 and all(np.ndim(level) == 1 for level in trace.y):
        return [" ".join(map(str, words)) for words in zip(*trace.y, strict=True)]
    return trace.y
