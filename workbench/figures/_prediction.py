"""What a plan promised beside what its run measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.errors import UnknownParameter, suggestion
from workbench.figures import theme
from workbench.planning.plan import Plan
from workbench.units import GIB, count, duration

MEASURES = ("step_ms", "tokens_per_s", "mfu", "peak_bytes")


@dataclass(frozen=True)
class Pair:
    """One quantity, predicted and measured; `label` tells bars of one panel apart."""

    label: str
    predicted: float
    measured: float
    write: Callable[[float], str]

    @property
    def difference(self) -> float:
        """How far the measurement lies from the prediction, as a share of the measurement."""
        return (self.predicted - self.measured) / self.measured if self.measured else float("nan")


def prediction(plan: Plan, measured: Mapping[str, Any], title: str | None = None) -> go.Figure:
    """Predicted beside measured step time, tokens/s, MFU and peak memory, with the error of each prediction.

    `measured` holds any of `step_ms`, `tokens_per_s`, `mfu` (0 to 1) and `peak_bytes`: the largest of all
    devices, or a mapping of stage index to the largest of its devices. None, NaN and an empty mapping mean
    that a quantity was not measured. The error is (predicted - measured) / measured.

    Raises `UnknownParameter` for any other key, or if there is nothing to compare.
    """
    panels = _panels(plan, measured)
    widths = [max(1.0, 0.45 * len(pairs) + 0.55) for _, pairs in panels]
    figure = make_subplots(
        rows=1,
        cols=len(panels),
        column_widths=widths,
        subplot_titles=[name for name, _ in panels],
        horizontal_spacing=0.05,
    )
    for col, (_, pairs) in enumerate(panels, start=1):
        _add_panel(figure, pairs, col)
    figure.update_annotations(font={"size": theme.FONT_PX, "color": theme.MUTED})
    figure.update_layout(
        template=theme.TEMPLATE,
        height=380,
        title=theme.title(theme.text(title or f"{plan.model}: predicted and measured"), theme.text(plan.describe())),
        margin={"t": 118, "b": 72, "l": 32},
        barmode="group",
        bargap=0.35,
        bargroupgap=0.06,
        legend={
            "orientation": "h",
            "x": 1,
            "xanchor": "right",
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
            "borderwidth": 0,
        },
    )
    return figure


def _panels(plan: Plan, measured: Mapping[str, Any]) -> list[tuple[str, list[Pair]]]:
    for key in measured:
        if key not in MEASURES:
            raise UnknownParameter(f"measured has no {key!r}. {suggestion(key, MEASURES)}", parameter=key)
    predicted = plan.prediction
    measured = {key: value for key, value in measured.items() if _known(value)}
    panels: list[tuple[str, list[Pair]]] = []
    if "step_ms" in measured:
        pair = Pair("", predicted.step_ms, float(measured["step_ms"]), lambda ms: duration(ms / 1e3))
        panels.append(("Step time (ms)", [pair]))
    if "tokens_per_s" in measured:
        panels.append(("Tokens/s", [Pair("", predicted.tokens_per_s, float(measured["tokens_per_s"]), count)]))
    if "mfu" in measured and predicted.mfu is not None:
        pair = Pair("", 100 * predicted.mfu, 100 * float(measured["mfu"]), lambda share: f"{share:.1f} %")
        panels.append(("MFU (%)", [pair]))
    if "peak_bytes" in measured:
        panels.append(("Peak memory of a device (GiB)", _memory_pairs(plan, measured["peak_bytes"])))
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

    if not isinstance(peaks, Mapping):
        return [Pair("largest", plan.peak_bytes / GIB, float(peaks) / GIB, write)]
    return [
        Pair(f"stage {stage.index}", stage.memory.total / GIB, float(peaks[stage.index]) / GIB, write)
        for stage in plan.stages
        if stage.index in peaks
    ]


def _add_panel(figure: go.Figure, pairs: list[Pair], col: int) -> None:
    labels = [pair.label for pair in pairs]
    for name, color in (("predicted", theme.pale(theme.PALETTE[0], 0.55)), ("measured", theme.PALETTE[0])):
        values = [getattr(pair, name) for pair in pairs]
        figure.add_trace(
            go.Bar(
                x=labels,
                y=values,
                name=name,
                legendgroup=name,
                showlegend=col == 1,
                marker={"color": color},
                text=[pair.write(value) for pair, value in zip(pairs, values, strict=True)],
                textposition="outside",
                textfont={"size": 11},
                constraintext="none",
                cliponaxis=False,
                hovertemplate=f"{name} %{{text}}<extra></extra>",
            ),
            row=1,
            col=col,
        )
    tallest = max(max(pair.predicted, pair.measured) for pair in pairs)
    ticks = [f"{pair.label}{'<br>' if pair.label else ''}<b>{pair.difference:+.1%}</b>" for pair in pairs]
    figure.update_xaxes(tickmode="array", tickvals=labels, ticktext=ticks, ticks="", row=1, col=col)
    figure.update_yaxes(range=[0, 1.18 * tallest], showticklabels=False, showgrid=False, row=1, col=col)
