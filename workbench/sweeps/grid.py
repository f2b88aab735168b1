"""A grid of plans: what the planner predicts for every combination of some choices, and why.

The best plan answers "what shall I run"; a grid answers "how much does it matter". Every cell is a plan of its own: the
choices of the cell are fixed, and the planner searches the rest.
"""

from __future__ import annotations

import html
import itertools
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from workbench.base.arguments import checked_arguments
from workbench.base.display import html_table, text_table, waiting
from workbench.base.errors import InvalidArgument, PlanInfeasible, suggestion
from workbench.base.units import duration, gib, plain
from workbench.cost.hardware import TIMED, Cluster
from workbench.cost.profile import Profile
from workbench.experiment import PATHS, Experiment
from workbench.measure.detection import DISAGREEMENT
from workbench.planning.plan import Plan
from workbench.planning.planner import profile_and_cluster
from workbench.planning.request import Request, memory_limit_bytes, within_limits_of_optimizer
from workbench.planning.runnable import check_runnable, facts_for
from workbench.planning.search import checked_search, uncollected
from workbench.runs.launching.device_queue import devices_for
from workbench.runs.run import Run
from workbench.strategy import Choices, Fixed
from workbench.sweeps.queue import GRID, START_S, Entry, Queue, find_queue, new_queue, start_queue

MOST_CELLS = 5_000
MAY_BE_FASTEST = 1.27
"""Multiple of the best prediction up to which a cell might be the fastest: both are wrong by at most 12 %, the largest
error that the planner aims at (benchmarks/README.md), and 1.12 / 0.88 is 1.27."""
WORTH_NAMING = 0.1
"""Share of a step from which a part is named as what the step loses to."""


@dataclass(frozen=True)
class Cell:
    """One combination of choices: its plan, or why there is none."""

    choices: Mapping[str, Any]
    plan: Plan | None
    reason: str
    """Largest part of the step that is no useful computation, or the device that overflows, in a few words."""
    refusal: str = ""
    """The planner's whole sentence where there is no plan."""
    overflow_bytes: int | None = None
    """Bytes by which the fullest device exceeds what it offers, where that is why there is no plan."""

    @property
    def step_ms(self) -> float:
        """Predicted milliseconds of one step; infinite without a plan."""
        return math.inf if self.plan is None else self.plan.prediction.step_ms

    @property
    def name(self) -> str:
        """Return the cell's choices as they are written in a call."""
        return self.named(self.choices)

    def named(self, names: Iterable[str]) -> str:
        """Return these of the cell's choices as they are written in a call."""
        return ", ".join(f"{name}={self.choices[name]!r}" for name in names)


@dataclass(frozen=True, repr=False)
class Grid:
    """Predictions for every combination of some choices, in the order of the axes."""

    experiment: Experiment
    cluster: Cluster
    axes: Mapping[str, tuple[Any, ...]]
    cells: tuple[Cell, ...]

    @property
    def feasible(self) -> tuple[Cell, ...]:
        """The cells that have a plan, fastest first."""
        return tuple(sorted((cell for cell in self.cells if cell.plan is not None), key=lambda cell: cell.step_ms))

    @property
    def best(self) -> Cell:
        """The fastest cell; raises `PlanInfeasible` if no cell has a plan."""
        return self._checked_feasible()[0]

    @property
    def worst(self) -> Cell:
        """The slowest cell that has a plan; raises `PlanInfeasible` if none has."""
        return self._checked_feasible()[-1]

    @property
    def ratio(self) -> float:
        """Return the step of the worst cell as a multiple of the best one's."""
        return self.worst.step_ms / self.best.step_ms

    @property
    def varied(self) -> tuple[str, ...]:
        """The axes with more than one value; all axes if none has more."""
        return tuple(name for name, values in self.axes.items() if len(values) > 1) or tuple(self.axes)

    def cell(self, **choices: Any) -> Cell:
        """Return the cell of these choices; those with one value may be left out. Raises `InvalidArgument` for others.

        Its `plan` can be launched: `wb.launch(experiment, grid.cell(tensor=2, pipeline=1).plan)`.
        """
        complete = {**{name: values[0] for name, values in self.axes.items() if len(values) == 1}, **choices}
        for cell in self.cells:
            if cell.choices == complete:
                return cell
        values = "; ".join(f"{name}: {', '.join(map(repr, values))}" for name, values in self.axes.items())
        raise InvalidArgument(f"The grid has no cell {choices}. Give one value of each axis: {values}.")

    def _checked_feasible(self) -> tuple[Cell, ...]:
        if not self.feasible:
            raise PlanInfeasible(
                f"None of the {len(self.cells)} cells has a plan. The first says: {self.cells[0].refusal}"
            )
        return self.feasible

    @checked_arguments
    def measure(
        self,
        cells: str | int | Sequence[Cell] = "choice",
        steps: int = 12,
        directory: str | os.PathLike[str] | None = None,
    ) -> MeasuredGrid:
        """Train cells for some steps on this machine, one after the other, in processes that outlive this one.

        Args:
            cells: `"choice"` measures the cells whose prediction is so near to the best that they might be faster,
                `"all"` every cell that has a plan, a number as many of them from the fastest to the slowest, evenly by
                their rank, and a list these cells.
            steps: steps of each cell, of which the first three are not timed. The rate warms up over all of them.
            directory: the directory of the measurement; by default `<name>-grid-<time>` in `$WORKBENCH_RUNS`, or in
                `./runs`.

        The runs neither evaluate nor write checkpoints, and W&B does not track them. Raises `InvalidArgument` for cells
        that cannot be measured, and what `wb.launch` raises for a plan that this machine cannot run.
        """
        chosen, why = self._chosen(cells)
        if steps <= WARM_STEPS:
            raise InvalidArgument(f"steps={steps} times no step. Give more than {WARM_STEPS}, which are warm-up.")
        changes: dict[str, Any] = {"evaluation": None, "samples": None, "checkpoint_every": None, "project": ""}
        changes["norms_every"] = None
        # At the full rate from the first steps on, losses leap, by another amount under each plan's rounding and draws.
        warmup = None if callable(self.experiment.optimizer.lr_schedule) else steps
        short = self.experiment.replace(**changes, steps=steps, keep_checkpoints=0, warmup_steps=warmup, log_every=1)
        plans = [({n: cell.choices[n] for n in self.varied}, cell.plan) for cell in chosen if cell.plan is not None]
        start_s = START_S[self.cluster.device.type]
        seconds = sum(start_s + steps * plan.prediction.step_ms / 1e3 for _, plan in plans)
        why += f" Predicted time: {duration(seconds)}, with {duration(start_s)} to start each."
        facts = facts_for(short, plans[0][1])
        for _, plan in plans:
            devices_for(plan)
            check_runnable(short, plan, facts, progress=True)
        return start_measuring(short, plans, why, directory)

    def _chosen(self, cells: str | int | Sequence[Cell]) -> tuple[Sequence[Cell], str]:
        """Return the cells to measure, and why these."""
        feasible = self._checked_feasible()
        if cells == "all":
            return feasible, f"Every cell that has a plan is measured: {len(feasible)} of {len(self)}."
        if cells == "choice":
            near = [cell for cell in feasible if cell.step_ms <= MAY_BE_FASTEST * feasible[0].step_ms]
            return near, f"Measured are the cells predicted within {MAY_BE_FASTEST - 1:.0%} of the best: {len(near)}."
        if isinstance(cells, int) and 1 <= cells <= len(feasible):
            ranks = sorted({round(at * (len(feasible) - 1) / max(1, cells - 1)) for at in range(cells)})
            return [feasible[rank] for rank in ranks], f"Measured are {cells} of {len(feasible)} cells, evenly by rank."
        if isinstance(cells, int | str) or not cells:
            raise InvalidArgument(
                f"cells={cells!r} chooses no cell. Give 'all', 'choice', 1 to {len(feasible)}, or a list of cells."
            )
        without = next((cell for cell in cells if cell.plan is None), None)
        if without is not None:
            raise InvalidArgument(f"The cell {without.name} has no plan ({without.reason}). Leave it out.")
        return cells, f"{len(cells)} cells were asked for."

    def headline(self) -> str:
        """Return what the grid is of, in words."""
        return f"{self.experiment.model.name} on {self.cluster.describe()}, batch {self.experiment.global_batch}"

    def sentences(self) -> list[str]:
        """Return what the grid says: how many cells fit, the best and the worst, and how far they are apart."""
        count, feasible = len(self.cells), self.feasible
        fixed = [f"{name}={values[0]!r}" for name, values in self.axes.items() if name not in self.varied]
        words = f" with {', '.join(fixed)}" if fixed else ""
        lines = [f"{count} cells{words}, {len(feasible)} of them with a plan."]
        if feasible:
            best, worst = feasible[0], feasible[-1]
            assert worst.plan is not None
            assert best.plan is not None
            times = worst.plan.prediction.compute_ms / best.plan.prediction.compute_ms
            is_compute = worst.reason.startswith("compute") and worst is not best
            compute = f", {times:.2f} times that of the best" if is_compute else ""
            lines.append(f"Best: {self.in_words(best)}.")
            lines.append(f"Worst: {self.in_words(worst)}{compute}; {self.ratio:.2f} times the best.")
            device = self.cluster.device
            if device.type == "cpu" and device.basis == TIMED and self.cluster.gpus > 1:
                lines.append("How long CPU processes exchange data is assumed: wb.measure.calibrate() measures it.")
        return lines

    def in_words(self, cell: Cell) -> str:
        """Return a cell's choices, its step and the reason of it."""
        step = "" if cell.plan is None else f"{duration(cell.step_ms / 1e3)} a step, "
        return f"{cell.named(self.varied)}: {step}{cell.reason}"

    def rows(self) -> list[dict[str, Any]]:
        """Return a plain dictionary for each cell, in the order of the axes: for a data frame, or JSON."""
        return [
            {
                **cell.choices,
                "step_ms": None if cell.plan is None else cell.step_ms,
                "peak_bytes": None if cell.plan is None else cell.plan.peak_bytes,
                "plan": None if cell.plan is None else cell.plan.division(),
                "reason": cell.reason,
                "overflow_bytes": cell.overflow_bytes,
            }
            for cell in self.cells
        ]

    def __repr__(self) -> str:
        return "\n".join([self.headline(), *self.sentences()])

    def _repr_html_(self) -> str:
        words = "<br>".join(html.escape(line) for line in (self.headline(), *self.sentences()))
        rows = [
            [
                *(repr(cell.choices[name]) for name in self.varied),
                "" if cell.plan is None else duration(cell.step_ms / 1e3),
                "" if cell.plan is None else gib(cell.plan.peak_bytes),
                cell.reason,
            ]
            for cell in self
        ]
        return f"<p>{words}</p>{html_table((*self.varied, 'step', 'memory', 'reason'), rows)}"

    def __iter__(self) -> Iterator[Cell]:
        """Yield the cells: those that have a plan, fastest first, then the others."""
        return itertools.chain(self.feasible, (cell for cell in self.cells if cell.plan is None))

    def __len__(self) -> int:
        return len(self.cells)


@checked_arguments
def grid(
    experiment: Experiment,
    cluster: Cluster | None = None,
    *,
    memory_limit_gib: float | None = None,
    **axes: Any,
) -> Grid:
    """Predict a plan for every combination of some choices: `wb.grid(exp, tensor=[1, 2, 4], micro_batch=[1, 2, 4, 8])`.

    Args:
        experiment: what is trained.
        cluster: the devices, also those of a machine one does not have; this machine by default.
        memory_limit_gib: most memory of each device, in GiB.
        axes: values of the choices of a plan (`workbench.strategy.Choices`). A choice that is no axis is searched in
            each cell; one value fixes it.

    A cell without a plan says why; it does not end the grid. Raises `InvalidArgument` for an axis that is no choice of
    a plan, an empty axis or more than 5,000 cells, `PlanInfeasible` for a value that no plan can have, and what
    `wb.plan` raises for the experiment.

    Examples:
        >>> grid = wb.grid(experiment, zero=[0, 1], micro_batch=[1, 2])
        >>> len(grid)
        4
        >>> grid.best.plan.zero in (0, 1)
        True
    """
    values = _checked_axes(axes)
    limit = memory_limit_bytes(memory_limit_gib)
    cells, count = list[Cell](), math.prod(map(len, values.values()))
    with uncollected(), waiting(f"planning a grid of {experiment.model.name}") as say:
        profile, cluster = profile_and_cluster(experiment, cluster)
        request = Request.of(experiment, cluster, limit, Fixed(), profile.facts)  # counts held-out samples once
        for chosen in itertools.product(*values.values()):
            say(f"{len(cells):,} of {count:,} cells")
            cells.append(_predicted(experiment, profile, request, dict(zip(values, chosen, strict=True))))
    return Grid(experiment, cluster, values, tuple(cells))


def _checked_axes(axes: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return each axis with its different values; a value that is no list is an axis of one value."""
    if not axes:
        raise InvalidArgument("A grid needs an axis: wb.grid(experiment, tensor=[1, 2, 4], micro_batch=[1, 2, 4]).")
    checked: dict[str, tuple[Any, ...]] = {}
    for name, given in axes.items():
        if name not in Choices.__annotations__:
            trained = f"It is a value of the experiment: wb.sweep(experiment, {name}={given!r})."
            hint = trained if name in PATHS else suggestion(name, list(Choices.__annotations__))
            raise InvalidArgument(f"{name!r} is no choice of a plan. {hint}")
        is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
        listed = list(map(plain, given)) if is_list else [given]
        if not listed:
            raise InvalidArgument(f"The axis {name!r} has no values. Give a list, such as {name}=[1, 2, 4].")
        for value in listed:
            Fixed(**{name: value})  # raises
        checked[name] = tuple(dict.fromkeys(listed))
    count = math.prod(map(len, checked.values()))
    if count > MOST_CELLS:
        raise InvalidArgument(f"The grid has {count:,} cells, more than {MOST_CELLS:,}. Give fewer values.")
    return checked


def _predicted(experiment: Experiment, profile: Profile, request: Request, choices: Mapping[str, Any]) -> Cell:
    reach = "element" if profile.facts is None else profile.facts.reach
    try:
        request = replace(request, fixed=within_limits_of_optimizer(experiment, Fixed(**choices), reach))
        plan = checked_search(profile, profile.precision, request, advises=False).plan()
    except PlanInfeasible as error:
        return _without_plan(choices, error, request.cluster)
    name, share = lost_time(plan)
    return Cell(choices, plan, _reason(plan, name, share))


def _without_plan(choices: Mapping[str, Any], error: PlanInfeasible, cluster: Cluster) -> Cell:
    """Return a cell that says which device overflows and by how much, or why its choices make no plan."""
    needed, offered = error.facts.get("needed_bytes"), error.facts.get("offered_bytes")
    if needed is None or offered is None:
        return Cell(choices, None, str(error).partition(". ")[0], str(error))
    over, fullest = needed - offered, error.facts.get("fullest")
    if fullest is None:
        words = (
            f"the optimiser's state needs {gib(needed)} of the host for each device, {gib(over)} more than it offers"
        )
    else:
        words = f"{fullest} needs {gib(needed)}, {gib(over)} more than each {cluster.device.name} offers"
    return Cell(choices, None, words, str(error), over)


def lost_time(plan: Plan) -> tuple[str, float]:
    """Return the part of the step that is no useful computation and takes most, with its share of the step.

    The name is `compute`, with the share of all computation, where no part takes a tenth of the step.
    """
    predicted = plan.prediction
    parts = {
        "bubble": predicted.bubble_ms,
        "host-bound": predicted.host_ms,
        "communication": predicted.communication_ms,
        "optimiser": predicted.optimizer_ms,
        "uneven stages": predicted.compute_ms * _unevenness(plan)[1],
    }
    name = max(parts, key=parts.__getitem__)
    share = parts[name] / predicted.step_ms
    return (name, share) if share >= WORTH_NAMING else ("compute", predicted.compute_ms / predicted.step_ms)


def _unevenness(plan: Plan) -> tuple[int, float]:
    """Return the slowest pipeline rank, and the share of its time that it works longer than the mean rank."""
    ranks = [
        sum(stage.forward_ms + stage.backward_ms for stage in plan.stages_of(rank)) for rank in range(plan.pipeline)
    ]
    slowest = max(ranks)
    return ranks.index(slowest), 1 - sum(ranks) / len(ranks) / slowest


def _reason(plan: Plan, name: str, share: float) -> str:
    percent = f"{100 * share:.0f} %"
    if name == "host-bound":
        return f"host-bound: {percent} of the step"
    if name == "communication":
        return f"exposed communication {percent}"
    if name == "uneven stages":
        return f"uneven stages {percent}: pipeline rank {_unevenness(plan)[0]} is the slowest"
    recomputed = f", {plan.recompute_words()}" if name == "compute" and plan.recompute != "none" else ""
    return f"{name} {percent}{recomputed}"


# The measurement of a grid's cells: a queue of short trainings of one experiment, one plan after the other. A cell that
# fails is a marked cell with its sentence, and the others go on.

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
    """Processes that wanted each core in the minute before the run, or before the next one, whichever is more (load
    average over cores); 0 if unknown."""

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

    @property
    def axes(self) -> Mapping[str, tuple[Any, ...]]:
        """The choices of the cells with the values that occur, from the smallest; None, which was searched, is last."""
        choices = [self.directory.values(entry) for entry in self.directory.queue()]
        found = {name: {each[name] for each in choices} for name in choices[0]}
        return {name: (*sorted(values - {None}), *values & {None}) for name, values in found.items()}

    @property
    def varied(self) -> tuple[str, ...]:
        """The axes with more than one value; all axes if none has more."""
        return tuple(name for name, values in self.axes.items() if len(values) > 1) or tuple(self.axes)

    def cells(self) -> tuple[MeasuredCell, ...]:
        """Return the cells of the queue in its order, measured or not."""
        cells = list(map(self._cell, self.directory.queue(), self._plans))
        # The minute before a cell's run is that of the cell before it.
        return tuple(replace(c, load=max(c.load, after.load)) for c, after in itertools.pairwise([*cells, cells[-1]]))

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
            behind = (
                f"{self.regret:.1%} behind the fastest measured cell" if self.regret else "the fastest measured cell"
            )
            lines.append(f"The planner's choice ({chosen.name}) is {behind}.")
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


@checked_arguments
def verdict(holds: bool | None, cells: Sequence[MeasuredCell] = (), load: float = 0.0) -> str:
    """Say whether a claim about times holds, unless other work on the machine may have decided it.

    Args:
        holds: whether it holds by what was measured; None if nothing was.
        cells: the measured cells that it rests on.
        load: number of processes that wanted each core during other measurements that it rests on.

    Returns `confirmed`, `not confirmed`, `did not run`, or `not judged: …` where more than `BUSY` processes wanted each
    core, or half of the cells took `DISAGREEMENT` times as long as predicted.

    Examples:
        >>> wb.sweeps.verdict(True, load=4.5)
        'not judged: the machine was busy (4.5 processes wanted each core)'
    """
    if not 0 <= load < math.inf:
        raise InvalidArgument(f"load={load!r} is no number of processes. Give 0 or more for each core.")
    if holds is None:
        return "did not run"
    load = max([load, *(cell.load for cell in cells)])
    if load >= BUSY:
        return f"not judged: the machine was busy ({load:.1f} processes wanted each core)"
    times = statistics.median([cell.step_ms / cell.predicted_ms for cell in cells if cell.step_ms] or [1.0])
    if times >= DISAGREEMENT:
        return f"not judged: the median step took {times:.1f} times as long as predicted, as on a busy machine"
    return "confirmed" if holds else "not confirmed"


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
    """Return the measurement in the directory `path`, or of that name under the runs folder; raises `RunNotFound`."""
    return MeasuredGrid(find_queue(path, GRID, "measured grid"))
