"""The x axes that curves can be drawn over: those of `workbench.columns.COLUMNS`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from workbench.analysis.curve import Curve, column
from workbench.columns import COLUMNS, AxisUnit
from workbench.errors import UnknownParameter, suggestion
from workbench.runs.records.history import History

X_AXES = {column.axis.name or column.axis.column: column.axis for column in COLUMNS.values() if column.axis is not None}
"""The x axes by the name that `x=` takes; menus list them in this order."""

COST_AXES = ("tokens", "flops", "gpu_hours", "time")
"""Axes at whose equal values `standings` compares runs, in the order of its table."""


def check_axis(x: str) -> None:
    """Raise `UnknownParameter` with the nearest name if `x` is not in `X_AXES`."""
    if x not in X_AXES:
        raise UnknownParameter(f"x={x!r} is not an axis. {suggestion(x, X_AXES)}")


def shared_axes(curves: Sequence[Curve]) -> dict[str, AxisUnit]:
    """Return the axes that every curve with a point has recorded, each with the unit that suits the longest curve."""
    begun = [curve for curve in curves if len(column(curve, "step"))]
    axes = {}
    for name, axis in X_AXES.items():
        ends = [end_value(curve, axis.column) for curve in begun]
        if not any(map(math.isnan, ends)):
            axes[name] = axis.unit(max(ends, default=0.0))
    return axes


def end_value(curve: Curve, name: str) -> float:
    """Return the last value of a column if that is finite, else its largest finite one, NaN without any."""
    if isinstance(curve.columns, History) and name in curve.columns:
        last = curve.columns.last(name)
        if len(last) and math.isfinite(last[0]):
            return float(last[0])
    values = column(curve, name)
    if len(values) and math.isfinite(values[-1]):
        return float(values[-1])
    finite = values[np.isfinite(values)]
    return float(finite.max()) if len(finite) else math.nan
