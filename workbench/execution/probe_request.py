"""What a block probe is asked for: a value without torch, so that who asks need not import it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.tensors import TensorSpec

KEPT = 4
"""Blocks of each kind that a probe runs."""


@dataclass(frozen=True)
class Request:
    """A model and its batch, as training would run them."""

    build: Callable[[], Any]
    """Makes the `nn.Module`."""
    samples: Mapping[str, TensorSpec]
    """Fields of the batch, for one sample."""
    vocab_size: int
    labelled: float
    """Share of the labels that are not ignored."""
    precision: str
    compiled: bool
