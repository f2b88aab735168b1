"""A worker for tests of sweeps: keeps the real worker's contract, and its loss depends on the experiment.

The loss falls to `learning_rate * 1000 + global_batch / 100 + seed / 1000`; a rate above 0.5 diverges to 100. The
variable `SWEEP_STEP_S` gives the seconds of a step. If `SWEEP_GATE` names a file, no run ends before it exists.
"""

import os
import sys
import time
from pathlib import Path

from tests.logs import append_event
from workbench.rundir import RunDir, read_json, this_process, write_json


def main(run: RunDir) -> None:
    write_json(run.rank(0), {**this_process(), "rank": 0, "stage": 0, "device": "cpu"})
    experiment = read_json(run.experiment)
    first = read_json(run.resume)["step"] if run.resume.exists() else 0
    append_event(run.events, "start", devices=1, world=1, tokens_per_step=8, resumed_from=first)
    rate, batch, seed = (experiment[name] for name in ("learning_rate", "global_batch", "seed"))
    step, pause = first, float(os.environ.get("SWEEP_STEP_S", "0"))
    while step < experiment["steps"] and not run.stop_file.exists():
        step += 1
        time.sleep(pause)
        while step == experiment["steps"] and not gate_is_open():
            time.sleep(0.05)
        loss = 100.0 if rate > 0.5 else rate * 1000 + batch / 100 + seed / 1000 + 1 / step
        measured = {"step_ms": 1e3 * pause, "seconds": pause * step, "tokens_per_s": 8.0, "learning_rate": rate}
        totals = {"tokens": batch * 8 * step, "samples": batch * step, "flops": 1e6 * step}
        append_event(run.events, "step", step=step, loss=loss, grad_norm=1.0, mfu=None, **measured, **totals)
    run.checkpoint(step).mkdir(parents=True, exist_ok=True)
    append_event(run.events, "checkpoint", step=step, path=str(run.checkpoint(step)), seconds=0.0)
    append_event(run.events, "end", steps=step, seconds=pause * step)


def gate_is_open() -> bool:
    gate = os.environ.get("SWEEP_GATE")
    return gate is None or Path(gate).exists()


if __name__ == "__main__":
    main(RunDir(Path(sys.argv[1])))
