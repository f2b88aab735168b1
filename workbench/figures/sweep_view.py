"""Figures of sweeps and of grids of plans.

Of a sweep: the objective over its axes, the best so far, and curves with bands over the seeds. Of plans: a heat map of
the predicted speed over two or more choices, efficiency against linear scaling, predictions beside measurements, and
memory against speed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.analysis.curve import X_AXES, Array, check_axis, finite_points
from workbench.analysis.pareto import pareto_front
from workbench.analysis.seed_contrast import described_runs, group_names, seed_groups
from workbench.base.arguments import checked_arguments
from workbench.base.errors import InvalidArgument, PlanMismatch, UnknownParameter, suggestion
from workbench.base.units import STEP_TIME, duration, gib, memory_unit, suited
from workbench.figures import theme
from workbench.figures.curves_view import robust_range
from workbench.figures.figure import Figure
from workbench.planning.plan import Plan
from workbench.planning.planner import Plans
from workbench.record.history import Evaluations, History, read_tail
from workbench.runs.registry import Runs, load_runs
from workbench.runs.run import Run
from workbench.sweeps.grid import Cell, Grid, MeasuredCell, MeasuredGrid, contention, lost_time
from workbench.sweeps.queue import label_text
from workbench.sweeps.sweep import Configuration, Sweep

BUDGETS = ("step", "gpu_hours")
"""Names of the x axes of `best_so_far`."""
NO_VALUE = "–"
"""Mark of a cell of a heat map without a value."""
ENDED_EARLY = ("stopped early", "stopped", "failed")
"""States of a run that has ended without an objective."""
SHORT = {"pipeline": "PP", "data": "DP", "tensor": "TP", "zero": "ZeRO"}
ROW_PX, ROOM_PX = 40, 210
POINTS = 300
"""Largest number of points of a curve."""
AXES_LETTERS = 18
"""Letters of a line of the legend's title, beside which a narrow figure has room for the curves."""
MOST_DOTS = 60
"""Largest number of held-out values of a configuration that are dots on its line."""
MAX_CONFIGURATIONS = 24
"""Largest number of configurations with a curve."""
LOSSES = {"loss": "Training loss", "eval_loss": "Held-out loss"}
"""Title of the y axis by the name of a loss that `y=` takes."""
Losses = tuple[History, Evaluations]
"""Training losses and held-out losses of one run."""
Line = tuple[Array, Array]
"""Positions and losses of one run."""


@checked_arguments
def heat_map(sweep: Sweep | Grid | MeasuredGrid, x: str | None = None, y: str | None = None) -> Figure:
    """Draw the mean objective of a sweep over two of its axes; other axes show the best of their values.

    Of a grid of plans it draws the predicted speed, and of a measured grid the measured one, with all other axes along
    the height.

    Args:
        sweep: the sweep, at work or complete, a grid, or a measured grid. A cell has no colour without a finished run
            or a plan; it says whether its runs were stopped or failed, or by how much its plan overflows.
        x: axis along the width; by default the first of a sweep, the last of a grid with several values.
        y: axis along the height; by default the second of a sweep, if there is one.

    Raises `UnknownParameter` for an axis that the sweep lacks.
    """
    axes = list(sweep.axes)
    if isinstance(sweep, Grid | MeasuredGrid):
        x = sweep.varied[-1] if x is None else x
        if x not in axes or y is not None:
            wrong = y if x in axes else x
            raise UnknownParameter(
                f"{wrong!r} cannot be an axis here. Give x, one of {', '.join(axes)}; the others make up the height."
            )
        return draw_grid(sweep, x)
    x, y = axes_of_heat_map(axes, x, y)
    for name in (x, y):
        if name is not None and name not in axes:
            raise UnknownParameter(f"The sweep has no axis {name!r}. {suggestion(name, axes)}")
    return draw_heat_map(sweep, sweep.rows(), x, y)


def axes_of_heat_map(axes: Sequence[str], x: str | None = None, y: str | None = None) -> tuple[str, str | None]:
    """Return the axes of a heat map: those that are given, else the first ones that are left."""
    x = x or next(name for name in axes if name != y)
    return x, y or next((name for name in axes if name != x), None)


def draw_heat_map(sweep: Sweep, rows: Sequence[Configuration], x: str, y: str | None) -> Figure:
    """Draw the figure of `heat_map` from rows of the sweep."""
    columns = _in_order([row.values[x] for row in rows])
    lines = [""] if y is None else _in_order([row.values[y] for row in rows])
    grid, words = np.full((len(lines), len(columns)), np.nan), [[""] * len(columns) for _ in lines]
    for row in reversed(rows):  # the best comes last and is kept
        line, column = 0 if y is None else lines.index(str(row.values[y])), columns.index(str(row.values[x]))
        ended = ", ".join(state for state in ENDED_EARLY if state in row.states)
        if row.mean is not None:
            survived = f"<br>{len(row.objectives)} of {len(row.states)} seeds" if ended else ""
            grid[line, column], words[line][column] = row.mean, f"{row.mean:.4g}{survived}"
        else:  # a configuration none of whose runs has an objective says how they ended
            ended = ended or "not finite" * bool(row.finished)
            words[line][column] = theme.text(ended) or words[line][column]
    hover = f"{theme.text(x)} %{{x}}<br>{theme.text(y or '')} %{{y}}<br>%{{hovertext}}<extra></extra>"
    bar = {"title": {"text": "objective"}}
    # The lowest is the best, and yellow as in a grid of plans.
    figure = _colored(columns, lines, words, z=grid, reversescale=True, colorbar=bar, hovertemplate=hover)
    figure.update_xaxes(title_text=theme.text(x))
    figure.update_yaxes(title_text=theme.text(y or ""))
    main = theme.title(theme.text(sweep.name), theme.text(f"{sweep.objective}, mean over the seeds"))
    return figure.laid_out(height=200 + 60 * max(3, len(lines)), title=main)


@checked_arguments
def parallel_coordinates(sweep: Sweep) -> Figure:
    """Draw a line for each configuration of a sweep through its value on every axis, coloured by its mean objective.

    Configurations without a finished run are left out. Dragging along an axis in the figure selects lines.
    """
    rows = [row for row in sweep.rows() if row.mean is not None]
    means = [row.mean for row in rows]
    dimensions: list[dict[str, Any]] = []
    for name in sweep.axes:  # each value that was tried has a tick, and ticks have equal distances
        values = [row.values[name] for row in rows]
        ticks = _in_order(values)
        axis = {"label": theme.text(name), "values": [ticks.index(str(value)) for value in values]}
        words = {"tickvals": list(range(len(ticks))), "ticktext": [theme.text(theme.short(tick, 18)) for tick in ticks]}
        dimensions.append({**axis, **words, "range": [-0.1, max(1, len(ticks) - 1) + 0.1]})
    dimensions.append({"label": "objective", "values": means})
    line = {"color": means, "colorscale": "Viridis", "reversescale": True, "showscale": False}
    figure = Figure(go.Parcoords(dimensions=dimensions, line=line, labelfont={"size": theme.FONT_PX}))
    main = theme.title(theme.text(sweep.name), theme.text(f"{sweep.objective}, mean over the seeds"))
    return figure.laid_out(height=440, title=main, margin={"t": 134, "b": 36, "l": 80, "r": 80})


@checked_arguments
def best_so_far(sweep: Sweep, x: str = "step") -> Figure:
    """Draw the objective of each finished run, and the lowest so far, against what the sweep had spent by then.

    `x` is `step` (training steps of all runs that had ended) or `gpu_hours` (devices times training time). Runs that
    were stopped early or failed count with what they spent. Raises `UnknownParameter` for another `x`.
    """
    if x not in BUDGETS:
        raise UnknownParameter(f"x={x!r} is not a budget. {suggestion(x, BUDGETS)}")
    ended = sorted(sweep.results(), key=lambda pair: pair[1].ended)
    spent = np.cumsum([result.steps if x == "step" else result.gpu_hours for _, result in ended], dtype=np.float64)
    known = [at for at, (_, result) in enumerate(ended) if result.objective is not None]
    values = np.array([ended[at][1].objective for at in known], dtype=np.float64)
    scale, x_title = X_AXES[x].unit(float(spent[-1]) if len(spent) else 1.0)
    at, best = spent[known] / scale, np.minimum.accumulate(values) if len(values) else values
    end = spent[-1 if len(known) else len(spent) :] / scale  # the line goes on to the end of the last run
    labels = [sweep.directory.labels(ended[at][0]) for at in known]
    names = [theme.text(", ".join(f"{name} {label_text(value)}" for name, value in each.items())) for each in labels]
    words = [f"{name}, seed {ended[i][0].seed}" for name, i in zip(names, known, strict=True)]
    color = theme.series_color(0)
    runs = theme.marks(at, values, "one run", {"color": theme.pale(color), "size": 8}, words)
    runs.hovertemplate = "%{y:.4g}<br>%{text}<extra></extra>"
    steps = np.concatenate([at, end]), np.concatenate([best, best[-1:]])
    figure = Figure([runs, theme.curve(*steps, "best so far", color, line_shape="hv")])
    figure.update_xaxes(title_text=f"{x_title} of all runs", rangemode="tozero")
    figure.update_yaxes(title_text="objective")
    main = theme.title(theme.text(sweep.name), theme.text(f"{sweep.objective} of each run when it ended"))
    return figure.laid_out(height=440, title=main, margin={"t": 84, "b": 92}, legend=theme.LEGEND_BELOW)


def _in_order(values: Sequence[Any]) -> list[str]:
    """Return the values of an axis as text, numbers in rising order."""
    numbers = all(isinstance(value, int | float) for value in values)
    return [str(value) for value in (sorted(set(values)) if numbers else sorted(set(values), key=str))]


@dataclass(frozen=True)
class _Tile:
    """One cell of a heat map of plans, as it is drawn."""

    step_ms: float = np.nan
    words: str = ""
    hover: str = ""


def draw_grid(grid: Grid | MeasuredGrid, x: str) -> Figure:
    """Draw a cell for each combination: choice `x` along the width, all others along the height.

    The colour is the speed as a share of the best cell's. A predicted cell shows its step and what the step loses most
    to, a measured one its step and the prediction's error. The best and the worst cell have a frame. A cell without a
    plan says by how much it overflows, or has a dash where its degrees make no plan; the whole reason is under the
    mouse.
    """
    others = [name for name in grid.varied if name != x]
    short = [SHORT.get(name, name) for name in others]
    rows = list(itertools.product(*(grid.axes[name] for name in others)))
    cells: Sequence[Cell | MeasuredCell] = grid.cells if isinstance(grid, Grid) else grid.cells()
    found = {tuple(cell.choices[name] for name in (*others, x)): _tile(cell) for cell in cells}
    tiles = [[found.get((*row, value), _Tile()) for value in grid.axes[x]] for row in rows]
    steps_ms = np.array([[each.step_ms for each in line] for line in tiles])
    has_step = bool(np.isfinite(steps_ms).any())
    figure = _colored(
        [str(value) for value in grid.axes[x]],
        [theme.text(" · ".join(f"{n} {v}" for n, v in zip(short, row, strict=True))) for row in rows],
        [[each.words for each in line] for line in tiles],
        z=((np.nanmin(steps_ms) if has_step else np.nan) / steps_ms).tolist(),
        zmin=0,
        zmax=1,
        customdata=[[each.hover for each in line] for line in tiles],
        hovertemplate="%{customdata}<extra></extra>",
        colorbar={"title": {"text": "speed"}, "tickformat": ".0%"},
    )
    for extreme, color in ((np.nanargmin, theme.INK), (np.nanargmax, theme.ALERT)) if has_step else ():
        row, column = np.unravel_index(int(extreme(steps_ms)), steps_ms.shape)
        corners = {"x0": column - 0.5, "x1": column + 0.5, "y0": row - 0.5, "y1": row + 0.5}
        # In a dark theme, a frame keeps its colour: without the pale one around it, it would not stand out there.
        figure.add_shape(type="rect", line={"color": theme.PAPER, "width": 8}, **corners)
        figure.add_shape(type="rect", line={"color": color, "width": 4}, **corners)
    figure.update_xaxes(title_text=theme.text(x))
    figure.update_yaxes(autorange="reversed")
    headline = grid.headline() if isinstance(grid, Grid) else grid.name
    subtitle = "<br>".join(theme.text(line) for line in grid.sentences()[:3])
    title = theme.title(theme.text(headline), subtitle)
    height = ROOM_PX + ROW_PX * max(3, len(rows))
    return figure.laid_out(height=height, title=title, margin={"t": 90})


def _tile(cell: Cell | MeasuredCell) -> _Tile:
    if isinstance(cell, MeasuredCell):
        hover = theme.text(f"{cell.name}: {cell.plan.describe()}{cell.reason and ', '}{cell.reason}")
        if cell.step_ms is None:
            return _Tile(words=theme.text(cell.state), hover=hover)
        error = cell.predicted_ms / cell.step_ms - 1
        return _Tile(cell.step_ms, f"{duration(cell.step_ms / 1e3)}<br>predicted {error:+.0%}", hover)
    if cell.plan is None:
        words = "" if cell.overflow_bytes is None else f"+ {gib(cell.overflow_bytes)}"
        return _Tile(words=words, hover=theme.text(f"{cell.name}: {cell.reason}"))
    name, share = lost_time(cell.plan)
    words = f"{duration(cell.step_ms / 1e3)}<br>{name} {100 * share:.0f} %"
    return _Tile(cell.step_ms, words, theme.text(f"{cell.name}: {cell.plan.describe()}, {cell.reason}"))


def _colored(x: list[str], y: list[str], words: list[list[str]], **fields: Any) -> Figure:
    """Return a heat map over words along both axes, with words in its cells.

    Words of cells without a value are annotations, which have the colours of the page and not of a cell.
    """
    look = {"texttemplate": "%{text}", "colorscale": "Viridis", "xgap": 2, "ygap": 2}
    known = np.isfinite(np.array(fields["z"], dtype=np.float64))
    drawn = [[word if at else "" for word, at in zip(*line, strict=True)] for line in zip(words, known, strict=True)]
    figure = Figure(go.Heatmap(x=x, y=y, text=drawn, hovertext=words, **look, **fields))
    quiet = {"showarrow": False, "font": {"color": theme.MUTED}}
    figure.layout.annotations = [
        {"x": column, "y": row, "text": words[row][column] or NO_VALUE, **quiet}
        for row, column in np.argwhere(~known).tolist()
    ]
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(type="category", showgrid=False)
    return figure.laid_out()


@checked_arguments
def seed_bands(runs: Sweep | Runs, x: str = "tokens", y: str | None = None) -> Figure:
    """Draw the mean curve of each configuration with a band from its lowest to its highest seed.

    The mean is over the finished runs, up to the end of the shortest. Other runs are thin lines in the colour of
    their configuration. A few held-out values are dots on the line. Of more than 24 configurations, those at work and
    the best are drawn.

    Args:
        runs: a sweep, at work or complete, or runs, of which those that differ in their seed alone are one
            configuration.
        x: x axis: `step`, `tokens`, `samples`, `time`, `flops` or `gpu_hours`.
        y: `loss`, `eval_loss`, or a metric of the held-out samples; by default the held-out loss if there is one.

    Raises `UnknownParameter` for another axis or metric.
    """
    check_axis(x)
    if isinstance(runs, Sweep):
        return draw_seed_bands(runs, runs.rows(), read_losses, x, y)
    handles = load_runs(runs)
    described = described_runs(handles)
    groups = seed_groups(described)
    named = group_names([described[group[0]] for group in groups])
    rows = []
    for index, (group, name) in enumerate(zip(groups, named, strict=True)):
        own = tuple(handles[at] for at in group)
        states = tuple(run.status.state for run in own)
        finished = tuple(run for run, state in zip(own, states, strict=True) if state == "finished")
        at_work = tuple(run for run in own if not run.status.final)
        rows.append(Configuration(index, {"": name}, own, finished, at_work, states, ()))
    return draw_seed_bands(None, rows, read_losses, x, y)


def read_losses(run: Run) -> Losses:
    """Return the losses of a run."""
    tail = read_tail(run.directory.events)
    return tail.read(), tail.evaluations


def draw_seed_bands(
    sweep: Sweep | None,
    rows: Sequence[Configuration],
    read: Callable[[Run], Losses] = read_losses,
    x: str = "tokens",
    y: str | None = None,
) -> Figure:
    """Draw the figure of `seed_bands` from its rows and a function that returns the losses of a run."""
    configs = [run.config for row in rows for run in row.runs]
    configs += [] if sweep is None else [sweep.directory.settings["experiment"]]
    evaluations = [config["evaluation"] for config in configs if config.get("evaluation")]
    is_chosen, y = y is not None, y or ("eval_loss" if len(evaluations) == len(configs) else "loss")
    metrics = {name for each in evaluations for name in each.get("metrics") or {}}
    if y not in {*LOSSES, *metrics}:
        raise UnknownParameter(f"y={y!r} is no loss and no metric of these runs. {suggestion(y, {*LOSSES, *metrics})}")
    shown = sorted(rows, key=lambda row: not row.at_work)[:MAX_CONFIGURATIONS]
    shown = [row for row in rows if row in shown]
    lines: dict[Path, Line] = {}
    losses = {run.path: read(run) for row in shown for run in row.runs}
    if not (is_chosen or any(len(evaluated) for _, evaluated in losses.values())):
        y = "loss"  # until the first evaluation
    for path, (history, evaluated) in losses.items():
        along, source = X_AXES[x].column, history if y == "loss" else evaluated
        begun = y in LOSSES or y in evaluated.metrics
        lines[path] = finite_points(source[along], source[y], POINTS) if begun else (np.empty(0), np.empty(0))
    longest = max((float(line[0][-1]) for line in lines.values() if len(line[0])), default=1.0)
    scale, x_title = X_AXES[x].unit(longest)
    figure, seeds, unfinished = Figure(), set[int](), 0
    for row in shown:
        finished = [lines[run.path] for run in row.finished if len(lines[run.path][0]) > 1]
        others = [lines[run.path] for run in row.runs if run not in row.finished and len(lines[run.path][0])]
        figure.add_traces(_traces(row, finished, others, scale, y))
        seeds, unfinished = seeds | {len(finished)}, unfinished + len(others)
    figure.update_xaxes(title_text=x_title, rangemode="tozero")
    if not figure.data:
        figure.without_values("no run has a loss yet")
    y_range = robust_range([line[1] for line in lines.values() if len(line[1])]) if y in LOSSES else None
    beyond = sum(bool(len(loss)) and float(loss.max()) > (y_range or (0, np.inf))[1] for _, loss in lines.values())
    quantity = LOSSES.get(y, f"Held-out {theme.text(y)}")
    figure.update_yaxes(title_text=quantity, **({"range": y_range} if figure.data else {}))
    left_out = f"; {beyond} of {len(lines)} runs leave the axis" if beyond else ""
    left_out += f"; {len(rows) - len(shown)} configurations are left out" if len(rows) > len(shown) else ""
    number = "the finished" if seeds <= {0} or len(seeds) > 1 else max(seeds)
    thin = "; thin lines: other runs" if unfinished else ""
    bands = "One seed of each" if number == 1 else f"Mean over {number} seeds, whose band holds them all"
    words = f"{bands}{thin}{left_out}"
    if sweep is None:
        return figure.laid_out(height=460, title=theme.title(quantity, words), hovermode="x unified", margin={"t": 84})
    main = theme.title(theme.text(sweep.name), words)
    axes = theme.broken(theme.text(" · ".join(sweep.axes)), AXES_LETTERS)
    legend = {"title": {"text": axes, "font": {"size": theme.FONT_PX}}}
    return figure.laid_out(height=460, title=main, hovermode="x unified", margin={"t": 84}, legend=legend)


def _traces(
    row: Configuration, finished: Sequence[Line], others: Sequence[Line], scale: float, y: str
) -> list[go.Scatter]:
    """Return the band and the mean of the finished runs of a configuration, and its other runs as thin lines."""
    color = theme.series_color(row.index)
    values = theme.short(" · ".join(map(str, row.values.values())), theme.LETTERS_INSIDE)
    words = theme.text(values)  # the legend's title names the axes
    shared = {"legendgroup": str(row.index), "name": words}
    look = {**shared, "color": color, "dash": theme.series_dash(row.index)}
    traces = []
    if finished:
        # Mean, lowest and highest loss over the runs, where all of them have been.
        first, last = max(float(x[0]) for x, _ in finished), min(float(x[-1]) for x, _ in finished)
        places = np.unique(np.concatenate([x for x, _ in finished]))
        x = places[(places >= first) & (places <= last)]
        x = np.linspace(first, last, POINTS) if len(x) > POINTS else x
        losses = np.array([np.interp(x, at, loss) for at, loss in finished])
        traces.append(theme.band(x / scale, losses.min(axis=0), losses.max(axis=0), color, **shared))
        traces.append(theme.curve(x / scale, losses.mean(axis=0), meta="mean", **look))
        if y != "loss" and len(x) <= MOST_DOTS:
            traces[-1].update(mode="lines+markers", marker={"size": 6, "color": color})
    for at, (x, loss) in enumerate(others):
        quiet = {"hoverinfo": "skip", "showlegend": not finished and at == 0, "meta": "other"}
        traces.append(theme.curve(x / scale, loss, width=1, **quiet, **look))
        if y != "loss" and len(x) <= MOST_DOTS:  # of a run at work, one evaluation alone is no line
            traces[-1].update(mode="lines+markers", marker={"size": 4, "color": color})
    return traces


# Plans and grids of plans: efficiency against linear scaling, predicted and measured steps, memory and speed.

PARTS = {
    "compute_ms": ("compute", theme.pale(theme.PALETTE[0], 0.45)),
    "communication_ms": ("exposed communication", theme.PALETTE[1]),
    "bubble_ms": ("bubble", theme.PALETTE[3]),
    "host_ms": ("waiting for the host", theme.PALETTE[6]),
    "optimizer_ms": ("optimiser", theme.PALETTE[2]),
}
"""Label and colour of each part of a predicted step, in the order in which they are stacked."""
GAP = 0.4
"""Distance between bars of different numbers of devices, beyond that of others, in bars."""
WORTH_A_LEGEND = 0.002
"""Share of a step below which a part of all plans is left out."""
SYMBOLS = {"none": "circle", "selective": "diamond", "full": "square", "mixed": "triangle-up"}
"""Mark of each kind of activation checkpointing; `mixed` is that of plans whose blocks differ in it."""
SHARDINGS = ("plain split", "replicas", "ZeRO 1", "ZeRO 2", "ZeRO 3")
"""Names of `_Point.sharding`; the position of each is that of its colour."""
CHECKPOINTING = {"none": "no checkpointing", "selective": "selective", "full": "full", "mixed": "in some blocks"}


@checked_arguments
def scaling_efficiency(points: Sequence[Plan | MeasuredCell]) -> Figure:
    """Draw the device time of a token under several plans, relative to the first: linear scaling has height 1.

    A bar is a predicted step, stacked by its parts: what stands above 1 is the gap to linear scaling. The percentage in
    it is the predicted efficiency, which is 1 over the height. A diamond, with its efficiency, is the measured step
    relative to the measured step of the first point.

    Args:
        points: plans, which are predicted only, and measured cells of grids (`measured.cells()`), of one model; the
            first is what the others are compared with, usually on one device.

    Raises `InvalidArgument` without a point, and `PlanMismatch` for plans of several models.
    """
    plans = [point if isinstance(point, Plan) else point.plan for point in points]
    if not plans:
        raise InvalidArgument("No plan is given. Give a list, the plan on one device first.")
    other = next((plan for plan in plans if plan.signature != plans[0].signature), None)
    if other is not None:
        raise PlanMismatch(
            f"The plans are of two models, {plans[0].model} and {other.model} (signatures {plans[0].signature} and "
            f"{other.signature}). Draw a figure for each."
        )
    base = device_ms_per_token(plans[0], plans[0].prediction.step_ms)
    gaps = np.cumsum([0, *(plan.world != before.world for before, plan in pairwise(plans))])
    places = [float(at + GAP * gap) for at, gap in enumerate(gaps)]
    # The bars of each part of the steps, but of those that are nothing in all of them.
    figure = Figure()
    for part, (name, color) in PARTS.items():
        parts = [float(getattr(plan.prediction, part)) for plan in plans]
        shares = [ms / plan.prediction.step_ms for plan, ms in zip(plans, parts, strict=True)]
        if max(map(abs, shares)) >= WORTH_A_LEGEND:
            y = [device_ms_per_token(plan, ms) / base for plan, ms in zip(plans, parts, strict=True)]
            words = [
                f"{theme.text(plan.describe())}<br>{name}: {duration(ms / 1e3)}, {share:.1%}"
                for plan, ms, share in zip(plans, parts, shares, strict=True)
            ]
            look = {"name": name, "width": 0.7, "marker": {"color": color}}
            figure.add_bar(x=places, y=y, customdata=words, hovertemplate="%{customdata}<extra></extra>", **look)
    heights = [device_ms_per_token(plan, plan.prediction.step_ms) / base for plan in plans]
    # What was measured is drawn relative to the first point, and so only where that was measured, too.
    cells = {at: point for at, point in enumerate(points) if isinstance(point, MeasuredCell)}
    steps = {at: cell.step_ms for at, cell in cells.items() if cell.step_ms is not None}
    times = {at: device_ms_per_token(plans[at], ms) for at, ms in steps.items()}
    marks = {at: value / times[0] for at, value in times.items()} if 0 in times else {}
    told = {at: f"measured {duration(steps[at] / 1e3)} a step, efficiency {1 / h:.0%}" for at, h in marks.items()}
    reasons = {at: theme.text(cell.reason) for at, cell in cells.items() if cell.state == "failed"}
    diamond = {"symbol": "diamond", "size": 10, "color": theme.INK}
    cross = {"symbol": "x", "size": 11, "color": theme.ALERT}
    for name, marker, height_of, texts in (
        ("measured", diamond, marks, told),
        ("failed", cross, dict(enumerate(heights)), reasons),
    ):
        if texts:
            x, y = [places[at] for at in texts], [height_of[at] for at in texts]
            figure.add_trace(theme.marks(x, y, name, marker, list(texts.values())))
    top = 1.15 * max([*heights, *marks.values(), 1.0])
    predicted = {"text": [f"{1 / height:.0%}" for height in heights], "insidetextanchor": "start", "textangle": 0}
    figure.data[0].update(**predicted, textposition="inside", textfont={"color": theme.INK, "size": 11})
    for at, height in marks.items():
        note = {"text": f"{1 / height:.0%}", "font": {"size": 11, "color": theme.INK}, "showarrow": False}
        figure.add_annotation(x=places[at], y=height + 0.025 * top, yanchor="bottom", xref="x", yref="y", **note)
    figure.add_hline(1.0, line={"color": theme.INK, "dash": "dash", "width": 1})
    labels = [str(plan.world) for plan in plans]  # the devices, and below them how they divide a step
    for at, plan in enumerate(plans):
        if plan.pipeline * plan.tensor > 1:
            labels[at] += f"<br>{theme.text(plan.division().partition(',')[0])}"
        elif plan.data > 1:
            labels[at] += f"<br>ZeRO {plan.zero}"
    figure.update_xaxes(tickmode="array", tickvals=places, ticktext=labels, ticks="", showgrid=False)
    figure.update_yaxes(title_text=f"device time of a token, {plans[0].world} × {plans[0].cluster.device.name} = 1")
    figure.update_yaxes(range=[0, top])
    subtitle = "bars: predicted, and the efficiency that follows; dashed: linear scaling"
    subtitle += "; diamonds: measured, and their efficiency" if marks else ""
    if warning := contention(list(cells.values())):
        subtitle += f"<br>{warning}"
    headline = f"{plans[0].model} on {plans[0].cluster.device.name}: efficiency against linear scaling"
    title, margin = theme.title(theme.text(headline), subtitle), {"b": 100, "t": 84}
    return figure.laid_out(height=470, title=title, margin=margin, barmode="stack", legend=theme.LEGEND_BELOW)


def device_ms_per_token(plan: Plan, ms: float) -> float:
    """Return a time of each step of a plan, in ms, as the time of all devices together for one token."""
    return ms * plan.world / (plan.global_batch * plan.seq_len)


@checked_arguments
def predictions(measured: MeasuredGrid) -> Figure:
    """Draw the measured step of each cell of a grid over its predicted step, with the line on which both are equal.

    The planner's choice and the fastest measured cell are marked. Cells that failed stand below the others, at their
    predicted step; their sentence is under the mouse.
    """
    cells, failed = measured.measured(), [cell for cell in measured.cells() if cell.state == "failed"]
    steps = [ms for cell in cells for ms in (cell.predicted_ms, cell.step_ms or 0.0)] + [c.predicted_ms for c in failed]
    least, most = (0.85 * min(steps), 1.18 * max(steps)) if steps else (1.0, 10.0)
    ends = [least, most]
    figure = Figure(theme.curve(ends, ends, "as predicted", theme.AXIS, "dot", hoverinfo="skip"))
    if cells:  # rings lie below the marks, the larger first
        chosen = min(cells, key=lambda cell: cell.predicted_ms)
        rings = (cells[0], "fastest measured", theme.series_color(1), 22), (chosen, "planner's choice", theme.INK, 15)
        for cell, name, color, size in rings:
            marker = {"color": color, "symbol": "circle-open", "size": size, "line": {"width": 2}}
            figure.add_trace(theme.marks([cell.predicted_ms], [cell.step_ms], name, marker))
    blue, measured_ms = theme.series_color(0), [cell.step_ms or 0.0 for cell in cells]
    for shown, heights, name, marker in (
        (cells, measured_ms, "measured", {"color": blue, "symbol": "circle", "size": 9}),
        (failed, [least] * len(failed), "failed", {"color": theme.ALERT, "symbol": "x", "size": 9}),
    ):
        if shown or name == "measured":
            words = []
            for cell in shown:
                found = cell.reason if cell.step_ms is None else f"measured {duration(cell.step_ms / 1e3)}"
                words.append(theme.text(f"{cell.name}: predicted {duration(cell.predicted_ms / 1e3)}, {found}"))
            figure.add_trace(theme.marks([cell.predicted_ms for cell in shown], heights, name, marker, words))
    figure.update_xaxes(**theme.log_axis((least, most)), title_text="predicted step (ms)")
    figure.update_yaxes(**theme.log_axis((least, most)), title_text="measured step (ms)")
    lines = [theme.text(line) for line in measured.sentences()[:3]]
    title = theme.title(theme.text(measured.path.name), "<br>".join(lines))
    return figure.laid_out(height=510, title=title, margin={"t": 90, "b": 92}, legend=theme.LEGEND_BELOW)


@dataclass(frozen=True)
class _Point:
    """One plan of the figure."""

    plan: Plan
    step_ms: float
    peak_bytes: int
    call: str
    """The call that launches it, as a notebook writes it."""

    @property
    def sharding(self) -> str:
        plan = self.plan
        return f"ZeRO {plan.zero}" if plan.zero else "plain split" if plan.pipeline * plan.tensor > 1 else "replicas"

    @property
    def words(self) -> str:
        lines = [self.plan.division(), f"{duration(self.step_ms / 1e3)} a step, {gib(self.peak_bytes)} a device"]
        if self.plan.offload_optimizer:
            host, traffic = gib(self.plan.host_bytes), gib(self.plan.host_traffic_bytes)
            lines.append(f"{host} of host memory for each device, {traffic} over PCIe in a step")
        return "<br>".join(map(theme.text, [*lines, self.call]))


@checked_arguments
def frontier(plans: Plans | Grid | MeasuredGrid) -> Figure:
    """Draw the step of plans over the memory of their fullest device, with the front of those that none beats in both.

    Args:
        plans: a search, of which the fastest plan for each of twelve memory limits is drawn; a grid, of which every
            cell with a plan is a point; or a measured grid, whose points stand at their measured step.
    """
    points, headline, words = _points(plans)
    front = pareto_front([(point.peak_bytes, point.step_ms) for point in points])
    unit_name, unit, _ = memory_unit(max((point.peak_bytes for point in points), default=0))
    time_name, ms, _ = suited(max((point.step_ms for point in points), default=0.0), STEP_TIME)
    figure = Figure()
    for index, name in enumerate(SHARDINGS):  # each has its colour in every figure
        color = theme.series_color(index)
        own = [point for point in points if point.sharding == name]
        if not own:
            continue
        marker = {
            "color": [theme.pale(color) if point.plan.offload_optimizer else color for point in own],
            "symbol": [SYMBOLS[point.plan.recompute] for point in own],
            "size": 11,
            "line": {"color": color, "width": 1.5},
        }
        x, y = [point.peak_bytes / unit for point in own], [point.step_ms / ms for point in own]
        figure.add_trace(theme.marks(x, y, name, marker, [point.words for point in own], showlegend=False))
        figure.add_trace(_explained(name, color, color, "circle"))
    if any(point.plan.offload_optimizer for point in points):
        figure.add_trace(_explained("optimiser on the host", theme.pale(theme.MUTED), theme.MUTED, "circle"))
    for kind in [kind for kind in SYMBOLS if any(point.plan.recompute == kind for point in points)]:
        figure.add_trace(_explained(CHECKPOINTING[kind], theme.MUTED, theme.MUTED, SYMBOLS[kind]))
    x, y = [peak_bytes / unit for peak_bytes, _ in front], [step_ms / ms for _, step_ms in front]
    line = theme.curve(x, y, "Pareto front", theme.INK, width=1.5, line_shape="hv", hoverinfo="skip")
    figure.add_trace(line)
    figure.update_xaxes(title_text=f"{words} memory of the fullest device ({unit_name})", rangemode="tozero")
    figure.update_yaxes(title_text=f"{words} step ({time_name})")
    subtitle = f"{len(points)} plans, {words}; on the line no other plan is both leaner and faster"
    title = theme.title(theme.text(headline), subtitle)
    return figure.laid_out(height=520, title=title, legend=theme.LEGEND_BELOW, margin={"b": 120})


def _points(plans: Plans | Grid | MeasuredGrid) -> tuple[list[_Point], str, str]:
    """Return the points of a figure, what they are of, and whether they were predicted or measured."""
    if isinstance(plans, Plans):
        front = enumerate(plans.frontier())
        points = [_point(plan, f"plans.frontier()[{number}]") for number, plan in front]
        return points, f"{plans.best.model} on {plans.best.cluster.describe()}", "predicted"
    if isinstance(plans, Grid):
        cells = [(cell.plan, cell.named(plans.varied)) for cell in plans.feasible]
        points = [_point(plan, f"grid.cell({words}).plan") for plan, words in cells if plan]
        return points, plans.headline(), "predicted"
    points = [
        _point(cell.plan, f"grid.cell({cell.name}).plan", cell.step_ms, cell.peak_bytes)
        for cell in plans.measured()
        if cell.step_ms is not None
    ]
    return points, plans.path.name, "measured"


def _point(plan: Plan, name: str, step_ms: float | None = None, peak_bytes: int | None = None) -> _Point:
    """Return the point of a plan that a notebook calls `name`: measured where that is given, or else predicted."""
    call = f"wb.launch(experiment, plan={name})"
    return _Point(plan, step_ms or plan.prediction.step_ms, peak_bytes or plan.peak_bytes, call)


def _explained(name: str, color: str, edge: str, symbol: str) -> go.Scatter:
    """Return a trace that stands in the legend only."""
    marker = {"color": color, "symbol": symbol, "size": 10, "line": {"color": edge, "width": 1.5}}
    return theme.marks([None], [None], name, marker)
