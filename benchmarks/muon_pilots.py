"""Train the demo's two models with Muon and with AdamW, at several rates, warm-ups, decays and batches.

    python benchmarks/muon_pilots.py           train what the raw file lacks, then print the table
    python benchmarks/muon_pilots.py --table   print only

Each training is that of `templates/bert_scaling.ipynb` with `preset="demo"` in one process on one core, in fp32, with
one seed: 2 layers × 32 (the base) and 5 × 64, which follows by `wb.models.scaling`. Both optimisers are tuned alike:
the peak rate of the base in steps of sqrt(2) until the best one has a worse one on either side. The larger model is
trained at that rate and its neighbours, which says whether the rule carries it over. The loss is held out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import options
import torch
from width_rule import train

import workbench as wb

BASE, LARGER = (2, 32), (5, 64)
STEPS, BATCH, SEQ_LEN, RANGE = 1500, 64, 16, 0.15
RATES = {"adamw": 7e-3, "muon": 2e-2}
"""Rate of position 0 of each optimiser; position k is that times sqrt(2)**k."""
ADAMW_RATE = 7e-3
DEFAULTS = {"depth_rule": False, "warmup_share": 0.1, "decay": 0.01, "batch": BATCH, "seed": 0, "adamw_position": 0}


def main() -> None:
    parser = options.parser(__doc__, "muon_pilots_1core.json")
    parser.add_argument("--table", action="store_true", help="print only")
    asked = options.parsed(parser)
    torch.set_num_threads(1)
    if not asked.table:
        for algorithm in RATES:
            best = best_position(asked, algorithm)
            for size, position, changes in islice(further(algorithm, best), 1 if asked.tiny else None):
                trained(asked, algorithm, size, position, **changes)
    print(table(read(asked)["runs"]))


def further(algorithm: str, best: int) -> Iterator[tuple[tuple[int, int], int, dict[str, Any]]]:
    """Yield size, position of the rate and what differs of the trainings beside those that found the best rate."""
    for at in (best, best - 1, best + 1):
        yield LARGER, at, {}
    if algorithm == "muon":
        yield LARGER, best, {"depth_rule": True}
    for size in (BASE, LARGER):
        yield size, best, {"warmup_share": 0.02}
        for at in (best, best + 1):
            yield size, at, {"batch": 2 * BATCH}
        if algorithm == "muon":
            for decay in (0.0, 0.1):
                yield size, best, {"decay": decay}
            for adamw_position in (-2, 2):
                yield size, best, {"adamw_position": adamw_position}


def best_position(asked: argparse.Namespace, algorithm: str) -> int:
    """Return the position of the base's best rate, between two that are worse; a trial tries one alone."""
    best = 0
    while True:
        tried = (best,) if asked.tiny else (best - 1, best, best + 1)
        losses = {k: trained(asked, algorithm, BASE, k) for k in tried}
        lowest = min(losses, key=losses.__getitem__)
        if lowest == best:
            return best
        best = lowest


def trained(asked: argparse.Namespace, algorithm: str, size: tuple[int, int], position: int, **changes: Any) -> float:
    """Return the held-out loss of a training, from the raw file if it has been made before."""
    key = {"algorithm": algorithm, "layers": size[0], "width": size[1], "position": position, **DEFAULTS, **changes}
    raw = read(asked)
    for run in raw["runs"]:
        if all(run[name] == value for name, value in key.items()):
            return float(run["held_out_loss"])
    started = time.process_time()
    settings = experiment(2 if asked.tiny else STEPS, **key)
    loss = train(settings)
    loss = loss if math.isfinite(loss) else 1e9
    seconds = round(time.process_time() - started, 1)
    rates = {"rate": settings.learning_rate, "adamw_rate": settings.optimizer.adamw_rate, "steps": settings.steps}
    raw["runs"].append({**key, **rates, "held_out_loss": round(loss, 4), "cpu_seconds": seconds})
    partial = asked.out.with_suffix(".partial")
    partial.write_text(json.dumps(raw, indent=1) + "\n")
    partial.replace(asked.out)
    print(json.dumps(raw["runs"][-1]), flush=True)
    return loss


def read(asked: argparse.Namespace) -> dict[str, Any]:
    if asked.out.exists():
        raw: dict[str, Any] = json.loads(asked.out.read_text())
        return raw
    return {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "runs": []}


def experiment(
    of_one_batch: int,
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
    """Return a training of so many steps of the usual batch: on 1,536,000 tokens, if it is no trial."""
    steps = of_one_batch * BATCH // batch
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
