"""Memory against speed: the plans of a grid or of a search, with those that no other plan beats in both."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from workbench.arguments import checked_arguments
from workbench.figures import theme
from workbench.grids.grid import Grid
from workbench.grids.measuring import MeasuredGrid
from workbench.planning.plan import Plan
from workbench.planning.table import Plans
from workbench.units import GIB, gib


@checked_arguments
def frontier(plans: Plans | Grid | MeasuredGrid) -> go.Figure:
    """Draw the step of plans over the memory of their fullest device, with the front of those that none beats in both.

    Args:
        plans: a search, of which the fastest plan for each of twelve memory limits is drawn; a grid, of which every
            cell with a plan is a point; or a measured grid, whose points stand at their measured step.
    """
    if isinstance(plans, Plans):
        points = [(plan, plan.prediction.step_ms) for plan in plans.frontier()]
        headline, words = f"{plans.best.model} on {plans.best.cluster.describe()}", "predicted"
    elif isinstance(plans, Grid):
        points = [(cell.plan, cell.step_ms) for cell in plans.feasible if cell.plan is not None]
        headline, words = plans.headline(), "predicted"
    else:
        points = [(cell.plan, cell.step_ms) for cell in plans.measured() if cell.step_ms is not None]
        headline, words = plans.path.name, "measured"
    front = pareto_front(points)
    figure = go.Figure()
    for index, label in enumerate(sorted({_label(plan) for plan, _ in points})):
        own = [(plan, ms) for plan, ms in points if _label(plan) == label]
        figure.add_scatter(
            x=[plan.peak_bytes / GIB for plan, _ in own],
            y=[ms / 1e3 for _, ms in own],
            mode="markers",
            name=label,
            marker={"color": theme.series_color(index), "size": 10},
            text=[theme.text(_words(plan)) for plan, _ in own],
            hovertemplate="%{text}<extra></extra>",
        )
    figure.add_scatter(
        x=[plan.peak_bytes / GIB for plan, _ in front],
        y=[ms / 1e3 for _, ms in front],
        mode="lines",
        name="Pareto front",
        line={"shape": "hv", "color": theme.INK, "width": 1.5},
        hoverinfo="skip",
    )
    figure.update_xaxes(title_text="predicted memory of the fullest device (GiB)", rangemode="tozero")
    figure.update_yaxes(title_text=f"{words} step (s)")
    subtitle = f"{len(points)} plans, {words}; on the line no other plan is both leaner and faster"
    title = theme.title(theme.text(headline), subtitle)
    layout = {"height": 520, "title": title, "legend": theme.LEGEND_BELOW, "margin": {"b": 120}}
    return figure.update_layout(template=theme.TEMPLATE, **layout)


def pareto_front(points: Sequence[tuple[Plan, float]]) -> list[tuple[Plan, float]]:
    """Return the points that none beats in memory and step, the leanest first."""
    front: list[tuple[Plan, float]] = []
    for plan, ms in sorted(points, key=lambda point: (point[0].peak_bytes, point[1])):
        if not front or ms < front[-1][1]:
            front.append((plan, ms))
    return front


def _words(plan: Plan) -> str:
    if not plan.offload_optimizer:
        return plan.describe()
    host, traffic = gib(plan.host_bytes), gib(plan.host_traffic_bytes)
    return f"{plan.describe()}, {host} of the host for each device, {traffic} over PCIe in a step"


def _label(plan: Plan) -> str:
    sharded = f"ZeRO {plan.zero}" if plan.zero else "plain split" if plan.pipeline * plan.tensor > 1 else "replicas"
    return f"{sharded}, offloaded" if plan.offload_optimizer else sharded
