"""The process that reports one run to the tracker that its experiment names.

Started as `python -m workbench.runs.tracking.recorder [--upload] RUN_DIR`, it reads what the ranks append to
`events.jsonl` and logs it as one run there. The training neither waits for it nor knows of it: a server that is slow,
refuses or is gone delays nothing, and since the events hold everything, `--upload` delivers later whatever is missing.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workbench.base import COMMANDS
from workbench.base.errors import first_line
from workbench.record.event_log import read_state
from workbench.record.rundir import RunDir, append_event, read_json, read_record
from workbench.runs.launching.processes import run_alive
from workbench.runs.tracking.delivery import (
    NICENESS,
    attachments,
    own_environment,
    pending,
    recording_alone,
    sync_limit_s,
)
from workbench.runs.tracking.rows import RowTail
from workbench.runs.tracking.tracker import Opened, Tracker, tracker_of

PICTURE_LIMIT_S = 120.0
POLL_S = 0.5


def main(directory: str, upload: bool) -> int:
    """Record a run to its end, or with `upload` what is known of it now; return 0 when nothing is left to deliver."""
    run, environment = RunDir(Path(directory)), own_environment()  # of which a tracker may change its own variables
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with _wait_for_lock(run, sync_limit_s()) as locked:
        tracker = tracker_of(run)
        obstacle = tracker.obstacle()
        if not locked or (upload and (obstacle or not pending(run))):
            return 0
        problem = ""
        if not obstacle:
            tail = RowTail(run)
            try:
                opened = tracker.open(tail, config_of(run), offline=False)
            except Exception as error:  # a client fails in many classes: no server, refused, a broken installation
                problem = f"{tracker.title} did not answer ({first_line(error)}); {_remedy(run)}"
            else:
                return 0 if _deliver(run, tracker, opened, tail, follow=not upload) else 1
        if upload:
            _report(run, "failed", problem)
            return 1
        if problem:
            return _write_offline_elsewhere(run, problem, environment)
        return write_offline(run, f"{obstacle} {_remedy(run)}")


@contextlib.contextmanager
def _wait_for_lock(run: RunDir, patience_s: float) -> Iterator[bool]:
    """Hold the run's lock, which the recorder of an earlier attempt may still hold; yield True if it is held."""
    deadline = time.monotonic() + patience_s
    while True:
        with recording_alone(run) as alone:
            if alone or time.monotonic() > deadline:
                yield alone
                return
        time.sleep(POLL_S)


def _deliver(run: RunDir, tracker: Tracker, opened: Opened, tail: RowTail, follow: bool) -> bool:
    """Upload; return False, after a `tracking` event with the reason, if the server lacks something in the end."""
    give_up = _deadline(run, tracker)
    try:
        while True:
            _report(run, "syncing", opened.words)
            if not _log_rows(run, tracker, tail, opened.held, follow):
                break
            tail = RowTail(run)
            opened = tracker.open(tail, config_of(run), offline=False)
        give_up.start()
        files = _finish(run, tracker, tail)
    except Exception as error:
        _report(run, "failed", f"{first_line(error)}; {_remedy(run)}")
        return False
    finally:
        give_up.cancel()
    to = tracker.destination()
    _report(run, "synced", opened.words, step=max(tail.times, default=0), files=files, **({"to": to} if to else {}))
    return True


def write_offline(run: RunDir, message: str) -> int:
    """Record without asking a server: into a `.wandb` file, or into Trackio's database on this machine."""
    tracker = tracker_of(run)
    is_outdated = True
    try:
        while is_outdated:
            tail = RowTail(run)
            opened = tracker.open(tail, config_of(run), offline=True)
            _report(run, "offline", "; ".join(filter(None, (opened.words, message))))
            is_outdated = _log_rows(run, tracker, tail, opened.held, follow=True)
        _finish(run, tracker, tail)
    except Exception as error:
        _report(run, "failed", f"{first_line(error)}; {_remedy(run)}")
        return 1
    return 0


def _write_offline_elsewhere(run: RunDir, problem: str, environment: Mapping[str, str]) -> int:
    """Record offline in another process: this one's client still tries to reach the server, and holds the run's id."""
    code = (
        "import pathlib, sys; from workbench.record.rundir import RunDir; "
        "from workbench.runs.tracking.recorder import write_offline; "
        "write_offline(RunDir(pathlib.Path(sys.argv[1])), sys.argv[2])"
    )
    command = [sys.executable, "-c", code, str(run.path), problem]
    subprocess.run(command, stdin=subprocess.DEVNULL, env=environment, check=False)
    return 1


def _finish(run: RunDir, tracker: Tracker, tail: RowTail) -> dict[str, float]:
    """End the run at its tracker; return the attached files with the times of their last change."""
    _draw_plan(run)
    files = attachments(run)
    changed = {name: path.stat().st_mtime for name, path in files.items()}
    artifacts = {"plan": ("plan.json", "partition.html"), "notebook": ("notebook.ipynb",)}
    present = {kind: {name: files[name] for name in names if name in files} for kind, names in artifacts.items()}
    state = read_state(run.events)
    parts = state.data_use["parts"] if state.data_use else ()
    facts = {
        f"data/{part['name']}/{name}": value
        for part in parts
        for name, value in (("tokens", part["tokens"]), ("epochs", part["epochs"]))
        if value is not None
    }
    try:
        tracker.attach({kind: named for kind, named in present.items() if named}, facts)
    finally:
        tracker.confirm(tail, state.status is not None and state.status.state in ("finished", "stopped"))
    return changed


def _remedy(run: RunDir) -> str:
    return f"`workbench sync {run.path.name}` uploads it."


def config_of(run: RunDir) -> dict[str, Any]:
    """Return the run's config at its tracker: the experiment's fields, `plan` and `environment`.

    `load_run("wandb:...")` reads it back.
    """
    plan = read_json(run.plan) if run.plan.exists() else {}
    plan.pop("candidates", None)
    environment = read_record(run.environment)
    private = ("command", "directory", "executable")
    shown = {key: value for key, value in environment.items() if key not in private}
    return {**read_record(run.experiment), "plan": plan, "environment": shown}


def _log_rows(run: RunDir, tracker: Tracker, tail: RowTail, held: int, follow: bool) -> bool:
    """Log every row once, in order, until the run has ended; return True if rows that were logged no longer hold.

    The first `held` rows stay as the server has them.
    """
    rows = tail.backlog[held:]
    while True:
        over = not follow or not run_alive(run)
        for row in rows:
            tracker.log(row)
        if tail.is_outdated or over or tail.ended:
            return tail.is_outdated
        time.sleep(POLL_S)
        rows = tail.read()


def _draw_plan(run: RunDir) -> None:
    """Draw the plan's pictures in a process, because this room stands below the figures."""
    if not run.plan.exists():
        return
    if run.plan_page.exists() and run.plan_page.stat().st_mtime >= run.plan.stat().st_mtime:
        return
    command = [sys.executable, "-m", *COMMANDS["show"], str(run.path), "--static", "--to", str(run.plan_page)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=PICTURE_LIMIT_S, check=False)


def _deadline(run: RunDir, tracker: Tracker) -> threading.Timer:
    """Return a timer that ends this process, and with it the client's service, when an upload takes too long."""

    def give_up() -> None:
        _report(run, "failed", f"{tracker.title} took too long; {_remedy(run)}")
        os._exit(1)

    timer = threading.Timer(2 * sync_limit_s(), give_up)
    timer.daemon = True
    return timer


def _report(run: RunDir, state: str, message: str, **fields: Any) -> None:
    append_event(run.events, "tracking", state=state, message=message, **fields)


if __name__ == "__main__":
    exit_code = main(sys.argv[-1], upload="--upload" in sys.argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # the client's own exit would go on trying to deliver
