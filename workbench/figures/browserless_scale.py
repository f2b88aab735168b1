"""Axes of a picture that Pillow draws: values to pixels, and the ticks with their labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.analysis.curve import Array

TICK_PX = (64, 44)
"""Smallest distance between two ticks of an x axis and of a y axis, in pixels."""
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Scale:
    """Conversion of an axis' values to pixels; `low` and `high` are decimal logarithms on a logarithmic axis.

    `names` are the categories of an axis of words, which stand at 0, 1, 2, …; it is empty for an axis of numbers.
    """

    low: float
    high: float
    start_px: float
    end_px: float
    log: bool = False
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, axis: Any, columns: Sequence[Any], ends_px: tuple[float, float], room: float) -> Scale:
        """Return the scale with the axis' own range, or else one that holds all values and a share of free room."""
        log, names = axis.type == "log", category_names(axis, columns)
        if axis.range is not None and not axis.autorange:
            return cls(float(axis.range[0]), float(axis.range[1]), *ends_px, log, names)
        if names:
            low, high = -0.5, len(names) - 0.5
            ends = (high, low) if axis.autorange == "reversed" else (low, high)
            return cls(*ends, *ends_px, names=names)
        values = np.concatenate([np.empty(0), *(np.asarray(column, dtype=np.float64).ravel() for column in columns)])
        values = values[np.isfinite(values) & ((values > 0) | (not log))]
        values = np.log10(values) if log else values
        low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
        if axis.rangemode == "tozero" and not log:
            low, high = min(0.0, low), max(0.0, high)
        span = (high - low) or max(abs(high), 1.0)
        low, high = low - room * span, high + (room or 0.01) * span
        return cls(*((high, low) if axis.autorange == "reversed" else (low, high)), *ends_px, log)

    def __call__(self, values: Any) -> Array:
        """Return the pixel of each value; NaN for a value that the axis cannot show."""
        if self.names:
            numbers = np.array([self.names.index(str(value)) for value in np.atleast_1d(values)], dtype=np.float64)
            numbers = numbers if np.ndim(values) else numbers[0]
        else:
            numbers = np.asarray(values, dtype=np.float64)
        return self.from_numbers(numbers)

    def from_numbers(self, numbers: Any) -> Array:
        """Return the pixel of each number, which on an axis of words is a position between them."""
        numbers = np.asarray(numbers, dtype=np.float64)
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                numbers = np.log10(numbers)
        share = (numbers - self.low) / (self.high - self.low)
        return np.asarray(self.start_px + share * (self.end_px - self.start_px))

    def ticks(self, axis: Any) -> list[tuple[float, str]]:
        """Return (pixel, label) of the axis' own ticks, of its words, or else of round values."""
        if axis.showticklabels is False:
            return []
        if axis.tickvals is not None:
            labels = axis.ticktext if axis.ticktext is not None else axis.tickvals
            return [(float(self(value)), str(label)) for value, label in zip(axis.tickvals, labels, strict=False)]
        if self.names:
            return [(float(self.from_numbers(index)), name) for index, name in enumerate(self.names)]
        si = "s" in str(axis.tickformat or "")
        return [(float(self(value)), written(value, si)) for value in self._round_values()]

    def _round_values(self) -> list[float]:
        low, high = sorted((self.low, self.high))
        vertical = self.end_px < self.start_px
        most = max(2, int(abs(self.end_px - self.start_px) / TICK_PX[vertical]))
        if self.log:
            powers = range(math.floor(low), math.ceil(high) + 1)
            between_5_and_6_px = math.log10(6 / 5) * abs(self.end_px - self.start_px) / (high - low)
            fine = high - low < 1 and between_5_and_6_px > TICK_PX[vertical] / 2
            factors = (1, 2, 3, 4, 5, 6, 8) if fine else (1, 2, 5) if len(powers) < 5 else (1,)
            values = [factor * 10.0**power for power in powers for factor in factors]
            return [value for value in values if low <= math.log10(value) <= high]
        least = (high - low) / min(most, 7)
        power = 10.0 ** math.floor(math.log10(least))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
        return [multiple * step for multiple in range(math.ceil(low / step), math.floor(high / step) + 1)]


def category_names(axis: Any, columns: Iterable[Any]) -> tuple[str, ...]:
    """Return the words along an axis in the order in which they appear; none if its values are numbers."""
    given = [value for column in columns if np.ndim(column) == 1 for value in column]
    if axis.type != "category":
        given = [value for value in given if isinstance(value, str)]
    return tuple(dict.fromkeys(map(str, given)))


def written(value: float, si: bool = False) -> str:
    """Return a tick's label: six digits at most, with a prefix such as k or M if `si`."""
    for size, prefix in PREFIXES if si else ():
        if abs(value) >= size:
            return f"{value / size:g}{prefix}"
    return f"{value:.6g}".replace("e-0", "e-").replace("e+0", "e")
