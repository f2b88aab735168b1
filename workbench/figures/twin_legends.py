"""The page of a static twin, its legends, and the words at the ends of its curves, which may replace a legend."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Affine2D

from workbench.figures import theme
from workbench.figures.legend_placement import BELOW_PX, ROW_PX
from workbench.figures.twin_axes import color_of, font, parted, plain, widest
from workbench.figures.twin_panel import TwinPanel, line_look

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
        words, bold = plain(str(markup or ""))
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
        lines = [trace for trace in traces if trace.meta == "line" and trace.legendgroup in values]
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
        return BELOW_PX + ROW_PX * max(rows) if rows else 0.0

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
                [plain(trace.name)[0].replace("$", r"\$") for trace in entries],
                loc=f"{up} {legend.xanchor or 'left'}",
                bbox_to_anchor=(x / page.width, y / page.height),
                ncols=self._columns(entries) if lying else 1,
                frameon=not lying,
                borderaxespad=0.0 if lying else 0.4,
                title=plain(legend.title.text or "")[0] or None,
                **LEGEND_LOOK,
            )
            box.set_zorder(4)

    def _write_at_ends(self, page: TwinPage, panel: TwinPanel) -> None:
        box = panel.axes.get_window_extent()
        most = int((box.height + 30) / LABEL_PX)
        ends = np.array([_end_of(panel, self.marks.get(trace.legendgroup, trace)) for trace, _ in self.ends[:most]])
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


def _end_of(panel: TwinPanel, trace: Any) -> Any:
    """Return the pixel of the last point of a curve that has a value."""
    points = panel.points(trace)
    known = points[np.isfinite(points).all(axis=1)]
    return panel.pixels(known[-1] if len(known) else (panel.x.high, panel.y.low))
