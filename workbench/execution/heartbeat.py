"""Signs of life of a rank: what it does now, and on request the stacks of its threads.

The supervisor reads them to tell a slow run from one that hangs (`workbench.runs.launching.stalls`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from dataclasses import dataclass

from workbench.rundir import RunDir

STACK_SIGNAL = signal.SIGUSR2
"""Signal that makes a rank append its stacks to `stacks/<rank>.txt`, also while it waits in compiled code."""
TIMED = ("step", "batch", "leaving")
"""Computing a step, waiting for its batch, and leaving the process groups. All other activities may take any time."""
_WIDTH = 40


@dataclass(frozen=True)
class Beat:
    """The activity of a rank; two equal beats are the same activity."""

    step: int
    """Number of the step, from 1."""
    activity: str
    number: int
    """Number of activities that the rank has begun."""


STDERR = 2
"""File descriptor of the rank's log: a crash in a compiled library leaves the Python lines that called it there."""


class Heartbeat:
    """Writes the beats of this process: one short write into the page cache for each activity, without waiting."""

    def __init__(self, run: RunDir, rank: int) -> None:
        for folder in (run.ranks, run.stacks):
            folder.mkdir(parents=True, exist_ok=True)
        self._stacks = run.stack(rank).open("a")
        faulthandler.enable(STDERR)
        faulthandler.register(STACK_SIGNAL, self._stacks, all_threads=True)
        self._descriptor = os.open(run.beat(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._step, self._number = 0, 0
        self.begin("starting")

    def begin(self, activity: str, step: int | None = None) -> None:
        """Say what the process does from now on, in step `step` (from 1) or in the last one named."""
        self._step = self._step if step is None else step
        self._number += 1
        with contextlib.suppress(OSError):  # a full disk must not end a training
            os.pwrite(self._descriptor, f"{self._number} {self._step} {activity}".ljust(_WIDTH).encode(), 0)

    def close(self) -> None:
        """Let go of the files, in a process that lives on."""
        faulthandler.unregister(STACK_SIGNAL)
        self._stacks.close()
        os.close(self._descriptor)


def read_beat(run: RunDir, rank: int) -> Beat | None:
    """Return what a rank does now, or None if it does not tell."""
    try:
        number, step, activity = run.beat(rank).read_text().split()
        return Beat(int(step), activity, int(number))
    except (OSError, ValueError):
        return None
