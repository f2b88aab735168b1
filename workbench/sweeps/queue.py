"""A run queue: (experiment, plan) pairs in one directory under one supervisor, which outlives every kernel.

A sweep fills it with other values of the experiment, a grid with other choices of the plan.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import psutil

from workbench.arguments import checked_arguments
from workbench.errors import RunExists, RunNotFound, WorkbenchError
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.rundir import locked, process_alive, read_json, runs_root, write_json
from workbench.runs.launching import fork_server, processes
from workbench.runs.launching.run_directory import new_directory, user_code
from workbench.runs.run import Run
from workbench.sweeps.directory import SWEEP, Entry, QueueDir, Result
from workbench.sweeps.supervisor import ranks_environment
from workbench.user_code import user_path
from workbench.waiting import waiting

POLL_S = 0.2
STARTS_S = 60.0
"""Seconds within which a started supervisor writes its record, on a busy machine."""


class Queue(ABC):
    """The handle of a queue, read from its directory; it works from any kernel."""

    SETTINGS: ClassVar[str] = SWEEP

    @checked_arguments
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.directory = QueueDir(Path(path).absolute(), self.SETTINGS)

    @property
    def path(self) -> Path:
        """Return the queue's directory."""
        return self.directory.path

    @property
    def name(self) -> str:
        """Return the name of the queue's directory."""
        return self.path.name

    @property
    def why(self) -> str:
        """Return why these runs are trained as they are: which cells, or how many runs side by side."""
        return str(self.directory.settings["packing"]["why"])

    @property
    def alive(self) -> bool:
        """Return True while the queue's supervisor is at work."""
        try:
            return process_alive(read_json(self.directory.supervisor))
        except (OSError, ValueError):
            return False

    @property
    def runs(self) -> list[Run]:
        """Return the runs that were launched, in order of launch."""
        return [Run(path) for entry in self.directory.queue() if (path := self.directory.run(entry)).exists()]

    @property
    def complete(self) -> bool:
        """Return True if every run of the queue has ended."""
        return all(self.directory.result(entry) for entry in self.directory.queue()) and not self._to_sample()

    @property
    def state(self) -> str:
        """Return `at work`, `complete`, or how to go on."""
        return "at work" if self.alive else "complete" if self.complete else "not at work; resume() goes on"

    def _to_sample(self) -> bool:
        """Return True if a sampler has configurations left to choose."""
        return False

    def results(self) -> list[tuple[Entry, Result]]:
        """Return the runs that have ended, and how."""
        ended = [(entry, self.directory.result(entry)) for entry in self.directory.queue()]
        return [(entry, result) for entry, result in ended if result is not None]

    def look(self) -> tuple[str, str]:
        """Return how far the queue has come, in words, and its table for a notebook."""
        return f"{len(self.results())} of {len(self.directory.queue())} runs have ended", self._repr_html_()

    @abstractmethod
    def _repr_html_(self) -> str: ...

    @checked_arguments
    def wait(self, timeout: float | None = None) -> Self:
        """Block until every run has ended, or until `timeout` seconds have passed.

        Raises `WorkbenchError` if the supervisor vanished before the queue was complete.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with waiting(f"waiting for {self.name}", self.look):
            while self.alive:
                if deadline is not None and time.monotonic() > deadline:
                    return self
                time.sleep(POLL_S)
        if not self.complete and not self.directory.stop_file.exists():
            left = len(self.directory.queue()) - len(self.results())
            raise WorkbenchError(
                f"The supervisor of {self.name} vanished with {left} runs left; {self.directory.log} says what it "
                "printed. Go on with resume()."
            )
        return self

    @checked_arguments
    def stop(self, wait: bool = False) -> Self:
        """Ask the runs to write a checkpoint and leave; `resume` goes on with them. `wait` returns when they have."""
        if self.alive:
            self.directory.stop_file.touch()
        else:
            for run in self.runs:
                run.stop()
        return self.wait() if wait else self

    def resume(self) -> Self:
        """Go on with what is missing: runs that were interrupted or failed, and those that were never launched.

        A run with a checkpoint continues from it. Does nothing to a queue that is at work.
        """
        if self.alive and not self.directory.stop_file.exists():
            return self
        if self.alive:
            self.wait(timeout=STARTS_S)
        self.directory.stop_file.unlink(missing_ok=True)
        for entry, result in self.results():
            if result.state in ("failed", "stopped"):
                self.directory.result_file(entry).unlink()
        start_supervisor(self.directory)
        return self


def new_queue(directory: str | os.PathLike[str] | None, name: str, settings: str) -> QueueDir:
    """Return the empty directory of a new queue, called after `name` by default; raises `RunExists`."""
    if directory is None:
        return QueueDir(new_directory(name), settings)
    path = Path(directory).expanduser().absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        load = f"wb.load_{settings.removesuffix('.json')}(path)"
        raise RunExists(f"{path} is not empty. Choose another directory, or go on: {load}.resume().")
    path.mkdir(parents=True, exist_ok=True)
    return QueueDir(path, settings)


def start_queue(
    directory: QueueDir,
    settings: Mapping[str, Any],
    entries: list[Entry],
    pairs: Iterable[tuple[Mapping[str, Any], Experiment, Plan]],
) -> None:
    """Write a queue with its settings, and start its supervisor.

    `pairs` holds the experiment and the plan of all choices that an entry has, or that a sampler may add.
    """
    for choices, experiment, plan in pairs:
        file, code = directory.plan_file(choices), directory.code_folder(choices)
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            plan.save(file)
        if not code.exists():
            code.mkdir(parents=True)
            for name, content in user_code(experiment).items():
                (code / name).write_bytes(content)
    directory.write_queue(entries)
    write_json(directory.settings_file, {**settings, "worker": processes.WORKER})
    start_supervisor(directory)


def start_supervisor(directory: QueueDir) -> None:
    """Start the detached process that works through the queue, and wait until it has begun."""
    directory.supervisor.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(user_path())}
    threads = ranks_environment(directory)["OMP_NUM_THREADS"]
    command = ("workbench.sweeps.supervisor", str(directory.path))
    start = fork_server.client().start
    pid = start(*command, log=directory.log, environment=environment, threads=threads, is_served=True)
    deadline = time.monotonic() + STARTS_S
    while not directory.supervisor.exists() and psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    with locked(directory.lock, wait=False) as is_free:
        if is_free and not directory.supervisor.exists():
            raise WorkbenchError(f"The supervisor of {directory.path.name} ended at once; {directory.log} says why.")


def find_queue(path: str | os.PathLike[str], settings: str, noun: str) -> Path:
    """Return the directory of a queue at `path`, or of that name under the runs folder; raises `RunNotFound`."""
    for candidate in (Path(path).expanduser(), runs_root() / path):
        with contextlib.suppress(OSError):  # a name that is too long
            if (candidate / settings).is_file():
                return candidate
    names = sorted(file.parent.name for file in runs_root().glob(f"*/{settings}"))
    hint = f"There are {', '.join(names[-5:])}." if names else f"There are none in {runs_root()} yet."
    raise RunNotFound(f"There is no {noun} {str(path)!r}. {hint}")
