"""A worker for tests of measured grids: a step takes 40 ms less 4 ms a sample of a micro-batch, and 2 cells differ.

Tensor-parallel cells take 50 ms more, and micro-batches of 4 with two tensor-parallel devices run out of memory.
"""

import os
import sys
from pathlib import Path

from tests.distributed.sweep_worker import take_own_gate
from tests.logs import append_event
from tests.patience import wait_for_gate
from workbench.record.rundir import RunDir, read_json, this_process, write_json, write_record


def main(run: RunDir) -> int:
    if os.environ.get("RANK", "0") != "0":
        return 0  # the first rank writes what there is to see
    take_own_gate(run)
    write_json(run.rank(0), {**this_process(), "rank": 0, "stage": 0, "device": "cpu"})
    plan, steps = read_json(run.plan), read_json(run.experiment)["steps"]
    append_event(run.events, "start", devices=1, world=1, tokens_per_step=8, resumed_from=None)
    if (plan["tensor"], plan["micro_batch"]) == (2, 4):
        error = {
            "rank": 0,
            "stage": 0,
            "type": "OutOfMemoryError",
            "message": "Out of memory: tried 3 GiB.",
            "time": 0.0,
        }
        write_record(run.error(0), {**error, "traceback": ""})
        return 1
    step_ms = 40.0 - 4 * plan["micro_batch"] + 50 * (plan["tensor"] - 1)
    for step in range(1, steps + 1):
        wait_for_gate(step)
        measured = {"step_ms": 1e4 if step <= 3 else step_ms, "seconds": step / 10, "tokens_per_s": 8.0}
        totals = {"tokens": 8 * step, "samples": step, "flops": 1e6 * step, "learning_rate": 1e-3}
        append_event(run.events, "step", step=step, loss=4.0, grad_norm=1.0, mfu=None, **measured, **totals)
    append_event(run.events, "end", steps=steps, seconds=steps / 10)
    return 0


if __name__ == "__main__":
    sys.exit(main(RunDir(Path(sys.argv[1]))))
