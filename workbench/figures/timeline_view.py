"""Figures of one step: its schedule, with a lane for each pipeline rank, and predictions beside measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.base.errors import UnknownParameter, suggestion
from workbench.base.units import GIB, count, duration
from workbench.figures import theme
from workbench.figures.figure import Figure, subplots
from workbench.planning.plan import Plan
from workbench.planning.prediction import AROUND, TimedAction, Timeline, most_in_flight
from workbench.planning.prediction import timeline as simulated
from workbench.record.history import History
from workbench.strategy import SCHEDULES

ACTION_LOOKS = {"F": ("forward", theme.FORWARD), "B": ("backward", theme.BACKWARD)}
"""Name and colour of each action type."""
AROUND_COLORS = {
    "O": theme.pale(theme.PALETTE[1], 0.55),
    "E": theme.PALETTE[1],
    "H": theme.PALETTE[6],
    "U": theme.PALETTE[2],
    "R": theme.GRID,
}
"""Colour of each type of `AROUND`: that of its part in `scaling_efficiency`, and pale grey for what is not known."""
DENSE_LANE = 400
"""Number of actions in a lane above which they are drawn as one area per shade.

Bars of that number are narrower than a pixel or two: each would take a whole pixel and hide its neighbours, and a
browser would take seconds to draw them. The edges of an area blend.
"""
NUMBERED_LANE = 90
"""Number of actions in a lane above which bars have no room for numbers."""
LANE = 0.8
"""Height of a lane, as a share of the distance between two lanes."""
COMPUTE, COMMUNICATION = 0.54, 0.22
"""Heights of compute and of communication in a lane that has both."""
CLEAR = "rgba(0, 0, 0, 0)"
"""Colour of idle time below its hatching: bars keep their colours in a dark theme, where paper is dark."""
MEASURED = "measured, one sampled step"
GAP_PX = 56
"""Height between the two timelines of one figure."""
SHOWN_AFTER = 1.01
"""Length of a step over that of its forward and backward from which both are written."""
FIGURE_SPACE = "\u2007"
"""A space as wide as a digit: labels of equal length vanish together when bars grow narrow."""

BAR_LAYOUT: Mapping[str, Any] = {"barmode": "overlay", "bargap": 0.0, "uniformtext": {"mode": "hide", "minsize": 8}}
"""Layout of a figure whose only bars are those of timelines."""


def stages_held(plan: Plan, pipeline_rank: int) -> str:
    """Return the stages of a pipeline rank, such as `stage 2`, or `stages 2, 6` if it has several."""
    held = [str(stage.index) for stage in plan.stages_of(pipeline_rank)]
    return f"stage{'s' * (len(held) > 1)} {', '.join(held)}"


def describe(step: Timeline) -> str:
    """Return length and bubble of a step, such as `"213 ms, of which forward and backward 200 ms; bubble 18.8%"`."""
    ms = step.end_ms
    length = f"{ms:,.0f} ms" if 1e3 <= ms < 1e4 else duration(ms / 1e3)
    inner = duration(step.step_ms / 1e3)
    part = f", of which forward and backward {inner}" if step.end_ms > SHOWN_AFTER * step.step_ms else ""
    return f"{length}{part}; bubble {step.bubble_fraction:.1%}"


def draw_timeline(plan: Plan, measured: Timeline | None = None) -> Figure:
    """Draw one step of a plan as predicted and, below it on the same axis of time, as a run has measured it.

    Each pipeline rank has a lane. Forward and backward are numbered by micro-batch if there is room; the bubble is
    hatched. A predicted step has a lane for communication below that, as in a profiler, and ends with the update; of a
    measured step, forward and backward alone are known, and what follows them is one pale bar up to the step's end.
    """
    predicted = simulated(plan)
    facts = f"{SCHEDULES[plan.schedule].words}, {plan.num_microbatches} micro-batches of {plan.micro_batch}"
    if measured is None:
        figure, margin = Figure(), {"t": 86, "b": 86}
        add_timeline(figure, predicted)
        height, facts = timeline_height(predicted) + 176, f"{facts}: {describe(predicted)}"
    else:
        rows = [("predicted", predicted), (MEASURED, measured)]
        heights, margin = [timeline_height(step) for _, step in rows], {"t": 108, "b": 86}
        inner = sum(heights) + GAP_PX
        figure = subplots(
            rows=2,
            cols=1,
            shared_xaxes=True,
            row_heights=[height / sum(heights) for height in heights],
            vertical_spacing=GAP_PX / inner,
            subplot_titles=[f"<b>{word}</b>: {describe(step)}" for word, step in rows],
        )
        add_stacked_timelines(figure, [step for _, step in rows], first_row=1)
        figure.update_xaxes(title_text=None, row=1, col=1)
        figure.update_annotations(x=0, xanchor="left", font={"size": theme.FONT_PX, "color": theme.MUTED})
        height = inner + 194
    title = theme.title(theme.text(f"Schedule of {plan.model}"), theme.text(facts))
    return figure.laid_out(height=height, title=title, margin=margin, legend=theme.LEGEND_BELOW, **BAR_LAYOUT)


def timeline_height(step: Timeline) -> int:
    """Return the height of the plot area in pixels."""
    num_ranks = len(step.lanes)
    return max(56, num_ranks * max(18, min(44, 480 // max(1, num_ranks))))


def add_timeline(figure: Figure, step: Timeline, *, row: int | None = None, col: int | None = None) -> list[Any]:
    """Draw a step into a figure or into one of its subplots, and return the traces as the figure holds them."""
    before, lanes = len(figure.data), step.lanes
    split = any(action.type in "OE" for lane in step.around for action in lane)  # a lane of communication below compute
    place = {} if row is None else {"row": row, "col": col}
    figure.add_trace(_idle_trace(step, split), **place)
    places = {} if row is None else {"rows": row, "cols": col}
    figure.add_traces(_action_traces(lanes, split), **places)
    # A trace for each type of `AROUND`: communication in its own lane, the rest in that of compute.
    compute, below = _compute_place(split), ((LANE - COMMUNICATION) / 2, COMMUNICATION)
    dense = max(map(len, step.around), default=0) > DENSE_LANE
    for type_, label in AROUND.items():
        rows = [(rank, action) for rank, lane in enumerate(step.around) for action in lane if action.type == type_]
        if rows:
            make = _area_trace if dense else partial(_bar_trace, numbered=False)
            trace = make(label, AROUND_COLORS[type_], rows, below if type_ in "OE" else compute).update(meta="around")
            # Bars have a text for the reason given at the idle time.
            figure.add_traces(trace if dense else trace.update(text=FIGURE_SPACE), **places)
    one_stage_each = all(len({action.stage for action in lane}) <= 1 for lane in lanes)
    ends = [0, step.end_ms * 1.005]
    title = "time (ms)" if one_stage_each else "time (ms); the paler a bar, the later its stage"
    figure.update_xaxes(title_text=title, tickformat=",", range=ends, showgrid=False, **place)
    names = [f"<b>stage {rank}</b>" if one_stage_each else f"<b>{rank}</b>" for rank in range(len(lanes))]
    ticks = {"tickmode": "array", "tickvals": list(range(len(lanes))), "ticktext": names, "ticklabelstandoff": 6}
    lane = None if one_stage_each else "pipeline rank"
    figure.update_yaxes(title_text=lane, range=[len(lanes) - 0.5, -0.5], showgrid=False, **ticks, **place)
    return list(figure.data[before:])


def add_stacked_timelines(figure: Figure, steps: Sequence[Timeline], *, first_row: int) -> None:
    """Draw several steps below one another on one axis of time, with one legend entry for all."""
    longest, named = max((step.end_ms for step in steps), default=0.0), set[str]()
    for row, step in enumerate(steps, start=first_row):
        for trace in add_timeline(figure, step, row=row, col=1):
            trace.legendgroup = trace.name
            if row > first_row and trace.name in named:
                trace.showlegend = False
            named.add(trace.name)
        figure.update_xaxes(range=[0, 1.005 * longest], row=row, col=1)


Place = tuple[float, float]
"""Centre of a bar below its lane's centre, and its height, as shares of the distance between two lanes."""


def _compute_place(split: bool) -> Place:
    """Return where compute is drawn: above the lane of communication, if there is one."""
    return (-(LANE - COMPUTE) / 2, COMPUTE) if split else (0.0, LANE)


def _action_traces(lanes: Sequence[Sequence[TimedAction]], split: bool) -> list[go.Bar | go.Scatter]:
    """Return one trace per action type and shade: a colour per bar would take longer to validate than to draw."""
    groups: dict[tuple[str, str], list[tuple[int, TimedAction]]] = {}
    for action_type, (_, color) in ACTION_LOOKS.items():
        for rank, lane in enumerate(lanes):
            for action in lane:
                if action.type == action_type:
                    shade = _shade(color, action.stage // max(1, len(lanes)), action.micro_batch % 2)
                    groups.setdefault((action_type, shade), []).append((rank, action))
    most = max(map(len, lanes), default=0)
    make = _area_trace if most > DENSE_LANE else partial(_bar_trace, numbered=most <= NUMBERED_LANE)
    named: set[str] = set()
    traces = []
    for (action_type, shade), rows in sorted(
        groups.items(), key=lambda item: item[0][1] != ACTION_LOOKS[item[0][0]][1]
    ):
        trace = make(ACTION_LOOKS[action_type][0], shade, rows, _compute_place(split))
        trace.showlegend = action_type not in named
        named.add(action_type)
        traces.append(trace)
    return traces


@cache
def _shade(color: str, chunk: int, odd: int) -> str:
    """Return the colour of an action: paler for later stages of a rank, and different for odd micro-batches."""
    share = min(0.66, 0.36 * chunk) + 0.14 * odd
    return theme.pale(color, share) if share else color


def _bar_trace(
    label: str, shade: str, rows: Sequence[tuple[int, TimedAction]], place: Place, *, numbered: bool
) -> go.Bar:
    """Return bars of one colour, numbered by micro-batch if `numbered`."""
    starts = np.array([action.start_ms for _, action in rows])
    lengths = np.array([action.end_ms for _, action in rows]) - starts
    facts = [(action.stage, action.micro_batch) for _, action in rows]
    digits = len(str(max(number for _, number in facts)))
    return go.Bar(
        orientation="h",
        base=starts,
        x=lengths,
        y=np.array([rank + place[0] for rank, _ in rows]),
        width=place[1],
        name=label,
        legendgroup=label,
        marker={"color": shade, "line": {"color": "white", "width": 0.6 if numbered else 0}},
        text=[str(number).rjust(digits, FIGURE_SPACE) for _, number in facts] if numbered else None,
        **(theme.TEXT_INSIDE if numbered else {}),
        textfont={"color": theme.ink_on(shade), "size": 10},
        customdata=np.column_stack([np.array(facts, dtype=np.float64), lengths]),
        # plotly.js replaces %{x} of a bar by its end: base and length together.
        hovertemplate=(
            f"<b>{label}</b> of micro-batch %{{customdata[1]}}<br>stage %{{customdata[0]}} · "
            "%{base:.4~g} to %{x:.4~g} ms (%{customdata[2]:.3~g} ms)<extra></extra>"
        ),
        meta="actions",
    )


def _area_trace(label: str, shade: str, rows: Sequence[tuple[int, TimedAction]], place: Place) -> go.Scatter:
    """Return the same bars as the outline of one area, which returns along the lane's lower edge."""
    ranks = np.array([rank for rank, _ in rows], dtype=np.float32)
    times = np.array([(action.start_ms, action.end_ms) for _, action in rows], dtype=np.float32)
    order = np.lexsort((times[:, 0], ranks))
    ranks, times = ranks[order], times[order]
    x = np.repeat(times, 2, axis=1).ravel()
    edges = place[0] + place[1] / 2 * np.array([1, -1, -1, 1], dtype=np.float32)
    y = (ranks[:, None] + edges).ravel()
    lane_ends = 4 * (1 + np.flatnonzero(np.diff(ranks)))  # A NaN at each keeps the lanes apart.
    x, y = (np.insert(values, lane_ends, np.nan) for values in (x, y))
    look = {"mode": "none", "fill": "toself", "fillcolor": shade, "hoveron": "fills", "hoverinfo": "name"}
    return go.Scatter(x=x, y=y, name=label, legendgroup=label, meta="actions", **look)


def _idle_trace(step: Timeline, split: bool) -> go.Bar:
    """Return a hatched bar for every gap in every lane, from the first forward to the last backward."""
    gaps, place = list[tuple[int, float, float]](), _compute_place(split)
    for rank, lane in enumerate(step.lanes):
        free = 0.0
        for action in sorted(lane, key=lambda each: each.start_ms):
            gaps.append((rank, free, action.start_ms))
            free = max(free, action.end_ms)
        gaps.append((rank, free, step.step_ms))
    ranks, starts, ends = np.array([gap for gap in gaps if gap[2] > gap[1] + 1e-9]).reshape(-1, 3).T
    lengths = ends - starts
    pattern = {"shape": "/", "fgcolor": theme.AXIS, "bgcolor": CLEAR, "size": 6, "solidity": 0.2}
    return go.Bar(
        orientation="h",
        base=starts,
        x=lengths,
        y=ranks + place[0],
        width=place[1],
        name="idle (bubble)",
        marker={"color": CLEAR, "line": {"width": 0}, "pattern": pattern},
        text=FIGURE_SPACE,  # plotly.js hides text that does not fit only if the last subplot's bars have text
        customdata=lengths,
        hovertemplate="idle %{customdata:.3~g} ms<extra></extra>",
        meta="idle",
    )


def measured_timeline(events: Iterable[Mapping[str, Any]], history: History | None = None) -> Timeline | None:
    """Return the latest step that every pipeline rank recorded in a run's `actions` events; None without one.

    Forward and backward are recorded. With the run's history, the step is as long as that has it, and what follows the
    last backward is one action of type `R`. Time counts from the first action of any rank. Ranks of one node share a
    clock; ranks of several nodes agree as well as the nodes' clocks do.
    """
    steps: dict[int, dict[int, Mapping[str, Any]]] = {}
    for event in events:
        if event["type"] == "actions":
            steps.setdefault(int(event["step"]), {})[int(event["rank"])] = event
    most = max((len(by_rank) for by_rank in steps.values()), default=0)
    complete = [step for step, by_rank in steps.items() if len(by_rank) == most]
    if not complete:
        return None
    latest = max(complete)
    ranks = [event for _, event in sorted(steps[latest].items())]
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
    whole_ms = step_ms if history is None else max([step_ms, *history.step_ms[history.step == latest]])
    rest = TimedAction("R", 0, 0, step_ms, float(whole_ms))
    around = tuple((rest,) for _ in lanes) if whole_ms > step_ms else ()
    return Timeline(lanes, step_ms, busy_ms, tuple(map(most_in_flight, lanes)), around)


# A plan's predictions beside the measurements of its run. The error of a prediction is a share of the measurement.

PANELS_PX = 190
"""Height of the row of panels."""
TITLE_LETTERS, TITLE_LINE_PX = 18, 15
"""Letters of a line of a panel's title, which beside others fits into a narrow figure, and the height of a line."""
PANELS_GAP_PX = 74
"""Height between the panels and a timeline: the panels' labels and the timeline's heading."""
MAX_UPRIGHT_PAIRS = 8
"""Number of pairs in a panel above which they stand so close that their numbers are turned."""
NUMBERS: Mapping[str, tuple[str, float, Callable[[float], str]]] = {
    "step_ms": ("Step time (ms)", 1.0, lambda ms: f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"),
    "tokens_per_s": ("Tokens/s", 1.0, count),
    "mfu": ("MFU (%)", 100.0, lambda share: f"{share:.1f}"),
}
"""Title, scale and spelling of each quantity that is one number of a run, in the order of their panels."""
MEASURES = (*NUMBERS, "peak_bytes")
"""Quantities that can be compared."""


@dataclass(frozen=True)
class Pair:
    """One quantity, predicted and measured; `label` tells the bars of one panel apart."""

    label: str
    predicted: float
    measured: float
    write: Callable[[float], str]

    @property
    def error(self) -> str:
        """Error of the prediction as a share of the measurement."""
        share = (self.predicted - self.measured) / self.measured if self.measured else float("nan")
        return f"<b>{share:+.1%}</b>" if math.isfinite(share) else "<b>–</b>"


def prediction(
    plan: Plan, measured: Mapping[str, Any], title: str | None = None, step: Timeline | None = None
) -> Figure:
    """Draw predicted beside measured step time, tokens/s, MFU and peak memory, with the error of each prediction.

    The error is (predicted - measured) / measured.

    Args:
        plan: the plan whose predictions are shown.
        measured: any of `step_ms`, `tokens_per_s`, `mfu` (0 to 1) and `peak_bytes`. The latter is the largest of all
            devices, or a mapping of pipeline rank to the largest of that rank's devices. None, NaN and an empty
            mapping mean that a quantity was not measured.
        title: title of the figure.
        step: a measured step; its timeline stands below the predicted one, on one axis of time.

    Raises:
        UnknownParameter: `measured` has another key, or there is nothing to compare.
    """
    panels = _panels(plan, measured)
    steps = [] if step is None else [("predicted", simulated(plan)), (MEASURED, step)]
    heights = [PANELS_PX, *(timeline_height(each) for _, each in steps)]
    inner = sum(heights) + PANELS_GAP_PX * len(steps)
    names = [theme.broken(name, TITLE_LETTERS) for name, _ in panels]
    above = 103 + TITLE_LINE_PX * (1 + max(name.count("<br>") for name in names))
    figure = subplots(
        rows=len(heights),
        cols=len(panels),
        specs=[[{}] * len(panels), *([{"colspan": len(panels)}, *[None] * (len(panels) - 1)] for _ in steps)],
        column_widths=[max(1.0, 0.45 * len(pairs) + 0.55) for _, pairs in panels],
        row_heights=[height / sum(heights) for height in heights],
        subplot_titles=names + [f"<b>{word}</b>: {describe(each)}" for word, each in steps],
        horizontal_spacing=0.05,
        vertical_spacing=PANELS_GAP_PX / inner,
    )
    looks = {"predicted": (theme.pale(theme.PALETTE[0], 0.55), -0.32), "measured": (theme.PALETTE[0], 0.02)}
    for col, (_, pairs) in enumerate(panels, start=1):
        labels = [pair.label for pair in pairs]
        for name, (color, offset) in looks.items():
            values = [getattr(pair, name) for pair in pairs]
            words = {
                "text": [pair.write(value) for pair, value in zip(pairs, values, strict=True)],
                "textposition": "outside",
                "textangle": -90 if len(pairs) > MAX_UPRIGHT_PAIRS else 0,
                "textfont": {"size": 11},
                "hovertemplate": f"{name} %{{text}}<extra></extra>",
            }
            named = {"name": name, "legendgroup": name, "showlegend": col == 1, "marker": {"color": color}}
            # An explicit offset parts these bars, since those of a timeline in the same figure must overlay.
            bars = go.Bar(x=labels, y=values, offset=offset, width=0.3, **named, **words)
            figure.add_trace(bars.update(constraintext="none", cliponaxis=False), row=1, col=col)
        tallest = max(max(pair.predicted, pair.measured) for pair in pairs)
        ticks = ["<br>".join(filter(None, (pair.label, pair.error))) for pair in pairs]
        figure.update_xaxes(tickmode="array", tickvals=labels, ticktext=ticks, ticks="", row=1, col=col)
        figure.update_yaxes(range=[0, 1.18 * tallest], showticklabels=False, showgrid=False, row=1, col=col)
    add_stacked_timelines(figure, [each for _, each in steps], first_row=2)
    figure.update_annotations(font={"size": theme.FONT_PX, "color": theme.MUTED})
    facts = f"{plan.describe()} · percentages: how far the prediction lies above (+) or below (−) the measurement"
    return figure.laid_out(
        height=inner + above + 72,
        title=theme.title(theme.text(title or f"{plan.model}: predicted and measured"), theme.text(facts)),
        margin={"t": above, "b": 72, "l": 32},
        barmode="overlay",
        uniformtext={"mode": "hide", "minsize": 8} if step is not None else None,
        legend=theme.LEGEND_BELOW,
    )


def _panels(plan: Plan, measured: Mapping[str, Any]) -> list[tuple[str, list[Pair]]]:
    """Return title and pairs of the panel of each quantity that was measured."""
    for key in measured:
        if key not in MEASURES:
            raise UnknownParameter(f"measured has no {key!r}. {suggestion(key, MEASURES)}")
    predicted = plan.prediction
    known = {
        key: value  # neither None, nor NaN, nor an empty mapping
        for key, value in measured.items()
        if (value if isinstance(value, Mapping) else value is not None and math.isfinite(value))
    }
    panels: list[tuple[str, list[Pair]]] = []
    for key, (title, scale, write) in NUMBERS.items():
        planned = getattr(predicted, key)
        if key == "step_ms" and plan.cluster.device.type == "cpu":
            title = f"{title}, predicted for idle cores"
        if key in known and planned is not None:
            panels.append((title, [Pair("", scale * planned, scale * float(known[key]), write)]))
    if "peak_bytes" in known:
        peaks = known["peak_bytes"]
        rows = [("largest", plan.peak_bytes, peaks)]
        if isinstance(peaks, Mapping):
            ranks = [rank for rank in range(plan.pipeline) if rank in peaks]
            rows = [(stages_held(plan, rank), plan.device_bytes(rank), peaks[rank]) for rank in ranks]
        pairs = [
            Pair(label, planned / GIB, float(peak) / GIB, lambda g: f"{g:.1f}" if g >= 1 else f"{g:.2g}")
            for label, planned, peak in rows
        ]
        panels.append(("Peak memory of a device (GiB)", pairs))
    if not panels:
        raise UnknownParameter(f"There is nothing measured to compare. Give one of: {', '.join(MEASURES)}.")
    return panels
