"""The x axes that curves can be drawn over.

To add an axis, add one entry to `X_AXES`: menus, dashboards, comparisons and error messages read this table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workbench.analysis.curve import CurveLike, column
from workbench.errors import UnknownParameter, suggestion
from workbench.units import count, duration


class AxisUnit(NamedTuple):
    """One unit of an axis: a tick of 1 stands for `scale` in the recorded column; `title` is the axis title."""

    scale: float
    title: str


@dataclass(frozen=True)
class Axis:
    """One measure of the progress of a training run."""

    column: str
    """Name of the recorded column that holds the axis' values; it must rise with the step."""
    label: str
    """Name in menus and sentences."""
    units: tuple[tuple[float, str], ...]
    """Scale and title of each `AxisUnit`, from large to small."""
    describe: Callable[[float], str]
    """Function that writes one recorded value for people, such as `30.1 M tokens`."""

    def unit(self, largest: float) -> AxisUnit:
        """Return the largest unit that is no larger than `largest`, or else the smallest unit."""
        return next((AxisUnit(*unit) for unit in self.units if largest >= unit[0]), AxisUnit(*self.units[-1]))


X_AXES = {
    "step": Axis("step", "step", ((1.0, "Step"),), lambda value: f"{count(value)} steps"),
    "tokens": Axis(
        "tokens",
        "tokens",
        ((1e12, "Tokens (T)"), (1e9, "Tokens (B)"), (1e6, "Tokens (M)"), (1e3, "Tokens (k)"), (1.0, "Tokens")),
        lambda value: f"{count(value)} tokens",
    ),
    "samples": Axis(
        "samples",
        "samples",
        ((1e6, "Samples (M)"), (1e3, "Samples (k)"), (1.0, "Samples")),
        lambda value: f"{count(value)} samples",
    ),
    "time": Axis(
        "seconds",
        "time",
        ((7200.0, "Training time (hours)"), (120.0, "Training time (minutes)"), (1.0, "Training time (seconds)")),
        duration,
    ),
    "flops": Axis(
        "flops",
        "FLOPs",
        (
            (1e21, "Model FLOPs (ZFLOP, 10<sup>21</sup>)"),
            (1e18, "Model FLOPs (EFLOP, 10<sup>18</sup>)"),
            (1e15, "Model FLOPs (PFLOP, 10<sup>15</sup>)"),
            (1e12, "Model FLOPs (TFLOP, 10<sup>12</sup>)"),
            (1e9, "Model FLOPs (GFLOP, 10<sup>9</sup>)"),
        ),
        lambda value: f"{value:.3g} FLOPs",
    ),
    "gpu_hours": Axis(
        "gpu_hours",
        "GPU-hours",
        ((1.0, "GPU-hours"), (1 / 60, "GPU-minutes")),
        lambda value: f"{value:.3g} GPU-hours" if value >= 0.1 else f"{60 * value:.3g} GPU-minutes",
    ),
}
"""Table of the x axes by the name that `x=` takes; menus list them in this order."""

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
