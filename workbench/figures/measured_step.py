"""A measured step, read from a run's `actions` events, and the figure that shows it below its prediction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from workbench.figures import theme
from workbench.figures.figure import Figure, subplots
from workbench.figures.timeline_view import (
    BAR_LAYOUT,
    Lanes,
    add_stacked_timelines,
    bubble_fraction,
    describe,
    end_of,
    timeline_height,
)
from workbench.pipeline_schedules import SCHEDULES
from workbench.planning.plan import Plan
from workbench.planning.prediction import timeline as simulated
from workbench.planning.simulation import TimedAction, Timeline, most_in_flight

GAP_PX = 56
"""Height between the two timelines."""


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
    by_rank = steps[max(complete)]
    origin_s = min(event["origin_s"] for event in by_rank.values())
    lanes: list[list[TimedAction]] = []
    for rank in sorted(by_rank):
        delay_ms = 1e3 * (by_rank[rank]["origin_s"] - origin_s)
        lanes.append(
            [
                TimedAction(action_type, stage, micro_batch, delay_ms + start, delay_ms + end)
                for action_type, stage, micro_batch, start, end in by_rank[rank]["actions"]
            ]
        )
    return _from_zero(lanes)


def _from_zero(lanes: Lanes) -> Timeline:
    """Return the timeline of these lanes, moved so that the first action begins at 0."""
    first = min((action.start_ms for lane in lanes for action in lane), default=0.0)
    moved = tuple(
        tuple(
            replace(action, start_ms=action.start_ms - first, end_ms=action.end_ms - first)
            for action in sorted(lane, key=lambda action: action.start_ms)
        )
        for lane in lanes
    )
    return Timeline(
        lanes=moved,
        step_ms=end_of(moved),
        busy_ms=tuple(sum(action.end_ms - action.start_ms for action in lane) for lane in moved),
        in_flight=tuple(map(most_in_flight, moved)),
    )


def timelines(plan: Plan, measured: Timeline) -> Figure:
    """Draw one step as predicted above the same step as measured, on one axis of time; idle time is hatched.

    Both show the pipeline's schedule alone; the optimiser's update that follows it is in neither.
    """
    predicted = simulated(plan).lanes
    rows: list[tuple[str, Lanes]] = [("predicted", predicted), ("measured", measured.lanes)]
    heights = [timeline_height(len(lanes)) for _, lanes in rows]
    inner = sum(heights) + GAP_PX
    figure = subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        row_heights=[height / sum(heights) for height in heights],
        vertical_spacing=GAP_PX / inner,
        subplot_titles=[f"<b>{word}</b>: {describe(lanes)}" for word, lanes in rows],
    )
    add_stacked_timelines(figure, [lanes for _, lanes in rows], first_row=1)
    figure.update_xaxes(title_text=None, row=1, col=1)
    figure.update_annotations(x=0, xanchor="left", font={"size": theme.FONT_PX, "color": theme.MUTED})
    facts = f"{SCHEDULES[plan.schedule].words}, {plan.num_microbatches} micro-batches of {plan.micro_batch}"
    bubbles = f"bubble {bubble_fraction(predicted):.1%} predicted, {bubble_fraction(measured.lanes):.1%} measured"
    return figure.laid_out(
        height=inner + 194,
        title=theme.title(theme.text(f"Schedule of {plan.model}"), theme.text(f"{facts}; {bubbles}")),
        margin={"t": 108, "b": 86},
        legend=theme.LEGEND_BELOW,
        **BAR_LAYOUT,
    )
