"""The request to the processes that measure a model's blocks: a value without torch, and the names of their files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.tensors import TensorSpec

MAX_BLOCKS_PER_TYPE = 4
"""Blocks of each type that a probe runs."""
REQUEST = "request.pkl"
"""File in the probes' folder that holds the pickled `ProbeRequest`."""
MICRO_BATCH = "-micro-batch.json"
"""Name, after a probe's number, of the file with the micro-batch that it must measure."""
RESULT = "-blocks.json"
"""Name, after a probe's number, of the file with its measurements."""


@dataclass(frozen=True)
class ProbeRequest:
    """A model and its batch, as training would run them."""

    name: str
    build: Callable[[], Any]
    """Function that makes the `nn.Module`."""
    samples: Mapping[str, TensorSpec]
    """Fields of the batch, for one sample."""
    vocab_size: int
    """Number of different random tokens."""
    labelled: float
    """Share of the random labels that are not ignored."""
    precision: str
    compiled: bool
    deterministic: bool
    micro_batches: tuple[int, ...]
    """Expected micro-batch of each probe, which captures and compiles for it before it is told the final one."""
    examples: Mapping[str, Any] | None = None
    """Batch of real samples to repeat instead of random tokens."""
    loss: Any = None
    """Loss among what forward returns: a name, an index, a function of the outputs and the batch, or None."""
