"""Look of every figure: palette, fonts, margins.

The background is opaque, so that a figure is legible on a dark web page and in a PNG. It is white but for a trace, by
which JupyterLab recognises a figure of this package and shows it dark in a dark theme (`workbench/lab`, `figures.js`).
Colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which stay distinct under the common
colour-vision deficiencies; two of them are darkened for contrast on white.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#B5559A", "#4AA3DF", "#C98A00", "#6A51A3", "#6B7280")

DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
NAME_CHARACTERS = 48
"""Largest length of a run's name in a legend: a longer name would leave no room for the curves."""

PAPER = "#FEFFFF"
INK = "#1F2937"
MUTED = "#5B6472"
MUTED_CSS = f"var(--jp-ui-font-color2, {MUTED})"
"""Colour of secondary text in HTML, which follows JupyterLab's theme."""
GRID = "#E5E8EC"
AXIS = "#9AA3AF"
ALERT = "#B3261E"

FORWARD, BACKWARD = "#3B82C4", "#E39B2D"

MEMORY_LOOKS = {
    "parameters": ("parameters", "#37475A"),
    "gradients": ("gradients", "#6F86A0"),
    "optimizer": ("optimiser", "#AEBCCB"),
    "activations": ("activations", "#7F8C2E"),
    "workspace": ("workspace", "#CFD6A0"),
}
"""Label and colour of each category of memory: slate if it stays through a step, olive if it comes and goes."""
STAGE = "#8A3A73"
"""Colour of the first stage of a pipeline; later ones are paler. Nothing else in the picture of a plan is plum."""

FONT_FAMILY = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
FONT_PX = 12
TITLE_PX = 15
SOFT_BREAK = " <br>"
"""Line break of a title that a wider picture does without: plotly.js draws the space as nothing."""
TITLE_LETTERS, SUBTITLE_LETTERS = 48, 70
"""Letters of a line of a title and of its subtitle that fit into a figure of 500 pixels: plotly.js breaks no lines."""
LINE_SPACING = 1.3
"""Distance of two lines of a text in plotly.js, as a multiple of the font's size."""
TITLE_LEFT_PX, TITLE_TOP_PX = 16, 28
"""Place of a title, below the buttons in the corner."""
BOTTOM_PX = 52
"""Margin below a plot, with the ticks and the title of its x axis."""
ASSUMED_WIDTH_PX = 1000
"""Width that is assumed for decisions made before the page's width is known, such as whether a label fits."""

CONFIG: dict[str, object] = {
    "displaylogo": False,
    "modeBarButtonsToRemove": [
        *("sendChartToCloud", "select2d", "lasso2d", "autoScale2d"),
        *("zoomIn2d", "zoomOut2d"),  # the wheel and a drag do the same, and more buttons would cover titles
    ],
}
"""Configuration of plotly.js for every figure, without buttons that send data to a company or have no effect here.

It is not `responsive`: a figure that had a picture before it, as in JupyterLab, would then be 0 pixels high after the
window's next change. JupyterLab changes the width of its figures itself.
"""

TEXT_INSIDE: dict[str, object] = {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
"""Layout of text in the middle of a bar, never turned."""
LEGEND_BELOW: dict[str, object] = {
    "orientation": "h",
    "x": 1,
    "xanchor": "right",
    "y": 0,
    "yref": "container",
    "yanchor": "bottom",
    "traceorder": "normal",
    "borderwidth": 0,
}
"""Layout of a legend in a row along the figure's lower edge, or in several rows."""


_AXIS_LOOK: dict[str, Any] = {"gridcolor": GRID, "linecolor": AXIS, "zeroline": False, "automargin": True}
_AXIS_TITLE = {"color": MUTED, "size": FONT_PX}
TEMPLATE = go.layout.Template(
    layout=go.Layout(
        font={"family": FONT_FAMILY, "size": FONT_PX, "color": INK},
        paper_bgcolor=PAPER,
        plot_bgcolor="white",
        colorway=PALETTE,
        margin={"l": 64, "r": 32, "t": 78, "b": BOTTOM_PX},
        title={
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"l": TITLE_LEFT_PX, "t": TITLE_TOP_PX},
            "font": {"size": TITLE_PX, "color": INK},
            "subtitle": {"font": {"size": FONT_PX, "color": MUTED}},
        },
        xaxis={
            **_AXIS_LOOK,
            "ticks": "outside",
            "tickcolor": AXIS,
            "ticklen": 4,
            "title": {"standoff": 8, "font": _AXIS_TITLE},
        },
        yaxis={**_AXIS_LOOK, "title": {"standoff": 10, "font": _AXIS_TITLE}},
        legend={"bgcolor": "rgba(255,255,255,0.85)", "bordercolor": GRID, "borderwidth": 1},
        hoverlabel={"bgcolor": "white", "bordercolor": AXIS, "font": {"color": INK, "size": FONT_PX}, "namelength": -1},
        bargap=0.3,
    ),
    data={"scatter": [{"cliponaxis": False}]},  # a mark at the end of an axis, as at step 0, is whole
)


def series_color(index: int) -> str:
    """Return the colour of the run, stage or series of this index; after eight colours they repeat."""
    return PALETTE[index % len(PALETTE)]


def stage_color(stage: int, count: int) -> str:
    """Return the colour of a stage, or of a pipeline rank, of so many."""
    return pale(STAGE, 0.6 * stage / max(1, count - 1))


def pale(color: str, share: float = 0.6) -> str:
    """Return `color` (`#rrggbb`) mixed with a share of white."""
    return "#" + "".join(f"{round(channel + (255 - channel) * share):02x}" for channel in rgb(color))


def ink_on(color: str) -> str:
    """Return the text colour, white or black, that reads better on `color`; its contrast is 4.58 at least (WCAG 2)."""
    light = luminance(color) + 0.05
    return "#ffffff" if 1.05 / light > light / 0.05 else "#000000"


def luminance(color: str) -> float:
    """Return the relative luminance of `#rrggbb`, 0 to 1 (WCAG 2)."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb(color))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def as_text(color: str) -> str:
    """Return `color` darkened until text in it has a contrast of 4.5 to the paper, the least that WCAG 2 asks for.

    A colour in words is returned as it is.
    """
    while color.startswith("#") and 1.05 / (luminance(color) + 0.05) < 4.6:
        color = "#" + "".join(f"{int(0.96 * channel):02x}" for channel in rgb(color))
    return color


def rgb(color: str) -> tuple[int, int, int]:
    """Return the channels of `#rrggbb`, 0 to 255."""
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def band(x: Any, low: Any, high: Any, color: str, **fields: Any) -> go.Scatter:
    """Return the pale area between two curves, which has no entry in the legend."""
    quiet = {"line": {"width": 0}, "hoverinfo": "skip", "showlegend": False, "meta": "band"}
    around = {"x": np.concatenate([x, x[::-1]]), "y": np.concatenate([high, low[::-1]])}
    fill = f"rgba({', '.join(map(str, rgb(color)))}, 0.2)"
    return go.Scatter(**around, mode="lines", fill="toself", fillcolor=fill, **quiet, **fields)


def curve(x: Any, y: Any, name: Any, color: Any, dash: Any = "solid", width: Any = 2, **fields: Any) -> go.Scatter:
    """Return a line in one colour."""
    look = {"color": color, "dash": dash, "width": width}
    return go.Scatter(x=x, y=y, mode="lines", name=name, line=look, **fields)


def marks(x: Any, y: Any, name: str, marker: dict[str, Any], words: Any = None, **fields: Any) -> go.Scatter:
    """Return marks with words under the mouse; without words the mouse finds nothing."""
    hover = {"hoverinfo": "skip"} if words is None else {"text": words, "hovertemplate": "%{text}<extra></extra>"}
    return go.Scatter(x=x, y=y, mode="markers", name=name, marker=marker, **hover, **fields)


def series_dash(index: int) -> str:
    """Return the line style of this index, which changes after four series.

    No two of forty series share colour and style, and colours that look alike to somebody who tells red from green
    badly (the first and the seventh, the second and the sixth, the fourth and the eighth) differ in it.
    """
    return DASHES[index // (len(PALETTE) // 2) % len(DASHES)]


def in_one_line(parts: Iterable[str]) -> str:
    """Return the parts of a list in one line, which breaks between them only (`broken`)."""
    return "\u00a0· ".join(part.replace(" ", "\u00a0") for part in parts)


def text(value: object) -> str:
    """Return a user's text escaped for places where Plotly reads HTML-like markup or `%{…}`."""
    return html.escape(str(value), quote=False).replace("%{", "%\u200b{")


def short(name: str, most: int = NAME_CHARACTERS) -> str:
    """Return a name for a legend: a long name keeps its beginning and its end, in which long names mostly differ."""
    return name if len(name) <= most else f"{name[: most - most // 3 - 1]}…{name[-(most // 3) :]}"


def title(main: str, subtitle: str | None = None) -> dict[str, Any]:
    """Return a `layout.title` with lines that fit into a narrow figure.

    Both arguments may hold Plotly markup, so escape a user's text with `text`.
    """
    value: dict[str, Any] = {"text": f"<b>{broken(main, TITLE_LETTERS, SOFT_BREAK)}</b>"}
    if "<br>" in value["text"]:  # plotly.js then begins higher, where its buttons are
        value["pad"] = {"l": TITLE_LEFT_PX, "t": TITLE_TOP_PX + 11}
    if subtitle:
        value["subtitle"] = {"text": broken(subtitle, SUBTITLE_LETTERS, SOFT_BREAK)}
    return value


def in_the_middle(words: str) -> dict[str, Any]:
    """Return an annotation in the middle of a plot that has no values yet."""
    middle = {"x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "showarrow": False}
    return {"text": words, "font": {"color": MUTED}, **middle}


def broken(words: str, letters: int, at: str = "<br>") -> str:
    """Return a text in lines of at most so many letters, broken by `at` at spaces that are not in a tag."""
    broken_lines = []
    for line in words.split("<br>"):
        lines = [""]
        for word in re.split(r" (?!(?:%|[KMGT]iB\b|ms\b))(?![^<]*>)", line):
            longer = html.unescape(re.sub(r"<[^>]*>", "", f"{lines[-1]} {word}"))
            if lines[-1] and len(longer) > letters:
                lines.append("")
            lines[-1] = f"{lines[-1]} {word}".lstrip(" ")
        broken_lines.append(at.join(lines))
    return "<br>".join(broken_lines)


LOG_TICKS = ",~g"
"""Tick format of a logarithmic axis: Plotly itself writes 2 and 5 for 0.002 and 0.005."""


def log_axis(values: Sequence[float]) -> dict[str, Any]:
    """Return the layout of a logarithmic axis over positive values, whose ticks are written out.

    Over less than half a decade, plotly.js chooses round values at equal distances: 1, 2 and 5 may lie outside.
    """
    low, high = math.log10(min(values)), math.log10(max(values))
    if high - low < 0.5:
        return {"type": "log", "nticks": 8, "tickformat": LOG_TICKS}
    mantissas = (1,) if high - low > 3 else (1, 2, 5) if high - low > 0.7 else (1, 1.5, 2, 3, 4, 5, 6, 8)
    powers = range(math.floor(low) - 1, math.ceil(high) + 2)
    ticks = [float(f"{mantissa}e{power}") for power in powers for mantissa in mantissas]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,.6g}" for tick in ticks]}


# A legend stands in the first corner of the plot that no curve runs through, or below the plot.

LEGEND_CORNERS: Mapping[str, dict[str, Any]] = {
    "top right": {"x": 0.995, "xanchor": "right", "y": 0.99, "yanchor": "top"},
    "bottom left": {"x": 0.005, "xanchor": "left", "y": 0.01, "yanchor": "bottom"},
    "bottom right": {"x": 0.995, "xanchor": "right", "y": 0.01, "yanchor": "bottom"},
    "top left": {"x": 0.005, "xanchor": "left", "y": 0.99, "yanchor": "top"},
}
"""Layout of a legend in each corner, in order of preference: losses fall, so the top right is mostly free."""
PLOT_PX = (900, 330)
"""Width and height of a small plot; in a larger plot the legend has more room than is assumed here."""
CHARACTER_PX, KEY_PX, ENTRY_PX, BORDER_PX = 7.0, 52, 19, 10
"""Size of a legend: width of a character and of the key beside a name, height of an entry and of both borders."""
MAX_INSIDE, LETTERS_INSIDE = 8, 26
"""Largest number and length of names in a legend inside a plot: in a narrow figure more would cover the curves."""
AXIS_PX, LEGEND_ROW_PX = 72, 20
"""Height of the ticks and the title of an axis, and of a row of a legend below them."""
PADDING = 0.05
"""Free room beyond the values, as a share of the axis' span."""
LABEL_WIDTH = 0.06
"""Width of a label at a curve's end, as a share of the plot's width."""


def place_legend(
    traces: Iterable[Any],
    *,
    log_x: bool = False,
    log_y: bool = False,
    preferred: str = "top right",
    y_range: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return `x`, `y` and anchors of a legend among scatter traces: the preferred corner, or the next that is free.

    If no corner is free the legend stands in the preferred one: the curves show through it.

    Args:
        traces: scatter traces; those with `showlegend` False have no entry.
        log_x: the x axis is logarithmic.
        log_y: the y axis is logarithmic.
        preferred: name of a corner in `LEGEND_CORNERS`.
        y_range: lowest and highest y shown; by default the axis holds all values.
    """
    shown = [trace for trace in traces if trace.x is not None and len(trace.x)]
    named = [str(trace.name) for trace in shown if trace.showlegend is not False]
    if not named:
        return dict(LEGEND_CORNERS[preferred])
    x = _axis_shares([trace.x for trace in shown], log_x, from_zero=True)
    y = _axis_shares([trace.y for trace in shown], log_y, from_zero=False, shown=y_range)
    ends = [position + LABEL_WIDTH for position, trace in zip(x, shown, strict=True) if trace.meta == "end"]
    heights = [height for height, trace in zip(y, shown, strict=True) if trace.meta == "end"]
    across, up = np.concatenate([*x, *ends]), np.concatenate([*y, *heights])
    width = (CHARACTER_PX * max(map(len, named)) + KEY_PX) / PLOT_PX[0]
    height = (ENTRY_PX * len(named) + BORDER_PX) / PLOT_PX[1]
    for corner in (preferred, *(name for name in LEGEND_CORNERS if name != preferred)):
        beside = across < width if "left" in corner else across > 1 - width
        level = up < height if "bottom" in corner else up > 1 - height
        if not (beside & level).any():
            return dict(LEGEND_CORNERS[corner])
    return dict(LEGEND_CORNERS[preferred])


def fits_inside(names: Sequence[str]) -> bool:
    """Return True if a legend with these names leaves room for the curves of a narrow figure."""
    return len(names) <= MAX_INSIDE and max(map(len, names), default=0) <= LETTERS_INSIDE


def height_below(names: Sequence[str]) -> int:
    """Return the height in pixels below a plot that is as wide as a notebook, with a legend of these names in it.

    In a narrower figure plotly.js makes the plot lower.
    """
    columns = max(1, int(PLOT_PX[0] / (CHARACTER_PX * max(map(len, names), default=0) + KEY_PX)))
    return AXIS_PX + LEGEND_ROW_PX * math.ceil(len(names) / columns)


def corner_of(legend: Any) -> str:
    """Return the name of the corner in which a figure's legend stands."""
    return f"{legend.yanchor} {legend.xanchor}"


def _axis_shares(columns: list[Any], log: bool, from_zero: bool, shown: Sequence[float] | None = None) -> list[Any]:
    """Return values as shares of the axis from `shown[0]` to `shown[1]`, or of an axis that holds all values."""
    with np.errstate(divide="ignore", invalid="ignore"):
        known = [np.asarray(column, dtype=np.float64) for column in columns]
        known = [np.log10(values) if log else values for values in known]
    if shown is not None:
        return [(values - shown[0]) / (shown[1] - shown[0]) for values in known]
    finite = np.concatenate([values[np.isfinite(values)] for values in known])
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if from_zero and not log:
        return [values / (1 + PADDING) / (high or 1.0) for values in known]
    span = (high - low) or 1.0
    return [(values - low + PADDING * span) / (span * (1 + 2 * PADDING)) for values in known]
