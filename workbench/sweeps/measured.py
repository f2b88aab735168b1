"""The measurement of a grid's cells: a queue of short trainings of one experiment, one plan after the other.

A cell that fails is a marked cell with its sentence, and the others go on.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from workbench.arguments import checked_arguments
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.runs.run import Run
from workbench.sweeps.directory import GRID, Entry
from workbench.sweeps.queue import Queue, find_queue, new_queue, start_queue
from workbench.tables import html_table, text_table
from workbench.units import duration

BUSY = 1.5
"""Load of a core from which other work disturbs a measurement; a cell measured before leaves about 1."""
WARM_STEPS = 3
"""First steps of a cell that are not timed: they compile, allocate and fill caches."""


@dataclass(frozen=True)
class MeasuredCell:
    """One cell that was to be measured: what was predicted of it, and what was seen."""

    choices: Mapping[str, Any]
    plan: Plan
    state: str
    """`waiting`, the state of its run, or how the run ended: `finished`, `stopped` or `failed`."""
    step_ms: float | None
    """Median milliseconds of its steps after the first three; None unless its run finished."""
    reason: str = ""
    """The sentence of the error where it failed."""
    peak_bytes: int | None = None
    """Measured memory of the fullest device; None unless its run finished."""
    load: float = 0.0
    """Processes that wanted each core in the minute before the run (load average over cores); 0 if unknown."""

    @property
    def predicted_ms(self) -> float:
        """Predicted milliseconds of one step."""
        return self.plan.prediction.step_ms

    @property
    def name(self) -> str:
        """Return the choices as they are written in a call."""
        return ", ".join(f"{name}={value!r}" for name, value in self.choices.items())


class MeasuredGrid(Queue):
    """The measurement of some cells of a grid, read from its directory; it works from any kernel."""

    SETTINGS = GRID

    @cached_property
    def _plans(self) -> list[Plan]:
        return [self.directory.plan(entry) for entry in self.directory.queue()]

    def cells(self) -> tuple[MeasuredCell, ...]:
        """Return the cells of the queue in its order, measured or not."""
        return tuple(map(self._cell, self.directory.queue(), self._plans))

    def _cell(self, entry: Entry, plan: Plan) -> MeasuredCell:
        choices, result = self.directory.values(entry), self.directory.result(entry)
        run = Run(self.directory.run(entry))
        if result is None:
            return MeasuredCell(choices, plan, run.status.state if run.path.exists() else "waiting", None)
        if result.state != "finished":
            return MeasuredCell(choices, plan, result.state, None, result.reason)
        step_ms = float(np.median(run.history().step_ms[WARM_STEPS:]))
        machine = run.environment
        load = float(machine.get("load_average", 0.0)) / machine["cores"]
        return MeasuredCell(choices, plan, result.state, step_ms, peak_bytes=run.row()["peak_bytes"], load=load)

    def measured(self) -> tuple[MeasuredCell, ...]:
        """Return the cells that were measured, fastest first."""
        return tuple(sorted((c for c in self.cells() if c.step_ms is not None), key=lambda cell: cell.step_ms or 0.0))

    @property
    def rank_correlation(self) -> float:
        """Return Spearman's correlation of predicted and measured steps; NaN where either are all equal."""
        cells = self.measured()
        predicted, seen = _ranks([cell.predicted_ms for cell in cells]), _ranks([cell.step_ms or 0.0 for cell in cells])
        if len(set(predicted)) < 2 or len(set(seen)) < 2:
            return float("nan")
        return float(np.corrcoef(predicted, seen)[0, 1])

    @property
    def regret(self) -> float:
        """Return how much longer the planner's choice took than the fastest cell: 0.05 is 5 %; NaN where none ended."""
        cells = self.measured()
        return float(self._choice(cells).step_ms or 0.0) / float(cells[0].step_ms or 1.0) - 1 if cells else float("nan")

    def _choice(self, measured: Sequence[MeasuredCell]) -> MeasuredCell:
        """Return the cell with the fastest prediction; of equal ones the slowest, because nothing speaks against it."""
        return min(measured, key=lambda cell: (cell.predicted_ms, -(cell.step_ms or 0.0)))

    @property
    def ratio(self) -> float:
        """Return the slowest measured step as a multiple of the fastest; NaN where none was measured."""
        cells = self.measured()
        return float(cells[-1].step_ms or 0.0) / float(cells[0].step_ms or 1.0) if cells else float("nan")

    def sentences(self) -> list[str]:
        """Return how far the measurement has come and what it says."""
        cells, measured = self.cells(), self.measured()
        lines = [f"{len(measured)} of {len(cells)} cells measured, {self.state}. {self.why}"]
        if warning := contention(measured):
            lines.append(warning)
        if len(measured) > 1:
            chosen = self._choice(measured)
            lines.append(f"Rank correlation of predicted and measured steps: {self.rank_correlation:.2f}.")
            lines.append(f"The planner's choice ({chosen.name}) is {self.regret:.1%} behind the fastest measured cell.")
            lines.append(f"Fastest: {measured[0].name}; slowest: {measured[-1].name}, {self.ratio:.2f} times as long.")
        lines += [f"Failed: {cell.name}: {cell.reason}" for cell in cells if cell.state == "failed"]
        return lines

    def __repr__(self) -> str:
        return "\n".join([*self.sentences(), text_table(self._rows())])

    def _repr_html_(self) -> str:
        words = "<br>".join(map(html.escape, self.sentences()))
        return f"<p>{words}</p>{html_table(('cell', 'predicted', 'measured', 'state'), self._rows())}"

    def _rows(self) -> list[tuple[str, str, str, str]]:
        return [
            (
                cell.name,
                duration(cell.predicted_ms / 1e3),
                "" if cell.step_ms is None else duration(cell.step_ms / 1e3),
                cell.state,
            )
            for cell in self.cells()
        ]


def contention(cells: Sequence[MeasuredCell]) -> str:
    """Return a warning if the machine was busy with other work while cells were measured; else an empty string."""
    busy = [cell.load for cell in cells if cell.load >= BUSY]
    if not busy:
        return ""
    return (
        f"The machine was busy when {len(busy)} of {len(cells)} cells were measured (up to {max(busy):.1f} processes "
        "for each core): measure again when it is idle."
    )


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share the mean of theirs."""
    return [sum((other < value) + (other == value) / 2 for other in values) for value in values]


def start_measuring(
    experiment: Experiment,
    cells: Sequence[tuple[Mapping[str, Any], Plan]],
    why: str,
    directory: str | os.PathLike[str] | None,
) -> MeasuredGrid:
    """Start the queue of these cells, each with its choices and plan: one run at a time, on all devices of its plan."""
    entries = [Entry(index, choices, experiment.seed) for index, (choices, _) in enumerate(cells)]
    settings = {
        "experiment": experiment.resolved().to_json(),
        "packing": {"side_by_side": 1, "devices_each": cells[0][1].world, "share": 1.0, "why": why},
        "ahead": 0,  # the start of another run would take time from the steps that are measured
    }
    folder = new_queue(directory, f"{experiment.name}-grid", GRID)
    start_queue(folder, settings, entries, ((choices, experiment, plan) for choices, plan in cells))
    return MeasuredGrid(folder.path)


@checked_arguments
def load_grid(path: str | os.PathLike[str]) -> MeasuredGrid:
    """Return the measurement in a directory, or of that name under the runs folder; raises `RunNotFound`."""
    return MeasuredGrid(find_queue(path, GRID, "measured grid"))
