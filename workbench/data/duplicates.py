"""Documents that are equal or nearly equal, which a split keeps on one side, and how much two texts have in common.

Documents are compared as token ids, so that what the tokeniser drops makes no difference. Nearly equal are those whose
sets of runs of `SHINGLE` tokens have a Jaccard similarity of `NEAR` or more (Broder, SEQUENCES 1997), estimated by
MinHash; locality-sensitive hashing finds the pairs that are worth comparing. D documents, P hashes of a signature.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.data.sampling import U64, mixed
from workbench.data.store import GOLDEN_RATIO, I64, SplicedTokens, TokenStore, only_process

SHINGLE = 5
"""Tokens of the runs by which two documents are compared (Lee et al., arXiv:2107.06499, section 4.2, take 5 too)."""
NEAR = 0.7
"""Jaccard similarity from which on two documents count as nearly equal; they take 0.8, and verify by edit distance."""
HASHES, BANDS = 128, 32
"""Hashes of a signature, which estimate a similarity of 0.7 within 0.04 (one standard deviation), and bands of them.

Documents are compared if the four hashes of any band are equal: of pairs of a similarity of 0.7, all but 0.02 %."""
SEED = 1
BATCH_TOKENS = 1 << 22
"""Tokens whose signatures are computed at a time."""
FORMAT = 1
"""Version of the stored answers; part of their names."""


def groups_of(store: TokenStore, how: str) -> I64:
    """Return the number of the first document of each document's group of duplicates, shape `(D,)`.

    `how` is `"exact"` or `"near"`. What was found for a tokenised text is stored beside it.
    """
    file = store.folder.with_name(f"{store.folder.name}.{how}-{FORMAT}.npy")
    with suppress(OSError, ValueError):
        return _known(file, store)
    with only_process(file):
        with suppress(OSError, ValueError):
            return _known(file, store)
        groups = _equal(store)
        if how == "near":
            groups = joined(groups, *_near(store, np.flatnonzero(groups == np.arange(len(groups)))))
        part = file.with_name(f"{file.name}.part")
        with part.open("wb") as content:
            np.save(content, groups)
        part.replace(file)
    return groups


def _known(file: Path, store: TokenStore) -> I64:
    groups: I64 = np.load(file)
    if groups.shape != (store.documents,) or groups.dtype != np.int64:
        raise ValueError("of other documents")
    return groups


def joined(groups: I64, one: I64, other: I64) -> I64:
    """Return groups that also join the documents `one` and `other`, pair by pair, named by their first documents."""
    groups = groups.copy()
    while True:
        lower = np.minimum(groups[one], groups[other])
        if (groups[one] == lower).all() and (groups[other] == lower).all():
            return groups
        for members in (one, other):
            np.minimum.at(groups, groups[members], lower)
        while not np.array_equal(after := groups[groups], groups):
            groups = after


def by_label(labels: Sequence[Any]) -> tuple[I64, I64]:
    """Return pairs that join each document with the first of its label; one without a label (None) stays alone."""
    first: dict[Any, int] = {}
    pairs = [(first.setdefault(str(label), at), at) for at, label in enumerate(labels) if label is not None]
    one, other = np.asarray(pairs, dtype=np.int64).reshape(-1, 2).T
    return one, other


def document_hashes(store: TokenStore) -> U64:
    """Return a hash of each document's tokens, shape `(D,)`."""
    digests = [hashlib.blake2b(ids.tobytes(), digest_size=8).digest() for ids in _documents(store)]
    return np.frombuffer(b"".join(digests), np.uint64)


def _documents(store: TokenStore) -> Iterator[NDArray[Any]]:
    return (store.ids[begin:end] for begin, end in pairwise([*store.document_starts.tolist(), store.tokens]))


def _equal(store: TokenStore) -> I64:
    _, first, group = np.unique(document_hashes(store), return_index=True, return_inverse=True)
    groups: I64 = first[group].astype(np.int64)
    return groups


def _near(store: TokenStore, documents: I64) -> tuple[I64, I64]:
    """Return pairs of some documents that are nearly equal, of which every further one has one of its group."""
    signatures = np.concatenate([np.empty((0, HASHES), np.uint32), *_signatures(store, documents)])
    ones, others = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for band in np.split(signatures, BANDS, axis=1):
        halves = np.ascontiguousarray(band).view(np.uint64)
        _, first, bucket = np.unique(mixed(halves[:, 0]) + halves[:, 1], return_index=True, return_inverse=True)
        one, other = first[bucket], np.arange(len(band))
        one, other = one[one != other], other[one != other]
        for part in range(0, len(one), BATCH_TOKENS // HASHES):
            own = slice(part, part + BATCH_TOKENS // HASHES)
            is_near = (signatures[one[own]] == signatures[other[own]]).mean(axis=1) >= NEAR
            ones.append(documents[one[own][is_near]])
            others.append(documents[other[own][is_near]])
    return np.concatenate(ones), np.concatenate(others)


def _signatures(store: TokenStore, documents: I64) -> Iterator[NDArray[np.uint32]]:
    """Yield the MinHash signatures of some documents, shape `(D, P)`, a batch at a time."""
    from rensa import RMinHash

    starts, ends = store.document_starts[documents], np.append(store.document_starts, store.tokens)[documents + 1]
    batch = np.cumsum(ends - starts) // BATCH_TOKENS
    for number in np.unique(batch).tolist():
        shingles = [
            run_hashes(ids, SHINGLE) if len(ids) >= SHINGLE else run_hashes(ids, len(ids))
            for ids in (store.ids[a:b] for a, b in zip(starts[batch == number], ends[batch == number], strict=True))
        ]
        offsets = np.cumsum([0, *map(len, shingles)], dtype=np.uint64)
        rows = RMinHash.digest_matrix_from_flat_token_hashes(np.concatenate(shingles), offsets, HASHES, SEED).to_rows()
        yield np.asarray(rows, np.uint32)


def run_hashes(ids: NDArray[Any], length: int) -> U64:
    """Return a hash of each run of `length` tokens, shape `(tokens - length + 1,)`: a polynomial in 64 bits, mixed."""
    power = ids.astype(np.uint64) + np.uint64(1)  # of runs of 1, 2, 4, … tokens
    whole, done, size = np.zeros(len(ids) + 1, np.uint64), 0, 1
    scale = GOLDEN_RATIO  # to the power of `size`
    with np.errstate(over="ignore"):
        while size <= length:
            if length & size:  # runs of `done` tokens go on with `size` more
                count = len(ids) - done - size + 1
                whole, done = whole[:count] * scale + power[done : done + count], done + size
            power = power[: max(0, len(power) - size)] * scale + power[size:]
            size, scale = 2 * size, scale * scale
        return mixed(whole)


# How much held-out text stands in the text of the training, word for word.

RUN = 13
"""Tokens of a run that two texts have in common (GPT-3, arXiv:2005.14165, appendix C, looks for 13-grams)."""
MOST_COMPARED = 1 << 26
"""Tokens of the training that are looked through; of a longer text, as many, in pieces taken evenly from it."""
PIECE = 1 << 20
_BITS = np.uint64((1 << 24) - 1)


def shared_samples(
    trainings: Sequence[TokenStore | SplicedTokens], held_out: TokenStore | SplicedTokens, width: int
) -> tuple[int, int, float]:
    """Return how many held-out windows of `width` tokens hold a run of `RUN` tokens that a text of the training has.

    The other values are the number of windows, and the fraction of the training that was looked through.
    """
    whole = held_out.tokens // width * width
    hashes = _hashes_of(held_out, 0, whole)
    windows = np.arange(len(hashes)) // width  # the window in which a run begins
    known = np.unique(hashes)
    may_be = np.zeros(int(_BITS) + 1, np.bool_)
    may_be[(known & _BITS).astype(np.int64)] = True
    found = np.zeros(len(known), np.bool_)
    pieces = [(training, begin) for training in trainings for begin in range(0, training.tokens, PIECE)]
    looked = min(len(pieces), MOST_COMPARED // PIECE)
    for number in range(looked):
        training, begin = pieces[number * len(pieces) // looked]
        own = _hashes_of(training, begin, min(begin + PIECE + RUN - 1, training.tokens))
        own = own[may_be[(own & _BITS).astype(np.int64)]]
        at = np.minimum(np.searchsorted(known, own), len(known) - 1)
        found[at[known[at] == own]] = True
    return len(np.unique(windows[found[np.searchsorted(known, hashes)]])), whole // width, looked / max(1, len(pieces))


def _hashes_of(text: TokenStore | SplicedTokens, begin: int, end: int) -> U64:
    """Return the hashes of the runs of tokens in a part of a text."""
    if isinstance(text, SplicedTokens):
        before = np.cumsum(text.ends - text.starts) - (text.ends - text.starts)  # tokens before each segment
        first, last = np.searchsorted(before, [begin, end - 1], side="right") - 1
        own = slice(first, last + 1)
        starts = np.maximum(text.starts[own], text.starts[own] + begin - before[own])
        ends = np.minimum(text.ends[own], text.starts[own] + end - before[own])
        ids = np.concatenate([text.store.ids[a:b] for a, b in zip(starts, ends, strict=True)])
    else:
        ids = text.ids[begin:end]
    return run_hashes(ids, RUN) if len(ids) >= RUN else np.empty(0, np.uint64)


def overlap_in_words(
    trainings: Sequence[TokenStore | SplicedTokens], held_out: TokenStore | SplicedTokens, width: int
) -> str:
    """Return a sentence with what `shared_samples` finds, which is stored beside the tokens of the first text."""
    stores = [text.store if isinstance(text, SplicedTokens) else text for text in (*trainings, held_out)]
    digest = hashlib.blake2b(
        repr((FORMAT, RUN, width, [store.folder.name for store in stores])).encode(), digest_size=8
    )
    for text in (*trainings, held_out):
        if isinstance(text, SplicedTokens):
            digest.update(text.starts.tobytes() + text.ends.tobytes())
    file = stores[0].folder.with_name(f"{stores[0].folder.name}.shared-{digest.hexdigest()}.json")
    try:
        shared, windows, looked = json.loads(file.read_text())
    except (OSError, ValueError, TypeError):
        shared, windows, looked = shared_samples(trainings, held_out, width)
        with suppress(OSError):  # of a cache that cannot be written: it is counted again
            part = file.with_name(f"{file.name}.part")
            part.write_text(json.dumps([shared, windows, looked]))
            part.replace(file)
    if not windows:
        return ""
    among = "the text that training reads" if looked == 1 else f"{looked:.0%} of the text that training reads"
    return (
        f"{shared:,} of {windows:,} held-out windows ({shared / windows:.0%}) hold a run of {RUN} tokens that stands "
        f"in {among}, too."
    )
