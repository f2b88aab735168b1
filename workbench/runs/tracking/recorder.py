"""The process that reports one run to Weights & Biases.

Started as `python -m workbench.runs.tracking.recorder [--upload] RUN_DIR`, it reads what the ranks append to
`events.jsonl` and logs it as one W&B run, online when somebody is logged in and offline otherwise. The training neither
waits for it nor knows of it: a server that is slow, refuses or is gone delays nothing, and since the events hold
everything, `--upload` delivers later whatever is missing.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.base.errors import first_line
from workbench.record.columns import wandb_name
from workbench.record.event_log import LogTail, read_state, resumed_step
from workbench.record.events import EvaluationEvent, SamplesEvent, StepEvent
from workbench.record.history import answer
from workbench.record.rundir import (
    FINAL_STATES,
    RunDir,
    append_event,
    read_json,
    read_record,
    write_json,
)
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
"""Seconds of an offline file that a killed recorder may lose; W&B's own default is 15."""
INIT_LIMIT_S = 60.0
CONFIRM_LIMIT_S = 15.0
"""Seconds that the server has to count the last rows."""
ANSWER_LIMIT_S = 30
SAME_S = 1e-3
"""Difference, in seconds, up to which the time of a row on the server is that of an event."""
SHOWN_STEPS = 5
"""Number of missing steps that a message lists."""
PICTURE_LIMIT_S = 120.0
POLL_S = 0.5
LARGEST_EXPONENT = 700.0
"""Loss from which the perplexity exceeds the largest float64."""
_NOT_METRICS = ("type", "step", "time", "scalars")


def main(directory: str, upload: bool) -> int:
    """Record a run to its end, or with `upload` what is known of it now; return 0 when nothing is left to deliver."""
    run = RunDir(Path(directory))
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with _wait_for_lock(run, sync_limit_s()) as locked:
        uploads = may_upload()
        if not locked or (upload and not (uploads and pending(run))):
            return 0
        problem = ""
        if uploads:
            tail = RowTail(run)
            try:
                session, how = _open_online(run, tail)
            except Exception as error:  # the client fails in many classes: no server, refused, a broken installation
                problem = f"W&B did not answer ({first_line(error)}); {_remedy(run)}"
            else:
                return 0 if _deliver(run, session, how, tail, follow=not upload) else 1
        if upload:
            _report(run, "failed", problem)
            return 1
        return _write_offline_elsewhere(run, problem) if problem else write_offline(run, _remedy(run))


@contextlib.contextmanager
def _wait_for_lock(run: RunDir, patience_s: float) -> Iterator[bool]:
    """Hold the run's W&B lock, which the recorder of an earlier attempt may still hold; yield True if it is held."""
    deadline = time.monotonic() + patience_s
    while True:
        with recording_alone(run) as alone:
            if alone or time.monotonic() > deadline:
                yield alone
                return
        time.sleep(POLL_S)


def _deliver(run: RunDir, session: Any, how: str, tail: RowTail, follow: bool) -> bool:
    """Upload; return False, after a `tracking` event with the reason, if the server lacks something in the end.

    `how` says what became of rows that no longer hold, for the reports.
    """
    give_up = _deadline(run)
    try:
        while True:
            _report(run, "syncing", _words(session, how))
            if not _log_rows(run, session, tail, follow):
                break
            session.finish()
            tail = RowTail(run)
            session, how = _open_online(run, tail)
        give_up.start()
        files = _finish(run, session)
        _confirm(f"{session.entity}/{session.project}/{session.id}", tail)
    except Exception as error:
        _report(run, "failed", f"{first_line(error)}; {_remedy(run)}")
        return False
    finally:
        give_up.cancel()
    _report(run, "synced", _words(session, how), step=max(tail.times, default=0), files=files)
    return True


def _words(session: Any, how: str) -> str:
    return "; ".join(filter(None, (session.url, how)))


def write_offline(run: RunDir, message: str) -> int:
    """Record into a `.wandb` file, without asking a server."""
    is_outdated = True
    while is_outdated:
        tail = RowTail(run)
        session = _open(run, "offline", read_json(run.tracker))
        _report(run, "offline", message)
        is_outdated = _log_rows(run, session, tail, follow=True)
        _finish(run, session)
        # The newest file holds every step; an older one would upload the replaced steps of an earlier attempt.
        for folder in sorted(run.tracking.glob("wandb/offline-run-*"))[:-1]:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def _write_offline_elsewhere(run: RunDir, problem: str) -> int:
    """Record offline in another process: this one's client still tries to reach the server, and holds the run's id."""
    code = (
        "import pathlib, sys; from workbench.record.rundir import RunDir; "
        "from workbench.runs.tracking.recorder import write_offline; "
        "write_offline(RunDir(pathlib.Path(sys.argv[1])), sys.argv[2])"
    )
    command = [sys.executable, "-c", code, str(run.path), problem]
    subprocess.run(command, stdin=subprocess.DEVNULL, env=own_environment(), check=False)
    return 1


def _finish(run: RunDir, session: Any) -> dict[str, float]:
    """End the W&B run; return the attached files with the times of their last change."""
    use = read_state(run.events).data_use
    for part in use["parts"] if use else ():
        session.summary.update({f"data/{part['name']}/{name}": part[name] for name in ("tokens", "epochs")})
    try:
        return _attach(run, session)
    finally:
        status = read_state(run.events).status
        session.finish(exit_code=0 if status is not None and status.state in ("finished", "stopped") else 1)


def _remedy(run: RunDir) -> str:
    return f"`workbench sync {run.path.name}` uploads it."


def _open_online(run: RunDir, tail: RowTail) -> tuple[Any, str]:
    """Open the run on the server for the rows of `tail`, and say what became of rows there that no longer hold.

    A run that went on from an earlier step is rewound to it where the server can do so. Otherwise it goes on as a run
    of its own in the same group, which gets every step: W&B's history only grows, so the old run keeps the old rows.
    """
    import wandb

    known = read_json(run.tracker)
    was_online = any(event["state"] == "syncing" for event in read_state(run.events).tracking)
    agreed = _agreed_step(known, tail) if was_online else None
    if agreed is None:
        return _open(run, "online", known, resume="allow"), ""
    try:
        session = _open(run, "online", known, resume_from=f"{known['id']}?_step={agreed}")
    except wandb.Error as error:
        why = f"W&B could not rewind run {known['id']} to step {agreed:,} ({first_line(error)})"
    else:
        return session, f"rewound to step {agreed:,}"
    new = {**known, "id": uuid.uuid4().hex[:8], "name": f"{run.path.name} from step {agreed:,}", "notes": f"{why}."}
    session = _open(run, "online", new, resume="allow")
    write_json(run.tracker, new)
    return session, f"a run of its own, because {why}"


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
        return any(tail.holds(row) for row in rows)

    before = [max((step for step in steps if step <= resumed), default=0) for resumed in tail.resumptions]
    agreed = next((step for step in sorted(before, reverse=True) if step and holds(step)), 0)
    ours = [step for step in steps if step > agreed]
    for row, step in zip(remote.scan_history(use_cache=False, min_step=agreed + 1), [*ours, None], strict=False):
        if step is None or row["_step"] != step or not tail.holds(row):
            return agreed
        agreed = step
    return None


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


def _open(run: RunDir, mode: str, known: Mapping[str, Any], **branch: Any) -> Any:
    """Start the client on the run with the settings `known`; `branch` says how it continues what the server has."""
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
    return wandb.init(
        **known,
        job_type="train",
        dir=str(run.tracking),
        config=config_of(run),
        mode=mode,  # type: ignore[arg-type, unused-ignore]
        settings=settings,
        **branch,
    )


def config_of(run: RunDir) -> dict[str, Any]:
    """Return the run's W&B config: the experiment's fields, `plan` and `environment`.

    `load_run("wandb:...")` reads it back.
    """
    plan = read_json(run.plan) if run.plan.exists() else {}
    plan.pop("candidates", None)
    environment = read_record(run.environment)
    private = ("command", "directory", "executable")
    shown = {key: value for key, value in environment.items() if key not in private}
    return {**read_record(run.experiment), "plan": plan, "environment": shown}


def _log_rows(run: RunDir, session: Any, tail: RowTail, follow: bool) -> bool:
    """Log every row once, in order, until the run has ended; return True if rows that were logged no longer hold.

    Rows that the server has stay there. W&B closes a row when the next one begins, so that what a step is evaluated to
    still enters the row of that step.
    """
    first = int(session.step)
    events = tail.backlog
    while True:
        over = not follow or not run_alive(run)
        for step, event in events:
            if step >= first:
                session.log(_metrics(event, session, opens=event["time"] == tail.times[step]), step=step)
        if tail.is_outdated or over or tail.ended:
            return tail.is_outdated
        time.sleep(POLL_S)
        events = tail.read()


def _metrics(event: RowEvent, session: Any, opens: bool) -> dict[str, Any]:
    """Return what an event adds to its row on W&B; the event that opens the row gives it its time."""
    if event["type"] == "step":
        figures = {**event, **(event.get("scalars") or {})}
        figures = {key: value for key, value in figures.items() if key not in _NOT_METRICS and value is not None}
        metrics: dict[str, Any] = {wandb_name(key): value for key, value in figures.items()}
    elif event["type"] == "evaluation":
        metrics = _evaluation_metrics(event, session)
    else:
        metrics = samples_table([event])
    return {**metrics, "_timestamp": event["time"]} if opens else metrics


def _evaluation_metrics(evaluation: EvaluationEvent, session: Any) -> dict[str, float]:
    """Return the metrics of an evaluation, whose x axis is the step that was evaluated."""
    session.define_metric("eval/*", step_metric="eval/step")
    loss = evaluation["loss"]
    perplexity = math.exp(loss) if loss < LARGEST_EXPONENT else math.inf
    own = {f"eval/{name}": value for name, value in evaluation.get("metrics", {}).items() if value is not None}
    return {"eval/loss": loss, "eval/perplexity": perplexity, "eval/step": evaluation["step"], **own}


def samples_table(written: Sequence[SamplesEvent]) -> dict[str, Any]:
    """Return a W&B table of samples of text under the key `samples`; nothing without samples."""
    import wandb

    rows = [[event["step"], sample["prompt"], answer(sample)] for event in written for sample in event["samples"]]
    return {"samples": wandb.Table(columns=["step", "prompt", "what the model wrote"], data=rows)} if rows else {}


RowEvent = StepEvent | EvaluationEvent | SamplesEvent


class RowTail:
    """A reader of the events that become rows on W&B, as they arrive: each once, in the order of their rows.

    What has arrived when it is made is `backlog`, in which the attempts so far are folded into one sequence: a
    resumption replaces what came after its checkpoint. A resumption that replaces rows which were returned before makes
    the reader outdated: nothing more comes from it, and a new one folds anew.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._tail = LogTail(run.events)
        self._waiting: list[tuple[int, RowEvent]] = []
        self._started_at: set[float] = set()
        self._last, self._returned = -1, -1  # steps of the last row so far, and of the last one that was returned
        self._last_step = -1  # that of the last `step` event
        self.times: dict[int, float] = {}
        """Time of each row so far, by its step."""
        self.resumptions: set[int] = set()
        """Steps from which the training went on although later ones had been logged."""
        self.ended = self.is_outdated = False
        self.backlog = self.read()

    def read(self) -> list[tuple[int, RowEvent]]:
        """Return what has arrived since the last call, each with the step of its row."""
        for event in self._tail.read():
            if event["type"] == "status":
                self.ended = event["state"] in FINAL_STATES
                if event["state"] == "queued" and self._run.resume.exists():
                    self._go_back(int(read_json(self._run.resume)["step"]))
            elif event["type"] == "start":
                if event["time"] not in self._started_at:  # else the line stands in the file twice
                    self._started_at.add(event["time"])
                    self._go_back(resumed_step(event.get("resumed_from")))
            elif event["type"] == "step":
                if event["step"] <= self._last_step:  # repeated without a `start`
                    self._go_back(event["step"] - 1)
                self._last_step = event["step"]
                self._add(event["step"], event)
            elif event["type"] == "evaluation" or event["type"] == "samples":
                self._add(max(event["step"], self._last), event)
        if self.is_outdated:
            return []
        rows, self._waiting = self._waiting, []
        self._returned = self._last
        return rows

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Return True if a row of the server was made from these events."""
        time_s = self.times.get(int(row["_step"]))
        return time_s is not None and abs(float(row.get("_timestamp") or 0) - time_s) < SAME_S

    def _add(self, step: int, event: RowEvent) -> None:
        self.times.setdefault(step, event["time"])
        self._last = max(self._last, step)
        self._waiting.append((step, event))

    def _go_back(self, step: int) -> None:
        if step >= self._last:
            return
        self.resumptions.add(step)
        self.times = {known: time_s for known, time_s in self.times.items() if known <= step}
        self._waiting = [row for row in self._waiting if row[0] <= step]
        self._last, self._last_step = max(self.times, default=-1), min(self._last_step, step)
        self.is_outdated |= step < self._returned


def _attach(run: RunDir, session: Any) -> dict[str, float]:
    """Attach the plan, its pictures and the executed notebook as artifacts; return the times of their last change."""
    import wandb

    _draw_plan(run)
    files = attachments(run)
    changed = {name: path.stat().st_mtime for name, path in files.items()}
    for artifact_type, names in (("plan", ("plan.json", "partition.html")), ("notebook", ("notebook.ipynb",))):
        present = {name: files[name] for name in names if name in files}
        if present:
            artifact = wandb.Artifact(f"{artifact_type}-{session.id}", type=artifact_type)
            for name, path in present.items():
                artifact.add_file(str(path), name=name)
            session.log_artifact(artifact)
    return changed


def _draw_plan(run: RunDir) -> None:
    """Draw the plan's pictures with the command line, because this room does not import the figures."""
    if not run.plan.exists():
        return
    if run.plan_page.exists() and run.plan_page.stat().st_mtime >= run.plan.stat().st_mtime:
        return
    command = [sys.executable, "-m", "workbench.cli", "show", str(run.path), "--static", "--to", str(run.plan_page)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=PICTURE_LIMIT_S, check=False)


def _confirm(path: str, tail: RowTail) -> None:
    """Raise unless the server has every row: the client gives up on a refused one, and drops others, without an error.

    The message names the steps that are missing.
    """
    last, count = max(tail.times, default=0), len(tail.times)
    deadline = time.monotonic() + min(CONFIRM_LIMIT_S, sync_limit_s())
    while True:
        remote = _remote(path)
        if remote is not None and int(remote.lastHistoryStep) >= last and _lines(remote, count) >= count:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    rows = remote.scan_history(use_cache=False) if remote is not None and int(remote.lastHistoryStep) >= 0 else ()
    missing = sorted(set(tail.times) - {int(row["_step"]) for row in rows})
    shown = ", ".join(f"{step:,}" for step in missing[:SHOWN_STEPS])
    more = f" and {len(missing) - SHOWN_STEPS:,} more" if len(missing) > SHOWN_STEPS else ""
    raise RuntimeError(f"the server has {count - len(missing):,} of {count:,} steps; it dropped {shown}{more}")


def _deadline(run: RunDir) -> threading.Timer:
    """Return a timer that ends this process, and with it W&B's service, when an upload takes too long."""

    def give_up() -> None:
        _report(run, "failed", f"W&B took too long; {_remedy(run)}")
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
