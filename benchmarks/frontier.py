"""Memory against speed of GPT-3 13B on 4 × H200, predicted: the picture of `docs/grids.md`.

    python benchmarks/frontier.py [--out FILE]

A grid of ZeRO stages, places of the optimiser's state and activation checkpointing, and the fastest plan for each of
twelve memory limits. Writes every point to FILE (by default results/frontier_predicted.json). No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import workbench as wb

ROOT = Path(__file__).resolve().parents[1]
MODEL = wb.models.gpt2(5120, 40, 40, vocab_size=50304, max_positions=2048, name="gpt3-13b")
EXPERIMENT = wb.Experiment(model=MODEL, data=wb.data.corpus("demo"), global_batch=32, seq_len=2048)
CLUSTER = wb.Cluster.of("h200", gpus=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "frontier_predicted.json")
    out = parser.parse_args().out
    axes = {"zero": [0, 1, 3], "offload_optimizer": [False, True], "recompute": ["none", "selective", "full"]}
    grid = wb.grid(EXPERIMENT, CLUSTER, **axes)
    print(grid)
    fastest = wb.search(EXPERIMENT, CLUSTER).frontier()
    for plan in fastest:
        print(plan)
    rows = [
        {"limit_bytes": p.memory_limit_bytes, "peak_bytes": p.peak_bytes, "step_ms": p.prediction.step_ms}
        | {"host_bytes": p.host_bytes, "plan": p.division()}
        for p in fastest
    ]
    out.write_text(json.dumps({"grid": grid.rows(), "fastest_for_each_limit": rows}, indent=1))
    wb.figures.frontier(grid).save(ROOT / "docs" / "pictures" / "frontier.png", width=860, scale=1.5)


if __name__ == "__main__":
    main()
