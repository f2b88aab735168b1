"""A worker for templates that compare plans: time and memory of a step are prescribed, whatever the machine does."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.logs import append_event
from tests.patience import wait_for_gate
from workbench.record.rundir import RunDir, read_json, this_process, write_json
from workbench.runs.launching import processes

STAND_IN = f"__import__({__name__!r}, fromlist=['stand_in']).stand_in()"
"""Code that lets a kernel launch this worker."""


def stand_in() -> None:
    processes.WORKER = "tests.distributed.prescribed_worker"


def step_ms(plan: Mapping[str, Any]) -> float:
    """Return the time of a step: long for tensor parallelism, and shorter the larger a micro-batch is."""
    divided = 200.0 * (plan["tensor"] - 1) + 12 * (plan["pipeline"] - 1) + 16 * plan["zero"]
    return 100 + divided + 50 * plan["offload_optimizer"] - 4 * plan["micro_batch"]


def peak_mib(plan: Mapping[str, Any]) -> int:
    """Return the memory of the fullest device."""
    return 64 - 8 * plan["zero"] - 4 * (plan["pipeline"] - 1) - 2 * (plan["tensor"] - 1)


def main(run: RunDir) -> None:
    if os.environ.get("RANK", "0") != "0":
        return  # the first rank writes what there is to see
    write_json(run.rank(0), {**this_process(), "rank": 0, "stage": 0, "device": "cpu"})
    plan, steps = read_json(run.plan), read_json(run.experiment)["steps"]
    append_event(run.events, "start", devices=2, world=2, tokens_per_step=8, resumed_from=None)
    for step in range(1, steps + 1):
        wait_for_gate(step, unless=run.stop_file.exists)
        if run.stop_file.exists():
            return
        measured = {"step_ms": 1e4 if step <= 3 else step_ms(plan), "seconds": step / 10, "tokens_per_s": 8.0}
        totals = {"tokens": 8 * step, "samples": step, "flops": 1e6 * step, "learning_rate": 1e-3}
        append_event(run.events, "step", step=step, loss=4.0, grad_norm=1.0, mfu=None, **measured, **totals)
    memory = {"peak_bytes": peak_mib(plan) << 20, "reserved_bytes": 0, "limit_bytes": None, "counted": True}
    append_event(run.events, "memory", rank=0, stage=0, device="cpu", **memory)
    append_event(run.events, "end", steps=steps, seconds=steps / 10)


if __name__ == "__main__":
    main(RunDir(Path(sys.argv[1])))
