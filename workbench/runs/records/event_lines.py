"""Reading `events.jsonl` in bulk: logged steps to NumPy columns, everything else to dicts.

Nearly all lines of a long run are steps, written alike. Arrow parses all steps of a block at once. A block that Arrow
refuses (a torn line, an infinity, a word where a number belongs) is parsed line by line, with the same result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.columns import COLUMNS
from workbench.events import Event
from workbench.rundir import is_intact, parse_event

LOGGED = tuple(name for name, column in COLUMNS.items() if not column.is_derived)
"""The figures of a `step` event that become columns, in this order."""
BLOCK_BYTES = 8 * 2**20
BULK_BYTES = 2**18
"""Size of a block from which Arrow is faster than Python, in spite of its start-up time."""
RECENT_BYTES = 2**20
"""Bytes at the end of a block that are searched for its latest steps."""
_STEP = b'{"type": "step"'
_ACTIONS = b'{"type": "actions"'
"""Beginning of long events that only the timeline reads, from the file itself."""
_DEVICE = b'{"type": "device"'
"""Beginning of a device sample; in a long run every eighth line or so is one."""


@dataclass(frozen=True)
class Block:
    """The events of some whole lines."""

    steps: NDArray[np.float64]
    """One column a logged step and one row for each of `LOGGED`."""
    others: tuple[tuple[int, Event], ...]
    """Every other event but `actions`, each with the number of steps of this block that came before it."""


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


def parsed(block: bytes) -> Block:
    """Return the events of some whole lines, without lines that cannot be parsed."""
    if len(block) >= BULK_BYTES:
        with contextlib.suppress(_Unusual):
            return _in_bulk(block)
    return _line_by_line(block)


def recent_steps(block: bytes, count: int) -> list[Event]:
    """Return the last `count` step events of some whole lines."""
    lines = [line for line in block[-RECENT_BYTES:].splitlines() if line.startswith(_STEP)]
    return [event for line in lines[-count:] if (event := parse_event(line)) is not None]


def damaged_lines(block: bytes) -> int:
    """Return the number of lines that differ from what was written; readers skip them."""
    return sum(not is_intact(line) for line in block.splitlines() if line)


def milestones(block: bytes) -> list[Event]:
    """Return every event of some whole lines that is neither a step, a device sample nor `actions`."""
    starts, ends = _line_ends(block)
    frequent = _begin_with(block, starts, _STEP) | _begin_with(block, starts, _DEVICE)
    lines = (block[starts[line] : ends[line]] for line in np.flatnonzero(~frequent))
    events = (parse_event(line) for line in lines if not line.startswith(_ACTIONS))
    return [event for event in events if event is not None and event["type"] not in ("step", "device", "actions")]


class _Unusual(ValueError):
    """A block with lines that `append_event` does not write."""


def _in_bulk(block: bytes) -> Block:
    starts, ends = _line_ends(block)
    is_step = _begin_with(block, starts, _STEP)
    steps_before = np.cumsum(is_step)
    others, begin, steps = list[tuple[int, Event]](), 0, list[bytes]()
    for line in np.flatnonzero(~is_step):
        start, end = int(starts[line]), int(ends[line])
        steps.append(block[begin:start])
        begin, text = end + 1, block[start:end]
        event = None if text.startswith(_ACTIONS) else parse_event(text)
        if event is not None:
            if event["type"] == "step":  # another program wrote it, with its fields in another order
                raise _Unusual
            others.append((int(steps_before[line]), event))
    steps.append(block[begin:])
    if not all(is_intact(line) for part in steps for line in part.splitlines()):
        raise _Unusual
    return Block(_columns(b"".join(steps), int(is_step.sum())), tuple(others))


def _line_ends(block: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
    return np.concatenate([[0], ends[:-1] + 1]), ends


def _begin_with(block: bytes, starts: NDArray[np.int64], prefix: bytes) -> NDArray[np.bool_]:
    text = np.frombuffer(block, np.uint8)
    begins = np.ones(len(starts), dtype=np.bool_)
    for position, letter in enumerate(prefix):
        begins &= text.take(starts + position, mode="clip") == letter
    return begins


def _columns(lines: bytes, count: int) -> NDArray[np.float64]:
    import pyarrow as arrow
    from pyarrow import json as arrow_json

    if not count:
        return np.empty((len(LOGGED), 0))
    if b": NaN" in lines:  # JSON does not know NaN; a missing value becomes NaN as well
        lines = lines.replace(b": NaN", b": null")
    schema = arrow.schema([(name, arrow.float64()) for name in LOGGED])
    try:
        table = arrow_json.read_json(
            arrow.BufferReader(arrow.py_buffer(lines)),
            parse_options=arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except arrow.ArrowException as error:
        raise _Unusual from error
    if table.num_rows != count or table["step"].null_count:
        raise _Unusual
    columns = np.empty((len(LOGGED), count))
    for row, name in enumerate(LOGGED):
        columns[row] = table[name].to_numpy()
    return columns


def _line_by_line(block: bytes) -> Block:
    rows: list[list[float]] = []
    others = []
    for line in block.splitlines():
        event = parse_event(line)
        if event is None or event["type"] == "actions":
            continue
        if event["type"] != "step":
            others.append((len(rows), event))
        elif event.get("step") is not None:
            with contextlib.suppress(TypeError, ValueError):  # a word where a number belongs
                rows.append([number(event.get(name)) for name in LOGGED])
    return Block(np.array(rows, dtype=np.float64).reshape(-1, len(LOGGED)).T, tuple(others))


def number(value: Any) -> float:
    """Return a figure as a float, NaN if it is unknown."""
    return float("nan") if value is None else float(value)
