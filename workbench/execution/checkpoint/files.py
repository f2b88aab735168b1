"""The files of a checkpoint: whether they are what was written, and which to keep. Reads no tensor.

`complete.json` is written last, with the size and digest of every other file: a folder without it is not a checkpoint,
and one whose files differ from it is not the checkpoint that was written.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from workbench.errors import CheckpointError
from workbench.rundir import read_json

COMPLETE = "complete.json"
MODEL = "model.json"
"""What an export needs to know of the model: names, ties, class and configuration."""


class Damaged(CheckpointError):
    """Files that are not what was written, or not all of them."""


def step_of(path: Path) -> int:
    """The number of completed steps that a checkpoint's folder is named after."""
    return int(path.name.removeprefix("step-"))


def complete(folder: Path) -> list[Path]:
    """The checkpoints in a folder whose writing was finished, oldest step first."""
    return sorted(path.parent for path in folder.glob(f"step-*/{COMPLETE}"))


def read_facts(path: Path) -> dict[str, Any]:
    """What `complete.json` says; raises `Damaged` where there is none that can be read."""
    try:
        facts: dict[str, Any] = read_json(path / COMPLETE)
    except FileNotFoundError:
        raise Damaged(
            f"{path} is not a complete checkpoint: {COMPLETE} is missing, so its writing was interrupted. "
            f"Resume from an earlier one.",
            path=str(path),
        ) from None
    except ValueError:
        raise Damaged(f"{path / COMPLETE} is not JSON. Resume from an earlier checkpoint.", path=str(path)) from None
    return facts


def digests(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """File name -> `bytes` and `blake2b` of its contents."""
    found = {}
    for path in paths:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "blake2b").hexdigest()[:32]
        found[path.name] = {"bytes": path.stat().st_size, "blake2b": digest}
    return found


def damage(path: Path, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The first difference between the files in a folder and what was written there, as a sentence; None if none."""
    for name, written in files.items():
        file = path / name
        if not file.is_file():
            return f"{file} is missing."
        size = file.stat().st_size
        if size != written["bytes"]:
            return f"{file} has {size:,} bytes instead of {written['bytes']:,}."
        if digests([file])[name]["blake2b"] != written["blake2b"]:
            return f"{file} does not hold what was written to it."
    return None


def prune(folder: Path, keep: int, step: int) -> None:
    """Delete all but the last `keep` checkpoints up to `step`, and what interrupted saves before it have left."""
    known = [path for path in folder.glob("step-*") if path.name[5:].isdigit() and step_of(path) <= step]
    finished = [path for path in complete(folder) if path in known]
    for path in set(known) - set(finished[-keep:]):
        shutil.rmtree(path, ignore_errors=True)
