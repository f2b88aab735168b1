"""What a plan promised beside what its run measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.errors import UnknownParameter, suggestion
from workbench.figures import theme
from workbench.figures._partition import rank_name, stages_held
from workbench.figures._timeline import Lanes, add_timeline, describe, planned_lanes, timeline_height
from workbench.planning.plan import Plan
from workbench.planning.schedules import Timeline
from workbench.units import GIB, count

PANELS_PX = 190
GAP_PX = 74
"""Between the panels and a timeline: the panels' labels and the timeline's heading."""

UPRIGHT_PAIRS = 8
"""More pairs than these in a panel stand so close that their numbers are turned."""

MEASURES = ("step_ms", "tokens_per_s", "mfu", "peak_bytes")


@dataclass(frozen=True)
class Pair:
    """One quantity, predicted and measured; `label` tells bars of one panel apart."""

    label: str
    predicted: float
    measured: float
    write: Callable[[float], str]
    alike: bool = True
    """Whether both count the same things, so that their difference says something."""

    @property
    def difference(self) -> str:
        """How far the prediction lies from the measurement, as a share of that."""
        if not self.alike:
            return ""
        share = (self.predicted - self.measured) / self.measured if self.measured else float("nan")
        return f"<b>{share:+.1%}</b>" if math.isfinite(share) else "<b>–</b>"


def prediction(
    plan: Plan, measured: Mapping[str, Any], title: str | None = None, step: Timeline | None = None
) -> go.Figure:
    """Predicted beside measured step time, tokens/s, MFU and peak memory, with the error of each prediction.

    `measured` holds any of `step_ms`, `tokens_per_s`, `mfu` (0 to 1) and `peak_bytes`: the largest of all
    devices, or a mapping of pipeline rank (its stage, where each has one) to the largest of that rank's devices.
    None, NaN and an empty mapping mean that a quantity was not measured. The error is (predicted - measured) /
    measured; memory of processes on CPUs, which hold more than tensors, has none. With a measured `step`, its timeline
    stands below the predicted one, on one axis of time.

    Raises `UnknownParameter` for any other key, or if there is nothing to compare.
    """
    panels = _panels(plan, measured)
    lanes = [] if step is None else [("predicted", planned_lanes(plan)), ("measured", step.lanes)]
    heights = [PANELS_PX, *(timeline_height(len(each)) for _, each in lanes)]
    inner = sum(heights) + GAP_PX * len(lanes)
    figure = make_subplots(
        rows=len(heights),
        cols=len(panels),
        specs=[[{}] * len(panels), *([{"colspan": len(panels)}, *[None] * (len(panels) - 1)] for _ in lanes)],
        column_widths=[max(1.0, 0.45 * len(pairs) + 0.55) for _, pairs in panels],
        row_heights=[height / sum(heights) for height in heights],
        subplot_titles=[name for name, _ in panels] + [f"<b>{word}</b>: {describe(each)}" for word, each in lanes],
        horizontal_spacing=0.05,
        vertical_spacing=GAP_PX / inner,
    )
    for col, (_, pairs) in enumerate(panels, start=1):
        _add_panel(figure, pairs, col)
    _add_timelines(figure, [each for _, each in lanes])
    figure.update_annotations(font={"size": theme.FONT_PX, "color": theme.MUTED})
    figure.update_layout(
        template=theme.TEMPLATE,
        height=inner + 190,
        title=theme.title(theme.text(title or f"{plan.model}: predicted and measured"), theme.text(plan.describe())),
        margin={"t": 118, "b": 72, "l": 32},
        barmode="overlay",
        uniformtext={"mode": "hide", "minsize": 8} if step is not None else None,
        legend={
            "orientation": "h",
            "x": 1,
            "xanchor": "right",
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
            "borderwidth": 0,
            "traceorder": "normal",
        },
    )
    return figure


def _add_timelines(figure: go.Figure, rows: Sequence[Lanes]) -> None:
    """Below the panels, on one axis of time."""
    longest = max((action.end_ms for lanes in rows for lane in lanes for action in lane), default=0.0)
    for row, lanes in enumerate(rows, start=2):
        before = len(figure.data)
        add_timeline(figure, lanes, row=row, col=1)
        for trace in figure.data[before:]:
            trace.legendgroup = trace.name
            if row > 2:
                trace.showlegend = False
        figure.update_xaxes(range=[0, 1.005 * longest], row=row, col=1)


def _panels(plan: Plan, measured: Mapping[str, Any]) -> list[tuple[str, list[Pair]]]:
    for key in measured:
        if key not in MEASURES:
            raise UnknownParameter(f"measured has no {key!r}. {suggestion(key, MEASURES)}", parameter=key)
    predicted = plan.prediction
    measured = {key: value for key, value in measured.items() if _known(value)}
    panels: list[tuple[str, list[Pair]]] = []
    if "step_ms" in measured:
        pair = Pair(
            "", predicted.step_ms, float(measured["step_ms"]), lambda ms: f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"
        )
        panels.append(("Step time (ms)", [pair]))
    if "tokens_per_s" in measured:
        panels.append(("Tokens/s", [Pair("", predicted.tokens_per_s, float(measured["tokens_per_s"]), count)]))
    if "mfu" in measured and predicted.mfu is not None:
        pair = Pair("", 100 * predicted.mfu, 100 * float(measured["mfu"]), lambda share: f"{share:.1f}")
        panels.append(("MFU (%)", [pair]))
    if "peak_bytes" in measured:
        title = (
            "Peak memory of a device (GiB)" if _sees_tensors(plan) else "Peak memory (GiB): of tensors, of processes"
        )
        panels.append((title, _memory_pairs(plan, measured["peak_bytes"])))
    if not panels:
        raise UnknownParameter(f"There is nothing measured to compare. Give one of: {', '.join(MEASURES)}.")
    return panels


def _known(value: Any) -> bool:
    """Whether something was measured: neither None, nor NaN, nor an empty mapping."""
    if isinstance(value, Mapping):
        return bool(value)
    return value is not None and math.isfinite(value)


def _memory_pairs(plan: Plan, peaks: Mapping[int, float] | float) -> list[Pair]:
    def write(size: float) -> str:
        return f"{size:.1f}" if size >= 1 else f"{size:.2g}"

    def pair(label: str, planned: int, peak: float) -> Pair:
        return Pair(label, planned / GIB, float(peak) / GIB, write, _sees_tensors(plan))

    if not isinstance(peaks, Mapping):
        return [pair("largest", plan.peak_bytes, peaks)]
    ranks = (rank for rank in range(plan.pipeline) if rank in peaks)
    return [pair(_device_label(plan, rank), plan.device_bytes(rank), peaks[rank]) for rank in ranks]


def _sees_tensors(plan: Plan) -> bool:
    """Whether a run measures what tensors take: of a process on a CPU it has everything, libraries included."""
    return plan.cluster.device.type != "cpu"


def _device_label(plan: Plan, rank: int) -> str:
    name = rank_name(plan, rank)
    return name if plan.chunks == 1 else f"{name}<br>{stages_held(plan, rank)}"


def _add_panel(figure: go.Figure, pairs: list[Pair], col: int) -> None:
    labels = [pair.label for pair in pairs]
    looks = {"predicted": (theme.pale(theme.PALETTE[0], 0.55), -0.32), "measured": (theme.PALETTE[0], 0.02)}
    for name, (color, offset) in looks.items():
        values = [getattr(pair, name) for pair in pairs]
        figure.add_trace(
            go.Bar(
                x=labels,
                y=values,
                offset=offset,  # beside each other, while the bars of a timeline in the same figure overlay
                width=0.3,
                name=name,
                legendgroup=name,
                showlegend=col == 1,
                marker={"color": color},
                text=[pair.write(value) for pair, value in zip(pairs, values, strict=True)],
                textposition="outside",
                textangle=-90 if len(pairs) > UPRIGHT_PAIRS else 0,
                textfont={"size": 11},
                constraintext="none",
                cliponaxis=False,
                hovertemplate=f"{name} %{{text}}<extra></extra>",
            ),
            row=1,
            col=col,
        )
    tallest = max(max(pair.predicted, pair.measured) for pair in pairs)
    ticks = ["<br>".join(filter(None, (pair.label, pair.difference))) for pair in pairs]
    figure.update_xaxes(tickmode="array", tickvals=labels, ticktext=ticks, ticks="", row=1, col=col)
    figure.update_yaxes(range=[0, 1.18 * tallest], showticklabels=False, showgrid=False, row=1, col=col)
