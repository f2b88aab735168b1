"""One look for every figure: palette, fonts, margins.

The card is opaque white, so that a figure is as legible in JupyterLab's dark theme, on a dark web page
and in a PNG as it is on white. Colours are Okabe and Ito's (https://jfly.uni-koeln.de/color/), which stay
apart under the common colour-vision deficiencies; two of them are darkened for contrast on white.
"""

from __future__ import annotations

import html

import plotly.graph_objects as go

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#B5559A", "#4AA3DF", "#C98A00", "#6A51A3", "#6B7280")

DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
NAME_CHARACTERS = 48
"""Of a run's name in a legend: a longer one would leave no room for the curves."""

INK = "#1F2937"
MUTED = "#5B6472"
GRID = "#E5E8EC"
AXIS = "#9AA3AF"
ALERT = "#B3261E"

FORWARD, BACKWARD, WEIGHT = "#3B82C4", "#E39B2D", "#3E9C75"

MEMORY_COLORS = {
    "parameters": "#37475A",
    "gradients": "#6F86A0",
    "optimizer": "#AEBCCB",
    "activations": "#D9942B",
    "workspace": "#F0D9A8",
}
"""What stays through a step in slate, what comes and goes in amber; lightness alone tells them apart too."""

FONT_FAMILY = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
FONT_PX = 12
TITLE_PX = 15
ASSUMED_WIDTH_PX = 1000
"""Figures follow the width of the page; what must be decided beforehand (does a label fit?) assumes this."""

CONFIG: dict[str, object] = {
    "displaylogo": False,
    "responsive": True,
    "modeBarButtonsToRemove": ["sendChartToCloud", "select2d", "lasso2d", "autoScale2d"],
}
"""Of every figure: no button that sends data to a company, none that does nothing here."""

TEMPLATE = go.layout.Template(
    layout=go.Layout(
        font={"family": FONT_FAMILY, "size": FONT_PX, "color": INK},
        paper_bgcolor="white",
        plot_bgcolor="white",
        colorway=PALETTE,
        margin={"l": 64, "r": 32, "t": 64, "b": 52},
        title={
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"l": 16, "t": 14},
            "font": {"size": TITLE_PX, "color": INK},
            "subtitle": {"font": {"size": FONT_PX, "color": MUTED}},
        },
        xaxis={
            "gridcolor": GRID,
            "linecolor": AXIS,
            "zeroline": False,
            "ticks": "outside",
            "tickcolor": AXIS,
            "ticklen": 4,
            "title": {"standoff": 8, "font": {"color": MUTED, "size": FONT_PX}},
            "automargin": True,
        },
        yaxis={
            "gridcolor": GRID,
            "linecolor": AXIS,
            "zeroline": False,
            "title": {"standoff": 10, "font": {"color": MUTED, "size": FONT_PX}},
            "automargin": True,
        },
        legend={"bgcolor": "rgba(255,255,255,0.85)", "bordercolor": GRID, "borderwidth": 1},
        hoverlabel={"bgcolor": "white", "bordercolor": AXIS, "font": {"color": INK, "size": FONT_PX}, "namelength": -1},
        bargap=0.3,
    )
)


def series_color(index: int) -> str:
    """The colour of the run, stage or series of that index; eight, then again from the first."""
    return PALETTE[index % len(PALETTE)]


def mixed(color: str, other: str, share: float) -> str:
    """`color` with `share` of `other` in it, both `#rrggbb`."""
    ours, theirs = _rgb(color), _rgb(other)
    blend = (round(a + (b - a) * share) for a, b in zip(ours, theirs, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in blend)


def pale(color: str, share: float = 0.6) -> str:
    """`color` mixed with white."""
    return mixed(color, "#ffffff", share)


def ink_on(color: str) -> str:
    """White or dark text, whichever reads better on `color` (relative luminance, WCAG 2)."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in _rgb(color))]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.065 else INK


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def series_dash(index: int) -> str:
    """Its line: solid for the first eight, another for each eight after, so that no two share colour and line."""
    return DASHES[index // len(PALETTE) % len(DASHES)]


def text(value: object) -> str:
    """A user's text, safe to place where Plotly reads HTML-like markup or `%{…}`."""
    return html.escape(str(value), quote=False).replace("%{", "%\u200b{")


def short(name: str, most: int = NAME_CHARACTERS) -> str:
    """A name for a legend: of a longer one the beginning and the end, in which long names mostly differ."""
    return name if len(name) <= most else f"{name[: most - most // 3 - 1]}…{name[-(most // 3) :]}"


def title(main: str, subtitle: str | None = None) -> dict[str, object]:
    """A `layout.title`; both arguments may hold Plotly markup, so escape what a user wrote with `text`."""
    value: dict[str, object] = {"text": f"<b>{main}</b>"}
    if subtitle:
        value["subtitle"] = {"text": subtitle}
    return value
