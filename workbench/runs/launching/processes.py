"""Ending processes that we know only by pid and start time: ranks are not the supervisor's children."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from workbench.rundir import RunDir, process_alive, process_record, read_json

POLL_S = 0.1
SUPERVISOR, RECORDER = "workbench.runs.launching.supervisor", "workbench.runs.tracking.recorder"
WORKER = "workbench.execution.worker"
LEAVES_S = 5.0
"""After the last status, how long a supervisor, or what ends ranks in its place, has until it exits and its
devices are free again."""


def rank_records(run: RunDir) -> list[dict[str, Any]]:
    """What `ranks/<rank>.json` hold, in rank order; each has `rank`, `pid`, `created` and `stage`."""
    records = [_record(path) for path in run.ranks.glob("*.json")]
    return sorted((record for record in records if "rank" in record), key=lambda record: int(record["rank"]))


def launcher_record(run: RunDir) -> dict[str, Any]:
    """`launcher.json`, or `{}` before there is one."""
    return _record(run.launcher)


def _record(path: Path) -> dict[str, Any]:
    """A JSON object; `{}` where there is none that can be read."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def live_workers(run: RunDir) -> list[dict[str, Any]]:
    """Every rank and Accelerate launcher of the run that still runs, as `{pid, created}`."""
    launcher = launcher_record(run)
    known = [*rank_records(run), *launcher.get("workers", ())]
    if launcher.get("accelerate"):
        known.append(launcher["accelerate"])
    return [record for record in _distinct(known) if process_alive(record)]


def survivors(run: RunDir) -> list[dict[str, Any]]:
    """What a launcher that has gone left behind: ranks, also those that it had only just started.

    Where two nodes of a run share a host, those of the other one are none: who started them still lives.
    """
    left = [
        record
        for module, record in _named(run)
        if module not in (SUPERVISOR, RECORDER) and not _has_its_parent(run, record["pid"])
    ]
    return _distinct([*live_workers(run), *left])


def _distinct(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record a process; ranks on other hosts may have the pids of those here."""
    return list({(record["pid"], record.get("host")): record for record in records}.values())


def _has_its_parent(run: RunDir, pid: int) -> bool:
    """Whether a process of the run is below another of the run's, not below who adopts orphans."""
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid).parent()
        return parent is not None and str(run.path) in parent.cmdline()
    return False


def run_alive(run: RunDir) -> bool:
    """Whether anything of the run is left: its supervisor, its launcher or a rank."""
    return process_alive(launcher_record(run).get("supervisor")) or bool(live_workers(run))


def strays(run: RunDir) -> list[dict[str, Any]]:
    """Whatever may still write to this run, in its files or not; all but what tells Weights & Biases of it.

    A rank whose launcher died before it could write it down is in no file, nor is what ends the ranks, and writes
    the last status, in the place of a supervisor that is gone.
    """
    return [record for module, record in _named(run) if module != RECORDER]


def supervisors(run: RunDir) -> list[dict[str, Any]]:
    """The run's supervisor, and what stands in for it."""
    return [record for module, record in _named(run) if module == SUPERVISOR]


def wait_left(run: RunDir) -> bool:
    """After the last status: wait until nothing of the run is left that writes to it or keeps its devices."""
    supervisor = launcher_record(run).get("supervisor")
    return wait_gone([*([supervisor] if supervisor else []), *supervisors(run)], LEAVES_S)


def _named(run: RunDir) -> list[tuple[str, dict[str, Any]]]:
    """Module and record of every `… -m MODULE … RUN_DIR` of this machine; looks at all its processes.

    MODULE is one of ours or the run's worker: others (TensorBoard, a web server) may name the directory as well.
    """
    modules = (SUPERVISOR, RECORDER, launcher_record(run).get("worker", WORKER))
    directory, found = run.path.resolve(), []
    for process in psutil.process_iter(["cmdline"]):
        words: list[str] = process.info["cmdline"] or []
        module = next((word for word in modules if word in words), None)
        if module and os.path.isabs(words[-1]) and Path(words[-1]).resolve() == directory:
            with contextlib.suppress(psutil.Error):
                found.append((module, process_record(process.pid)))
    return found


def descendants(pid: int) -> list[dict[str, Any]]:
    """The workers below Accelerate's launcher: its children, and whoever leads a session of its own.

    Each elastic rank leads one, which is why a signal to the launcher's group misses them.
    """
    found = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if child.ppid() == pid or os.getsid(child.pid) == child.pid:
                    found.append(process_record(child.pid))
    return found


def send_signal(records: Iterable[Mapping[str, Any]], number: int) -> None:
    for record in records:
        if process_alive(record):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(record["pid"], number)


def wait_gone(records: Iterable[Mapping[str, Any]], timeout_s: float) -> bool:
    """Wait until none of them runs; False when `timeout_s` passed first."""
    deadline = time.monotonic() + timeout_s
    left = list(records)
    while left := [record for record in left if process_alive(record)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def kill_trees(records: Iterable[Mapping[str, Any]]) -> None:
    """SIGKILL each process together with all that it started (data loaders, compilers)."""
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
