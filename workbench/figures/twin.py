"""The static twin of a figure, drawn by matplotlib: for notebooks, papers and pages where no script runs.

It draws what the figures of this package consist of: lines, markers, areas, bars, heat maps and parallel coordinates in
any number of subplots, with axes, shapes, annotations and legends. Menus and sliders are left out. Where a legend would
take the room of the curves, their names stand at their ends.

A twin is a `matplotlib.figure.Figure` of its own, without pyplot and its global state, so that several threads may
draw. All lengths are in pixels: with 72 dots per inch a pixel is one of matplotlib's points.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.transforms import Affine2D

from workbench.figures import theme
from workbench.figures.twin_panel import (
    TwinAxis,
    TwinPanel,
    color_of,
    font,
    line_look,
    parted,
    text_of,
    tick_label,
    widest,
    words_of,
    wrapped,
)

# The page, its legends, and the words at the ends of curves, which may replace a legend.

LABEL_PX, LABEL_CHARACTERS = 14, 34
"""Height of the words at the end of a curve, in pixels, and the largest length of a name among them."""
LEGEND_LOOK: Mapping[str, Any] = {
    "prop": font(),
    "labelcolor": theme.INK,
    "fancybox": False,
    "framealpha": 0.85,
    "facecolor": "white",
    "edgecolor": theme.GRID,
    "borderpad": 0.4,
    "handlelength": 2.0,
    "handletextpad": 0.6,
    "columnspacing": 1.6,
    "labelspacing": 0.4,
}


class TwinPage:
    """A white page. All lengths are in pixels from its lower left corner, and 72 of them are an inch."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.picture = Figure((width / 72, height / 72), dpi=72, facecolor=theme.PAPER)
        self.px = Affine2D().scale(1 / 72) + self.picture.dpi_scale_trans

    def axes(self, left: float, bottom: float, width: float, height: float) -> Axes:
        """Return new axes, of which nothing shows by itself."""
        axes = self.picture.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        self.place(axes, left, bottom, width, height)
        return axes

    def place(self, axes: Axes, left: float, bottom: float, width: float, height: float) -> None:
        axes.set_position((left / self.width, bottom / self.height, width / self.width, height / self.height))

    def write(self, x: float, y: float, markup: Any, color: Any = None, size: int = theme.FONT_PX, **look: Any) -> None:
        words, bold = text_of(str(markup or ""))
        if words:
            text = self.picture.text(x, y, words, transform=self.px, fontproperties=font(size, bold), **look)
            text.set(color=color_of(color), parse_math=False, rotation_mode="anchor", linespacing=1.25)

    def line(self, x: Sequence[float], y: Sequence[float], **look: Any) -> None:
        self.picture.add_artist(Line2D(x, y, transform=self.px, **look))


@dataclass(frozen=True)
class TwinLegends:
    """The legends of a figure, and the words at the ends of its curves."""

    layout: Any
    entries: Mapping[str, Sequence[Any]]
    """The traces with an entry in each legend, by the legend's name."""
    ends: Sequence[tuple[Any, str]]
    """Curves and the words at their ends: the last value if the figure says it, the name if no legend does."""
    width: int
    """Width of the picture in pixels."""
    marks: Mapping[str, Any]
    """The traces of the numbers at the ends of curves, by the legend group of the curve."""

    @classmethod
    def of(cls, layout: Any, traces: Sequence[Any], one_panel: bool, width: int) -> TwinLegends:
        """Return the legends of a figure; names stand at the curves' ends where a legend would take their room."""
        entries = [t for t in traces if t.type in ("scatter", "bar") and t.name and t.showlegend is not False]
        if layout.showlegend is False or (len(entries) < 2 and not any(trace.showlegend for trace in entries)):
            entries = []
        marks = {t.legendgroup: t for t in traces if t.meta == "end" and t.text is not None and len(t.text)}
        values = {group: trace.text[-1] for group, trace in marks.items()}
        large = _is_beside(layout.legend) or len(entries) > 10 or widest(t.name for t in entries) > 0.4 * width
        are_lines = all(t.type == "scatter" and "lines" in (t.mode or "lines") and not t.fill for t in entries)
        curves = one_panel and len(entries) > 1 and are_lines
        if large and curves and (layout.legend.orientation != "h" or any(trace.meta == "end" for trace in traces)):
            words = [f"{values[t.legendgroup]}&nbsp; " if t.legendgroup in values else "" for t in entries]
            names = [theme.short(trace.name, LABEL_CHARACTERS) for trace in entries]
            return cls(layout, {}, [(t, w + n) for t, w, n in zip(entries, words, names, strict=True)], width, marks)
        named: dict[str, list[Any]] = defaultdict(list)
        for trace in entries:
            named[str(trace.legend or "legend")].append(trace)
        lines = [t for t in traces if t.meta == "line" and t.showlegend is not False and t.legendgroup in values]
        return cls(layout, named, [(trace, values[trace.legendgroup]) for trace in lines], width, marks)

    @property
    def room_px(self) -> float:
        """Width that legends and words take beside the plots."""
        legend, entries = self.layout.legend, self.entries.get("legend", [])
        if self.ends:
            return 36 + widest([*(words for _, words in self.ends), "" if entries else legend.title.text or ""])
        return 64 + widest(trace.name for trace in entries) if entries and _is_beside(legend) else 0.0

    @property
    def below_px(self) -> float:
        """Height that a legend along the lower edge takes together with the ticks and the title of an axis above it."""
        rows = [
            math.ceil(len(entries) / self._columns(entries))
            for name, entries in self.entries.items()
            if self.layout[name].yref == "container"
        ]
        return theme.AXIS_PX + theme.LEGEND_ROW_PX * max(rows) if rows else 0.0

    def _columns(self, entries: Sequence[Any]) -> int:
        return max(1, min(len(entries), int((self.width - 40) // (46 + widest(trace.name for trace in entries)))))

    def draw(self, page: TwinPage, keys: Mapping[int, Any], frame: Sequence[float], panel: TwinPanel) -> None:
        """Draw legends and words; `keys` has what shows a trace's look by its id, `frame` the edges of all plots."""
        if self.ends:
            self._write_at_ends(page, panel)
        left, bottom, right, top = frame
        for name, entries in self.entries.items():
            legend = self.layout[name]
            lying, inside = legend.orientation == "h", legend.yref != "container"
            x = right + 14 if _is_beside(legend) else left + legend.x * (right - left)
            y = bottom + (1.0 if legend.y is None else legend.y) * (top - bottom) if inside else 4.0
            up = {"bottom": "lower", "middle": "center"}.get(str(legend.yanchor), "upper") if inside else "lower"
            box = page.picture.legend(
                [keys.get(id(trace)) or Line2D([], []) for trace in entries],
                [text_of(trace.name)[0].replace("$", r"\$") for trace in entries],
                loc=f"{up} {legend.xanchor or 'left'}",
                bbox_to_anchor=(x / page.width, y / page.height),
                ncols=self._columns(entries) if lying else 1,
                frameon=not lying,
                borderaxespad=0.0 if lying else 0.4,
                title=text_of(legend.title.text or "")[0] or None,
                **LEGEND_LOOK,
            )
            box.set_zorder(4)

    def _write_at_ends(self, page: TwinPage, panel: TwinPanel) -> None:
        box = panel.axes.get_window_extent()
        most = int((box.height + 30) / LABEL_PX)
        lasts = []  # the last point of each curve that has a value, in pixels
        for trace, _ in self.ends[:most]:
            points = panel.points(self.marks.get(trace.legendgroup, trace))
            known = points[np.isfinite(points).all(axis=1)]
            lasts.append(panel.pixels(known[-1] if len(known) else (panel.x.high, panel.y.low)))
        ends = np.array(lasts)
        ends[:, 1] = np.clip(ends[:, 1], box.y0, box.y1)
        heights = parted(ends[:, 1], LABEL_PX, box.y0 - 15, box.y1 + 15)
        for (trace, words), (x, y), height in zip(self.ends, ends, heights, strict=False):
            if abs(y - height) > 2 or box.x1 - x > 20:
                look = {**line_look(trace.line), "linewidth": 0.8, "linestyle": (0, (1, 2))}
                page.line([x + 4, box.x1 + 4, box.x1 + 16], [y, y, height], **look)
            color = trace.marker.color or trace.line.color
            page.write(box.x1 + 19, height, words, theme.as_text(color), 11, va="center_baseline")
        if len(self.ends) > most:
            page.write(box.x1 + 19, box.y0 - 30, f"and {len(self.ends) - most} more", theme.MUTED, 11, va="top")
        if not self.entries:
            page.write(box.x1 + 19, box.y1 + 24, self.layout.legend.title.text, theme.MUTED, 11)


def _is_beside(legend: Any) -> bool:
    return bool(legend.orientation != "h" and (legend.x is None or legend.x > 1))


class Twin:
    """The twin of a figure, which `draw` returns as matplotlib can save it in any format."""

    def __init__(self, figure: go.Figure, width: int) -> None:
        self._layout, self._page = figure.layout, TwinPage(width, int(figure.layout.height or 480))
        self._traces = [trace for trace in figure.data if trace.visible in (None, True)]
        pairs = list(dict.fromkeys(map(_axes_of, self._traces))) or [("x", "y")]
        self._axes: dict[str, TwinAxis] = {}
        for name in dict.fromkeys(name for pair in pairs for name in pair):
            which = "xy".index(name[0])
            own = [trace for trace in self._traces if _axes_of(trace)[which] == name and trace.type != "parcoords"]
            layout = self._layout[f"{name[0]}axis{name[1:]}"]
            self._axes[name] = TwinAxis.of(layout, which == 1, [words_of((trace.x, trace.y)[which]) for trace in own])
        self._panels: dict[tuple[str, str], TwinPanel] = {}
        for x, y in pairs:
            self._panels[x, y] = TwinPanel(self._page.axes(0, 0, 1, 1), self._axes[x], self._axes[y])
        self._legends = TwinLegends.of(self._layout, self._traces, len(pairs) == 1, width)
        # Lines that were broken only for a narrow figure are joined, which leaves their height to the plots.
        self._title, self._spared_px, title = list[tuple[str, int]](), 0.0, self._layout.title
        for markup, size in ((title.text, theme.TITLE_PX), (title.subtitle.text, theme.FONT_PX)):
            given = str(markup or "")
            lines = wrapped(given.replace(theme.SOFT_BREAK, " "), width - 32, size)
            self._title += [(f"<b>{line}</b>" if size == theme.TITLE_PX else line, size) for line in lines]
            self._spared_px += max(0, given.count("<br>") + 1 - len(lines)) * theme.LINE_SPACING * size if given else 0

    def draw(self) -> Figure:
        """Draw everything: first what sets the ends of the axes, then what needs their place on the picture."""
        keys = self._draw_traces()
        for name, axis in self._axes.items():
            self._fit(name, axis)
        self._frame = left, bottom, right, top = self._margins()
        for panel in self._panels.values():
            (x0, x1), (y0, y1) = panel.x.domain, panel.y.domain
            corner = left + x0 * (right - left), bottom + y0 * (top - bottom)
            self._place(panel, *corner, (x1 - x0) * (right - left), (y1 - y0) * (top - bottom))
        for panel in self._panels.values():
            for act in panel.later:
                act()
        for shape in self._layout.shapes:
            xs = [self._pixel(str(shape.xref or "x"), value, 0) for value in (shape.x0, shape.x1)]
            ys = [self._pixel(str(shape.yref or "y"), value, 1) for value in (shape.y0, shape.y1)]
            if shape.type == "line":
                self._page.line(xs, ys, **line_look(shape.line))
            elif shape.type == "rect":
                area = Rectangle((min(xs), min(ys)), np.ptp(xs), np.ptp(ys), transform=self._page.px)
                area.set(facecolor=color_of(shape.fillcolor) if shape.fillcolor else "none")
                area.set(edgecolor=color_of(shape.line.color), linewidth=shape.line.width or 0)
                self._page.picture.add_artist(area)
        for note in self._layout.annotations:
            refs = ((str(note.xref or "x"), note.x), (str(note.yref or "y"), note.y))
            logs = [ref in self._axes and self._axes[ref].log for ref, _ in refs]  # there Plotly takes powers of ten
            along = zip(refs, logs, (0, 1), strict=True)
            x, y = (self._pixel(ref, 10.0**value if log else value, which) for (ref, value), log, which in along)
            x, y, size = x + (note.xshift or 0), y + (note.yshift or 0), int(note.font.size or theme.FONT_PX)
            if note.showarrow is not False:
                tip, (x, y) = (x, y), (x + (note.ax or 0), y - (note.ay or 0))
                self._page.line([tip[0], x], [tip[1], y], color=theme.MUTED, linewidth=1.2, linestyle="-", marker="")
            va = {"middle": "center", "top": "top", "bottom": "bottom"}.get(str(note.yanchor), "center")
            y += {"bottom": 3, "top": -3}.get(va, 0)
            ha = {"left": "left", "right": "right"}.get(str(note.xanchor), "center")
            self._page.write(x, y, note.text, note.font.color, size, ha=ha, va=va)
        # The lines of the title stand above one another, from the upper edge down.
        at = self._page.height - 12.0
        for line, size in self._title:
            self._page.write(16, at, line, theme.INK if size == theme.TITLE_PX else theme.MUTED, size, va="top")
            at -= size + 5
        self._legends.draw(self._page, keys, self._frame, next(iter(self._panels.values())))
        return self._page.picture

    def _draw_traces(self) -> dict[int, Any]:
        """Draw the traces, and return what shows the look of each in a legend, by the trace's id."""
        keys, seen = {}, Counter[TwinPanel]()
        number = Counter(_axes_of(trace) for trace in self._traces if trace.type == "bar")
        for index, trace in enumerate(self._traces):
            panel, order = self._panels[_axes_of(trace)], 2 + index / 1e4
            if trace.type == "bar":
                mode = self._layout.barmode or "group"
                keys[id(trace)] = panel.draw_bars(trace, order, mode, seen[panel], number[_axes_of(trace)])
                seen[panel] += 1
            elif trace.type == "heatmap":
                mesh = panel.draw_heat_map(trace, order)
                if trace.showscale is not False:
                    self._draw_color_bar(panel, trace, mesh)
            elif trace.type == "parcoords":
                panel.draw_parallel_coordinates(trace)
            else:
                written = self._legends.ends and trace.meta == "end"  # at a height where it does not lie on another
                keys[id(trace)] = panel.draw_scatter(trace, order + (trace.zorder or 0), words=not written)
        return keys

    def _fit(self, name: str, axis: TwinAxis) -> None:
        """Set the ends of an axis from what is drawn on it, and on the axes that share them, and from shapes."""
        which, group = "xy".index(name[0]), axis.layout.matches or name
        own = {pair for pair in self._panels if (self._axes[pair[which]].layout.matches or pair[which]) == group}
        boxes = [self._panels[pair].axes.dataLim for pair in own]
        values = [value for box in boxes for value in (box.intervalx, box.intervaly)[which]]
        refs = [((s.xref, s.x0, s.x1), (s.yref, s.y0, s.y1))[which] for s in self._layout.shapes]
        values += [value for ref, *ends in refs if ref == name and not axis.names for value in ends]
        traces = [trace for trace in self._traces if _axes_of(trace) in own]
        has_bars = any(trace.type == "bar" for trace in traces)
        marked = any(trace.type == "scatter" and "lines" not in (trace.mode or "lines") for trace in traces)
        padding = 0.05 if which else 0.04 if marked else 0.01
        known = [value for value in values if np.isfinite(value)]
        low, high = (min(known), max(known)) if known else (np.inf, -np.inf)
        if any(trace.type == "heatmap" for trace in traces):
            padding = 0.0
        axis.fit(low, high, padding, min(float((box.minposx, box.minposy)[which]) for box in boxes))
        if has_bars and low == 0 and axis.layout.range is None:
            axis.low = max(0.0, axis.low)
        for panel in self._panels.values():
            if axis in (panel.x, panel.y):
                scale = {"xscale" if which == 0 else "yscale": "log"} if axis.log else {}
                panel.axes.set(**scale, **{"xlim" if which == 0 else "ylim": (axis.low, axis.high)})

    def _margins(self) -> tuple[float, float, float, float]:
        """Return left, bottom, right and top edge of the area in which the axes have their domains."""
        margin = self._layout.margin
        menus = bool(self._layout.updatemenus or self._layout.sliders)
        left, right = 16.0, 24.0 if menus else float(margin.r or 24)
        for panel in self._panels.values():
            width = 22 + widest(panel.y.ticks(self._page.height)[1])
            if panel.y.layout.side == "right":
                right = max(right, width)
            elif panel.x.domain[0] < 0.01:
                left = max(left, width + (24 if panel.y.layout.title.text else 0))
        right = max(right, self._legends.room_px)
        for trace in self._traces:
            if trace.type == "heatmap":
                right = 48 + widest([trace.colorbar.title.text or "", "12.345", *(trace.colorbar.ticktext or ())])
        words_above = 12 + sum(size + 5 for _, size in self._title)
        above = margin.t or 0  # which does not count a title's lines where `laid_out` has not made the figure
        above = max(above - self._spared_px, min(above, theme.TEMPLATE.layout.margin.t))
        top = max(words_above + 12, 0 if menus else above)
        has_words = self._legends.ends and not self._legends.entries  # at the curves' ends, in place of a legend
        below = 0 if has_words or menus else margin.b or 0
        return left, max(56, below, self._legends.below_px), self._page.width - right, self._page.height - top

    def _place(self, panel: TwinPanel, left: float, bottom: float, width: float, height: float) -> None:
        """Give axes their rectangle, and draw their grid, ticks and titles."""
        axes = panel.axes
        self._page.place(axes, left, bottom, width, height)
        if panel.y.layout.scaleanchor:
            axes.set_aspect("equal")
            axes.apply_aspect()
        if any(trace.type == "parcoords" for trace in self._traces):
            return
        box = axes.get_window_extent()
        for axis, transform in ((panel.x, axes.get_xaxis_transform()), (panel.y, axes.get_yaxis_transform())):
            values, labels = axis.ticks(box.height if axis.vertical else box.width)
            ends = [[(0, value), (1, value)] if axis.vertical else [(value, 0), (value, 1)] for value in values]
            if axis.layout.showgrid is not False and not axis.names:
                grid = LineCollection(ends, colors=[theme.GRID], linewidths=1, zorder=0.5, transform=transform)
                axes.add_collection(grid, autolim=False)
            for (end, _), label in zip(ends, labels, strict=True):
                x, y = transform.transform(end)
                if not axis.vertical:
                    self._page.write(x, box.y0 - 7, label, ha="center", va="top")
                elif axis.layout.side == "right":
                    self._page.write(box.x1 + 8, y, label, va="center")
                else:
                    self._page.write(box.x0 - 8, y, label, ha="right", va="center")
            title = axis.layout.title.text
            if axis.vertical:
                x, y = box.x0 - widest(labels) - 14, (box.y0 + box.y1) / 2
                self._page.write(x, y, title, theme.MUTED, ha="center", va="bottom", rotation=90)
            else:
                lines = max((text_of(label)[0].count("\n") + 1 for label in labels if label), default=0)
                x, y = (box.x0 + box.x1) / 2, box.y0 - 10 - 15 * lines
                self._page.write(x, y, title, theme.MUTED, ha="center", va="top")

    def _pixel(self, reference: str, value: Any, which: int) -> float:
        """Return the pixel of a position that refers to the paper, to an axis or to the domain of an axis."""
        name = reference.split()[0]
        panels = [panel for pair, panel in self._panels.items() if pair[which] == name] or [*self._panels.values()]
        box = panels[0].axes.get_window_extent()
        ends = self._frame[which::2] if name == "paper" else (box.intervalx, box.intervaly)[which]
        if name == "paper" or reference.endswith("domain"):
            return float(ends[0] + value * (ends[1] - ends[0]))
        axis = (panels[0].x, panels[0].y)[which]
        number = axis.numbers([value])[0] if isinstance(value, str) else float(value)
        return float(panels[0].pixels((number, panels[0].y.low) if which == 0 else (panels[0].x.low, number))[which])

    def _draw_color_bar(self, panel: TwinPanel, trace: Any, mesh: Any) -> None:
        def draw() -> None:
            box, (low, high), scale = panel.axes.get_window_extent(), mesh.get_clim(), trace.colorbar
            left, height = box.x1 + 14, box.height
            bar = self._page.axes(left, box.y0, 12, height)
            bar.imshow(np.arange(256)[:, None], cmap=mesh.cmap, aspect="auto", origin="lower", interpolation="nearest")
            values = np.linspace(low, high, 5) if scale.tickvals is None else scale.tickvals
            words = [tick_label(float(f"{v:.3g}"), scale.tickformat or "") for v in values]
            for value, word in zip(values, scale.ticktext or words, strict=True):
                at = box.y0 + (value - low) / ((high - low) or 1.0) * height
                self._page.write(left + 18, at, word, theme.MUTED, 11, va="center")
            self._page.write(left, box.y1 + 6, scale.title.text, theme.MUTED, 11, va="bottom")

        panel.later.append(draw)


def _axes_of(trace: Any) -> tuple[str, str]:
    return ("x", "y") if trace.type == "parcoords" else (trace.xaxis or "x", trace.yaxis or "y")
