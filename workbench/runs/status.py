"""The status of a run, deduced from its events and from the processes that still live."""

from __future__ import annotations

import contextlib
import math
import shutil
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from workbench.display import facts_html, waiting
from workbench.errors import RunNotFound, in_words
from workbench.events import DataUseEvent, EndEvent, EvaluationEvent, MemoryEvent, ProcessRecord, StartEvent, StepEvent
from workbench.execution import checkpoint as stored
from workbench.rundir import FINAL_STATES, KILLED, RunDir, is_elsewhere, process_alive, read_json, read_record
from workbench.runs.event_blocks import recent_steps
from workbench.runs.history import END_SHARE, final_loss, latest_events, recent_pace, resumed_step
from workbench.runs.launching import processes
from workbench.runs.launching.processes import run_failed

RECENT_STEPS = 20
"""Number of latest steps over which the median speed is taken."""
VANISHED = "The launcher vanished."
DISK_FULL = " Its disk is full, so nobody could write why. Free some space, then resume the run."
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
class Status:
    """A run's state (queued, starting, running, stalled, finished, stopped or failed), with a message for people."""

    state: str
    message: str = ""
    time: float = 0.0
    """Unix seconds of the last change."""

    @property
    def final(self) -> bool:
        """Return True if the run has ended."""
        return self.state in FINAL_STATES

    def __str__(self) -> str:
        return f"{self.state}: {self.message}" if self.message else self.state

    def _repr_html_(self) -> str:
        return facts_html(self.state, [("", self.message)] if self.message else [])


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
    """Training loss at the end so far, as the end of its curve (`workbench.runs.history.final_loss`)."""
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
    """Lines of `events.jsonl` that differ from what was written; the curve lacks what they held."""
    time: float
    """Unix seconds of the last step, or of the last change of state."""
    tags: list[str]
    notes: str
    archived: bool


@dataclass(frozen=True)
class Progress:
    """The latest event of each type and the latest steps, read from the first `offset` bytes of the events.

    Immutable, because several threads may read through one `Run`.
    """

    status: Status | None = None
    start: StartEvent | None = None
    steps: tuple[StepEvent, ...] = ()
    end: EndEvent | None = None
    evaluation: EvaluationEvent | None = None
    """Held-out loss after the most steps; None before the first step."""
    data_use: DataUseEvent | None = None
    """Samples that were read of each source of a mixture, up to the last checkpoint or the end."""
    memory: Mapping[int, MemoryEvent] = field(default_factory=dict)
    """Latest `memory` event of each rank."""
    problems: tuple[str, ...] = ()
    """Sentences about checkpoints that failed since the last launch."""
    offset: int = 0
    damaged: int = 0
    """Lines of the events that differ from what was written, and were skipped."""

    def median(self, figure: str) -> float | None:
        """Return the median of a figure over the latest steps; a single step may have waited for a checkpoint."""
        values: list[Any] = [value for event in self.steps if (value := event.get(figure)) is not None]
        return float(statistics.median(values)) if values else None


def read_progress(run: RunDir, seen: Progress = Progress()) -> Progress:
    """Fold the events that arrived after `seen` into it."""
    events, offset, damaged = latest_events(run.events, seen.offset, RECENT_STEPS)
    status, start, steps, end = seen.status, seen.start, list(seen.steps), seen.end
    memory, problems, evaluation, data_use = dict(seen.memory), list(seen.problems), seen.evaluation, seen.data_use
    for event in events:
        if event["type"] == "status":
            status = Status(event["state"], event.get("message", ""), event["time"])
            if event["state"] in ("queued", "starting"):
                end, problems = None, []
        elif event["type"] == "start":
            start, resumed_from = event, event.get("resumed_from")
            if evaluation is not None and evaluation["step"] > resumed_step(resumed_from):
                evaluation = None  # the new attempt repeats those steps
            if problems and resumed_from:
                problems[-1] += f" Training goes on from {Path(str(resumed_from)).name}."
            if status is not None and not status.final:  # the supervisor reports the new state a moment later
                status = Status("running", "", event["time"])
        elif event["type"] == "checkpoint_problem":
            training = status is not None and status.state == "running"
            failed = f"The checkpoint of step {event['step']} could not be written: "
            problems.append((failed if training else "") + event["message"])
        elif event["type"] == "step":
            steps.append(event)
        elif event["type"] == "evaluation":
            if event["step"] > 0 and (evaluation is None or event["step"] >= evaluation["step"]):
                evaluation = event
        elif event["type"] == "end":
            end = event
        elif event["type"] == "data_use":
            data_use = event
        elif event["type"] == "memory":
            memory[int(event["rank"])] = event
    steps.sort(key=lambda event: event["time"])  # a line may stand in the wrong place
    latest, damaged = tuple(steps[-RECENT_STEPS:]), seen.damaged + damaged
    return Progress(status, start, latest, end, evaluation, data_use, memory, tuple(problems), offset, damaged)


def read_status(run: RunDir, seen: Progress = Progress()) -> tuple[Status, Progress]:
    """Return the last recorded state, corrected by the processes that are really there, and the progress read for it.

    `seen` is the progress of an earlier call, so that only new events are read.
    """
    supervised = any(map(process_alive, supervisor_record(run)))  # asked before the events are read
    workers = bool(processes.live_workers(run))
    progress = read_progress(run, seen)
    recorded = progress.status or Status("queued")
    if recorded.state == "running" and progress.problems:
        recorded = replace(recorded, message=recorded.message or progress.problems[-1])
    if recorded.final or supervised or run.remote.exists() or runs_elsewhere(run):
        return recorded, progress
    is_prepared = run.launcher.exists() and not (processes.launcher_record(run) or processes.rank_records(run))
    if not supervisor_record(run) and (workers or is_prepared):
        return recorded, progress  # somebody else starts it
    if workers:
        message = "The launcher vanished, its ranks train on; stop() ends them."
        return Status("running", message, recorded.time), progress
    return _status_without_processes(run, progress, recorded), progress


def wait_for_end(run: RunDir, seen: Progress = Progress(), timeout: float | None = None) -> tuple[Status, Progress]:
    """Block until a run has ended and its processes have left, or until `timeout` seconds have passed.

    Returns what `read_status` does. Raises `RunFailed`, with the worker's own traceback, if the run failed.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    with waiting(f"waiting for {run.path.name}") as say:
        while True:
            status, seen = read_status(run, seen)
            if status.final:
                break
            if time.monotonic() > deadline:
                return status, seen
            step = f", step {seen.steps[-1]['step']:,}" if seen.steps else ""
            say(f"{status}{step}")
            time.sleep(POLL_S)
        processes.wait_left(run)
    if status.state == "failed":
        raise run_failed(run, status.message)
    return status, seen


def _status_without_processes(run: RunDir, progress: Progress, recorded: Status) -> Status:
    """Deduce how a run ended that has no process left and no final status; the ranks' `end` event may tell."""
    begun = recorded.time or created_at(run.path)
    if not run.launcher.exists() and time.time() - begun < LAUNCH_LIMIT_S:
        return recorded  # `launch` is about to start it
    if progress.end is None:
        if run.kill_file.exists():
            return Status("stopped", KILLED, recorded.time)
        return Status("failed", VANISHED + (DISK_FULL if _disk_is_full(run.path) else ""), recorded.time)
    steps, target = int(progress.end["steps"]), _steps_asked_for(run) or 0
    ended_at = progress.end["time"]
    if steps >= target:
        return Status("finished", f"{steps} steps (the launcher had vanished).", ended_at)
    return Status("stopped", f"Stopped at step {steps} of {target} (the launcher had vanished).", recorded.time)


def supervisor_record(run: RunDir) -> list[ProcessRecord]:
    """Return the record of the run's supervisor in a list, which is empty when there is none."""
    supervisor = processes.launcher_record(run).get("supervisor")
    return [supervisor] if supervisor else []


def runs_elsewhere(run: RunDir) -> bool:
    """Return True if the process that writes the run's states is on another host.

    This is the supervisor, or rank 0 of a run without one.
    """
    return any(map(is_elsewhere, supervisor_record(run) or processes.rank_records(run)[:1]))


def written_elsewhere(run: RunDir, status: Status) -> bool:
    """Return True if another host has written to the run lately; its processes cannot be asked from here."""
    if not status.final and runs_elsewhere(run):
        with contextlib.suppress(OSError):
            return time.time() - run.events.stat().st_mtime < SILENCE_S
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


def _steps_asked_for(run: RunDir) -> int | None:
    """Return the steps of the experiment, None if it names none; raises `RunNotFound` for anything but a number."""
    steps = read_experiment(run).get("steps")
    if steps is None or (isinstance(steps, int) and not isinstance(steps, bool)):
        return steps
    raise RunNotFound(f"{run.experiment} has steps={steps!r:.80}, which is no number of steps.")


def read_described(path: Path) -> dict[str, Any]:
    """Return the fields of a record of a run; raises `RunNotFound` where it cannot be read."""
    try:
        return read_record(path)
    except (OSError, RecursionError, ValueError) as error:
        raise RunNotFound(f"{path} cannot be read: {error}.") from None


def row_of(run: RunDir, status: Status, progress: Progress) -> RunRow:
    """Return the figures that are shown of a run."""
    steps = _steps_asked_for(run)
    labels = read_labels(run, read_experiment(run))
    step: Mapping[str, Any] = progress.steps[-1] if progress.steps else {}
    latest = _latest_steps(run, progress)
    training_loss = final_loss([each["step"] for each in latest], [each.get("loss") for each in latest])
    eval_loss = None if progress.evaluation is None else progress.evaluation["loss"]
    timed = [each for each in latest if each.get("seconds") is not None]
    pace_s, eta_s = recent_pace([each["seconds"] for each in timed], [each["step"] for each in timed]), None
    if not math.isfinite(pace_s):
        pace_s = (progress.median("step_ms") or math.nan) / 1e3
    if status.state == "running" and math.isfinite(pace_s) and steps is not None:
        eta_s = max(0.0, (steps - step["step"]) * pace_s)
    return {
        "name": run.path.name,
        "path": str(run.path),
        "state": status.state,
        "message": status.message,
        "step": int(step.get("step", 0)),
        "steps": steps,
        "loss": eval_loss if eval_loss is not None else training_loss if latest else None,
        "training_loss": training_loss if latest else None,
        "eval_loss": eval_loss,
        "tokens": step.get("tokens"),
        "tokens_per_s": progress.median("tokens_per_s"),
        "mfu": progress.median("mfu"),
        "eta_s": eta_s,
        "devices": _device_count(run, progress),
        "gpus": [] if status.final else _gpu_indices(run),
        "peak_bytes": max((int(event["peak_bytes"]) for event in progress.memory.values()), default=None),
        "damaged_lines": progress.damaged,
        "time": step.get("time", status.time),
        "tags": list(labels.tags),
        "notes": labels.notes,
        "archived": labels.archived,
    }


def _latest_steps(run: RunDir, progress: Progress) -> list[Any]:
    """Return the last tenth of the logged steps in order, or more; none before the first."""
    if not progress.steps:
        return []
    last = int(progress.steps[-1]["step"])
    before = progress.steps[-2]["step"] if len(progress.steps) > 1 else 0
    needed = math.ceil(END_SHARE * last / max(1, last - int(before))) + 1
    events: list[Any] = list(progress.steps)
    if needed > len(events):
        events = recent_steps(run.events, 0, progress.offset, needed)
    latest = list[Any]()
    for event in sorted(events, key=lambda event: event["time"], reverse=True):  # a resumption repeats steps
        if not latest or event["step"] < latest[-1]["step"]:
            latest.append(event)
    return latest[::-1]


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
    numbers = {"step": 0, "gpus": [], "damaged_lines": 0, "time": 0.0}
    return {**dict.fromkeys(RunRow.__annotations__), **readable, **numbers, **said}  # type: ignore[typeddict-item]


def _device_count(run: RunDir, progress: Progress) -> int | None:
    devices = progress.start["devices"] if progress.start else None
    if devices:
        return devices if isinstance(devices, int) else len(devices)
    planned = processes.launcher_record(run).get("plan")
    return planned["world"] if planned else None


def _gpu_indices(run: RunDir) -> list[int]:
    given = processes.launcher_record(run).get("devices", ())
    gpus = read_record(run.environment).get("gpus", ()) if given else ()
    indices = {gpu.get("uuid"): gpu.get("index") for gpu in gpus}
    return [int(indices[name]) for name in given if name in indices]


def _disk_is_full(path: Path) -> bool:
    try:
        return shutil.disk_usage(path).free < DISK_FULL_BYTES
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
