"""The x axes that curves can be drawn over: those of `workbench.columns.COLUMNS`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.analysis.curve import CurveLike, column
from workbench.columns import COLUMNS, AxisUnit
from workbench.errors import UnknownParameter, suggestion

X_AXES = {column.axis.name or column.axis.column: column.axis for column in COLUMNS.values() if column.axis is not None}
"""The x axes by the name that `x=` takes; menus list them in this order."""

COST_AXES = ("tokens", "flops", "gpu_hours", "time")
"""Axes at whose equal values `standings` compares runs, in the order of its table."""


def check_axis(x: str) -> None:
    """Raise `UnknownParameter` with the nearest name if `x` is not in `X_AXES`."""
    if x not in X_AXES:
        raise UnknownParameter(f"x={x!r} is not an axis. {suggestion(x, X_AXES)}", parameter="x", value=x)


def shared_axes(curves: Sequence[CurveLike]) -> dict[str, AxisUnit]:
    """Return the axes that every curve with a point has recorded, each with the unit that suits the longest curve."""
    begun = [curve for curve in curves if len(column(curve, "step"))]
    axes = {}
    for name, axis in X_AXES.items():
        columns = [column(curve, axis.column) for curve in begun]
        if all(len(values) and (np.isfinite(values[-1]) or np.isfinite(values).any()) for values in columns):
            axes[name] = axis.unit(max((largest_value(curve, axis.column) for curve in begun), default=0.0))
    return axes


def largest_value(curve: CurveLike, name: str) -> float:
    """Return the largest value of a column that rises with the step: its last value if that is finite."""
    values = column(curve, name)
    if len(values) and np.isfinite(values[-1]):
        return float(values[-1])
    return float(np.nanmax(values, initial=0.0))
