"""Train the demo's two models with Muon and with AdamW, at several rates, warm-ups, decays and batches.

    python benchmarks/muon_pilots.py           train what the raw file lacks, then print the table
    python benchmarks/muon_pilots.py --table   print only

Each training is that of `templates/bert_scaling.ipynb` with `preset="demo"` in one process on one core, in fp32, with
one seed: 2 layers × 32 (the base) and 5 × 64, which follows by `wb.models.scaling`. Both optimisers are tuned alike:
the peak rate of the base in steps of sqrt(2) until the best one has a worse one on either side. The larger model is
trained at that rate and its neighbours, which says whether the rule carries it over. The loss is held out.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from width_rule import train

import workbench as wb

RAW = Path(__file__).resolve().parent / "results" / "muon_pilots_1core.json"
BASE, LARGER = (2, 32), (5, 64)
STEPS, BATCH, SEQ_LEN, RANGE = 1500, 64, 16, 0.15
RATES = {"adamw": 7e-3, "muon": 2e-2}
"""Rate of position 0 of each optimiser; position k is that times sqrt(2)**k."""
ADAMW_RATE = 7e-3
DEFAULTS = {"depth_rule": False, "warmup_share": 0.1, "decay": 0.01, "batch": BATCH, "seed": 0, "adamw_position": 0}


def main() -> None:
    torch.set_num_threads(1)
    if "--table" not in sys.argv[1:]:
        muon = best_position("muon", BASE, 0)
        for at in (muon, muon - 1, muon + 1):
            trained("muon", LARGER, at)
        trained("muon", LARGER, muon, depth_rule=True)
        for size in (BASE, LARGER):
            trained("muon", size, muon, warmup_share=0.02)
            for at in (muon, muon + 1):
                trained("muon", size, at, batch=2 * BATCH)
            for decay in (0.0, 0.1):
                trained("muon", size, muon, decay=decay)
            for adamw_position in (-2, 2):
                trained("muon", size, muon, adamw_position=adamw_position)
        adamw = best_position("adamw", BASE, 0)
        for at in (adamw, adamw - 1, adamw + 1):
            trained("adamw", LARGER, at)
        for size in (BASE, LARGER):
            trained("adamw", size, adamw, warmup_share=0.02)
            for at in (adamw, adamw + 1):
                trained("adamw", size, at, batch=2 * BATCH)
    print(table(read()["runs"]))


def best_position(algorithm: str, size: tuple[int, int], start: int) -> int:
    """Return the position of the best rate of a model, between two that are worse."""
    best = start
    while True:
        losses = {k: trained(algorithm, size, k) for k in (best - 1, best, best + 1)}
        lowest = min(losses, key=losses.__getitem__)
        if lowest == best:
            return best
        best = lowest


def trained(algorithm: str, size: tuple[int, int], position: int, **changes: Any) -> float:
    """Return the held-out loss of a training, from the raw file if it has been made before."""
    key = {"algorithm": algorithm, "layers": size[0], "width": size[1], "position": position, **DEFAULTS, **changes}
    raw = read()
    for run in raw["runs"]:
        if all(run[name] == value for name, value in key.items()):
            return float(run["held_out_loss"])
    started = time.process_time()
    settings = experiment(**key)
    loss = train(settings)
    loss = loss if math.isfinite(loss) else 1e9
    seconds = round(time.process_time() - started, 1)
    rates = {"rate": settings.learning_rate, "adamw_rate": settings.optimizer.adamw_rate, "steps": settings.steps}
    raw["runs"].append({**key, **rates, "held_out_loss": round(loss, 4), "cpu_seconds": seconds})
    partial = RAW.with_suffix(".partial")
    partial.write_text(json.dumps(raw, indent=1) + "\n")
    partial.replace(RAW)
    print(json.dumps(raw["runs"][-1]), flush=True)
    return loss


def read() -> dict[str, Any]:
    if RAW.exists():
        raw: dict[str, Any] = json.loads(RAW.read_text())
        return raw
    return {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "runs": []}


def experiment(
    algorithm: str,
    layers: int,
    width: int,
    position: int,
    depth_rule: bool,
    warmup_share: float,
    decay: float,
    batch: int,
    seed: int,
    adamw_position: int,
) -> wb.Experiment:
    """Return a training on 1,536,000 tokens."""
    steps = STEPS * BATCH // batch
    options = {"vocab_size": 64, "max_positions": SEQ_LEN, "dropout": 0.0, "layout": "pre_ln", "next_sentence": False}
    base = wb.models.bert(32, 2, 2, initializer_range=RANGE, **options)
    model = dataclasses.replace(wb.models.bert(width, layers, width // 16, **options), name=f"bert-{layers}x{width}")
    rule = wb.models.scaling(base, model, depth_rule=depth_rule, algorithm=algorithm)
    of_muon = {"adamw_rate": ADAMW_RATE * math.sqrt(2) ** adamw_position} if algorithm == "muon" else {}
    return wb.Experiment(
        model=rule.model,
        data=wb.data.corpus("demo", vocab_size=64, masked_share=0.3),
        steps=steps,
        global_batch=batch,
        seq_len=SEQ_LEN,
        learning_rate=RATES[algorithm] * math.sqrt(2) ** position,
        optimizer=wb.Optimizer(
            algorithm,
            warmup_steps=max(1, round(warmup_share * steps)),
            weight_decay=decay,
            **of_muon,
            **rule.optimizer,
        ),
        evaluation=wb.Evaluation(samples=512),
        seed=seed,
    )


def table(runs: list[dict[str, Any]]) -> str:
    """Return the runs as a table in Markdown: what differs from the defaults, and the loss."""
    lines = ["| model | optimiser | rate | what differs | held-out loss |", "|---|---|--:|---|--:|"]
    for run in runs:
        differs = ", ".join(f"{name} {run[name]:g}" for name, value in DEFAULTS.items() if run[name] != value)
        size = f"{run['layers']} × {run['width']}"
        lines.append(f"| {size} | {run['algorithm']} | {run['rate']:.2g} | {differs} | {run['held_out_loss']:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
