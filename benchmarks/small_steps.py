"""Time the steps of small BERTs, whose hosts take longer than a GPU, by this code and another checkout in turn.

    python benchmarks/small_steps.py TEXT --beside ../before --rounds 2 --out small_steps.json

Each round trains each model with each checkout in a process of its own, without evaluations. Written are the median
time of the last three quarters of the steps, in ms, and what each plan predicts. Without a GPU the models are tiny.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import options
import torch

import workbench as wb

MODELS = {"mini adamw": (4, 256), "medium adamw": (8, 512), "medium muon": (8, 512)}
"""Layers and width of each model, with its optimiser behind the name."""
MARK = "measured: "


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("text", help="text file or folder to train on")
    parser.add_argument("--beside", type=Path, help="folder of another checkout; without it, this code is timed alone")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one", action="store_true", help="train in this process, with the package that it imports")
    given = options.parsed(parser)
    if given.one:
        print(MARK + json.dumps({name: trained(name, given.text, 60) for name in MODELS}))
        return
    trees = {"beside": given.beside, "here": options.ROOT} if given.beside else {"here": options.ROOT}
    found: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in trees}
    for _ in range(0 if given.tiny else given.rounds):
        for name, tree in trees.items():
            command = [sys.executable, __file__, given.text, "--one"]
            environment = {**os.environ, "PYTHONPATH": f"{tree.resolve()}:{os.environ.get('PYTHONPATH', '')}"}
            answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
            found[name].append(json.loads(answer.rpartition(MARK)[2]))
            print(name, found[name][-1], flush=True)
    if given.tiny:  # one of them, in this process
        found["here"].append({"medium muon": trained("medium muon", given.text, 8)})
    if given.out:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        given.out.write_text(json.dumps({"device": device, "torch": torch.__version__, **found}, indent=1) + "\n")


def trained(name: str, text: str, trial_steps: int) -> dict[str, float]:
    """Train a model for 400 steps of 128 × 128 tokens, or a tiny one without a GPU, and return its times."""
    (layers, width), (size, algorithm) = MODELS[name], name.split()
    vocab, seq, batch, steps = 30522, 128, 128, 400
    if not torch.cuda.is_available():
        layers, width, vocab, seq, batch, steps = 2, 32, 200, 16, 8, trial_steps
    experiment = wb.Experiment(
        model=wb.models.bert(
            hidden_size=width, num_layers=layers, num_heads=max(1, width // 64), vocab_size=vocab, max_positions=seq,
            layout="pre_ln", next_sentence=False, dropout=0.0, name=size,
        ),
        data=wb.data.corpus(text, vocab_size=vocab, masked_share=0.15),
        steps=steps, global_batch=batch, seq_len=seq, learning_rate=1e-3, name=name.replace(" ", "-"),
        optimizer=wb.Optimizer(algorithm, warmup_steps=steps // 10), checkpoints=wb.Checkpoints(keep=0),
    )  # fmt: skip
    run = wb.runs.debug(experiment)
    step_ms = run.history().step_ms[steps // 4 :]
    return {
        "median_ms": round(statistics.median(step_ms), 2), "predicted_ms": round(run.plan.prediction.step_ms, 2)
    }  # fmt: skip


if __name__ == "__main__":
    main()
