"""`Sweep`: the handle of a sweep that lives in its own directory and under its own supervisor."""

from __future__ import annotations

import contextlib
import html
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.arguments import checked_arguments
from workbench.errors import RunNotFound, WorkbenchError
from workbench.rundir import process_alive, read_json, runs_root
from workbench.runs.run import Run
from workbench.sweeps.directory import Entry, Result, SweepDir, configuration_key
from workbench.sweeps.objective import describe
from workbench.units import duration
from workbench.user_code import user_path

POLL_S = 0.2
STARTS_S = 60.0
"""Seconds within which a started supervisor writes its record, on a busy machine."""


@dataclass(frozen=True)
class Row:
    """One configuration of a sweep: its values, and the runs of its seeds."""

    index: int
    """Position of the configuration in the order in which the sweep trains them."""
    values: dict[str, Any]
    """Value on each axis."""
    runs: tuple[Run, ...]
    """The runs that were launched, in order of their seeds."""
    finished: tuple[Run, ...]
    """Runs that trained to their end."""
    at_work: tuple[Run, ...]
    """Launched runs whose end the sweep has not noted: they wait for a device, or train."""
    states: tuple[str, ...]
    """State of the run of each seed; `waiting` before its launch."""
    objectives: tuple[float, ...]
    """Objective of each finished run."""

    @property
    def mean(self) -> float | None:
        """Mean objective over the finished seeds; None before one has finished."""
        return statistics.fmean(self.objectives) if self.objectives else None

    @property
    def spread(self) -> float | None:
        """Standard deviation of the objective over the seeds; None for fewer than two."""
        return statistics.stdev(self.objectives) if len(self.objectives) > 1 else None


class Sweep:
    """Many runs of one experiment, read from the sweep's directory; it works from any kernel."""

    @checked_arguments
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.directory = SweepDir(Path(path).absolute())

    @property
    def path(self) -> Path:
        """Return the sweep's directory."""
        return self.directory.path

    @property
    def name(self) -> str:
        """Return the name of the sweep's directory."""
        return self.path.name

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Return the values of each axis, as JSON."""
        axes: dict[str, list[Any]] = self.directory.settings["axes"]
        return axes

    @property
    def why(self) -> str:
        """Return how many runs train side by side, and why."""
        return str(self.directory.settings["placement"]["why"])

    @property
    def objective(self) -> str:
        """Return the number that is compared, in words."""
        return describe(self.evaluates)

    @property
    def evaluates(self) -> bool:
        """Return True if the objective is the held-out loss."""
        return bool(self.directory.settings["experiment"].get("evaluate"))

    @property
    def alive(self) -> bool:
        """Return True while the sweep's supervisor is at work."""
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
        """Return True if every run that the sweep is to train has ended."""
        return all(self.directory.result(entry) for entry in self.directory.queue()) and not self._to_sample()

    def _to_sample(self) -> bool:
        """Return True if the sampler has configurations left to choose."""
        settings = self.directory.settings
        wanted = (settings["trials"] or 0) * len(settings["seeds"])
        return settings["sampler"] != "grid" and len(self.directory.queue()) < wanted

    def results(self) -> list[tuple[Entry, Result]]:
        """Return the runs that have ended, and how."""
        ended = [(entry, self.directory.result(entry)) for entry in self.directory.queue()]
        return [(entry, result) for entry, result in ended if result is not None]

    def rows(self) -> list[Row]:
        """Return a row for each configuration, the best first; those without a finished run keep their order."""
        groups: dict[str, list[Entry]] = {}
        for entry in self.directory.queue():
            groups.setdefault(configuration_key(entry.choice), []).append(entry)
        rows = [self._row(index, entries) for index, entries in enumerate(groups.values())]
        return sorted(rows, key=lambda row: float("inf") if row.mean is None else row.mean)

    def _row(self, index: int, entries: list[Entry]) -> Row:
        ended = {entry.index: self.directory.result(entry) for entry in entries}
        launched = {entry.index: Run(path) for entry in entries if (path := self.directory.run(entry)).exists()}
        states, objectives = [], []
        for entry in entries:
            result, run = ended[entry.index], launched.get(entry.index)
            states.append(result.state if result else run.status.state if run else "waiting")
            if result and result.objective is not None:
                objectives.append(result.objective)
        complete = {at for at, result in ended.items() if result and result.state == "finished"}
        return Row(
            index,
            self.directory.labels(entries[0]),
            runs=tuple(launched.values()),
            finished=tuple(run for at, run in launched.items() if at in complete),
            at_work=tuple(run for at, run in launched.items() if ended[at] is None),
            states=tuple(states),
            objectives=tuple(objectives),
        )

    def best(self, count: int = 1) -> list[Run]:
        """Return the runs, with every seed, of the `count` configurations whose mean objective is lowest."""
        ranked = [row for row in self.rows() if row.mean is not None]
        return [run for row in ranked[:count] for run in row.runs]

    @property
    def saved(self) -> str:
        """Return what the early-stopping rule saved, in words."""
        ended = [result for _, result in self.results() if result.state == "stopped early"]
        if not ended:
            return "No run was stopped early."
        steps, seconds = sum(result.saved_steps for result in ended), sum(result.saved_s for result in ended)
        return (
            f"{len(ended)} run{'s were' if len(ended) > 1 else ' was'} stopped early, which saved {steps:,} steps "
            f"({duration(seconds)} of training)."
        )

    @checked_arguments
    def wait(self, timeout: float | None = None) -> Sweep:
        """Block until the sweep has ended, or until `timeout` seconds have passed.

        Raises `WorkbenchError` if the supervisor vanished before the sweep was complete.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.alive:
            if deadline is not None and time.monotonic() > deadline:
                return self
            time.sleep(POLL_S)
        if not self.complete and not self.directory.stop_file.exists():
            left = len(self.directory.queue()) - len(self.results())
            raise WorkbenchError(
                f"The supervisor of {self.name} vanished with {left} runs left; {self.directory.log} says what it "
                "printed. Go on with resume().",
                sweep=str(self.path),
            )
        return self

    @checked_arguments
    def stop(self, wait: bool = False) -> Sweep:
        """Ask the runs to write a checkpoint and leave; `resume` goes on with them. `wait` returns when they have."""
        if self.alive:
            self.directory.stop_file.touch()
        else:
            for run in self.runs:
                run.stop()
        return self.wait() if wait else self

    def resume(self) -> Sweep:
        """Go on with what is missing: runs that were interrupted or failed, and those that were never launched.

        A run with a checkpoint continues from it. Does nothing to a sweep that is at work.
        """
        if self.alive and not self.directory.stop_file.exists():
            return self
        self.wait(timeout=STARTS_S) if self.alive else None
        self.directory.stop_file.unlink(missing_ok=True)
        for entry, result in self.results():
            if result.state in ("failed", "stopped"):
                self.directory.result_file(entry).unlink()
        start_supervisor(self.directory)
        return self

    def __repr__(self) -> str:
        table = self.cells(self.rows())
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        return "\n".join([self.headline(), *lines, self.footline()])

    def _repr_html_(self) -> str:
        def line(tag: str, cells: tuple[str, ...]) -> str:
            return "<tr>" + "".join(f"<{tag} style='text-align:left'>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        head, *body = self.cells(self.rows())
        rows = "".join(line("td", cells) for cells in body)
        return (
            f"<p><b>{html.escape(self.headline())}</b></p><table><thead>{line('th', head)}</thead>"
            f"<tbody>{rows}</tbody></table><p>{html.escape(self.footline())}</p>"
        )

    def headline(self) -> str:
        """Return how far the sweep has come, in words."""
        settings, queue = self.directory.settings, self.directory.queue()
        total = settings["trials"] * len(settings["seeds"]) if self._to_sample() else len(queue)
        state = "at work" if self.alive else "complete" if self.complete else "not at work; resume() goes on"
        return f"Sweep {self.name}: {len(self.results())} of {total} runs have ended, {state}"

    def footline(self) -> str:
        """Return what is compared, how the runs share the devices, and what early stopping saved."""
        return f"Objective: {self.objective}. {self.why} {self.saved}"

    def cells(self, rows: Sequence[Row]) -> list[tuple[str, ...]]:
        """Return a table of rows as text, with a line of titles first."""
        return [(*self.axes, "objective", "± over seeds", "runs"), *map(_row_cells, rows)]


def _row_cells(row: Row) -> tuple[str, ...]:
    counts = {state: row.states.count(state) for state in dict.fromkeys(row.states)}
    return (
        *map(str, row.values.values()),
        "" if row.mean is None else f"{row.mean:.4g}",
        "" if row.spread is None else f"{row.spread:.2g}",
        ", ".join(f"{count} {state}" for state, count in counts.items()),
    )


@checked_arguments
def load_sweep(path: Sweep | str | os.PathLike[str]) -> Sweep:
    """Return the sweep in a directory, or of that name under the runs folder; raises `RunNotFound`."""
    if isinstance(path, Sweep):
        return path
    for candidate in (Path(path).expanduser(), runs_root() / path):
        with contextlib.suppress(OSError):  # a name that is too long
            if SweepDir(candidate).settings_file.is_file():
                return Sweep(candidate)
    names = sorted(file.parent.name for file in runs_root().glob("*/sweep.json"))
    hint = f"There are {', '.join(names[-5:])}." if names else f"There are no sweeps in {runs_root()} yet."
    raise RunNotFound(f"There is no sweep {str(path)!r}. {hint}", sweep=str(path))


def start_supervisor(directory: SweepDir) -> None:
    """Start the detached process that works through the queue, and wait until it has begun."""
    directory.supervisor.unlink(missing_ok=True)
    with directory.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", directory.SUPERVISOR, str(directory.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # otherwise an interrupt of the kernel would reach it
            env={**os.environ, "PYTHONPATH": os.pathsep.join(user_path())},
        )
    deadline = time.monotonic() + STARTS_S
    while not directory.supervisor.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if process.poll():
        raise WorkbenchError(f"The supervisor of {directory.path.name} ended at once; {directory.log} says why.")
