"""Held-out text: runs of consecutive documents, chosen by a hash of their content, that training never reads.

A *run* of documents is the unit of the split, because in many texts each paragraph is a document. The runs with the
lowest hashes are held out, so that the choice depends on the text alone, and more samples hold out more of the same.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.data._tokens import TokenStore
from workbench.errors import DataError

I64 = NDArray[np.int64]

HELD_OUT_SHARE = 0.05
"""Fraction of the tokens that is held out, or more if the evaluation asks for more samples."""
LARGEST_SHARE = 0.5
"""Fraction of the tokens beyond which holding text out is refused."""
RUN_TOKENS = 4096
"""Smallest number of tokens of a run of documents in a large text."""
SMALLEST_RUNS = 200
"""Number of runs that a smaller text is divided into, if its documents are short enough."""


class _SplicedIds:
    """Token ids at positions of a stream that is spliced from segments of a store."""

    def __init__(self, store: TokenStore, starts: I64, offsets: I64) -> None:
        """`starts` are the segments' first tokens in the store, `offsets` their positions in the stream."""
        self._store, self._starts, self._offsets = store, starts, offsets

    def __getitem__(self, position: I64) -> NDArray[Any]:
        segment = np.searchsorted(self._offsets, position, side="right") - 1
        ids: NDArray[Any] = self._store.ids[self._starts[segment] + position - self._offsets[segment]]
        return ids


@dataclass(frozen=True)
class SplicedTokens:
    """Some runs of a tokenised text as one stream, with the properties of a `TokenStore` that samples read."""

    store: TokenStore
    chosen: tuple[int, ...]
    """Indices of the runs, ascending."""

    @property
    def vocabulary(self) -> int:
        return self.store.vocabulary

    @cached_property
    def _spans(self) -> tuple[I64, I64, I64]:
        """First token of each chosen run in the store, its end there, and its offset in the stream."""
        edges, chosen = document_runs(self.store)[0], np.asarray(self.chosen, dtype=np.int64)
        starts, ends = edges[chosen], edges[chosen + 1]
        return starts, ends, np.cumsum(ends - starts) - (ends - starts)

    @cached_property
    def tokens(self) -> int:
        starts, ends, _ = self._spans
        return int((ends - starts).sum())

    @cached_property
    def ids(self) -> _SplicedIds:
        starts, _, offsets = self._spans
        return _SplicedIds(self.store, starts, offsets)

    @cached_property
    def document_starts(self) -> I64:
        """Offsets of the documents in the stream, ascending, the first 0."""
        starts, ends, offsets = self._spans
        documents = np.asarray(self.store.document_starts)
        run = np.searchsorted(starts, documents, side="right") - 1
        is_kept = (run >= 0) & (documents < ends[run])
        return np.asarray(documents[is_kept] - starts[run[is_kept]] + offsets[run[is_kept]])

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self.store, "chosen": self.chosen}


def split(store: TokenStore, name: str, samples: int, width: int) -> tuple[SplicedTokens, SplicedTokens]:
    """Return the text for training and the held-out text, which holds at least `samples` windows of `width` tokens.

    Raises `DataError` if the text is too small for that, or has too few documents.
    """
    edges, hashes = document_runs(store)
    sizes, needed = np.diff(edges), max(samples * width, HELD_OUT_SHARE * store.tokens)
    order = np.argsort(hashes, kind="stable")
    count = int(np.searchsorted(np.cumsum(sizes[order]), needed)) + 1
    if samples * width > LARGEST_SHARE * store.tokens:
        most = int(LARGEST_SHARE * store.tokens) // width
        raise DataError(
            f"{samples:,} held-out samples of {width} tokens need {samples * width:,} of the {store.tokens:,} tokens "
            f"of {name}, more than half. "
            + (f"Ask for at most evaluate=wb.Evaluate(samples={most}), or give" if most else "Give")
            + " other text as eval_data.",
            tokens=store.tokens,
            samples=samples,
        )
    held_out = int(sizes[order[:count]].sum())
    if count >= len(sizes) or held_out > max(LARGEST_SHARE * store.tokens, 2 * needed):
        raise DataError(
            f"{name} has {store.documents:,} document{'s' * (store.documents != 1)} of {store.tokens:,} tokens, too "
            f"few to hold out {int(needed):,} tokens in whole documents. Separate its documents by empty lines, or "
            "give other text as eval_data.",
            documents=store.documents,
            tokens=store.tokens,
        )
    chosen = set(order[:count].tolist())
    kept = tuple(index for index in range(len(sizes)) if index not in chosen)
    return SplicedTokens(store, kept), SplicedTokens(store, tuple(sorted(chosen)))


def document_runs(store: TokenStore) -> tuple[I64, NDArray[np.uint64]]:
    """Return the edges of all runs of documents (one more than runs), and a hash of each run's tokens.

    Both are stored beside the tokens when they are first asked for.
    """
    path = store.folder / "runs.npy"
    try:
        rows = np.load(path)
    except FileNotFoundError:
        rows = _find_runs(store)
        part = path.with_name(f"runs.{os.getpid()}.part.npy")
        np.save(part, rows)
        part.replace(path)
    return rows[0].astype(np.int64), rows[1, :-1]


def _find_runs(store: TokenStore) -> NDArray[np.uint64]:
    least = min(RUN_TOKENS, store.tokens // SMALLEST_RUNS)
    starts = [*np.asarray(store.document_starts).tolist(), store.tokens]
    edges = [0]
    for start in starts[1:]:
        if start - edges[-1] >= max(1, least):
            edges.append(start)
    edges[-1] = store.tokens  # a short rest belongs to the last run
    if len(edges) == 1:
        edges = [0, store.tokens]
    digests = [hashlib.blake2b(store.ids[a:b].tobytes(), digest_size=8).digest() for a, b in pairwise(edges)]
    hashes = [int.from_bytes(digest, "little") for digest in digests]
    return np.asarray([edges, [*hashes, 0]], dtype=np.uint64)
