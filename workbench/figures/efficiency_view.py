"""Efficiency against linear scaling: the device time of a token on more devices, and what it consists of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import plotly.graph_objects as go

from workbench.arguments import checked_arguments
from workbench.errors import InvalidArgument, PlanMismatch
from workbench.figures import theme
from workbench.figures.figure import Figure
from workbench.planning.plan import Plan
from workbench.sweeps.measured import MeasuredCell, contention
from workbench.units import duration

PARTS = {
    "compute_ms": ("compute", theme.pale(theme.PALETTE[0], 0.45)),
    "communication_ms": ("exposed communication", theme.PALETTE[1]),
    "bubble_ms": ("bubble", theme.PALETTE[3]),
    "host_ms": ("waiting for the host", theme.PALETTE[5]),
    "optimizer_ms": ("optimiser", theme.PALETTE[2]),
}
"""Label and colour of each part of a predicted step, in the order in which they are stacked."""
GAP = 0.4
"""Distance between bars of different numbers of devices, beyond that of others, in bars."""
WORTH_A_LEGEND = 0.002
"""Share of a step below which a part of all plans is left out."""


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
    _check(plans)
    base = device_ms_per_token(plans[0], plans[0].prediction.step_ms)
    gaps = np.cumsum([0, *(plan.world != before.world for before, plan in pairwise(plans))])
    places = [float(at + GAP * gap) for at, gap in enumerate(gaps)]
    figure = Figure([bar for part in PARTS for bar in _bars(plans, places, part, base)])
    heights = [device_ms_per_token(plan, plan.prediction.step_ms) / base for plan in plans]
    marks, states = _measured(points), [getattr(point, "state", "") for point in points]
    failed = [at for at, state in enumerate(states) if state == "failed"]
    steps = {at: point.step_ms or 0.0 for at, point in enumerate(points) if isinstance(point, MeasuredCell)}
    told = {at: f"measured {duration(steps[at] / 1e3)} a step, efficiency {1 / h:.0%}" for at, h in marks.items()}
    reasons = {at: theme.text(getattr(points[at], "reason", "")) for at in failed}
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
    labels = [_label(plan) for plan in plans]
    figure.update_xaxes(tickmode="array", tickvals=places, ticktext=labels, ticks="", showgrid=False)
    figure.update_yaxes(title_text=f"device time of a token, {plans[0].world} × {plans[0].cluster.device.name} = 1")
    figure.update_yaxes(range=[0, top])
    subtitle = "bars: predicted, and the efficiency that follows; dashed: linear scaling"
    subtitle += "; diamonds: measured, and their efficiency" if marks else ""
    if warning := contention([point for point in points if isinstance(point, MeasuredCell)]):
        subtitle += f"<br>{warning}"
    words = f"{plans[0].model} on {plans[0].cluster.device.name}: efficiency against linear scaling"
    title, margin = theme.title(theme.text(words), subtitle), {"b": 100, "t": 84}
    return figure.laid_out(height=470, title=title, margin=margin, barmode="stack", legend=theme.LEGEND_BELOW)


def _bars(plans: Sequence[Plan], places: Sequence[float], part: str, base: float) -> list[go.Bar]:
    """Return the bars of one part of the steps; none where it is nothing in all of them."""
    name, color = PARTS[part]
    parts = [float(getattr(plan.prediction, part)) for plan in plans]
    shares = [ms / plan.prediction.step_ms for plan, ms in zip(plans, parts, strict=True)]
    if max(map(abs, shares)) < WORTH_A_LEGEND:
        return []
    y = [device_ms_per_token(plan, ms) / base for plan, ms in zip(plans, parts, strict=True)]
    words = [
        f"{theme.text(plan.describe())}<br>{name}: {duration(ms / 1e3)}, {share:.1%}"
        for plan, ms, share in zip(plans, parts, shares, strict=True)
    ]
    look = {"name": name, "width": 0.7, "marker": {"color": color}}
    return [go.Bar(x=places, y=y, customdata=words, hovertemplate="%{customdata}<extra></extra>", **look)]


def device_ms_per_token(plan: Plan, ms: float) -> float:
    """Return a time of each step of a plan, in ms, as the time of all devices together for one token."""
    return ms * plan.world / (plan.global_batch * plan.seq_len)


def _check(plans: Sequence[Plan]) -> None:
    if not plans:
        raise InvalidArgument("No plan is given. Give a list, the plan on one device first.")
    other = next((plan for plan in plans if plan.signature != plans[0].signature), None)
    if other is not None:
        raise PlanMismatch(
            f"The plans are of two models, {plans[0].model} and {other.model} (signatures {plans[0].signature} and "
            f"{other.signature}). Draw a figure for each."
        )


def _measured(points: Sequence[Plan | MeasuredCell]) -> dict[int, float]:
    """Return the height of each measured point by its position; none where the first was not measured."""
    known = {
        at: device_ms_per_token(point.plan, point.step_ms)
        for at, point in enumerate(points)
        if isinstance(point, MeasuredCell) and point.step_ms is not None
    }
    return {at: value / known[0] for at, value in known.items()} if 0 in known else {}


def _label(plan: Plan) -> str:
    """Return the devices of a plan and how they divide a step, for below a bar."""
    if plan.pipeline * plan.tensor > 1:
        return f"{plan.world}<br>{theme.text(plan.division().partition(',')[0])}"
    return f"{plan.world}<br>ZeRO {plan.zero}" if plan.data > 1 else str(plan.world)
