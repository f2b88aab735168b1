"""Batches for measurements of speed: random ones that need no data, or a few samples repeated."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from workbench.tensors import TensorSpec

TOKEN_FIELDS = frozenset({"input_ids", "decoder_input_ids", "labels"})
"""Names of the fields that hold token ids; integers of any other field are 0 or 1."""
IGNORED = -100
"""Label that cross-entropy ignores."""


def random_batch(
    samples: Mapping[str, TensorSpec],
    count: int,
    *,
    vocab_size: int,
    labelled_share: float,
    device: torch.device,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return `count` random samples of the given specs; a fraction `labelled_share` of the labels is not ignored."""
    generator = torch.Generator(device=device).manual_seed(seed)
    batch = {}
    for name, spec in samples.items():
        shape, dtype = (count, *spec.shape), getattr(torch, spec.dtype)
        if dtype.is_floating_point:
            batch[name] = torch.randn(shape, device=device, generator=generator, dtype=torch.float32).to(dtype)
        else:
            high = vocab_size if name in TOKEN_FIELDS else 2
            batch[name] = torch.randint(0, high, shape, device=device, generator=generator).to(dtype)
    if labelled_share < 1 and "labels" in batch:
        ignored = torch.rand(batch["labels"].shape, device=device, generator=generator) >= labelled_share
        batch["labels"] = batch["labels"].masked_fill(ignored, IGNORED)
    return batch


def repeated(examples: Mapping[str, torch.Tensor], count: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return `count` samples, which are those of the batch `examples` in turn."""
    index = torch.arange(count) % len(next(iter(examples.values())))
    return {name: field[index].to(device) for name, field in examples.items()}
