"""How busy the devices of each run were, along its training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import plotly.graph_objects as go

from workbench.figures import theme
from workbench.figures._series import (
    X_AXES,
    Array,
    Curve,
    CurveLike,
    column,
    decimated,
    drawn,
    smoothing_axis,
    smoothing_width,
)
from workbench.units import gib

LEAST_POINTS = 50
"""Of one device's line, where many devices share the points of a trace."""
KINDS = {"cuda": "GPU", "cpu": "CPU"}
MAX_NAMED = 8
"""Devices that the hover text names; of more it gives the least and the most busy."""


class UtilizationLike(Protocol):
    """Samples of devices in order of time, one of one device a row; `workbench.runs.records.history.Utilization` has them."""

    @property
    def kind(self) -> str: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def time(self) -> Array: ...

    @property
    def device(self) -> Array: ...

    @property
    def share(self) -> Array: ...

    @property
    def used_bytes(self) -> Array: ...


Usage = Sequence[UtilizationLike | None]
"""Of each run, or None for a run without samples."""


def has_samples(usage: Usage) -> bool:
    return any(samples is not None and len(samples.time) for samples in usage)


def utilization_title(usage: Usage) -> str:
    """`"GPU utilisation (%)"`, with what was sampled in front."""
    kinds = {samples.kind for samples in usage if samples is not None and len(samples.time)}
    return f"{KINDS.get(kinds.pop(), 'Device') if len(kinds) == 1 else 'Device'} utilisation (%)"


def utilization_traces(
    curves: Sequence[CurveLike],
    usage: Usage,
    x: str,
    scale: float,
    smoothing: float,
    window: tuple[float, float] | None,
    max_points: int,
) -> list[go.Scatter]:
    """Two traces a run: the line of every device, pale, and in front the moving average over all of them.

    Samples are placed by their time between the run's steps; those from outside its steps are left out.
    """
    width, along = smoothing_width(curves, smoothing), smoothing_axis(curves)
    traces = []
    for index, (curve, samples) in enumerate(zip(curves, usage, strict=True)):
        placed = _Placed(curve, samples, x, along, scale)
        busy = Curve(curve.name, placed.columns, color=getattr(curve, "color", None))
        mean = drawn(busy, index, "share", width, along, {x: scale}, max_points).focused(x, window, max_points)
        line = mean.line_index
        each_x, each_y = placed.devices(window, max_points) if smoothing > 0 else (np.empty(0), np.empty(0))
        traces += [
            go.Scatter(
                x=each_x,
                y=100 * each_y,
                mode="lines",
                line={"color": theme.pale(mean.color, 0.7), "width": 1},
                hoverinfo="skip",
                zorder=0,
                meta="raw",
            ),
            go.Scatter(
                x=mean.x[x][line],
                y=100 * (mean.line if smoothing > 0 else mean.raw)[line],
                mode="lines",
                line={"color": mean.color, "width": 1.8, "dash": mean.dash},
                customdata=[placed.words(point) for point in line],
                hovertemplate=f"{theme.text(curve.name)}: %{{y:.3~g}} %<br>%{{customdata}}<extra></extra>",
                zorder=1,
                meta="utilization",
            ),
        ]
    return traces


class _Placed:
    """A run's samples where its steps were: one row a moment, one column a device."""

    def __init__(self, curve: CurveLike, samples: UtilizationLike | None, x: str, along: str, scale: float) -> None:
        steps_at = column(curve, "time")
        self._names = () if samples is None else samples.names
        if samples is None or not len(steps_at) or not len(samples.time):
            moments = np.empty(0)
            self._share = self._used = np.empty((0, len(self._names)))
        else:
            inside = (samples.time >= steps_at[0]) & (samples.time <= steps_at[-1])
            moments, row = np.unique(samples.time[inside], return_inverse=True)
            shape, device = (len(moments), len(self._names)), samples.device[inside].astype(np.int64)
            self._share, self._used = np.full(shape, np.nan), np.full(shape, np.nan)
            self._share[row, device], self._used[row, device] = samples.share[inside], samples.used_bytes[inside]
        rising = np.maximum.accumulate(steps_at) if len(moments) else steps_at
        self.columns = {
            name: _at(moments, rising, column(curve, name)) for name in {_along(x), along, "step", "tokens"}
        }
        known = np.isfinite(self._share)
        counts = known.sum(axis=1)
        total = np.where(known, self._share, 0.0).sum(axis=1)
        self.columns["share"] = np.divide(total, counts, out=np.full(len(moments), np.nan), where=counts > 0)
        self._x = self.columns[_along(x)] / scale

    def devices(self, window: tuple[float, float] | None, max_points: int) -> tuple[Array, Array]:
        """Every device's line, a gap between one and the next."""
        visible = slice(None)
        if window is not None:
            first, end = np.searchsorted(self._x, window)
            visible = slice(max(0, int(first) - 1), int(end) + 1)
        xs, ys = [], []
        for share in self._share.T:
            known = np.flatnonzero(np.isfinite(share[visible])) + (visible.start or 0)
            kept = known[decimated(share[known], max(LEAST_POINTS, max_points // len(self._names)))]
            xs += [self._x[kept], [np.nan]]
            ys += [share[kept], [np.nan]]
        return np.concatenate([np.empty(0), *xs[:-1]]), np.concatenate([np.empty(0), *ys[:-1]])

    def words(self, moment: int) -> str:
        """`"GPU 0 93%, 61.2 GiB · GPU 1 91%, 61.2 GiB"`; of many devices the least and the most busy."""
        share = self._share[moment]
        known = [int(device) for device in np.argsort(share) if np.isfinite(share[device])]
        chosen = sorted(known) if len(known) <= MAX_NAMED else [known[0], known[-1]]
        return theme.text(" · ".join(self._of(moment, device) for device in chosen))

    def _of(self, moment: int, device: int) -> str:
        used = self._used[moment, device]
        memory = f", {gib(used)}" if np.isfinite(used) else ""
        return f"{self._names[device]} {self._share[moment, device]:.0%}{memory}"


def _along(x: str) -> str:
    return X_AXES[x].column


def _at(moments: Array, times: Array, values: Array) -> Array:
    """A column at other times than its own; NaN where it was not recorded."""
    if not len(moments) or len(values) != len(times):
        return np.full(len(moments), np.nan)
    return np.interp(moments, times, values)
