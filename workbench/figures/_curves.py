"""Curves over training: loss (or any recorded column) and throughput of one or many runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from workbench.errors import UnknownParameter, suggestion
from workbench.figures import theme
from workbench.figures._legend import CORNERS, legend_place
from workbench.figures._series import PARTS, SMOOTHING, X_AXES, Array, CurveLike, DrawnCurve, axes_of, column, draw
from workbench.units import count

Y_LABELS = {
    "loss": "Loss",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "step_ms": "Step time (ms)",
    "tokens_per_s": "Tokens/s",
    "mfu": "MFU",
}

MARKS: Mapping[str, tuple[str, int, str | None]] = {
    "checkpoint": ("circle", 6, None),
    "resume": ("triangle-right", 11, None),
    "divergence": ("triangle-up", 12, "white"),
}
"""Symbol, size and outline (None: the run's colour) of each kind of event."""
MOST_NAMED = 3
"""Runs whose speed a title has room for."""
MOST_INSIDE = 8
"""Runs whose names a legend inside the plot has room for."""
MARK_WORDS = {"checkpoint": "○ checkpoint", "resume": "▷ resumed", "divergence": "▲ diverges"}


def loss_curves(
    curves: Sequence[CurveLike],
    x: str = "tokens",
    smoothing: float = SMOOTHING,
    y: str = "loss",
    log_y: bool = False,
    title: str | None = None,
) -> go.Figure:
    """Loss of each run: the raw trace pale behind, the smoothed line in front, the last value at its end.

    `x` is `step`, `tokens`, `time`, `flops` or `gpu_hours`; menus inside the figure switch the axis and
    between linear and logarithmic loss, also in an exported page. `smoothing` is the width of a centred
    exponential average (`smoothed`) as a share of the longest run, measured over tokens and equal for all
    runs: two runs are compared after the same averaging, whichever axis is shown; 0 draws the raw line alone.
    NaN and infinite losses are gaps with a cross where they begin.

    Raises `UnknownParameter` for an axis that does not exist or that a run did not record.
    """
    axes = axes_of(curves)
    _require_axis(x, axes)
    _require_column(curves, y)
    drawn = draw(curves, y, smoothing, {name: scale for name, (scale, _) in axes.items()})
    figure = go.Figure(traces_of(drawn, x, y, smooth=smoothing > 0))
    _lay_out(figure, axes, x, y, log_y, title, many=len(drawn) > MOST_INSIDE)
    if len(drawn) <= MOST_INSIDE:
        figure.update_layout(legend=legend_place(figure.data, log_y=log_y))
    figure.update_layout(updatemenus=_menus(figure, drawn, axes, x, y, log_y))
    if key := mark_key(drawn):
        figure.update_layout(title={"subtitle": {"text": key}}, margin={"t": 104})
    if not any(len(curve.raw) for curve in drawn):
        _say_nothing_yet(figure)
    return figure


def loss_layout(curves: Sequence[CurveLike], x: str) -> go.Figure:
    """A figure that is laid out as `loss_curves` lays it out, without title, menus or curves."""
    figure = go.Figure()
    _lay_out(figure, axes_of(curves), x, "loss", False, None, many=len(curves) > MOST_INSIDE)
    figure.layout.title = None
    return figure


def _require_axis(x: str, axes: Mapping[str, Any]) -> None:
    if x not in X_AXES:
        raise UnknownParameter(f"x={x!r} is not an axis. {suggestion(x, X_AXES)}", parameter="x", value=x)
    if x not in axes:
        raise UnknownParameter(
            f"x={x!r} was not recorded by every run. Choose one of: {', '.join(axes)}.", parameter="x", value=x
        )


def _require_column(curves: Sequence[CurveLike], y: str) -> None:
    begun = [curve for curve in curves if len(column(curve, "step"))]
    if begun and not any(len(column(curve, y)) for curve in begun):
        raise UnknownParameter(f"y={y!r} was not recorded. {suggestion(y, Y_LABELS)}", parameter="y", value=y)


def traces_of(drawn: Sequence[DrawnCurve], x: str, y: str, smooth: bool, complete: bool = False) -> list[go.Scatter]:
    """The traces of all runs; `legendgroup` tells the run (`DrawnCurve.key`), `meta` the part that one plays.

    Parts without a point are left out, unless `complete`: then every run has one trace of each of `PARTS`.
    """
    traces = [
        trace
        for curve, position in zip(drawn, _label_positions(drawn, x), strict=True)
        for trace in _traces(curve, x, y, smooth, position)
    ]
    return traces if complete else [trace for trace in traces if len(trace.x) or trace.meta == "line"]


def visible_points(curve: DrawnCurve, x: str, smooth: bool) -> dict[str, dict[str, Any]]:
    """What another stretch of the x axis changes in a run's traces: fields and values of `raw` and `line`."""
    raw = curve.points("raw") if smooth else np.empty(0, dtype=np.int64)
    line = curve.points("line")
    heights = curve.line if smooth else curve.raw
    return {
        "raw": {"x": curve.x[x][raw], "y": curve.raw[raw]},
        "line": {"x": curve.x[x][line], "y": heights[line], "customdata": curve.hover},
    }


def _traces(curve: DrawnCurve, x: str, y: str, smooth: bool, label_position: str | None) -> list[go.Scatter]:
    """One trace for each of `PARTS`, in that order; one legend entry for all."""
    line = curve.line if smooth else curve.raw
    parts = {
        "raw": _raw_trace(curve, smooth),
        "line": _line_trace(curve, line, y, smooth),
        "nan": _gap_trace(curve, y),
        "mark": _mark_trace(curve, line),
        "end": _end_trace(curve, line, label_position),
    }
    for part, trace in parts.items():
        points = curve.points(part) if smooth or part != "raw" else np.empty(0, dtype=np.int64)
        trace.update(
            x=curve.x[x][points],
            legendgroup=curve.key,
            name=theme.text(theme.short(curve.name)),
            meta=part,
            zorder=0 if part == "end" else PARTS.index(part),  # only in the lowest layer may a text leave the plot
            showlegend=part == "line",
        )
    return list(parts.values())


def _raw_trace(curve: DrawnCurve, smooth: bool) -> go.Scatter:
    return go.Scatter(
        y=curve.raw[curve.points("raw")] if smooth else np.empty(0),
        mode="lines",
        line={"color": theme.pale(curve.color, 0.62), "width": 1},
        hoverinfo="skip",
    )


def _line_trace(curve: DrawnCurve, line: Array, y: str, smooth: bool) -> go.Scatter:
    return go.Scatter(
        y=line[curve.points("line")],
        customdata=curve.hover,
        mode="lines+markers" if np.isfinite(curve.raw).sum() == 1 else "lines",
        line={"color": curve.color, "width": 2.2, "dash": curve.dash},
        marker={"color": curve.color, "size": 7},
        hovertemplate=_hover(curve, y, smooth),
    )


def _hover(curve: DrawnCurve, y: str, smooth: bool) -> str:
    raw = " (raw %{customdata[0]:.4g})" if smooth else ""
    tokens = " · %{customdata[2]:.3s} tokens" if np.isfinite(curve.hover[:, 2]).any() else ""
    return f"{_label(y).lower()} %{{y:.4g}}{raw} · step %{{customdata[1]:,.0f}}{tokens}"


def _label(y: str) -> str:
    return Y_LABELS.get(y, y)


def _gap_trace(curve: DrawnCurve, y: str) -> go.Scatter:
    return go.Scatter(
        y=_height_before(curve.raw, curve.points("nan")),
        mode="markers",
        marker={"symbol": "x", "size": 9, "color": theme.ALERT, "line": {"color": "white", "width": 1}},
        hovertemplate=f"{_label(y).lower()} is NaN or infinite from here",
    )


def _mark_trace(curve: DrawnCurve, line: Array) -> go.Scatter:
    looks = [MARKS[mark.kind] for mark in curve.marks]
    return go.Scatter(
        y=_height_at(line, curve.mark_index),
        mode="markers",
        marker={
            "symbol": [symbol for symbol, _, _ in looks],
            "size": [size for _, size, _ in looks],
            "color": [theme.ALERT if mark.kind == "divergence" else "white" for mark in curve.marks],
            "line": {
                "color": theme.ALERT if not looks else [color or curve.color for _, _, color in looks],
                "width": 1.5,
            },
        },
        customdata=[theme.text(mark.text) for mark in curve.marks],
        hovertemplate="%{customdata}",
    )


def _height_at(values: Array, at: NDArray[np.int64]) -> Array:
    """Values at the indices; where one is not finite, the last finite one before it."""
    heights = np.asarray(values[at]) if len(values) else np.empty(0)
    return (
        heights if np.isfinite(heights).all() else np.where(np.isfinite(heights), heights, _height_before(values, at))
    )


def mark_key(drawn: Sequence[DrawnCurve]) -> str | None:
    """What the symbols on the curves mean, as far as there are any."""
    kinds = {mark.kind for curve in drawn for mark in curve.marks}
    words = [words for kind, words in MARK_WORDS.items() if kind in kinds]
    words += ["✕ NaN or infinite"] if any(len(curve.gaps) for curve in drawn) else []
    return " · ".join(words) or None


def _height_before(values: Array, at: NDArray[np.int64]) -> Array:
    """The last finite value before each index, or the first one after where there is none."""
    finite = np.flatnonzero(np.isfinite(values))
    if not len(finite):
        return np.zeros(len(at))
    before = np.clip(np.searchsorted(finite, at) - 1, 0, None)
    return np.asarray(values[finite[before]])


def _end_trace(curve: DrawnCurve, line: Array, position: str | None) -> go.Scatter:
    values = line[curve.points("end")]
    return go.Scatter(
        y=values,
        mode="markers" if position is None else "markers+text",
        marker={"color": curve.color, "size": 6},
        text=[f"<b>{_loss(value)}</b>" for value in values],
        textposition=position or "middle right",
        textfont={"color": curve.color, "size": theme.FONT_PX},
        cliponaxis=False,
        hoverinfo="skip",
    )


def _loss(value: float) -> str:
    """Two decimals where losses mostly are, else three significant digits."""
    return f"{value:.2f}" if 1 <= abs(value) < 100 else f"{value:#.3g}"


def _label_positions(drawn: Sequence[DrawnCurve], x: str) -> list[str | None]:
    """Where each end label stands. Labels closer than a label's size are parted; a crowd gets none."""
    ends = {
        index: (curve.x[x][curve.last], curve.line[curve.last])
        for index, curve in enumerate(drawn)
        if curve.last is not None
    }
    if len(ends) > 8:
        return [None] * len(drawn)
    span_x = max((end_x for end_x, _ in ends.values()), default=0.0) or 1.0
    shown = np.concatenate([curve.raw[curve.raw_index] for curve in drawn] or [np.empty(0)])
    finite = shown[np.isfinite(shown)]
    span_y = float(np.ptp(finite)) if len(finite) else 0.0
    positions: list[str | None] = ["middle right"] * len(drawn)
    for index, (_, end_y) in ends.items():
        near = [
            other_y - end_y or float(index - other)
            for other, other_y in _heights_beside(drawn, ends, index, x, 0.06 * span_x)
            if abs(other_y - end_y) < 0.06 * (span_y or 1.0)
        ]
        if near:
            above, below = sum(d > 0 for d in near), sum(d < 0 for d in near)
            positions[index] = _parted(above, below)
    return positions


def _heights_beside(
    drawn: Sequence[DrawnCurve], ends: Mapping[int, tuple[float, float]], index: int, x: str, room: float
) -> list[tuple[int, float]]:
    """What stands where the label of curve `index` would: other curves' ends, or curves that run on past it."""
    end_x = ends[index][0]
    beside = []
    for other, (other_x, other_y) in ends.items():
        if other != index and abs(other_x - end_x) < room:
            beside.append((other, other_y))
        elif other != index and other_x > end_x:
            at = drawn[other].line_index
            known = at[np.isfinite(drawn[other].line[at])]
            passing = np.interp(end_x + room / 2, drawn[other].x[x][known], drawn[other].line[known])
            beside.append((other, float(passing)))
    return beside


def _parted(above: int, below: int) -> str | None:
    """Position of a label with so many others close above and below it."""
    if not below:
        return "bottom right"
    if not above:
        return "top right"
    return "middle right" if above == below == 1 else None


def _lay_out(
    figure: go.Figure,
    axes: Mapping[str, tuple[float, str]],
    x: str,
    y: str,
    log_y: bool,
    title: str | None,
    many: bool,
) -> None:
    legend = {"x": 1.01, "xanchor": "left", "y": 0.99, "yanchor": "top"} if many else CORNERS["top right"]
    figure.update_layout(
        template=theme.TEMPLATE,
        height=480,
        title=theme.title(theme.text(title or f"{_label(y)} of each run")),
        margin={"t": 92, "r": 64},
        hovermode="x unified",
        legend={"groupclick": "togglegroup", "tracegroupgap": 0, **legend},
        xaxis={
            "title": {"text": axes[x][1]},
            "rangemode": "tozero",
            "unifiedhovertitle": {"text": hover_title(axes[x][1])},
        },
        yaxis={"title": {"text": _label(y)}, "type": "log" if log_y else "linear"},
        uirevision="keep",
    )


def _menus(
    figure: go.Figure,
    drawn: Sequence[DrawnCurve],
    axes: Mapping[str, tuple[float, str]],
    x: str,
    y: str,
    log_y: bool,
) -> list[dict[str, Any]]:
    by_key = {curve.key: curve for curve in drawn}

    def along(axis: str, trace: Any) -> list[float | None]:
        curve = by_key[trace.legendgroup]
        return _short(curve.x[axis][curve.points(trace.meta)])

    x_buttons = [
        {
            "label": f"x: {X_AXES[name].label}",
            "method": "update",
            "args": [
                {"x": [along(name, trace) for trace in figure.data]},
                {
                    "xaxis.title.text": heading,
                    "xaxis.unifiedhovertitle.text": hover_title(heading),
                    "xaxis.autorange": True,
                },
            ],
        }
        for name, (_, heading) in axes.items()
    ]
    label = _label(y).split(" (")[0].lower()
    y_buttons = [
        {
            "label": f"{kind} {label}",
            "method": "relayout",
            "args": [{"yaxis.type": kind, "yaxis.autorange": True, **_legend_moved(figure, drawn, kind == "log")}],
        }
        for kind in ("linear", "log")
    ]
    shared = {
        "y": 1.02,
        "yanchor": "bottom",
        "xanchor": "left",
        "bgcolor": "white",
        "bordercolor": theme.AXIS,
        "font": {"size": 11, "color": theme.INK},
        "pad": {"b": 4},
    }
    return [
        {"buttons": x_buttons, "active": list(axes).index(x), "x": 0.0, "direction": "down", **shared},
        {
            "buttons": y_buttons,
            "active": int(log_y),
            "x": 0.0,
            "type": "buttons",
            "direction": "right",
            **shared,
            "pad": {"b": 4, "l": 140},
        },
    ]


def _legend_moved(figure: go.Figure, drawn: Sequence[DrawnCurve], log_y: bool) -> dict[str, Any]:
    """Where the legend stands on another axis, as plotly.js is told."""
    if len(drawn) > MOST_INSIDE:
        return {}
    return {f"legend.{key}": value for key, value in legend_place(figure.data, log_y=log_y).items()}


def hover_title(heading: str) -> str:
    """`"Tokens (M): 11.2"`, with the value under the pointer."""
    return f"{heading}: %{{x:.4~g}}"


def _short(values: Array) -> list[float | None]:
    """Six significant digits: finer than a pixel, and a third of the file."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


def _say_nothing_yet(figure: go.Figure) -> None:
    figure.add_annotation(
        text="no step recorded yet",
        x=0.5,
        y=0.5,
        xref="paper",
        yref="paper",
        showarrow=False,
        font={"color": theme.MUTED},
    )


def throughput(curves: Sequence[CurveLike], smoothing: float = SMOOTHING) -> go.Figure:
    """Tokens per second and step time over steps; the spread is drawn pale, its moving average in front."""
    legend = {"x": 1.01, "xanchor": "left", "y": 1} if len(curves) > 8 else {"x": 0.995, "xanchor": "right", "y": 0.60}
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for row, y in enumerate(("tokens_per_s", "step_ms"), start=1):
        for curve in draw(curves, y, smoothing, {"step": 1.0}):
            for trace in traces_of([curve], "step", y, smooth=smoothing > 0):
                if trace.meta == "end":
                    continue
                trace.showlegend = trace.showlegend and row == 1
                figure.add_trace(trace, row=row, col=1)
        figure.update_yaxes(title_text=Y_LABELS[y], rangemode="tozero", row=row, col=1)
    figure.update_xaxes(title_text="Step", row=2, col=1)
    figure.update_layout(
        template=theme.TEMPLATE,
        height=460,
        title=theme.title("Throughput", _mean_rates(curves)),
        margin={"t": 76},
        hovermode="x unified",
        legend={
            "groupclick": "togglegroup",
            "tracegroupgap": 0,
            "yanchor": "top" if len(curves) > 8 else "bottom",
            **legend,
        },
    )
    return figure


def _mean_rates(curves: Sequence[CurveLike]) -> str:
    """Median tokens/s and MFU of each run, as a sentence; of many runs those of the fastest and the slowest."""
    medians = []
    for curve in curves:
        rates, mfu = column(curve, "tokens_per_s"), column(curve, "mfu")
        if np.isfinite(rates).any():
            rate = float(np.nanmedian(rates))
            share = f", MFU {np.nanmedian(mfu):.1%}" if np.isfinite(mfu).any() else ""
            medians.append((rate, f"{theme.text(theme.short(curve.name))}: {count(rate)} tokens/s{share}"))
    if len(medians) > MOST_NAMED:
        fastest, slowest = max(medians)[1], min(medians)[1]
        return f"fastest of {len(medians)} {fastest} · slowest {slowest} (medians)"
    return " · ".join(words for _, words in medians) + (" (medians)" if medians else "")
