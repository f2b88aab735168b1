"""Tokens of a text while they are written, so that work which was killed goes on where it stopped.

The folder of unfinished tokens holds `tokens.bin`, `documents.bin` (int64 offsets) and `progress.jsonl`: first the
digest of the tokeniser, then a line for each block of text with the place after it and the digest of its tokens.
Blocks are appended in the order of the text. A folder that is opened again keeps the blocks up to the first whose
digest is wrong.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.data._text import Position

UNFINISHED = ("documents.bin", "progress.jsonl")
"""Files of the folder that the finished tokens do not need."""


@dataclass(frozen=True)
class Line:
    """A block that is done, as `progress.jsonl` has it."""

    end: Position
    """Place in the source after the block."""
    advance: int
    """Part of the source that the block covers, in units of the progress bar."""
    tokens: int
    documents: int
    seconds: float
    """Time that all blocks up to this one have taken."""
    digest: str


def can_go_on(folder: Path) -> bool:
    """Return True if a folder holds unfinished tokens and the tokeniser that made them."""
    try:
        with (folder / "progress.jsonl").open("rb") as log:
            return log.readline() == _header(folder)
    except OSError:
        return False


class PartialTokens:
    """Unfinished tokens in a folder, to which blocks are appended; use it in a `with` statement."""

    def __init__(self, folder: Path, dtype: str) -> None:
        """Open a folder that holds a `tokenizer.json`; `dtype` is that of the ids."""
        self.folder, self.dtype = folder, np.dtype(dtype)
        self.tokens = self.documents = self.advance = 0
        self.position: Position = ()
        self.seconds = 0.0
        self._last_start = -1
        for name in ("tokens.bin", *UNFINISHED):
            (folder / name).touch()
        self._ids = (folder / "tokens.bin").open("r+b")
        self._starts = (folder / "documents.bin").open("r+b")
        self._log = (folder / "progress.jsonl").open("r+b")
        self._go_on()

    def __enter__(self) -> PartialTokens:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in (self._ids, self._starts, self._log):
            file.close()

    def append(self, ids: NDArray[Any], starts: NDArray[np.int64], end: Position, advance: int, seconds: float) -> None:
        """Write a block: its ids, and the offsets in them at which documents begin."""
        starts = starts + self.tokens
        starts = starts[starts > self._last_start]  # nothing of the document before remained
        for file, values in ((self._ids, ids), (self._starts, starts)):
            file.write(values.tobytes())
            file.flush()
        line = Line(end, advance, len(ids), len(starts), round(seconds, 3), _digest(ids.tobytes(), starts.tobytes()))
        self._log.write(json.dumps(asdict(line)).encode() + b"\n")
        self._log.flush()
        self._count(line, starts)

    def finish(self) -> int:
        """Write `documents.npy`, delete what finished tokens do not need, and return the number of documents."""
        if self._last_start == self.tokens:  # nothing of the last document remained
            self.documents -= 1
        path = self.folder / "documents.bin"
        shape = (self.documents,)
        starts = np.memmap(path, np.int64, "r", shape=shape) if self.documents else np.empty(0, np.int64)
        np.save(self.folder / "documents.npy", starts)
        for name in UNFINISHED:
            (self.folder / name).unlink()
        return self.documents

    def _count(self, line: Line, starts: NDArray[np.int64]) -> None:
        self.tokens, self.documents = self.tokens + line.tokens, self.documents + line.documents
        self.position, self.advance, self.seconds = line.end, self.advance + line.advance, line.seconds
        if len(starts):
            self._last_start = int(starts[-1])

    def _go_on(self) -> None:
        """Count the blocks that are whole, and cut the files after them."""
        header = _header(self.folder)
        logged = 0
        if self._log.readline() == header:
            logged = len(header)
            for text in self._log:
                line = _parsed(text)
                if line is None or not self._has(line):
                    break
                logged += len(text)
        self._ids.seek(self.tokens * self.dtype.itemsize)
        self._starts.seek(self.documents * 8)
        self._log.seek(logged)
        for file in (self._ids, self._starts, self._log):
            file.truncate()
        if not logged:
            self._log.write(header)
            self._log.flush()

    def _has(self, line: Line) -> bool:
        """Read a block, and count it if it is what was written."""
        ids, starts = self._ids.read(line.tokens * self.dtype.itemsize), self._starts.read(line.documents * 8)
        if _digest(ids, starts) != line.digest:
            return False
        self._count(line, np.frombuffer(starts, np.int64))
        return True


def _parsed(text: bytes) -> Line | None:
    try:
        fields = json.loads(text)
        return Line(**{**fields, "end": tuple(fields["end"])}) if text.endswith(b"\n") else None
    except (ValueError, TypeError, KeyError):
        return None


def _header(folder: Path) -> bytes:
    """Return the first line of `progress.jsonl`, which names the tokeniser of a folder."""
    digest = hashlib.blake2b((folder / "tokenizer.json").read_bytes(), digest_size=16).hexdigest()
    return json.dumps({"tokenizer": digest}).encode() + b"\n"


def _digest(ids: bytes, starts: bytes) -> str:
    return hashlib.blake2b(b"%d " % len(ids) + ids + starts, digest_size=8).hexdigest()
