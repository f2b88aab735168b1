"""Held-out text: runs of consecutive documents, chosen by a hash of their content, that training never reads.

A *run* of documents is the unit of the split, because in many texts each paragraph is a document. The runs with the
lowest hashes are held out, so that the choice depends on the text alone, and more samples hold out more of the same.

A stream does not know the other hashes. Text that is read in the order of a stream holds out each document whose own
hash lies below a threshold, whether it is streamed or stored.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
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


HASHED_TOKENS = 1024
"""Number of tokens at the beginning of a document whose hash decides whether a stream holds it out."""
_THRESHOLD = int(HELD_OUT_SHARE * 2**64)


def is_held_out(beginning: NDArray[Any]) -> bool:
    """Return True if a stream holds out the document with these first tokens, `HASHED_TOKENS` of them at most."""
    return int.from_bytes(hashlib.blake2b(beginning.tobytes(), digest_size=8).digest(), "little") < _THRESHOLD


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
class SplicedTokens(ABC):
    """Parts of a tokenised text as one stream, with the properties of a `TokenStore` that samples read."""

    store: TokenStore

    @property
    def vocabulary(self) -> int:
        return self.store.vocabulary

    @abstractmethod
    def _parts(self) -> tuple[I64, I64]:
        """Return the first token of each part in the store, and its end there."""

    @cached_property
    def _spans(self) -> tuple[I64, I64, I64]:
        """First token of each part in the store, its end there, and its offset in the stream."""
        starts, ends = self._parts()
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
        return {name: value for name, value in self.__dict__.items() if name in self.__dataclass_fields__}


@dataclass(frozen=True)
class ChosenRuns(SplicedTokens):
    """Some runs of documents."""

    chosen: tuple[int, ...]
    """Indices of the runs, ascending."""

    def _parts(self) -> tuple[I64, I64]:
        edges, chosen = document_runs(self.store)[0], np.asarray(self.chosen, dtype=np.int64)
        return edges[chosen], edges[chosen + 1]


@dataclass(frozen=True)
class DocumentsByHash(SplicedTokens):
    """The documents that a stream holds out, or all others."""

    held_out: bool

    def _parts(self) -> tuple[I64, I64]:
        starts = np.asarray(self.store.document_starts)
        is_wanted = held_out_documents(self.store) == self.held_out
        begins = np.flatnonzero(is_wanted & ~np.concatenate([[False], is_wanted[:-1]]))
        ends = np.flatnonzero(is_wanted & ~np.concatenate([is_wanted[1:], [False]])) + 1
        return starts[begins], np.append(starts, self.store.tokens)[ends]


def held_out_documents(store: TokenStore) -> NDArray[np.bool_]:
    """Return True for each document that a stream holds out; stored beside the tokens when first asked for."""

    def find() -> NDArray[np.bool_]:
        starts = np.asarray(store.document_starts)
        ends = np.minimum(np.append(starts[1:], store.tokens), starts + HASHED_TOKENS)
        return np.fromiter((is_held_out(store.ids[a:b]) for a, b in zip(starts, ends, strict=True)), np.bool_)

    return _beside(store, "held_out", find)


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
    return ChosenRuns(store, kept), ChosenRuns(store, tuple(sorted(chosen)))


def split_as_streamed(store: TokenStore, name: str) -> tuple[SplicedTokens, SplicedTokens]:
    """Return the text for training and the held-out text as a stream divides them.

    Raises `DataError` if either is empty.
    """
    held_out = held_out_documents(store)
    if held_out.all() or not held_out.any():
        raise none_held_out(name, documents=store.documents)
    return DocumentsByHash(store, False), DocumentsByHash(store, True)


def none_held_out(name: str, **facts: Any) -> DataError:
    """Return the error for a text of which a stream holds out too little."""
    return DataError(
        f"{name} has too few documents to hold {HELD_OUT_SHARE:.0%} of them out by their hashes. Separate its "
        "documents by empty lines, ask for fewer samples in wb.Evaluate, or give other text as eval_data.",
        **facts,
    )


def document_runs(store: TokenStore) -> tuple[I64, NDArray[np.uint64]]:
    """Return the edges of all runs of documents (one more than runs), and a hash of each run's tokens.

    Both are stored beside the tokens when they are first asked for.
    """
    rows = _beside(store, "runs", lambda: _find_runs(store))
    return rows[0].astype(np.int64), rows[1, :-1]


def _beside(store: TokenStore, name: str, find: Callable[[], NDArray[Any]]) -> NDArray[Any]:
    """Return an array that is stored beside the tokens, after finding it if it is not there."""
    path = store.folder / f"{name}.npy"
    try:
        values: NDArray[Any] = np.load(path)
    except FileNotFoundError:
        values = find()
        part = path.with_name(f"{name}.{os.getpid()}.part.npy")
        np.save(part, values)
        part.replace(path)
    return values


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
    digests = [hashlib.blake2b(store.ids[a:b].data, digest_size=8).digest() for a, b in pairwise(edges)]
    hashes = [int.from_bytes(digest, "little") for digest in digests]
    return np.asarray([edges, [*hashes, 0]], dtype=np.uint64)
