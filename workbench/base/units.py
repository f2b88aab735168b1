"""The units of what is shown, numbers in them for people (36.7 GiB, 8 min 05 s, 2.46 B), and checks of numbers."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard


class Unit(NamedTuple):
    """A unit in which a measure is shown: on axes and in words, and so in pictures and tables of them."""

    name: str
    """Name of many of it."""
    factor: float
    """Size of one, in the unit in which the measure is recorded."""
    singular: str = ""
    """Name of one; empty if it is that of many."""


MINUTE, HOUR = 60, 3600
"""Seconds of each."""
KIB, MIB, GIB = 1024, 1024**2, 1024**3
"""Bytes of each."""
TIME = (Unit("hours", HOUR, "hour"), Unit("minutes", MINUTE, "minute"), Unit("seconds", 1, "second"))
"""Units of a time that is recorded in seconds, from large to small, as in every table of units."""
DEVICE_TIME = (Unit("device-hours", 1, "device-hour"), Unit("device-minutes", MINUTE / HOUR, "device-minute"))
"""Units of a time multiplied by devices, which is recorded in hours."""
STEP_TIME = (Unit("s", 1e3), Unit("ms", 1))
"""Units of the time of a step, which is recorded in milliseconds."""
COUNTS = (Unit("T", 1e12), Unit("B", 1e9), Unit("M", 1e6), Unit("k", 1e3), Unit("", 1))
"""Prefixes of counts, such as tokens."""
FLOPS = (
    *(Unit("ZFLOP", 1e21), Unit("EFLOP", 1e18), Unit("PFLOP", 1e15), Unit("TFLOP", 1e12)),
    *(Unit("GFLOP", 1e9), Unit("MFLOP", 1e6)),
)
"""Units of operations."""
MEMORY = (Unit("GiB", GIB), Unit("MiB", MIB), Unit("KiB", KIB))
"""Units of sizes in bytes."""


def suited(largest: float, units: Sequence[Unit], least: float = 1.0) -> Unit:
    """Return the largest unit of which `largest` has at least `least`, or else the smallest unit."""
    return next((unit for unit in units if largest >= least * unit.factor), units[-1])


def quantity(value: float, units: Sequence[Unit], least: float = 1.0) -> str:
    """Format a value in the unit that suits it, such as `"6.4 device-hours"` and `"1 device-minute"`."""
    unit = suited(value, units, least)
    number = f"{value / unit.factor:.3g}"
    return f"{number} {unit.singular or unit.name if number == '1' else unit.name}"


def many(number: float, noun: str) -> str:
    """Format a count of things, such as `"30.1 M tokens"` and `"1 token"`."""
    words = count(number)
    return f"{words} {noun}" if words == "1" else f"{words} {noun}s"


def gib(num_bytes: float, like: float | None = None) -> str:
    """Format bytes as `"36.7 GiB"`; small sizes in MiB or KiB.

    `like` is the largest of the sizes that stand together, in whose unit all of them are written.
    """
    unit = suited(abs(num_bytes if like is None else like), MEMORY, 0.1)
    number = num_bytes / unit.factor
    return f"{number:.{1 if unit.name != 'GiB' or abs(number) >= 0.1 or not number else 3}f} {unit.name}"


def memory_unit(largest: float) -> Unit:
    """Return the unit of an axis over sizes of at most `largest` bytes: GiB, or MiB if small."""
    return suited(largest, MEMORY[:2], 0.1)


def count(number: float) -> str:
    """Format a count as `"2.46 B"`, `"340 M"` or `"30.5 k"`, with three significant digits."""
    unit = suited(abs(number), COUNTS, 0.9995)
    return f"{number / unit.factor:.3g} {unit.name}".rstrip()


def flops_per_s(rate: float) -> str:
    """Format a rate as `"809 TFLOP/s"` or `"183 GFLOP/s"`."""
    unit = suited(rate, FLOPS, 0.9995)
    return f"{rate / unit.factor:.3g} {unit.name}/s"


def duration(seconds: float) -> str:
    """Format a time as `"213 ms"`, `"4.2 s"`, `"8 min 05 s"` or `"3 h 12 min"`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), MINUTE)
    hours, minutes = divmod(minutes, HOUR // MINUTE)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


LEFT_STEPS = ((55, 10), (570, MINUTE), (3450, 5 * MINUTE), (4 * HOUR, 15 * MINUTE), (math.inf, HOUR))
"""Numbers of seconds up to which a time left is rounded, and the steps."""


def time_left(seconds: float) -> str:
    """Format an estimate of the time left in one step of its size: `"40 s"`, `"7 min"`, `"25 min"`, `"1 h 30 min"`."""
    step = next(step for most, step in LEFT_STEPS if seconds < most)
    rounded = max(step, round(seconds / step) * step)
    if rounded < MINUTE:
        return f"{rounded} s"
    hours, minutes = divmod(rounded // MINUTE, HOUR // MINUTE)
    return " ".join([*([f"{hours} h"] if hours else []), *([f"{minutes} min"] if minutes else [])])


def milliseconds(ms: float) -> str:
    """Format a time as `"1,421 ms"`, as exact as the difference between two plans; longer ones as `duration` does."""
    if ms >= 1e5:
        return duration(ms / 1e3)
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def plain(number: Any) -> Any:
    """Convert NumPy's numbers to Python's, to check, print and store them alike; return anything else as it is."""
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        return number
    return int(number) if isinstance(number, numbers.Integral) else float(number)


def is_count(value: object) -> TypeGuard[int]:
    """Return True if `value` is a whole number of at least one; `True` itself is not a number."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
