"""`Run`: the handle of a training that lives in its own processes and its own directory."""

from __future__ import annotations

import contextlib
import difflib
import html
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from workbench.errors import RunFailed, RunNotFound
from workbench.rundir import FINAL_STATES, KILLED, RunDir, is_elsewhere, process_alive, read_events, read_json
from workbench.runs.launching import processes
from workbench.runs.launching.failure import log_tail, run_failed
from workbench.units import count, duration, gib

if TYPE_CHECKING:
    from workbench.planning.plan import Plan
    from workbench.runs.records.history import History, Utilization

POLL_S = 0.2
RECENT_STEPS = 20
"""Steps that the speed of a run is the median of."""
VANISHED = "The launcher vanished."
FULL = " Its disk is full, so that nobody could write why: free some, and resume it."
FULL_BYTES = 2**20
LAUNCH_LIMIT_S = 30.0
"""From a new run's first file until its supervisor is known."""
SILENCE_S = 60.0
"""Of a run on another host, after which it is taken to be gone: its supervisor samples devices every two seconds."""


@dataclass(frozen=True)
class Status:
    """Where a run stands: `state` is one of queued, starting, running, finished, stopped, failed."""

    state: str
    message: str = ""
    time: float = 0.0
    """Unix seconds of the last change."""

    @property
    def final(self) -> bool:
        return self.state in FINAL_STATES

    def __str__(self) -> str:
        return f"{self.state}: {self.message}" if self.message else self.state


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint of a run."""

    step: int
    path: Path


@dataclass(frozen=True)
class _Progress:
    """The latest event of each type, and the latest steps; `memory` by rank."""

    status: Status | None
    start: dict[str, Any]
    steps: tuple[dict[str, Any], ...]
    end: dict[str, Any] | None
    memory: dict[int, dict[str, Any]]
    troubles: tuple[str, ...] = ()
    """What went wrong with checkpoints since the last launch."""
    offset: int = 0
    """Bytes of the events that this was read from: kept with it, since several threads may read one handle."""

    @property
    def step(self) -> dict[str, Any]:
        return self.steps[-1] if self.steps else {}

    def recent(self, figure: str) -> float | None:
        """The median of a figure over the latest steps: one step may have waited for a checkpoint."""
        known = [event[figure] for event in self.steps if event.get(figure) is not None]
        return statistics.median(known) if known else None


class Run:
    """One training. Works from any kernel: everything is read from the run's directory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._dir = RunDir(Path(path).absolute())
        self._seen = _Progress(None, {}, (), None, {})

    @property
    def path(self) -> Path:
        return self._dir.path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def directory(self) -> RunDir:
        """Names of everything inside the run's directory."""
        return self._dir

    @property
    def experiment(self) -> dict[str, Any]:
        """What was asked for, as JSON: reading a run never executes anyone's code."""
        try:
            value = read_json(self._dir.experiment)
        except (OSError, ValueError) as error:
            raise RunNotFound(f"{self._dir.experiment} cannot be read: {error}.", run=str(self.path)) from None
        if not isinstance(value, dict):
            raise RunNotFound(f"{self._dir.experiment} describes no experiment.", run=str(self.path))
        return value

    @property
    def plan(self) -> Plan:
        """How it was divided, with the prediction. Raises `RunNotFound` for a W&B run that Workbench did not plan."""
        from workbench.planning.plan import Plan

        if not self._dir.plan.exists():
            raise RunNotFound(f"{self.name} was not planned by Workbench; it has a curve and a config only.")
        return Plan.from_json(read_json(self._dir.plan))

    @property
    def environment(self) -> dict[str, Any]:
        """Machine, versions and git state of the launch."""
        value: dict[str, Any] = read_json(self._dir.environment)
        return value

    @property
    def alive(self) -> bool:
        """Whether any process of the run is left: supervisor, launcher or rank."""
        return processes.run_alive(self._dir)

    @property
    def status(self) -> Status:
        """The last recorded state, corrected by which processes are really there."""
        supervised = any(map(process_alive, self._supervisor()))  # looked at before the events
        workers = bool(processes.live_workers(self._dir))
        progress = self._progress()
        recorded = progress.status or Status("queued")
        if recorded.state == "running" and progress.troubles:
            recorded = replace(recorded, message=recorded.message or progress.troubles[-1])
        if recorded.final or supervised or self._dir.remote.exists():
            return recorded
        if self._elsewhere or (not self._supervisor() and (workers or self._prepared)):
            return recorded
        if workers:
            message = "The launcher vanished, its ranks train on; stop() ends them."
            return Status("running", message, recorded.time)
        return self._status_of_the_orphaned(progress, recorded)

    def _status_of_the_orphaned(self, progress: _Progress, recorded: Status) -> Status:
        """No process is left and nobody wrote how it ended; the ranks' `end` event may still tell."""
        begun = recorded.time or _made_at(self.path)
        if not self._dir.launcher.exists() and time.time() - begun < LAUNCH_LIMIT_S:
            return recorded  # `launch` is about to start it
        if progress.end is None:
            killed = self._dir.kill_file.exists()
            message = KILLED if killed else VANISHED + (FULL if _disk_is_full(self.path) else "")
            return Status("stopped" if killed else "failed", message, recorded.time)
        steps, target = int(progress.end["steps"]), int(self.experiment.get("steps", 0))
        if steps >= target:
            return Status("finished", f"{steps} steps (the launcher had vanished).", progress.end["time"])
        return Status("stopped", f"Stopped at step {steps} of {target} (the launcher had vanished).", recorded.time)

    def stop(self, wait: bool = False) -> Run:
        """Ask the ranks to write a checkpoint and leave; with `wait`, return when they have.

        Harmless when the run has ended. Ranks that hang are ended by force after a few minutes, also when
        the launcher is gone.
        """
        ended = self.status.final
        self._ask_to_leave(self._dir.stop_file)
        return self.wait() if wait and not ended else self

    def kill(self, wait: bool = True) -> Run:
        """End the ranks at once; what was trained since the last checkpoint is lost.

        Harmless when the run has ended. Processes of another host are ended by their own supervisor, if it lives.
        """
        ended = self.status.final
        self._ask_to_leave(self._dir.kill_file)
        return self.wait() if wait and not ended else self

    def _ask_to_leave(self, request: Path) -> None:
        supervisor = self._supervisor()
        ended = self.status.final
        elsewhere = not ended and self._elsewhere
        being_launched = not ended and not self._dir.launcher.exists()  # its supervisor will look for the request
        if not (self.alive or elsewhere or being_launched):
            return
        request.touch()
        if supervisor and not elsewhere and not any(map(process_alive, supervisor)):
            self._reap()

    @property
    def _elsewhere(self) -> bool:
        """Whether what writes the run's states is on another host: its supervisor, or rank 0 where it has none."""
        return any(map(is_elsewhere, self._supervisor() or processes.rank_records(self._dir)[:1]))

    @property
    def heard_elsewhere(self) -> bool:
        """Whether another host writes to the run, as far as its events tell: its processes cannot be looked at."""
        if self.status.final or not self._elsewhere:
            return False
        with contextlib.suppress(OSError):
            return time.time() - self._dir.events.stat().st_mtime < SILENCE_S
        return False

    @property
    def _prepared(self) -> bool:
        """Whether the run waits for somebody to start it."""
        known = processes.launcher_record(self._dir) or processes.rank_records(self._dir)
        return self._dir.launcher.exists() and not known

    def _supervisor(self) -> list[dict[str, Any]]:
        supervisor = processes.launcher_record(self._dir).get("supervisor")
        return [supervisor] if supervisor else []

    def _reap(self) -> None:
        """Start what ends the ranks in the place of a supervisor that is gone."""
        from workbench.runs.launching.launcher import worker_path

        if not self._dir.kill_file.exists():
            processes.send_signal(processes.rank_records(self._dir), signal.SIGTERM)
        with self._dir.log("launcher").open("ab") as log:
            subprocess.Popen(
                [sys.executable, "-m", "workbench.runs.launching.supervisor", "--reap", str(self.path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(worker_path(self._dir))},
            )

    def wait(self, timeout: float | None = None) -> Run:
        """Block until the run has ended, or `timeout` seconds have passed; an interrupt leaves it running.

        Raises `RunFailed`, with the worker's own traceback, if it failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not (status := self.status).final:
                if deadline is not None and time.monotonic() > deadline:
                    return self
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            print(f"{self.name} trains on; stop() ends it.")
            return self
        processes.wait_left(self._dir)
        if status.state == "failed":
            raise self._failure(status)
        return self

    def error(self) -> RunFailed | None:
        """What the run died of, or None if it did not fail."""
        status = self.status
        return self._failure(status) if status.state == "failed" else None

    def _failure(self, status: Status) -> RunFailed:
        return run_failed(self._dir, status.message)

    def export(self, to: str | os.PathLike[str], step: int | None = None) -> tuple[Path, ...]:
        """Write the model as `safetensors` into the folder `to`, under its own names and tied weights once.

        From the last checkpoint, or that of `step`. A `transformers` model gets its `config.json`, so that
        `from_pretrained(to)` loads it. Nothing of the user's code is executed. Returns the files. Raises
        `CheckpointError` for a checkpoint that is missing or damaged, and for a folder that holds a model.
        """
        from workbench.execution.checkpoint.model_export import export_step

        return export_step(self._dir.checkpoints, Path(to).expanduser(), step)

    def events(self) -> list[dict[str, Any]]:
        """Every event so far; `workbench.rundir` lists their fields."""
        return read_events(self._dir.events)

    def milestones(self) -> list[dict[str, Any]]:
        """Every event so far but steps, samples of devices and `actions`: quick to read, however long the run."""
        from workbench.runs.records.history import latest

        return [event for event in latest(self._dir.events)[0] if event["type"] != "step"]

    def history(self) -> History:
        """One row a logged step, as NumPy columns."""
        from workbench.runs.records.history import read_history

        return read_history(self._dir.events)

    def utilization(self) -> Utilization:
        """How busy its devices were while it trained, as NumPy columns: one sample of one device a row."""
        from workbench.runs.records.history import HistoryTail

        tail = HistoryTail(self._dir.events)
        tail.read()
        return tail.utilization

    def logs(self, rank: int | str = 0, tail: int | None = 100) -> str:
        """The last `tail` lines (None: all) that a rank printed, or that `"launcher"` did."""
        return log_tail(self._dir, rank, tail)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The complete checkpoints, oldest first."""
        found = {}
        for event in self.milestones():
            if event["type"] == "checkpoint":
                path = self._dir.checkpoint(int(event["step"]))  # the directory may have moved since
                if path.is_dir():
                    found[int(event["step"])] = Checkpoint(int(event["step"]), path)
        return tuple(found[step] for step in sorted(found))

    def _progress(self) -> _Progress:
        """Fold the events that are new since the last call into what was seen before."""
        from workbench.runs.records.history import latest

        seen = self._seen
        events, offset = latest(self._dir.events, seen.offset)
        status, start, steps, end, memory = seen.status, seen.start, list(seen.steps), seen.end, dict(seen.memory)
        troubles = list(seen.troubles)
        for event in events:
            if event["type"] == "status":
                status = Status(event["state"], event.get("message", ""), event["time"])
                if event["state"] in ("queued", "starting"):
                    end, troubles = None, []
            elif event["type"] == "start":
                start = event
                if troubles and event.get("resumed_from"):
                    troubles[-1] += f" Training goes on from {Path(event['resumed_from']).name}."
                if status is not None and not status.final:  # the supervisor says so a moment later
                    status = Status("running", "", event["time"])
            elif event["type"] == "checkpoint_problem":
                training = status is not None and status.state == "running"
                failed = f"The checkpoint of step {event['step']} could not be written: "
                troubles.append((failed if training else "") + event["message"])
            elif event["type"] == "step":
                steps.append(event)
            elif event["type"] == "end":
                end = event
            elif event["type"] == "memory":
                memory[int(event["rank"])] = event
        self._seen = _Progress(status, start, tuple(steps[-RECENT_STEPS:]), end, memory, tuple(troubles), offset)
        return self._seen

    def summary(self) -> dict[str, Any]:
        """Where the run stands, as JSON: state, step, steps, loss, tokens_per_s, mfu, eta_s, devices, peak_bytes, …

        `eta_s` is the training time that is left at the speed of the last steps, None unless it trains. `devices`
        counts those it has or waits for; `gpus` are the indices of those it has.
        """
        status = self.status
        progress, experiment = self._seen, self.experiment
        step = progress.step
        peak = max((int(event["peak_bytes"]) for event in progress.memory.values()), default=None)
        return {
            "name": self.name,
            "path": str(self.path),
            "state": status.state,
            "message": status.message,
            "step": int(step.get("step", 0)),
            "steps": experiment.get("steps"),
            "loss": step.get("loss"),
            "tokens": step.get("tokens"),
            "tokens_per_s": progress.recent("tokens_per_s"),
            "mfu": progress.recent("mfu"),
            "eta_s": self._eta_s(status, progress, experiment.get("steps")),
            "devices": self._devices(progress),
            "gpus": self._gpus(status),
            "peak_bytes": peak,
            "time": step.get("time", status.time),
        }

    @staticmethod
    def _eta_s(status: Status, progress: _Progress, steps: int | None) -> float | None:
        step_ms = progress.recent("step_ms")
        if status.state != "running" or step_ms is None or steps is None:
            return None
        return float(max(0.0, (steps - progress.step["step"]) * step_ms / 1e3))

    def _devices(self, progress: _Progress) -> int | None:
        devices = progress.start.get("devices")
        if isinstance(devices, int):
            return devices
        if devices:
            return len(devices)
        planned = processes.launcher_record(self._dir).get("plan") or {}
        return planned.get("world")

    def _gpus(self, status: Status) -> list[int]:
        """Indices on this node of the GPUs that the run was given; none once it has ended."""
        given = () if status.final else processes.launcher_record(self._dir).get("devices", ())
        known = {gpu.get("uuid"): gpu.get("index") for gpu in self.environment.get("gpus", ())} if given else {}
        return [int(known[name]) for name in given if name in known]

    def clone(self, plan: Plan | None = None, **changes: Any) -> Run:
        """Launch this run's experiment again with some fields changed, on the same plan unless another is given.

        A model or dataset of one's own goes along as the code that the run kept, without being loaded here.
        Raises `PlanMismatch` where a change asks for another plan; `wb.clone` plans anew then.
        """
        from workbench.runs.launching.launcher import clone

        return clone(self, plan, **changes)

    def __repr__(self) -> str:
        facts = self.summary()
        parts = [facts["state"], f"step {_step_cell(facts)}", *_figures(facts)]
        message = f" ({facts['message']})" if facts["message"] and facts["state"] != "finished" else ""
        return f"Run({self.name}: {', '.join(parts)}{message})"

    def _repr_html_(self) -> str:
        from workbench.runs.tracking.wandb_run import tracking_note

        facts = self.summary()
        done = min(1.0, facts["step"] / facts["steps"]) if facts["steps"] else 0.0
        rows = [
            ("status", html.escape(f"{facts['state']}. {facts['message']}" if facts["message"] else facts["state"])),
            ("step", f"{facts['step']:,} of {facts['steps']:,} <progress value='{done:.4f}' max='1'></progress>"),
            ("now", html.escape(", ".join(_figures(facts)) or "no step yet")),
            ("directory", f"<code>{html.escape(str(self.path))}</code>"),
            *(("checkpoints", html.escape(trouble)) for trouble in self._seen.troubles),
            ("W&amp;B", html.escape(tracking_note(self._dir))),
        ]
        cells = "".join(
            f"<tr><th style='text-align:left'>{name}</th><td style='text-align:left'>{value}</td></tr>"
            for name, value in rows
        )
        return f"<table><caption style='text-align:left'><b>{html.escape(self.name)}</b></caption>{cells}</table>"


def _figures(facts: dict[str, Any]) -> list[str]:
    """`["loss 6.91", "82.1 k tokens/s", "MFU 41 %", "61.2 GiB"]`, as far as known."""
    figures = []
    if facts["loss"] is not None:
        figures.append(f"loss {facts['loss']:.4g}")
    if facts["tokens_per_s"]:
        figures.append(f"{count(facts['tokens_per_s'])} tokens/s")
    if facts["mfu"]:
        figures.append(f"MFU {facts['mfu']:.0%}")
    if facts["peak_bytes"]:
        figures.append(f"{gib(facts['peak_bytes'])} at most on a device")
    return figures


def runs_root() -> Path:
    """Where runs go by default: `$WORKBENCH_RUNS`, or `runs` in the current directory."""
    return Path(os.environ.get("WORKBENCH_RUNS") or "runs").expanduser().absolute()


def load_run(path: str | os.PathLike[str]) -> Run:
    """The run in a directory, of that name among the runs here (or the only one whose name begins so), or at
    `wandb:entity/project/id`.

    Executes nothing that it finds there. Raises `RunNotFound`, with near matches.
    """
    if isinstance(path, str) and path.startswith("wandb:"):
        from workbench.runs.tracking.remote import load_remote

        return load_remote(path)
    for candidate in (Path(path).expanduser(), runs_root() / path):
        if _is_run(candidate):
            return Run(candidate)
    parent = Path(path).expanduser().absolute().parent
    wanted = Path(path).name
    begun = runs_root() if str(path) == wanted else parent
    close = sorted(p.name for p in _run_directories(begun) if wanted and p.name.startswith(wanted))
    if len(close) == 1:
        return Run(begun / close[0])
    names = sorted({p.name for root in (runs_root(), parent) for p in _run_directories(root)})
    close = close[-3:] or difflib.get_close_matches(wanted, names, n=3, cutoff=0.4)
    if close:
        hint = f"Did you mean {' or '.join(repr(name) for name in close)}?"
    elif names:
        hint = f"There are {', '.join(names[-5:])}."
    else:
        hint = f"There are no runs in {runs_root()} yet; set WORKBENCH_RUNS if they are elsewhere."
    raise RunNotFound(f"There is no run {str(path)!r}. {hint}", run=str(path), near=close)


def _run_directories(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return [path for path in root.iterdir() if _is_run(path)]


def _is_run(path: Path) -> bool:
    try:
        return RunDir(path).experiment.is_file()
    except OSError:  # a folder that is not for us to look into
        return False


def _disk_is_full(path: Path) -> bool:
    try:
        return shutil.disk_usage(path).free < FULL_BYTES
    except OSError:
        return False


def _made_at(path: Path) -> float:
    """Unix seconds at which the run was described, 0 for one that has gone; what is being launched may lack a file."""
    for file in (RunDir(path).environment, RunDir(path).experiment):
        with contextlib.suppress(OSError):
            return file.stat().st_mtime
    return 0.0


@dataclass(frozen=True)
class RunTable:
    """The runs of one folder, newest first; iterate, index by position, slice or name, or just show it."""

    root: Path
    runs: tuple[Run, ...]

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Any:
        return iter(self.runs)

    @overload
    def __getitem__(self, key: int | str) -> Run: ...

    @overload
    def __getitem__(self, key: slice) -> list[Run]: ...

    def __getitem__(self, key: int | str | slice) -> Run | list[Run]:
        if isinstance(key, slice):
            return list(self.runs[key])
        return self.runs[key] if isinstance(key, int) else load_run(self.root / key)

    def rows(self) -> list[dict[str, Any]]:
        """`Run.summary()` of each, or of one that cannot be read, that it has failed and why."""
        return [summary_or_why_not(run) for run in self.runs]

    def cells(self) -> list[tuple[str, ...]]:
        """`HEADER`'s columns of each run, for people."""
        return [_cells(row) for row in self.rows()]

    def __repr__(self) -> str:
        if not self.runs:
            return f"No runs in {self.root}."
        table = [HEADER, *self.cells()]
        widths = [max(len(row[i]) for row in table) for i in range(len(HEADER))]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table
        )

    def _repr_html_(self) -> str:
        def line(tag: str, cells: tuple[str, ...]) -> str:
            return "<tr>" + "".join(f"<{tag} style='text-align:left'>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        body = "".join(line("td", cells) for cells in self.cells())
        return f"<table><thead>{line('th', HEADER)}</thead><tbody>{body}</tbody></table>"


def summary_or_why_not(run: Run) -> dict[str, Any]:
    """`Run.summary()`; damaged files, or a run that is being deleted, must not hide the others."""
    try:
        return run.summary()
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        unknown = ("steps", "loss", "tokens", "tokens_per_s", "mfu", "eta_s", "devices", "peak_bytes")
        why = str(error) if isinstance(error, RunNotFound) else f"It cannot be read: {type(error).__name__}: {error}."
        known = {"name": run.name, "path": str(run.path), "state": "failed", "message": why, "step": 0, "gpus": []}
        return {**known, **dict.fromkeys(unknown), "time": 0.0}


HEADER = ("name", "state", "step", "loss", "tokens/s", "MFU", "left", "devices", "when")


def runs(root: str | os.PathLike[str] | None = None) -> RunTable:
    """The runs in `root` (by default where `launch` puts them), newest first."""
    folder = runs_root() if root is None else Path(root).expanduser().absolute()
    found = sorted(_run_directories(folder), key=_made_at, reverse=True)
    return RunTable(folder, tuple(Run(path) for path in found))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["name"],
        row["state"],
        _step_cell(row),
        "" if row["loss"] is None else f"{row['loss']:.4g}",
        "" if not row["tokens_per_s"] else count(row["tokens_per_s"]),
        "" if not row["mfu"] else f"{row['mfu']:.1%}",
        "" if row["eta_s"] is None else duration(row["eta_s"]),
        _devices_cell(row),
        f"{duration(max(0.0, time.time() - row['time']))} ago" if row["time"] else "",
    )


def _step_cell(row: dict[str, Any]) -> str:
    return f"{row['step']:,} of {row['steps']:,}" if row["steps"] else f"{row['step']:,}"


def _devices_cell(row: dict[str, Any]) -> str:
    """`"GPU 0, 1"` for those it has, else how many it had or waits for."""
    if row["gpus"]:
        return f"GPU {', '.join(map(str, row['gpus']))}"
    return "" if row["devices"] is None else str(row["devices"])
