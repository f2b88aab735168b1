"""Reading a `.wandb` file without a server, also after a crash; W&B's Python client has no reader of its own."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def offline_history(path: Path) -> list[dict[str, Any]]:
    """Return the rows that were logged to a `.wandb` file, also while it is being written or after a crash."""
    return [_items(record.history.item) for record in _of_type(path, "history")]


def offline_summary(path: Path) -> dict[str, Any]:
    """Return the last value of each figure in a `.wandb` file."""
    found: dict[str, Any] = {}
    for record in _of_type(path, "summary"):
        found |= _items(record.summary.update)
    return found


def offline_config(path: Path) -> dict[str, Any]:
    """Return the config that a `.wandb` file begins with."""
    (run, *_) = _of_type(path, "run")
    return _items(run.run.config.update)


def _of_type(path: Path, record_type: str) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    for body in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(body)
        if record.WhichOneof("record_type") == record_type:
            yield record


def _items(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


_BLOCK = 32768
_HEADER = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB-framed log up to its torn end; a record may span several blocks of 32 KiB."""
    if data[:4] != b":W&B":
        raise ValueError("not a W&B transaction log")
    position, parts = 7, b""
    while position + _HEADER.size <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER.size:
            position += left
            continue
        _, length, record_type = _HEADER.unpack_from(data, position)
        body = data[position + _HEADER.size : position + _HEADER.size + length]
        if record_type not in (_FULL, _FIRST, _MIDDLE, _LAST) or len(body) < length:
            return
        position += _HEADER.size + length
        parts = body if record_type in (_FULL, _FIRST) else parts + body
        if record_type in (_FULL, _LAST):
            yield parts
