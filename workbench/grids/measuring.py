"""The measurement of a grid's cells: a queue of short trainings that outlives the kernel.

The queue, its supervisor and its recovery are those of a sweep whose one axis is the cell; every cell has a plan of its
own. A cell that fails is a marked cell with its sentence, and the others go on.
"""

from __future__ import annotations

import contextlib
import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from workbench.arguments import checked_arguments
from workbench.errors import RunExists, RunNotFound
from workbench.experiment import Experiment
from workbench.planning.plan import Plan
from workbench.rundir import runs_root, write_json
from workbench.runs.launching import processes
from workbench.runs.launching.run_directory import new_directory, user_code
from workbench.runs.run import Run
from workbench.sweeps.directory import Entry, SweepDir
from workbench.sweeps.sweep import Sweep, start_supervisor
from workbench.units import duration

WARM_STEPS = 3
"""First steps of a cell that are not timed: they compile, allocate and fill caches."""
CELL = "cell"
"""Name of the only axis of the queue."""


class GridDir(SweepDir):
    """The directory of a measurement: that of a sweep whose entries are cells, with `grid.json` for `sweep.json`."""

    SUPERVISOR = "workbench.grids.supervisor"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.settings_file = path / "grid.json"

    def experiment(self, entry: Entry) -> Experiment:
        """Return the experiment, which is the same for every cell."""
        named = {"name": self.path.name, "seed": entry.seed}
        return Experiment.from_json({**self.settings["experiment"], **named})


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

    @property
    def predicted_ms(self) -> float:
        """Predicted milliseconds of one step."""
        return self.plan.prediction.step_ms

    @property
    def name(self) -> str:
        """Return the choices as they are written in a call."""
        return ", ".join(f"{name}={value!r}" for name, value in self.choices.items())


class MeasuredGrid:
    """The measurement of some cells of a grid, read from its directory; it works from any kernel."""

    @checked_arguments
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._queue = Sweep(path)
        self._queue.directory = GridDir(self.path)

    @cached_property
    def _plans(self) -> list[Plan]:
        return [self._queue.directory.plan(entry) for entry in self._queue.directory.queue()]

    @property
    def alive(self) -> bool:
        """Return True while the supervisor of the queue is at work."""
        return self._queue.alive

    @property
    def complete(self) -> bool:
        """Return True if every cell has been measured or has failed."""
        return self._queue.complete

    @checked_arguments
    def wait(self, timeout: float | None = None) -> MeasuredGrid:
        """Block until every cell has ended, or until `timeout` seconds have passed.

        Raises `WorkbenchError` if the supervisor vanished before; `resume` goes on.
        """
        self._queue.wait(timeout)
        return self

    @checked_arguments
    def stop(self, wait: bool = False) -> MeasuredGrid:
        """Ask the run at work to leave and start no other; `resume` goes on. `wait` returns when it has left."""
        self._queue.stop(wait)
        return self

    def resume(self) -> MeasuredGrid:
        """Go on with the cells that were not measured, and with those that failed."""
        self._queue.resume()
        return self

    def cells(self) -> tuple[MeasuredCell, ...]:
        """Return the cells of the queue in its order, measured or not."""
        directory, entries = self._queue.directory, self._queue.directory.queue()
        choices = directory.settings["choices"]
        return tuple(
            self._cell(choices[entry.choice[CELL]], plan, entry)
            for entry, plan in zip(entries, self._plans, strict=True)
        )

    def _cell(self, choices: Mapping[str, Any], plan: Plan, entry: Entry) -> MeasuredCell:
        directory = self._queue.directory
        result, path = directory.result(entry), directory.run(entry)
        if result is None:
            return MeasuredCell(choices, plan, Run(path).status.state if path.exists() else "waiting", None)
        if result.state != "finished":
            return MeasuredCell(choices, plan, result.state, None, result.reason)
        run = Run(path)
        step_ms = float(np.median(run.history().step_ms[WARM_STEPS:]))
        return MeasuredCell(choices, plan, result.state, step_ms, peak_bytes=run.summary()["peak_bytes"])

    def measured(self) -> tuple[MeasuredCell, ...]:
        """Return the cells that were measured, fastest first."""
        return tuple(sorted((c for c in self.cells() if c.step_ms is not None), key=lambda cell: cell.step_ms or 0.0))

    @property
    def rank_correlation(self) -> float:
        """Return Spearman's correlation of predicted and measured steps; NaN for fewer than two measured cells."""
        cells = self.measured()
        if len(cells) < 2:
            return float("nan")
        ranks = np.argsort(np.argsort([cell.predicted_ms for cell in cells]))
        return float(np.corrcoef(ranks, np.arange(len(cells)))[0, 1])

    @property
    def regret(self) -> float:
        """Return how much longer the planner's choice took than the fastest cell: 0.05 is 5 %; NaN where none ended."""
        cells = self.measured()
        if not cells:
            return float("nan")
        chosen = min(cells, key=lambda cell: cell.predicted_ms)
        return float(chosen.step_ms or 0.0) / float(cells[0].step_ms or 1.0) - 1

    @property
    def ratio(self) -> float:
        """Return the slowest measured step as a multiple of the fastest; NaN where none was measured."""
        cells = self.measured()
        return float(cells[-1].step_ms or 0.0) / float(cells[0].step_ms or 1.0) if cells else float("nan")

    def sentences(self) -> list[str]:
        """Return how far the measurement has come and what it says."""
        cells, measured = self.cells(), self.measured()
        state = "at work" if self.alive else "complete" if self.complete else "not at work; resume() goes on"
        lines = [f"{len(measured)} of {len(cells)} cells measured, {state}. {self._queue.directory.settings['why']}"]
        if len(measured) > 1:
            chosen = min(measured, key=lambda cell: cell.predicted_ms)
            lines.append(f"Rank correlation of predicted and measured steps: {self.rank_correlation:.2f}.")
            lines.append(f"The planner's choice ({chosen.name}) is {self.regret:.1%} behind the fastest measured cell.")
            lines.append(f"Fastest: {measured[0].name}; slowest: {measured[-1].name}, {self.ratio:.2f} times as long.")
        lines += [f"Failed: {cell.name}: {cell.reason}" for cell in cells if cell.state == "failed"]
        return lines

    def __repr__(self) -> str:
        return "\n".join([*self.sentences(), *("  ".join(row) for row in self._rows())])

    def _repr_html_(self) -> str:
        words = "<br>".join(map(html.escape, self.sentences()))
        head = "".join(f"<th>{name}</th>" for name in ("cell", "predicted", "measured", "state"))
        rows = "".join(f"<tr>{''.join(f'<td>{html.escape(word)}</td>' for word in row)}</tr>" for row in self._rows())
        return f"<p>{words}</p><table><tr>{head}</tr>{rows}</table>"

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


def start_measuring(
    experiment: Experiment,
    cells: Sequence[tuple[Mapping[str, Any], Plan]],
    why: str,
    directory: str | os.PathLike[str] | None,
) -> MeasuredGrid:
    """Write the queue of these cells, each with its choices and plan, and start its supervisor."""
    if directory is None:
        path = new_directory(f"{experiment.name}-grid")
    else:
        path = Path(directory).expanduser().absolute()
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunExists(f"{path} is not empty. Choose another directory, or go on: wb.load_grid(path).resume().")
    folder = GridDir(path)
    entries = [Entry(index, {CELL: index}, experiment.seed) for index in range(len(cells))]
    for entry, (_, plan) in zip(entries, cells, strict=True):
        folder.plan_file(entry.choice).parent.mkdir(parents=True, exist_ok=True)
        plan.save(folder.plan_file(entry.choice))
    code = folder.code_folder({})
    code.mkdir(parents=True)
    for name, content in user_code(experiment).items():
        (code / name).write_bytes(content)
    folder.write_queue(entries)
    names = ["-".join(f"{name}.{value}" for name, value in choices.items()) for choices, _ in cells]
    settings = {
        "experiment": experiment.to_json(),
        "choices": [dict(choices) for choices, _ in cells],
        "axes": {CELL: names},
        "seeds": [experiment.seed],
        "sampler": "grid",
        "trials": None,
        "stop": None,
        "placement": {"side_by_side": 1, "devices_each": cells[0][1].world, "why": why},
        "why": why,
        "worker": processes.WORKER,
    }
    write_json(folder.settings_file, settings)
    start_supervisor(folder)
    return MeasuredGrid(path)


@checked_arguments
def load_grid(path: str | os.PathLike[str]) -> MeasuredGrid:
    """Return the measurement in a directory, or of that name under the runs folder; raises `RunNotFound`."""
    for candidate in (Path(path).expanduser(), runs_root() / path):
        with contextlib.suppress(OSError):  # a name that is too long
            if GridDir(candidate).settings_file.is_file():
                return MeasuredGrid(candidate)
    names = sorted(file.parent.name for file in runs_root().glob("*/grid.json"))
    hint = f"There are {', '.join(names[-5:])}." if names else f"There are none in {runs_root()} yet."
    raise RunNotFound(f"There is no measured grid {str(path)!r}. {hint}", grid=str(path))
