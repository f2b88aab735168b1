"""Finding and ending a run's processes by pid and start time: ranks are not children of the supervisor."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from workbench.events import LauncherRecord, ProcessRecord, RankRecord
from workbench.rundir import RunDir, process_alive, process_record, read_object

POLL_S = 0.1
SUPERVISOR, RECORDER = "workbench.runs.launching.supervisor", "workbench.runs.tracking.recorder"
WORKER, EVALUATOR = "workbench.execution.worker", "workbench.execution.evaluation_worker"
BISECTOR = "workbench.execution.bisection_worker"
LAUNCHER, LOCAL_LAUNCHER = "accelerate.commands.launch", "workbench.execution.local_launch"
"""Accelerate's launcher, and the one for ranks of one node that meet on the loopback interface or are forked."""
LEAVES_S = 5.0
"""Seconds after the last status until the supervisor, or its replacement, has exited and freed the devices."""


def rank_records(run: RunDir) -> list[RankRecord]:
    """Return the content of `ranks/<rank>.json`, in rank order."""
    records: list[Any] = [record for path in run.ranks.glob("*.json") if _is_process(record := read_object(path))]
    return sorted((r for r in records if str(r.get("rank")).isdigit()), key=lambda record: int(record["rank"]))


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


def live_workers(run: RunDir) -> list[ProcessRecord]:
    """Return every rank and Accelerate launcher of the run that still runs."""
    launcher = launcher_record(run)
    records: list[ProcessRecord] = [*rank_records(run), *launcher.get("workers", ())]
    if "accelerate" in launcher:
        records.append(launcher["accelerate"])
    return [record for record in _distinct(records) if process_alive(record)]


def survivors(run: RunDir) -> list[ProcessRecord]:
    """Return the ranks that outlived their launcher, including those that it had only just started.

    Where two nodes of a run share a host, the other node's ranks do not count while the process that started them
    lives.
    """
    left = [
        record
        for module, record in _named(run)
        if module not in (SUPERVISOR, RECORDER) and not _has_its_parent(run, record["pid"])
    ]
    return _distinct([*live_workers(run), *left])


def _distinct(records: Iterable[ProcessRecord]) -> list[ProcessRecord]:
    """Return one record per process; ranks on other hosts may have the pids of those here."""
    return list({(record["pid"], record.get("host")): record for record in records}.values())


def _has_its_parent(run: RunDir, pid: int) -> bool:
    """Return True if the parent of a process of the run belongs to the run too, and has not died."""
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid).parent()
        return parent is not None and str(run.path) in parent.cmdline()
    return False


def run_alive(run: RunDir) -> bool:
    """Return True if a process of the run is left: its supervisor, its launcher or a rank."""
    return process_alive(launcher_record(run).get("supervisor")) or bool(live_workers(run))


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
