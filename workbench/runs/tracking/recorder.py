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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from workbench.columns import wandb_name
from workbench.errors import first_line
from workbench.events import EvaluationEvent, SamplesEvent, StepEvent
from workbench.rundir import FINAL_STATES, EventTail, RunDir, append_event, read_events, read_json, read_record
from workbench.runs.launching.processes import run_alive
from workbench.runs.records.history import resumed_step
from workbench.runs.records.text_samples import answer
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
PICTURE_LIMIT_S = 120.0
POLL_S = 0.5
LARGEST_EXPONENT = 700.0
"""Loss from which the perplexity exceeds the largest float64."""
_NOT_METRICS = ("type", "step", "time")


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
            try:
                session = _open(run, "online")
            except Exception as error:  # the client fails in many classes: no server, refused, a broken installation
                problem = f"W&B did not answer ({first_line(error)}); {_remedy(run)}"
            else:
                return 0 if _deliver(run, session, follow=not upload) else 1
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


def _deliver(run: RunDir, session: Any, follow: bool) -> bool:
    """Upload; return False, after a `tracking` event with the reason, if the server lacks something in the end."""
    _report(run, "syncing", session.url or "")
    give_up = _deadline(run)
    try:
        last = _log_steps(run, session, follow)
        give_up.start()
        files = _finish(run, session)
        _confirm(session, last)
    except Exception as error:
        _report(run, "failed", f"{first_line(error)}; {_remedy(run)}")
        return False
    finally:
        give_up.cancel()
    _report(run, "synced", session.url or "", step=last, files=files)
    return True


def write_offline(run: RunDir, message: str) -> int:
    """Record into a `.wandb` file, without asking a server."""
    session = _open(run, "offline")
    _report(run, "offline", message)
    _log_steps(run, session, follow=True)
    _finish(run, session)
    # The newest file holds every step; an older one would upload the replaced steps of an earlier attempt.
    for folder in sorted(run.tracking.glob("wandb/offline-run-*"))[:-1]:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _write_offline_elsewhere(run: RunDir, problem: str) -> int:
    """Record offline in another process: this one's client still tries to reach the server, and holds the run's id."""
    code = (
        "import pathlib, sys; from workbench.rundir import RunDir; "
        "from workbench.runs.tracking.recorder import write_offline; "
        "write_offline(RunDir(pathlib.Path(sys.argv[1])), sys.argv[2])"
    )
    command = [sys.executable, "-c", code, str(run.path), problem]
    subprocess.run(command, stdin=subprocess.DEVNULL, env=own_environment(), check=False)
    return 1


def _finish(run: RunDir, session: Any) -> dict[str, float]:
    """End the W&B run; return the attached files with the times of their last change."""
    try:
        return _attach(run, session)
    finally:
        states = [event["state"] for event in read_events(run.events) if event["type"] == "status"]
        session.finish(exit_code=0 if states[-1:] in (["finished"], ["stopped"]) else 1)


def _remedy(run: RunDir) -> str:
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
        # The config describes the machine; W&B's own collection would add addresses and command lines.
        disable_git=True,
        disable_code=True,
        x_disable_meta=True,
        x_save_requirements=False,
    )
    return wandb.init(
        **read_json(run.tracker),
        job_type="train",
        dir=str(run.tracking),
        config=config_of(run),
        mode=mode,  # type: ignore[arg-type, unused-ignore]
        resume="allow" if mode == "online" else None,
        settings=settings,
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


def _log_steps(run: RunDir, session: Any, follow: bool) -> int:
    """Log every step once, in order, until the run has ended; return the last step.

    Steps of a continued run that the server already has stay there: W&B's history only grows.
    """
    steps, first = StepTail(run), int(session.step)
    while True:
        over = not follow or not run_alive(run)
        for row in steps.read():
            held_out, written = steps.unreported_before(row["step"])
            if row["step"] >= first:
                figures = {key: value for key, value in row.items() if key not in _NOT_METRICS and value is not None}
                metrics = {wandb_name(key): value for key, value in figures.items()}
                metrics |= _evaluation_metrics(held_out, session) | samples_table(written)
                session.log({**metrics, "_timestamp": row["time"]}, step=row["step"], commit=True)
        if over or steps.ended:
            held_out, written = steps.unreported_before(steps.last + 1)
            if (held_out or written) and steps.last + 1 >= first:
                last = _evaluation_metrics(held_out, session) | samples_table(written)
                session.log(last, step=steps.last + 1, commit=True)
            return steps.last
        time.sleep(POLL_S)


def _evaluation_metrics(evaluations: Sequence[EvaluationEvent], session: Any) -> dict[str, float]:
    """Return the metrics of the last of some evaluations, whose x axis is the step that was evaluated.

    W&B's rows only grow, and the row of that step was sent before it was evaluated: the next row takes them.
    """
    if not evaluations:
        return {}
    session.define_metric("eval/*", step_metric="eval/step")
    loss = evaluations[-1]["loss"]
    perplexity = math.exp(loss) if loss < LARGEST_EXPONENT else math.inf
    own = {f"eval/{name}": value for name, value in evaluations[-1].get("metrics", {}).items() if value is not None}
    return {"eval/loss": loss, "eval/perplexity": perplexity, "eval/step": evaluations[-1]["step"], **own}


def samples_table(written: Sequence[SamplesEvent]) -> dict[str, Any]:
    """Return a W&B table of samples of text under the key `samples`; nothing without samples."""
    import wandb

    rows = [[event["step"], sample["prompt"], answer(sample)] for event in written for sample in event["samples"]]
    return {"samples": wandb.Table(columns=["step", "prompt", "what the model wrote"], data=rows)} if rows else {}


class StepTail:
    """A reader of the logged steps as they arrive, each once: a resumption replaces those after its checkpoint."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._tail = EventTail(run.events)
        self._caught_up = False
        self._evaluations: dict[int, EvaluationEvent] = {}
        self._samples: dict[int, SamplesEvent] = {}
        self.last = 0
        self.ended = False

    def read(self) -> list[StepEvent]:
        """Return the step events since the last call; the first call folds earlier attempts into one sequence."""
        rows: list[StepEvent] = []
        for event in self._tail.read():
            if event["type"] == "status":
                self.ended = event["state"] in FINAL_STATES
                if event["state"] == "queued" and not self._caught_up and self._run.resume.exists():
                    rows = _up_to(rows, int(read_json(self._run.resume)["step"]))
            elif event["type"] == "start":
                rows = _up_to(rows, resumed_step(event.get("resumed_from"))) if not self._caught_up else rows
            elif event["type"] == "step":
                if rows and event["step"] <= rows[-1]["step"]:
                    rows = _up_to(rows, event["step"] - 1)
                rows.append(event)
            elif event["type"] == "evaluation":
                self._evaluations[event["step"]] = event
            elif event["type"] == "samples":
                self._samples[event["step"]] = event
        self._caught_up = True
        rows = [row for row in rows if row["step"] > self.last]
        self.last = rows[-1]["step"] if rows else self.last
        return rows

    def unreported_before(self, step: int) -> tuple[list[EvaluationEvent], list[SamplesEvent]]:
        """Return the evaluations and the samples of text of earlier steps that no call has returned yet, in order."""
        evaluations = [self._evaluations.pop(number) for number in sorted(self._evaluations) if number < step]
        return evaluations, [self._samples.pop(number) for number in sorted(self._samples) if number < step]


def _up_to(rows: list[StepEvent], step: int) -> list[StepEvent]:
    return [row for row in rows if row["step"] <= step]


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


def _confirm(session: Any, last: int) -> None:
    """Raise unless the server has the last step: the client gives up on a refused row without an error."""
    import wandb

    path = f"{session.entity}/{session.project}/{session.id}"
    deadline = time.monotonic() + min(CONFIRM_LIMIT_S, sync_limit_s())
    while (delivered := int(wandb.Api(timeout=30).run(path).lastHistoryStep)) < last:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server has {max(delivered, 0)} of {last} steps")
        time.sleep(POLL_S)


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
