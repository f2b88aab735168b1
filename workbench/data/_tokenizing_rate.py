"""`TokenizingRate`: the tokens of a text, about, and how many a core makes in a second, measured on excerpts."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workbench.data._encoding import Encoder, EncodingProcess
from workbench.data._text import TextSource

PASSES = 3
"""Measurements of the same excerpts; the fastest counts, because processes that share a core only slow one down."""
HANDING_ON = 1.2
"""Time of a stream over that of encoding its blocks alone: reading, cutting and handing the samples on take the rest.

Fitted to `benchmarks/data_supply.py` on one text and two idle cores, where one core needed 1.23 times the time and two
cores 1.34 times (`benchmarks/results/data_supply_encoding_alone_2cores.json`)."""


@dataclass(frozen=True)
class TokenizingRate:
    """Measurements on the excerpts of a text."""

    tokens: int
    """Estimated tokens of the whole text."""
    tokens_per_core_s: float
    """Tokens of a stream that one core makes in a second, from the text to the samples."""


@functools.lru_cache(maxsize=64)
def tokenizing_rate(folder: Path, open: Callable[[], TextSource], encoder: Encoder) -> TokenizingRate:  # noqa: ARG001
    """Measure the text of a folder of the cache, once in each process."""
    excerpts, share = open().excerpts()
    with EncodingProcess(encoder) as worker:
        ids = worker.encode(excerpts).ids  # the first time loads the library
        seconds = []
        for _ in range(PASSES):
            begun = worker.cpu_seconds() + time.thread_time()
            worker.encode(excerpts)
            seconds.append(worker.cpu_seconds() + time.thread_time() - begun)
    return TokenizingRate(round(len(ids) / share), len(ids) / max(HANDING_ON * min(seconds), 1e-6))
