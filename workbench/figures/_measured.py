"""A step as it really ran, from a run's `actions` events, and the picture that sets it below its prediction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.figures import theme
from workbench.figures._timeline import (
    Lanes,
    add_timeline,
    bubble_share,
    describe,
    planned_lanes,
    timeline_height,
    timeline_legend,
)
from workbench.planning.plan import SCHEDULE_WORDS, Plan
from workbench.planning.schedules import TimedAction, Timeline

GAP_PX = 56


def measured_timeline(events: Iterable[Mapping[str, Any]]) -> Timeline | None:
    """The latest step that every pipeline rank recorded, from the `actions` events of a run; None if there is none.

    Time counts from the first action of any rank. Ranks of one node share a clock; those of several nodes agree as
    well as the nodes' clocks do.
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
    return _aligned([by_rank[rank] for rank in sorted(by_rank)])


def _aligned(events: list[Mapping[str, Any]]) -> Timeline:
    """One lane an event, from the first action of any of them."""
    begin_s = min(event["origin_s"] for event in events)
    lanes = []
    for event in events:
        late_ms = 1e3 * (event["origin_s"] - begin_s)
        lanes.append(
            [
                TimedAction(kind, stage, micro_batch, late_ms + start, late_ms + end)
                for kind, stage, micro_batch, start, end in event["actions"]
            ]
        )
    first = min((action.start_ms for lane in lanes for action in lane), default=0.0)
    shifted = tuple(
        tuple(
            TimedAction(a.kind, a.stage, a.micro_batch, a.start_ms - first, a.end_ms - first)
            for a in sorted(lane, key=lambda action: action.start_ms)
        )
        for lane in lanes
    )
    return Timeline(
        lanes=shifted,
        step_ms=max((action.end_ms for lane in shifted for action in lane), default=0.0),
        busy_ms=tuple(sum(action.end_ms - action.start_ms for action in lane) for lane in shifted),
        in_flight=tuple(map(_most_held, shifted)),
    )


def _most_held(lane: Iterable[TimedAction]) -> int:
    """Micro-batches between their forward and the backward that frees them, at most at once."""
    held = most = 0
    for action in lane:
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = max(most, held)
    return most


def timelines(plan: Plan, measured: Timeline, title: str | None = None) -> go.Figure:
    """One step as it was predicted above the same step as it was measured, on one axis of time; waiting hatched.

    Both show the pipeline's schedule alone; the update that follows it is in neither.
    """
    predicted = planned_lanes(plan)
    rows: list[tuple[str, Lanes]] = [("predicted", predicted), ("measured", measured.lanes)]
    heights = [timeline_height(len(lanes)) for _, lanes in rows]
    inner = sum(heights) + GAP_PX
    figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        row_heights=[height / sum(heights) for height in heights],
        vertical_spacing=GAP_PX / inner,
        subplot_titles=[f"<b>{word}</b>: {describe(lanes)}" for word, lanes in rows],
    )
    for row, (_, lanes) in enumerate(rows, start=1):
        before = len(figure.data)
        add_timeline(figure, lanes, row=row, col=1)
        for trace in figure.data[before:]:
            trace.legendgroup = trace.name
            if row > 1:
                trace.showlegend = False
    longest = max(action.end_ms for _, lanes in rows for lane in lanes for action in lane)
    figure.update_xaxes(range=[0, 1.005 * longest], title_text=None)
    figure.update_xaxes(title_text="time (ms)", row=2, col=1)
    figure.update_annotations(x=0, xanchor="left", font={"size": theme.FONT_PX, "color": theme.MUTED})
    facts = f"{SCHEDULE_WORDS[plan.schedule]}, {plan.num_microbatches} micro-batches of {plan.micro_batch}"
    bubbles = f"bubble {bubble_share(predicted):.1%} predicted, {bubble_share(measured.lanes):.1%} measured"
    layout = timeline_legend()
    layout["legend"] = {**layout["legend"], "y": 1 + 28 / inner, "borderwidth": 0}
    figure.update_layout(
        template=theme.TEMPLATE,
        height=inner + 190,
        title=theme.title(theme.text(title or f"Schedule of {plan.model}"), theme.text(f"{facts}; {bubbles}")),
        margin={"t": 120, "b": 56},
        **layout,
    )
    return figure
