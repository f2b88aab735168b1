"""How long planning takes, on this machine's CPU and without any GPU.

    python benchmarks/planning_time.py

Prints capture, profile and search for BERT-Large, scaled BERT (54 × 1920) and a GPT of 100 billion parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from workbench import models
from workbench.capture import build_meta, capture
from workbench.cost import Cluster, profile
from workbench.models import Model
from workbench.planning import search
from workbench.tensors import TensorSpec

Result = TypeVar("Result")

FIELDS = {
    "mlm_nsp": ("input_ids", "token_type_ids", "labels"),
    "mlm": ("input_ids", "token_type_ids", "labels"),
    "clm": ("input_ids", "labels"),
}


def main() -> None:
    print("| model | cluster | capture | profile | search | options | plan |")
    print("|---|---|--:|--:|--:|--:|---|")
    scaled = models.bert(hidden_size=1920, num_layers=54, num_heads=30)
    gpt = models.gpt2(hidden_size=10240, num_layers=80, num_heads=80, max_positions=2048, name="gpt-100b")
    row(models.bert_large(), 4, 512, 512)
    row(scaled, 4, 256, 512)
    row(scaled, 1024, 4096, 512)
    row(gpt, 1024, 2048, 2048)


def row(model: Model, gpus: int, global_batch: int, seq_len: int) -> None:
    cluster = Cluster.of("h200", gpus=gpus)
    batch = {name: TensorSpec(name, (2, seq_len), "int64") for name in FIELDS[model.objective]}
    if model.objective == "mlm_nsp":
        batch["next_sentence_label"] = TensorSpec("next_sentence_label", (2,), "int64")
    graph, capture_s = timed(lambda: capture(build_meta(model.build), batch, name=model.name))
    costs, profile_s = timed(lambda: profile(graph, cluster.device, "bf16", compiled=True))
    plan, search_s = timed(
        lambda: search(costs, global_batch=global_batch, seq_len=seq_len, precision="bf16", cluster=cluster)
    )
    seconds = " | ".join(f"{s:.2f} s" for s in (capture_s, profile_s, search_s))
    print(
        f"| {model.name} | {cluster.describe()} | {seconds} | {len(plan.candidates)} | {plan.describe()} |", flush=True
    )


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    started = time.perf_counter()
    return work(), time.perf_counter() - started


if __name__ == "__main__":
    main()
