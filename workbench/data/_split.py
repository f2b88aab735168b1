"""Held-out text: runs of consecutive documents, chosen by a hash of their content, that training never reads.

A *run* of documents is the unit of the split, because in many texts each paragraph is a document. The runs with the
lowest hashes are held out, so that the choice depends on the text alone, and more samples hold out more of the same.

A stream does not know the hashes of later documents. Text that is read in the order of a stream, be it streamed or
stored, holds out the runs with the lowest hashes of its beginning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.data._store import I64, TokenStore
from workbench.errors import DataError

HELD_OUT_SHARE = 0.05
"""Fraction of the tokens that is held out, or more if the evaluation asks for more samples."""
LARGEST_SHARE = 0.5
"""Fraction of the tokens beyond which holding text out is refused."""
RUN_TOKENS = 4096
"""Smallest number of tokens of a run of documents in a large text."""
SMALLEST_RUNS = 200
"""Number of runs that a smaller text is divided into, if its documents are short enough."""
SMALLEST_BEGINNING = 1 << 18
"""Tokens of the beginning of a text in which a stream looks for documents to hold out, or more for many samples."""
LONGER_BEGINNING = 16
"""Factor by which the beginning is longer if its documents are too few."""


class _SplicedIds:
    """Token ids at positions of a stream that is spliced from segments of a store."""

    def __init__(self, store: TokenStore, starts: I64, offsets: I64) -> None:
        """`starts` are the segments' first tokens in the store, `offsets` their positions in the stream."""
        self._store, self._starts, self._offsets = store, starts, offsets

    def __getitem__(self, position: I64) -> NDArray[Any]:
        segment = np.searchsorted(self._offsets, position, side="right") - 1
        ids: NDArray[Any] = self._store.ids[self._starts[segment] + position - self._offsets[segment]]
        return ids


@dataclass(frozen=True, eq=False)
class SplicedTokens:
    """Segments of a tokenised text as one stream, with the properties of a `TokenStore` that samples read."""

    store: TokenStore
    starts: I64
    """First token of each segment in the store, ascending."""
    ends: I64
    """Token after the last of each segment."""

    @property
    def vocabulary(self) -> int:
        return self.store.vocabulary

    @property
    def tokens(self) -> int:
        return int((self.ends - self.starts).sum())

    @cached_property
    def _offsets(self) -> I64:
        """Offset of each segment in the stream."""
        return np.asarray(np.cumsum(self.ends - self.starts) - (self.ends - self.starts))

    @property
    def ids(self) -> _SplicedIds:
        return _SplicedIds(self.store, self.starts, self._offsets)

    @cached_property
    def document_starts(self) -> I64:
        """Offsets of the documents in the stream, ascending, the first 0."""
        documents = self.store.document_starts
        segment = np.searchsorted(self.starts, documents, side="right") - 1
        is_kept = (segment >= 0) & (documents < self.ends[segment])
        kept = segment[is_kept]
        return np.asarray(documents[is_kept] - self.starts[kept] + self._offsets[kept])


def split(store: TokenStore, name: str, samples: int, width: int) -> tuple[SplicedTokens, SplicedTokens]:
    """Return the text for training and the held-out text, which holds at least `samples` windows of `width` tokens.

    Raises `DataError` if the text is too small for that, or has too few documents.
    """
    return _divided(store, name, samples, width, *store.runs)


def split_of_stream(
    read: Callable[[int], TokenStore], name: str, samples: int, width: int
) -> tuple[SplicedTokens, SplicedTokens]:
    """Return the two parts as `split` does, but hold out documents of the beginning only, as a stream can.

    `read` returns the tokens of the text, all of them or more than it is asked for.
    """
    tokens = max(SMALLEST_BEGINNING, int(samples * width / HELD_OUT_SHARE))
    for beginning in (tokens, LONGER_BEGINNING * tokens):
        store = read(beginning)
        is_whole = store.tokens <= beginning
        after = np.searchsorted(store.document_starts, beginning, side="right") - 1
        end = store.tokens if is_whole else int(store.document_starts[after]) or beginning
        runs = document_runs(store.ids, store.document_starts[: store.documents if is_whole else max(1, after)], end)
        try:
            return _divided(store, name if is_whole else f"the beginning of {name}", samples, width, *runs)
        except DataError:
            if is_whole or beginning > tokens:
                raise
    raise AssertionError


def _divided(
    store: TokenStore, name: str, samples: int, width: int, edges: I64, hashes: NDArray[np.uint64]
) -> tuple[SplicedTokens, SplicedTokens]:
    """Hold out the runs of documents with the lowest hashes; the last edge may lie before the end of the text."""
    sizes, total = np.diff(edges), int(edges[-1])
    needed = max(samples * width, HELD_OUT_SHARE * total)
    order = np.argsort(hashes, kind="stable")
    count = int(np.searchsorted(np.cumsum(sizes[order]), needed)) + 1
    if samples * width > LARGEST_SHARE * total:
        most = int(LARGEST_SHARE * total) // width
        raise DataError(
            f"{samples:,} held-out samples of {width} tokens need {samples * width:,} of the {total:,} tokens of "
            f"{name}, more than half. "
            + (f"Ask for at most evaluation=wb.Evaluation(samples={most}), or give" if most else "Give")
            + " other text as eval_data."
        )
    if count >= len(sizes) or int(sizes[order[:count]].sum()) > max(LARGEST_SHARE * total, 2 * needed):
        documents = int(np.searchsorted(store.document_starts, total))
        raise DataError(
            f"{name} has {documents:,} document{'s' * (documents != 1)} of {total:,} tokens, too few to hold out "
            f"{int(needed):,} tokens in whole documents. Separate its documents by empty lines, or give other text as "
            "eval_data."
        )
    is_held = np.zeros(len(sizes), np.bool_)
    is_held[order[:count]] = True
    rest = np.append(edges, store.tokens), np.append(~is_held, total < store.tokens)
    return _segments(store, *rest), _segments(store, edges, is_held)


def _segments(store: TokenStore, edges: I64, is_wanted: NDArray[np.bool_]) -> SplicedTokens:
    """Return some of the runs between edges, neighbours as one segment."""
    change = np.diff(np.concatenate([[0], is_wanted.astype(np.int8), [0]]))
    return SplicedTokens(store, edges[np.flatnonzero(change == 1)], edges[np.flatnonzero(change == -1)])


def document_runs(ids: NDArray[Any], document_starts: I64, tokens: int) -> tuple[I64, NDArray[np.uint64]]:
    """Return the edges of all runs of documents in the first `tokens` (one more than runs), and a hash of each run."""
    least = max(1, min(RUN_TOKENS, tokens // SMALLEST_RUNS))
    edges = [0]
    while (after := np.searchsorted(document_starts, edges[-1] + least)) < len(document_starts):
        edges.append(int(document_starts[after]))
    if tokens - edges[-1] < least and len(edges) > 1:  # a short rest belongs to the last run
        edges.pop()
    edges.append(tokens)
    digests = [hashlib.blake2b(ids[a:b].data, digest_size=8).digest() for a, b in pairwise(edges)]
    return np.asarray(edges), np.asarray([int.from_bytes(digest, "little") for digest in digests], dtype=np.uint64)
