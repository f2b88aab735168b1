"""The status of a run, deduced from its events and from the processes that still live."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from workbench.base.display import waiting
from workbench.base.errors import RunNotFound, in_words
from workbench.execution.checkpoint import files as stored
from workbench.record.event_log import UNREAD, RunState, read_state
from workbench.record.event_log import Status as Status
from workbench.record.history import (
    END_SHARE,
    SETTLING_STEPS,
    SPEED_STEPS,
    final_loss,
    recent_pace,
    settled_median,
    settled_steps,
)
from workbench.record.rundir import KILLED, RunDir, read_json, read_record
from workbench.record.step_table import MOST_STEPS, Array, StepTable
from workbench.runs.launching import processes
from workbench.runs.launching.processes import Processes, run_failed

VANISHED = "The launcher vanished."
DISK_FULL = " Its disk is full, so nobody could write why. Free some space, then resume the run."
WAITS = "Its disk is full: logged steps wait in memory, and checkpoints fail. Free some space."
STOPPING = "Stopping: the ranks end their step and write a checkpoint."
DISK_FULL_BYTES = 2**20
"""Free bytes below which a disk counts as full."""
POLL_S = 0.2
LAUNCH_LIMIT_S = 30.0
"""Seconds from a new run's first file until its supervisor must be known."""
SILENCE_S = 60.0
"""Seconds without an event after which a run on another host is taken to be gone.

The supervisor of a healthy run samples devices every two seconds.
"""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint of a run."""

    step: int
    path: Path


class RunRow(TypedDict):
    """The figures that tables, lines of text and JSON output show of a run; None where a figure is unknown."""

    name: str
    path: str
    state: str
    message: str
    step: int
    steps: int | None
    """Steps that the experiment asks for."""
    loss: float | None
    """The number by which the run is sorted and compared: `eval_loss` where there is one, else `training_loss`."""
    training_loss: float | None
    """Training loss at the end so far, as the end of its curve (`workbench.record.history.final_loss`)."""
    eval_loss: float | None
    """Last held-out loss after a step; None without one."""
    tokens: float | None
    tokens_per_s: float | None
    mfu: float | None
    eta_s: float | None
    """Training time left at the median speed of the last steps; None unless the run trains."""
    devices: int | None
    """Number of devices that the run has or waits for."""
    gpus: list[int]
    """Indices on this node of the GPUs that the run has."""
    peak_bytes: int | None
    """Highest peak memory of any rank."""
    damaged_lines: int
    """Events and steps that differ from what was written; the curve lacks what they held."""
    time: float
    """Unix seconds of the last step, or of the last change of state."""
    alerts: list[str]
    """Alerts of the last attempt, in words: a loss that was not finite, or that has stopped to fall."""
    tags: list[str]
    notes: str
    archived: bool


def read_status(run: RunDir, seen: RunState = UNREAD) -> tuple[Status, RunState]:
    """Return the last recorded state, corrected by the processes that are really there, and the progress read for it.

    `seen` is the progress of an earlier call, so that only new events are read.
    """
    there = Processes.of(run)  # before the events: a process that has ended since has written its last one
    progress = read_state(run.events, seen)
    return status_of(run, progress, there), progress


DELETED = "Its directory was deleted."
"""Message of a run that had not ended when its directory was deleted."""


def status_of(run: RunDir, progress: RunState, there: Processes) -> Status:
    """Return the recorded state of `progress`, corrected by the processes that were there before it was read."""
    recorded = progress.status or Status("queued")
    if recorded.state == "running" and progress.problems:
        recorded = replace(recorded, message=recorded.message or progress.problems[-1])
    if recorded.state == "running" and _disk_is_full(run.path, 0):
        recorded = replace(recorded, message=WAITS)
    if recorded.state in ("starting", "running") and run.stop_file.exists():
        recorded = replace(recorded, message=" ".join(filter(None, (STOPPING, recorded.message))))
    if recorded.final or there.is_supervised or run.remote.exists() or there.are_elsewhere:
        return recorded
    if not run.path.exists():
        return Status("failed", DELETED, recorded.time)
    is_prepared = there.is_described and not (there.launcher or there.ranks)
    if there.supervisor is None and (there.workers or is_prepared):
        return recorded  # somebody else starts it
    if there.workers:
        return Status("running", "The launcher vanished, its ranks train on; stop() ends them.", recorded.time)
    begun = recorded.time or created_at(run.path)
    if not there.is_described and time.time() - begun < LAUNCH_LIMIT_S:
        return recorded  # `launch` is about to start it
    return _status_without_processes(run, progress, recorded)


def wait_for_end(run: RunDir, seen: RunState = UNREAD, timeout: float | None = None) -> tuple[Status, RunState]:
    """Block until a run has ended and its processes have left, or until `timeout` seconds have passed.

    Returns what `read_status` does. Raises `RunFailed`, with the worker's own traceback, if the run failed.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    with waiting(f"waiting for {run.path.name}") as say:
        asked = None
        with contextlib.suppress(RunNotFound):  # which says nothing about how the run ends
            asked = _steps_asked_for(run)
        while True:
            status, seen = read_status(run, seen)
            if status.final:
                break
            if time.monotonic() > deadline:
                return status, seen
            step = int(seen.steps[-1]["step"]) if seen.steps else 0
            of = f" of {asked:,} ({step / asked:.0%})" if asked else ""
            say(f"{status}, step {step:,}{of}" if step else str(status))
            time.sleep(POLL_S)
        processes.wait_left(run)
    if status.state == "failed":
        raise run_failed(run, status.message)
    return status, seen


def _status_without_processes(run: RunDir, progress: RunState, recorded: Status) -> Status:
    """Deduce how a run ended that has no process left and no final status; the ranks' `end` event may tell."""
    if progress.end is None:
        if run.kill_file.exists():
            return Status("stopped", KILLED, recorded.time)
        cause = processes.root_cause(run)
        said = cause.sentence if cause else VANISHED + (DISK_FULL if _disk_is_full(run.path) else "")
        return Status("failed", said, recorded.time)
    steps, target = int(progress.end["steps"]), _steps_asked_for(run) or 0
    ended_at = progress.end["time"]
    if steps >= target:
        return Status("finished", f"{steps} steps (the launcher had vanished).", ended_at)
    return Status("stopped", f"Stopped at step {steps} of {target} (the launcher had vanished).", recorded.time)


def written_elsewhere(run: RunDir, status: Status) -> bool:
    """Return True if another host has written to the run lately; its processes cannot be asked from here."""
    if not status.final and Processes.of(run).are_elsewhere:
        with contextlib.suppress(OSError):
            written = [path.stat().st_mtime for path in (run.events, run.steps_tail) if path.exists()]
            return time.time() - max(written) < SILENCE_S
    return False


def complete_checkpoints(run: RunDir) -> tuple[Checkpoint, ...]:
    """Return the run's complete checkpoints, oldest first.

    The disk is asked and not the events: a rank may be killed after it has completed a checkpoint and before it could
    report it.
    """
    return tuple(Checkpoint(stored.step_of(path), path) for path in stored.complete_checkpoints(run.checkpoints))


def read_experiment(run: RunDir) -> dict[str, Any]:
    """Return `experiment.json`; raises `RunNotFound` where it cannot be read."""
    return read_described(run.experiment)


def _steps_asked_for(run: RunDir, experiment: Mapping[str, Any] | None = None) -> int | None:
    """Return the steps of the experiment, None if it names none; raises `RunNotFound` for anything but a number."""
    steps = (read_experiment(run) if experiment is None else experiment).get("steps")
    if steps is None or (type(steps) is int and 0 <= steps <= MOST_STEPS):
        return steps
    raise RunNotFound(f"{run.experiment} has steps={steps!r:.80}, which is no number of steps.")


def read_described(path: Path) -> dict[str, Any]:
    """Return the fields of a record of a run; raises `RunNotFound` where it cannot be read."""
    try:
        return read_record(path)
    except (OSError, RecursionError, ValueError) as error:
        raise RunNotFound(f"{path} cannot be read: {error}.") from None


def row_of(run: RunDir, status: Status, progress: RunState) -> RunRow:
    """Return the figures that are shown of a run."""
    experiment, launcher = read_experiment(run), processes.launcher_record(run)
    steps, labels = _steps_asked_for(run, experiment), read_labels(run, experiment)
    step: Mapping[str, Any] = progress.steps[-1] if progress.steps else {}
    table = StepTable(run.path)
    at, losses, seconds, tokens_per_s, mfu = _latest_steps(table, progress)
    settled = slice(len(at) - settled_steps(len(at)), None)
    speed, share = (settled_median(values[settled]) for values in (tokens_per_s, mfu))
    training_loss = final_loss(at, losses) if len(at) else None
    eval_loss = None if progress.evaluation is None else progress.evaluation["loss"]
    timed = np.isfinite(seconds)
    pace_s, eta_s = recent_pace(seconds[timed], at[timed]), None
    if not math.isfinite(pace_s):
        pace_s = (step.get("step_ms") or math.nan) / 1e3
    if status.state == "running" and math.isfinite(pace_s) and steps is not None:
        eta_s = max(0.0, (steps - step["step"]) * pace_s)
    # A run has the devices of its last start; before that, its plan tells how many it waits for.
    devices = progress.start.get("devices") if progress.start else None
    planned = launcher.get("plan")
    num_devices = (devices if isinstance(devices, int) else len(devices)) if devices else planned and planned["world"]
    return {
        "name": run.path.name,
        "path": str(run.path),
        "state": status.state,
        "message": status.message,
        "step": int(step.get("step", 0)),
        "steps": steps,
        "loss": eval_loss if eval_loss is not None else training_loss,
        "training_loss": training_loss,
        "eval_loss": eval_loss,
        "tokens": step.get("tokens"),
        "tokens_per_s": speed if math.isfinite(speed) else None,
        "mfu": share if math.isfinite(share) else None,
        "eta_s": eta_s,
        "devices": num_devices,
        "gpus": [] if status.final else _gpu_indices(run, launcher.get("devices", ())),
        "peak_bytes": max((int(event["peak_bytes"]) for event in progress.memory.values()), default=None),
        "damaged_lines": progress.damaged + table.num_lost + max(0, progress.rows - len(table)),
        "time": step.get("time", status.time),
        "alerts": [event["message"] for event in progress.alerts],
        "tags": list(labels.tags),
        "notes": labels.notes,
        "archived": labels.archived,
    }


def _latest_steps(table: StepTable, progress: RunState) -> list[Array]:
    """Return step, loss, seconds, tokens/s and MFU of the last tenth of the logged steps in order, or more.

    There are enough for the speed, of which the first steps are no part.
    """
    end, needed = table.refresh(), 0
    if progress.steps:
        last = progress.steps[-1]["step"]
        before = progress.steps[-2]["step"] if len(progress.steps) > 1 else 0
        needed = max(math.ceil(END_SHARE * last / max(1, last - before)) + 1, SETTLING_STEPS + SPEED_STEPS)
    ranges = list(table.held(max(0, end - needed)))
    columns = [
        np.concatenate([np.empty(0), *(table.column(name, low, high) for low, high in ranges)])
        for name in ("step", "loss", "seconds", "tokens_per_s", "mfu")
    ]
    backwards = columns[0][::-1]  # a resumption repeats steps, of which the later rows count
    holds = backwards < np.fmin.accumulate(np.concatenate([[math.inf], backwards]))[:-1]
    return [values[holds[::-1]] for values in columns]


@dataclass(frozen=True)
class Labels:
    """The content of `labels.json`."""

    tags: tuple[str, ...] = ()
    notes: str = ""
    archived: bool = False


def read_labels(run: RunDir, config: dict[str, Any]) -> Labels:
    """Return what was said of a run; before anybody did, its tags are those of the experiment in `config`."""
    try:
        fields = read_json(run.labels)
        tags, notes, archived = fields["tags"], fields["notes"], fields["archived"]
    except (OSError, ValueError, KeyError, TypeError):  # nobody said anything, or another program wrote the file
        tracking = config.get("tracking")
        tags, notes, archived = tracking.get("tags") if isinstance(tracking, dict) else (), "", False
    words = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list | tuple) else []
    return Labels(tuple(words), notes if isinstance(notes, str) else "", archived is True)


def state_in_words(state: str, step: int, loss: float | None) -> str:
    """Return a run's state for people: `"finished"`, or `"finished, not finite"` if its last loss is NaN or infinite.

    A loss that JSON cannot hold may be None.
    """
    lost = step > 0 and (loss is None or not math.isfinite(loss))
    return f"{state}, not finite" if lost and state in ("running", "finished", "stopped") else state


def unreadable_row(run: RunDir, error: Exception) -> RunRow:
    """Return the figures of a run whose files cannot be read: it has failed, with the reason as its message."""
    reason = str(error) if isinstance(error, RunNotFound) else f"It cannot be read: {in_words(error)}."
    readable = {"name": run.path.name, "path": str(run.path), "state": "failed", "message": reason}
    labels = read_labels(run, {})
    said = {"tags": list(labels.tags), "notes": labels.notes, "archived": labels.archived}
    numbers = {"step": 0, "gpus": [], "alerts": [], "damaged_lines": 0, "time": 0.0}
    return {**dict.fromkeys(RunRow.__annotations__), **readable, **numbers, **said}  # type: ignore[typeddict-item]


def _gpu_indices(run: RunDir, given: Sequence[str]) -> list[int]:
    gpus = read_described(run.environment).get("gpus") if given else None
    known = [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    return [
        gpu["index"] for name in given for gpu in known if gpu.get("uuid") == name and type(gpu.get("index")) is int
    ]


def _disk_is_full(path: Path, least: int = DISK_FULL_BYTES) -> bool:
    try:
        return shutil.disk_usage(path).free <= least
    except OSError:
        return False


def created_at(path: Path) -> float:
    """Return when a run was described, in Unix seconds; 0 for one that is gone.

    A run that is just being launched may not have `environment.json` yet.
    """
    for file in (RunDir(path).environment, RunDir(path).experiment):
        with contextlib.suppress(OSError):
            return file.stat().st_mtime
    return 0.0
