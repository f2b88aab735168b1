"""Train the pair of templates/bert_scaling.ipynb with further seeds and with AdamW, one run a GPU.

    python benchmarks/pair_seeds.py TEXT [--held-out NAME=PATH ...] [--minutes M] [--rehearsal]

The experiments are those of the template with `preset="full"`, 76 M tokens and 256 sequences a step, which ran on four
GPUs (`notebooks/bert_scaling_4xH200.ipynb`): the same text, samples, masks and rates, so that runs differ in the seed
or the optimiser alone. Each GPU trains a queue of runs, one after the other; after M minutes the runs that are left
are stopped. A second start trains what has no run directory. On a machine without GPUs, `--rehearsal` trains
tiny models in four processes. The run directories stand in `$WORKBENCH_RUNS`; `wb.contrast` compares them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from full_preset import executed

import workbench as wb

QUEUES = (
    (("large", "muon", 1), ("large", "adamw", 0)),
    (("large", "muon", 2), ("large", "muon", 3)),
    (("scaled", "muon", 1),),
    (("scaled", "adamw", 0),),
)
"""Model, algorithm and seed of the runs of each GPU, in their order."""
Job = tuple[str, str, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="text file or folder to train on")
    parser.add_argument("--held-out", action="append", default=[], metavar="NAME=PATH", help="a further held-out text")
    parser.add_argument("--minutes", type=float, default=60.0, help="time after which runs are stopped")
    parser.add_argument("--rehearsal", action="store_true", help="tiny models, on CPUs")
    parser.add_argument("--queue", type=int, help="train the queue of this number only, in this process")
    given = parser.parse_args()
    if given.queue is not None:
        train(QUEUES[given.queue], given, time.time() + 60 * given.minutes)
        return
    first = experiment(QUEUES[0][0], given)
    wb.runs.tokenize(first)  # once, for all queues
    ends = time.time() + 60 * given.minutes
    children = []
    for number in range(len(QUEUES)):
        left = str((ends - time.time()) / 60)
        command = [sys.executable, __file__, *sys.argv[1:], "--minutes", left, "--queue", str(number)]
        device = {} if given.rehearsal else {"CUDA_VISIBLE_DEVICES": str(number)}
        children.append(subprocess.Popen(command, env=os.environ | device))
    sys.exit(max(child.wait() for child in children))


def train(queue: tuple[Job, ...], given: argparse.Namespace, ends: float) -> None:
    """Train the runs of one queue, except those whose directory is there."""
    for job in queue:
        name, algorithm, seed = job
        folder = Path(os.environ.get("WORKBENCH_RUNS", "runs")) / f"bert-{name}-{algorithm}-seed{seed}"
        if folder.exists() or time.time() > ends:
            continue
        settings = experiment(job, given)
        planned = wb.plan(settings)
        print(time.strftime("%T"), folder.name, planned, f"{planned.prediction.step_ms:.1f} ms", flush=True)
        run = wb.launch(settings, planned, directory=folder, progress=False)
        if not run.wait(timeout=max(1.0, ends - time.time())).status.final:
            run.stop(wait=True)
        print(time.strftime("%T"), folder.name, run.status, flush=True)


def experiment(job: Job, given: argparse.Namespace) -> wb.Experiment:
    """Return one experiment of the template."""
    name, algorithm, seed = job
    parameters: dict[str, Any] = {
        "preset": "rehearsal" if given.rehearsal else "full",
        "corpus": given.text,
        "algorithm": algorithm,
        "seed": seed,
        "pilot_rates": [],
        "held_out": dict(item.split("=", 1) for item in given.held_out),
    }
    if not given.rehearsal:
        parameters |= {"tokens": 76_000_000, "global_batch": 256}
    made: wb.Experiment = executed(parameters, after="target = ")[name]
    return made


if __name__ == "__main__":
    main()
