"""Tokens of a text on disk: those that are finished, with checks against damage, and those that are still written.

The folder of finished tokens holds `tokens.bin` (uint16, or uint32 for vocabularies over 65,536), `documents.bin` (the
offset of each document, int64), `runs.npy` (runs of documents and their hashes, for the split), the files of the
tokeniser, and `facts.json` with the digests of the others. The folder appears whole or not at all.

Until then a folder with the ending `.part` holds what is done, and `progress.jsonl`: first the digest of the tokeniser,
then a line for each block of text with the position after it and the digest of its tokens. Blocks are appended in the
order of the text. Work that was killed keeps the blocks up to the first whose digest is wrong, and goes on after them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.base.display import waiting
from workbench.base.errors import DataError
from workbench.base.machine import cache_home
from workbench.base.units import count as count_text
from workbench.base.units import gib
from workbench.data.text import Position

I64 = NDArray[np.int64]

TOKENIZER_FACTS = "special_tokens.json"
"""File beside those of a tokeniser: their names, and its special tokens (`workbench.data.tokenizer`)."""


@dataclass(frozen=True)
class TokenStore:
    """A tokenised text on disk; its arrays are memory-mapped when first read, and not pickled."""

    folder: Path
    tokens: int
    documents: int
    vocabulary: int
    """Number of ids of the vocabulary, below `vocab_size` if it was trained on a small text."""
    seconds: float
    """Time that tokenising took."""

    @cached_property
    def ids(self) -> NDArray[Any]:
        """Every token of the text in order, shape `(tokens,)`."""
        return _mapped(self.folder / "tokens.bin", dtype_of(self.vocabulary))

    @cached_property
    def document_starts(self) -> I64:
        """Offsets into `ids`, ascending, the first 0; shape `(documents,)`."""
        return _mapped(self.folder / "documents.bin", np.int64)

    @property
    def runs(self) -> tuple[I64, NDArray[np.uint64]]:
        """Edges of the runs of documents (one more than runs), and a hash of each run's tokens."""
        rows = np.load(self.folder / "runs.npy")
        return rows[0].astype(np.int64), rows[1, :-1]

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("ids", "document_starts")}


def _mapped(file: Path, dtype: Any) -> NDArray[Any]:
    return np.asarray(np.memmap(file, dtype, "r")) if file.stat().st_size else np.empty(0, dtype)


def dtype_of(vocabulary: int) -> Any:
    """Return the type of ids below a number."""
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32


def tokenizer_files(folder: Path) -> tuple[str, ...]:
    """Return the names of the files of the tokeniser in a folder, the one with its special tokens last."""
    return (*json.loads((folder / TOKENIZER_FACTS).read_text())["files"], TOKENIZER_FACTS)


def opened(folder: Path) -> TokenStore | None:
    """Return the tokens in a folder of the cache, or None if there are none or they are damaged."""
    if damage_of(folder, every_byte=False) is not None:
        return None
    facts = json.loads((folder / "facts.json").read_text())
    return TokenStore(folder, *(facts[key] for key in ("tokens", "documents", "vocabulary", "seconds")))


def write_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Write the values that describe finished tokens, and last of all the digests of their files."""
    names = ("tokens.bin", "documents.bin", "runs.npy", *tokenizer_files(folder))
    stats = {name: (folder / name).stat() for name in names}
    files = {
        name: {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "digest": _digest_of_file(folder / name)}
        for name, stat in stats.items()
    }
    facts = {**facts, "files": files}
    (folder / "facts.json").write_text(json.dumps({**facts, "digest": _digest_of_facts(facts)}, indent=2) + "\n")


def cached_texts() -> list[Path]:
    """Return the folders of the token cache that hold a tokenised text."""
    return sorted(file.parent for file in (cache_home() / "tokens").glob("*/facts.json"))


def damage_of(folder: Path, every_byte: bool = True) -> str | None:
    """Return a sentence on the first file of a cached text that differs from what was written, None if none does.

    Without `every_byte`, a file is read only if it was touched since.
    """
    try:
        facts = json.loads((folder / "facts.json").read_text())
        if facts["digest"] != _digest_of_facts(facts):
            return f"{folder / 'facts.json'} does not hold what was written to it."
        for name, written in facts["files"].items():
            stat = (folder / name).stat()
            if stat.st_size == written["bytes"] and stat.st_mtime_ns == written["mtime_ns"] and not every_byte:
                continue
            if stat.st_size != written["bytes"] or _digest_of_file(folder / name) != written["digest"]:
                return f"{folder / name} does not hold what was written to it."
    except FileNotFoundError as error:
        return f"{error.filename} is missing."
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{folder} cannot be read: {error}."
    return None


@contextlib.contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel releases even if the process is killed, and write to it."""
    with writing_to(folder.parent, "token cache"), folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def writing_to(folder: Path, name: str) -> Iterator[None]:
    """Make a folder of the cache; raise `DataError` if it cannot be written, or has no room."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"The {name} at {folder} cannot be written: {error.strerror}. Point WORKBENCH_HOME at a folder that "
                "can."
            ) from error
        free = shutil.disk_usage(folder).free
        raise DataError(
            f"The disk of the {name} at {folder} is full ({gib(free)} are free). Tokens that are done are kept, and "
            "the next attempt goes on there. Free space, or point WORKBENCH_HOME at a larger disk."
        ) from error


def can_go_on(folder: Path) -> bool:
    """Return True if a folder holds unfinished tokens and the tokeniser that made them."""
    try:
        with (folder / "progress.jsonl").open("rb") as log:
            return log.readline() == _header(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return False


class PartialTokens:
    """Unfinished tokens in a folder, to which blocks are appended; use it in a `with` statement."""

    def __init__(self, folder: Path, dtype: str) -> None:
        """Open a folder that holds a tokeniser; `dtype` is that of the ids.

        Counts the blocks that are whole, and cuts the files after them.
        """
        self.folder, self.dtype = folder, np.dtype(dtype)
        self.tokens = self.documents = self.advance = 0
        self.position: Position = ()
        self.seconds = 0.0
        self._last_start = -1
        with contextlib.ExitStack() as files:
            for name in ("tokens.bin", "documents.bin", "progress.jsonl"):
                (folder / name).touch()
            self._ids, self._starts, self._log = (
                files.enter_context((folder / name).open("r+b"))
                for name in ("tokens.bin", "documents.bin", "progress.jsonl")
            )
            logged = 0
            if self._log.readline() == _header(folder):
                logged = self._log.tell()
                while (line := self._log.readline()) and self._counted(line):
                    logged = self._log.tell()
            self._ids.seek(self.tokens * self.dtype.itemsize)
            self._starts.seek(self.documents * 8)
            self._log.seek(logged)
            for file in (self._ids, self._starts, self._log):
                file.truncate()
            if not logged:
                self._write(self._log, _header(folder))
            self._files = files.pop_all()

    def __enter__(self) -> PartialTokens:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def append(self, ids: NDArray[Any], starts: I64, end: Position, advance: int, seconds: float) -> None:
        """Write a block: its ids, and the offsets in them at which documents begin."""
        starts = starts + self.tokens
        starts = starts[starts > self._last_start]  # nothing of the document before remained
        self._write(self._ids, ids.tobytes())
        self._write(self._starts, starts.tobytes())
        digest = _digest(ids.tobytes(), starts.tobytes())
        line = json.dumps([end, advance, len(ids), len(starts), round(seconds, 3), digest]).encode() + b"\n"
        self._write(self._log, line)
        self._count(line, starts)

    def end_with(self, token: int, seconds: float) -> None:
        """Write the token that ends the last document, unless it is there."""
        if self.tokens:
            self._ids.seek(-self.dtype.itemsize, os.SEEK_END)
            if np.frombuffer(self._ids.read(), self.dtype)[0] != token:
                self.append(np.asarray([token], self.dtype), np.empty(0, np.int64), self.position, 0, seconds)

    def finish(self) -> None:
        """Delete what finished tokens do not need."""
        if self._last_start == self.tokens:  # nothing of the last document remained
            self.documents -= 1
            self._starts.truncate(self.documents * 8)
        (self.folder / "progress.jsonl").unlink()

    @staticmethod
    def _write(file: Any, content: bytes) -> None:
        file.write(content)
        file.flush()

    def _counted(self, line: bytes) -> bool:
        """Read a block, and count it if it is what was written."""
        try:
            _, _, tokens, documents, _, digest = json.loads(line)
            ids, starts = self._ids.read(tokens * self.dtype.itemsize), self._starts.read(documents * 8)
        except (ValueError, TypeError):
            return False
        if not line.endswith(b"\n") or _digest(ids, starts) != digest:
            return False
        self._count(line, np.frombuffer(starts, np.int64))
        return True

    def _count(self, line: bytes, starts: I64) -> None:
        end, advance, tokens, documents, self.seconds, _ = json.loads(line)
        self.position, self.advance = tuple(end), self.advance + advance
        self.tokens, self.documents = self.tokens + tokens, self.documents + documents
        if len(starts):
            self._last_start = int(starts[-1])


def _header(folder: Path) -> bytes:
    """Return the first line of `progress.jsonl`, which names the tokeniser of a folder."""
    digest = hashlib.blake2b(digest_size=16)
    for name in tokenizer_files(folder):
        digest.update((folder / name).read_bytes())
    return json.dumps({"tokenizer": digest.hexdigest()}).encode() + b"\n"


def _digest(ids: bytes, starts: bytes) -> str:
    return hashlib.blake2b(b"%d " % len(ids) + ids + starts, digest_size=8).hexdigest()


def _digest_of_facts(facts: dict[str, Any]) -> str:
    text = json.dumps({name: value for name, value in facts.items() if name != "digest"}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _digest_of_file(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "blake2b").hexdigest()


# Held-out text, which training never reads. A run of consecutive documents is the unit of the split, because in many
# texts each paragraph is a document. The runs with the lowest keys are held out. The key of a run is a hash of its
# tokens, so that the choice depends on the text alone, equal documents stay together, and more samples hold out more of
# the same.
#
# A few long documents would be held out as a whole, or not at all: the share would be wrong, and the text perhaps of
# another kind. Therefore long runs are cut into pieces of whole windows. The key of piece i is that of its run plus
# i times the golden ratio, modulo 1: of all such sequences, this one spreads the lowest keys most evenly over the run
# (Knuth, The Art of Computer Programming 3, section 6.4). At 5 %, one of any 34 consecutive pieces is held out.
#
# A stream does not know the hashes of later documents: text that is read in the order of a stream, be it streamed or
# stored, holds out text of its beginning.

HELD_OUT_SHARE = 0.05
"""Fraction of the tokens that is held out, or more if the evaluation asks for more samples."""
LARGEST_SHARE = 0.5
"""Fraction of the tokens beyond which holding text out is refused."""
RUN_TOKENS = 4096
"""Smallest number of tokens of a run of documents, and of a piece of a long one, in a large text."""
SMALLEST_RUNS = 200
"""Number of runs that a smaller text is divided into, if its documents are short enough."""
SMALLEST_PIECES = 2000
"""Number of pieces that all of a smaller text would be cut into, if its samples are short enough."""
LONGEST_SHARE = 0.02
"""Fraction of the text beyond which a run of documents is cut."""
MANY_RUNS = 100
"""Number of runs below which shorter ones are cut, too: too few whole ones would be held out to stand for the text."""
GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
"""Fraction of the golden ratio, (√5 - 1) / 2, in units of 2**-64."""
SMALLEST_BEGINNING = 1 << 18
"""Tokens of the beginning of a text in which a stream holds out, or more for many samples."""


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
        """Offsets of the documents in the stream, ascending, the first 0; a segment begins one, too."""
        documents = self.store.document_starts
        segment = np.searchsorted(self.starts, documents, side="right") - 1
        is_kept = (segment >= 0) & (documents < self.ends[segment])
        kept = segment[is_kept]
        return np.union1d(self._offsets, documents[is_kept] - self.starts[kept] + self._offsets[kept])


@dataclass(frozen=True, eq=False)
class Split:
    """A text in two parts that share no token."""

    training: SplicedTokens
    held_out: SplicedTokens
    among: int
    """Tokens of the text, or of its beginning, among which some are held out."""

    @property
    def is_whole(self) -> bool:
        """True if text is held out of all of the text, and not of its beginning only."""
        return self.among == self.held_out.store.tokens

    @cached_property
    def documents(self) -> tuple[int, int, int]:
        """Number of documents that are held out as a whole, of those that are cut, and of all `among` the tokens."""
        starts = self.held_out.store.document_starts
        every = int(np.searchsorted(starts, self.among))
        edges = np.concatenate([self.held_out.starts, self.held_out.ends])
        after = np.searchsorted(starts, edges)
        is_inside = (edges < self.held_out.store.tokens) & (starts[np.minimum(after, len(starts) - 1)] != edges)
        cut = np.unique(after[is_inside] - 1)
        first, last = np.split(after, 2)  # documents that begin in a segment
        ends_inside = is_inside[len(first) :]
        return int((last - first - (ends_inside & (last > first))).sum()), len(cut), every

    def __str__(self) -> str:
        """Return `"2.07 M of 41.4 M tokens are held out (5 %): parts of 2 of 2 documents, in 505 places."`."""
        tokens, (whole, cut, every) = self.held_out.tokens, self.documents
        words = [f"{whole:,} whole"] if whole else []
        words += [f"parts of {cut:,}"] if cut else []
        places = len(self.held_out.starts)
        beginning = "" if self.is_whole else "the first "
        said = (
            f"{count_text(tokens)} of {beginning}{count_text(self.among)} tokens are held out "
            f"({100 * tokens / self.among:.2g} %): {' and '.join(words)} of {every:,} document"
            f"{'s' * (every != 1)}, in {places:,} place{'s' * (places != 1)}."
        )
        if self.is_whole:
            return said
        return f"{said} Later text is trained on alone: text that is sorted by kind is judged by its beginning."


def split(store: TokenStore, name: str, samples: int, width: int) -> Split:
    """Divide a text into one for training and one that is held out, of at least `samples` windows of `width` tokens.

    Raises `DataError` if the text is too small for that.
    """
    return _divided(store, name, samples, width, *store.runs)


def split_by_groups(
    store: TokenStore, name: str, samples: int, width: int, groups: I64, hashes: NDArray[np.uint64]
) -> Split:
    """Divide a text as `split` does, but hold out whole groups of documents; their kinds are mixed as in the text.

    `groups` has a number for each document, the same for those of a group, and `hashes` a hash of its tokens. The
    groups with the lowest hashes are held out. One that alone would hold out twice as much as is asked for is only
    taken where smaller ones do not suffice, and never one of more than half of the text. Raises `DataError` where they
    do not.
    """
    total, needed = store.tokens, _needed(store.tokens, name, samples, width)
    edges = np.append(store.document_starts, total)
    names, group = np.unique(groups, return_inverse=True)
    sizes, keys = np.bincount(group, np.diff(edges)), np.full(len(names), np.iinfo(np.uint64).max)
    np.minimum.at(keys, group, hashes)
    is_held, held = np.zeros(len(names), np.bool_), 0
    for most in (2 * needed, LARGEST_SHARE * total):
        for one in np.argsort(keys, kind="stable").tolist():
            if held < needed and not is_held[one] and held + sizes[one] <= most:
                is_held[one], held = True, held + sizes[one]
    if held < needed or total - held < width:
        raise DataError(
            f"{name} has {len(names):,} group{'s' * (len(names) != 1)} of documents that stay together, the largest of "
            f"{int(max(sizes, default=0)):,} of its {total:,} tokens: too few or too large to hold out {int(needed):,} "
            f"tokens in samples of {width}, and to train on the others. Remove held_out_by and deduplicate, so that "
            "documents can be cut, name a finer field, or give other text as eval_data."
        )
    is_held_D = is_held[group]
    return Split(_segments(store, edges, ~is_held_D), _segments(store, edges, is_held_D), total)


def _needed(total: int, name: str, samples: int, width: int) -> float:
    """Return how many of a text's tokens are held out; raise `DataError` if they are more than half."""
    if samples * width > LARGEST_SHARE * total:
        most = int(LARGEST_SHARE * total) // width
        raise DataError(
            f"{samples:,} held-out samples of {width} tokens need {samples * width:,} of the {total:,} tokens of "
            f"{name}, more than half. "
            + (f"Ask for at most evaluation=wb.Evaluation(samples={most}), or give" if most else "Give")
            + " other text as eval_data."
        )
    return max(samples * width, HELD_OUT_SHARE * total)


def split_of_stream(read: Callable[[int], TokenStore], name: str, samples: int, width: int) -> Split:
    """Divide a text as `split` does, but hold out text of the beginning only, as a stream can.

    `read` returns the tokens of the text, all of them or more than it is asked for.
    """
    beginning = max(SMALLEST_BEGINNING, int(samples * width / HELD_OUT_SHARE))
    store = read(beginning)
    starts, end = store.document_starts, store.tokens
    if end > beginning:  # without the document that goes on behind it, unless that is long
        last = int(starts[np.searchsorted(starts, beginning, side="right") - 1])
        end = beginning if beginning - last > LONGEST_SHARE * beginning else last
        name = f"the beginning of {name}"
    if end == store.tokens:
        return _divided(store, name, samples, width, *store.runs)
    runs = document_runs(store.ids, starts[: np.searchsorted(starts, end)], end)
    return _divided(store, name, samples, width, *runs)


def _divided(store: TokenStore, name: str, samples: int, width: int, edges: I64, keys: NDArray[np.uint64]) -> Split:
    """Hold out the runs of documents with the lowest keys; the last edge may lie before the end of the text."""
    total = int(edges[-1])
    needed = _needed(total, name, samples, width)
    # Edges inside of long runs. Of such a run, only one document is long, so that the others stay whole.
    piece = max(1, min(RUN_TOKENS, total // SMALLEST_PIECES) // width) * width
    longest = LONGEST_SHARE * total if len(keys) >= MANY_RUNS else 2 * min(RUN_TOKENS, total // SMALLEST_RUNS)
    all_edges, all_keys = [edges[:-1]], [keys]
    for run in np.flatnonzero(np.diff(edges) > longest).tolist():
        own = slice(*np.searchsorted(store.document_starts, edges[run : run + 2]))
        documents = np.append(store.document_starts[own], edges[run + 1])
        at = int(np.argmax(np.diff(documents)))
        first, end = documents[at : at + 2]
        inside = np.arange(first, end - piece + 1, piece)
        all_edges.append(inside := inside[inside > edges[run]])
        all_keys.append(keys[run] + np.arange(1, len(inside) + 1, dtype=np.uint64) * GOLDEN_RATIO)
    in_order = np.argsort(np.concatenate(all_edges))
    edges = np.append(np.concatenate(all_edges)[in_order], total)
    keys = np.concatenate(all_keys)[in_order]

    # The lowest keys.
    sizes = np.diff(edges)
    order = np.argsort(keys, kind="stable")
    taken = order[: int(np.searchsorted(np.cumsum(sizes[order]), needed)) + 1]
    held = int(sizes[taken].sum())
    if held > max(LARGEST_SHARE * total, 2 * needed) or total - held < width:
        count = int(np.searchsorted(store.document_starts, total))
        raise DataError(
            f"{name} has {count:,} document{'s' * (count != 1)} of {total:,} tokens, too few to hold out "
            f"{int(needed):,} tokens in samples of {width}, and to train on the others. Give more text, a shorter "
            "seq_len, or other text as eval_data."
        )
    is_held = np.zeros(len(sizes), np.bool_)
    is_held[taken] = True
    rest = np.append(edges, store.tokens), np.append(~is_held, total < store.tokens)
    return Split(_segments(store, *rest), _segments(store, edges, is_held), total)


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


# Documents of an iterable are written to a text file of the cache.

PIECE = 1 << 16
"""Characters that are written at a time."""
_LINE = re.compile(r"\S(?:[^\n]*\S)?")
"""A line that is not blank, without blanks around it; only newlines end one."""


def write_documents(documents: Iterable[str], name: str, progress: bool) -> Path:
    """Write documents to `texts` of the cache, in a folder named by a hash of them, and return the file.

    Each line of a document becomes a paragraph. One document at a time is in memory. Raises `DataError` for a document
    that is no text, for an iterable without any word, and for a disk that is full.
    """
    folder, digest = cache_home() / "texts", hashlib.sha256()
    part = folder / f"{os.getpid()}.part"
    with writing_to(folder, "cache of texts"):
        try:
            shown = waiting(f"writing {name}") if progress else contextlib.nullcontext(lambda _: None)
            with part.open("wb") as file, shown as say:
                for number, document in enumerate(documents):
                    say(f"{number + 1:,} documents")
                    for piece in _pieces(document, number):
                        file.write(piece)
                        digest.update(piece)
                if not file.tell():
                    raise DataError("The documents are empty: they hold no word of text. Give at least one.")
            path = folder / digest.hexdigest()[:16] / f"{name}.txt"
            path.parent.mkdir(exist_ok=True)
            return part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _pieces(document: Any, number: int) -> Iterator[bytes]:
    """Yield the lines of a document without blanks around them, and an empty line after it; a blank one gives none.

    The pieces are short, so that no copy of a long document or line is in memory.
    """
    if not isinstance(document, str):
        raise DataError(
            f"Document {number} is of type {type(document).__name__} and must be text. Take the field that "
            "holds it: (row['text'] for row in rows)."
        )
    end = b""
    try:
        for line in _LINE.finditer(document):
            for at in range(line.start(), line.end(), PIECE):
                yield document[at : min(at + PIECE, line.end())].encode()
            yield (end := b"\n")
    except UnicodeEncodeError as error:
        raise DataError(
            f"Document {number} cannot be written as UTF-8: {error}. Decode its bytes with errors='replace'."
        ) from None
    yield end
