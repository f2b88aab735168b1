"""Figures of plans and of grids: efficiency against linear scaling, predicted and measured steps, memory and speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import plotly.graph_objects as go

from workbench.analysis.pareto import pareto_front
from workbench.arguments import checked_arguments
from workbench.errors import InvalidArgument, PlanMismatch
from workbench.figures import theme
from workbench.figures.figure import Figure
from workbench.planning.plan import Plan
from workbench.planning.table import Plans
from workbench.sweeps.grid import Grid
from workbench.sweeps.measured import MeasuredCell, MeasuredGrid, contention
from workbench.units import GIB, duration, gib

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
            words = [theme.text(_seen(cell)) for cell in shown]
            figure.add_trace(theme.marks([cell.predicted_ms for cell in shown], heights, name, marker, words))
    figure.update_xaxes(**theme.log_axis((least, most)), title_text="predicted step (ms)")
    figure.update_yaxes(**theme.log_axis((least, most)), title_text="measured step (ms)")
    lines = [theme.text(line) for line in measured.sentences()[:3]]
    title = theme.title(theme.text(measured.path.name), "<br>".join(lines))
    return figure.laid_out(height=510, title=title, margin={"t": 90, "b": 92}, legend=theme.LEGEND_BELOW)


def _seen(cell: MeasuredCell) -> str:
    """Return what was predicted of a cell, and what was measured or why it was not."""
    found = cell.reason if cell.step_ms is None else f"measured {duration(cell.step_ms / 1e3)}"
    return f"{cell.name}: predicted {duration(cell.predicted_ms / 1e3)}, {found}"


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
    figure = Figure()
    shardings = sorted({(point.plan.zero, point.sharding) for point in points})
    for index, (_, name) in enumerate(shardings):
        color = theme.series_color(index)
        own = [point for point in points if point.sharding == name]
        marker = {
            "color": [theme.pale(color) if point.plan.offload_optimizer else color for point in own],
            "symbol": [SYMBOLS[point.plan.recompute] for point in own],
            "size": 11,
            "line": {"color": color, "width": 1.5},
        }
        x, y = [point.peak_bytes / GIB for point in own], [point.step_ms / 1e3 for point in own]
        figure.add_trace(theme.marks(x, y, name, marker, [point.words for point in own], showlegend=False))
        figure.add_trace(_explained(name, color, color, "circle"))
    if any(point.plan.offload_optimizer for point in points):
        figure.add_trace(_explained("optimiser on the host", theme.pale(theme.MUTED), theme.MUTED, "circle"))
    for kind in [kind for kind in SYMBOLS if any(point.plan.recompute == kind for point in points)]:
        figure.add_trace(_explained(CHECKPOINTING[kind], theme.MUTED, theme.MUTED, SYMBOLS[kind]))
    x, y = [peak_bytes / GIB for peak_bytes, _ in front], [ms / 1e3 for _, ms in front]
    line = theme.curve(x, y, "Pareto front", theme.INK, width=1.5, line_shape="hv", hoverinfo="skip")
    figure.add_trace(line)
    figure.update_xaxes(title_text=f"{words} memory of the fullest device (GiB)", rangemode="tozero")
    figure.update_yaxes(title_text=f"{words} step (s)")
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
