"""The schedule of one step as a Gantt chart: a lane per pipeline rank, forward, backward and idle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import plotly.graph_objects as go

from workbench.figures import theme
from workbench.planning.plan import SCHEDULE_WORDS, Plan
from workbench.planning.schedules import Timeline
from workbench.planning.timelines import timeline as simulated
from workbench.units import duration

KINDS = {
    "F": ("forward", theme.FORWARD),
    "B": ("backward", theme.BACKWARD),
    "I": ("input gradient", theme.BACKWARD),
    "W": ("weight gradient", theme.WEIGHT),
}

LINE_BELOW_BARS = 400
"""More bars than these in a lane, and the white lines between them would hide them."""


FIGURE_SPACE = "\u2007"
"""As wide as a digit: labels of equal length vanish together when bars grow narrow."""


class ActionLike(Protocol):
    """One piece of work of a pipeline rank."""

    @property
    def kind(self) -> str: ...

    @property
    def stage(self) -> int: ...

    @property
    def micro_batch(self) -> int: ...

    @property
    def start_ms(self) -> float: ...

    @property
    def end_ms(self) -> float: ...


Lanes = Sequence[Sequence[ActionLike]]


@dataclass(frozen=True)
class Idle:
    """A bubble: `rank` waits from `start_ms` to `end_ms`."""

    rank: int
    start_ms: float
    end_ms: float


def idle_times(lanes: Lanes, end_ms: float) -> list[Idle]:
    """Every gap in every lane between 0 and `end_ms`."""
    idle = []
    for rank, lane in enumerate(lanes):
        free = 0.0
        for action in sorted(lane, key=lambda a: a.start_ms):
            if action.start_ms > free + 1e-9:
                idle.append(Idle(rank, free, action.start_ms))
            free = max(free, action.end_ms)
        if end_ms > free + 1e-9:
            idle.append(Idle(rank, free, end_ms))
    return idle


def bubble_share(lanes: Lanes) -> float:
    """Idle time over all lanes' time, from the first action to the end of the last."""
    end_ms = max((action.end_ms for lane in lanes for action in lane), default=0.0)
    if end_ms <= 0:
        return 0.0
    return sum(idle.end_ms - idle.start_ms for idle in idle_times(lanes, end_ms)) / (end_ms * len(lanes))


def timeline(schedule: Plan | Timeline, title: str | None = None) -> go.Figure:
    """One step's schedule: a plan's, predicted from its stages, or any `Timeline`, also a measured one.

    A lane per pipeline rank; forward and backward numbered by micro-batch where there is room, waiting
    hatched. The schedule is the pipeline's alone: what follows it in a step (reduction over the data-parallel
    axis, clipping, optimiser) is in the plan's `step_ms` and not drawn.
    """
    lanes = planned_lanes(schedule) if isinstance(schedule, Plan) else schedule.lanes
    facts = describe(lanes)
    if isinstance(schedule, Plan):
        name = SCHEDULE_WORDS[schedule.schedule]
        facts = f"{name}, {schedule.num_microbatches} micro-batches of {schedule.micro_batch}: {facts}"
    heading = title or (f"Schedule of {schedule.model}" if isinstance(schedule, Plan) else "Schedule of one step")
    figure = go.Figure()
    add_timeline(figure, lanes)
    figure.update_layout(
        template=theme.TEMPLATE,
        height=timeline_height(len(lanes)) + 160,
        title=theme.title(theme.text(heading), theme.text(facts)),
        margin={"t": 96, "b": 60},
        **timeline_legend(),
    )
    return figure


def planned_lanes(plan: Plan) -> Lanes:
    """The plan's schedule, simulated with the stages' predicted times."""
    return simulated(plan).lanes


def timeline_legend() -> dict[str, Any]:
    return {
        "barmode": "overlay",
        "bargap": 0.0,
        "uniformtext": {"mode": "hide", "minsize": 8},
        "legend": {
            "orientation": "h",
            "x": 1,
            "xanchor": "right",
            "y": 1.02,
            "yanchor": "bottom",
            "traceorder": "normal",
        },
    }


def timeline_height(num_ranks: int) -> int:
    """Pixels of the plot area."""
    return max(56, num_ranks * max(18, min(44, 480 // max(1, num_ranks))))


def add_timeline(figure: go.Figure, lanes: Lanes, *, row: int | None = None, col: int | None = None) -> None:
    """Draw the lanes into a figure or one of its subplots."""
    end_ms = max((action.end_ms for lane in lanes for action in lane), default=0.0)
    place = {} if row is None else {"row": row, "col": col}
    figure.add_trace(_idle_trace(idle_times(lanes, end_ms)), **place)
    for kind, (label, color) in KINDS.items():
        found = [(rank, action) for rank, lane in enumerate(lanes) for action in lane if action.kind == kind]
        if found:
            figure.add_trace(_action_trace(label, color, found, len(lanes)), **place)
    figure.update_xaxes(title_text="time (ms)", range=[0, end_ms * 1.005], showgrid=False, **place)
    figure.update_yaxes(
        tickmode="array",
        tickvals=list(range(len(lanes))),
        ticktext=_rank_labels(lanes),
        range=[len(lanes) - 0.5, -0.5],
        showgrid=False,
        ticklabelstandoff=6,
        **place,
    )


def _rank_labels(lanes: Lanes) -> list[str]:
    """`stage 2`, or `rank 2` where a rank runs several stages in turn."""
    one_each = all(len({action.stage for action in lane}) <= 1 for lane in lanes)
    word = "stage" if one_each else "rank"
    return [f"<b>{word} {rank}</b>" for rank in range(len(lanes))]


def _action_trace(label: str, color: str, found: Iterable[tuple[int, ActionLike]], num_ranks: int) -> go.Bar:
    rows = list(found)
    shades = [_shade(color, action, num_ranks) for _, action in rows]
    digits = len(str(max(action.micro_batch for _, action in rows)))
    widest_lane = max(sum(rank == lane for rank, _ in rows) for lane in range(num_ranks))
    return go.Bar(
        orientation="h",
        base=[action.start_ms for _, action in rows],
        x=[action.end_ms - action.start_ms for _, action in rows],
        y=[rank for rank, _ in rows],
        width=0.8,
        name=label,
        marker={"color": shades, "line": {"color": "white", "width": 0.6 if widest_lane <= LINE_BELOW_BARS else 0}},
        text=[str(action.micro_batch).rjust(digits, FIGURE_SPACE) for _, action in rows],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": [theme.ink_on(shade) for shade in shades], "size": 10},
        customdata=[[action.stage, action.micro_batch, action.start_ms, action.end_ms] for _, action in rows],
        hovertemplate=(
            f"<b>{label}</b> of micro-batch %{{customdata[1]}}<br>stage %{{customdata[0]}} · "
            "%{customdata[2]:.4~g} to %{customdata[3]:.4~g} ms (%{x:.3~g} ms)<extra></extra>"
        ),
        meta="actions",
    )


def _shade(color: str, action: ActionLike, num_ranks: int) -> str:
    """Later stages of the same rank paler (interleaved schedules); neighbouring micro-batches a little apart."""
    turn = action.stage // max(1, num_ranks)
    share = min(0.66, 0.36 * turn) + (0.14 if action.micro_batch % 2 else 0.0)
    return theme.pale(color, share) if share else color


def _idle_trace(idle: Sequence[Idle]) -> go.Bar:
    return go.Bar(
        orientation="h",
        base=[gap.start_ms for gap in idle],
        x=[gap.end_ms - gap.start_ms for gap in idle],
        y=[gap.rank for gap in idle],
        width=0.8,
        name="idle (bubble)",
        marker={
            "color": "#F3F4F6",
            "line": {"width": 0},
            "pattern": {"shape": "/", "fgcolor": "#C3C9D2", "bgcolor": "#F3F4F6", "size": 6, "solidity": 0.25},
        },
        hovertemplate="idle %{x:.3~g} ms<extra></extra>",
        meta="idle",
    )


def describe(lanes: Lanes) -> str:
    """`"213 ms, bubble 18.8%"`."""
    end_ms = max((action.end_ms for lane in lanes for action in lane), default=0.0)
    return f"{duration(end_ms / 1e3)}, bubble {bubble_share(lanes):.1%}"
