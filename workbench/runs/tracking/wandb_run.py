"""A run on Weights & Biases: its project and id there, its recorder, uploads after its end, and copies of others' runs.

Nothing here runs in the training. Ranks write `events.jsonl` and know no tracker; `workbench.runs.tracking.recorder`,
a process of its own, reads the events and logs them. `sync` delivers later, from the same events, what the recorder
could not deliver.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.base.errors import RunNotFound, WorkbenchError, first_line
from workbench.base.machine import cache_home
from workbench.record.columns import COLUMNS, NAME
from workbench.record.event_log import read_state
from workbench.record.rundir import (
    RunDir,
    append_event,
    locked,
    read_object,
    write_json,
    write_record,
)
from workbench.record.step_table import LOGGED, log_steps
from workbench.runs.launching import processes

LOGIN_LIMIT_S = 120.0
"""Seconds that W&B's client may take to say whether there is a key: it starts a service, on busy cores slowly."""
SYNC_LIMIT_S = 600.0
"""Seconds for the upload of one run, from its end or from the call of `sync`."""
NO_KEY = 3
"""Exit code of the process that asks W&B's client and finds no key."""
NICENESS = 10
"""Niceness of the recorder, which must not slow the training down."""


@dataclass(frozen=True)
class Delivery:
    """The progress of a run's upload to W&B: `state` is one of offline, syncing, synced, failed."""

    run: str
    state: str
    message: str
    step: int
    """The last step that the server has; 0 when it has none."""

    def __str__(self) -> str:
        return f"{self.run}: {self.state}{': ' + self.message if self.message else ''}"


def tracker_settings(run: RunDir, experiment: Any) -> dict[str, Any] | None:
    """Return project, id, name, group, tags and notes of the run on W&B; None when tracking is switched off.

    `WANDB_MODE=disabled` or `project=""` switches it off. A run that is continued keeps its id, its name and its notes.
    Runs of one experiment (of the same name) are a group.
    """
    if os.environ.get("WANDB_MODE") == "disabled" or not experiment.tracking.project:
        return None
    settings = {
        "project": experiment.tracking.project,
        "id": uuid.uuid4().hex[:8],
        "name": run.path.name,
        "group": str(experiment.name),
        "tags": list(experiment.tracking.tags),
    }
    known = read_object(run.tracker)
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


def sync(run: RunDir, limit_s: float | None = None) -> Delivery:
    """Upload what W&B lacks of a run, in at most `limit_s` seconds, without changing the run itself.

    Raises `WorkbenchError` if the run is not tracked, nobody is logged in, W&B's client does not say who is, or
    the recorder is still at work.
    """
    if not run.tracker.exists():
        raise WorkbenchError(
            f"{run.path.name} is not tracked: it was launched with WANDB_MODE=disabled or without a project. "
            "Launch it without either to track it."
        )
    if not logged_in():
        raise WorkbenchError("There is no key for W&B here. Run `wandb login`, or set WANDB_API_KEY, and sync again.")
    if recording(run):
        raise WorkbenchError(
            f"The recorder of {run.path.name} is still at work; it uploads by itself. Wait until the run has ended."
        )
    if not pending(run):
        return delivery(run)
    limit = sync_limit_s() if limit_s is None else limit_s
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
    """Return True if W&B lacks something of a tracked run: its upload failed, or files were added after it."""
    if not run.tracker.exists():
        return False
    state = read_state(run.events)
    last = state.tracking[-1] if state.tracking else None
    changed = max([step["time"] for step in state.steps] + ([state.status.time] if state.status else []), default=0.0)
    if last is None or last["state"] != "synced" or changed > last["time"]:
        return True
    uploaded = last.get("files", {})
    return any(path.stat().st_mtime != uploaded.get(name) for name, path in attachments(run).items())


def attachments(run: RunDir) -> dict[str, Path]:
    """Return the existing files to attach, by their names on W&B: plan, its pictures, the executed notebook."""
    files = {"plan.json": run.plan, "partition.html": run.plan_page, "notebook.ipynb": run.notebook}
    return {name: path for name, path in files.items() if path.exists()}


def recording(run: RunDir) -> bool:
    """Return True if a recorder is at work on the run."""
    with recording_alone(run) as alone:
        return not alone


@contextlib.contextmanager
def recording_alone(run: RunDir) -> Iterator[bool]:
    """Hold the run's W&B lock, which no crash can leave behind; yield True if it was free."""
    run.tracking.mkdir(parents=True, exist_ok=True)
    with locked(run.tracking / "lock", wait=False) as alone:
        yield alone


def may_upload() -> bool:
    """Return True if this process would upload: somebody is logged in, and `WANDB_MODE` does not forbid it."""
    return os.environ.get("WANDB_MODE") not in ("offline", "dryrun", "disabled") and has_key()


def logged_in() -> bool:
    """Return True if this user has a key for the W&B server in use (`$WANDB_API_KEY`, or from `wandb login`).

    Another process asks the client, which starts a service and may wait for a server. Raises `WorkbenchError` if it
    gives no answer.
    """
    command = [sys.executable, "-m", "workbench.runs.tracking.wandb_run", "--logged-in"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOGIN_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise WorkbenchError(
            f"W&B's client did not say within {LOGIN_LIMIT_S:.0f} s whether there is a key. Other work keeps this "
            "machine busy, or the server of WANDB_BASE_URL does not answer. Try again."
        ) from None
    if done.returncode not in (0, NO_KEY):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise WorkbenchError(f"W&B's client failed to say whether there is a key: {last}")
    return done.returncode == 0


def has_key() -> bool:
    """Return the same as `logged_in`, asked in this process."""
    import wandb

    try:
        return bool(wandb.login(prompt=False, verify=False))  # type: ignore[call-arg, unused-ignore]
    except (wandb.Error, ValueError, OSError):  # a malformed key or settings file
        return False


def sync_limit_s() -> float:
    """Return the seconds that an upload may take after a run has ended."""
    return float(os.environ.get("WORKBENCH_SYNC_LIMIT_S") or SYNC_LIMIT_S)


def tracking_note(run: RunDir) -> str:
    """Return a line for people: the run's W&B project and the state of its upload."""
    if not run.tracker.exists():
        return "off"
    settings, last = read_object(run.tracker), delivery(run)
    names = [settings.get(name) for name in ("project", "id")]
    where = "/".join(map(str, names)) if all(isinstance(name, str) for name in names) else "wandb.json is damaged"
    return f"{where}, {last.state}{': ' + last.message if last.message else ''}"


# A colleague's run, copied from Weights & Biases into a run directory and then read like any other run
#
# A run that Workbench recorded has experiment, plan and environment; any other W&B run has its curve and its config.

ANSWER_LIMIT_S = 60
_STATES = {"finished": "finished", "running": "running", "pending": "queued", "killed": "stopped"}
_ADDRESS = re.compile(r"wandb:/*(?:([\w.-]+)/)?([\w.-]+)/(?:runs/)?([\w.-]+)")


def download_run(address: str) -> Path:
    """Copy the run at `wandb:entity/project/id`, as W&B has it now, into a run directory, and return its path.

    The entity may be left out for the user's own runs. The copy can be read and compared; it has no process here, so it
    cannot be stopped or continued. Raises `RunNotFound` if there is no such run, `WorkbenchError` if the server does
    not answer.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise RunNotFound(f"{address!r} is not an address on W&B. Write wandb:entity/project/id.")
    entity, project, identity = match.groups()
    path = "/".join(part for part in (entity, project, identity) if part)
    remote, rows = _fetch(path)
    run = RunDir(cache_home() / "wandb" / str(remote.entity) / project / identity)
    _write(run, remote, rows)
    return run.path


def _fetch(path: str) -> tuple[Any, list[dict[str, Any]]]:
    import wandb

    try:
        remote = wandb.Api(timeout=ANSWER_LIMIT_S).run(path)
        return remote, list(remote.scan_history(use_cache=False))
    except Exception as error:  # CommError, UsageError, AuthenticationError, RunNotFoundError, …
        reason = first_line(error)
        if "ould not find run" in reason:
            raise RunNotFound(f"W&B has no run {path}, or you may not see it. {reason}.") from None
        raise WorkbenchError(
            f"W&B gave no answer for {path}: {reason}. Check the network, `wandb login` and WANDB_BASE_URL."
        ) from None


def _write(run: RunDir, remote: Any, rows: list[dict[str, Any]]) -> None:
    config = json.loads(json.dumps(dict(remote.config), default=str))  # the client answers with types of its own
    plan, environment = config.pop("plan", None), config.pop("environment", None)
    steps = [_step(row) for row in rows]
    last = max((step["step"] for step in steps), default=0)
    write_json(run.remote, {"url": str(remote.url)})
    write_record(run.experiment, {"steps": last, **config, "name": str(remote.display_name or remote.id)})
    if isinstance(plan, Mapping) and "stages" in plan:
        write_record(run.plan, {**plan, "candidates": []})
    write_record(run.environment, environment if isinstance(environment, Mapping) else {})
    degrees = ("pipeline", "data", "tensor")
    is_planned = isinstance(plan, Mapping) and all(degree in plan for degree in degrees)
    devices = math.prod(int(plan[degree]) for degree in degrees) if is_planned else 1
    _write_events(run, remote, steps, devices=devices)


def _write_events(run: RunDir, remote: Any, steps: list[dict[str, Any]], devices: int) -> None:
    """Replace each file of the log as a whole, so that a reader sees the old curve or the new one."""
    part = RunDir(run.path / "part")
    shutil.rmtree(part.path, ignore_errors=True)
    part.path.mkdir()
    begun = [step["time"] for step in steps if step.get("time")]
    append_event(part.events, "status", state="starting", message="", **({"time": begun[0]} if begun else {}))
    append_event(part.events, "start", devices=devices, resumed_from=None)
    log_steps(part.path, steps)
    append_event(part.events, "status", state=_STATES.get(remote.state, "failed"), message=f"On W&B: {remote.state}.")
    for path in (run.steps_tail, run.steps, run.events):
        if (part.path / path.name).exists():  # a run of few steps has no table
            (part.path / path.name).replace(path)
        else:
            path.unlink(missing_ok=True)
    part.path.rmdir()


def _step(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of W&B as a step event, with the nearest names of W&B where Workbench did not write the row."""
    metrics = {key: _number(value) for key, value in row.items() if not key.startswith("_")}
    renamed = {
        name: next((_number(row[key]) for key in column.wandb if key in row), None)
        for name, column in COLUMNS.items()
        if column.wandb
    }
    other = {key: value for key, value in metrics.items() if NAME.fullmatch(key) and key not in COLUMNS}
    scalars = {"scalars": other} if any(value is not None for value in other.values()) else {}
    return {
        **{name: metrics.get(name) for name in LOGGED},
        **renamed,
        **scalars,
        "step": int(row["_step"]),
        "time": row.get("_timestamp"),
    }


def _number(value: Any) -> float | None:
    """Return a number, also from the words that W&B writes for what JSON cannot hold: `"NaN"`, `"Infinity"`."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


if __name__ == "__main__":
    sys.exit(0 if has_key() else NO_KEY)
