"""How long planning takes on this machine, without any GPU but for `--cold`.

    python benchmarks/planning_time.py --out FILE       # analytic plans, and the moves of a slider
    python benchmarks/planning_time.py --cold           # scaled BERT for this machine, from nothing; then calibrated

Times are processor time, which other work on the machine hardly changes; `--cold` goes by the clock, because it waits
for other processes. Run with OMP_NUM_THREADS=1: planning has one thread. Goals, on two idle cores: scaled BERT for 4
GPUs in 5 s, a GPT of 100 billion parameters for 1,024 GPUs in 20 s, both with capture; 300 ms from a slider's move to
its picture; 30 s from nothing to a plan on a node with GPUs.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import options
import torch

import workbench as wb
from workbench import models
from workbench.base.errors import PlanInfeasible
from workbench.base.tensors import TensorSpec
from workbench.capture import build_meta, capture
from workbench.cost import Cluster, Profile
from workbench.cost.graph_profiler import profile_graph
from workbench.models import Model
from workbench.planning.planner import weigh
from workbench.planning.request import Request
from workbench.planning.search import uncollected, what_if

Result = TypeVar("Result")

FIELDS = {
    "mlm_nsp": ("input_ids", "token_type_ids", "labels"),
    "mlm": ("input_ids", "token_type_ids", "labels"),
    "clm": ("input_ids", "labels"),
}
MOVES = {
    "gpus": (1, 2, 4, 8, 16, 32),
    "memory_limit_gib": (16, 20, 24, 32, 48, 80, 141),
    "global_batch": (64, 128, 512, 1024),
    "micro_batch": (1, 2, 4, 8, 16),
}
"""Of each slider of `wb.what_if`."""


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--cold", action="store_true", help="only for this machine, from nothing; then calibrated")
    asked = options.parsed(parser)
    scaled = models.bert(hidden_size=1920, num_layers=54, num_heads=30)
    if asked.cold:
        cold(scaled)
        return
    if asked.tiny:
        scaled = models.gpt2(64, 2, 2, vocab_size=256, max_positions=512)
    gpt = models.gpt2(hidden_size=10240, num_layers=80, num_heads=80, max_positions=2048, name="gpt-100b")
    print("| model | cluster | capture | profile | search | all | options | plan |")
    print("|---|---|--:|--:|--:|--:|--:|---|")
    rows = [] if asked.tiny else [row(models.bert_large(), 4, 512, 512)[0]]
    found, costs = row(scaled, 4, 256, 512)
    moved = sliders(costs, 1 if asked.tiny else None)  # as a user would: nothing larger was planned in this process
    rows.append(found)
    if not asked.tiny:
        rows += [row(scaled, 1024, 4096, 512)[0], row(gpt, 1024, 2048, 2048)[0]]
    for what, ms in moved.items():
        print(f"slider to {what}: {ms['moves']} moves, median {ms['median_ms']} ms, longest {ms['longest_ms']} ms")
    if asked.out:
        made = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "rows": rows, "sliders": moved}
        asked.out.write_text(json.dumps(made, indent=1) + "\n")


def row(model: Model, gpus: int, global_batch: int, seq_len: int) -> tuple[dict[str, Any], Profile]:
    cluster = Cluster.of("h200", gpus=gpus)
    batch = {name: TensorSpec(name, (2, seq_len), "int64") for name in FIELDS[model.objective]}
    if model.objective == "mlm_nsp":
        batch["next_sentence_label"] = TensorSpec("next_sentence_label", (2,), "int64")
    graph, capture_s = timed(lambda: capture(build_meta(model.build), batch, name=model.name))
    costs, profile_s = timed(lambda: profile_graph(graph, cluster.device, "bf16", compiled=True))
    plans, search_s = timed(lambda: weigh(costs, "bf16", Request(global_batch, seq_len, cluster)))
    parts = {"capture_s": capture_s, "profile_s": profile_s, "search_s": search_s}
    parts = {name: round(seconds, 2) for name, seconds in (parts | {"all_s": sum(parts.values())}).items()}
    seconds = " | ".join(f"{s:.2f} s" for s in parts.values())
    print(
        f"| {model.name} | {cluster.describe()} | {seconds} | {plans.searched} | {plans.best.describe()} |", flush=True
    )
    return {"model": model.name, "cluster": cluster.describe(), **parts, "options": plans.searched}, costs


def sliders(costs: Profile, positions: int | None) -> dict[str, dict[str, int]]:
    """Every position of each slider, or so many, moved alone: to the plan, and to its picture, as `wb.what_if` does."""
    from workbench.figures.plan_view import show_plan  # plotly, which a node without a browser may lack

    cluster = Cluster.of("h200", gpus=4)
    settings: dict[str, Any] = {"global_batch": 256, "seq_len": 512}
    show_plan(what_if(costs, cluster, **settings))  # plotly is imported here
    planned, drawn = [], []
    for name, value in itertools.chain.from_iterable(
        ((name, v) for v in values[:positions]) for name, values in MOVES.items()
    ):
        with uncollected():
            started = time.process_time()
            try:
                plan = what_if(costs, cluster, **{**settings, name: value})
            except PlanInfeasible:
                planned.append(time.process_time() - started)
                continue
            planned.append(time.process_time() - started)
            show_plan(plan)
            drawn.append(time.process_time() - started)
    return {
        what: {
            "moves": len(times),
            "median_ms": round(1e3 * statistics.median(times)),
            "longest_ms": round(1e3 * max(times)),
        }
        for what, times in (("plan", planned), ("picture", drawn))
    }


def cold(model: Model) -> None:
    """From nothing kept: the model captured, its blocks measured (where there is a GPU) and planned for; then the
    machine itself, which planning for a GPU of the hardware table does not wait for."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["WORKBENCH_HOME"] = home
        data = wb.data.corpus("demo", vocab_size=model.vocab_size)
        experiment = wb.Experiment(model=model, data=data, global_batch=256, seq_len=512)
        started = time.perf_counter()
        try:
            outcome = wb.plan(experiment).describe()
        except PlanInfeasible as error:
            outcome = str(error)
        print(f"cold plan for this machine: {time.perf_counter() - started:.1f} s: {outcome}", flush=True)
        for file in Path(home, "blocks").glob("*.json"):
            for seconds in json.loads(file.read_text())["seconds"]:
                print("  a probe, s after its start: " + ", ".join(f"{k} {v:.1f}" for k, v in seconds.items()))
        started = time.perf_counter()
        calibration = wb.measure.calibrate()
        print(f"calibration: {time.perf_counter() - started:.1f} s: {calibration}")


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    started = time.process_time()
    return work(), time.process_time() - started


if __name__ == "__main__":
    main()
