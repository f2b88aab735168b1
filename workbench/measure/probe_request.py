"""What a block probe is asked for: a value without torch, so that who asks need not import it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.tensors import TensorSpec

KEPT = 4
"""Blocks of each kind that a probe runs."""
REQUEST = "request.pkl"
MICRO_BATCH = "-micro-batch.json"
RESULT = "-blocks.json"
"""Files of a folder of probes: what is asked of all; after its number, what one is told, and what it found."""


@dataclass(frozen=True)
class ProbeRequest:
    """A model and its batch, as training would run them."""

    name: str
    build: Callable[[], Any]
    """Makes the `nn.Module`."""
    samples: Mapping[str, TensorSpec]
    """Fields of the batch, for one sample."""
    vocab_size: int
    labelled: float
    """Of random tokens: how many there are, and the share of the labels that are not ignored."""
    precision: str
    compiled: bool
    deterministic: bool
    micro_batches: tuple[int, ...]
    """The micro-batch that each probe will most likely be told: it captures and compiles for it meanwhile."""
    examples: Mapping[str, Any] | None = None
    """A batch of real samples to repeat instead of random tokens."""
