"""The logged steps of a run, in binary: rank 0 appends a row for each step, and everybody else reads columns.

    steps.tail     a header, then the latest rows: a float64 for each name of the header, and the row's CRC-32
    steps.table    blocks of rows that stood in the tail: a header each, then its columns, one after the other

A header is the magic, its length, its CRC-32, and JSON: `first` is the number of its first row, counted from 0 over all
attempts, and `names` are those of its columns. A block states its `rows` too, and the CRC-32 of each column.

Rows stand in the order in which they were written: a resumption repeats steps in later rows, and its `start` event says
how many rows were written before it. The table is only appended to. The tail is replaced as a whole, once its rows are
in the table. Therefore whoever reads the tail first and the table afterwards misses no row. A process that is killed
in between loses none either: the rows of the tail that the table has as well are passed over.

A checksum says that bytes are whole, not that they are true: the file may come from anybody, or from a later version.
So a header counts only if its fields are those above, in their ranges, and fit the file; everything else is damage.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import struct
import threading
import time
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.base.errors import InvalidArgument
from workbench.record.columns import COLUMNS
from workbench.record.events import StepEvent
from workbench.record.rundir import NO_ROOM, RunDir, next_data, opened, parsed, write_whole

Array = NDArray[np.float64]
LOGGED = tuple(name for name, column in COLUMNS.items() if not column.is_derived)
"""The figures of a step that are columns of every row; the scalars that a run logs follow them."""
BLOCK_ROWS = 4096
"""Number of rows from which the tail becomes a block."""
MOST_ROWS, MOST_NAMES = 2**14, 10_000
"""Most rows of a block or a tail, and most names of a table, that a reader believes."""
MOST_STEPS = 2**53
"""Largest step and number of a row: a float64 holds no larger ones exactly."""
UNKNOWN = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0001))[0]
"""A NaN for a figure that a row does not have: a loss that is NaN has other bits."""
_UNKNOWN_BITS = 0x7FF8_0000_0000_0001
_MAGIC = b"WBsteps1"
_HEAD = struct.Struct("<8sII")
"""Magic, length and CRC-32 of the JSON that follows, which is padded to whole float64s."""
_HEADER_BYTES, _MOST_HEADER_BYTES = 4096, 2**20
"""Bytes in which most headers fit, and all of them."""
_MOST_DAMAGED = 100
"""Number of damaged headers in a row after which the rest of a table is given up."""


class GrowingTable:
    """A matrix that grows by columns; arrays that were handed out never change."""

    def __init__(self, rows: int, room: int = 1024) -> None:
        self._values = np.empty((rows, room))
        self.length = 0

    def view(self) -> Array:
        """Return all columns so far."""
        columns = self._values[:, : self.length]
        columns.flags.writeable = False
        return columns

    def append(self, columns: Array) -> None:
        """Append columns, given as a matrix."""
        count = columns.shape[1]
        if not self.length and count > self._values.shape[1]:
            self._values = columns
        elif self.length + count > self._values.shape[1]:
            grown = np.empty((len(self._values), self.length + max(count, self.length)))
            grown[:, : self.length] = self._values[:, : self.length]
            self._values = grown
        if self._values is not columns:
            self._values[:, self.length : self.length + count] = columns
        self.length += count

    def cut(self, length: int) -> None:
        """Forget all columns but the first `length`."""
        if length < self.length:
            self._values = self._values[:, :length].copy()  # columns handed out earlier keep their values
            self.length = length


def _header(fields: Mapping[str, Any]) -> bytes:
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return _HEAD.pack(_MAGIC, len(text), zlib.crc32(text)) + text


def _read_header(descriptor: int, position: int) -> tuple[dict[str, Any], int] | None:
    """Return the header at a position of a file, and where it ends; None if there is none that is intact."""
    text = os.pread(descriptor, _HEADER_BYTES, position)
    if len(text) < _HEAD.size or not text.startswith(_MAGIC):
        return None
    _, length, checksum = _HEAD.unpack_from(text)
    if length > _MOST_HEADER_BYTES:
        return None
    if length > len(text) - _HEAD.size:
        text = os.pread(descriptor, _HEAD.size + length, position)
    body = text[_HEAD.size : _HEAD.size + length]
    if len(body) != length or zlib.crc32(body) != checksum:
        return None
    with contextlib.suppress(ValueError):
        if _is_true(fields := parsed(body)):
            return fields, position + _HEAD.size + length
    return None


def _is_true(fields: Any) -> bool:
    """Return True for the fields of a header that this version may have written, by their types and ranges."""
    if not isinstance(fields, dict) or set(fields) not in ({"first", "names"}, {"first", "names", "rows", "crc32"}):
        return False
    names, checksums = fields["names"], fields.get("crc32", [])
    return (
        isinstance(names, list)
        and 0 < len(names) <= MOST_NAMES
        and set(map(type, names)) == {str}
        and len(set(names)) == len(names)
        and "step" in names
        and _is_whole(fields["first"], 0, MOST_STEPS)
        and ("rows" not in fields or _is_whole(fields["rows"], 1, MOST_ROWS))
        and isinstance(checksums, list)
        and ("crc32" not in fields or len(checksums) == len(names))
        and set(map(type, checksums)) <= {int}
        and 0 <= min(checksums, default=0) <= max(checksums, default=0) < 2**32
    )


def _is_whole(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _are_steps(values: Array) -> NDArray[np.bool_]:
    """Return which values are numbers of steps."""
    return np.asarray((values >= 0) & (values <= MOST_STEPS) & (values == np.floor(values)))


# Writing


class _Writer:
    """Appends rows to the table of one run.

    Nothing is assumed of the files but what stands in them: when a tail is not the one that this writer has left, or a
    row has a figure that its header does not name, its rows become a block, and a new tail is begun.
    """

    def __init__(self, folder: Path) -> None:
        self._run, self._names = RunDir(folder), LOGGED
        self._head, self._size = b"", -1
        """First bytes of the tail, and its size, as this writer has left it; none yet."""
        self._first = self._rows = 0
        """Number of the first row of the tail, and of its rows."""
        self.waiting: list[Mapping[str, float]] = []
        """Rows that a full disk has not taken yet."""

    def write_waiting(self) -> None:
        """Append every waiting row, or raise `OSError` and leave the files as they are."""
        how = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        left = 1000
        while self.waiting:
            descriptor = os.open(self._run.steps_tail, how, 0o600)
            try:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                at, is_current = os.fstat(descriptor), False
                with contextlib.suppress(FileNotFoundError):
                    is_current = os.path.samestat(at, self._run.steps_tail.lstat())
                if not is_current:  # another writer replaced it while this one waited for the lock
                    left -= 1
                    if not left:
                        raise OSError(errno.EAGAIN, f"{self._run.steps_tail} is replaced all the time")
                    continue
                head = os.pread(descriptor, _HEAD.size, 0)
                is_own = (head, at.st_size) == (self._head, self._size)
                known = self._names if is_own else LOGGED
                names = tuple(dict.fromkeys((*known, *(name for row in self.waiting for name in row))))
                if is_own and names == self._names and self._rows < BLOCK_ROWS:
                    self._append(descriptor)
                else:
                    self._begin(names)
            finally:
                os.close(descriptor)

    def _append(self, descriptor: int) -> None:
        lines, room = list[bytes](), BLOCK_ROWS - self._rows
        for number, row in enumerate(self.waiting[:room], self._first + self._rows):
            values = struct.pack(f"<{len(self._names)}d", *(row.get(name, UNKNOWN) for name in self._names))
            lines.append(values + struct.pack("<Q", _row_checksum(values, number)))
        data = b"".join(lines)
        write_whole(descriptor, data, self._size)
        self._rows, self._size = self._rows + len(lines), self._size + len(data)
        del self.waiting[:room]

    def _begin(self, names: tuple[str, ...]) -> None:
        """Move the rows of the tail into a block, and begin a tail with rows of these names."""
        table = StepTable(self._run.path)
        count = table.refresh()
        first = max(table.num_in_blocks, table.first_in_tail)
        if count > first:
            self._append_block(table, first, count)
        header = _header({"first": count, "names": names})
        part = self._run.steps_tail.with_suffix(".part")
        try:
            part.touch(0o600)
            part.write_bytes(header)
            part.replace(self._run.steps_tail)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        self._head, self._size = header[: _HEAD.size], len(header)
        self._names, self._first, self._rows = names, count, 0

    def _append_block(self, table: StepTable, first: int, end: int) -> None:
        columns = {name: table.column(name, first, end).tobytes() for name in table.tail_names}
        checksums = [zlib.crc32(values) for values in columns.values()]
        header = _header({"first": first, "rows": end - first, "names": list(columns), "crc32": checksums})
        descriptor = os.open(self._run.steps, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if table.torn_at is not None:  # readers would take what follows for the rest of it
                os.ftruncate(descriptor, table.torn_at)
            size = os.lseek(descriptor, 0, os.SEEK_END)
            write_whole(descriptor, header + b"".join(columns.values()), size)
        finally:
            os.close(descriptor)


def _row_checksum(values: bytes | memoryview, number: int) -> int:
    """Return the CRC-32 of a row and of its number, so that a row in the place of another is none."""
    return zlib.crc32(values, number & 0xFFFF_FFFF)


_WRITERS: dict[Path, _Writer] = {}
_WRITERS_LOCK = threading.Lock()


def log_step(folder: Path, /, **figures: Any) -> None:
    """Append a step to the table of the run in a folder; `workbench.record.events.StepEvent` lists its fields.

    On a full disk it waits in memory until a later step can be written: training goes on, and loses no step if the disk
    gets room again before it ends. Raises `OSError` for every other reason.
    """
    log_steps(folder, [figures])


def log_steps(folder: Path, steps: Sequence[Mapping[str, Any]]) -> None:
    """Append steps as `log_step` does, at once."""
    now = time.time()
    rows = list[Mapping[str, float]]()
    for figures in steps:
        values = {"time": now, **figures, **(figures.get("scalars") or {})}
        rows.append({name: float(v) for name, v in values.items() if name not in ("type", "scalars") and v is not None})
        if len(rows[-1]) > MOST_NAMES:
            raise InvalidArgument(f"Step {figures.get('step')} logs {len(rows[-1]):,} figures; {MOST_NAMES:,} at most.")
    with _WRITERS_LOCK:
        writer = _WRITERS.setdefault(folder, _Writer(folder))
        writer.waiting += rows
        try:
            writer.write_waiting()
        except OSError as error:
            if error.errno not in NO_ROOM:
                writer.waiting.clear()
                raise


def write_waiting(folder: Path) -> None:
    """Write the rows that wait for a full disk; raises `OSError` if they wait on."""
    with _WRITERS_LOCK:
        if folder in _WRITERS:
            _WRITERS[folder].write_waiting()


def num_waiting(folder: Path) -> int:
    """Return the number of rows of this process that wait for a full disk, after another trial to write them."""
    with contextlib.suppress(OSError):
        write_waiting(folder)
    return len(_WRITERS[folder].waiting) if folder in _WRITERS else 0


def num_logged(folder: Path) -> int:
    """Return the number of rows so far, which a `start` event states; those that wait for a full disk count too."""
    with _WRITERS_LOCK:
        writer = _WRITERS.get(folder)
        return StepTable(folder).refresh() + (len(writer.waiting) if writer else 0)


# Reading


class _Block(NamedTuple):
    """The header of a block, and where its columns stand."""

    first: int
    end: int
    names: list[str]
    checksums: list[int]
    start: int
    """Offset of its first column."""


class StepTable:
    """Reads the table of a run while it is written. Rows are found by `refresh`, and columns read when asked for.

    A figure that is unknown is NaN, and so are all figures of a row that is lost: `step` tells which are.
    """

    def __init__(self, folder: Path, latest: int | None = None) -> None:
        """Look for all rows, or for the last `latest`, and perhaps more."""
        self._run, self._latest = RunDir(folder), latest
        self._blocks: list[_Block] = []
        self._scanned = self._size = 0
        """End of the last whole block, and the size of the table that was looked through."""
        self.torn_at: int | None = None
        """Offset of a block that is not whole; None if there is none."""
        self.first_in_tail, self.tail_names, self._tail = 0, list(LOGGED), GrowingTable(len(LOGGED))
        """Number of the tail's first row, names of its figures, and its rows as far as they were read."""
        self._is_headless = False
        """True if the tail's header is damaged, or more rows follow it than a writer leaves there."""
        self._num_refused = 0
        """Number of blocks that contradict the tail, or name more figures than a table has."""
        self.names = dict.fromkeys(LOGGED)
        """Names of all columns."""
        self.lock = threading.RLock()
        self.damaged: dict[str, None] = {}
        """Places that differ from what was written, as far as read: `"loss of rows 4,096 to 8,191 of steps.table"`."""

    @property
    def num_in_blocks(self) -> int:
        """The number of rows up to the end of the last block."""
        return self._blocks[-1].end if self._blocks else 0

    def __len__(self) -> int:
        return max(self.num_in_blocks, self.first_in_tail + self._tail.length)

    def refresh(self) -> int:
        """Look for rows that were written since the last call, and return the number of all rows."""
        with self.lock:
            # Rows that leave the tail after it was read stand in a block by then.
            with contextlib.suppress(FileNotFoundError), opened(self._run.steps_tail) as descriptor:
                self._read_tail(descriptor)
            if self._tail.length < (self._latest or math.inf):
                with contextlib.suppress(FileNotFoundError), opened(self._run.steps) as descriptor:
                    self._find_blocks(descriptor)
            return len(self)

    def _read_tail(self, descriptor: int) -> None:
        found = _read_header(descriptor, 0)
        self._is_headless = found is None and os.fstat(descriptor).st_size > 0
        if found is None:
            if self._is_headless:
                self.damaged["the header of steps.tail"] = None
            return
        header, start = found
        first, names, width = header["first"], header["names"], len(header["names"]) + 1
        size = os.fstat(descriptor).st_size - start
        if size > 8 * width * MOST_ROWS:
            self._is_headless, size = True, 8 * width * MOST_ROWS
            self.damaged[f"what follows {MOST_ROWS:,} rows of steps.tail"] = None
        if self._latest is not None:
            skipped = max(0, size // (8 * width) - self._latest)
            first, start, size = first + skipped, start + 8 * width * skipped, size - 8 * width * skipped
        if (first, names) != (self.first_in_tail, self.tail_names):
            self.first_in_tail, self.tail_names, self._tail = first, names, GrowingTable(width - 1)
            self.names |= dict.fromkeys(names)
        read = 8 * width * self._tail.length
        text = os.pread(descriptor, max(0, size - read), start + read)
        rows = np.frombuffer(text[: len(text) // (8 * width) * 8 * width], np.float64).reshape(-1, width)
        number, view, size = first + self._tail.length, memoryview(text), 8 * width
        are_steps = _are_steps(rows[:, names.index("step")]).tolist()
        stated = enumerate(rows.view(np.uint64)[:, -1].tolist())
        intact = [_row_checksum(view[at * size : (at + 1) * size - 8], number + at) == crc for at, crc in stated]
        while intact and not intact[-1]:  # torn, or not written to its end yet
            intact.pop()
        if not intact:
            return
        intact = [is_intact and is_step for is_intact, is_step in zip(intact, are_steps, strict=False)]
        columns = rows[: len(intact), :-1].T
        if not all(intact):
            columns = np.where(intact, columns, math.nan)
            for lost in np.flatnonzero(~np.array(intact)).tolist():
                self.damaged[f"row {number + lost:,} of steps.tail"] = None
        self._tail.append(columns)

    def _find_blocks(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        if size == self._size:
            return
        self._size, position, self.torn_at, begun, num_damaged = size, self._scanned, None, None, 0
        while position < size:
            found = _read_header(descriptor, position)
            end = -1
            if found is not None and "rows" in found[0]:
                head, start = found
                end = start + 8 * head["rows"] * len(head["names"])
            if not 0 < end <= size:  # no block, or one that is torn, unless a whole one follows
                begun = position if begun is None else begun
                self.torn_at = position if end > 0 and self.torn_at is None else self.torn_at
                num_damaged += 1
                position = size if num_damaged == _MOST_DAMAGED else _next_magic(descriptor, position + 1)
                continue
            if begun is not None:
                self.damaged[f"bytes {begun:,} to {position - 1:,} of steps.table"] = None
                begun, self.torn_at, num_damaged = None, None, 0
            last = head["first"] + head["rows"]
            block = _Block(head["first"], last, head["names"], head["crc32"], start)
            if head["first"] >= self.num_in_blocks:
                names = self.names | dict.fromkeys(head["names"])
                if len(names) > MOST_NAMES or self._contradicts_tail(descriptor, block):
                    self._num_refused += 1
                    self.damaged[f"bytes {position:,} to {end - 1:,} of steps.table"] = None
                else:
                    self._blocks.append(block)
                    self.names = names
            self._scanned = position = end
        if num_damaged == _MOST_DAMAGED and begun is not None:
            self.damaged[f"bytes {begun:,} to {size - 1:,} of steps.table"] = None

    def _contradicts_tail(self, descriptor: int, block: _Block) -> bool:
        """Return True if a block has rows that stand in the tail as well, where their figures are others."""
        first = max(block.first, self.first_in_tail)
        end = min(block.end, self.first_in_tail + self._tail.length)
        if first >= end:
            return False
        tail = self._tail.view()[:, first - self.first_in_tail : end - self.first_in_tail]
        found = np.empty(tail.shape)
        for name, values in zip(self.tail_names, found, strict=True):
            self._read_column(descriptor, block, name, first, values)
        step = self.tail_names.index("step")
        are_known = ~(np.isnan(found[step]) | np.isnan(tail[step]))
        return bool((found.view(np.uint64) != tail.view(np.uint64))[:, are_known].any())

    @property
    def num_lost(self) -> int:
        """The number of rows that are in no block and not intact in the tail; a tail without a header counts as one."""
        begins = [*(block.first for block in self._blocks), max(self.num_in_blocks, self.first_in_tail)]
        ends = [0, *(block.end for block in self._blocks)]
        skipped = max(0, self.num_in_blocks - self.first_in_tail)
        in_tail = self._tail.view()[self.tail_names.index("step"), skipped:]
        lost_in_tail = int(np.count_nonzero(np.isnan(in_tail)))
        return sum(begins) - sum(ends) + lost_in_tail + self._is_headless + self._num_refused

    def held(self, first: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield the ranges of rows that stand in the files, in order; between them are rows that are lost.

        A damaged file may state any number of rows: whoever reads them all reads range by range.
        """
        with self.lock:
            tail = (max(self.num_in_blocks, self.first_in_tail), self.first_in_tail + self._tail.length)
            ranges = [*((block.first, block.end) for block in self._blocks), tail]
        at, stop = None, len(self) if end is None else end
        for low, high in ranges:
            low, high = max(low, first), min(high, stop)
            if low < high and at is not None and at[1] == low:
                at = at[0], high
            elif low < high:
                if at is not None:
                    yield at
                at = low, high
        if at is not None:
            yield at

    def column(self, name: str, first: int = 0, end: int | None = None) -> Array:
        """Return one figure of the rows from `first` up to `end`, by default of all that `refresh` has found."""
        with self.lock:
            found = len(self)
            end = found if end is None else end
            values, at = np.empty(max(0, end - first)), first
            values[max(0, found - first) :] = math.nan
            end = min(end, found)
            begin = bisect_right(self._blocks, first, key=lambda block: block.end)
            if begin < len(self._blocks) and self._blocks[begin].first < end:
                with opened(self._run.steps) as descriptor:
                    for block in self._blocks[begin:]:
                        if block.first >= end:
                            break
                        low, high = max(block.first, first), min(block.end, end)
                        values[at - first : low - first] = math.nan
                        self._read_column(descriptor, block, name, low, values[low - first : high - first])
                        at = high
            in_tail = max(at, self.first_in_tail)
            values[at - first : min(in_tail, end) - first] = math.nan
            if in_tail < end:
                rows = slice(in_tail - self.first_in_tail, end - self.first_in_tail)
                names, table = self.tail_names, self._tail.view()
                values[in_tail - first : end - first] = table[names.index(name), rows] if name in names else UNKNOWN
            return values

    def _read_column(self, descriptor: int, block: _Block, name: str, low: int, into: Array) -> None:
        """Read the rows of a block's column from `low` on; the whole column is compared with its checksum."""
        if name not in block.names:
            into[:] = UNKNOWN
            return
        index, rows = block.names.index(name), block.end - block.first
        values = into if len(into) == rows else np.empty(rows)
        count = os.preadv(descriptor, [values.data.cast("B")], block.start + 8 * rows * index)
        if count != values.nbytes or zlib.crc32(values.data) != block.checksums[index]:
            self.damaged[f"{name} of rows {block.first:,} to {block.end - 1:,} of steps.table"] = None
            values[:] = math.nan
        if name == "step" and not (are_steps := _are_steps(values) | np.isnan(values)).all():
            self.damaged[f"steps of rows {block.first:,} to {block.end - 1:,} of steps.table"] = None
            values[~are_steps] = math.nan
        if values is not into:
            into[:] = values[low - block.first : low - block.first + len(into)]

    def events(self, first: int = 0, end: int | None = None) -> list[StepEvent]:
        """Return rows as `step` events, without those that are lost."""
        fields, scalars = dict[str, list[Any]](), dict[str, list[Any]]()
        steps = self.column("step", first, end)
        for name in () if np.isnan(steps).all() else self.names:
            values = steps if name == "step" else self.column(name, first, end)
            found: list[Any] = values.tolist()
            if name in COLUMNS and COLUMNS[name].is_whole:
                found = [int(value) if value.is_integer() else value for value in found]
            for index in np.flatnonzero(values.view(np.uint64) == _UNKNOWN_BITS).tolist():
                found[index] = None
            (fields if name in LOGGED else scalars)[name] = found
        events = list[Any]()
        own = zip(*scalars.values(), strict=True) if scalars else None
        for figures in zip(*fields.values(), strict=True):
            event: dict[str, Any] = {"type": "step", **dict(zip(fields, figures, strict=True))}
            if own is not None:
                logged = {name: value for name, value in zip(scalars, next(own), strict=True) if value is not None}
                event |= {"scalars": logged} if logged else {}
            if event["step"] == event["step"]:  # not NaN: the row is not lost
                events.append(event)
        return events


def latest_steps(folder: Path, count: int) -> list[StepEvent]:
    """Return the last rows of a table as events, at most `count`; of a long table, the rest is not looked at."""
    table = StepTable(folder, latest=count)
    first = max(0, table.refresh() - count)
    return [event for low, high in table.held(first) for event in table.events(low, high)]


def _next_magic(descriptor: int, position: int) -> int:
    """Return the next position at which a header may begin; the end of the file if there is none."""
    size, overlap = os.fstat(descriptor).st_size, len(_MAGIC) - 1
    while position < size:
        text = os.pread(descriptor, 2**20, position)
        found = text.find(_MAGIC)
        if found >= 0:
            return position + found
        position = next_data(descriptor, position + max(1, len(text) - overlap))
    return size
