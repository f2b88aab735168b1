"""Models that fill a node, trained on real text as a notebook would launch them: what was planned, what was seen.

    python benchmarks/real_text.py 4.8b gpt-13b                     # all GPUs of this machine
    python benchmarks/real_text.py tiny --gpus 2                    # on CPUs, to see that it runs

Each is planned, launched with `wb.launch`, watched through its run directory until `--steps` are recorded, and killed:
a checkpoint of 13 billion parameters and their optimiser's state is 156 GB. `--corpus` takes a text file; without it,
the text is the one that `pip` brought. The runs stay in `--runs`, where `wb.load_run` finds them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import workbench as wb
from workbench.base.units import GIB

MANY = 1_000_000
SETTLED = 4
"""Steps that medians leave out."""
LAST = 3
WARM_UP = 2000
"""Steps until the learning rate is what it is: these models' losses rise where their first updates are as large."""


@dataclass(frozen=True)
class Case:
    model: Callable[[], Any]
    seq_len: int
    global_batch: int


CASES = {
    "4.8b": Case(lambda: wb.models.bert(hidden_size=2560, num_layers=60, num_heads=40), 512, 256),
    "gpt-13b": Case(lambda: wb.models.gpt3("13B"), 2048, 32),
    "tiny": Case(lambda: wb.models.bert(hidden_size=64, num_layers=4, num_heads=4, vocab_size=1024), 32, 16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", default="demo")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--gpus", type=int, help="of this machine; all, if not given")
    parser.add_argument("--timeout-s", type=float, default=600)
    parser.add_argument("--runs", default="runs")
    parser.add_argument("cases", nargs="+", choices=CASES)
    arguments = parser.parse_args()
    os.environ["WORKBENCH_RUNS"] = arguments.runs
    for name in arguments.cases:
        print(f"{name}: {trained(CASES[name], arguments)}", flush=True)


def trained(case: Case, arguments: argparse.Namespace) -> str:
    model = case.model()
    experiment = wb.Experiment(
        model=model,
        data=wb.data.corpus(arguments.corpus, vocab_size=model.vocab_size),
        steps=MANY,
        global_batch=case.global_batch,
        seq_len=case.seq_len,
        learning_rate=1e-4,
        optimizer=wb.Optimizer(warmup_steps=WARM_UP),
    )
    experiment.reading.prepare()
    here = wb.measure.local_cluster()
    plan = wb.plan(experiment, here if arguments.gpus is None else here.resized(arguments.gpus))
    print(plan.describe(), flush=True)
    began = time.monotonic()
    run = wb.launch(experiment, plan=plan)
    try:
        while len(run.history()) < arguments.steps and not run.status.final:
            if time.monotonic() - began > arguments.timeout_s:
                break
            time.sleep(0.5)
    finally:
        run.kill()
    return outcome(run, plan)


def outcome(run: wb.Run, plan: wb.Plan) -> str:
    history = run.history()
    if len(history) <= SETTLED:
        return f"{len(history)} steps, {run.status}"
    step_ms = statistics.median(history["step_ms"][SETTLED:])
    tokens = statistics.median(history["tokens_per_s"][SETTLED:])
    peaks = [event["peak_bytes"] for event in run.milestones() if event["type"] == "memory"]
    memory = f"; {max(peaks) / GIB:.1f} GiB, predicted {plan.peak_bytes / GIB:.1f}" if peaks else ""
    losses = history["loss"]
    return (
        f"{len(history)} steps, {step_ms:.0f} ms each, predicted {plan.prediction.step_ms:.0f}; {tokens:,.0f} tokens/s"
        f"{memory}; loss {losses[0]:.2f} → {statistics.mean(losses[-LAST:]):.2f}; {run.name}"
    )


if __name__ == "__main__":
    main()
