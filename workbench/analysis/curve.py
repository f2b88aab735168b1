"""Curves as the figures take them: a name, columns with one value per logged step, and the axes to draw them over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.columns import COLUMNS, AxisUnit
from workbench.errors import UnknownParameter, suggestion
from workbench.runs.loss_basis import LossBasis, read_loss_basis, why_not_compared
from workbench.runs.records.history import History
from workbench.runs.registry import distinct_names
from workbench.runs.run import Run

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
X_AXES = {column.axis.name or column.axis.column: column.axis for column in COLUMNS.values() if column.axis is not None}
"""The x axes by the name that `x=` takes; menus list them in this order."""
COST_AXES = ("tokens", "flops", "gpu_hours", "time")
"""Axes at whose equal values `standings` compares runs, in the order of its table."""


class Columns(Protocol):
    """A mapping of names to columns, or a run's `History`."""

    def __getitem__(self, name: str, /) -> Any: ...


@dataclass(frozen=True)
class Mark:
    """An event of a run at a step; `type` is `checkpoint`, `resume`, `spike` or `divergence`, `text` the hover text."""

    type: str
    step: float
    text: str


@dataclass(frozen=True)
class Curve:
    """The record of one run: columns of equal length with one value per logged step.

    Columns are named and counted as in `workbench.columns.COLUMNS`. Only those that a figure draws are needed.
    """

    name: str
    columns: Columns = field(repr=False)
    marks: tuple[Mark, ...] = ()
    evaluations: Columns | None = field(default=None, repr=False)
    """Columns with one value per evaluation: eval_loss and those of the x axes; None without evaluation."""
    basis: LossBasis | None = None
    """The facts on which its losses depend; None if they are unknown."""


def curves_of(runs: Sequence[Run]) -> list[Curve]:
    """Return what runs have recorded, under names that differ."""
    named = zip(distinct_names(runs), runs, strict=True)
    return [
        Curve(name, run.history(), evaluations=run.evaluations(), basis=read_loss_basis(run.directory))
        for name, run in named
    ]


def column(curve: Curve, name: str) -> Array:
    """Return one column as float64 with `None` as NaN; an empty array if the curve has no column of that name."""
    try:
        values = curve.columns[name]
    except (KeyError, AttributeError):
        return np.empty(0)
    return np.asarray(values, dtype=np.float64)


def evaluations_of(curve: Curve) -> Curve | None:
    """Return the held-out losses of a run as a curve of their own, or None if it has none."""
    if curve.evaluations is None or not len(curve.evaluations["step"]):
        return None
    return Curve(curve.name, curve.evaluations, basis=curve.basis)


def is_held_out(curve: Curve) -> bool:
    """Return True for held-out losses as a curve of their own."""
    return len(column(curve, "eval_loss")) > 0


def why_curves_do_not_compare(curves: Sequence[Curve]) -> str | None:
    """Return why the losses of some curves do not compare, as one sentence; None if they do."""
    return why_not_compared([curve.basis for curve in curves], [is_held_out(curve) for curve in curves])


def metrics_of(curves: Iterable[Curve]) -> tuple[str, ...]:
    """Return the names of the metrics that evaluations of some runs computed, each once."""
    found = (getattr(curve.evaluations, "metrics", {}) for curve in curves)
    return tuple(dict.fromkeys(name for metrics in found for name in metrics))


def scalars_of(curves: Iterable[Curve]) -> tuple[str, ...]:
    """Return the names of the scalars that some runs logged (`workbench.log_scalar`), each once."""
    return tuple(dict.fromkeys(name for curve in curves for name in getattr(curve.columns, "scalars", ())))


def where_logged(curve: Curve, scalar: str) -> Curve:
    """Return a run at the steps at which it logged a scalar, which need not be all."""
    known = ~np.isnan(column(curve, scalar))
    names = dict.fromkeys(("step", *(axis.column for axis in X_AXES.values()), scalar))
    columns = {name: values[known] for name in names if len(values := column(curve, name)) == len(known)}
    return replace(curve, columns=columns, evaluations=None)


def finite_points(x: Array, y: Array, most: int | None = None) -> tuple[Array, Array]:
    """Return the points whose two values are finite; of more than `most`, averages of neighbours.

    There are none where one of the columns was not recorded.
    """
    if len(x) != len(y):
        return np.empty(0), np.empty(0)
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if most is None or len(x) <= most:
        return x, y
    starts = np.linspace(0, len(x), most, endpoint=False).astype(np.int64)
    sizes = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x, starts) / sizes, np.add.reduceat(y, starts) / sizes


def column_or_nan(curve: Curve, name: str, length: int) -> Array:
    """Return one column, or `length` NaNs if the curve has no column of that name and length."""
    values = column(curve, name)
    return values if len(values) == length else np.full(length, np.nan)


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
