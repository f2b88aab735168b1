"""A stand-in for a training run: its files are real, and it goes on as far as the test says.

It trains no model and has no process of its own: the test's process is its supervisor.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

from tests.logs import append_event
from tests.patience import eventually
from workbench.record.rundir import RunDir, this_process, write_json, write_record

STEPS = 5000
TOKENS_PER_STEP = 8192
STEP_S = 0.02


class SmallRun:
    """A run that waits for `advance`, `fail` or `stop`."""

    def __init__(self, path: Path) -> None:
        self.run, self.step, self.ended = RunDir(path), 0, False
        path.mkdir(parents=True)
        write_record(self.run.environment, {})
        write_json(self.run.launcher, {"supervisor": this_process()})
        write_record(self.run.experiment, {"steps": STEPS, "name": path.name})
        append_event(self.run.events, "status", state="running", message="")
        append_event(self.run.events, "start", devices=["cpu", "cpu"], world=2, resumed_from=None)

    @property
    def path(self) -> str:
        return str(self.run.path)

    def advance(self, to: int) -> None:
        """Take all steps up to this one."""
        for step in range(self.step + 1, to + 1):
            append_event(
                self.run.events,
                "step",
                step=step,
                loss=4 + 6.4 * math.exp(-step / 80) + 0.2 * math.sin(step * step),
                learning_rate=1e-4,
                grad_norm=1.0,
                step_ms=1e3 * STEP_S,
                tokens=step * TOKENS_PER_STEP,
                samples=step * 64,
                flops=step * 1e12,
                seconds=step * STEP_S,
                tokens_per_s=TOKENS_PER_STEP / STEP_S,
                mfu=None,
            )
        self.step = max(self.step, to)

    def stop_when_asked(self) -> None:
        """Wait for the request to stop, as a run does that trains, and answer it."""
        eventually(self.run.stop_file.exists, lambda: f"nobody asked {self.path} to stop")
        self.end("stopped", f"Stopped at step {self.step} of {STEPS}.")

    def fail(self) -> None:
        words = "shapes <b>4</b> and 5 differ"
        error = {"rank": 1, "stage": 1, "type": "RuntimeError", "message": words, "time": time.time()}
        traceback = f"Traceback (most recent call last):\nRuntimeError: {words}"
        write_record(self.run.error(1), {**error, "traceback": traceback})
        self.end("failed", "rank 1 (stage 1): RuntimeError")

    def end(self, state: str, message: str = "") -> None:
        if not self.ended:
            append_event(self.run.events, "status", state=state, message=message)
        self.ended = True
