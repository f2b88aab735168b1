"""Train a small GPT-2 on the demo text, and keep the events from which docs/pictures/samples.png is drawn.

    python benchmarks/samples.py

It takes a minute on two idle cores, and writes benchmarks/samples.jsonl.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import workbench as wb

EVENTS = Path(__file__).with_suffix(".jsonl")
KEPT = ("start", "step", "evaluation", "samples")


def accuracy(outputs: Any, batch: Any) -> Any:
    """Count the tokens that are predicted from those before them."""
    correct = outputs.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]
    return correct.sum(), correct.numel()


def main() -> None:
    experiment = wb.Experiment(
        model=wb.models.gpt2(vocab_size=2000, hidden_size=64, num_layers=2, num_heads=4, max_positions=48),
        data=wb.data.corpus("demo", vocab_size=2000),
        steps=240,
        global_batch=8,
        seq_len=48,
        learning_rate=1e-2,
        evaluate=wb.Evaluate(every=30, samples=32),
        metrics={"accuracy": accuracy},
        samples=wb.Samples(prompts=["The people of the United States"], every=40, tokens=20),
        log_every=2,
    )
    run = wb.launch(experiment, wb.plan(experiment, wb.local_cluster(1), micro_batch=8))
    run.wait()
    events = [event for event in run.events() if event["type"] in KEPT]
    EVENTS.write_text("".join(json.dumps(event) + "\n" for event in events))
    print(run.samples())


if __name__ == "__main__":
    main()
