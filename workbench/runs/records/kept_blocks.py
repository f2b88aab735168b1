"""Blocks of events kept beside them in binary, so that a long run opens in a fraction of the time of its first reading.

`events.columns` is a sequence of records, one for each large block of `events.jsonl`: a header with a checksum of its
own, and the block's columns with theirs. It is written by the supervisor while the run goes, or by whoever reads these
events first, and never trusted against them: either the file of events is the very same that was read (inode, size and
both times of change), or the checksum of what a record was made from is computed again. From the first record that does
not agree, the events are read. A record without events says that all before it agreed with the file of events.

Columns of steps are read when somebody asks for them: a figure draws three or four of more than a dozen.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from workbench.runs.records.event_lines import BLOCK_BYTES, LOGGED, SAMPLE_ROWS, Array, EventBlock, Rows, blocks, parsed

KEPT_BYTES = 2**20
"""Size of a block from which it is kept; a smaller one is parsed in the time that it takes to look for it."""
SETTLED_S = 2.0
"""Age of the last change from which a later one must have another time: file systems count in steps."""
_MAGIC = b"WBevent3"
_HEAD = struct.Struct("<8sII")
"""Magic, length and CRC-32 of the header."""
_NOTHING = parsed(b"")
"""Block of a record without events."""


class KeptSteps:
    """The logged steps of a kept block; `steps[row]` reads one row of `EventBlock.steps` and compares its checksum.

    A damaged column is taken from the events, and the file with the kept columns is removed: the next reader writes it
    anew. Raises `OSError` if the events are no longer those that were kept.
    """

    def __init__(self, events: Path, head: dict[str, Any], offset: int) -> None:
        self._events, self._head, self._offset = events, head, offset
        self.shape = (_width(head), int(head["steps"]))

    def __getitem__(self, row: int) -> Array:
        values = np.empty(self.shape[1])
        kept = self._events.with_suffix(".columns")
        with contextlib.suppress(OSError), kept.open("rb", buffering=0) as file:
            file.seek(self._offset + row * values.nbytes)
            file.readinto(values.data)
            if zlib.crc32(values.data) == self._head["steps_crc32"][row]:
                return values
        with contextlib.suppress(OSError):
            kept.unlink(missing_ok=True)
        with self._events.open("rb") as file:
            file.seek(self._head["start"])
            text = file.read(self._head["bytes"])
        if zlib.crc32(text) != self._head["crc32"]:
            raise OSError(f"{self._events} was changed while it was read. Read it again.")
        return np.asarray(parsed(text).steps[row])


def read_blocks(path: Path, offset: int = 0, *, with_columns: bool = True) -> Iterator[EventBlock]:
    """Yield the events of a file from `offset` on, in large blocks; what was kept of them is not parsed again.

    Blocks have neither steps nor samples, and come sooner, without `with_columns`.
    """
    kept, known, is_same = path.with_suffix(".columns"), 0, True
    keeps = with_columns and offset == 0
    identity = _identity(path) if keeps else None
    if offset == 0:
        for block, end, same in _kept_blocks(path, kept, with_columns):
            yield block
            offset, known, is_same = offset + block.num_bytes, end, same
        if keeps and not is_same and identity is not None:
            with contextlib.suppress(OSError):
                known = _append(kept, known, _record(identity, offset, b"", _NOTHING))
    for text in blocks(path, offset):
        block = parsed(text, with_columns)
        if keeps := keeps and len(text) >= KEPT_BYTES:  # records follow one another without a gap
            with contextlib.suppress(OSError):  # a full disk, or another reader who writes the same
                known = _append(kept, known, _record(_identity(path), offset, text, block))
        offset += len(text)
        yield block


class ColumnKeeper:
    """Keeps the columns of a run's events while they are written; a call costs what has arrived since the last one."""

    def __init__(self, path: Path) -> None:
        self._path, self._kept = path, path.with_suffix(".columns")
        self._offset = self._known = 0
        for block, end, _ in _kept_blocks(path, self._kept, with_columns=False):
            self._offset, self._known = self._offset + block.num_bytes, end

    def keep(self) -> None:
        """Write a record for each large block of new events; raise `OSError` if it cannot."""
        if self._path.stat().st_size - self._offset < BLOCK_BYTES:
            return
        for text in blocks(self._path, self._offset):
            if len(text) < KEPT_BYTES:
                return
            record = _record(_identity(self._path), self._offset, text, parsed(text))
            self._known = _append(self._kept, self._known, record)
            self._offset += len(text)


def _kept_blocks(path: Path, kept: Path, with_columns: bool) -> Iterator[tuple[EventBlock, int, bool]]:
    """Yield the kept blocks that agree with the events, with the end of the record and whether the file is the same."""
    with contextlib.suppress(OSError), kept.open("rb") as file, path.open("rb") as events:
        heads = list(_headers(file))
        is_same = bool(heads) and heads[-1][0]["file"] == _identity(path) is not None
        text = memoryview(bytearray(0 if is_same else max((head["bytes"] for head, _ in heads), default=0)))
        for head, end in heads:
            if not is_same:
                events.seek(head["start"])
                length = events.readinto(text[: head["bytes"]])  # new memory for each block would take longer to map
                if length != head["bytes"] or zlib.crc32(text[:length]) != head["crc32"]:
                    return
            steps: Array | Rows = np.empty((len(LOGGED), 0))
            samples = np.empty((SAMPLE_ROWS, head["samples"] if with_columns else 0))
            if with_columns:
                file.seek(end - samples.nbytes)
                file.readinto(samples.data)
                if zlib.crc32(samples.data) != head["samples_crc32"]:
                    return
                steps = KeptSteps(path, head, end - samples.nbytes - 8 * _width(head) * head["steps"])
            others = tuple((line, steps, event) for line, steps, event in head["others"])
            names, scalars = tuple(head["names"]), tuple(head["scalars"]) if with_columns else ()
            facts = (head["device_type"], others, head["damaged"], scalars)
            block = EventBlock(head["bytes"], steps, samples, names, *facts)
            yield block, end, is_same


def _headers(file: BinaryIO) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the headers of intact records that follow one another, each with the offset of the end of its record."""
    size, position, start = file.seek(0, io.SEEK_END), 0, 0
    while position + _HEAD.size <= size:
        file.seek(position)
        magic, length, crc = _HEAD.unpack(file.read(_HEAD.size))
        text = file.read(length) if magic == _MAGIC else b""
        if len(text) != length or zlib.crc32(text) != crc:
            return
        head = json.loads(text)
        position += _HEAD.size + length + 8 * (_width(head) * head["steps"] + SAMPLE_ROWS * head["samples"])
        if head["columns"] != list(LOGGED) or head["start"] != start or position > size:
            return
        start += head["bytes"]
        yield head, position


def _width(head: dict[str, Any]) -> int:
    """Return the number of rows of a record's steps."""
    return len(LOGGED) + len(head["scalars"])


def _record(identity: list[int] | None, start: int, text: bytes, block: EventBlock) -> bytes:
    steps, samples = [block.steps[row].tobytes() for row in range(block.steps.shape[0])], block.samples.tobytes()
    head = {
        "file": identity,
        "start": start,
        "bytes": len(text),
        "crc32": zlib.crc32(text),
        "columns": LOGGED,
        "scalars": block.scalars,
        "steps": block.steps.shape[1],
        "samples": block.samples.shape[1],
        "steps_crc32": [zlib.crc32(row) for row in steps],
        "samples_crc32": zlib.crc32(samples),
        "names": block.names,
        "device_type": block.device_type,
        "others": block.others,
        "damaged": block.damaged,
    }
    header = json.dumps(head).encode()
    return _HEAD.pack(_MAGIC, len(header), zlib.crc32(header)) + header + b"".join((*steps, samples))


def _identity(path: Path) -> list[int] | None:
    """Return what changes whenever a file does; None if it changed too lately for another to show, or is gone."""
    try:
        at = path.stat()
    except OSError:
        return None
    settled = time.time() - max(at.st_mtime, at.st_ctime) > SETTLED_S
    return [at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns] if settled else None


def _append(kept: Path, known: int, record: bytes) -> int:
    """Write a record after the first `known` bytes, in place of what is damaged or outdated; return where it ends."""
    descriptor = os.open(kept, os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(known)
        file.seek(known)
        file.write(record)
    return known + len(record)
