"""Figures of runs and plans as they are named, and of what is computed from several runs.

Each of the first reads what it draws, and hands it to a figure of its values. Those of sparse training, of contrasts
and of scaling laws follow.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.analysis.contrast import Contrast, Difference
from workbench.analysis.curve import CONFIDENCE, SMOOTHING, X_AXES, Array, curves_of
from workbench.analysis.ladder import KAPLAN, LadderPoint, ScalingLaw
from workbench.analysis.pareto import ParetoPoint, pareto_front, pareto_points
from workbench.analysis.parity import Parity
from workbench.analysis.seed_contrast import SeedContrast, SeedDifference, interval_in_words
from workbench.base.arguments import checked_arguments
from workbench.base.display import Table, html_table, text_table
from workbench.base.errors import InvalidArgument
from workbench.base.units import count
from workbench.experiment import Experiment
from workbench.figures import theme
from workbench.figures.curves_view import loss_curves
from workbench.figures.figure import Figure, subplots
from workbench.figures.plan_view import draw_partition
from workbench.figures.timeline_view import draw_timeline, measured_timeline, prediction
from workbench.planning.plan import Plan
from workbench.planning.runnable import check_facts
from workbench.record.history import Patterns
from workbench.record.rundir import EventTail
from workbench.runs.registry import FewRuns, Runs, distinct_names, load_run, load_runs, measurements
from workbench.runs.run import OneRun


@checked_arguments
def compare(
    runs: FewRuns, x: str = "tokens", *, y: str = "loss", smoothing: float = SMOOTHING, title: str | None = None
) -> Figure:
    """Draw the curves of several runs in one figure, raw values behind their moving averages.

    Args:
        runs: the runs, as handles, names or directories.
        x: the x axis that is shown first: `step`, `tokens`, `samples`, `time`, `flops` or `gpu_hours`.
        y: the recorded column to draw: `loss` (with the held-out loss, where a run has one), `eval_loss`,
            `perplexity` of the held-out samples, `grad_norm`, ...
        smoothing: width of the moving average as a share of the longest run; by default 0.01.
        title: title of the figure.

    Raises `UnknownParameter` for an axis or a column that was not recorded.

    Examples:
        >>> figure = wb.compare(runs, x="step")
        >>> figure.layout.xaxis.title.text
        'Step'
    """
    return loss_curves(curves_of(load_runs(runs)), x=x, y=y, title=title, smoothing=smoothing)


@checked_arguments
def show(run: OneRun) -> Figure:
    """Draw what was predicted for a run beside what it measured: step time, speed, memory, and one step's schedule.

    Examples:
        >>> wb.show(run).data != ()
        True
    """
    handle = load_run(run)
    measured = measured_timeline(EventTail(handle.directory.events).read(), handle.history())
    return prediction(handle.plan, measurements(handle), f"{handle.name}: predicted and measured (medians)", measured)


@checked_arguments
def timeline(run: OneRun | Plan) -> Figure:
    """Draw the schedule of one step: a plan's prediction, or a run's prediction above a step that it measured.

    Args:
        run: a plan, or a run as a handle, or by name or directory. One step in 200 of a run is measured.
    """
    if isinstance(run, Plan):
        return draw_timeline(run)
    handle = load_run(run)
    return draw_timeline(handle.plan, measured_timeline(EventTail(handle.directory.events).read(), handle.history()))


@checked_arguments
def partition(plan: Plan, experiment: Experiment) -> Figure:
    """Draw the experiment's model in the plan's stages, with names and shapes of the tensors between two stages.

    Args:
        plan: the plan, whose stages are the columns.
        experiment: what it was made for; its model is captured for the names.

    Examples:
        >>> plan = wb.plan(experiment, pipeline=2)
        >>> wb.figures.partition(plan, experiment).layout.title.text is not None
        True
    """
    from workbench.capture.captured_model import CapturedModel

    captured = CapturedModel(experiment, plan.micro_batch)
    check_facts(experiment, plan, captured.facts("element", captures=False))
    graph = captured.graph
    crossing = {
        stage.index: [graph.values[name] for name in graph.crossing(stage.end_block)] for stage in plan.stages[:-1]
    }
    return draw_partition(plan, crossing=crossing)


@checked_arguments
def pareto(runs: Runs, published: Mapping[str, tuple[float, float]] | None = None) -> Figure:
    """Draw the held-out loss of finished runs against their FLOPs and, beside it, against their seconds.

    Runs that differ in their seed only are one mark, with a bar over the seeds. FLOPs are those of one sequence,
    forward and backward, in the layers without absent blocks and in the head at the labelled positions. `published`
    adds results of others in grey: by name, the GFLOP of a sequence and the held-out loss.

    Raises `InvalidExperiment` for runs without held-out losses, and for models and data of one's own.
    """
    return draw_pareto(pareto_points(load_runs(runs)), published)


@checked_arguments
def pattern(run: OneRun) -> Figure:
    """Draw the pattern of a run's first sparse weight, with a slider over the updates.

    Args:
        run: a run of an experiment with `sparsity`, as a handle, or by name or directory.
    """
    handle = load_run(run)
    patterns = handle.patterns()
    if not len(patterns):
        raise InvalidArgument(f"{handle.name} has dense weights, or has not begun. Give a run with a sparsity.")
    return draw_pattern(patterns, handle.name)


@checked_arguments
def exploration(runs: Runs) -> Figure:
    """Draw the share of blocks that sparse runs have explored, and the prune ratio, over the steps.

    Args:
        runs: a run or several, of experiments with `sparsity`; dense ones are left out.
    """
    handles = load_runs(runs)
    named = dict(zip(distinct_names(handles), (run.patterns() for run in handles), strict=True))
    return draw_exploration({name: patterns for name, patterns in named.items() if len(patterns)})


# Sparse training: loss against cost, one pattern as it moves, and what all patterns have explored.

SYMBOLS = {"dense": "circle", "static": "square", "dynamic": "diamond"}
LOOKS = {"absent": "#F3F4F6", "stayed": "#0072B2", "regrown": "#D55E00", "pruned": "#F2C9A8"}
"""Colour of a block by what the last update did with it."""
MOST_FRAMES = 60
"""Largest number of positions of the slider."""


def draw_pareto(points: Sequence[ParetoPoint], published: Mapping[str, tuple[float, float]] | None = None) -> Figure:
    """Draw the held-out loss of each configuration against its FLOPs and against its seconds.

    The colour says the model, open marks beginning the colours anew, the symbol whether it is dense, static or moving,
    and the size of the mark the blocks of its pattern. A line joins the configurations of each panel that none beats in
    both cost and loss; bars reach over the seeds.
    `published` adds results of others, each a GFLOP of a sequence and a loss, in grey to the first panel.
    """
    figure = subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.04)
    models = list(dict.fromkeys(point.model for point in points))
    # A diamond that lies on a square leaves its corners in view, and a small mark the rim of a large one.
    drawn = sorted(enumerate(points), key=lambda each: (list(SYMBOLS).index(each[1].group), -each[1].block))
    gflop, losses = zip(*published.values(), strict=True) if published else ((), ())
    if published:
        names = list(map(theme.text, published))
        grey = {"color": theme.MUTED, "symbol": "circle-open", "size": 8}
        mark = {"x": gflop, "y": losses, "text": names, "mode": "markers", "marker": grey, "name": "published"}
        figure.add_trace(go.Scatter(**mark, hovertemplate="%{text}<br>%{x} GFLOP<br>%{y}<extra></extra>"), row=1, col=1)
    for panel, cost in enumerate(("gflop", "seconds"), start=1):
        place, costs = {"row": 1, "col": panel}, [getattr(point, cost) for point in points]
        front = pareto_front([(x, point.loss) for x, point in zip(costs, points, strict=True)])
        x, y = ([pair[which] for pair in front] for which in (0, 1))
        shown = {"legendgroup": "front", "showlegend": panel == 1, "hoverinfo": "skip"}
        figure.add_trace(theme.curve(x, y, "Pareto front", theme.MUTED, "dot", 1, **shown), **place)
        for index, point in drawn:
            name, loss = theme.text(point.name), point.loss
            ends = {"array": [max(point.losses) - loss], "arrayminus": [loss - min(point.losses)], "symmetric": False}
            bars = {**ends, "visible": len(point.losses) > 1, "thickness": 2}
            turn, color = divmod(models.index(point.model), len(theme.PALETTE))
            is_open = turn % 2 == 1
            marker = {
                "color": theme.PALETTE[color],
                "symbol": SYMBOLS[point.group] + "-open" * is_open,
                "size": 9 + 2 * math.log2(point.block),
                # A white edge tells apart marks that lie on each other.
                "line": {"color": theme.PALETTE[color] if is_open else "white", "width": 1.5},
            }
            shown = {"legendgroup": point.name, "showlegend": panel == 1, "name": name, "error_y": bars}
            hover = f"{name}<br>%{{x:.4g}}<br>%{{y:.4g}}<extra></extra>"
            mark = {"x": [costs[index]], "y": [loss], "mode": "markers", "marker": marker, "hovertemplate": hover}
            figure.add_trace(go.Scatter(**mark, **shown), **place)
    words = "GFLOP of a sequence: layers, and head at labelled positions"
    axes = (words, [*gflop, *(point.gflop for point in points)]), ("Training time (s)", [at.seconds for at in points])
    for column, (words, values) in enumerate(axes, start=1):
        figure.update_xaxes(**theme.log_axis(values), title_text=words, col=column)
    figure.update_yaxes(title_text="Held-out loss", col=1)
    words = "Where weights are masked, absent blocks are computed too, and fewer FLOPs take no fewer seconds"
    return figure.with_legend_below(400, "Loss against cost: FLOPs and wall time", words)


def draw_pattern(patterns: Patterns, name: str) -> Figure:
    """Draw the pattern of one weight with a slider over the updates; blocks that an update moved have other colours."""
    frames = np.unique(np.linspace(0, len(patterns) - 1, min(MOST_FRAMES, len(patterns))).round().astype(int))
    pairs = [(patterns.pictures[at], patterns.pictures[max(0, at - 1)]) for at in frames.tolist()]
    states = [np.where(now, np.where(before, 1, 2), np.where(before, 3, 0)) for now, before in pairs]  # as in `LOOKS`
    last, shown = len(LOOKS), len(states) // 2  # the last updates hardly move a block
    scale = [(edge / last, color) for at, color in enumerate(LOOKS.values()) for edge in (at, at + 1)]
    grids = [
        go.Heatmap(
            x=list(range(state.shape[1])),
            y=list(range(state.shape[0])),
            z=state,
            zmin=-0.5,
            zmax=last - 0.5,
            colorscale=scale,
            xgap=1 if state.shape[1] <= 32 else 0,
            ygap=1 if state.shape[0] <= 32 else 0,
            visible=at == shown,
            colorbar={"tickvals": list(range(last)), "ticktext": list(LOOKS), "outlinewidth": 0, "len": 0.6},
            hovertemplate="row %{y}, column %{x}<extra></extra>",
        )
        for at, state in enumerate(states)
    ]
    figure = Figure(grids)
    figure.update_xaxes(title_text="Column of blocks", constrain="domain", showgrid=False)
    figure.update_yaxes(title_text="Row of blocks", autorange="reversed", scaleanchor="x", showgrid=False)
    steps = [
        {
            "label": count(patterns.step[at]),
            "method": "update",
            "args": [{"visible": [other == index for other in range(len(frames))]}],
        }
        for index, at in enumerate(frames)
    ]
    slider = {"steps": steps, "active": shown, "currentvalue": {"prefix": "after step "}, "pad": {"t": 40}}
    subtitle = f"{theme.text(patterns.weight)}, its first {states[-1].shape[0]} × {states[-1].shape[1]} blocks"
    title = theme.title(f"The pattern of {theme.text(name)} as it moves", subtitle)
    return figure.laid_out(height=620, title=title, sliders=[slider])


def draw_exploration(patterns: Mapping[str, Patterns]) -> Figure:
    """Draw the share of blocks that each run has explored so far, and the share that its updates replace."""
    panels = (("explored", "Explored share of the blocks"), ("prune_ratio", "Prune ratio"))
    figure = subplots(1, 2, subplot_titles=[title for _, title in panels])
    for index, (name, columns) in enumerate(patterns.items()):
        for panel, (column, _) in enumerate(panels, start=1):
            look = theme.series_color(index), theme.series_dash(index)
            shown = {"legendgroup": name, "showlegend": panel == 1}
            trace = theme.curve(columns.step, columns[column], theme.text(theme.short(name)), *look, **shown)
            figure.add_trace(trace.update(mode="lines" if len(columns) > 1 else "markers"), row=1, col=panel)
    figure.update_xaxes(title_text="Step", rangemode="tozero")
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    words = "Blocks that are or once were present, over all sparse weights"
    return figure.with_legend_below(380, "How the patterns explore", words)


# A result is shown as one sentence, a picture and a table; what else there is to know is folded.


@dataclass(frozen=True)
class Report:
    """A result as a notebook and its page show it: a sentence, the picture, a table, and details that are folded.

    Args:
        headline: what was found, in one sentence.
        picture: the figure that shows it.
        table: titles of the columns, and rows of texts.
        details: sentences and further tables on what the result rests on.

    Examples:
        >>> contrast = wb.contrast(runs)
        >>> report = wb.figures.Report(contrast.headline, wb.compare(runs), contrast.table, contrast.details)
        >>> print(report.headline)
    """

    headline: str
    picture: go.Figure | None = None
    table: Table = ((), ())
    details: Sequence[str | Table] = ()

    def __repr__(self) -> str:
        parts = [f"- {part}" if isinstance(part, str) else text_table([part[0], *part[1]]) for part in self.details]
        return "\n\n".join(filter(None, [self.headline, text_table([self.table[0], *self.table[1]]), "\n".join(parts)]))

    def to_html(self) -> str:
        """Return the table and the folded details as HTML, every text escaped."""
        sentences = "".join(f"<li>{html.escape(part)}</li>" for part in self.details if isinstance(part, str))
        tables = "".join(html_table(*part) for part in self.details if not isinstance(part, str))
        folded = f"<details><summary>details</summary><ul>{sentences}</ul>{tables}</details>" if self.details else ""
        return (html_table(*self.table) if self.table[1] else "") + folded

    def _ipython_display_(self) -> None:
        from IPython.display import display

        opening = f'<p style="font-size: 1.15em"><b>{html.escape(self.headline)}</b></p>'
        display({"text/html": opening, "text/plain": self.headline}, raw=True)
        if self.picture is not None:
            display(self.picture)
        rest = repr(replace(self, headline="")).strip()
        if rest:
            display({"text/html": self.to_html(), "text/plain": rest}, raw=True)


# A contrast has differences of curves with their bands, or differences of configurations over their seeds.

NAME_LETTERS = 20
"""Letters of a line of a name beside its differences."""
NAME_CHARACTERS, AXIS_CHARACTERS = 32, 18
"""Largest number of characters of a run's name in a sentence, which holds two names, and in the y axis' title."""


def draw_contrast(compared: Contrast | SeedContrast) -> Figure:
    """Draw what `wb.contrast` computed: the difference of each run, or configuration, to the first."""
    if why := compared.incomparable:
        figure = Figure()
        for update in (figure.update_xaxes, figure.update_yaxes):
            update(showticklabels=False, showgrid=False, zeroline=False, showline=False, range=[0, 1])
        return figure.laid_out(
            height=110, title=theme.title("No difference in loss", theme.text(why)), margin={"t": 84}
        )
    return seed_differences(compared) if isinstance(compared, SeedContrast) else differences(compared.differences)


def contrast_report(compared: Contrast | SeedContrast) -> Report:
    """Return a contrast as a notebook shows it."""
    drawn = draw_contrast(compared) if compared.differences or compared.incomparable else None
    return Report(compared.headline, drawn, compared.table, compared.details)


def differences(items: Sequence[Difference]) -> Figure:
    """Draw the smoothed loss of each run minus that of the first: below zero, the run is the lower of the two.

    The band is the 90 % interval of the noise along the curves (`workbench.analysis.curve`). A bar at the end reaches
    as far as seeds alone part two runs, if that is known. A diamond marks where two curves last cross; its bar is the
    interval of that point.
    """
    items = [
        replace(item, names=(theme.short(item.names[0], NAME_CHARACTERS), theme.short(item.names[1], NAME_CHARACTERS)))
        for item in items
    ]
    figure = Figure()
    scale, x_title = X_AXES[items[0].axis].unit(max(float(item.x[-1]) for item in items))
    figure.add_hline(y=0, line={"color": theme.AXIS, "width": 1.5})
    for index, item in enumerate(items, start=1):
        figure.add_traces(_difference_traces(item, index, scale))
    first = theme.text(theme.short(items[0].names[1], AXIS_CHARACTERS))
    # The y axis holds the bands after the first twentieth, whose steep fall would flatten all the rest.
    values = [np.array([0.0])]
    for item in items:
        late = item.x >= item.x[0] + 0.05 * (item.x[-1] - item.x[0])
        values += [edge[late] for edge in (item.value, item.low, item.high)]
        values.append(item.value[-1] + np.array([-1.0, 1.0]) * (item.margin or 0.0))
    low, high = float(np.nanmin(np.concatenate(values))), float(np.nanmax(np.concatenate(values)))
    room = 0.12 * ((high - low) or 1.0)
    y_range = [low - room, high + room]
    minuend = f" of {theme.text(theme.short(items[0].names[0], AXIS_CHARACTERS))}" if len(items) == 1 else ""
    figure.update_yaxes(range=y_range, title_text=f"{items[0].loss}{minuend}<br>minus that of {first}")
    figure.update_xaxes(title_text=x_title, rangemode="tozero")
    # Below the verdicts stands which side of zero is better, and what the marks mean.
    words = [f"above zero: {items[0].names[1]} is lower, so better"]
    if any(" ± " in item.verdict for item in items):
        words.append(f"± and band: {CONFIDENCE:.0%} of the noise along the curves, not between seeds")
    if any(item.margin is not None for item in items):
        words.append(f"bar at the end: how far seeds alone part {items[0].pair}")
    if any(item.crossover is not None for item in items):
        words.append("diamond: where the curves last cross")
    lines = [*(theme.text(item.verdict) for item in items), theme.text("; ".join(words))]
    names = [item.names[0] for item in items]
    inside, below = theme.fits_inside(names), theme.height_below(names)
    return figure.laid_out(
        height=390 if inside else 338 + below,
        title=theme.title(f"Difference in {items[0].loss.lower()}", "<br>".join(lines)),
        margin={"t": 92} if inside else {"t": 92, "b": below},
        hovermode="x unified",
        legend={
            "tracegroupgap": 0,
            **(theme.place_legend(figure.data, y_range=y_range) if inside else theme.LEGEND_BELOW),
        },
    )


def _difference_traces(item: Difference, index: int, scale: float) -> list[go.Scatter]:
    name, color, x = theme.text(item.names[0]), theme.series_color(index), item.x / scale
    band = theme.band(x, item.low, item.high, color, legendgroup=str(index))
    known = bool((item.high - item.low > 0).any())  # no interval of zero width is written
    hover = "%{y:+.3f}" + known * " (%{customdata[0]:+.3f} to %{customdata[1]:+.3f})"
    words = {"customdata": np.column_stack([item.low, item.high]), "hovertemplate": hover, "meta": "difference"}
    line = theme.curve(x, item.value, name, color, theme.series_dash(index), legendgroup=str(index), **words)
    traces = [band, line]
    shared = {"mode": "markers", "name": name, "legendgroup": str(index), "showlegend": False}
    if item.margin is not None:
        end = go.Scatter(
            x=[x[-1]],
            y=[item.value[-1]],
            marker={"size": 7, "color": color},
            error_y=_bar(color, item.margin),
            hovertemplate=f"seeds alone part {item.pair} by up to {item.margin:.2g} ({CONFIDENCE:.0%})",
            meta="scatter",
            **shared,
        )
        traces.append(end)
    if item.crossover is None:
        return traces
    at = item.crossover
    crossing = go.Scatter(
        x=[at.value / scale],
        y=[0.0],
        marker={"symbol": "diamond", "size": 10, "color": color, "line": {"color": "white", "width": 1}},
        error_x=_bar(color, max(0.0, at.high - at.value) / scale, max(0.0, at.value - at.low) / scale),
        hovertemplate=f"they last cross here ({CONFIDENCE:.0%}: {at.low / scale:.4g} to {at.high / scale:.4g})",
        meta="crossover",
        **shared,
    )
    return [*traces, crossing]


def _bar(color: str, up: float, down: float | None = None) -> dict[str, Any]:
    """Return an error bar, which reaches as far down as up by default."""
    sides = {} if down is None else {"symmetric": False, "arrayminus": [down]}
    return {"type": "data", "array": [up], "color": color, "thickness": 2, "width": 6, **sides}


def seed_differences(contrast: SeedContrast) -> Figure:
    """Draw each difference as a point with its interval; an interval that crosses the line at zero is pale.

    Runs of one model have the same difference at equal tokens and at equal FLOPs, which is one row.
    """
    figure = Figure()
    figure.add_vline(x=0, line={"color": theme.AXIS, "width": 1.5})
    same = dict[tuple[Any, ...], list[SeedDifference]]()
    for item in contrast.differences:
        same.setdefault((item.names, f"{item.value:.6g}", f"{item.margin:.6g}"), []).append(item)
    axes = [", ".join(X_AXES[item.axis].label for item in items) for items in same.values()]
    colors = {axis: theme.series_color(index) for index, axis in enumerate(dict.fromkeys(axes))}
    rows = sorted(zip(axes, same.values(), strict=True), key=lambda row: list(colors).index(row[0]))
    for axis, items in rows:
        shade = colors[axis] if items[0].distinguishable else theme.pale(colors[axis])
        figure.add_scatter(
            x=[items[0].value],
            y=[[theme.broken(theme.text(theme.short(items[0].names[0])), NAME_LETTERS)], [f"equal {axis}"]],
            error_x=_bar(shade, items[0].margin if items[0].scatter else 0.0),
            mode="markers",
            marker={"color": shade, "size": 9},
            hovertemplate="<br>".join(theme.text(item.describe()) for item in items) + "<extra></extra>",
            showlegend=False,
        )
    first = theme.text(theme.short(contrast.differences[0].names[1]))
    figure.update_xaxes(title_text=f"{contrast.loss} minus that of<br>{theme.broken(first, 2 * NAME_LETTERS)}")
    figure.update_yaxes(type="multicategory", autorange="reversed")
    fewest, most = (pick(number for item in contrast.differences for number in item.seeds) for pick in (min, max))
    seeds = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    is_loss = contrast.differences[0].metric is None
    side = "left of zero: lower, so better" if is_loss else "right of zero: higher"
    words = f"{side}; over {seeds} seeds, {interval_in_words(contrast.compared)}; pale: too close to call"
    lines = max(str(trace.y[0]).count("<br>") + 1 for trace in figure.data)
    return figure.laid_out(
        height=188 + max(34, 18 * (lines + 1)) * len(rows),
        title=theme.title(f"Difference in {contrast.loss.lower()}", words),
        margin={"t": 84},
    )


# Of a scaling law, points are ends of runs; lines and bands are the fitted law with its interval.

POINTS = 60
"""Number of points of a curve of the law."""
OTHERS = ("square-open", "diamond-open", "circle-open", "triangle-up-open", "cross-open")
"""Symbols of other results; open ones are seen where they lie on each other."""
Pair = tuple[float, float]
"""Parameters of a smaller and a larger model, without embeddings."""


@checked_arguments
def ladder(law: ScalingLaw, predicted: Sequence[LadderPoint] = ()) -> Figure:
    """Draw the held-out loss over the tokens: ends of runs, and the law with its interval for each size.

    Args:
        law: the fitted law.
        predicted: ends of runs that the law has not seen, as open diamonds; the lines of their sizes are dashed.
    """
    figure = Figure()
    budgets = np.array([point.tokens for point in (*law.points, *predicted)])
    tokens = np.geomspace(budgets.min() / 1.3, budgets.max() * 2, POINTS)
    for index, size in enumerate(sorted({point.parameters for point in (*law.points, *predicted)})):
        seen = [point for point in law.points if point.parameters == size]
        color, group = theme.series_color(index), {"legendgroup": str(index)}
        loss, low, high = law.losses(size, tokens)
        figure.add_trace(theme.band(tokens, low, high, color, **group))
        name = f"{count(size)} parameters{'' if seen else ', predicted'}"
        figure.add_trace(theme.curve(tokens, loss, name, color, "solid" if seen else "dash", meta="line", **group))
        shown = seen or [point for point in predicted if point.parameters == size]
        marker = {"color": color, "size": 8 if seen else 10, "symbol": "circle" if seen else "diamond-open"}
        x, y = [point.tokens for point in shown], [point.loss for point in shown]
        marks = {"mode": "markers", "marker": marker, "name": f"{count(size)}, runs", "showlegend": False, **group}
        figure.add_trace(go.Scatter(x=x, y=y, hovertemplate="%{x:.4g} tokens<br>%{y:.4g}<extra></extra>", **marks))
    figure.update_xaxes(type="log", title_text="Tokens")
    figure.update_yaxes(type="log", tickformat=theme.LOG_TICKS, title_text="Held-out loss in nats")
    words = "Ends of runs, the law, and its 90 % interval"
    words += "; dashed and open: predicted without these runs" if predicted else ""
    return figure.with_legend_below(440, "The ladder: loss over tokens for each size", words)


@checked_arguments
def pair_difference(
    law: ScalingLaw,
    pairs: Mapping[str, Pair],
    real: Mapping[str, Pair] | None = None,
    others: Mapping[str, Pair] | None = None,
    predicted: Sequence[LadderPoint] = (),
) -> Figure:
    """Draw by how many nats the larger model of each pair is lower, over the tokens per parameter of the larger model.

    Args:
        law: the fitted law.
        pairs: parameters of the smaller and the larger model of each trained pair, by name; marks are means over runs
            of equal tokens, and bars reach from the closest two runs to the farthest.
        real: pairs that the law is extrapolated to, with its interval, beside Kaplan et al.'s published law.
        others: other results by name: tokens per parameter of the larger model, and nats.
        predicted: ends of runs that the law has not seen.
    """
    if not pairs:
        raise InvalidArgument("pairs is empty. Give the parameters of a smaller and a larger model.")
    figure = Figure()
    for index, (name, (small, large)) in enumerate(pairs.items()):
        of_size = [[p for p in (*law.points, *predicted) if p.parameters == size] for size in (small, large)]
        budgets = sorted({p.tokens for p in of_size[0]} & {p.tokens for p in of_size[1]})
        losses = [[[p.loss for p in side if p.tokens == at] for side in of_size] for at in budgets]
        mean = np.array([np.mean(few) - np.mean(many) for few, many in losses])
        up = np.array([max(few) - min(many) for few, many in losses]) - mean
        down = mean - np.array([min(few) - max(many) for few, many in losses])
        color, group = theme.series_color(index), {"legendgroup": str(index), "name": theme.text(name)}
        bars = {"array": up, "arrayminus": down, "symmetric": False, "thickness": 1.5}
        seen = any(point.parameters == large for point in law.points)
        marker = {"color": color, "size": 9, "symbol": "circle" if seen else "diamond-open"}
        at = np.array(budgets) / large
        figure.add_trace(
            go.Scatter(x=at, y=mean, error_y=bars, mode="markers", marker=marker, showlegend=False, **group)
        )
        if budgets:
            tokens = np.geomspace(min(budgets) / 1.5, max(budgets) * 1.5, POINTS)
            _add_law(figure, law, (small, large), tokens, color, "solid" if seen else "dash", group)
    for index, (name, (small, large)) in enumerate((real or {}).items(), start=len(pairs)):
        color, group = theme.series_color(index), {"legendgroup": str(index)}
        tokens = np.geomspace(0.003, 100, POINTS) * large
        extrapolated = {**group, "name": f"{theme.text(name)}, extrapolated"}
        _add_law(figure, law, (small, large), tokens, color, "dash", extrapolated)
        published = {"legendgroup": f"{index} published", "meta": "line"}
        x, y, words = tokens / large, KAPLAN.difference(small, large, tokens), f"{theme.text(name)}, Kaplan et al."
        figure.add_trace(theme.curve(x, y, words, color, "dot", 1.5, **published))
    for symbol, (name, (tokens_each, nats)) in zip(cycle(OTHERS), (others or {}).items(), strict=False):
        grey = {"color": theme.MUTED, "symbol": symbol, "size": 9, "line": {"width": 2}}
        figure.add_trace(go.Scatter(x=[tokens_each], y=[nats], mode="markers", marker=grey, name=theme.text(name)))
    figure.add_hline(y=0, line={"color": theme.AXIS, "width": 1})
    figure.update_xaxes(type="log", title_text="Tokens for each parameter of the larger model, without embeddings")
    figure.update_yaxes(title_text="Nats by which the larger model is lower")
    words = "Marks: runs, bars from the closest two to the farthest; lines: the law, with its 90 % interval"
    return figure.with_legend_below(440, "How much lower the larger model of a pair ends", words)


def _add_law(
    figure: Figure, law: ScalingLaw, pair: Pair, tokens: Array, color: str, dash: str, group: dict[str, str]
) -> None:
    value, low, high = law.differences(*pair, tokens)
    x = tokens / pair[1]
    figure.add_trace(theme.band(x, low, high, color, **group))
    figure.add_trace(theme.curve(x, value, color=color, dash=dash, meta="line", **group))


# Differences of divisions from plain PyTorch, and what roundings explain of them.

LEAST_SHARE = 1e-3
"""Smallest share of a bound on the logarithmic axes, where equal numbers stand as well."""


@checked_arguments
def parity_figure(found: Parity) -> Figure:
    """Draw how far each division is from plain PyTorch, by step, as a share of the bound that rounding explains.

    The first panel has the loss, the second all gradients as one vector. Rounding explains what lies below the line at
    1. Divisions at fault have a colour and a name of their own. Shares below 0.001, such as 0, are drawn there. Raises
    `InvalidArgument` if no division was compared.
    """
    if not found.comparisons:
        raise InvalidArgument(f"There is no difference to draw. {found.verdict}")
    figure = subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.04)
    steps = list(range(1, found.steps + 1))
    right = [each for each in found.comparisons if not each.is_fault]
    groups = [(f"differs by rounding ({len(right)})", right, theme.series_color(0), "circle-open")] if right else []
    groups += [
        (theme.text(theme.short(each.division)), [each], theme.series_color(index), "x")
        for index, each in enumerate(found.faults, start=1)
    ]
    values = [LEAST_SHARE, 1.0]
    for panel, title in enumerate(("loss", "all gradients")):
        place = {"row": 1, "col": panel + 1}
        for name, group, color, symbol in groups:
            x, y, words = list[int](), list[float](), list[str]()
            for each in group:
                pairs = (each.loss_differences, each.loss_bounds), (each.gradient_differences, each.gradient_bounds)
                for step, value, bound in zip(steps, *pairs[panel], strict=True):
                    if math.isfinite(value):
                        x.append(step)
                        y.append(max(LEAST_SHARE, value / bound if bound else math.inf if value else 0.0))
                        words.append(
                            f"{theme.text(each.division)}<br>beside {each.beside}<br>step {step}: relative difference "
                            f"{value:.2g}, bound {bound:.2g}"
                        )
            marker, shown = {"color": color, "symbol": symbol, "size": 8}, {"showlegend": panel == 0}
            figure.add_trace(theme.marks(x, y, name, marker, words, legendgroup=name, **shown), **place)
            values += y
        ends = [0.5, found.steps + 0.5]
        of_line: dict[str, Any] = {"showlegend": panel == 0, "meta": "line"}
        figure.add_trace(theme.curve(ends, [1.0, 1.0], "bound of rounding", theme.MUTED, "dash", **of_line), **place)
        figure.update_xaxes(title_text=f"Step, {title}", range=ends, dtick=max(1, found.steps // 8), col=panel + 1)
    figure.update_yaxes(**theme.log_axis([value for value in values if math.isfinite(value)]))
    figure.update_yaxes(title_text="Difference over its bound", col=1)
    beside = f"Beside plain PyTorch in {found.reference}, from the same weights and samples"
    return figure.with_legend_below(400, "Differences of divisions, and what rounding explains", beside)


def show_parity(found: Parity) -> None:
    """Show a parity in a notebook: its figure and its table."""
    from IPython.display import HTML, display

    if found.comparisons:
        display(parity_figure(found))
    display(HTML(found._repr_html_()))
