"""Placement of a legend in the first corner of the plot that no curve runs through, or below the plot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

CORNERS: Mapping[str, dict[str, Any]] = {
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
BELOW_PX, ROW_PX = 72, 20
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
        preferred: name of a corner in `CORNERS`.
        y_range: lowest and highest y shown; by default the axis holds all values.
    """
    shown = [trace for trace in traces if trace.x is not None and len(trace.x)]
    named = [str(trace.name) for trace in shown if trace.showlegend is not False]
    if not named:
        return dict(CORNERS[preferred])
    x = _axis_shares([trace.x for trace in shown], log_x, from_zero=True)
    y = _axis_shares([trace.y for trace in shown], log_y, from_zero=False, shown=y_range)
    ends = [position + LABEL_WIDTH for position, trace in zip(x, shown, strict=True) if trace.meta == "end"]
    heights = [height for height, trace in zip(y, shown, strict=True) if trace.meta == "end"]
    across, up = np.concatenate([*x, *ends]), np.concatenate([*y, *heights])
    width = (CHARACTER_PX * max(map(len, named)) + KEY_PX) / PLOT_PX[0]
    height = (ENTRY_PX * len(named) + BORDER_PX) / PLOT_PX[1]
    for corner in (preferred, *(name for name in CORNERS if name != preferred)):
        beside = across < width if "left" in corner else across > 1 - width
        level = up < height if "bottom" in corner else up > 1 - height
        if not (beside & level).any():
            return dict(CORNERS[corner])
    return dict(CORNERS[preferred])


def fits_inside(names: Sequence[str]) -> bool:
    """Return True if a legend with these names leaves room for the curves of a narrow figure."""
    return len(names) <= MAX_INSIDE and max(map(len, names), default=0) <= LETTERS_INSIDE


def height_below(names: Sequence[str]) -> int:
    """Return the height in pixels below a plot that is as wide as a notebook, with a legend of these names in it.

    In a narrower figure plotly.js makes the plot lower.
    """
    columns = max(1, int(PLOT_PX[0] / (CHARACTER_PX * max(map(len, names), default=0) + KEY_PX)))
    return BELOW_PX + ROW_PX * math.ceil(len(names) / columns)


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
