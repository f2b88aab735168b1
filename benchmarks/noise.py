"""How far rounding, other draws of dropout and another seed move the loss of a step: the table of docs/analysis.md.

    python benchmarks/noise.py       # writes results/noise_1core.json; 15 minutes of a core

Small models train in a loop of plain PyTorch in fp32 on text of bytes. Rounding: the batch is whole or in two
micro-batches, without dropout. Draws: weights and samples are the same, and dropout draws from another seed. Seeds:
weights, order of the samples and dropout are of another seed. Each number is a standard deviation of the loss of one
step; that of seeds holds how batches differ.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import options
import torch

RUNS = 6
"""Draws, and seeds, of each model."""
STEPS = (1, 10, 100)
SEQ, LEARNING_RATE = 32, 1e-3
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "GPT-2, 2 × 32, 8 samples": ("gpt2", {"hidden_size": 32, "num_layers": 2, "num_heads": 2}, 8),
    "GPT-2, 2 × 32, 64 samples": ("gpt2", {"hidden_size": 32, "num_layers": 2, "num_heads": 2}, 64),
    "GPT-2, 4 × 128, 8 samples": ("gpt2", {"hidden_size": 128, "num_layers": 4, "num_heads": 4}, 8),
    "OPT, 2 × 64, 16 samples": ("opt", {"hidden_size": 64, "num_layers": 2, "num_heads": 2}, 16),
    "BERT, 2 × 64, 16 samples": ("bert", {"hidden_size": 64, "num_layers": 2, "num_heads": 2}, 16),
    "BERT, 2 × 64, 4 samples": ("bert", {"hidden_size": 64, "num_layers": 2, "num_heads": 2}, 4),
}
"""Architecture, its sizes, and samples of a step."""


def main() -> None:
    asked = options.parsed(options.parser(__doc__, "noise_1core.json"))
    torch.set_num_threads(1)
    text = "".join(file.read_text() for file in sorted((options.ROOT / "docs").glob("*.md")))
    data = torch.tensor(list(text.encode()))
    steps, runs = ((1, 2), 2) if asked.tiny else (STEPS, RUNS)
    found: dict[str, Any] = {"runs": runs, "steps": steps, "models": {}}
    for name, (family, sizes, batch) in list(MODELS.items())[: 1 if asked.tiny else None]:
        losses = partial(trained, family, sizes, batch, data, steps)
        scatter = {
            "rounding": [losses(dropout=0.0), losses(dropout=0.0, parts=2)],
            "draws": [losses(draw=draw) for draw in range(runs)],
            "seeds": [losses(draw=seed, seed=seed) for seed in range(runs)],
        }
        found["models"][name] = {
            kind: [float(f"{value:.3g}") for value in np.std(each, axis=0, ddof=1)] for kind, each in scatter.items()
        }
        print(name, found["models"][name], flush=True)
        Path(asked.out).write_text(json.dumps(found, indent=1) + "\n")


def trained(
    family: str,
    sizes: dict[str, Any],
    batch: int,
    data: torch.Tensor,
    steps: Sequence[int],
    *,
    dropout: float = 0.1,
    seed: int = 0,
    draw: int = 0,
    parts: int = 1,
) -> np.ndarray:
    """Return the loss of some steps; the batch is divided into so many parts, whose gradients are added."""
    from workbench import models

    more = {"next_sentence": False} if family == "bert" else {}
    made = getattr(models, family)(**sizes, vocab_size=256, max_positions=SEQ, dropout=dropout, **more)
    torch.manual_seed(seed)
    model = made.build().train()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    order = torch.Generator().manual_seed(seed)
    torch.manual_seed(1000 + draw)
    losses = []
    for _ in range(max(steps)):
        starts = torch.randint(len(data) - SEQ, (batch,), generator=order)
        ids = torch.stack([data[at : at + SEQ] for at in starts])
        hidden = torch.rand(ids.shape, generator=order) < 0.15
        fields = (
            {"input_ids": ids.masked_fill(hidden, 0), "labels": ids.masked_fill(~hidden, -100)}
            if family == "bert"
            else {"input_ids": ids, "labels": ids}
        )
        optimizer.zero_grad()
        labels, total = int((fields["labels"][:, 1:] != -100).sum()) if family != "bert" else int(hidden.sum()), 0.0
        for part in range(parts):
            rows = {key: value.chunk(parts)[part] for key, value in fields.items()}
            own = rows["labels"] if family == "bert" else rows["labels"][:, 1:]
            loss = model(**rows).loss * int((own != -100).sum()) / labels  # of a mean over all labels of the batch
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return np.array([losses[step - 1] for step in steps])


if __name__ == "__main__":
    main()
