"""The delivery of a run to its tracker: its settings there, its recorder, uploads after its end, and their state.

Nothing here runs in the training. Ranks write `events.jsonl` and know no tracker; `workbench.runs.tracking.recorder`,
a process of its own, reads the events and logs them. `sync` delivers later, from the same events, what the recorder
could not deliver.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.base.errors import WorkbenchError
from workbench.record.event_log import read_state
from workbench.record.rundir import RunDir, locked, read_object
from workbench.runs.launching import processes
from workbench.runs.tracking.tracker import tracker_of

SYNC_LIMIT_S = 600.0
"""Seconds for the upload of one run, from its end or from the call of `sync`."""
NICENESS = 10
"""Niceness of the recorder, which must not slow the training down."""


@dataclass(frozen=True)
class Delivery:
    """The progress of a run's upload to its tracker: `state` is one of offline, syncing, synced, failed."""

    run: str
    state: str
    message: str
    step: int
    """The last step that the server has; 0 when it has none."""

    def __str__(self) -> str:
        return f"{self.run}: {self.state}{': ' + self.message if self.message else ''}"


def check_installed(experiment: Any) -> None:
    """Raise `WorkbenchError` if the experiment names a tracker that is not installed here."""
    tracking = experiment.tracking
    if tracking.project and importlib.util.find_spec(tracking.tracker) is None:
        raise WorkbenchError(
            f"The experiment is tracked by {tracking.tracker}, which is not installed. Run `pip install "
            f'{tracking.tracker}`, or take another tracker: wb.Tracking(tracker="wandb"), or none: project="".'
        )


def tracker_settings(run: RunDir, experiment: Any) -> dict[str, Any] | None:
    """Return tracker, project, id, name, group, tags and notes of the run there; None when tracking is switched off.

    `project=""` switches it off, and `WANDB_MODE=disabled` that of W&B. A run that is continued keeps its id, its name
    and its notes. Runs of one experiment (of the same name) are a group.
    """
    tracking = experiment.tracking
    is_disabled = tracking.tracker == "wandb" and os.environ.get("WANDB_MODE") == "disabled"
    if is_disabled or not tracking.project:
        return None
    settings = {
        "tracker": tracking.tracker,
        "project": tracking.project,
        "id": uuid.uuid4().hex[:8],
        "name": run.path.name,
        "group": str(experiment.name),
        "tags": list(tracking.tags),
    }
    known = read_object(run.tracker)
    if known.get("tracker", "wandb") != tracking.tracker:
        return settings
    return settings | {
        key: known[key] for key in ("id", "name", "notes") if known.get(key) and isinstance(known[key], str)
    }


def start_recorder(run: RunDir, *options: str) -> None:
    """Start the recorder: a detached process that cannot harm the training.

    With the option `--upload` it uploads what came after the run's end, once the recorder before it has left.
    """
    if run.tracker.exists():
        with contextlib.suppress(OSError):
            _spawn(run, *options)


def _spawn(run: RunDir, *options: str) -> subprocess.Popen[bytes]:
    log, environment = run.log("tracking"), own_environment()
    return processes.start_detached(processes.RECORDER, *options, str(run.path), log=log, environment=environment)


def own_environment() -> dict[str, str]:
    """Return this process's environment without the variables of a W&B run of its own."""
    own_run = ("WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_NAME", "WANDB_RUN_GROUP", "WANDB_PROJECT")
    return {name: value for name, value in os.environ.items() if name not in own_run}


def sync(run: RunDir) -> Delivery:
    """Upload what the tracker lacks of a run, in `sync_limit_s()` seconds at most, without changing the run itself.

    Raises `WorkbenchError` if the run is not tracked, its tracker says what it needs (W&B: nobody is logged in, or its
    client does not say who is), or the recorder is still at work.
    """
    if not run.tracker.exists():
        raise WorkbenchError(
            f"{run.path.name} is not tracked: it was launched with WANDB_MODE=disabled or without a project. "
            "Launch it without either to track it."
        )
    if refusal := tracker_of(run).refusal():
        raise WorkbenchError(refusal)
    if recording(run):
        raise WorkbenchError(
            f"The recorder of {run.path.name} is still at work; it uploads by itself. Wait until the run has ended."
        )
    if not pending(run):
        return delivery(run)
    limit = sync_limit_s()
    process = _spawn(run, "--upload")
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return Delivery(run.path.name, "failed", f"not uploaded within {limit:.0f} s; try again.", delivery(run).step)
    return delivery(run)


def delivery(run: RunDir) -> Delivery:
    """Return the last report of the recorder."""
    events = read_state(run.events).tracking
    last: Any = events[-1] if events else {"state": "offline"}
    step = max((int(event.get("step") or 0) for event in events), default=0)
    return Delivery(run.path.name, last["state"], last.get("message", ""), step)


def pending(run: RunDir) -> bool:
    """Return True if the tracker lacks something of a run: its upload failed, or files were added after it.

    A run that was delivered elsewhere than to where the environment points by now is lacking there.
    """
    if not run.tracker.exists():
        return False
    state = read_state(run.events)
    last = state.tracking[-1] if state.tracking else None
    changed = max([step["time"] for step in state.steps] + ([state.status.time] if state.status else []), default=0.0)
    if last is None or last["state"] != "synced" or changed > last["time"]:
        return True
    if (to := tracker_of(run).destination()) and to != last.get("to"):
        return True
    uploaded = last.get("files", {})
    return any(path.stat().st_mtime != uploaded.get(name) for name, path in attachments(run).items())


def attachments(run: RunDir) -> dict[str, Path]:
    """Return the existing files to attach, by their names there: plan, its pictures, the executed notebook."""
    files = {"plan.json": run.plan, "partition.html": run.plan_page, "notebook.ipynb": run.notebook}
    return {name: path for name, path in files.items() if path.exists()}


def recording(run: RunDir) -> bool:
    """Return True if a recorder is at work on the run."""
    with recording_alone(run) as alone:
        return not alone


@contextlib.contextmanager
def recording_alone(run: RunDir) -> Iterator[bool]:
    """Hold the lock of the run's recorder, which no crash can leave behind; yield True if it was free."""
    run.tracking.mkdir(parents=True, exist_ok=True)
    with locked(run.tracking / "lock", wait=False) as alone:
        yield alone


def sync_limit_s() -> float:
    """Return the seconds that an upload may take after a run has ended."""
    return float(os.environ.get("WORKBENCH_SYNC_LIMIT_S") or SYNC_LIMIT_S)


def tracking_note(run: RunDir) -> tuple[str, str]:
    """Return two texts for people: the tracker, and the run's project there with the state of its upload."""
    tracker = tracker_of(run)
    if not run.tracker.exists():
        return tracker.title, "off"
    settings, last = read_object(run.tracker), delivery(run)
    names = [settings.get(name) for name in ("project", "id")]
    is_whole = all(isinstance(name, str) for name in names)
    where = "/".join(map(str, names)) if is_whole else f"{run.tracker.name} is damaged"
    return tracker.title, f"{where}, {last.state}{': ' + last.message if last.message else ''}"
