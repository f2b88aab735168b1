"""Figure of a plan's predictions beside the measurements of its run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from workbench.errors import UnknownParameter, suggestion
from workbench.figures import theme
from workbench.figures.figure import Figure, subplots
from workbench.figures.plan_view import rank_name, stages_held
from workbench.figures.timeline_view import add_stacked_timelines, describe, timeline_height
from workbench.planning.plan import Plan
from workbench.planning.prediction import timeline as simulated
from workbench.planning.simulation import Timeline
from workbench.units import GIB, count

PANELS_PX = 190
"""Height of the row of panels."""
TITLE_LETTERS, TITLE_LINE_PX = 18, 15
"""Letters of a line of a panel's title, which beside others fits into a narrow figure, and the height of a line."""
GAP_PX = 74
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
    comparable: bool = True
    """True if both count the same things, so that their difference is the prediction's error."""

    @property
    def error(self) -> str:
        """Error of the prediction as a share of the measurement; empty if the two are not comparable."""
        if not self.comparable:
            return ""
        share = (self.predicted - self.measured) / self.measured if self.measured else float("nan")
        return f"<b>{share:+.1%}</b>" if math.isfinite(share) else "<b>–</b>"


def prediction(
    plan: Plan, measured: Mapping[str, Any], title: str | None = None, step: Timeline | None = None
) -> Figure:
    """Draw predicted beside measured step time, tokens/s, MFU and peak memory, with the error of each prediction.

    The error is (predicted - measured) / measured. The memory of processes on CPUs has none: it holds more than
    tensors.

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
    steps = [] if step is None else [("predicted", simulated(plan)), ("measured", step)]
    heights = [PANELS_PX, *(timeline_height(each) for _, each in steps)]
    inner = sum(heights) + GAP_PX * len(steps)
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
        vertical_spacing=GAP_PX / inner,
    )
    for col, (_, pairs) in enumerate(panels, start=1):
        _add_panel(figure, pairs, col)
    add_stacked_timelines(figure, [each for _, each in steps], first_row=2)
    figure.update_annotations(font={"size": theme.FONT_PX, "color": theme.MUTED})
    words = f"{plan.describe()} · percentages: how far the prediction lies above (+) or below (−) the measurement"
    return figure.laid_out(
        height=inner + above + 72,
        title=theme.title(theme.text(title or f"{plan.model}: predicted and measured"), theme.text(words)),
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
        if key in known and planned is not None:
            panels.append((title, [Pair("", scale * planned, scale * float(known[key]), write)]))
    if "peak_bytes" in known:
        panels.append(_memory_panel(plan, known["peak_bytes"]))
    if not panels:
        raise UnknownParameter(f"There is nothing measured to compare. Give one of: {', '.join(MEASURES)}.")
    return panels


def _memory_panel(plan: Plan, peaks: Mapping[int, float] | float) -> tuple[str, list[Pair]]:
    """Return title and pairs of the memory panel, in GiB.

    A run on GPUs measures the memory of tensors, which is what a plan predicts. A run on CPUs measures that of whole
    processes, libraries included.
    """
    comparable = plan.cluster.device.type != "cpu"

    def pair(label: str, planned: int, peak: float) -> Pair:
        return Pair(label, planned / GIB, float(peak) / GIB, lambda g: f"{g:.1f}" if g >= 1 else f"{g:.2g}", comparable)

    title = "Peak memory of a device (GiB)" if comparable else "Peak memory (GiB): of tensors, of processes"
    if not isinstance(peaks, Mapping):
        return title, [pair("largest", plan.peak_bytes, peaks)]
    pairs = []
    for rank in range(plan.pipeline):
        if rank in peaks:
            stages = f"<br>{stages_held(plan, rank)}" if plan.chunks > 1 else ""
            pairs.append(pair(f"{rank_name(plan, rank)}{stages}", plan.device_bytes(rank), peaks[rank]))
    return title, pairs


def _add_panel(figure: Figure, pairs: Sequence[Pair], col: int) -> None:
    labels = [pair.label for pair in pairs]
    looks = {"predicted": (theme.pale(theme.PALETTE[0], 0.55), -0.32), "measured": (theme.PALETTE[0], 0.02)}
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
