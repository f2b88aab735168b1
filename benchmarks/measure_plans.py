"""Measure chosen plans of one model on the GPUs of this node (or on gloo processes), one after the other.

    torchrun --nproc_per_node 4 benchmarks/measure_plans.py --model scaled --seq-len 512 --global-batch 256 \\
        --out scaled.json  1,4,3,32  1,4,0,16  2,2,0,8  4,1,0,8  1,4,3,32,full

A plan is `pipeline,data,zero,micro_batch[,none|selective|full]`; stages are cut by the planner's own partition.
Random tokens; AdamW included; the median step after warm-up, the peak of the allocator, and the seconds from building
to the end of the first step.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import workbench as wb
from workbench import api
from workbench.execution.build import build_model, build_stage, capture_for
from workbench.execution.context import StepContext
from workbench.execution.mesh import Place
from workbench.execution.trainer import Trainer
from workbench.planning.plan import Plan
from workbench.units import GIB

MODELS = {
    "tiny": lambda **o: wb.models.bert(hidden_size=64, num_layers=6, num_heads=4, vocab_size=1024, **o),
    "large": lambda **o: wb.models.bert_large(**o),
    "scaled": lambda **o: wb.models.bert(hidden_size=1920, num_layers=54, num_heads=30, **o),
    "4.8b": lambda **o: wb.models.bert(hidden_size=2560, num_layers=60, num_heads=40, **o),
}


def main() -> None:
    arguments = _arguments()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    rows = []
    for text in arguments.plans:
        rows.append(_measured(text, arguments, device))
        if dist.get_rank() == 0:
            print(json.dumps(rows[-1]), flush=True)
            Path(arguments.out).write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="scaled")
    parser.add_argument("--layout", choices=("post_ln", "pre_ln"), default="post_ln")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--global-batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", default="plans.json")
    parser.add_argument("plans", nargs="+")
    return parser.parse_args()


def _measured(text: str, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One row; a plan that fails is a row with its error."""
    started = time.perf_counter()
    row: dict[str, Any] = {"plan": text, "model": arguments.model, "seq_len": arguments.seq_len}
    row |= {"global_batch": arguments.global_batch, "world": dist.get_world_size()}
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        experiment = _experiment(arguments)
        plan = _plan(text, experiment, device)
        row |= {"predicted_ms": plan.prediction.step_ms, "predicted_gib": plan.peak_bytes / GIB}
        trainer = _trainer(experiment, plan, device)
        times = _times(trainer, experiment, arguments.steps, device, row, started)
    except torch.OutOfMemoryError as error:
        return {**row, "error": f"out of memory: {str(error).splitlines()[0]}"}
    step_s = statistics.median(times)
    row |= {"step_ms": step_s * 1e3, "tokens_per_s": experiment.tokens_per_step / step_s}
    if device.type == "cuda":
        peak = torch.tensor(float(torch.cuda.max_memory_allocated()), device=device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        row["peak_gib"] = peak.item() / GIB
    return row


def _experiment(arguments: argparse.Namespace) -> wb.Experiment:
    model = MODELS[arguments.model](layout=arguments.layout, dropout=arguments.dropout)
    data = wb.data.corpus("demo", vocab_size=model.vocab_size)
    return wb.Experiment(
        model=model,
        data=data,
        steps=1000,
        global_batch=arguments.global_batch,
        seq_len=arguments.seq_len,
        compile=False if arguments.no_compile else None,
    )


def _plan(text: str, experiment: wb.Experiment, device: torch.device) -> Plan:
    pipeline, data, zero, micro_batch, *rest = text.split(",")
    cluster = wb.Cluster.of("h200", gpus=dist.get_world_size()) if device.type == "cuda" else wb.Cluster.here()
    return api.plan(
        experiment,
        cluster,
        pipeline=int(pipeline),
        data=int(data),
        zero=int(zero),
        micro_batch=int(micro_batch),
        recompute=rest[0] if rest else "none",
    )


def _trainer(experiment: wb.Experiment, plan: Plan, device: torch.device) -> Trainer:
    context = StepContext(experiment.seed, device)
    size = 4 * sum(stage.parameters for stage in plan.stages)
    model = build_model(experiment.model.build, size, device, experiment.seed)
    graph = capture_for(plan, model, experiment.data.batch_specs(experiment))
    names = ("pp", "dp_shard" if plan.zero else "dp_replicate")
    place = Place.on(init_device_mesh(device.type, (plan.pipeline, plan.data), mesh_dim_names=names))
    half = plan.precision == "bf16"
    stage = build_stage(
        plan,
        place.pipeline_rank,
        model,
        graph,
        context,
        compile=device.type == "cuda" and experiment.compile is not False,
        autocast=lambda: torch.autocast(device.type, torch.bfloat16) if half else contextlib.nullcontext(),
    )
    del model
    trainer = Trainer(experiment, plan, graph, stage, context, place)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return trainer


def _times(
    trainer: Trainer,
    experiment: wb.Experiment,
    steps: int,
    device: torch.device,
    row: dict[str, Any],
    started: float,
) -> list[float]:
    batch = _random_batch(trainer, experiment, device)
    times = []
    for step in range(steps + 2):
        _wait(device)
        begun = time.perf_counter()
        result = trainer.step(step, batch)
        _wait(device)
        times.append(time.perf_counter() - begun)
        if step == 0:
            row["start_to_first_step_s"] = time.perf_counter() - started
    row["loss"] = result.scalars[0].item()
    return times[2:]


def _random_batch(trainer: Trainer, experiment: wb.Experiment, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(trainer.place.data_rank)
    found = {}
    for name, spec in experiment.data.batch_specs(experiment).items():
        high = experiment.model.vocab_size if name in ("input_ids", "labels") else 2
        size = (trainer.samples, *spec.shape)
        found[name] = torch.randint(0, high, size, device=device, generator=generator)
    masked = torch.rand(found["labels"].shape, device=device, generator=generator) > 0.15
    found["labels"][masked] = -100
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


if __name__ == "__main__":
    main()
