"""The process that tells Weights & Biases about one run: `python -m workbench.runs.tracking.recorder [--upload] RUN_DIR`.

It reads what the ranks append to `events.jsonl` and logs it as one W&B run, online when somebody is logged in and
offline otherwise. The training neither waits for it nor knows of it: a server that is slow, refuses or is gone delays
nothing, and since the events hold everything, `--upload` delivers later whatever is missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.rundir import FINAL_STATES, EventTail, RunDir, append_event, read_json
from workbench.runs.launching.processes import run_alive
from workbench.runs.tracking.wandb_run import (
    NICENESS,
    attachments,
    may_upload,
    own_environment,
    pending,
    recording_alone,
    sync_limit_s,
)

FLUSH_S = 1.0
"""How much of an offline file a killed recorder may lose; W&B's own default is 15."""
INIT_LIMIT_S = 60.0
CONFIRM_LIMIT_S = 15.0
"""For the server to count the last rows."""
PICTURE_LIMIT_S = 120.0
POLL_S = 0.5
_NOT_METRICS = ("type", "step", "time")


def main(directory: str, upload: bool) -> int:
    """Record a run to its end, or with `upload` what is known of it now; 0 when nothing is left to deliver."""
    run = RunDir(Path(directory))
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with _my_turn(run, sync_limit_s()) as mine:
        uploads = may_upload()
        if not mine or (upload and not (uploads and pending(run))):
            return 0
        online, trouble = _open_online(run) if uploads else (None, "")
        if online is not None:
            return 0 if _deliver(run, online, follow=not upload) else 1
        if upload:
            _say(run, "failed", trouble)
            return 1
        if trouble:
            return _write_offline_apart(run, trouble)
        return write_offline(run, _by_hand(run))


@contextlib.contextmanager
def _my_turn(run: RunDir, patience_s: float) -> Iterator[bool]:
    """The recorder of an earlier attempt may still be uploading when the run is continued."""
    deadline = time.monotonic() + patience_s
    while True:
        with recording_alone(run) as alone:
            if alone or time.monotonic() > deadline:
                yield alone
                return
        time.sleep(POLL_S)


def _open_online(run: RunDir) -> tuple[Any, str]:
    """The W&B run, or None and why not."""
    try:
        return _open(run, "online"), ""
    except Exception as error:  # the client fails in many classes: no server, refused, a broken installation
        return None, f"W&B did not answer ({_first_line(error)}); {_by_hand(run)}"


def _deliver(run: RunDir, session: Any, follow: bool) -> bool:
    """Upload; False, with a `tracking` event that says why, if the server does not have everything in the end."""
    _say(run, "syncing", session.url or "")
    give_up = _deadline(run)
    try:
        last = _pass_on(run, session, follow)
        give_up.start()
        files = _finish(run, session)
        _confirm(session, last)
    except Exception as error:
        _say(run, "failed", f"{_first_line(error)}; {_by_hand(run)}")
        return False
    finally:
        give_up.cancel()
    _say(run, "synced", session.url or "", step=last, files=files)
    return True


def write_offline(run: RunDir, message: str) -> int:
    """Record into a `.wandb` file, for which no server is asked."""
    session = _open(run, "offline")
    _say(run, "offline", message)
    _pass_on(run, session, follow=True)
    _finish(run, session)
    _keep_newest_offline_file(run)
    return 0


def _write_offline_apart(run: RunDir, trouble: str) -> int:
    """In a process of its own: this one's client still tries to reach the server, and keeps the run's id."""
    code = (
        "import pathlib, sys; from workbench.rundir import RunDir; from workbench.runs.tracking.recorder import write_offline; "
        "write_offline(RunDir(pathlib.Path(sys.argv[1])), sys.argv[2])"
    )
    command = [sys.executable, "-c", code, str(run.path), trouble]
    subprocess.run(command, stdin=subprocess.DEVNULL, env=own_environment(), check=False)
    return 1


def _finish(run: RunDir, session: Any) -> dict[str, float]:
    """End the W&B run; returns the files that were attached, with the times of their last change."""
    try:
        return _attach(run, session)
    finally:
        session.finish(exit_code=0 if _ended_well(run) else 1)


def _by_hand(run: RunDir) -> str:
    return f"`workbench sync {run.path.name}` uploads it."


def _open(run: RunDir, mode: str) -> Any:
    import wandb

    settings = wandb.Settings(
        console="off",
        silent=True,
        init_timeout=min(INIT_LIMIT_S, sync_limit_s()),
        finish_timeout=sync_limit_s(),
        finish_timeout_raises=True,
        x_transaction_log_flush_interval=FLUSH_S,
        # What describes the machine is in the config; W&B's own collection would add addresses and command lines.
        disable_git=True,
        disable_code=True,
        x_disable_meta=True,
        x_save_requirements=False,
    )
    known = read_json(run.tracker)
    return wandb.init(
        **known,
        job_type="train",
        dir=str(run.tracking),
        config=config_of(run),
        mode=mode,  # type: ignore[arg-type, unused-ignore]
        resume="allow" if mode == "online" else None,
        settings=settings,
    )


def config_of(run: RunDir) -> dict[str, Any]:
    """The run's W&B config: the experiment's fields, `plan` and `environment`; `load_run("wandb:…")` reads it back."""
    plan = (
        {key: value for key, value in read_json(run.plan).items() if key != "candidates"} if run.plan.exists() else {}
    )
    environment = read_json(run.environment)
    private = ("command", "directory", "executable")
    shown = {key: value for key, value in environment.items() if key not in private}
    return {**read_json(run.experiment), "plan": plan, "environment": shown}


def _pass_on(run: RunDir, session: Any, follow: bool) -> int:
    """Log every step once, in order, until the run has ended; returns the last step.

    A server that has the first steps of a continued run already keeps those: W&B's history only grows.
    """
    steps, first = Steps(run), int(session.step)
    while True:
        over = not follow or not run_alive(run)
        for row in steps.read():
            if row["step"] >= first:
                metrics = {key: value for key, value in row.items() if key not in _NOT_METRICS and value is not None}
                session.log({**metrics, "_timestamp": row["time"]}, step=row["step"], commit=True)
        if over or steps.ended:
            return steps.last
        time.sleep(POLL_S)


class Steps:
    """The logged steps of a run as they arrive, each once: a resumption replaces those after its checkpoint."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._tail = EventTail(run.events)
        self._caught_up = False
        self.last = 0
        self.ended = False

    def read(self) -> list[dict[str, Any]]:
        """Step events since the last call; the first call folds earlier attempts into one sequence."""
        rows: list[dict[str, Any]] = []
        for event in self._tail.read():
            if event["type"] == "status":
                self.ended = event["state"] in FINAL_STATES
                if event["state"] == "queued" and not self._caught_up:
                    rows = _up_to(rows, _start_step(self._run))
            elif event["type"] == "start":
                rows = _up_to(rows, _step_of(event.get("resumed_from"))) if not self._caught_up else rows
            elif event["type"] == "step":
                rows = [*_up_to(rows, event["step"] - 1), event] if rows and event["step"] <= rows[-1]["step"] else rows
                if not rows or event["step"] > rows[-1]["step"]:
                    rows.append(event)
        self._caught_up = True
        rows = [row for row in rows if row["step"] > self.last]
        self.last = rows[-1]["step"] if rows else self.last
        return rows


def _up_to(rows: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["step"] <= step]


def _start_step(run: RunDir) -> int:
    return int(read_json(run.resume)["step"]) if run.resume.exists() else sys.maxsize


def _step_of(resumed_from: Any) -> int:
    return int(resumed_from.rpartition("step-")[2]) if isinstance(resumed_from, str) else int(resumed_from or 0)


def _attach(run: RunDir, session: Any) -> dict[str, float]:
    """The plan, its pictures and the executed notebook, as artifacts."""
    import wandb

    _draw_plan(run)
    files = attachments(run)
    changed = {name: path.stat().st_mtime for name, path in files.items()}
    for kind, names in (("plan", ("plan.json", "partition.html")), ("notebook", ("notebook.ipynb",))):
        present = {name: files[name] for name in names if name in files}
        if present:
            artifact = wandb.Artifact(f"{kind}-{session.id}", type=kind)
            for name, path in present.items():
                artifact.add_file(str(path), name=name)
            session.log_artifact(artifact)
    return changed


def _draw_plan(run: RunDir) -> None:
    """By the command line, in a process of its own: drawing belongs to rooms above this one."""
    if not run.plan.exists():
        return
    if run.plan_page.exists() and run.plan_page.stat().st_mtime >= run.plan.stat().st_mtime:
        return
    command = [sys.executable, "-m", "workbench.cli", "show", str(run.path), "--to", str(run.plan_page)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=PICTURE_LIMIT_S, check=False)


def _confirm(session: Any, last: int) -> None:
    """Ask the server for the last step: the client gives up on a refused row without an error."""
    import wandb

    path = f"{session.entity}/{session.project}/{session.id}"
    deadline = time.monotonic() + min(CONFIRM_LIMIT_S, sync_limit_s())
    while (found := int(wandb.Api(timeout=30).run(path).lastHistoryStep)) < last:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server has {max(found, 0)} of {last} steps")
        time.sleep(POLL_S)


def _ended_well(run: RunDir) -> bool:
    states = [event["state"] for event in EventTail(run.events).read() if event["type"] == "status"]
    return bool(states) and states[-1] in ("finished", "stopped")


def _keep_newest_offline_file(run: RunDir) -> None:
    """It holds every step of the run; an older one would upload the replaced steps of an earlier attempt."""
    folders = sorted(run.tracking.glob("wandb/offline-run-*"))
    for folder in folders[:-1]:
        shutil.rmtree(folder, ignore_errors=True)


def _deadline(run: RunDir) -> threading.Timer:
    """Ends this process, and with it W&B's service, when an upload goes on long after the run has ended."""

    def give_up() -> None:
        _say(run, "failed", f"W&B took too long; {_by_hand(run)}")
        os._exit(1)

    timer = threading.Timer(2 * sync_limit_s(), give_up)
    timer.daemon = True
    return timer


def _say(run: RunDir, state: str, message: str, **facts: Any) -> None:
    append_event(run.events, "tracking", state=state, message=message, **facts)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


if __name__ == "__main__":
    exit_code = main(sys.argv[-1], upload="--upload" in sys.argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # everything is delivered or given up; the client's own exit would go on trying
