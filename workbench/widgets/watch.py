"""One run as a dashboard sees it: read incrementally, owned by one thread, no widget in sight."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import RunFailed
from workbench.figures._series import Curve, Mark
from workbench.rundir import RunDir, read_json
from workbench.runs.records.history import History, HistoryTail, Utilization
from workbench.runs.run import Run, Status
from workbench.units import count, duration

RECENT_STEPS = 20
"""Speed and ETA are taken over this many logged steps."""
STATUS_S = 0.5
"""Between two looks at which processes live; events are read at every tick."""


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment."""

    name: str
    status: Status
    steps: int | None
    """What the experiment asked for."""
    history: History
    phase: str
    """What rank 0 last finished before its first step (`capture`, `build`, …), or empty."""
    failure: RunFailed | None
    marks: tuple[Mark, ...] = ()
    """Checkpoints and resumptions."""
    memory: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """The latest `memory` event of each rank."""
    resumable: bool = False
    """Whether it ended early and left a checkpoint."""
    utilization: Utilization | None = None
    """How busy its devices were."""

    @property
    def step(self) -> int:
        return int(self.history.step[-1]) if len(self.history) else 0

    @property
    def progress(self) -> float:
        """0 to 1."""
        return min(1.0, self.step / self.steps) if self.steps else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds of training left at the recent speed; None before two steps and after the end."""
        if self.status.final or self.steps is None or len(self.history) < 2:
            return None
        seconds, step = self.history.seconds[-RECENT_STEPS:], self.history.step[-RECENT_STEPS:]
        per_step = (seconds[-1] - seconds[0]) / max(1.0, step[-1] - step[0])
        return float(per_step * (self.steps - step[-1])) if math.isfinite(per_step) else None

    @property
    def facts(self) -> str:
        """`"step 812 of 2,000 · loss 4.31 · 82.1 k tokens/s · MFU 41 % · 3 min 05 s left"`, as far as known."""
        if not len(self.history):
            return f"{self.phase} done, first step to come" if self.phase else "no step yet"
        of_all = f" of {self.steps:,}" if self.steps else ""
        parts = [f"step {self.step:,}{of_all}", f"loss {self.history.loss[-1]:.4g}"]
        speed = _recent(self.history.tokens_per_s)
        if speed is not None:
            parts.append(f"{count(speed)} tokens/s")
        mfu = _recent(self.history.mfu)
        if mfu is not None:
            parts.append(f"MFU {mfu:.1%}")
        if self.eta_s is not None:
            parts.append(f"{duration(self.eta_s)} left")
        return " · ".join(parts)

    @property
    def curve(self) -> Curve:
        return Curve(self.name, self.history, marks=self.marks)

    @property
    def failure_html(self) -> str:
        """The worker's error in words, its traceback folded behind them; empty for a run that did not fail."""
        if self.failure is None:
            return ""
        first, _, rest = str(self.failure).partition("\n")
        more = (
            f"<details><summary>traceback</summary><pre>{html.escape(rest.strip())}</pre></details>"
            if rest.strip()
            else ""
        )
        return f"<b>{html.escape(self.name)}</b>: <span>{html.escape(first)}</span>{more}"


def _recent(values: Any) -> float | None:
    """Median of the last steps, or None where nothing is known."""
    window = values[-RECENT_STEPS:]
    known = window[np.isfinite(window)]
    return float(np.median(known)) if len(known) else None


class Watch:
    """Follows one run through a handle of its own, so that nobody else's reading interferes."""

    def __init__(self, path: Path) -> None:
        self._run = Run(path)
        self._dir = RunDir(path)
        self._tail = HistoryTail(self._dir.events)
        self._steps = self._read_steps(self._dir)
        self._phase = ""
        self._size = 0
        self._marks: tuple[Mark, ...] = ()
        self._memory: dict[int, dict[str, Any]] = {}
        self._memory_is_old = False
        self._tail.read()  # first: the handle then finds what it needs beside the events
        for event in self._tail.events:
            self._note(event)
        self._status = self._run.status
        self._status_at = time.monotonic()

    @staticmethod
    def _read_steps(directory: RunDir) -> int | None:
        try:
            return int(read_json(directory.experiment)["steps"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def run(self) -> Run:
        return self._run

    @property
    def name(self) -> str:
        return self._run.name

    def read(self) -> Snapshot:
        """What has happened by now; the state is read before the steps, so that a final state has them all."""
        if time.monotonic() - self._status_at >= STATUS_S:
            self._look()
        history = self._tail.read()
        for event in self._tail.events:
            self._note(event)
        if any(event["type"] in ("status", "start") for event in self._tail.events):
            self._look()
            if self._status.final:
                history = self._tail.read()
        status = self._status
        failure = self._run.error() if status.state == "failed" else None
        return Snapshot(
            self.name,
            status,
            self._steps,
            history,
            self._phase,
            failure,
            self._marks,
            dict(self._memory),
            status.final and self._can_resume(history),
            self._tail.utilization,
        )

    @property
    def grew(self) -> bool:
        """Whether anything was recorded since the last call of this property that said so."""
        try:
            size = self._dir.events.stat().st_size
        except OSError:
            return False
        grown, self._size = size != self._size, size
        return grown

    def _look(self) -> None:
        self._status, self._status_at = self._run.status, time.monotonic()

    def _note(self, event: Mapping[str, Any]) -> None:
        if event["type"] == "phase":
            self._phase = str(event["name"])
        elif event["type"] == "checkpoint":
            step = int(event["step"])
            self._marks = (*self._marks, Mark("checkpoint", step, f"checkpoint at step {step:,}"))
        elif event["type"] == "memory":
            if self._memory_is_old:
                self._memory, self._memory_is_old = {}, False
            self._memory[int(event["rank"])] = dict(event)
        elif event["type"] == "start":
            self._restarted(event.get("resumed_from"))

    def _restarted(self, resumed_from: Any) -> None:
        """A resumed run repeats what came after its checkpoint, maybe with other steps to go; a fresh start all."""
        self._steps = self._read_steps(self._dir)
        step = resumed_step(resumed_from)
        kept = tuple(mark for mark in self._marks if mark.step <= step)
        self._marks = (*kept, Mark("resume", step, f"resumed at step {step:,}")) if resumed_from else ()
        self._memory_is_old = True  # shown until the new attempt has measured its own

    def _can_resume(self, history: History) -> bool:
        step = int(history.step[-1]) if len(history) else 0
        unfinished = self._steps is not None and step < self._steps
        kept = (int(mark.step) for mark in reversed(self._marks) if mark.kind == "checkpoint")
        return unfinished and any(self._dir.checkpoint(step).is_dir() for step in kept)

    def stop(self) -> None:
        """Ask the run to checkpoint and leave."""
        self._run.stop()


def resumed_step(value: Any) -> int:
    """The step of `start`'s `resumed_from`: a checkpoint's path (`…/step-00000400`), a step, or None."""
    return int(value.rpartition("step-")[2]) if isinstance(value, str) else int(value or 0)
