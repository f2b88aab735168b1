"""Numbers for people: bytes as GiB, times as ms or minutes, counts as 2.46 B; and checks of numbers."""

from __future__ import annotations

import math
import numbers
from typing import Any, TypeGuard

GIB = 1024**3
MIB = 1024**2


def gib(num_bytes: float, like: float | None = None) -> str:
    """Format bytes as `"36.7 GiB"`; small sizes in MiB or KiB.

    `like` is the largest of the sizes that stand together, in whose unit all of them are written.
    """
    largest = abs(num_bytes if like is None else like)
    if memory_unit(largest)[0] == GIB:
        return f"{num_bytes / GIB:.{1 if abs(num_bytes) >= 0.1 * GIB or not num_bytes else 3}f} GiB"
    if largest >= 0.1 * MIB:
        return f"{num_bytes / MIB:.1f} MiB"
    return f"{num_bytes / 1024:.1f} KiB"


def memory_unit(largest: float) -> tuple[int, str]:
    """Return the unit of an axis over sizes of at most `largest` bytes, in bytes and in words: GiB, or MiB if small."""
    return (GIB, "GiB") if largest >= 0.1 * GIB else (MIB, "MiB")


def count(number: float) -> str:
    """Format a count as `"2.46 B"`, `"340 M"` or `"30.5 k"`, with three significant digits."""
    for scale, suffix in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= 0.9995 * scale:
            return f"{number / scale:.3g}{suffix}"
    return f"{number:.3g}"


def flops_per_s(rate: float) -> str:
    """Format a rate as `"809 TFLOP/s"` or `"183 GFLOP/s"`."""
    scale, prefix = next(((s, p) for s, p in ((1e15, "P"), (1e12, "T"), (1e9, "G")) if rate >= 0.9995 * s), (1e6, "M"))
    return f"{rate / scale:.3g} {prefix}FLOP/s"


def duration(seconds: float) -> str:
    """Format a time as `"213 ms"`, `"4.2 s"`, `"8 min 05 s"` or `"3 h 12 min"`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


LEFT_STEPS = ((55, 10), (570, 60), (3450, 300), (4 * 3600, 900), (math.inf, 3600))
"""Numbers of seconds up to which a time left is rounded, and the steps."""


def time_left(seconds: float) -> str:
    """Format an estimate of the time left in one step of its size: `"40 s"`, `"7 min"`, `"25 min"`, `"1 h 30 min"`."""
    step = next(step for most, step in LEFT_STEPS if seconds < most)
    rounded = max(step, round(seconds / step) * step)
    if rounded < 60:
        return f"{rounded} s"
    hours, minutes = divmod(rounded // 60, 60)
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
