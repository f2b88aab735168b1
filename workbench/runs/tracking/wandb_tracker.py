"""Weights & Biases as a tracker: uploads and offline files; and copies of other people's runs."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.base.errors import RunNotFound, WorkbenchError, first_line
from workbench.base.machine import cache_home
from workbench.record.columns import COLUMNS, NAME
from workbench.record.event_log import read_state
from workbench.record.rundir import RunDir, append_event, read_json, write_json, write_record
from workbench.record.step_table import LOGGED, log_steps
from workbench.runs.tracking.delivery import sync_limit_s
from workbench.runs.tracking.rows import Row, RowTail
from workbench.runs.tracking.tracker import Opened, lacks
from workbench.strategy import DEGREES

FLUSH_S = 1.0
"""Seconds of an offline file that a killed recorder may lose; W&B's own default is 15."""
INIT_LIMIT_S = 60.0
CONFIRM_LIMIT_S = 15.0
"""Seconds that the server has to count the last rows."""
ANSWER_LIMIT_S = 60
SAME_S = 1e-3
"""Difference, in seconds, up to which the time of a row on the server is that of an event."""
POLL_S = 0.5
LOGIN_LIMIT_S = 120.0
"""Seconds that W&B's client may take to say whether there is a key: it starts a service, on busy cores slowly."""
NO_KEY = 3
"""Exit code of the process that asks W&B's client and finds no key."""


class WandbTracker:
    """A run at Weights & Biases, whose rows are known by their times."""

    title = "W&B"

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._session: Any = None
        self._is_offline = False

    def refusal(self) -> str:
        no_key = "There is no key for W&B here. Run `wandb login`, or set WANDB_API_KEY, and sync again."
        return "" if logged_in() else no_key

    def obstacle(self) -> str:
        mode = os.environ.get("WANDB_MODE")
        if mode in ("offline", "dryrun", "disabled"):
            return f"WANDB_MODE is {mode};"
        return "" if has_key() else "no key for W&B is here;"

    def destination(self) -> str:
        return ""

    def open(self, tail: RowTail, config: Mapping[str, Any], offline: bool) -> Opened:
        """Open the run for the rows of `tail`.

        A run that went on from an earlier step is rewound to it where the server can do so. Otherwise it goes on as a
        run of its own in the same group, which gets every step: W&B's history only grows, so the old run keeps the old
        rows.
        """
        import wandb

        if self._session is not None:
            self._session.finish()
        self._is_offline, known, how = offline, read_json(self._run.tracker), ""
        if offline:
            self._init(known, config, mode="offline")
            return self._opened(tail, "")
        was_online = any(event["state"] == "syncing" for event in read_state(self._run.events).tracking)
        agreed = _agreed_step(known, tail) if was_online else None
        if agreed is None:
            self._init(known, config, resume="allow")
            return self._opened(tail, self._session.url)
        try:
            self._init(known, config, resume_from=f"{known['id']}?_step={agreed}")
            how = f"rewound to step {agreed:,}"
        except wandb.Error as error:
            why = f"W&B could not rewind run {known['id']} to step {agreed:,} ({first_line(error)})"
            name = f"{self._run.path.name} from step {agreed:,}"
            new = {**known, "id": uuid.uuid4().hex[:8], "name": name, "notes": f"{why}."}
            self._init(new, config, resume="allow")
            write_json(self._run.tracker, new)
            how = f"a run of its own, because {why}"
        return self._opened(tail, "; ".join(filter(None, (self._session.url, how))))

    def _opened(self, tail: RowTail, words: str) -> Opened:
        self._session.define_metric("eval/*", step_metric="eval/step")
        first = int(self._session.step)
        return Opened(words, sum(row.step < first for row in tail.backlog))

    def _init(self, known: Mapping[str, Any], config: Mapping[str, Any], mode: str = "online", **branch: Any) -> None:
        """Start the client on the run with the settings `known`; `branch` says how it continues what is there."""
        import wandb

        settings = wandb.Settings(
            console="off",
            silent=True,
            init_timeout=min(INIT_LIMIT_S, sync_limit_s()),
            finish_timeout=sync_limit_s(),
            finish_timeout_raises=True,
            x_transaction_log_flush_interval=FLUSH_S,
            # The config describes the machine; W&B's own collection would add addresses and command lines.
            disable_git=True,
            disable_code=True,
            x_disable_meta=True,
            x_save_requirements=False,
        )
        self._session = wandb.init(
            **{name: value for name, value in known.items() if name != "tracker"},
            job_type="train",
            dir=str(self._run.tracking),
            config=dict(config),
            mode=mode,  # type: ignore[arg-type, unused-ignore]
            settings=settings,
            **branch,
        )

    def log(self, row: Row) -> None:
        # W&B closes a row when the next one begins, so that what a step is evaluated to still enters the row of that
        # step; the event that opens the row gives it its time.
        opening = {} if row.opened_s is None else {"_timestamp": row.opened_s}
        self._session.log({**row.metrics, **_samples_table(row), **opening}, step=row.step)

    def attach(self, files: Mapping[str, Mapping[str, Path]], facts: Mapping[str, float]) -> None:
        import wandb

        self._session.summary.update(facts)
        for artifact_type, named in files.items():
            artifact = wandb.Artifact(f"{artifact_type}-{self._session.id}", type=artifact_type)
            for name, path in named.items():
                artifact.add_file(str(path), name=name)
            self._session.log_artifact(artifact)

    def confirm(self, tail: RowTail, ended_well: bool) -> None:
        """End the run; the client gives up on a row that is refused, and drops others, without an error."""
        self._session.finish(exit_code=0 if ended_well else 1)
        if self._is_offline:
            # The newest file holds every step; an older one would upload the replaced steps of an earlier attempt.
            for folder in sorted(self._run.tracking.glob("wandb/offline-run-*"))[:-1]:
                shutil.rmtree(folder, ignore_errors=True)
            return
        last, count = max(tail.times, default=0), len(tail.times)
        deadline = time.monotonic() + min(CONFIRM_LIMIT_S, sync_limit_s())
        while True:
            remote = _remote(f"{self._session.entity}/{self._session.project}/{self._session.id}")
            if remote is not None and int(remote.lastHistoryStep) >= last and _lines(remote, count) >= count:
                return
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        rows = remote.scan_history(use_cache=False) if remote is not None and int(remote.lastHistoryStep) >= 0 else ()
        there = {int(row["_step"]) for row in rows}
        raise lacks(set(tail.times), there, count, count - len(set(tail.times) - there))


def _samples_table(row: Row) -> dict[str, Any]:
    import wandb

    columns = ["step", "prompt", "what the model wrote"]
    return {"samples": wandb.Table(columns=columns, data=list(map(list, row.samples)))} if row.samples else {}


def _agreed_step(known: Mapping[str, Any], tail: RowTail) -> int | None:
    """Return the last step up to which the server's rows are those of the events; None if all its rows are, or none is.

    A row is known by its time. Rows up to a resumption whose row agrees are taken to agree: they were sent in order.
    """
    remote = _remote(f"{known['project']}/{known['id']}")
    last = -1 if remote is None else int(remote.lastHistoryStep)  # which asks the server each time
    if last < 0:
        return None
    steps = sorted(tail.times)
    expected = sum(step <= last for step in steps)
    if not tail.resumptions and _lines(remote, expected) >= expected:
        return None

    def holds(step: int) -> bool:
        rows = remote.scan_history(use_cache=False, min_step=step, max_step=step + 1)
        return any(_holds(tail, row) for row in rows)

    before = [max((step for step in steps if step <= resumed), default=0) for resumed in tail.resumptions]
    agreed = next((step for step in sorted(before, reverse=True) if step and holds(step)), 0)
    ours = [step for step in steps if step > agreed]
    for row, step in zip(remote.scan_history(use_cache=False, min_step=agreed + 1), [*ours, None], strict=False):
        if step is None or row["_step"] != step or not _holds(tail, row):
            return agreed
        agreed = step
    return None


def _holds(tail: RowTail, row: Mapping[str, Any]) -> bool:
    """Return True if a row of the server was made from these events."""
    time_s = tail.times.get(int(row["_step"]))
    return time_s is not None and abs(float(row.get("_timestamp") or 0) - time_s) < SAME_S


def _remote(path: str) -> Any:
    """Return the run at `path` as the server has it now, None if it has no such run."""
    import wandb

    try:
        return wandb.Api(timeout=ANSWER_LIMIT_S).run(path)
    except (wandb.Error, ValueError) as error:
        if "ould not find run" in str(error):
            return None
        raise


def _lines(remote: Any, unknown: int) -> int:
    """Return the number of rows that the server has of a run, or `unknown` where it does not tell."""
    count = remote.historyLineCount
    return unknown if count is None else int(count)


def logged_in() -> bool:
    """Return True if this user has a key for the W&B server in use (`$WANDB_API_KEY`, or from `wandb login`).

    Another process asks the client, which starts a service and may wait for a server. Raises `WorkbenchError` if it
    gives no answer.
    """
    command = [sys.executable, "-m", "workbench.runs.tracking.wandb_tracker", "--logged-in"]
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


# A colleague's run, copied from Weights & Biases into a run directory and then read like any other run
#
# A run that Workbench recorded has experiment, plan and environment; any other W&B run has its curve and its config.

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
    is_planned = isinstance(plan, Mapping) and all(degree in plan for degree in DEGREES)
    devices = math.prod(int(plan[degree]) for degree in DEGREES) if is_planned else 1
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
