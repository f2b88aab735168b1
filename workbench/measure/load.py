"""The load of other processes while something was measured, and whether it should be measured again.

Other processes only ever make a measurement slower. One that was made beside much other work, or that a finished run
contradicts, is therefore made again as soon as the machine is quiet.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from workbench.home import cache_home
from workbench.machine import available_cores
from workbench.rundir import read_json, write_json

BUSY = 0.2
"""Share of the cores from which other work makes a measurement doubtful, and that a quiet machine stays below."""
DISAGREEMENT = 2.0
"""Ratio of a finished run's step to its prediction, either way, that contradicts what the prediction came from.

Constants of CPUs are right to a factor of 1.5 on an idle machine.
"""
MEASURED, OTHERS = "measured_at", "others"
"""Keys of a cached measurement: seconds since 1970, and the share of the cores that other processes took."""


class LoadWatch:
    """Counts, from its creation on, the processor time that other processes took."""

    def __init__(self) -> None:
        self._began = self._now()

    def facts(self) -> dict[str, float]:
        """Return when this was, and the share of the cores that other processes took, to be cached beside a result."""
        began, now = self._began, self._now()
        seconds, busy, own = (after - before for before, after in zip(began, now, strict=True))
        others = max(0.0, busy - own) / max(seconds * (psutil.cpu_count() or 1), 1e-9)
        return {MEASURED: time.time(), OTHERS: min(1.0, others)}

    @staticmethod
    def _now() -> tuple[float, float, float]:
        every, own = psutil.cpu_times(), os.times()
        idle = every.idle + getattr(every, "iowait", 0.0)
        return time.monotonic(), sum(every) - idle - getattr(every, "guest", 0.0), sum(own[:4])


def is_quiet() -> bool:
    """Return True if fewer processes want a core than there are cores to spare for a measurement."""
    return os.getloadavg()[0] < max(BUSY * available_cores(), 0.5)


def is_doubtful(facts: Mapping[str, Any]) -> bool:
    """Return True for a measurement that was made beside much other work, or before a run that contradicted it."""
    return float(facts.get(OTHERS, 1.0)) > BUSY or float(facts.get(MEASURED, 0.0)) < contradicted_at()


def in_words(facts: Mapping[str, Any]) -> str:
    """Return when something was measured and beside how much other work; "" where that is not known."""
    if MEASURED not in facts:
        return ""
    when = datetime.datetime.fromtimestamp(facts[MEASURED], datetime.UTC)
    said = f" on {when.day} {when:%B %Y}"
    said += f" while other processes took {facts[OTHERS]:.0%} of the cores" if facts[OTHERS] > BUSY else ""
    contradicted = facts[MEASURED] < contradicted_at()
    return said + (", and a run that has finished since contradicts them" if contradicted else "")


def contradicted_at() -> float:
    """Return when a finished run last contradicted its prediction, in seconds since 1970; 0 if none did."""
    try:
        return float(read_json(_path())["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def compare(predicted_ms: float, measured_ms: float) -> None:
    """Note that a run has finished whose steps its prediction missed by far; others leave no trace."""
    ratio = measured_ms / predicted_ms
    if not 1 / DISAGREEMENT <= ratio <= DISAGREEMENT:
        write_json(_path(), {"time": time.time(), "predicted_ms": predicted_ms, "measured_ms": measured_ms})


def _path() -> Path:
    return cache_home() / "contradicted.json"
