"""Reading a `.wandb` file: what the client has logged, without a server and also after a crash."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def offline_history(path: Path) -> list[dict[str, Any]]:
    """Rows that were logged to a `.wandb` file, also while it is being written or after a crash."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for body in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(body)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    return rows


_BLOCK = 32768
_HEADER = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def _records(data: bytes) -> Iterator[bytes]:
    """Records of a LevelDB-framed log (32 KiB blocks; a record may span several) up to its torn end."""
    if data[:4] != b":W&B":
        raise ValueError("not a W&B transaction log")
    position, parts = 7, b""
    while position + _HEADER.size <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER.size:
            position += left
            continue
        _, length, kind = _HEADER.unpack_from(data, position)
        body = data[position + _HEADER.size : position + _HEADER.size + length]
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or len(body) < length:
            return
        position += _HEADER.size + length
        parts = body if kind in (_FULL, _FIRST) else parts + body
        if kind in (_FULL, _LAST):
            yield parts
