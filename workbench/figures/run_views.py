"""Figures of runs and plans as they are named: each reads what it draws, and hands it to a figure of its values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

from workbench.analysis.curve import SMOOTHING, curves_of
from workbench.analysis.pareto import pareto_points
from workbench.arguments import checked_arguments
from workbench.errors import InvalidArgument
from workbench.experiment import Experiment
from workbench.figures import plan_view, sparsity_views
from workbench.figures.curves_view import loss_curves
from workbench.figures.figure import Figure
from workbench.figures.prediction_view import prediction
from workbench.figures.timeline_view import timeline as drawn_timeline
from workbench.planning.plan import Plan
from workbench.planning.runnable import check_signature
from workbench.planning.simulation import TimedAction, Timeline, most_in_flight
from workbench.runs.records.summary import measurements
from workbench.runs.registry import OneRun, Runs, distinct_names, load_run, load_runs


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


def measured_timeline(events: Iterable[Mapping[str, Any]]) -> Timeline | None:
    """Return the latest step that every pipeline rank recorded in a run's `actions` events; None without one.

    Time counts from the first action of any rank. Ranks of one node share a clock; ranks of several nodes agree as well
    as the nodes' clocks do.
    """
    steps: dict[int, dict[int, Mapping[str, Any]]] = {}
    for event in events:
        if event["type"] == "actions":
            steps.setdefault(int(event["step"]), {})[int(event["rank"])] = event
    most = max((len(by_rank) for by_rank in steps.values()), default=0)
    complete = [step for step, by_rank in steps.items() if len(by_rank) == most]
    if not complete:
        return None
    ranks = [event for _, event in sorted(steps[max(complete)].items())]
    origin_s = min(event["origin_s"] for event in ranks)
    rows = [(1e3 * (event["origin_s"] - origin_s), event["actions"]) for event in ranks]
    first = min((delay_ms + start for delay_ms, actions in rows for *_, start, _ in actions), default=0.0)
    lanes = tuple(
        tuple(
            TimedAction(action_type, stage, micro_batch, delay_ms + start - first, delay_ms + end - first)
            for action_type, stage, micro_batch, start, end in sorted(actions, key=itemgetter(3))
        )
        for delay_ms, actions in rows
    )
    step_ms = max((action.end_ms for lane in lanes for action in lane), default=0.0)
    busy_ms = tuple(sum(action.end_ms - action.start_ms for action in lane) for lane in lanes)
    return Timeline(lanes, step_ms, busy_ms, tuple(map(most_in_flight, lanes)))


@checked_arguments
def partition(plan: Plan, experiment: Experiment) -> Figure:
    """Draw the experiment's model in the plan's stages, with names and shapes of the tensors between two stages."""
    from workbench.capture.captured_model import CapturedModel

    captured = CapturedModel(experiment, plan.micro_batch)
    check_signature(experiment, plan, captured)
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
    return sparsity_views.pareto(pareto_points(load_runs(runs)), published)


@checked_arguments
def pattern(run: OneRun) -> Figure:
    """Draw the pattern of a run's first sparse weight, with a slider over the updates."""
    handle = load_run(run)
    patterns = handle.patterns()
    if not len(patterns):
        raise InvalidArgument(f"{handle.name} has dense weights, or has not begun. Give a run with a sparsity.")
    return sparsity_views.pattern(patterns, handle.name)


@checked_arguments
def exploration(runs: Runs) -> Figure:
    """Draw the share of blocks that sparse runs have explored, and the prune ratio, over the steps."""
    handles = load_runs(runs)
    named = dict(zip(distinct_names(handles), (run.patterns() for run in handles), strict=True))
    return sparsity_views.exploration({name: patterns for name, patterns in named.items() if len(patterns)})
