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
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.data._text import Position
from workbench.errors import DataError
from workbench.home import cache_home
from workbench.units import gib

I64 = NDArray[np.int64]

TOKENIZER_FACTS = "special_tokens.json"
"""File beside those of a tokeniser: their names, and its special tokens (`workbench.data._tokenizer`)."""


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
