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

from workbench.data.text import Position
from workbench.display import waiting
from workbench.errors import DataError
from workbench.machine import cache_home
from workbench.units import gib

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
# texts each paragraph is a document. The runs with the lowest hashes are held out, so that the choice depends on the
# text alone, and more samples hold out more of the same. A stream does not know the hashes of later documents: text
# that is read in the order of a stream, be it streamed or stored, holds out the runs with the lowest hashes of its
# beginning.

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
