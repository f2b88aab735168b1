"""Traces of how busy the devices of each run were during its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from workbench.analysis.curve import X_AXES, Array, Curve, column
from workbench.figures import theme
from workbench.figures.prepared_curve import Preparation, PreparedCurve, decimated
from workbench.runs.records.history import Utilization
from workbench.units import gib

MIN_DEVICE_POINTS = 50
"""Smallest number of points of one device's line if many devices share the points of a trace."""
DEVICE_NAMES = {"cuda": "GPU", "cpu": "CPU"}
MAX_NAMED = 8
"""Largest number of devices in a hover text; of more devices it gives the least and the most busy."""


Usage = Sequence[Utilization | None]
"""Samples of each run; None for a run without samples."""


def has_samples(usage: Usage) -> bool:
    """Return True if any run has a sample."""
    return any(samples is not None and len(samples.time) for samples in usage)


def utilization_title(usage: Usage) -> str:
    """Return the panel's title, such as `"GPU use (%)"`."""
    types = {samples.device_type for samples in usage if samples is not None and len(samples.time)}
    return f"{DEVICE_NAMES.get(types.pop(), 'Device') if len(types) == 1 else 'Device'} use (%)"


def utilization_traces(
    curves: Sequence[Curve], usage: Usage, x: str, preparation: Preparation, window: tuple[float, float] | None
) -> list[go.Scatter]:
    """Return two traces per run: every device's line, pale, and in front the moving average over all devices.

    Samples are placed on the x axis by their time between the run's steps. Samples from before its first step or after
    its last step are left out.
    """
    traces = []
    smooth, max_points = preparation.width > 0, preparation.max_points
    for index, (curve, samples) in enumerate(zip(curves, usage, strict=True)):
        placed = _PlacedSamples(curve, samples, {X_AXES[x].column, preparation.along, "step", "tokens"})
        busy = Curve(curve.name, placed.columns, color=curve.color or theme.series_color(index))
        mean = preparation.prepare(busy, index, "share").focused(x, window, max_points)
        line = mean.line_index
        each_x, each_y = placed.devices(mean.x[x], window, max_points) if smooth else (np.empty(0), np.empty(0))
        heights = (mean.line if smooth else mean.raw)[line]
        pair = spread_and_mean(
            mean,
            {"x": each_x, "y": 100 * each_y},
            {"x": mean.x[x][line], "y": 100 * heights},
            "%{y:.3~g} %<br>%{customdata}",
        )
        pair[1].update(customdata=[placed.describe(moment) for moment in line], meta="utilization")
        traces += pair
    return traces


def spread_and_mean(
    curve: PreparedCurve, spread: Mapping[str, Array], mean: Mapping[str, Array], hover: str
) -> list[go.Scatter]:
    """Return two traces of one run in a panel: its values, pale, and in front their average with a hover text."""
    name = theme.text(curve.name)
    behind = {"color": theme.pale(curve.color, 0.7), "width": 1, "hoverinfo": "skip", "zorder": 0, "meta": "raw"}
    front = {"color": curve.color, "width": 1.8, "dash": curve.dash, "zorder": 1, "meta": "line"}
    words = f"{name}: {hover}<extra></extra>"
    return [
        theme.curve(**spread, name=name, **behind),
        theme.curve(**mean, name=name, hovertemplate=words, **front),
    ]


class _PlacedSamples:
    """A run's samples along its training: one row per moment, one column per device."""

    def __init__(self, curve: Curve, samples: Utilization | None, names: set[str]) -> None:
        steps_at = column(curve, "time")
        self._names = () if samples is None else samples.names
        moments = np.empty(0)
        self._share = self._used = np.empty((0, len(self._names)))
        if samples is not None and len(steps_at) and len(samples.time):
            inside = (samples.time >= steps_at[0]) & (samples.time <= steps_at[-1])
            moments, row = np.unique(samples.time[inside], return_inverse=True)
            shape, device = (len(moments), len(self._names)), samples.device[inside].astype(np.int64)
            self._share, self._used = np.full(shape, np.nan), np.full(shape, np.nan)
            self._share[row, device], self._used[row, device] = samples.share[inside], samples.used_bytes[inside]
        rising = np.maximum.accumulate(steps_at) if len(moments) else steps_at
        self.columns = {name: np.full(len(moments), np.nan) for name in names}  # NaN where it was not recorded
        for name in names if len(moments) else ():
            if len(values := column(curve, name)) == len(rising):
                self.columns[name] = np.interp(moments, rising, values)
        known = np.isfinite(self._share)
        counts = known.sum(axis=1)
        total = np.where(known, self._share, 0.0).sum(axis=1)
        self.columns["share"] = np.divide(total, counts, out=np.full(len(moments), np.nan), where=counts > 0)

    def devices(self, x: Array, window: tuple[float, float] | None, max_points: int) -> tuple[Array, Array]:
        """Return x and share of every device's line, with a gap between one device and the next."""
        first, end = 0, len(x)
        if window is not None:
            low, high = np.searchsorted(x, window)
            first, end = max(0, int(low) - 1), int(high) + 1
        xs, ys = [], []
        for share in self._share.T:
            known = np.flatnonzero(np.isfinite(share[first:end])) + first
            shown = known[decimated(share[known], max(MIN_DEVICE_POINTS, max_points // len(self._names)))]
            xs += [x[shown], [np.nan]]
            ys += [share[shown], [np.nan]]
        return np.concatenate([np.empty(0), *xs[:-1]]), np.concatenate([np.empty(0), *ys[:-1]])

    def describe(self, moment: int) -> str:
        """Return the hover text of a moment, such as `"GPU 0 93%, 61.2 GiB · GPU 1 91%, 61.2 GiB"`."""
        share, used = self._share[moment], self._used[moment]
        known = [int(device) for device in np.argsort(share) if np.isfinite(share[device])]
        chosen = sorted(known) if len(known) <= MAX_NAMED else [known[0], known[-1]]
        words = [
            f"{self._names[device]} {share[device]:.0%}"
            + (f", {gib(used[device])}" if np.isfinite(used[device]) else "")
            for device in chosen
        ]
        return theme.text(" · ".join(words))
