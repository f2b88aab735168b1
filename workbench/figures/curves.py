"""Curves over training: loss (or any recorded column) and throughput of one or many runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from workbench.errors import UnknownParameter, suggestion
from workbench.figures import theme
from workbench.units import count

Array = NDArray[np.float64]

MAX_POINTS = 2000
"""Points of one trace: what a browser redraws, and a notebook stores, without being noticed."""

POINT_BUDGET = 40_000
"""Points of all traces of one figure together."""

SMOOTHING = 0.01


class Columns(Protocol):
    """A mapping of names to columns, or a run's `History`."""

    def __getitem__(self, name: str, /) -> Any: ...


class CurveLike(Protocol):
    """Anything with a name and columns."""

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> Columns: ...


@dataclass(frozen=True)
class Curve:
    """What one run recorded: equally long columns, one value a logged step.

    Columns are named as in a run's events: step, loss, learning_rate, grad_norm, step_ms, tokens, samples,
    flops, seconds (all cumulative but loss, rates and step_ms), gpu_hours, tokens_per_s, mfu. Only those
    that a figure draws have to be there.
    """

    name: str
    columns: Columns = field(repr=False)
    color: str | None = None


@dataclass(frozen=True)
class Axis:
    """One way to lay out training: which column, and how its values are written."""

    column: str
    label: str
    units: tuple[tuple[float, str], ...]
    """Scales from large to small with the axis title of each."""

    def unit(self, largest: float) -> tuple[float, str]:
        for scale, name in self.units:
            if largest >= scale:
                return scale, name
        return self.units[-1]


X_AXES = {
    "step": Axis("step", "step", ((1.0, "Step"),)),
    "tokens": Axis(
        "tokens",
        "tokens",
        ((1e12, "Tokens (T)"), (1e9, "Tokens (B)"), (1e6, "Tokens (M)"), (1e3, "Tokens (k)"), (1.0, "Tokens")),
    ),
    "time": Axis(
        "seconds",
        "time",
        ((7200.0, "Training time (hours)"), (120.0, "Training time (minutes)"), (1.0, "Training time (seconds)")),
    ),
    "flops": Axis(
        "flops",
        "FLOPs",
        (
            (1e21, "Model FLOPs (ZFLOP, 10<sup>21</sup>)"),
            (1e18, "Model FLOPs (EFLOP, 10<sup>18</sup>)"),
            (1e15, "Model FLOPs (PFLOP, 10<sup>15</sup>)"),
            (1e12, "Model FLOPs (TFLOP, 10<sup>12</sup>)"),
            (1e9, "Model FLOPs (GFLOP, 10<sup>9</sup>)"),
        ),
    ),
    "gpu_hours": Axis("gpu_hours", "GPU-hours", ((1.0, "GPU-hours"), (1 / 60, "GPU-minutes"))),
}

Y_LABELS = {
    "loss": "Loss",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "step_ms": "Step time (ms)",
    "tokens_per_s": "Tokens/s",
    "mfu": "MFU",
}


def column(curve: CurveLike, name: str) -> Array:
    """One column as float64, `None` as NaN; empty where the curve has none of that name."""
    try:
        values = curve.columns[name]
    except (KeyError, AttributeError):
        return np.empty(0)
    return np.asarray(values, dtype=np.float64)


def color_of(curve: CurveLike, index: int) -> str:
    return getattr(curve, "color", None) or theme.series_color(index)


def smoothed(x: Array, y: Array, width: float) -> Array:
    """Centred exponential average over `x`: weights `exp(-|x_i - x_j| / width)`, normalised.

    An average to both sides does not lag behind a falling loss as a one-sided one does; at either end it
    is the one-sided, bias-corrected average (arXiv:1412.6980, section 3). Weighing by distance in `x`
    rather than by index treats runs alike that log at different intervals. Over the first five widths
    the width grows with `x`, so that the steep start is not smeared. NaNs carry no weight and stay NaN.
    """
    finite = np.isfinite(y) & np.isfinite(x)
    result = np.full(len(y), np.nan)
    if width <= 0 or not finite.any():
        result[finite] = y[finite]
        return result
    distance, values = _in_widths(x[finite], width), y[finite]
    before, weight_before = _decayed_sums(distance, values)
    after, weight_after = (sums[::-1] for sums in _decayed_sums(-distance[::-1], values[::-1]))
    result[finite] = (before + after - values) / (weight_before + weight_after - 1.0)
    return result


def _in_widths(x: Array, width: float) -> Array:
    """Position in units of the local width `min(width, x / 5)`: the integral of its reciprocal."""
    full = 5.0 * width
    start = np.clip(x, full * 1e-3, full)
    return 5.0 * np.log(start / full) + np.clip(x - full, 0.0, None) / width


def _decayed_sums(distance: Array, values: Array) -> tuple[Array, Array]:
    """`sum_j≤i exp(distance_j - distance_i) values_j`, and the same of ones; `distance` does not fall."""
    sums, weights = np.empty(len(values)), np.empty(len(values))
    total = weight = 0.0
    start, origin = 0, 0.0
    while start < len(values):  # one turn covers 30 widths, so that no exponential overflows
        end = max(start + 1, int(np.searchsorted(distance, distance[start] + 30.0, side="right")))
        decay = np.exp(origin - distance[start]) if start else 0.0
        growth = np.exp(distance[start:end] - distance[start])
        sums[start:end] = (total * decay + np.cumsum(values[start:end] * growth)) / growth
        weights[start:end] = (weight * decay + np.cumsum(growth)) / growth
        total, weight, origin, start = sums[end - 1], weights[end - 1], distance[end - 1], end
    return sums, weights


def decimated(y: Array, max_points: int = MAX_POINTS) -> NDArray[np.int64]:
    """Indices of at most `max_points` points that draw as all of them do.

    Every bin keeps its minimum and its maximum, so that no spike is lost; the first and the last point
    stay, and one NaN for every gap (the first hundred), so that a gap is still seen.
    """
    from tsdownsample import MinMaxDownsampler

    if len(y) <= max_points:
        return np.arange(len(y))
    finite = np.flatnonzero(np.isfinite(y))
    gaps = gap_starts(y)[:100]
    bins = (max_points - len(gaps) - 2) // 2 * 2
    if len(finite) > bins:
        kept = finite[MinMaxDownsampler().downsample(np.ascontiguousarray(y[finite]), n_out=bins).astype(np.int64)]
        finite = np.concatenate([finite[:1], kept, finite[-1:]])
    return np.unique(np.concatenate([finite, gaps]))


def gap_starts(y: Array) -> NDArray[np.int64]:
    """Index of the first NaN (or infinity) of every run of them."""
    bad = ~np.isfinite(y)
    return np.flatnonzero(bad & ~np.concatenate([[False], bad[:-1]]))


def smoothing_axis(curves: Sequence[CurveLike]) -> str:
    """What smoothing is measured along: tokens where every curve counts them, else steps."""
    return "tokens" if curves and all(len(column(curve, "tokens")) for curve in curves) else "step"


def smoothing_width(curves: Sequence[CurveLike], smoothing: float) -> float:
    """`smoothing` as a share of the longest curve, in the units of `smoothing_axis`; the same for every curve."""
    name = smoothing_axis(curves)
    longest = max((np.nanmax(column(curve, name), initial=0.0) for curve in curves), default=0.0)
    return float(smoothing * longest)


@dataclass(frozen=True)
class DrawnCurve:
    """One run reduced to what is drawn; `x` holds each axis in its own unit, at the kept points."""

    name: str
    key: str
    """Tells runs of one name apart."""
    color: str
    raw_index: NDArray[np.int64]
    line_index: NDArray[np.int64]
    raw: Array
    line: Array
    dash: str
    gaps: NDArray[np.int64]
    x: Mapping[str, Array]
    hover: Array
    """Columns raw value, step, tokens at `line_index`."""

    @property
    def last(self) -> int | None:
        """Index of the last finite value."""
        finite = np.flatnonzero(np.isfinite(self.raw))
        return int(finite[-1]) if len(finite) else None


def draw(curves: Sequence[CurveLike], y: str, smoothing: float, scales: Mapping[str, float]) -> list[DrawnCurve]:
    """Smooth, then decimate; the same points serve every x axis, all of them being monotonic in the step."""
    width, along = smoothing_width(curves, smoothing), smoothing_axis(curves)
    budget = int(min(MAX_POINTS, max(200, POINT_BUDGET / max(1, len(curves)))))
    return [_drawn(curve, index, y, width, along, scales, budget) for index, curve in enumerate(curves)]


def _drawn(
    curve: CurveLike, index: int, y: str, width: float, along: str, scales: Mapping[str, float], budget: int
) -> DrawnCurve:
    raw = column(curve, y)
    position = column(curve, along)
    line = smoothed(position, raw, width) if len(position) == len(raw) else raw
    line_index = decimated(line, budget if width <= 0 else budget // 2)
    hover = np.column_stack([_or_nan(curve, name, len(raw))[line_index] for name in (y, "step", "tokens")])
    return DrawnCurve(
        name=curve.name,
        key=str(index),
        color=color_of(curve, index),
        dash="solid" if index < len(theme.PALETTE) else "dash",
        raw_index=decimated(raw, budget),
        line_index=line_index,
        raw=raw,
        line=line,
        gaps=gap_starts(raw)[:100],
        x={axis: _or_nan(curve, X_AXES[axis].column, len(raw)) / scale for axis, scale in scales.items()},
        hover=hover,
    )


def _or_nan(curve: CurveLike, name: str, length: int) -> Array:
    values = column(curve, name)
    return values if len(values) == length else np.full(length, np.nan)


def axes_of(curves: Sequence[CurveLike]) -> dict[str, tuple[float, str]]:
    """The x axes that every curve with a point can be drawn over, each with its scale and title."""
    begun = [curve for curve in curves if len(column(curve, "step"))]
    axes = {}
    for name, axis in X_AXES.items():
        columns = [column(curve, axis.column) for curve in begun]
        if all(np.isfinite(values).any() for values in columns):
            axes[name] = axis.unit(max((float(np.nanmax(values)) for values in columns), default=0.0))
    return axes


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
    drawn = draw(curves, y, smoothing, {name: scale for name, (scale, _) in axes.items()})
    figure = go.Figure(traces_of(drawn, x, y, smooth=smoothing > 0))
    _lay_out(figure, axes, x, y, log_y, title, many=len(drawn) > 8)
    figure.update_layout(updatemenus=_menus(figure, drawn, axes, x, y, log_y))
    if not any(len(curve.raw) for curve in drawn):
        _say_nothing_yet(figure)
    return figure


def _require_axis(x: str, axes: Mapping[str, Any]) -> None:
    if x not in X_AXES:
        raise UnknownParameter(f"x={x!r} is not an axis. {suggestion(x, X_AXES)}", parameter="x", value=x)
    if x not in axes:
        raise UnknownParameter(
            f"x={x!r} was not recorded by every run. Choose one of: {', '.join(axes)}.", parameter="x", value=x
        )


def traces_of(drawn: Sequence[DrawnCurve], x: str, y: str, smooth: bool) -> list[go.Scatter]:
    """The traces of all runs; `legendgroup` tells the run (`DrawnCurve.key`), `meta` the part that one plays."""
    positions = _label_positions(drawn, x)
    return [
        trace for curve, position in zip(drawn, positions, strict=True) for trace in _traces(curve, x, y, smooth, position)
    ]


def _traces(curve: DrawnCurve, x: str, y: str, smooth: bool, label_position: str | None) -> list[go.Scatter]:
    """Raw, smoothed, NaN crosses and end label of one run; one legend entry switches all of them."""
    shared = {"legendgroup": curve.key, "name": theme.text(curve.name)}
    line_values = curve.line if smooth else curve.raw
    traces = []
    if smooth:
        traces.append(
            go.Scatter(
                x=curve.x[x][curve.raw_index],
                y=curve.raw[curve.raw_index],
                mode="lines",
                line={"color": theme.pale(curve.color, 0.62), "width": 1},
                hoverinfo="skip",
                showlegend=False,
                zorder=0,
                meta="raw",
                **shared,
            )
        )
    traces.append(
        go.Scatter(
            x=curve.x[x][curve.line_index],
            y=line_values[curve.line_index],
            customdata=curve.hover,
            mode="lines+markers" if np.isfinite(curve.raw).sum() == 1 else "lines",
            line={"color": curve.color, "width": 2.2, "dash": curve.dash},
            marker={"color": curve.color, "size": 7},
            hovertemplate=_hover(y, smooth),
            zorder=1,
            meta="line",
            **shared,
        )
    )
    traces.extend(_gap_marks(curve, x, y, shared))
    traces.extend(_end_label(curve, x, line_values, label_position, shared))
    return traces


def _hover(y: str, smooth: bool) -> str:
    raw = " (raw %{customdata[0]:.4g})" if smooth else ""
    return f"{Y_LABELS.get(y, y).lower()} %{{y:.4g}}{raw} · step %{{customdata[1]:,.0f}} · %{{customdata[2]:.3s}} tokens"


def _gap_marks(curve: DrawnCurve, x: str, y: str, shared: Mapping[str, Any]) -> list[go.Scatter]:
    if not len(curve.gaps):
        return []
    return [
        go.Scatter(
            x=curve.x[x][curve.gaps],
            y=_height_before(curve.raw, curve.gaps),
            mode="markers",
            marker={"symbol": "x", "size": 9, "color": theme.ALERT, "line": {"color": "white", "width": 1}},
            hovertemplate=f"{Y_LABELS.get(y, y).lower()} is NaN from here",
            showlegend=False,
            zorder=2,
            meta="nan",
            **shared,
        )
    ]


def _height_before(values: Array, at: NDArray[np.int64]) -> Array:
    """The last finite value before each index, or the first one after where there is none."""
    finite = np.flatnonzero(np.isfinite(values))
    if not len(finite):
        return np.zeros(len(at))
    before = np.clip(np.searchsorted(finite, at) - 1, 0, None)
    return values[finite[before]]


def _end_label(
    curve: DrawnCurve, x: str, line: Array, position: str | None, shared: Mapping[str, Any]
) -> list[go.Scatter]:
    if curve.last is None or position is None:
        return []
    return [
        go.Scatter(
            x=curve.x[x][[curve.last]],
            y=line[[curve.last]],
            mode="markers+text",
            marker={"color": curve.color, "size": 6},
            text=[f"<b>{line[curve.last]:.3g}</b>"],
            textposition=position,
            textfont={"color": curve.color, "size": theme.FONT_PX},
            cliponaxis=False,
            hoverinfo="skip",
            showlegend=False,
            zorder=2,
            meta="end",
            **shared,
        )
    ]


def _label_positions(drawn: Sequence[DrawnCurve], x: str) -> list[str | None]:
    """Where each end label stands. Labels closer than a label's size are parted; a crowd gets none."""
    ends = {
        index: (curve.x[x][curve.last], curve.line[curve.last])
        for index, curve in enumerate(drawn)
        if curve.last is not None
    }
    if len(ends) > 8:
        return [None] * len(drawn)
    span_x = max((float(np.nanmax(curve.x[x], initial=0.0)) for curve in drawn), default=0.0) or 1.0
    finite = np.concatenate([curve.raw[np.isfinite(curve.raw)] for curve in drawn] or [np.empty(0)])
    span_y = float(np.ptp(finite)) if len(finite) else 0.0
    positions: list[str | None] = ["middle right"] * len(drawn)
    for index, (end_x, end_y) in ends.items():
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
            known = np.isfinite(drawn[other].line)
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
    legend = {"x": 1.01, "xanchor": "left"} if many else {"x": 0.995, "xanchor": "right"}
    figure.update_layout(
        template=theme.TEMPLATE,
        height=480,
        title=theme.title(theme.text(title or f"{Y_LABELS.get(y, y)} of each run")),
        margin={"t": 92, "r": 64},
        hovermode="x unified",
        legend={"y": 0.99, "yanchor": "top", "groupclick": "togglegroup", "tracegroupgap": 0, **legend},
        xaxis={"title": {"text": axes[x][1]}, "rangemode": "tozero", "unifiedhovertitle": {"text": hover_title(axes[x][1])}},
        yaxis={"title": {"text": Y_LABELS.get(y, y)}, "type": "log" if log_y else "linear"},
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

    def trace_x(trace: Any, axis: str) -> list[float]:
        curve = by_key[trace.legendgroup]
        index = {"raw": curve.raw_index, "line": curve.line_index, "nan": curve.gaps, "end": [curve.last or 0]}
        return _short(curve.x[axis][index[trace.meta]])

    x_buttons = [
        {
            "label": f"x: {X_AXES[name].label}",
            "method": "update",
            "args": [
                {"x": [trace_x(trace, name) for trace in figure.data]},
                {
                    "xaxis.title.text": heading,
                    "xaxis.unifiedhovertitle.text": hover_title(heading),
                    "xaxis.autorange": True,
                },
            ],
        }
        for name, (_, heading) in axes.items()
    ]
    label = Y_LABELS.get(y, y).split(" (")[0].lower()
    y_buttons = [
        {
            "label": f"{kind} {label}",
            "method": "relayout",
            "args": [{"yaxis.type": kind, "yaxis.autorange": True}],
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
        {"buttons": y_buttons, "active": int(log_y), "x": 0.0, "type": "buttons", "direction": "right", **shared, "pad": {"b": 4, "l": 140}},
    ]


def hover_title(heading: str) -> str:
    """`"Tokens (M): 11.2"`, with the value under the pointer."""
    return f"{heading}: %{{x:.4~g}}"


def _short(values: Array) -> list[float | None]:
    """Six significant digits: finer than a pixel, and a third of the file."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


def _say_nothing_yet(figure: go.Figure) -> None:
    figure.add_annotation(
        text="no step recorded yet", x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font={"color": theme.MUTED}
    )


def throughput(curves: Sequence[CurveLike], smoothing: float = SMOOTHING) -> go.Figure:
    """Tokens per second and step time over steps; the spread is drawn pale, its moving average in front."""
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for row, y in enumerate(("tokens_per_s", "step_ms"), start=1):
        for curve in draw(curves, y, smoothing, {"step": 1.0}):
            for trace in _traces(curve, "step", y, smoothing > 0, None):
                trace.showlegend = trace.showlegend is not False and row == 1
                figure.add_trace(trace, row=row, col=1)
        figure.update_yaxes(title_text=Y_LABELS[y], rangemode="tozero", row=row, col=1)
    figure.update_xaxes(title_text="Step", row=2, col=1)
    figure.update_layout(
        template=theme.TEMPLATE,
        height=460,
        title=theme.title("Throughput", _mean_rates(curves)),
        margin={"t": 76},
        hovermode="x unified",
        legend={"groupclick": "togglegroup", "tracegroupgap": 0, "x": 0.995, "xanchor": "right", "y": 0.60, "yanchor": "bottom"},
    )
    return figure


def _mean_rates(curves: Sequence[CurveLike]) -> str:
    """Median tokens/s and MFU of each run, as a sentence."""
    parts = []
    for curve in curves:
        rates, mfu = column(curve, "tokens_per_s"), column(curve, "mfu")
        if np.isfinite(rates).any():
            share = f", MFU {np.nanmedian(mfu):.1%}" if np.isfinite(mfu).any() else ""
            parts.append(f"{theme.text(curve.name)}: {count(float(np.nanmedian(rates)))} tokens/s{share}")
    return " · ".join(parts) + (" (medians)" if parts else "")
