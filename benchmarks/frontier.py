"""Memory against speed of GPT-3 13B on 4 × H200, predicted: the picture of `docs/grids.md`.

    python benchmarks/frontier.py [--out FILE]

A grid of ZeRO stages, places of the optimiser's state and activation checkpointing, and the fastest plan for each of
twelve memory limits. Writes every point to FILE (by default results/frontier_predicted.json). No GPU is needed.
"""

from __future__ import annotations

import json
from typing import Any

import options

import workbench as wb

MODEL = wb.models.gpt2(5120, 40, 40, vocab_size=50304, max_positions=2048, name="gpt3-13b")
TINY = wb.models.gpt2(64, 2, 2, vocab_size=300, max_positions=64)
CLUSTER = wb.Cluster.of("h200", gpus=4)


def main() -> None:
    asked = options.parsed(options.parser(__doc__, "frontier_predicted.json"))
    sizes = {"model": TINY, "seq_len": 64} if asked.tiny else {"model": MODEL, "seq_len": 2048}
    data = wb.data.corpus("demo", **({"vocab_size": 300} if asked.tiny else {}))
    experiment = wb.Experiment(data=data, global_batch=32, **sizes)
    axes: dict[str, Any] = {
        "zero": [0, 1, 3],
        "offload_optimizer": [False, True],
        "recompute": ["none", "selective", "full"],
    }
    grid = wb.grid(experiment, CLUSTER, **axes)
    print(grid)
    fastest = wb.search(experiment, CLUSTER).frontier()
    for plan in fastest:
        print(plan)
    rows = [
        {"limit_bytes": p.memory_limit_bytes, "peak_bytes": p.peak_bytes, "step_ms": p.prediction.step_ms}
        | {"host_bytes": p.host_bytes, "plan": p.division()}
        for p in fastest
    ]
    asked.out.write_text(json.dumps({"grid": grid.rows(), "fastest_for_each_limit": rows}, indent=1))
    options.save_picture(wb.figures.frontier(grid), "frontier", asked, width=860)


if __name__ == "__main__":
    main()
