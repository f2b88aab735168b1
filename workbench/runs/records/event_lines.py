"""Lines of `events.jsonl` in bulk: logged steps to NumPy columns, everything else to dicts, millions of lines a second.

Nearly all lines of a long run are steps, written alike. Arrow reads those of a block at once; whatever it refuses
(a torn line, an infinity, a word where a number belongs) is read line by line by Python's own parser, to the same end.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MEASURED = (
    "step",
    "loss",
    "learning_rate",
    "grad_norm",
    "step_ms",
    "tokens",
    "samples",
    "flops",
    "seconds",
    "tokens_per_s",
    "mfu",
    "time",
)
"""Figures of a `step` event that become columns, in this order."""
BLOCK_BYTES = 8 * 2**20
BULK_BYTES = 2**18
"""From here on a block is worth Arrow's start."""
RECENT_BYTES = 2**20
"""At the end of a block, where its latest steps are looked for."""
_STEP = b'{"type": "step"'
_PASSED_OVER = b'{"type": "actions"'
"""Long events that only the timeline reads, from the file itself."""


@dataclass(frozen=True)
class Block:
    """Some whole lines: `steps` holds one column a logged step and one row for each of `MEASURED`."""

    steps: NDArray[np.float64]
    others: tuple[tuple[int, dict[str, Any]], ...]
    """Every other event but `actions`, each with the number of steps of this block that came before it."""


def blocks(path: Path, offset: int = 0) -> Iterator[bytes]:
    """The whole lines of a file from `offset` on, some megabytes at a time; a last line without an end is left out."""
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
    """The events of some whole lines. Lines that cannot be read are left out."""
    if len(block) >= BULK_BYTES:
        with contextlib.suppress(_Unusual):
            return _in_bulk(block)
    return _line_by_line(block)


def recent_steps(block: bytes, count: int) -> list[dict[str, Any]]:
    """The last `count` step events of some whole lines."""
    lines = [line for line in block[-RECENT_BYTES:].splitlines() if line.startswith(_STEP)]
    return [event for line in lines[-count:] if (event := _event(line)) is not None]


def events_but_steps(block: bytes) -> list[dict[str, Any]]:
    """Every event of some whole lines that is neither a step nor `actions`."""
    starts, ends = _line_ends(block)
    spans = np.flatnonzero(~_begin_with(block, starts, _STEP))
    lines = [block[int(starts[line]) : int(ends[line])] for line in spans]
    found = [_event(line) for line in lines if not line.startswith(_PASSED_OVER)]
    return [event for event in found if event is not None and event["type"] not in ("step", "actions")]


class _Unusual(ValueError):
    """A block that is not as `append_event` writes it."""


def _in_bulk(block: bytes) -> Block:
    starts, ends = _line_ends(block)
    is_step = _begin_with(block, starts, _STEP)
    steps_before = np.cumsum(is_step)
    others, rest = [], bytearray(block)
    for line in np.flatnonzero(~is_step):
        start, end = int(starts[line]), int(ends[line])
        text = block[start:end]
        rest[start:end] = b" " * (end - start)
        event = None if text.startswith(_PASSED_OVER) else _event(text)
        if event is not None:
            if event["type"] == "step":  # by another hand, its fields in another order
                raise _Unusual
            others.append((int(steps_before[line]), event))
    return Block(_columns(rest, int(is_step.sum())), tuple(others))


def _line_ends(block: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
    return np.concatenate([[0], ends[:-1] + 1]), ends


def _begin_with(block: bytes, starts: NDArray[np.int64], prefix: bytes) -> NDArray[np.bool_]:
    text = np.frombuffer(block, np.uint8)
    found = np.ones(len(starts), dtype=np.bool_)
    for position, letter in enumerate(prefix):
        found &= text.take(starts + position, mode="clip") == letter
    return found


def _columns(lines: bytearray, count: int) -> NDArray[np.float64]:
    import pyarrow as arrow
    from pyarrow import json as arrow_json

    if b": NaN" in lines:  # which JSON does not know; a missing value becomes NaN all the same
        lines = lines.replace(b": NaN", b": null")
    schema = arrow.schema([(name, arrow.float64()) for name in MEASURED])
    try:
        table = arrow_json.read_json(
            arrow.BufferReader(arrow.py_buffer(lines)),
            parse_options=arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except arrow.ArrowException as error:
        raise _Unusual from error
    if table.num_rows != count or table["step"].null_count:
        raise _Unusual
    columns = np.empty((len(MEASURED), count))
    for row, name in enumerate(MEASURED):
        columns[row] = table[name].to_numpy()
    return columns


def _line_by_line(block: bytes) -> Block:
    rows: list[list[float]] = []
    others = []
    for line in block.splitlines():
        event = _event(line)
        if event is None or event["type"] == "actions":
            continue
        if event["type"] != "step":
            others.append((len(rows), event))
        elif event.get("step") is not None:
            with contextlib.suppress(TypeError, ValueError):  # a word where a number belongs
                rows.append([number(event.get(name)) for name in MEASURED])
    return Block(np.array(rows, dtype=np.float64).reshape(-1, len(MEASURED)).T, tuple(others))


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "type" in event else None


def number(value: Any) -> float:
    """What is unknown is NaN."""
    return float("nan") if value is None else float(value)
