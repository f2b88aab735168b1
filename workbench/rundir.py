"""The run directory: the only contract between a notebook, the launcher and the ranks.

Everything a run leaves lies in one folder, readable without importing torch and without unpickling:

    experiment.json      what was asked for
    plan.json            how it was divided, with the prediction
    environment.json     machine, versions, git state
    code/                the user's own model or dataset: model.pkl, data.pkl for the workers; source beside them,
                         and path.json: where their modules lie
    wandb.json           the W&B project and id of the run, for its recorder; absent when tracking is off
    tracking.json        what the worker gave Accelerate's `init_trackers` (runs of earlier versions)
    resume.json          checkpoint (absolute path) and step to start from; absent for a fresh start
    events.jsonl         one JSON object a line, appended as it happens; what live figures read
    history.bin          what was read of the events, so that they are parsed once only; may be removed at any time
    launcher.json        the supervisor's, the launcher's and the ranks' process ids with their start times
    ranks/<rank>.json    pid and created (`this_process()`), rank, stage and device of each rank
    logs/<rank>.log      what each rank printed; logs/launcher.log the launcher's own
    errors/<rank>.json   a dead rank's rank, stage, type, message, traceback, time
    STOP                 asks the ranks to checkpoint and leave
    lock                 held while somebody starts the run, or continues it
    checkpoints/step-<n>/
    attempts/<n>/        the same files of earlier attempts, once a run was resumed
    tracking/            Weights & Biases files
    remote.json          where a run came from that was copied from W&B; absent for a run of this machine
    plan.html            the plan's pictures as a page, once the recorder has drawn them
    notebook.ipynb       the executed notebook that launched the run, if `workbench execute` ran it

Events are dicts with `type` and `time` (Unix seconds):

    status      state: queued | starting | running | finished | stopped | failed; message
    start       devices, world, parameters, flops_per_step, peak_flops (sum over devices, or None),
                tokens_per_step, samples_per_step, resumed_from
    phase       name, seconds        (capture, build, compile … of rank 0)
    step        step (1-based), loss, learning_rate, grad_norm, step_ms, tokens, samples, flops (cumulative),
                seconds (training time so far), tokens_per_s, mfu (or None)
    memory      rank, stage, device, peak_bytes, reserved_bytes, limit_bytes
    device      kind (cuda | cpu), names, shares (0 to 1: how busy each is), used_bytes (of its memory, by anybody;
                on a CPU the run's resident memory), node (absent where there is one); None where a device did not
                say; every two seconds, from the supervisor
    actions     rank, step, origin_s (Unix seconds), actions: [kind, stage, micro-batch, start and end in ms from
                the origin] of one step in many, from the first replica of each pipeline rank
    checkpoint  step, path, seconds (that training paused), write_s (until it was on the disk)
    checkpoint_problem  step, path, message      (a save that failed, or a damaged checkpoint passed over)
    end         steps, seconds
    tracking    state: offline | syncing | synced | failed; message, step (the last one that W&B has), files
                (Weights & Biases, never the run itself)
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

STATES = ("queued", "starting", "running", "finished", "stopped", "failed")
FINAL_STATES = ("finished", "stopped", "failed")
KILLED = "Killed; what was trained since the last checkpoint is lost."
_CLOCK_SLACK_S = 2.0  # start times are reckoned from the boot time, which moves when the clock is set


@dataclass(frozen=True)
class RunDir:
    """Names of everything inside one run's directory."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    @property
    def experiment(self) -> Path:
        return self.path / "experiment.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def model_code(self) -> Path:
        return self.code / "model.pkl"

    @property
    def data_code(self) -> Path:
        return self.code / "data.pkl"

    @property
    def tracking_settings(self) -> Path:
        return self.path / "tracking.json"

    @property
    def tracker(self) -> Path:
        return self.path / "wandb.json"

    @property
    def remote(self) -> Path:
        return self.path / "remote.json"

    @property
    def plan_page(self) -> Path:
        return self.path / "plan.html"

    @property
    def notebook(self) -> Path:
        return self.path / "notebook.ipynb"

    @property
    def resume(self) -> Path:
        return self.path / "resume.json"

    @property
    def launcher(self) -> Path:
        return self.path / "launcher.json"

    @property
    def stop_file(self) -> Path:
        return self.path / "STOP"

    @property
    def kill_file(self) -> Path:
        return self.path / "KILL"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tracking(self) -> Path:
        return self.path / "tracking"

    @property
    def ranks(self) -> Path:
        return self.path / "ranks"

    @property
    def errors(self) -> Path:
        return self.path / "errors"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def rank(self, rank: int) -> Path:
        return self.ranks / f"{rank}.json"

    def log(self, rank: int | str) -> Path:
        return self.logs / f"{rank}.log"

    def error(self, rank: int) -> Path:
        return self.errors / f"{rank}.json"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"


def write_json(path: Path, value: Any) -> None:
    """Write so that a reader sees the old file or the new one, never half of either."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(value, indent=2) + "\n")
    part.replace(path)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def this_process() -> dict[str, Any]:
    """`pid` and `created` of the calling process: together they name it for good, as a pid alone does not."""
    return process_record(os.getpid())


def process_record(pid: int) -> dict[str, Any]:
    """`pid`, `created` (Unix seconds), `ticks` (since the boot) and `host` of a process that runs here now."""
    created = {"created": psutil.Process(pid).create_time(), "ticks": _ticks(pid)}
    return {"pid": pid, **created, "host": socket.gethostname()}


def _ticks(pid: int) -> int | None:
    """When a process started, since the boot: unlike a time of day it stays when the clock is set. Linux only."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def is_elsewhere(record: Mapping[str, Any]) -> bool:
    """Whether the process of that record is of another host, where nothing can be known of it from here."""
    here = socket.gethostname()
    return bool(record.get("host", here) != here)


def process_alive(record: Mapping[str, Any] | None) -> bool:
    """Whether the very process of that record still runs (a zombie does not); of another host's: False."""
    if record is None or is_elsewhere(record):
        return False
    try:
        process = psutil.Process(record["pid"])
        if record.get("ticks") is not None:
            same = record["ticks"] == _ticks(record["pid"])
        else:
            same = abs(process.create_time() - record["created"]) < _CLOCK_SLACK_S
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def append_event(path: Path, type: str, /, **fields: Any) -> None:
    """Append one event; a single `write` of a whole line, so that several writers may share the file.

    A line that a full disk left unfinished is ended first, or it would take this one with it.
    """
    line = json.dumps({"type": type, "time": time.time(), **fields}, allow_nan=True) + "\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, b"\n" * torn + line.encode())
    finally:
        os.close(descriptor)


class EventTail:
    """Reads events as they are appended; `read()` returns those that arrived since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read()
        except FileNotFoundError:
            return []
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(whole)
        return list(_parse(whole))


def read_events(path: Path) -> list[dict[str, Any]]:
    """Every complete event so far; a torn last line is left for the next reader."""
    return EventTail(path).read()


def _parse(lines: bytes) -> Iterator[dict[str, Any]]:
    for line in lines.splitlines():
        with contextlib.suppress(ValueError):  # a line torn by a full disk must not end its readers
            event = json.loads(line)
            if isinstance(event, dict) and "type" in event:
                yield event
