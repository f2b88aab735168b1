"""The log of a run, `events.jsonl`: read in blocks, kept in binary, and folded into one state.

Logged steps and device samples become NumPy columns, everything else dicts.

Nearly all lines of a long run are steps, written alike. Arrow parses all steps of a block at once. A block that Arrow
refuses (an infinity, a word where a number belongs) is parsed line by line, with the same result. Lines that differ
from what was written are counted and left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
import os
import statistics
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.columns import COLUMNS
from workbench.display import facts_html
from workbench.events import (
    CheckpointEvent,
    DataUseEvent,
    EndEvent,
    Event,
    MemoryEvent,
    PhaseEvent,
    SpikeEvent,
    StartEvent,
    StepEvent,
    TrackingEvent,
)
from workbench.rundir import CHECKSUM, FINAL_STATES, is_intact, parse_event

Array = NDArray[np.float64]
Lines = NDArray[np.int64]
LOGGED = tuple(name for name, column in COLUMNS.items() if not column.is_derived)
"""The figures of a `step` event that become columns, in this order."""
SAMPLE_ROWS = 5
"""Rows of `EventBlock.samples`."""
BLOCK_BYTES = 8 * 2**20
BULK_BYTES = 2**18
"""Size of a block from which Arrow is faster than Python, in spite of its start-up time."""
RECENT_BYTES = 2**20
"""Bytes before the end of a file that are searched for the latest steps at a time."""
SPREAD_BYTES = 2**12
"""Bytes in which `spread_steps` looks for a step."""
_STEP = b'{"type": "step"'
_SCALARS = b'"scalars": {'
_ACTIONS = b'{"type": "actions"'
"""Beginning of long events that only the timeline reads, from the file itself."""
_DEVICE = b'{"type": "device"'
"""Beginning of a device sample; in a long run every eighth line or so is one."""
_HEX_DIGIT = np.array([int(chr(byte), 16) if chr(byte) in "0123456789abcdef" else 1 << 40 for byte in range(256)])


@dataclass(frozen=True)
class EventBlock:
    """The events of some whole lines, which are numbered from 0."""

    num_bytes: int
    steps: Array | KeptSteps
    """One column a logged step and one row for each of `LOGGED` and of `scalars`; kept ones are read row by row."""
    samples: Array
    """One column a sample of one device: number of its line, time, index in `names`, utilisation, bytes in use."""
    names: tuple[str, ...]
    """Names of the sampled devices: `"GPU 0"`, or in a multi-node run `"node 1, GPU 0"`."""
    device_type: str
    others: tuple[tuple[int, int, Event], ...]
    """Every other event but `actions`, each after the number of its line and of the steps before it."""
    damaged: int = 0
    """Number of lines that differ from what was written."""
    scalars: tuple[str, ...] = ()
    """Names of the scalars that the steps log (`workbench.log_scalar`), whose rows follow those of `LOGGED`."""


def blocks(path: Path, offset: int = 0) -> Iterator[bytes]:
    """Yield the whole lines of a file from `offset` on, some megabytes at a time, without a torn last line."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        begun = b""
        while chunk := file.read(BLOCK_BYTES):
            end = chunk.rfind(b"\n") + 1
            if end:
                yield begun + chunk[:end]
                begun = chunk[end:]
            else:
                begun += chunk


def parsed(block: bytes, with_columns: bool = True) -> EventBlock:
    """Return the events of some whole lines; without steps and samples, and sooner, unless `with_columns`."""
    if len(block) >= BULK_BYTES or not with_columns:
        with contextlib.suppress(_Unusual):
            return _in_bulk(block, with_columns)
    return _line_by_line(block)


def recent_steps(path: Path, start: int, end: int, count: int) -> list[Event]:
    """Return the last `count` step events between two offsets of a file, each at the beginning of a line."""
    steps = list[Event]()
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        while end > start and len(steps) < count:
            begin = max(start, end - RECENT_BYTES)
            file.seek(begin)
            text = file.read(end - begin)
            if begin > start:  # the first line is probably torn
                whole = text.find(b"\n") + 1
                begin, text = begin + whole, text[whole:]
            end = begin if text else start
            lines = [line for line in text.splitlines() if line.startswith(_STEP)][count * -2 :]
            steps = [event for line in lines if (event := parse_event(line)) is not None] + steps
    return steps[-count:]


def spread_steps(path: Path, count: int) -> list[Event]:
    """Return about `count` step events spread evenly over a file, without reading all of it, in order of their steps.

    Of steps that a resumption repeats, the later ones are returned.
    """
    lines = list[bytes]()
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        places = [0] if size <= BULK_BYTES else range(0, size, max(1, size // count))
        for place in places:
            file.seek(place)
            text = file.read(SPREAD_BYTES if size > BULK_BYTES else size)
            lines_here = [line for line in text.splitlines()[place > 0 :] if line.startswith(_STEP)]
            lines += lines_here[:1] if size > BULK_BYTES else lines_here[:: max(1, len(lines_here) // count)]
    steps, first = list[Any](), math.inf
    for line in reversed(lines):
        event: Any = parse_event(line) or {}
        number = event.get("step")
        if isinstance(number, int | float) and number < first:
            steps.append(event)
            first = number
    return steps[::-1]


class _Unusual(ValueError):
    """A block with lines that `append_event` does not write."""


def _in_bulk(block: bytes, with_columns: bool) -> EventBlock:
    if b"\r" in block:  # the end of a line, to other readers
        raise _Unusual
    text = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(text == ord("\n"))
    starts = np.concatenate([[0], ends[:-1] + 1])
    intact = _intact(block, text, starts, ends)
    damaged = int((~intact & (ends > starts)).sum())
    is_step, is_device, is_actions = (_begin_with(text, starts, prefix) for prefix in (_STEP, _DEVICE, _ACTIONS))
    steps_before = np.cumsum(is_step & intact)
    others = list[tuple[int, int, Event]]()
    for line in np.flatnonzero(intact & ~(is_step | is_device | is_actions)).tolist():
        event = parse_event(block[starts[line] : ends[line]], is_checked=True)
        if event is not None and event["type"] in ("step", "device", "actions"):
            raise _Unusual  # another program wrote it, with its fields in another order
        if event is not None:
            others.append((line, int(steps_before[line]), event))
    samples, steps, scalars = _Samples(), np.empty((len(LOGGED), 0)), tuple[str, ...]()
    if with_columns:
        for line in np.flatnonzero(intact & is_device).tolist():
            samples.add(line, parse_event(block[starts[line] : ends[line]], is_checked=True))
        steps, scalars = _columns(_cut_out(block, starts, ends, is_step & intact), int((is_step & intact).sum()))
    return EventBlock(len(block), steps, *samples.of_block(), tuple(others), damaged, scalars)


def _intact(block: bytes, text: NDArray[np.uint8], starts: Lines, ends: Lines) -> NDArray[np.bool_]:
    """Return which lines are intact, as `is_intact` says it of one line."""
    # The last bytes of all lines are compared as one matrix. Only the checksums themselves need a loop, in which the C
    # code of zlib takes nearly all of the time: a CRC-32 depends on every byte before, so that lines cannot share one.
    suffix = text.take(ends[:, None] + np.arange(-len(CHECKSUM) - 10, 0), mode="clip")
    frame = np.frombuffer(CHECKSUM + b'"}', np.uint8)
    has_sum = (suffix[:, [*range(len(CHECKSUM)), -2, -1]] == frame).all(axis=1)
    has_sum &= ends - starts > len(CHECKSUM) + 10
    stated = _HEX_DIGIT[suffix[:, -10:-2]] @ (16 ** np.arange(7, -1, -1))
    view, crc32 = memoryview(block), zlib.crc32
    spans = zip(starts.tolist(), (ends - len(CHECKSUM) - 10).tolist(), strict=True)
    found = np.fromiter((crc32(view[start:end]) for start, end in spans), np.int64, len(ends))
    return np.asarray(has_sum & (stated == found))


def _begin_with(text: NDArray[np.uint8], starts: Lines, prefix: bytes) -> NDArray[np.bool_]:
    begins = np.ones(len(starts), dtype=np.bool_)
    for position, letter in enumerate(prefix):
        begins &= text.take(starts + position, mode="clip") == letter
    return begins


def _cut_out(block: bytes, starts: Lines, ends: Lines, wanted: NDArray[np.bool_]) -> bytes:
    """Return the wanted lines, joined."""
    edges = np.diff(wanted.astype(np.int8), prepend=0, append=0)
    first, last = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1
    return b"".join(block[starts[a] : ends[b] + 1] for a, b in zip(first, last, strict=True))


def _columns(lines: bytes, count: int) -> tuple[Array, tuple[str, ...]]:
    """Return the rows of some steps, and the names of the last rows: those of scalars."""
    import pyarrow as arrow
    from pyarrow import json as arrow_json

    if not count:
        return np.empty((len(LOGGED), 0)), ()
    if b": NaN" in lines:  # JSON does not know NaN; a missing value becomes NaN as well
        lines = lines.replace(b": NaN", b": null")
    schema = arrow.schema([(name, arrow.float64()) for name in LOGGED])
    unexpected = "infer" if _SCALARS in lines else "ignore"
    try:
        table = arrow_json.read_json(
            arrow.BufferReader(arrow.py_buffer(lines)),
            parse_options=arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected),
        )
        rows = {name: table[name] for name in LOGGED}
        if "scalars" in table.column_names:
            scalars = table["scalars"].combine_chunks()
            rows |= dict(zip((field.name for field in scalars.type), scalars.flatten(), strict=True))
        columns = np.empty((len(rows), count))
        for row, values in enumerate(rows.values()):
            columns[row] = values.cast(arrow.float64()).to_numpy(zero_copy_only=False)
    except (arrow.ArrowException, TypeError, ValueError) as error:
        raise _Unusual from error
    if table.num_rows != count or table["step"].null_count:
        raise _Unusual
    return columns, tuple(rows)[len(LOGGED) :]


class _Samples:
    """Collects the device samples of a block."""

    def __init__(self) -> None:
        self._rows = list[tuple[float, ...]]()
        self._names = dict[str, int]()
        self._device_type = ""

    def add(self, line: int, event: Any) -> None:
        """Add the samples of one `device` event; one that names no device or no utilisation says nothing."""
        with contextlib.suppress(KeyError, TypeError, ValueError):
            prefix = f"node {event['node']}, " if event.get("node") is not None else ""
            values = zip(event["names"], event["shares"], event["used_bytes"], strict=True)
            rows = [(f"{prefix}{name}", number(share), number(used)) for name, share, used in values]
            time, self._device_type = float(event["time"]), event["device_type"]
            for name, share, used in rows:
                self._rows.append((line, time, self._names.setdefault(name, len(self._names)), share, used))

    def of_block(self) -> tuple[Array, tuple[str, ...], str]:
        """Return the fields of an `EventBlock`."""
        return columns_of(self._rows, SAMPLE_ROWS), tuple(self._names), self._device_type


def _line_by_line(block: bytes) -> EventBlock:
    rows, samples, scalars = list[list[float]](), _Samples(), list[dict[str, float]]()
    others, damaged = list[tuple[int, int, Event]](), 0
    for number_of_line, line in enumerate(block.splitlines()):
        event = parse_event(line)
        if event is None:
            damaged += bool(line) and not is_intact(line)
        elif event["type"] == "device":
            samples.add(number_of_line, event)
        elif event["type"] == "step":
            if event.get("step") is not None:
                with contextlib.suppress(TypeError, ValueError):  # a word where a number belongs
                    row = [number(event.get(name)) for name in LOGGED]
                    scalars.append({name: number(value) for name, value in dict(event.get("scalars") or {}).items()})
                    rows.append(row)
        elif event["type"] != "actions":
            others.append((number_of_line, len(rows), event))
    names = tuple(dict.fromkeys(name for logged in scalars for name in logged))
    of_scalars = ([logged.get(name, math.nan) for name in names] for logged in scalars)
    steps = columns_of([[*row, *own] for row, own in zip(rows, of_scalars, strict=True)], len(LOGGED) + len(names))
    return EventBlock(len(block), steps, *samples.of_block(), tuple(others), damaged, names)


def columns_of(rows: Sequence[Sequence[float]], width: int) -> Array:
    """Return rows as the columns of a matrix with `width` rows, also if there are none."""
    return np.array(rows, dtype=np.float64).reshape(-1, width).T


def number(value: Any) -> float:
    """Return a figure as a float, NaN if it is unknown."""
    return float("nan") if value is None else float(value)


# Blocks kept in binary beside the events, so that a long run opens in a fraction of the time of its first reading
#
# `events.columns` is a sequence of records, one for each large block of `events.jsonl`: a header with a checksum of its
# own, and the block's columns with theirs. It is written by the supervisor while the run goes, or by whoever reads
# these events first, and never trusted against them: either the file of events is the very same that was read (inode,
# size and both times of change), or the checksum of what a record was made from is computed again. From the first
# record that does not agree, the events are read. A record without events says that all before it agreed with the file
# of events. Columns of steps are read when somebody asks for them: a figure draws three or four of more than a dozen.

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
            steps: Array | KeptSteps = np.empty((len(LOGGED), 0))
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


def latest_events(path: Path, offset: int = 0, steps: int = 0) -> tuple[list[Event], int, int]:
    """Return the events from `offset` on without device samples, `actions` and all but the last `steps` steps.

    The second value is the offset to go on from, the third one the number of damaged lines. The steps come last.
    """
    events, start, damaged = list[Event](), offset, 0
    for block in read_blocks(path, offset, with_columns=False):
        offset += block.num_bytes
        events += [event for _, _, event in block.others]
        damaged += block.damaged
    return [*events, *(recent_steps(path, start, offset, steps) if steps else ())], offset, damaged


# The state of a run, folded from its events


RECENT_STEPS = 20
"""Number of latest steps over which the median speed is taken."""


@dataclass(frozen=True)
class Status:
    """A run's state (queued, starting, running, stalled, finished, stopped or failed), with a message for people."""

    state: str
    message: str = ""
    time: float = 0.0
    """Unix seconds of the last change."""

    @property
    def final(self) -> bool:
        """Return True if the run has ended."""
        return self.state in FINAL_STATES

    def __str__(self) -> str:
        return f"{self.state}: {self.message}" if self.message else self.state

    def _repr_html_(self) -> str:
        return facts_html(self.state, [("", self.message)] if self.message else [])


class Noted(NamedTuple):
    """An event, and the attempt that wrote it."""

    event: Any
    attempt: int
    """Number of starts before it."""


@dataclass(frozen=True)
class RunState:
    """The state of a run, as the first `offset` bytes of its events tell it.

    This is the one place that knows what a later event makes of earlier ones: a new attempt repeats all steps after its
    checkpoint, and forgets what was said of them. Immutable, because several threads may read through one `Run`.
    """

    status: Status | None = None
    starts: tuple[float, ...] = ()
    """Times of the starts, one an attempt."""
    start: StartEvent | None = None
    phase: PhaseEvent | None = None
    end: EndEvent | None = None
    steps: tuple[StepEvent, ...] = ()
    """The latest steps, at most `RECENT_STEPS`, in order of time; none in a `HistoryTail`, which has them all."""
    evaluations: Mapping[int, Noted] = field(default_factory=dict)
    """Evaluations on held-out samples, by the number of completed steps."""
    on_data: Mapping[tuple[str, int], Noted] = field(default_factory=dict)
    """Evaluations on data that `run.evaluate` was given, by the data's name and the number of completed steps."""
    texts: Mapping[int, Noted] = field(default_factory=dict)
    patterns: Mapping[int, Noted] = field(default_factory=dict)
    data_use: DataUseEvent | None = None
    """Samples that were read of each source of a mixture, up to the last checkpoint or the end."""
    memory: Mapping[int, MemoryEvent] = field(default_factory=dict)
    """Latest `memory` event of each rank, in the last attempt that measured any: the number of `memory_attempt`."""
    memory_attempt: int = 0
    marks: tuple[CheckpointEvent | SpikeEvent | StartEvent, ...] = ()
    """Checkpoints, spikes and resumptions, in order."""
    problems: tuple[str, ...] = ()
    """Sentences about checkpoints that failed since the last launch."""
    tracking: tuple[TrackingEvent, ...] = ()
    """Every report of the W&B recorder."""
    offset: int = 0
    damaged: int = 0
    """Lines of the events that differ from what was written, and were skipped."""

    @property
    def evaluation(self) -> Mapping[str, Any] | None:
        """Return the `evaluation` event after the most steps; None before the first step."""
        last = max(self.evaluations, default=0)
        return dict(self.evaluations[last].event) if last > 0 else None

    def median(self, figure: str) -> float | None:
        """Return the median of a figure over the latest steps; a single step may have waited for a checkpoint."""
        values: list[Any] = [value for event in self.steps if (value := event.get(figure)) is not None]
        return float(statistics.median(values)) if values else None

    def after(self, events: Sequence[Mapping[str, Any]]) -> RunState:
        """Return the state after further events."""
        if not events:
            return self
        fields = vars(self).items()
        now: Any = SimpleNamespace(**{name: list(v) if isinstance(v, tuple) else copy(v) for name, v in fields})
        for event in events:
            event_type, noted = event["type"], Noted(event, len(now.starts))
            if event_type in _BY_STEP:
                getattr(now, _BY_STEP[event_type])[int(event["step"])] = noted
            elif event_type == "data_evaluation":
                now.on_data[event["data"], int(event["step"])] = noted
            elif event_type in _IN_ORDER:
                getattr(now, _IN_ORDER[event_type]).append(event)
            elif event_type in ("phase", "data_use", "end"):
                setattr(now, event_type, event)
            elif event_type == "memory":
                if now.memory_attempt != len(now.starts):  # the last attempt's stay until this one has measured its own
                    now.memory, now.memory_attempt = {}, len(now.starts)
                now.memory[int(event["rank"])] = event
            elif event_type == "checkpoint_problem":
                training = now.status is not None and now.status.state == "running"
                failed = f"The checkpoint of step {event['step']} could not be written: "
                now.problems.append((failed if training else "") + event["message"])
            elif event_type == "status":
                now.status = Status(event["state"], event.get("message", ""), event["time"])
                if event["state"] in ("queued", "starting"):
                    now.end, now.problems = None, []
            elif event_type == "start" and event["time"] not in now.starts:  # else the line stands in the file twice
                _restart(now, event)
        # A line may stand in the wrong place, where several processes write.
        now.steps = sorted(now.steps, key=lambda event: event["time"])[-RECENT_STEPS:]
        changed: Any = {name: tuple(v) if isinstance(v, list) else v for name, v in vars(now).items()}
        return RunState(**changed)


_BY_STEP = {"evaluation": "evaluations", "samples": "texts", "sparsity": "patterns"}
_IN_ORDER = {"step": "steps", "checkpoint": "marks", "spike": "marks", "tracking": "tracking"}
"""Fields of a state that hold the events of a type, all or the latest of each step."""
UNREAD = RunState()
"""The state before the first event."""


def _restart(now: Any, start: Mapping[str, Any]) -> None:
    """Let a new attempt begin: what was said of steps after its checkpoint, of all in a fresh start, is forgotten."""
    now.starts.append(start["time"])
    now.start, resumed_from = start, start.get("resumed_from")
    step = resumed_step(resumed_from)
    for name in _BY_STEP.values():
        setattr(now, name, {at: noted for at, noted in getattr(now, name).items() if step and at <= step})
    now.marks = [*(mark for mark in now.marks if mark_step(mark) <= step), start] if resumed_from else []
    if now.problems and resumed_from:
        now.problems[-1] += f" Training goes on from {Path(str(resumed_from)).name}."
    if now.status is not None and not now.status.final:  # the supervisor reports the new state a moment later
        now.status = Status("running", "", start["time"])


def mark_step(mark: Mapping[str, Any]) -> int:
    """Return the step of a mark; that of a resumption is the checkpoint's."""
    return resumed_step(mark.get("resumed_from")) if mark["type"] == "start" else int(mark["step"])


def resumed_step(value: str | int | None) -> int:
    """Return the step of `resumed_from`: a checkpoint's path (`.../step-00000400`), a step, or None for a new start."""
    return int(value.rpartition("step-")[2]) if isinstance(value, str) else int(value or 0)


def read_state(path: Path, seen: RunState = UNREAD) -> RunState:
    """Return the state of the run with these events; `seen` is an earlier one, after which only new events are read."""
    events, offset, damaged = latest_events(path, seen.offset, RECENT_STEPS)
    return replace(seen.after(events), offset=offset, damaged=seen.damaged + damaged)
