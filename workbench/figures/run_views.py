"""Figures of runs and plans as they are named: each reads what it draws, and hands it to a figure of its values.

The figures of sparse training, which are drawn for runs alone, stand here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from workbench.analysis.curve import SMOOTHING, curves_of
from workbench.analysis.pareto import ParetoPoint, pareto_front, pareto_points
from workbench.arguments import checked_arguments
from workbench.cost.profile import Facts
from workbench.errors import InvalidArgument
from workbench.experiment import Experiment
from workbench.figures import plan_view, theme
from workbench.figures.curves_view import loss_curves
from workbench.figures.figure import Figure, subplots
from workbench.figures.timeline_view import measured_timeline, prediction
from workbench.figures.timeline_view import timeline as drawn_timeline
from workbench.planning.plan import Plan
from workbench.planning.runnable import check_facts
from workbench.runs.history import Patterns
from workbench.runs.registry import Runs, distinct_names, load_run, load_runs, measurements
from workbench.runs.run import OneRun
from workbench.units import count


@checked_arguments
def compare(
    runs: Runs, x: str = "tokens", *, y: str = "loss", smoothing: float = SMOOTHING, title: str | None = None
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
    title = f"{handle.name}: predicted and measured"
    return prediction(handle.plan, measurements(handle), title, measured_timeline(handle.events()))


@checked_arguments
def timeline(run: OneRun | Plan) -> Figure:
    """Draw the schedule of one step: a plan's prediction, or a run's prediction above a step that it measured."""
    if isinstance(run, Plan):
        return drawn_timeline(run)
    handle = load_run(run)
    return drawn_timeline(handle.plan, measured_timeline(handle.events()))


@checked_arguments
def partition(plan: Plan, experiment: Experiment) -> Figure:
    """Draw the experiment's model in the plan's stages, with names and shapes of the tensors between two stages."""
    from workbench.capture.captured_model import CapturedModel

    captured = CapturedModel(experiment, plan.micro_batch)
    check_facts(experiment, plan, Facts(captured.signature, reach="element"))
    graph = captured.graph
    crossing = {
        stage.index: [graph.values[name] for name in graph.crossing(stage.end_block)] for stage in plan.stages[:-1]
    }
    return plan_view.partition(plan, crossing=crossing)


@checked_arguments
def pareto(runs: Runs, published: Mapping[str, tuple[float, float]] | None = None) -> Figure:
    """Draw the held-out loss of finished runs against the FLOPs of their layers and, beside it, against their seconds.

    Runs that differ in their seed only are one mark, with a bar over the seeds. FLOPs are those of one sequence,
    forward and backward, without embeddings, head and absent blocks. `published` adds results of others in grey: by
    name, the GFLOP of a sequence and the held-out loss.

    Raises `InvalidExperiment` for runs without held-out losses, and for models and data of one's own.
    """
    return draw_pareto(pareto_points(load_runs(runs)), published)


@checked_arguments
def pattern(run: OneRun) -> Figure:
    """Draw the pattern of a run's first sparse weight, with a slider over the updates."""
    handle = load_run(run)
    patterns = handle.patterns()
    if not len(patterns):
        raise InvalidArgument(f"{handle.name} has dense weights, or has not begun. Give a run with a sparsity.")
    return draw_pattern(patterns, handle.name)


@checked_arguments
def exploration(runs: Runs) -> Figure:
    """Draw the share of blocks that sparse runs have explored, and the prune ratio, over the steps."""
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

    A line joins the configurations of each panel that none beats in both cost and loss; bars reach over the seeds.
    `published` adds results of others, each a GFLOP of a sequence and a loss, in grey to the first panel.
    """
    figure = subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.04)
    gflop, losses = zip(*published.values(), strict=True) if published else ((), ())
    if published:
        names = list(map(theme.text, published))
        grey = {"color": theme.AXIS, "symbol": "circle-open", "size": 8}
        mark = {"x": gflop, "y": losses, "text": names, "mode": "markers", "marker": grey, "name": "published"}
        figure.add_trace(go.Scatter(**mark, hovertemplate="%{text}<br>%{x} GFLOP<br>%{y}<extra></extra>"), row=1, col=1)
    for panel, cost in enumerate(("gflop", "seconds"), start=1):
        place, costs = {"row": 1, "col": panel}, [getattr(point, cost) for point in points]
        front = pareto_front([(x, point.loss) for x, point in zip(costs, points, strict=True)])
        x, y = ([pair[which] for pair in front] for which in (0, 1))
        shown = {"legendgroup": "front", "showlegend": panel == 1, "hoverinfo": "skip"}
        figure.add_trace(theme.curve(x, y, "Pareto front", theme.MUTED, "dot", 1, **shown), **place)
        for index, (at, point) in enumerate(zip(costs, points, strict=True)):
            name, loss = theme.text(point.name), point.loss
            ends = {"array": [max(point.losses) - loss], "arrayminus": [loss - min(point.losses)], "symmetric": False}
            bars = {**ends, "visible": len(point.losses) > 1, "thickness": 2}
            marker = {"color": theme.series_color(index), "symbol": SYMBOLS[point.group], "size": 11}
            shown = {"legendgroup": point.name, "showlegend": panel == 1, "name": name, "error_y": bars}
            hover = f"{name}<br>%{{x:.4g}}<br>%{{y:.4g}}<extra></extra>"
            mark = go.Scatter(x=[at], y=[loss], mode="markers", marker=marker, hovertemplate=hover, **shown)
            figure.add_trace(mark, **place)
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
