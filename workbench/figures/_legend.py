"""Where a legend stands: in the first corner of the plot that no curve runs through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

CORNERS: Mapping[str, dict[str, Any]] = {
    "top right": {"x": 0.995, "xanchor": "right", "y": 0.99, "yanchor": "top"},
    "bottom left": {"x": 0.005, "xanchor": "left", "y": 0.01, "yanchor": "bottom"},
    "bottom right": {"x": 0.995, "xanchor": "right", "y": 0.01, "yanchor": "bottom"},
    "top left": {"x": 0.005, "xanchor": "left", "y": 0.99, "yanchor": "top"},
}
"""In order of preference: losses fall."""
PLOT_PX = (900, 330)
"""Width and height of the plot that sizes are taken of; a wider one has more room."""
CHARACTER_PX, KEY_PX, ENTRY_PX, BORDER_PX = 7.0, 52, 19, 10
PADDING = 0.05
"""Of an axis' span, what stays free beyond the values."""
LABEL = 0.06
"""Of the plot's width, what a label at a curve's end takes."""


def legend_place(
    traces: Iterable[Any],
    *,
    log_x: bool = False,
    log_y: bool = False,
    held: str = "top right",
    y_range: Sequence[float] | None = None,
) -> dict[str, Any]:
    """`x`, `y` and anchors of a legend among these scatter traces: the corner `held`, or the next that is free.

    Where every corner is taken, `held`: what runs under a legend shows through it.
    """
    shown = [trace for trace in traces if trace.x is not None and len(trace.x)]
    named = [str(trace.name) for trace in shown if trace.showlegend is not False]
    if not named:
        return dict(CORNERS[held])
    x = _shares([trace.x for trace in shown], log_x, from_zero=True)
    y = _shares([trace.y for trace in shown], log_y, from_zero=False, shown=y_range)
    ends = [place + LABEL for place, trace in zip(x, shown, strict=True) if trace.meta == "end"]
    heights = [height for height, trace in zip(y, shown, strict=True) if trace.meta == "end"]
    across, up = np.concatenate([*x, *ends]), np.concatenate([*y, *heights])
    width = (CHARACTER_PX * max(map(len, named)) + KEY_PX) / PLOT_PX[0]
    height = (ENTRY_PX * len(named) + BORDER_PX) / PLOT_PX[1]
    for corner in (held, *(name for name in CORNERS if name != held)):
        beside = across < width if "left" in corner else across > 1 - width
        level = up < height if "bottom" in corner else up > 1 - height
        if not (beside & level).any():
            return dict(CORNERS[corner])
    return dict(CORNERS[held])


def corner_of(legend: Any) -> str:
    """The name of the corner that a figure's legend stands in."""
    return f"{legend.yanchor} {legend.xanchor}"


def _shares(columns: list[Any], log: bool, from_zero: bool, shown: Sequence[float] | None = None) -> list[Any]:
    """Values as shares of the axis from `shown[0]` to `shown[1]`, or of one that holds them all."""
    with np.errstate(divide="ignore", invalid="ignore"):
        known = [np.asarray(column, dtype=np.float64) for column in columns]
        known = [np.log10(values) if log else values for values in known]
    finite = np.concatenate([values[np.isfinite(values)] for values in known])
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if shown is not None:
        return [(values - shown[0]) / (shown[1] - shown[0]) for values in known]
    if from_zero and not log:
        return [values / (1 + PADDING) / (high or 1.0) for values in known]
    span = (high - low) or 1.0
    return [(values - low + PADDING * span) / (span * (1 + 2 * PADDING)) for values in known]
