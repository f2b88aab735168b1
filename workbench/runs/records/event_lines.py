"""Reading `events.jsonl` in bulk: logged steps and device samples to NumPy columns, everything else to dicts.

Nearly all lines of a long run are steps, written alike. Arrow parses all steps of a block at once. A block that Arrow
refuses (an infinity, a word where a number belongs) is parsed line by line, with the same result. Lines that differ
from what was written are counted and left out.
"""

from __future__ import annotations

import contextlib
import io
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.columns import COLUMNS
from workbench.events import Event
from workbench.rundir import CHECKSUM, is_intact, parse_event

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


class Rows(Protocol):
    """A matrix of which a row is read when it is asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, row: int, /) -> Array: ...


@dataclass(frozen=True)
class EventBlock:
    """The events of some whole lines, which are numbered from 0."""

    num_bytes: int
    steps: Array | Rows
    """One column a logged step and one row for each of `LOGGED` and of `scalars`."""
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
