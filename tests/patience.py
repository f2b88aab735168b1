"""How tests wait: for a condition, with one limit for everything, and gates through which other processes advance.

No verdict of a test may depend on how fast the machine is. A test therefore never waits for a time, and no process
that it starts keeps a pace of its own: it goes on when the test opens its gate. A limit of the product (a stall, a
retry) is tested with a `Clock`, which the test turns. `tests/unit/test_patience.py` finds tests that do otherwise.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

PATIENCE_S = 300.0
"""Longest wait in s for anything that must happen: it ends what never will, and says nothing about speed."""
ABANDONED_S = 12 * PATIENCE_S
"""Longest wait in s at a gate: a test may need its patience many times before it opens one. It ends what was left."""
LOOK_S = 0.02
"""Pause in s between two looks at what is waited for."""
GATE = "WORKBENCH_TEST_GATE"
"""Environment variable that tells a process of a test which file is its gate."""

Value = TypeVar("Value")


def eventually(truth: Callable[[], Value], explain: Callable[[], object] = lambda: "") -> Value:
    """Wait until `truth()` is true and return it, or fail with what `explain()` returns when patience has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := truth()):
        assert time.monotonic() < deadline, f"it did not happen within {PATIENCE_S:g} s: {explain()}"
        time.sleep(LOOK_S)
    return value


class Gate:
    """A file that says up to which step a process may go; closed until the test opens it.

    The test gives the process `gate.environment`, and the process calls `wait_for_gate(step)` before each step.
    """

    def __init__(self, file: Path, open_to: float = 0) -> None:
        self.file = file
        self.open(open_to)

    @property
    def environment(self) -> dict[str, str]:
        return {GATE: str(self.file)}

    def open(self, step: float = math.inf) -> None:
        """Let the process go up to a step, that one included; to its end by default."""
        waiting = self.file.with_name(f"{self.file.name}.new")
        waiting.write_text(str(step))
        waiting.replace(self.file)


def wait_for_gate(step: float, unless: Callable[[], object] = lambda: False) -> None:
    """Wait in a process of a test until its gate is open to a step, or until `unless()` is true, as when it is to stop.

    A process without a gate goes on at once.
    """
    if file := os.environ.get(GATE):
        abandoned = time.monotonic() + ABANDONED_S
        while float(Path(file).read_text()) < step and not unless():
            assert time.monotonic() < abandoned, f"the gate never opened to step {step}"
            time.sleep(LOOK_S)


class Clock:
    """A clock that a test turns, to be put in the place of a module's `time`; `sleep` advances it and returns."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def time(self) -> float:
        return self.now

    monotonic = perf_counter = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds
