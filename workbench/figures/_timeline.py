"""The schedule of one step as a Gantt chart: a lane per pipeline rank, forward, backward and idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
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

DENSE_LANE = 400
"""More actions than these in a lane are narrower than a pixel or two: bars would each take a whole pixel and hide their
neighbours, no number would fit in one, and a browser would take seconds to find that out. They are drawn as one area a
shade instead, whose edges blend."""


NUMBERED_LANE = 90
"""More actions than these in a lane leave no room for numbers, and a browser takes longer to find that out than to draw
them."""

LANE = 0.8
"""Of the distance between two lanes, what a lane takes."""

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
    figure.add_traces(_action_traces(lanes), **({} if row is None else {"rows": row, "cols": col}))
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


def _action_traces(lanes: Lanes) -> list[go.Bar | go.Scatter]:
    """One for each kind of action and shade: a colour for every bar would take longer to check than to draw."""
    drawn: dict[tuple[str, str], list[tuple[int, ActionLike]]] = {}
    for kind, (_, color) in KINDS.items():
        for rank, lane in enumerate(lanes):
            for action in lane:
                if action.kind == kind:
                    drawn.setdefault((kind, _shade(color, action, len(lanes))), []).append((rank, action))
    most = max(map(len, lanes), default=0)
    make = _area_trace if most > DENSE_LANE else partial(_bar_trace, numbered=most <= NUMBERED_LANE)
    named: set[str] = set()
    traces = []
    for (kind, shade), rows in sorted(drawn.items(), key=lambda item: item[0][1] != KINDS[item[0][0]][1]):
        trace = make(KINDS[kind][0], shade, rows)
        trace.showlegend = kind not in named
        named.add(kind)
        traces.append(trace)
    return traces


def _bar_trace(label: str, shade: str, rows: Sequence[tuple[int, ActionLike]], *, numbered: bool) -> go.Bar:
    """Bars of one colour, perhaps `numbered` by micro-batch."""
    starts = np.array([action.start_ms for _, action in rows])
    lengths = np.array([action.end_ms for _, action in rows]) - starts
    facts = [(action.stage, action.micro_batch) for _, action in rows]
    digits = len(str(max(number for _, number in facts)))
    return go.Bar(
        orientation="h",
        base=starts,
        x=lengths,
        y=np.array([rank for rank, _ in rows], dtype=np.int32),
        width=LANE,
        name=label,
        legendgroup=label,
        marker={"color": shade, "line": {"color": "white", "width": 0.6}},
        text=[str(number).rjust(digits, FIGURE_SPACE) for _, number in facts] if numbered else None,
        textposition="inside" if numbered else None,
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": theme.ink_on(shade), "size": 10},
        customdata=np.column_stack([np.array(facts, dtype=np.float64), lengths]),
        # %{x} is where a bar ends, its base and length together
        hovertemplate=(
            f"<b>{label}</b> of micro-batch %{{customdata[1]}}<br>stage %{{customdata[0]}} · "
            "%{base:.4~g} to %{x:.4~g} ms (%{customdata[2]:.3~g} ms)<extra></extra>"
        ),
        meta="actions",
    )


def _area_trace(label: str, shade: str, rows: Sequence[tuple[int, ActionLike]]) -> go.Scatter:
    """The same bars as the outline of one area: up, along, down, and on along the lane's lower edge."""
    ranks = np.array([rank for rank, _ in rows], dtype=np.float32)
    times = np.array([(action.start_ms, action.end_ms) for _, action in rows], dtype=np.float32)
    order = np.lexsort((times[:, 0], ranks))
    ranks, times = ranks[order], times[order]
    x = np.repeat(times, 2, axis=1).ravel()
    y = (ranks[:, None] + LANE / 2 * np.array([1, -1, -1, 1], dtype=np.float32)).ravel()
    ends = 4 * (1 + np.flatnonzero(np.diff(ranks)))  # lanes are apart
    return go.Scatter(
        x=np.insert(x, ends, np.nan),
        y=np.insert(y, ends, np.nan),
        mode="none",
        fill="toself",
        fillcolor=shade,
        name=label,
        legendgroup=label,
        hoveron="fills",
        hoverinfo="name",
        meta="actions",
    )


@lru_cache(maxsize=64)
def _shade_of(color: str, turn: int, *, odd: bool) -> str:
    share = min(0.66, 0.36 * turn) + (0.14 if odd else 0.0)
    return theme.pale(color, share) if share else color


def _shade(color: str, action: ActionLike, num_ranks: int) -> str:
    """Later stages of the same rank paler (interleaved schedules); neighbouring micro-batches a little apart."""
    return _shade_of(color, action.stage // max(1, num_ranks), odd=action.micro_batch % 2 == 1)


def _idle_trace(idle: Sequence[Idle]) -> go.Bar:
    lengths = np.array([gap.end_ms - gap.start_ms for gap in idle])
    return go.Bar(
        orientation="h",
        base=np.array([gap.start_ms for gap in idle]),
        x=lengths,
        y=np.array([gap.rank for gap in idle], dtype=np.int32),
        width=LANE,
        name="idle (bubble)",
        marker={
            "color": "#F3F4F6",
            "line": {"width": 0},
            "pattern": {"shape": "/", "fgcolor": "#C3C9D2", "bgcolor": "#F3F4F6", "size": 6, "solidity": 0.25},
        },
        customdata=lengths,
        hovertemplate="idle %{customdata:.3~g} ms<extra></extra>",
        meta="idle",
    )


def describe(lanes: Lanes) -> str:
    """`"213 ms, bubble 18.8%"`."""
    end_ms = max((action.end_ms for lane in lanes for action in lane), default=0.0)
    length = f"{end_ms:,.0f} ms" if 1e3 <= end_ms < 1e4 else duration(end_ms / 1e3)
    return f"{length}, bubble {bubble_share(lanes):.1%}"
