"""Batches that measurements of speed run on: without any data, or of a few samples again and again."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from workbench.tensors import TensorSpec

WORDS = frozenset({"input_ids", "decoder_input_ids", "labels"})
"""Fields that number words of the vocabulary; any other integer is 0 or 1."""
IGNORED = -100
"""The label that cross-entropy passes over."""


def random_batch(
    samples: Mapping[str, TensorSpec],
    count: int,
    *,
    vocab_size: int,
    labelled: float,
    device: torch.device,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """`count` random samples of the given specs; a share `labelled` of the word labels stands, the rest is ignored."""
    generator = torch.Generator(device=device).manual_seed(seed)
    found = {}
    for name, spec in samples.items():
        shape, dtype = (count, *spec.shape), getattr(torch, spec.dtype)
        if dtype.is_floating_point:
            found[name] = torch.randn(shape, device=device, generator=generator, dtype=torch.float32).to(dtype)
        else:
            high = vocab_size if name in WORDS else 2
            found[name] = torch.randint(0, high, shape, device=device, generator=generator).to(dtype)
    if labelled < 1 and "labels" in found:
        passed_over = torch.rand(found["labels"].shape, device=device, generator=generator) >= labelled
        found["labels"] = found["labels"].masked_fill(passed_over, IGNORED)
    return found


def repeated(examples: Mapping[str, torch.Tensor], count: int, device: torch.device) -> dict[str, torch.Tensor]:
    """`count` samples: those of the batch `examples` in turn."""
    turn = torch.arange(count) % len(next(iter(examples.values())))
    return {name: field[turn].to(device) for name, field in examples.items()}
