"""Where the processor time of a measured cell goes: one run of ten steps on two CPU processes.

    python benchmarks/cell_time.py [--out FILE] [--runs 3]

Samples the processor time of every process of the run while it lives, and measures what importing alone takes in fresh
processes. Writes medians to FILE (by default results/cell_time.json). Processor time does not depend much on what else
the machine does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

import workbench as wb
from workbench.execution import local_launch, worker
from workbench.runs.launching import supervisor

ROOT = Path(__file__).resolve().parents[1]
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
MODULES = {"supervisor": supervisor.__name__, "launcher": local_launch.__name__, "ranks": worker.__name__}
IMPORTED = {
    "launcher": [local_launch.__name__, "accelerate.commands.launch"],
    "ranks": [worker.__name__, "transformers.models.gpt2.modeling_gpt2"],
}
IMPORTING = (
    "import importlib, sys, time\n[importlib.import_module(name) for name in sys.argv[1:]]\nprint(time.process_time())"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cell_time.json")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    plan = wb.plan(EXPERIMENT, tensor=1, pipeline=2, micro_batch=4, zero=0, recompute="none")
    found = [_measured(plan) for _ in range(arguments.runs)]
    medians = {name: round(statistics.median(one[name] for one in found), 2) for name in found[0]}
    medians["all"] = round(sum(medians[name] for name in MODULES), 2)
    medians["imports"] = round(_imports("launcher") + plan.world * _imports("ranks"), 2)
    arguments.out.write_text(json.dumps({"processor_s": medians, "runs": found}, indent=1) + "\n")
    for name, seconds in medians.items():
        print(f"{name:10} {seconds:6.2f} s")


def _measured(plan: wb.Plan) -> Mapping[str, float]:
    """Train once; return the processor seconds of each kind of process, and the steps' seconds on all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        run = wb.launch(EXPERIMENT, plan=plan, directory=Path(folder) / "cell")
        seen: dict[int, tuple[str, float]] = {}
        while not run.status.final:
            for process in psutil.process_iter(["pid", "cmdline", "cpu_times"]):
                words = process.info["cmdline"] or []
                kind = next((kind for kind, module in MODULES.items() if module in words), None)
                if kind is not None and any(str(run.path) in word for word in words):
                    times = process.info["cpu_times"]
                    seen[process.info["pid"]] = kind, times.user + times.system
            time.sleep(0.03)
        steps_s = plan.world * float(run.history().step_ms.sum()) / 1e3
    return {kind: sum(s for of, s in seen.values() if of == kind) for kind in MODULES} | {
        "steps, by the clock": steps_s
    }


def _imports(kind: str) -> float:
    """Return the processor seconds of a process that only imports what one of this kind does; the median of three."""
    command = [sys.executable, "-c", IMPORTING, *IMPORTED[kind]]
    return statistics.median(float(subprocess.check_output(command)) for _ in range(3))


if __name__ == "__main__":
    main()
