"""`TokenizingRate`: the tokens of a text, about, and how many a core makes in a second, measured on excerpts."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workbench.data._encoding import Encoder, Worker
from workbench.data._text import TextSource


@dataclass(frozen=True)
class TokenizingRate:
    """Measurements on the excerpts of a text."""

    tokens: int
    """Estimated tokens of the whole text."""
    tokens_per_core_s: float
    """Tokens per second of processor time, of the process that tokenises and of the one that feeds it together."""


@functools.lru_cache(maxsize=64)
def tokenizing_rate(folder: Path, open: Callable[[], TextSource], encoder: Encoder) -> TokenizingRate:  # noqa: ARG001
    """Measure the text of a folder of the cache, once in each process."""
    excerpts, share = open().excerpts()
    with Worker(encoder) as worker:
        worker.encode(excerpts)  # the first time loads the library
        begun = worker.cpu_seconds() + time.thread_time()
        ids = worker.encode(excerpts).ids
        seconds = worker.cpu_seconds() + time.thread_time() - begun
    return TokenizingRate(round(len(ids) / share), len(ids) / max(seconds, 1e-6))
