"""The processes of a run: found and ended by pid and start time, and why one of them died.

Ranks are not children of the supervisor, so that it cannot wait for them: it asks the system which of them live. The
cause of a failed run is the earliest error file of a rank, or one made from the launcher's log.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from workbench.base.errors import InvalidArgument, RunFailed, RunNotFound
from workbench.base.secrets import masked_words
from workbench.execution.heartbeat import read_beat
from workbench.record.events import LauncherRecord, ProcessRecord, RankRecord
from workbench.record.rundir import (
    RunDir,
    is_elsewhere,
    opened,
    process_alive,
    process_record,
    read_object,
    read_record,
    write_record,
)

POLL_S = 0.1
SUPERVISOR, RECORDER = "workbench.runs.launching.supervisor", "workbench.runs.tracking.recorder"
WORKER, EVALUATOR = "workbench.execution.worker", "workbench.execution.evaluating_worker"
"""Modules that ranks execute: those of a training, and those of an evaluation."""
LAUNCHER, LOCAL_LAUNCHER = "accelerate.commands.launch", "workbench.execution.local_launch"
"""Accelerate's launcher, and the one for ranks of one node that meet on the loopback interface or are forked."""
LEAVES_S = 90.0
"""Longest wait in s, after the last status, until the supervisor, or its replacement, has freed the devices and exited.

It gives ranks a minute to leave before it ends them.
"""


def rank_records(run: RunDir) -> list[RankRecord]:
    """Return the content of `ranks/<rank>.json`, in rank order."""
    records: list[Any] = [record for path in run.records(run.ranks) if _is_process(record := read_object(path))]
    return sorted((r for r in records if str(r.get("rank")).isdecimal()), key=lambda record: int(record["rank"]))


def start_detached(
    module: str, *arguments: str, log: Path, environment: Mapping[str, str], stdin: Any = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a module in a process that an interrupt of the kernel does not reach; what it prints goes to a log."""
    command = [sys.executable, "-m", module, *arguments]
    with log.open("ab") as file:
        output: Any = {"stdin": stdin, "stdout": file, "stderr": file}
        return subprocess.Popen(command, env=dict(environment), start_new_session=True, **output)


def seconds_of(variable: str, default: float) -> float:
    """Return the seconds in an environment variable, or `default` where it is unset or empty."""
    return float(os.environ.get(variable) or default)


def launcher_record(run: RunDir) -> LauncherRecord:
    """Return the content of `launcher.json` without fields of a wrong type, `{}` where there is none."""
    record: Any = read_object(run.launcher)
    whole: LauncherRecord = {
        name: value for name, value in record.items() if name not in _FIELDS or _FIELDS[name](value)
    }  # type: ignore[assignment]
    return whole


def _is_process(record: Any) -> bool:
    """Return True for the record of a process; a damaged file may hold anything."""
    return isinstance(record, dict) and isinstance(record.get("pid"), int) and isinstance(record.get("host", ""), str)


def _is_list_of(is_one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_one, value))


_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "supervisor": _is_process,
    "accelerate": _is_process,
    "workers": _is_list_of(_is_process),
    "devices": _is_list_of(lambda value: isinstance(value, str)),
    "worker": lambda value: isinstance(value, str),
    "plan": lambda value: isinstance(value, dict) and isinstance(value.get("world"), int),
}
"""Tests of the fields of `launcher.json` that are read."""


@dataclass(frozen=True)
class Processes:
    """The processes of a run at one moment: what its files record of them, read once, and which of them run here."""

    launcher: LauncherRecord
    """Content of `launcher.json`, as `launcher_record` returns it."""
    ranks: tuple[RankRecord, ...]
    is_described: bool
    """True if there was a `launcher.json`, also one of which nothing can be read."""
    is_supervised: bool
    """True if the run's supervisor runs on this host."""
    workers: tuple[ProcessRecord, ...]
    """Every rank, and every launcher of ranks, that runs on this host."""

    @classmethod
    def of(cls, run: RunDir) -> Processes:
        """Read what a run records of its processes, and ask the system for each."""
        is_described, launcher, ranks = run.launcher.exists(), launcher_record(run), rank_records(run)
        accelerate = [launcher["accelerate"]] if "accelerate" in launcher else []
        started = _distinct([*ranks, *launcher.get("workers", ()), *accelerate])
        is_supervised, workers = process_alive(launcher.get("supervisor")), filter(process_alive, started)
        return cls(launcher, tuple(ranks), is_described, is_supervised, tuple(workers))

    @property
    def supervisor(self) -> ProcessRecord | None:
        """The record of the run's supervisor."""
        return self.launcher.get("supervisor")

    @property
    def are_left(self) -> bool:
        """True if a process of the run is left on this host: its supervisor, its launcher or a rank."""
        return self.is_supervised or bool(self.workers)

    @property
    def are_elsewhere(self) -> bool:
        """True if the process that writes the run's states is on another host.

        This is the supervisor, or rank 0 of a run without one.
        """
        writers = (self.supervisor,) if self.supervisor else self.ranks[:1]
        return any(map(is_elsewhere, writers))


def live_workers(run: RunDir) -> tuple[ProcessRecord, ...]:
    """Return every rank and Accelerate launcher of the run that still runs."""
    return Processes.of(run).workers


def survivors(run: RunDir) -> list[ProcessRecord]:
    """Return the ranks that outlived their launcher, including those that it had only just started.

    Where two nodes of a run share a host, the other node's ranks do not count while the process that started them
    lives.
    """
    left = []
    for module, record in _named(run):
        is_watched = False  # by a process of the run that started it and has not died
        with contextlib.suppress(psutil.Error):
            parent = psutil.Process(record["pid"]).parent()
            is_watched = parent is not None and str(run.path) in parent.cmdline()
        if module not in (SUPERVISOR, RECORDER) and not is_watched:
            left.append(record)
    return _distinct([*live_workers(run), *left])


def _distinct(records: Iterable[ProcessRecord]) -> list[ProcessRecord]:
    """Return one record per process; ranks on other hosts may have the pids of those here."""
    return list({(record["pid"], record.get("host")): record for record in records}.values())


def run_alive(run: RunDir) -> bool:
    """Return True if a process of the run is left: its supervisor, its launcher or a rank."""
    return Processes.of(run).are_left


def strays(run: RunDir) -> list[ProcessRecord]:
    """Return every process that may still write to this run, except its W&B recorder.

    Some of them are in no file: a rank whose launcher died before it could record it, and the process that ends the
    ranks and writes the last status in the place of a supervisor that is gone.
    """
    return [record for module, record in _named(run) if module != RECORDER]


def named(run: RunDir) -> list[ProcessRecord]:
    """Return every process of the run, its W&B recorder included, by their command lines."""
    return [record for _, record in _named(run)]


def supervisors(run: RunDir) -> list[ProcessRecord]:
    """Return the run's supervisor, and the process that replaces one that is gone."""
    return [record for module, record in _named(run) if module == SUPERVISOR]


def wait_left(run: RunDir) -> bool:
    """Wait, after the last status, until no process of the run writes to it or keeps its devices."""
    supervisor = launcher_record(run).get("supervisor")
    return wait_gone([*([supervisor] if supervisor else []), *supervisors(run)], LEAVES_S)


def _named(run: RunDir) -> list[tuple[str, ProcessRecord]]:
    """Return module and record of every process `… -m MODULE … RUN_DIR` on this machine.

    MODULE is one of ours or the run's worker: other programs (TensorBoard, a web server) may name the directory too.
    """
    modules = (SUPERVISOR, RECORDER, launcher_record(run).get("worker", WORKER))
    directory, named = run.path.resolve(), []
    for process in psutil.process_iter(["cmdline"]):
        words = [word for word in process.info["cmdline"] or () if word.strip()]
        module = next((word for word in modules if word in words), None)
        if module and os.path.isabs(words[-1]) and Path(words[-1]).resolve() == directory:
            with contextlib.suppress(psutil.Error):
                named.append((module, process_record(process.pid)))
    return named


def descendants(pid: int) -> list[ProcessRecord]:
    """Return the workers below Accelerate's launcher: its children, and every leader of a session.

    Each elastic rank leads a session of its own, which is why a signal to the launcher's group misses it.
    """
    workers = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if child.ppid() == pid or os.getsid(child.pid) == child.pid:
                    workers.append(process_record(child.pid))
    return workers


def send_signal(records: Iterable[ProcessRecord], number: int) -> None:
    """Send a signal to those of the processes that still run."""
    for record in records:
        if process_alive(record):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(record["pid"], number)


def wait_gone(records: Iterable[ProcessRecord], timeout_s: float) -> bool:
    """Wait until none of the processes runs; return False when `timeout_s` passed first."""
    deadline = time.monotonic() + timeout_s
    left = list(records)
    while left := [record for record in left if process_alive(record)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def kill_trees(records: Iterable[ProcessRecord]) -> None:
    """Send SIGKILL to each process and to all that it started (data loaders, compilers)."""
    doomed: list[psutil.Process] = []
    for record in records:
        if process_alive(record):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(record["pid"])
                doomed += [process, *process.children(recursive=True)]
    for process in doomed:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(doomed, timeout=10)


# Why a run failed

LOG_TAIL_LINES = 30
LOG_BYTES = 2**26
"""Bytes at the end of a log that are read."""
LOST_PEER = re.compile(r"(?i)connection (was )?(reset|closed|refused)|closed by peer|broken pipe|remote process exited")
"""Messages of a rank that has lost another one."""
LAST_WORDS_LINES = 10


@dataclass(frozen=True)
class RankError:
    """The error that ended a rank, as that rank wrote it."""

    rank: int
    stage: int | None
    type: str
    message: str
    traceback: str
    time: float
    is_origin: bool = False
    """True if the rank knows that the cause is in its own stage."""

    @property
    def sentence(self) -> str:
        """Return rank, stage, error type and the first line of the message that is not blank."""
        stage = "" if self.stage is None else f" (stage {self.stage})"
        said = next((f": {line.strip()}" for line in self.message.splitlines() if line.strip()), " without a message")
        return f"rank {self.rank}{stage}: {self.type}{said}"


def root_cause(run: RunDir) -> RankError | None:
    """Return the earliest of the error files; the other ranks usually die because the first one did.

    An error that all ranks raise together is told by a rank of the stage where it arose.
    """
    errors = []
    for path in run.records(run.errors):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):  # damaged
            value, written = read_record(path), path.stat().st_mtime
            text = {name: str(value.get(name, "")) for name in ("message", "traceback")}
            error_type, when = str(value.get("type", "Error")), float(value.get("time", written))
            is_origin = bool(value.get("is_origin"))
            errors.append(
                RankError(int(value["rank"]), value.get("stage"), error_type, **text, time=when, is_origin=is_origin)
            )
    return min(errors, key=lambda error: (not error.is_origin, error.time), default=None)


def run_failed(run: RunDir, message: str) -> RunFailed:
    """Return the exception for a failed run: its root cause, the worker's own traceback, and the path of the log."""
    cause = root_cause(run)
    name = run.path.name
    if not run.path.exists():
        return RunFailed(f"Run {name} failed: {message}")
    if cause is None:
        damaged = [path.name for path in run.records(run.errors)]
        why = f"The error files {', '.join(damaged)} are damaged." if damaged else "No rank left an error file."
        words, log = log_tail(run, "launcher").rstrip(), run.log("launcher")
        begin = f"Run {name} failed: {message} {why}"
        if words:
            return RunFailed(f"{begin} The launcher's log ends with:\n\n{words}\n\nThe whole log is {log}.")
        log_is = (
            f"The launcher's log, {log}, is empty." if log.exists() else f"There is no log of the launcher at {log}."
        )
        return RunFailed(f"{begin} {log_is} Train in this process to see the error: wb.runs.debug(experiment, plan).")
    # The error already holds the traceback with which the log ends.
    before = log_tail(run, cause.rank, None).rpartition("Traceback (most recent call last)")
    lines = "\n".join((before[0] or before[2]).rstrip().splitlines()[-LAST_WORDS_LINES:])
    said = f"Before that it printed:\n\n{lines}\n\n" if lines else ""
    traceback = f"{cause.traceback.rstrip()}\n\n" if cause.traceback.strip() else "It left no traceback.\n\n"
    log = run.log(cause.rank)
    facts = {each: getattr(cause, each) for each in ("rank", "stage", "type", "traceback")}
    return RunFailed(
        f"Run {name} failed on {cause.sentence}\n\n{traceback}{said}"
        + (f"The rank's whole log is {log}." if log.exists() else f"There is no log of the rank at {log}."),
        **facts,
        log=lines,
    )


def record_silent_death(run: RunDir, launcher_output: str, gone: set[int] | None = None) -> bool:
    """Write the error file for a rank that could not: it was killed by a signal, or died before its first line.

    `launcher_output` is the output of Accelerate and torchrun; their report names each rank and its exit code. The
    death of a rank that a signal killed is dated before the errors of the others, which only found that it no longer
    answers; so is that of a rank which just left, if all others report a lost connection. `gone` are the ranks that had
    died before the supervisor killed the others, None if it killed none. Returns False if the launcher's output adds
    nothing to the error files.
    """
    reported = {int(path.stem) for path in run.errors.glob("*.json")}
    earliest = root_cause(run)
    # Rank and exit code from each entry of torchrun's report, or of the one process that Accelerate started.
    entries = re.findall(r"^\s*rank\s*:\s*(\d+).*\n\s*exitcode\s*:\s*(-?\d+)", launcher_output, flags=re.MULTILINE)
    exits = [(int(rank), int(code)) for rank, code in entries]
    if not exits and (killed := re.search(r"died with <Signals\.(\w+)", launcher_output)):
        exits = [(0, -int(signal.Signals[killed[1]]))]
    elif not exits and (status := re.search(r"non-zero exit status (\d+)", launcher_output)):
        exits = [(0, int(status[1]))]
    deaths = [(rank, code) for rank, code in exits if rank not in reported and (gone is None or rank in gone)]
    silent = [(rank, code) for rank, code in deaths if code < 0 and code != -signal.SIGTERM]
    if not silent and earliest is not None and LOST_PEER.search(earliest.message):
        silent = [(rank, code) for rank, code in deaths if code >= 0]
    if not silent and (reported or gone is not None):
        return False
    rank, exit_code = next(iter(silent or deaths), (0, None))
    stages = {int(r["rank"]): r.get("stage") for r in rank_records(run)}
    when = time.time() if earliest is None else earliest.time - 1e-3
    # What an exit code says of the cause; None means that not even that is known.
    error_type, message = "Exit", "the process ended without a word."
    if exit_code is not None and exit_code < 0:
        error_type = signal.Signals(-exit_code).name
        hint = {
            "SIGKILL": "Usually the machine ran out of memory: take a smaller micro-batch, or fewer ranks.",
            "SIGSEGV": "A compiled library crashed; the log of the rank ends with the Python lines that called it.",
            "SIGBUS": "Usually /dev/shm is full.",
        }.get(error_type, "")
        message = f"the process was killed by {error_type}. {hint}".rstrip()
    elif exit_code is not None:
        message = (
            f"the process ended with exit code {exit_code} before it could say why: the model, the data or a library "
            f"called os._exit({exit_code})."
        )
    beat = read_beat(run, rank)
    if beat is not None and (exit_code or 0) >= 0:
        message += f" Its last activity was {beat.activity!r}, in step {beat.step:,}."
    fields = {"rank": rank, "stage": stages.get(rank), "type": error_type, "message": message, "time": when}
    write_record(run.error(rank), {**fields, "traceback": masked_words(log_tail(run, rank) or launcher_output[-4000:])})
    return True


def log_tail(run: RunDir, rank: int | str, lines: int | None = LOG_TAIL_LINES) -> str:
    """Return the last `lines` of a rank's log (all of it for None), "" when there is none."""
    if lines is not None and lines < 0:
        raise InvalidArgument(f"tail={lines} is no number of lines. Give 0 or more, or None for all.")
    if not re.fullmatch(r"\w[\w-]*", str(rank)):
        raise InvalidArgument(f"{str(rank)[:80]!r} names no log. Give a rank, or 'launcher'.")
    if run.logs.is_symlink():
        return f"{run.logs} is a link, which is not followed.\n"
    try:
        with opened(run.log(rank)) as descriptor:
            left_out = max(0, os.fstat(descriptor).st_size - LOG_BYTES)
            text = os.pread(descriptor, LOG_BYTES, left_out).decode(errors="replace")
    except OSError:
        return ""
    except RunNotFound as error:
        return f"{error}\n"
    text = f"(without the first {left_out:,} bytes)\n{text}" if left_out and lines is None else text
    return text if lines is None else "".join(text.splitlines(keepends=True)[-lines or len(text) :])
