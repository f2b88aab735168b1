"""What was read of a run's events, kept beside them as `history.bin`, so that they are parsed once only.

The file holds a line with its own digest, a line of JSON, and the columns as they stand in memory. It is only ever
replaced as a whole. It counts if its digest does, and if the events that it was made of are still the beginning of
`events.jsonl`: known by size, inode and time of the last change, or else by a digest of those bytes. Everything
else (damage, another version's file, a folder that cannot be written) means reading the events again, never an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import xxhash
from numpy.typing import NDArray

Table = NDArray[np.float64]

FORMAT = 1
ALIGNMENT = 64
BLOCK_BYTES = 2**22
LOCAL_DISKS = {"apfs", "btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs", "zfs"}
"""Where a file that was opened stays whole even if another host removes it, so that it may be mapped into memory."""


@dataclass(frozen=True)
class Kept:
    """What was read of the first `offset` bytes of the events."""

    offset: int
    state: dict[str, Any]
    """Whatever JSON was saved."""
    tables: dict[str, Table]
    """Two-dimensional and read-only; none if they were not asked for."""


def history_file(events: Path) -> Path:
    return events.with_name("history.bin")


def save(events: Path, offset: int, state: Mapping[str, Any], tables: Mapping[str, Table]) -> bool:
    """Keep what was read of the first `offset` bytes; False, and nothing written, where that cannot be.

    `tables` are of float64, their rows contiguous.
    """
    path = history_file(events)
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        now = events.stat()
        digest = _prefix_digest(events, offset)
        known = {"offset": offset, "digest": digest, "size": now.st_size, "inode": now.st_ino, "mtime": now.st_mtime_ns}
        header = {
            "format": FORMAT,
            "events": known,
            "state": dict(state),
            "tables": {name: list(table.shape) for name, table in tables.items()},
            "tables_digest": _tables_digest(tables),
        }
        with part.open("wb") as file:
            text = json.dumps(header).encode()
            file.write(b"%s\n%s\n" % (xxhash.xxh3_64_hexdigest(text).encode(), text))
            file.write(bytes(-file.tell() % ALIGNMENT))
            for table in tables.values():
                for row in table:
                    file.write(row.data)
        part.replace(path)
    except OSError:  # read-only, full, or the run was removed
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        return False
    return True


def load(events: Path, with_tables: bool = True) -> Kept | None:
    """What was kept of these events, if it still holds of them."""
    path = history_file(events)
    try:
        with path.open("rb") as file:
            header = _header(file.readline(), file.readline())
            start = file.tell() + -file.tell() % ALIGNMENT
        if header is None or not _is_beginning(events, header["events"]):
            return None
        tables = _tables(path, start, header) if with_tables else {}
        return Kept(int(header["events"]["offset"]), header["state"], tables)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _header(digest: bytes, text: bytes) -> dict[str, Any] | None:
    text = text.rstrip(b"\n")
    if xxhash.xxh3_64_hexdigest(text).encode() != digest.rstrip(b"\n"):
        return None
    header: dict[str, Any] = json.loads(text)
    return header if header["format"] == FORMAT else None


def _is_beginning(events: Path, known: Mapping[str, Any]) -> bool:
    now = events.stat()
    if (now.st_size, now.st_ino, now.st_mtime_ns) == (known["size"], known["inode"], known["mtime"]):
        return True
    return bool(now.st_size >= known["offset"] and _prefix_digest(events, known["offset"]) == known["digest"])


def _prefix_digest(path: Path, length: int) -> str:
    digest, left = xxhash.xxh3_64(), length
    with path.open("rb") as file:
        while left and (block := file.read(min(left, BLOCK_BYTES))):
            digest.update(block)
            left -= len(block)
    return f"{digest.hexdigest()}-{left}"


def _tables(path: Path, start: int, header: Mapping[str, Any]) -> dict[str, Table]:
    """Raises `ValueError` where the file is shorter than its header says, or changed."""
    shapes = {name: tuple(shape) for name, shape in header["tables"].items()}
    count = sum(int(np.prod(shape)) for shape in shapes.values())
    if path.stat().st_size != start + count * 8:
        raise ValueError("cut short")
    if count == 0:
        values = np.empty(0)
    elif _on_local_disk(path):
        values = np.memmap(path, np.float64, "r", offset=start, shape=(count,))
    else:
        values = np.fromfile(path, np.float64, offset=start)
    tables, begin = {}, 0
    for name, shape in shapes.items():
        end = begin + int(np.prod(shape))
        tables[name] = np.asarray(values[begin:end]).reshape(shape)
        begin = end
    if _tables_digest(tables) != header["tables_digest"]:
        raise ValueError("changed")
    return tables


def _tables_digest(tables: Mapping[str, Table]) -> str:
    digest = xxhash.xxh3_64()
    for table in tables.values():
        for row in table:
            digest.update(row.data)
    return digest.hexdigest()


def _on_local_disk(path: Path) -> bool:
    try:
        mounts = [disk for disk in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(disk.mountpoint)]
    except (OSError, RuntimeError):
        return False
    innermost = max(mounts, key=lambda disk: len(disk.mountpoint), default=None)
    return bool(innermost is not None and innermost.fstype in LOCAL_DISKS)
