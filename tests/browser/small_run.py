"""A small process that writes the files of a training run.

`python small_run.py DIRECTORY STEPS SECONDS_PER_STEP [FAIL_AT]`

It trains no model. Its directory, its events, its process record and its response to a STOP file are real.
"""

import math
import sys
import time
from pathlib import Path

from tests.logs import append_event
from workbench.rundir import RunDir, this_process, write_json, write_record

TOKENS_PER_STEP = 8192


def main(directory: str, steps: int, seconds_per_step: float, fail_at: int | None) -> None:
    run = RunDir(Path(directory))
    run.path.mkdir(parents=True)
    write_record(run.environment, {})
    write_json(run.launcher, {"supervisor": this_process()})
    write_record(run.experiment, {"steps": steps, "name": run.path.name})
    append_event(run.events, "status", state="running", message="")
    append_event(run.events, "start", devices=["cpu", "cpu"], world=2, resumed_from=None)
    began = time.time()
    for step in range(1, steps + 1):
        if run.stop_file.exists():
            append_event(run.events, "status", state="stopped", message=f"Stopped at step {step - 1} of {steps}.")
            return
        if step == fail_at:
            fail(run)
            return
        train(run, step, seconds_per_step, began)
    append_event(run.events, "end", steps=steps, seconds=time.time() - began)
    append_event(run.events, "status", state="finished", message="")


def train(run: RunDir, step: int, seconds_per_step: float, began: float) -> None:
    time.sleep(seconds_per_step)
    append_event(
        run.events,
        "step",
        step=step,
        loss=4 + 6.4 * math.exp(-step / 80) + 0.2 * math.sin(step * step),
        learning_rate=1e-4,
        grad_norm=1.0,
        step_ms=1e3 * seconds_per_step,
        tokens=step * TOKENS_PER_STEP,
        samples=step * 64,
        flops=step * 1e12,
        seconds=time.time() - began,
        tokens_per_s=TOKENS_PER_STEP / seconds_per_step,
        mfu=None,
    )


def fail(run: RunDir) -> None:
    write_record(
        run.error(1),
        {
            "rank": 1,
            "stage": 1,
            "type": "RuntimeError",
            "message": "shapes <b>4</b> and 5 differ",
            "traceback": "Traceback (most recent call last):\nRuntimeError: shapes <b>4</b> and 5 differ",
            "time": time.time(),
        },
    )
    append_event(run.events, "status", state="failed", message="rank 1 (stage 1): RuntimeError")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else None)
