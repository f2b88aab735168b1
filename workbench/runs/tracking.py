"""Weights & Biases beside a run: train offline always, upload from a process of its own when logged in.

The only module that knows `wandb`. `python -m workbench.runs.tracking RUN_DIR` is the uploader that the
supervisor starts; whatever happens to it, the training never waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.rundir import FINAL_STATES, EventTail, RunDir, append_event, read_json
from workbench.runs.processes import run_alive

FLUSH_S = 1.0
"""How much of its log a killed worker may lose; W&B's own default is 15."""
LIVE_GRACE_S = 60.0
"""After the run has ended, how long the live upload may take to catch up."""
SYNC_LIMIT_S = 600.0
"""For one upload of the whole file afterwards."""
LOGIN_LIMIT_S = 30.0
POLL_S = 0.5


def tracker_settings(run: RunDir, experiment: Any) -> dict[str, Any] | None:
    """Keywords for Accelerate's `init_trackers`, as JSON; None when tracking is switched off.

    `WANDB_MODE=disabled` or `project=""` switches it off. Otherwise the mode is always `offline`: a server
    that is slow, wrong or gone can neither delay nor end a training. `WANDB_MODE=offline` also keeps it from being
    uploaded afterwards.
    """
    if os.environ.get("WANDB_MODE") == "disabled" or not experiment.project:
        return None
    wandb = {
        "id": uuid.uuid4().hex[:8],
        "name": run.path.name,
        "group": run.path.name,  # a resumed stretch is a W&B run of its own, in the group of the first
        "tags": list(experiment.tags),
        "dir": str(run.tracking),
        "mode": "offline",
        "settings": {"x_transaction_log_flush_interval": FLUSH_S, "console": "off", "silent": True},
    }
    return {"project_name": experiment.project, "init_kwargs": {"wandb": wandb}}


def offline_files(run: RunDir) -> list[Path]:
    """The run's `.wandb` files, oldest first; one for each time that it was started."""
    return sorted(run.tracking.glob("wandb/offline-run-*/run-*.wandb"))


def logged_in() -> bool:
    """Whether this user has a key for the W&B server in use (`$WANDB_API_KEY`, or from `wandb login`).

    Asked in a process of its own: the client starts a service, and may wait for a server.
    """
    command = [sys.executable, "-m", "workbench.runs.tracking", "--logged-in"]
    try:
        return subprocess.run(command, capture_output=True, timeout=LOGIN_LIMIT_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _has_key() -> bool:
    import wandb

    try:
        return bool(wandb.login(prompt=False, verify=False))  # type: ignore[call-arg, unused-ignore]
    except (wandb.Error, ValueError, OSError):  # a malformed key or settings file
        return False


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


def main(directory: str) -> int:
    """Upload while the run trains, then once more if the live upload did not see the end."""
    run = RunDir(Path(directory))
    known = set(offline_files(run))
    if os.environ.get("WANDB_MODE") in ("offline", "dryrun") or not logged_in():
        return 0
    file = _wait_for_file(run, known)
    if file is None:
        return 0
    append_event(run.events, "tracking", state="syncing", message=str(file))
    if _sync_live(run, file) or _sync_once(file):
        append_event(run.events, "tracking", state="synced", message=str(file))
        return 0
    append_event(run.events, "tracking", state="failed", message=f"wandb sync {file.parent} uploads it by hand.")
    return 1


def _wait_for_file(run: RunDir, known: set[Path]) -> Path | None:
    while True:
        files = [path for path in offline_files(run) if path not in known]
        if files:
            return files[-1]
        if not run_alive(run):
            return None
        time.sleep(POLL_S)


def _sync_live(run: RunDir, file: Path) -> bool:
    upload = _upload(file, "--live")
    try:
        _wait_for_end(run, upload)
        return upload.wait(_limit("WORKBENCH_SYNC_GRACE_S", LIVE_GRACE_S)) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        _end(upload)


def _sync_once(file: Path) -> bool:
    upload = _upload(file)
    try:
        return upload.wait(_limit("WORKBENCH_SYNC_LIMIT_S", SYNC_LIMIT_S)) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        _end(upload)


def _upload(file: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "wandb", "beta", "sync", *options, "--yes", "--no-skip-synced", str(file)]
    environment = {name: value for name, value in os.environ.items() if name not in ("WANDB_MODE", "WANDB_SERVICE")}
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)


def _wait_for_end(run: RunDir, upload: subprocess.Popen[bytes]) -> None:
    """Until the upload ends by itself, or the run reaches a final state or vanishes."""
    tail = EventTail(run.events)
    while upload.poll() is None:
        states = [event["state"] for event in tail.read() if event["type"] == "status"]
        if states and states[-1] in FINAL_STATES:
            return
        if not run_alive(run):
            return
        time.sleep(POLL_S)


def _end(upload: subprocess.Popen[bytes]) -> None:
    """`wandb sync` has helpers of its own: end its whole session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(upload.pid, 9)
    upload.wait()


def _limit(variable: str, default: float) -> float:
    return float(os.environ.get(variable) or default)


def tracking_note(run: RunDir) -> str:
    """Where the run's W&B files are, or that it has none: a line for people."""
    if not run.tracking_settings.exists():
        return "off"
    project = read_json(run.tracking_settings)["project_name"]
    return f"{project} (offline files in {run.tracking})"


if __name__ == "__main__":
    sys.exit(not _has_key() if sys.argv[1] == "--logged-in" else main(sys.argv[1]))
