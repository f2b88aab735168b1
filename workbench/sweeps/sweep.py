"""`Sweep`: the handle of a sweep that lives in its own directory and under its own supervisor."""

from __future__ import annotations

import html
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.arguments import checked_arguments
from workbench.errors import InvalidArgument
from workbench.runs.records.follow import Follower
from workbench.runs.run import Run
from workbench.sweeps.directory import Entry, configuration_key
from workbench.sweeps.queue import POLL_S, Queue, find_queue
from workbench.sweeps.rules import HELD_OUT, TRAINING, rule_from_json, why_none
from workbench.tables import html_table, text_table
from workbench.units import duration


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


class Sweep(Queue):
    """Many runs of one experiment, read from the sweep's directory; it works from any kernel."""

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Return the values of each axis, as JSON."""
        axes: dict[str, list[Any]] = self.directory.settings["axes"]
        return axes

    def _to_sample(self) -> bool:
        settings = self.directory.settings
        return len(self.directory.queue()) < (settings["trials"] or 0) * len(settings["seeds"])

    @property
    def objective(self) -> str:
        """Return the number that is compared, in words."""
        return HELD_OUT if self.evaluates else TRAINING

    @property
    def evaluates(self) -> bool:
        """Return True if the objective is the held-out loss."""
        return bool(self.directory.settings["experiment"].get("evaluation"))

    def rows(self) -> list[Row]:
        """Return a row for each configuration, the best first; those without a finished run keep their order."""
        groups: dict[str, list[Entry]] = {}
        for entry in self.directory.queue():
            groups.setdefault(configuration_key(entry.choices), []).append(entry)
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

    @checked_arguments
    def best(self, count: int = 1) -> list[Run]:
        """Return the runs, with every seed, of the `count` configurations whose mean objective is lowest."""
        if count < 1:
            raise InvalidArgument(f"count={count} is no number of configurations. Give at least 1.")
        ranked = [row for row in self.rows() if row.mean is not None]
        return [run for row in ranked[:count] for run in row.runs]

    @property
    def saved(self) -> str:
        """Return what the early-stopping rule saved, in words; where it stopped no run, why not."""
        results = [result for _, result in self.results()]
        ended = [result for result in results if result.state == "stopped early"]
        if not ended:
            rule = rule_from_json(self.directory.settings["stop"])
            return f"No run was stopped early{why_none(rule, sum(result.state == 'finished' for result in results))}."
        steps, seconds = sum(result.saved_steps for result in ended), sum(result.saved_s for result in ended)
        return (
            f"{len(ended)} run{'s were' if len(ended) > 1 else ' was'} stopped early, which saved {steps:,} steps "
            f"({duration(seconds)} of training)."
        )

    def __repr__(self) -> str:
        return "\n".join([self.headline(), text_table(self.cells(self.rows())), self.footline()])

    def _repr_html_(self) -> str:
        head, *body = self.cells(self.rows())
        table = html_table(head, body)
        return f"<p><b>{html.escape(self.headline())}</b></p>{table}<p>{html.escape(self.footline())}</p>"

    def headline(self) -> str:
        """Return how far the sweep has come, in words."""
        settings, queue = self.directory.settings, self.directory.queue()
        total = settings["trials"] * len(settings["seeds"]) if self._to_sample() else len(queue)
        return f"Sweep {self.name}: {len(self.results())} of {total} runs have ended, {self.state}"

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
    return path if isinstance(path, Sweep) else Sweep(find_queue(path, Sweep.SETTINGS, "sweep"))


def follow(sweep: Sweep, every_s: float = 5.0) -> Iterator[str]:
    """Yield a line when a run changes its state or ends, and every `every_s` seconds for runs that make steps.

    Ends when the supervisor of the sweep has left.
    """
    follower, ended = Follower(every_s), len(sweep.results())
    while True:
        alive = sweep.alive  # asked before the last look at the runs
        yield from follower.lines(sweep.runs)
        if len(sweep.results()) > ended:
            ended = len(sweep.results())
            best = sweep.rows()[0]
            values = ", ".join(f"{name} {value}" for name, value in best.values.items())
            yield sweep.headline() + ("" if best.mean is None else f"; best so far {best.mean:.4g} with {values}")
        if not alive:
            return
        time.sleep(POLL_S)
