"""What recording and sampling cost the training, and how soon `wb.launch` returns.

    python benchmarks/tracking.py [--steps 30] [--metrics 50]

Launches the demo's small BERT twice on this machine's CPU (offline W&B recorder beside it) and times what the
ranks do for recording: one `append_event` a step. W&B itself runs in another process, so it has no part in a step.
How busy the devices are is asked by the supervisor, every two seconds: printed is the CPU time of one such look, at
this machine's GPUs if it has some, else at this process and those below it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import workbench as wb
from workbench.rundir import append_event
from workbench.runs.launching.device_queue import node_devices
from workbench.runs.launching.device_sampler import SAMPLE_S, open_meter

GOAL_SHARE = 0.005
GOAL_LAUNCH_S = 1.0
REPEATS = 5000


def recording_us(metrics: int, folder: Path) -> dict[str, float]:
    """Microseconds that one step of so many metrics takes to record: median and 99th percentile."""
    row: dict[str, Any] = {f"layer{index}/grad_norm": 1.0 / (index + 3) for index in range(metrics)}
    taken = []
    for step in range(REPEATS):
        started = time.perf_counter()
        append_event(folder / "events.jsonl", "step", step=step, **row)
        taken.append((time.perf_counter() - started) * 1e6)
    return {"p50_us": statistics.median(taken), "p99_us": statistics.quantiles(taken, n=100)[98]}


def sampling(repeats: int = 50) -> dict[str, Any]:
    """CPU milliseconds of one look at the devices, and their share of a core at the rate at which it is done."""
    gpus = node_devices("cuda")
    meter = open_meter("cuda" if gpus else "cpu", gpus, os.getpid())
    started = time.process_time()
    for _ in range(repeats):
        meter.sample()
    look_s = (time.process_time() - started) / repeats
    return {"devices": len(gpus) or "cpu", "look_cpu_ms": 1e3 * look_s, "share_of_a_core": look_s / SAMPLE_S}


def launch_s(experiment: wb.Experiment, plan: wb.Plan) -> tuple[float, wb.Run]:
    """Seconds until `wb.launch` has returned, the text being tokenised and the plan made; and the run."""
    started = time.perf_counter()
    run = wb.launch(experiment, plan=plan, progress=False)
    return time.perf_counter() - started, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--metrics", type=int, default=50)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ |= {"WORKBENCH_RUNS": f"{scratch}/runs", "WANDB_MODE": "offline"}
        small = wb.Experiment(
            model=wb.models.bert(hidden_size=64, num_layers=4, num_heads=8, vocab_size=2048, layout="pre_ln"),
            data=wb.data.corpus("demo", vocab_size=2048),
            steps=asked.steps,
            global_batch=32,
            seq_len=64,
        )
        small.data.prepare(small, progress=False)
        plan = wb.plan(small, pipeline=2)
        launches = [launch_s(small, plan), launch_s(small.replace(seed=1), plan)]
        runs = [run.wait() for _, run in launches]
        step_ms = statistics.median(runs[0].history().step_ms[5:])
        cost = recording_us(asked.metrics, Path(scratch))
        looks = sampling()
    share = cost["p50_us"] / 1e3 / step_ms
    figures = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "metrics_a_step": asked.metrics,
        "recording": cost,
        "sampling": looks,
        "step_ms": step_ms,
        "share_of_a_step": share,
        "goal_share": GOAL_SHARE,
        "launch_s": {"first": launches[0][0], "second": launches[1][0]},
        "goal_launch_s": GOAL_LAUNCH_S,
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
