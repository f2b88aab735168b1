"""Steps whose blocks are recorded as CUDA graphs against the same steps launched kernel by kernel.

    torchrun --nproc_per_node 1 benchmarks/cuda_graphs.py --out graphs.json
    torchrun --nproc_per_node 2 benchmarks/cuda_graphs.py --out graphs.json

Small micro-batches, which a host launches more slowly than a GPU runs them; on several GPUs under every kind of plan
that can be recorded. Both trainers of a case stand side by side and take turns of one step. Written down of each: the
median step, what the host takes to launch it, the allocator's peak until all was recorded, and what the device holds
beside the allocator's memory more than before (graphs, NCCL's buffers); before, what the planner thought. `same` says
whether the losses of the first steps agree to the last bit (with `--deterministic`, they should).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from training import random_batch, trainer_for

import workbench as wb
from workbench.base.units import GIB
from workbench.execution.blocks.cuda_graphs import NCCL_SETTING, WARM_UP_STEPS
from workbench.execution.trainer import Trainer
from workbench.planning.planner import analytic_profile
from workbench.planning.search import what_if
from workbench.runs.launching.supervisor import ALLOCATOR, GROWING

COMPARED = WARM_UP_STEPS + 4
"""Steps, from the first: two as ever, one that is recorded, the others replayed."""


@dataclass(frozen=True)
class Case:
    samples: int
    micro_batch: int
    seq_len: int
    layers: int
    width: int
    fixed: Mapping[str, Any]


LAYER = partial(Case, seq_len=512, layers=8, width=1920)
ALONE = {"pipeline": 1, "data": 1, "tensor": 1}
CASES = {
    1: {
        "BERT-Base, 32 × 128 tokens": Case(32, 32, 128, 12, 768, ALONE),
        "8 layers of scaled BERT, 8 × 1": LAYER(8, 1, fixed=ALONE),
        "the same, selective": LAYER(8, 1, fixed=ALONE | {"recompute": "selective"}),
        "8 layers of scaled BERT, 1 × 32": LAYER(32, 32, fixed=ALONE),
    },
    2: {
        "TP 2, 8 × 2": LAYER(16, 2, fixed=ALONE | {"tensor": 2}),
        "TP 2, 4 × 16": LAYER(64, 16, fixed=ALONE | {"tensor": 2}),
        "PP 2, 8 × 2": LAYER(16, 2, fixed=ALONE | {"pipeline": 2, "schedule": "1f1b"}),
        "PP 2, interleaved, 8 × 2": LAYER(16, 2, fixed=ALONE | {"pipeline": 2, "schedule": "interleaved"}),
        "BERT-Base, DP 2, 32 × 128 tokens": Case(64, 32, 128, 12, 768, ALONE | {"data": 2, "zero": 0}),
        "DP 2, 8 × 2": LAYER(32, 2, fixed=ALONE | {"data": 2, "zero": 0}),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("cuda_graphs.json"))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="of no interest but to see that this runs")
    arguments = parser.parse_args()
    os.environ.setdefault(ALLOCATOR[0], GROWING)  # as our runs are launched
    os.environ.setdefault(*NCCL_SETTING)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rows = []
    for name, case in ((n, c) for n, c in CASES[dist.get_world_size()].items() if arguments.only in n):
        if arguments.tiny:
            case = replace(case, samples=4 * case.micro_batch, seq_len=32, layers=4, width=64)
        rows.append({"case": name} | _compared(case, device, arguments))
        torch._dynamo.reset()
        if dist.get_rank() == 0:
            print(_line(rows[-1]), flush=True)
            arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


def _compared(case: Case, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    experiment = _experiment(case, arguments)
    cluster = wb.Cluster.of("h200", gpus=dist.get_world_size())
    costs = analytic_profile(experiment, cluster)
    sizes = {"global_batch": experiment.global_batch, "seq_len": experiment.seq_len, "micro_batch": case.micro_batch}
    asked = {"recompute": "none"} | dict(case.fixed) | sizes
    found: dict[str, Any] = {}
    trainers: dict[str, Trainer] = {}
    losses: dict[str, list[float]] = {}
    for name, cuda_graphs in (("launched", False), ("recorded", True)):
        gc.collect()  # what the last trainer was made of
        before = _held(device)
        plan = what_if(costs, cluster, cuda_graphs=cuda_graphs, **asked)
        trainer = trainers[name] = trainer_for(experiment, plan, device)
        gc.collect()
        found[name] = {"predicted_ms": plan.prediction.step_ms, "predicted_gib": plan.peak_bytes / GIB}
        batches = [random_batch(experiment, trainer.samples, _seed(trainer, step), device) for step in range(COMPARED)]
        begun = time.perf_counter()
        losses[name] = [float(trainer.step(step, batch).scalars[0]) for step, batch in enumerate(batches)]
        found[name]["first_steps_s"] = time.perf_counter() - begun
        if device.type == "cuda":
            found[name]["peak_gib"] = (torch.cuda.max_memory_allocated() - before[0]) / GIB
            found[name]["beside_gib"] = (_held(device)[1] - before[1]) / GIB
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in trainers}
    for step in range(COMPARED, COMPARED + arguments.steps):
        for name, trainer in trainers.items():
            times[name].append(_timed(trainer, step, batches[-1], device))
    for name, taken in times.items():
        found[name]["ms"], found[name]["host_ms"] = map(statistics.median, zip(*taken, strict=True))
    return found | {"same": losses["launched"] == losses["recorded"]}


def _experiment(case: Case, arguments: argparse.Namespace) -> wb.Experiment:
    tiny = {"vocab_size": 512, "max_positions": 64} if arguments.tiny else {}
    model = wb.models.bert(hidden_size=case.width, num_layers=case.layers, num_heads=case.width // 64, **tiny)
    data = wb.data.corpus("demo", vocab_size=model.vocab_size)
    return wb.Experiment(
        model=model,
        data=data,
        steps=1000,
        global_batch=case.samples,
        seq_len=case.seq_len,
        numerics={"deterministic": arguments.deterministic},
    )


def _seed(trainer: Trainer, step: int) -> int:
    return 1000 * trainer.coordinate.data_rank + step


def _timed(trainer: Trainer, step: int, batch: dict[str, torch.Tensor], device: torch.device) -> tuple[float, float]:
    """Milliseconds of a step, and of its launches."""
    _wait(device)
    dist.barrier()
    begun = time.perf_counter()
    trainer.step(step, batch)
    launched = time.perf_counter()
    _wait(device)
    return 1e3 * (time.perf_counter() - begun), 1e3 * (launched - begun)


def _held(device: torch.device) -> tuple[int, int]:
    """Bytes of the allocator's tensors, of which a new peak begins, and of the device beside the allocator's memory."""
    if device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free - torch.cuda.memory_reserved()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _line(row: Mapping[str, Any]) -> str:
    launched, recorded = row["launched"], row["recorded"]
    words = [f"{row['case']:34s}"]
    for name, of in (("launched", launched), ("recorded", recorded)):
        words.append(f"{name} {of['ms']:.1f} ms (host {of['host_ms']:.1f}, predicted {of['predicted_ms']:.1f})")
    return ", ".join([*words, f"{launched['ms'] / recorded['ms']:.2f} ×, same {row['same']}"])


if __name__ == "__main__":
    main()
