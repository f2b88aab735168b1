"""The files of a checkpoint: which are complete, whether they are undamaged, and which to delete. Reads no tensor.

`complete.json` is written last, with the size and digest of every other file. A folder without it is not a checkpoint,
and a file that differs from it is damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from workbench.base.errors import CheckpointError
from workbench.record.rundir import RunDir, read_json

COMPLETE = "complete.json"
THREADS = 4
"""Files that a rank writes, and of which it makes digests, at the same time."""
MODEL = "model.json"
"""Description of the model for an export: names, ties, class and configuration."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose files are missing or differ from those that were written."""


def step_of(path: Path) -> int:
    """Return the number of completed steps, after which the folder of a checkpoint is named."""
    return int(path.name.removeprefix("step-"))


def _is_numbered(path: Path) -> bool:
    return re.fullmatch(r"step-[0-9]{1,18}", path.name) is not None


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder that were written completely, oldest step first."""
    found = (path.parent for path in folder.glob(f"step-*/{COMPLETE}") if _is_numbered(path.parent))
    return sorted(found, key=step_of)


def requested_checkpoint(run: RunDir) -> Path | None:
    """Return the checkpoint that a start of the run is to continue from, None for a fresh start.

    Raises `CheckpointError` if `resume.json` names none, or another step than its checkpoint has.
    """
    if not run.resume.exists():
        return None
    try:
        wanted = read_json(run.resume)
        path = Path(wanted["checkpoint"])
        if step_of(path) == wanted["step"]:
            return path
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # bytes that are no JSON, or JSON that is no request
    raise CheckpointError(
        f"{run.resume} does not hold what was written to it. Continue the run once more: run.resume(), or "
        "wb.runs.prepare(experiment, plan, resume=run.path) for a job."
    )


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the content of `complete.json`; raise `DamagedCheckpoint` if it is missing or unreadable."""
    try:
        manifest: dict[str, Any] = read_json(path / COMPLETE)
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"{path} is not a complete checkpoint: {COMPLETE} is missing, so its writing was interrupted. "
            f"Resume from an earlier checkpoint."
        ) from None
    except ValueError:
        raise DamagedCheckpoint(f"{path / COMPLETE} is not JSON. Resume from an earlier checkpoint.") from None
    if not isinstance(manifest, dict) or manifest.get("digest", digest_of(manifest)) != digest_of(manifest):
        raise DamagedCheckpoint(
            f"{path / COMPLETE} does not hold what was written to it. Resume from an earlier checkpoint."
        )
    if "step" in manifest and manifest["step"] != step_of(path):
        raise DamagedCheckpoint(
            f"{path} holds the checkpoint of step {manifest['step']}, and its name says {step_of(path)}. Give the "
            "folder its own name, or resume from an earlier checkpoint."
        )
    return manifest


def digest_of(manifest: Mapping[str, Any]) -> str:
    """Return the digest of what `complete.json` says beside its own digest."""
    text = json.dumps({name: value for name, value in manifest.items() if name != "digest"}, sort_keys=True)
    return hashlib.blake2b(text.encode()).hexdigest()[:32]


def digests(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Map the name of each file to its size (`bytes`) and digest (`blake2b`)."""

    def digest(path: Path) -> dict[str, Any]:
        with path.open("rb") as file:
            return {"bytes": path.stat().st_size, "blake2b": hashlib.file_digest(file, "blake2b").hexdigest()[:32]}

    named = {path.name: path for path in paths}
    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(named, threads.map(digest, named.values()), strict=True))


def find_damage(path: Path, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return a sentence on the first file in a folder that differs from what was written, or None if none does."""
    for name, written in files.items():
        file = path / name
        if not file.is_file():
            return f"{file} is missing."
        size = file.stat().st_size
        if size != written["bytes"]:
            return f"{file} has {size:,} bytes instead of {written['bytes']:,}."
    found = digests(path / name for name in files)
    changed = (name for name, written in files.items() if found[name]["blake2b"] != written["blake2b"])
    return next((f"{path / name} does not hold what was written to it." for name in changed), None)


def remove(path: Path) -> None:
    """Delete the folder of a checkpoint if it exists; one that is deleted in part is not complete any more."""
    with contextlib.suppress(OSError):
        (path / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path, keep: int, step: int) -> None:
    """Delete all but the last `keep` checkpoints up to `step`, and the remains of interrupted saves before it."""
    known = [path for path in folder.glob("step-*") if _is_numbered(path) and step_of(path) <= step]
    finished = [path for path in complete_checkpoints(folder) if path in known]
    for path in set(known) - set(finished[-keep:]):
        remove(path)
