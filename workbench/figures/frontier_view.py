"""Memory against speed: the plans of a grid or of a search, with those that no other plan beats in both."""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

from workbench.analysis.pareto import pareto_front
from workbench.arguments import checked_arguments
from workbench.figures import theme
from workbench.figures.figure import Figure
from workbench.planning.plan import Plan
from workbench.planning.table import Plans
from workbench.sweeps.grid import Grid
from workbench.sweeps.measured import MeasuredGrid
from workbench.units import GIB, duration, gib

SYMBOLS = {"none": "circle", "selective": "diamond", "full": "square", "mixed": "triangle-up"}
"""Mark of each kind of activation checkpointing; `mixed` is that of plans whose blocks differ in it."""
CHECKPOINTING = {"none": "no checkpointing", "selective": "selective", "full": "full", "mixed": "in some blocks"}


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
