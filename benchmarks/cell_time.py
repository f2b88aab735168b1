"""What a run costs before it trains: ten steps on two CPU processes, as a measured cell of a grid is.

A kernel launches it twice, because the second run is forked from a server that the first one has left.

    python benchmarks/cell_time.py [--out FILE] [--runs 3] [--beside CHECKOUT]

Samples the processor time of every process of the run while it lives, and the time by the clock to its first step.
With `--beside`, the runs of another checkout of this repository alternate with ours, so that both meet the same load.
Writes medians to FILE (by default results/cell_time.json). Processor time does not depend much on what else the machine
does; time by the clock does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import options
import psutil

import workbench as wb
from workbench.record.event_log import read_events
from workbench.record.rundir import read_json

SIZES = {"vocab_size": 300, "max_positions": 64, "dropout": 0.0}
MODEL = wb.models.gpt2(hidden_size=64, num_layers=4, num_heads=4, **SIZES)
EXPERIMENT = wb.Experiment(
    model=MODEL,
    data=wb.data.corpus("demo", vocab_size=300),
    global_batch=16,
    seq_len=64,
    steps=10,
    checkpoints=wb.Checkpoints(keep=0),
    tracking=wb.Tracking(project=""),
)
KINDS = ("supervisor", "launcher", "ranks")
LAUNCHES = ("first", "second")


def main() -> None:
    parser = options.parser(__doc__, "cell_time.json")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parsed(parser)
    if arguments.once:
        print(json.dumps(_launched(LAUNCHES)))
        return
    launches = LAUNCHES[:1] if arguments.tiny else LAUNCHES
    checkouts = {"ours": options.ROOT} | ({"beside": arguments.beside.resolve()} if arguments.beside else {})
    names = [f"{name}, {launch} launch" for name in checkouts for launch in launches]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(0 if arguments.tiny else arguments.runs):
        for name, checkout in checkouts.items():
            environment = {**os.environ, "PYTHONPATH": str(checkout)}
            command = [sys.executable, __file__, "--once"]
            told = subprocess.check_output(command, env=environment, cwd=checkout, text=True)
            for launch, measured in zip(LAUNCHES, json.loads(told.splitlines()[-1]), strict=True):
                found[f"{name}, {launch} launch"].append(measured)
    if arguments.tiny:  # once, in this process
        found["ours, first launch"] += _launched(launches)
    medians = {
        name: {key: round(statistics.median(one[key] for one in runs), 2) for key in runs[0]}
        for name, runs in found.items()
    }
    commits = {name: _commit(checkout) for name, checkout in checkouts.items()}
    load = os.getloadavg()[0]
    raw = {"commits": commits, "cores": os.cpu_count(), "load": load, "medians": medians, "runs": found}
    arguments.out.write_text(json.dumps(raw, indent=1) + "\n")
    for name, values in medians.items():
        for key, seconds in values.items():
            print(f"{name:22} {key:38} {seconds:6.2f} s")


def _launched(launches: Sequence[str]) -> list[dict[str, float]]:
    plan = wb.plan(EXPERIMENT, tensor=1, pipeline=2, micro_batch=4, zero=0, recompute="none")
    return [_measured(plan) for _ in launches]


def _commit(checkout: Path) -> str:
    return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=checkout, text=True).strip()


def _measured(plan: wb.Plan) -> dict[str, float]:
    """Train once; return the processor seconds of each kind of process and the times by the clock."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()
        run = wb.launch(EXPERIMENT, plan=plan, directory=Path(folder) / "cell")
        returned = time.time()
        seen: dict[int, tuple[str, float]] = {}
        while not run.status.final:
            with contextlib.suppress(psutil.Error, KeyError):
                supervisor = psutil.Process(read_json(run.directory.launcher)["supervisor"]["pid"])
                for process in (supervisor, *supervisor.children(recursive=True)):
                    times, parent = process.cpu_times(), process.ppid()
                    kind = KINDS[0 if process == supervisor else 1 if parent == supervisor.pid else 2]
                    seen[process.pid] = kind, times.user + times.system
            time.sleep(0.03)
        ended, first = (
            time.time(),
            next(event for event in read_events(run.directory.events) if event["type"] == "step"),
        )
        steps_s = plan.world * float(run.history().step_ms.sum()) / 1e3
    by_kind = {kind: sum(s for of, s in seen.values() if of == kind) for kind in KINDS}
    clock = {
        "until `wb.launch` returns": returned - started,
        "to the first step": first["time"] - started,
        "to the end": ended - started,
        "steps of all ranks": steps_s,
    }
    return (
        by_kind | {"all processes": sum(by_kind.values())} | {f"{name}, by the clock": s for name, s in clock.items()}
    )


if __name__ == "__main__":
    main()
