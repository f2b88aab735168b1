"""Grids of plans for GPT-3 1.3B on 4 × H200 and on 64 × V100 with 16 GB, predicted: the pictures of `docs/grids.md`.

    python benchmarks/grids.py [--out FILE]

Prints what each grid says and the processor time that it took, writes every cell to FILE (by default
results/grids_predicted.json) and draws the pictures. It needs kaleido and a Chrome or Chromium, but no GPU.

The vocabulary is padded to 50,304 rows, as Megatron-LM pads it, so that tensor parallelism divides the head. A V100 has
no bf16, in which Workbench trains: its matrix products are priced at the fp16 rate of the data sheet, in which
Megatron-LM trains on it. The choices that Megatron-LM did not have then are fixed: no ZeRO, no CUDA graphs, 1F1B.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import options

import workbench as wb
from workbench.cost.hardware import V100_16

MODEL = wb.models.gpt2(2048, 24, 16, vocab_size=50304, max_positions=2048, name="gpt3-1.3b")
EXPERIMENT = wb.Experiment(model=MODEL, data=wb.data.corpus("demo"), global_batch=512, seq_len=2048)
"""GPT-3 1.3B with the batch of a million tokens that its authors trained it with (arXiv:2005.14165, table 2.1)."""
AS_MEGATRON: dict[str, Any] = {"zero": 0, "schedule": "1f1b", "offload_optimizer": False, "cuda_graphs": False}
H200 = wb.Cluster.of("h200", gpus=4)
V100 = replace(
    wb.Cluster.of("v100-16gb", gpus=64),
    device=replace(V100_16, peak_flops={**V100_16.peak_flops, "bf16": V100_16.peak_flops["fp16"]}),
)
MICRO_BATCHES = [1, 2, 4, 8, 16]
GRIDS: dict[str, tuple[wb.Cluster, dict[str, Any]]] = {
    "grid-h200": (H200, {"tensor": [1, 2, 4], "pipeline": [1, 2, 4], "micro_batch": [*MICRO_BATCHES, 32]}),
    "grid-v100": (
        V100,
        {**AS_MEGATRON, "tensor": [1, 2, 4, 8], "pipeline": [1, 2, 4, 8, 16], "micro_batch": MICRO_BATCHES},
    ),
    "grid-h200-200-cells": (
        H200,
        {"tensor": [1, 2, 4], "pipeline": [1, 2, 4], "micro_batch": MICRO_BATCHES, "recompute": ["none", "full"]}
        | {"zero": [0, 1, 3]},
    ),
    "grid-v100-200-cells": (
        V100,
        {**AS_MEGATRON, "tensor": [1, 2, 4, 8], "pipeline": [1, 2, 4, 8, 16], "micro_batch": MICRO_BATCHES}
        | {"recompute": ["none", "full"]},
    ),
}
"""Cluster and axes of each grid; the first two are drawn."""


def main() -> None:
    asked = options.parsed(options.parser(__doc__, "grids_predicted.json"))
    experiment, grids = EXPERIMENT, GRIDS
    if asked.tiny:
        model = wb.models.gpt2(64, 2, 2, vocab_size=300, max_positions=64)
        data = wb.data.corpus("demo", vocab_size=300)
        experiment = EXPERIMENT.replace(model=model, data=data, global_batch=16, seq_len=64)
        grids = {"grid-h200": (H200, {"tensor": [1, 2], "micro_batch": [1, 2]})}
    results, drawn = {}, {}
    wb.planning.profile(experiment, H200)  # the first capture of a process also imports torch and transformers
    for name, (cluster, axes) in grids.items():
        started = time.process_time()
        grid = wb.grid(experiment, cluster, **axes)
        took_s = time.process_time() - started
        print(f"{name}: {len(grid)} cells in {took_s:.1f} s of processor time, capture included", flush=True)
        print(grid, "\n")
        results[name] = {
            "processor_s": round(took_s, 2),
            "sentences": [grid.headline(), *grid.sentences()],
            "cells": grid.rows(),
        }
        if "cells" not in name:
            drawn[name] = wb.figures.heat_map(grid)
    asked.out.write_text(json.dumps(results, indent=1))
    for name, figure in drawn.items():
        options.save_picture(figure, name, asked, width=1000)


if __name__ == "__main__":
    main()
