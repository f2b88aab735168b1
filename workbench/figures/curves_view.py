"""Figure of curves over training: the loss, or any recorded column, of one or many runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from workbench.analysis.curve import (
    SMOOTHING,
    X_AXES,
    Array,
    Curve,
    Indices,
    check_axis,
    check_smoothing,
    column,
    evaluations_of,
    metrics_of,
    scalars_of,
    shared_axes,
    where_logged,
)
from workbench.base.errors import UnknownParameter, suggestion
from workbench.figures import theme
from workbench.figures.figure import Figure
from workbench.figures.prepared_curve import TRACE_ROLES, Preparation, PreparedCurve, entry_of, with_means
from workbench.record.columns import COLUMNS, EVALUATION_LABELS, AxisUnit
from workbench.runs.loss_basis import why_not_compared

Y_LABELS = {**{name: column.label for name, column in COLUMNS.items() if column.label}, **EVALUATION_LABELS}


class MarkLook(NamedTuple):
    """Look of the marks of one event type."""

    symbol: str
    size: int
    fill: str
    outline: str | None
    """Colour of the outline; None is the run's colour."""
    words: str
    """Explanation below the title."""


MARK_LOOKS: Mapping[str, MarkLook] = {
    "checkpoint": MarkLook("circle", 6, "white", None, "○ checkpoint"),
    "resume": MarkLook("triangle-right", 11, "white", None, "▷ resumed"),
    "spike": MarkLook("star-triangle-up", 11, theme.ALERT, "white", "△ spike, skipped or rewound"),
    "divergence": MarkLook("triangle-up", 12, theme.ALERT, "white", "▲ diverges from here"),
}
FLATTENING = 4.0
"""Height of a value above all others, in multiples of their span, from which it is left out of the axis."""
USUAL_PERCENTILE = 98.0
"""Percentile of a run's values below which it is while it trains as it should."""
LINE_FROM = 3
"""Number of held-out losses from which a line joins them."""
SMOOTHINGS = (0.0, 0.01, 0.03, 0.1)
"""Widths of the average that the menu of a figure offers, as shares of the longest run."""
SMOOTHED_AGAIN = 300_000
"""Number of values of all runs together up to which a figure holds their averages of other widths."""
LABEL_ROOM = 0.06
"""Size of an end label, as a share of the plot's width or height."""
MOST_HOVERED = 8
"""Number of runs up to which one box says the values of all at the pointer; with more it would cover the curves."""
NO_STEP = "no step recorded yet"
MENU_PX = 32
"""Height of a menu below the title of the x axis."""
MENU_LOOK = {
    "x": 0.0,
    "y": 1.02,
    "yanchor": "bottom",
    "xanchor": "left",
    "bgcolor": "white",
    "bordercolor": theme.AXIS,
    "font": {"size": 11, "color": theme.INK},
}


def loss_curves(
    curves: Sequence[Curve],
    x: str = "tokens",
    smoothing: float = SMOOTHING,
    y: str = "loss",
    log_y: bool = False,
    title: str | None = None,
    log_x: bool = False,
) -> Figure:
    """Draw the loss of each run: raw values pale behind, the smoothed line in front, the last value at its end.

    The number at the end is the last held-out loss if every run has one, else the training loss (`final_loss`). Menus
    inside the figure switch the x axis, both axes between linear and logarithmic, and the smoothing, also in an
    exported page. Above the curves stands why their losses do not compare, where they do not.

    NaN and infinite losses are gaps with a cross where they begin.

    Args:
        curves: the runs, in the order of their colours.
        x: first x axis shown, a name in `X_AXES`: `step`, `tokens`, `samples`, `time`, `flops` or `gpu_hours`.
        smoothing: width of the centred exponential average (`smoothed`) as a share of the longest run, measured in
            tokens and equal for all runs, so that runs are compared after the same averaging on every axis; 0 draws
            the raw line alone.
        y: recorded column, logged scalar, or metric of the experiments, to draw.
        log_y: begin with a logarithmic y axis.
        title: title of the figure.
        log_x: begin with a logarithmic x axis.

    Raises:
        UnknownParameter: the x axis does not exist, a run did not record it, or no run recorded `y`.
    """
    metrics = metrics_of(curves)
    if y in EVALUATION_LABELS or y in metrics:
        found = [evaluations_of(curve) for curve in curves]
        without = [curve.name for curve, held_out in zip(curves, found, strict=True) if held_out is None]
        if without:
            raise UnknownParameter(
                f"y={y!r} was not recorded by {', '.join(without)}. Compare runs that were launched with "
                "evaluation=wb.Evaluation(), or draw y='loss'."
            )
        curves, smoothing = [held_out for held_out in found if held_out is not None], 0.0
    scalars = scalars_of(curves)
    if y in scalars:
        curves = [where_logged(curve, y) for curve in curves]
    axes = shared_axes(curves)
    check_axis(x)
    check_smoothing(smoothing)
    if x not in axes:
        raise UnknownParameter(f"x={x!r} was not recorded by every run. Choose one of: {', '.join(axes)}.")
    begun = [curve for curve in curves if len(column(curve, "step"))]
    if begun and not any(len(column(curve, y)) for curve in begun):
        raise UnknownParameter(f"y={y!r} was not recorded. {suggestion(y, [*Y_LABELS, *metrics, *scalars])}")
    scales = {name: unit.scale for name, unit in axes.items()}
    preparation = Preparation.of(curves, smoothing, scales)
    prepared = preparation.prepare_all(curves, y)
    prepared = with_means(prepared) if y == "loss" else prepared
    y_range = settled_range(prepared, log_y)
    top = None if y_range is None or log_y else y_range[1]
    figure = Figure(curve_traces(prepared, x, y, smooth=smoothing > 0, top=top))
    _lay_out(figure, axes[x].title, y, log_y, prepared)
    figure.update_yaxes(range=y_range)
    figure.update_xaxes(type="log" if log_x else "linear", tickformat=theme.LOG_TICKS if log_x else None)
    inside = figure.layout.legend.orientation is None
    if inside:
        figure.update_layout(legend=theme.place_legend(figure.data, log_x=log_x, log_y=log_y, y_range=y_range))
    label = Y_LABELS.get(y, y)
    # The buttons for a linear and a logarithmic y axis each move the legend to a free corner, too.
    y_buttons = []
    for log, axis_type in enumerate(("linear", "log")):
        button_range = settled_range(prepared, bool(log))
        place = theme.place_legend(figure.data, log_y=bool(log), y_range=button_range) if inside else {}
        changes = {f"legend.{key}": value for key, value in place.items()}
        changes["yaxis.tickformat"] = _ticks(y, bool(log))
        args = [
            {"yaxis.type": axis_type, "yaxis.autorange": button_range is None, "yaxis.range": button_range, **changes}
        ]
        button = {"label": f"{axis_type} {label.split(' (')[0].lower()}", "method": "relayout", "args": args}
        y_buttons.append(button)
    y_look = {"type": "buttons", "direction": "right", "pad": {"b": 4, "l": 140}, **MENU_LOOK}
    # One button switches the x axis between linear and logarithmic.
    x_changes = [
        {"xaxis.type": axis_type, "xaxis.autorange": True, "xaxis.tickformat": ticks}
        for axis_type, ticks in (("log", theme.LOG_TICKS), ("linear", None))
    ]
    log_x_button = {"label": "log x", "method": "relayout", "args": [x_changes[log_x]], "args2": [x_changes[not log_x]]}
    menus = [
        _x_menu(figure, prepared, axes, x, y_range, log_y),
        {"buttons": y_buttons, "active": int(log_y), **y_look},
        {"buttons": [log_x_button], "type": "buttons", "pad": {"b": 4, "l": 306}, "active": -1, **MENU_LOOK},
        *_smoothing_menu(figure, preparation, prepared, curves, smoothing, y),
    ]
    figure.update_layout(updatemenus=menus)
    key, name = mark_key(prepared), theme.text(title or f"{label} of each run")
    menu_px = MENU_PX if len(menus) > 3 else 0
    figure.layout.height += menu_px
    bottom = figure.layout.margin.b + menu_px
    figure.laid_out(title=theme.title(name, key), margin={"t": 118 if key else 92, "b": bottom})
    if not any(len(curve.raw) for curve in prepared):
        figure.without_values(NO_STEP)
    return figure


def settled_range(prepared: Sequence[PreparedCurve], log_y: bool) -> list[float] | None:
    """Return a range of the y axis without what would flatten all the rest: losses after they diverge, and outliers.

    It is in powers of ten for a logarithmic axis. Returns None if the axis may show every value (`robust_range`).
    """
    curves, settled = [], []
    for curve in prepared:
        values = curve.raw[curve.raw_index]
        ends = [at for at, mark in zip(curve.mark_index, curve.marks, strict=True) if mark.type == "divergence"]
        before = curve.raw_index <= min(ends, default=len(curve.raw))
        known = np.isfinite(values)
        curves.append(values[known])
        settled.append(values[known & before])
    if log_y:
        if any(len(values) and values.min() <= 0 for values in settled):
            return None
        curves = [values[values > 0] for values in curves]
        curves, settled = [[np.log10(values) for values in each] for each in (curves, settled)]
    return robust_range(curves, settled)


def robust_range(curves: Sequence[Array], settled: Sequence[Array] | None = None) -> list[float] | None:
    """Return low and high end of an axis without outliers, or None if no value is one.

    A value is an outlier if it lies more than `FLATTENING` times their span above the values that are usual: those up
    to the median, over the curves, of the first value or the 98th percentile, whichever is larger.

    Args:
        curves: the finite values of each curve in their order.
        settled: the part of each that the axis should show; by default all.
    """
    shown = [values for values in (curves if settled is None else settled) if len(values)]
    if not shown:
        return None
    usual = [max(float(values[0]), float(np.percentile(values, USUAL_PERCENTILE))) for values in shown]
    together, level = np.concatenate(shown), float(np.percentile(usual, 50, method="lower"))
    low = float(together.min())
    high = float(together[together <= level + FLATTENING * (level - low)].max())
    most = max(float(values.max()) for values in curves if len(values))
    room = 0.05 * (high - low)
    return [low - room, high + room] if high > low and most - high > FLATTENING * (high - low) else None


def loss_layout(curves: Sequence[Curve], x: str) -> Figure:
    """Return an empty figure with the layout of `loss_curves`, without title and menus."""
    figure = Figure()
    _lay_out(figure, shared_axes(curves)[x].title, "loss", False, curves)
    return figure


def _lay_out(
    figure: Figure, x_title: str, y: str, log_y: bool, curves: Sequence[Curve] | Sequence[PreparedCurve]
) -> None:
    names = [theme.short(entry) for curve in curves if (entry := entry_of(curve))]
    is_folded = any(curve.look is not None and curve.look.folded for curve in curves)
    below = 0 if theme.fits_inside(names) else theme.height_below(names)
    legend = theme.LEGEND_BELOW if below else theme.LEGEND_CORNERS["top right"]
    figure.laid_out(
        height=480 + max(0, below - theme.BOTTOM_PX),
        margin={"t": 92, "r": 64, "b": below or theme.BOTTOM_PX},
        hovermode="x unified" if len(names) <= MOST_HOVERED and not is_folded else "closest",
        legend={"groupclick": "togglegroup", "tracegroupgap": 0, **legend},
        xaxis={"title": {"text": x_title}, "rangemode": "tozero", "unifiedhovertitle": {"text": hover_title(x_title)}},
        yaxis={
            "title": {"text": Y_LABELS.get(y, y)},
            "tickformat": _ticks(y, log_y),
            "type": "log" if log_y else "linear",
        },
        uirevision="keep",
    )


def hover_title(x_title: str) -> str:
    """Return the heading of the hover box, such as `"Tokens (M): 11.2"` with the value under the pointer."""
    return f"{x_title}: %{{x:.4~g}}"


def _ticks(y: str, log: bool) -> str | None:
    return "," if y.endswith("_ms") else theme.LOG_TICKS if log else None


def _x_menu(
    figure: Figure,
    prepared: Sequence[PreparedCurve],
    axes: Mapping[str, AxisUnit],
    x: str,
    y_range: list[float] | None,
    log_y: bool,
) -> dict[str, Any]:
    """Return the menu that switches the x axis: each button holds the x values of every trace.

    It ends a zoom of both axes. A y axis that leaves curves out begins as it was first shown, because its range depends
    on whether it is logarithmic.
    """
    whole_y: dict[str, Any] = {"yaxis.autorange": True}
    if y_range is not None:
        whole_y = {
            "yaxis.type": "log" if log_y else "linear",
            "yaxis.range": y_range,
            "updatemenus[1].active": int(log_y),
        }
    by_key = {curve.key: curve for curve in prepared}

    def values(axis: str, trace: Any) -> list[float | None]:
        curve = by_key[key_of(trace)]
        positions = curve.positions(axis, trace.meta)
        # Six significant digits are finer than a pixel and take a third of the file.
        return [float(f"{value:.6g}") if np.isfinite(value) else None for value in positions]

    buttons = [
        {
            "label": f"x: {X_AXES[name].label}",
            "method": "update",
            "args": [
                {"x": [values(name, trace) for trace in figure.data]},
                {
                    "xaxis.title.text": unit.title,
                    "xaxis.unifiedhovertitle.text": hover_title(unit.title),
                    "xaxis.autorange": True,
                    **whole_y,
                },
            ],
        }
        for name, unit in axes.items()
    ]
    return {"buttons": buttons, "active": list(axes).index(x), "direction": "down", "pad": {"b": 4}, **MENU_LOOK}


def _smoothing_menu(
    figure: Figure,
    preparation: Preparation,
    prepared: Sequence[PreparedCurve],
    curves: Sequence[Curve],
    smoothing: float,
    y: str,
) -> list[dict[str, Any]]:
    """Return the menu of widths of the average, each with the heights of every line; none for what is not averaged."""
    is_exact = y in COLUMNS and COLUMNS[y].is_exact
    if smoothing <= 0 or is_exact or not 0 < sum(len(curve.raw) for curve in prepared) <= SMOOTHED_AGAIN:
        return []
    means = {curve.key for curve in prepared if curve.is_mean}
    at = [i for i, t in enumerate(figure.data) if t.meta == "line" or (t.meta == "raw" and key_of(t) in means)]
    buttons, widths = [], sorted({*SMOOTHINGS, smoothing})
    for width in widths:
        lines = replace(preparation, width=preparation.width * width / smoothing).lines(curves, y)
        again = with_means([replace(curve, line=line) for curve, line in zip(prepared, lines, strict=False)])
        shown = [heights_of(again[int(key_of(figure.data[i]))], figure.data[i].meta) for i in at]
        heights = [np.round(values, 5) for values in shown]
        args = [{"y": [[float(value) if np.isfinite(value) else None for value in line] for line in heights]}, at]
        buttons.append({"label": f"smoothing {100 * width:.3g} %", "method": "restyle", "args": args})
    # Below the title of the x axis, because three menus fill the line above a figure of 500 pixels.
    look = {"direction": "up", **MENU_LOOK, "x": 1.0, "y": 0.0, "xanchor": "right", "yanchor": "top"}
    look["pad"] = {"t": theme.BOTTOM_PX - 4}
    return [{"buttons": buttons, "active": widths.index(smoothing), **look}]


def curve_traces(
    prepared: Sequence[PreparedCurve],
    x: str,
    y: str,
    smooth: bool,
    complete: bool = False,
    top: float | None = None,
    roles: Sequence[str] = TRACE_ROLES,
) -> list[go.Scatter]:
    """Return the traces of all curves: `meta` is one of `roles`, `key_of` its curve, and a `legendgroup` is one look.

    All runs' traces of one role follow one another, so that no value of a run covers the average of another. Roles
    without a point are left out, unless `complete`: then every run has one trace of each role. A run that ends above
    `top`, the upper end of the y axis, has an arrow with its last value there.
    """
    positions = _label_positions(prepared, x, top) if "end" in roles else [None] * len(prepared)
    of_runs = [
        _traces(curve, x, y, smooth, position, top, roles) for curve, position in zip(prepared, positions, strict=True)
    ]
    traces = list(chain.from_iterable(zip(*of_runs, strict=True)))
    begun = {curve.key for curve in prepared if curve.is_drawn and not curve.is_mean}
    return [t for t in traces if complete or len(t.x) or (t.meta == "line" and key_of(t) in begun)]


def key_of(trace: go.Scatter) -> str:
    """Return the key of the curve that a trace is a part of."""
    return str(trace.uid).partition(" ")[0]


def heights_of(curve: PreparedCurve, role: str) -> Array:
    """Return the values of the `line` of a curve, or of the band around it, which is the `raw` of a mean."""
    if role == "raw" and curve.low is not None and curve.high is not None:
        return np.concatenate([curve.high, curve.low[::-1]]) if curve.has_band else np.empty(0)
    return curve.line[curve.line_index]


def _traces(
    curve: PreparedCurve,
    x: str,
    y: str,
    smooth: bool,
    label_position: str | None,
    top: float | None,
    roles: Sequence[str],
) -> list[go.Scatter]:
    """Return one trace of each of `roles` with one legend entry for all."""
    line = curve.line if smooth else curve.raw
    shown, at = curve.points("line"), curve.points("raw") if smooth and not curve.is_quiet else curve.gaps[:0]
    held_out = np.empty(0) if curve.is_quiet else curve.evaluations.get("eval_loss", np.empty(0))
    before = " (raw %{customdata[0]:.4g})" if smooth else ""
    tokens = " · %{customdata[2]:.3s} tokens" if np.isfinite(curve.hover[:, 2]).any() else ""
    pale = {"color": theme.pale(curve.color, 0.62), "width": 1}
    said = f"{Y_LABELS.get(y, y).lower()} %{{y:.4g}}{before} · step %{{customdata[1]:,.0f}}{tokens}"
    if curve.look.folded:  # plotly.js would write its name beside the box in the pale colour
        said = f"{theme.text(curve.name)}<br>{said}<extra></extra>"
    few = (y not in COLUMNS and not smooth) or np.isfinite(curve.raw).sum() == 1
    raw: dict[str, Any] = {"x": curve.x[x][at], "y": curve.raw[at], "line": pale}
    if curve.is_mean:
        r, g, b = theme.rgb(curve.color)
        raw = {"x": curve.positions(x, "raw"), "y": heights_of(curve, "raw"), "line": {"width": 0}}
        raw |= {"fill": "toself", "fillcolor": f"rgba({r}, {g}, {b}, 0.2)"}
    fields: dict[str, dict[str, Any]] = {
        "raw": {**raw, "mode": "lines", "hoverinfo": "skip"},
        "line": {
            "x": curve.x[x][shown],
            "y": line[shown],
            "customdata": curve.hover,
            "mode": "lines+markers" if few else "lines",
            "line": {"color": curve.color, "width": 1.1 if curve.is_quiet else 2.2, "dash": curve.dash},
            "marker": {"color": curve.color, "size": 7},
            "hovertemplate": said,
        },
        "nan": {
            "x": curve.x[x][curve.gaps],
            "y": _height_before(curve.raw, curve.gaps),
            "mode": "markers",
            "marker": {"symbol": "x", "size": 9, "color": theme.ALERT, "line": {"color": "white", "width": 1}},
            "hovertemplate": f"{Y_LABELS.get(y, y).lower()} is NaN or infinite from here",
        },
        "evaluation": {
            "x": curve.positions(x, "evaluation")[: len(held_out)],
            "y": held_out,
            "mode": "markers" if len(held_out) < LINE_FROM else "lines+markers",  # two points look like a curve
            "line": {"color": theme.pale(curve.color, 0.5), "width": 1.1, "dash": curve.dash},
            "marker": {"color": curve.color, "size": 7, "symbol": "diamond", "line": {"color": "white", "width": 1}},
            "hovertemplate": "held-out loss %{y:.4g}",
        },
        "mark": _mark_fields(curve, x, line),
        "end": _end_fields(curve, x, label_position, top),
    }
    name, group = theme.text(theme.short(curve.entry or curve.name)), str(curve.look.index)
    in_front = {"zorder": 1} if curve.look.best and not curve.is_quiet else {}
    traces = []
    for role in [role for role in TRACE_ROLES if role in roles]:
        is_named = role == "line" and curve.entry != ""
        has_points = curve.is_drawn and len(fields[role]["x"])
        # All at once: a field that is set later takes plotly as long as a trace, and one that nobody sees some of it.
        look = {**fields[role], **in_front} if has_points or is_named else {"x": (), "y": ()}
        shared: dict[str, Any] = {"legendgroup": group, "name": name, "uid": f"{curve.key} {role}", "meta": role}
        traces.append(go.Scatter(**look, **shared, showlegend=is_named))
    return traces


def _mark_fields(curve: PreparedCurve, x: str, line: Array) -> dict[str, Any]:
    looks = [MARK_LOOKS[mark.type] for mark in curve.marks]
    heights = np.asarray(line[curve.mark_index]) if len(line) else np.empty(0)
    if not np.isfinite(heights).all():
        heights = np.where(np.isfinite(heights), heights, _height_before(line, curve.mark_index))
    outlines = [look.outline or curve.color for look in looks] or theme.ALERT
    return {
        "x": curve.x[x][curve.mark_index],
        "y": heights,
        "mode": "markers",
        "marker": {
            "symbol": [look.symbol for look in looks],
            "size": [look.size for look in looks],
            "color": [look.fill for look in looks],
            "line": {"color": outlines, "width": 1.5},
        },
        "customdata": [theme.text(mark.text) for mark in curve.marks],
        "hovertemplate": "%{customdata}",
    }


def mark_key(prepared: Sequence[PreparedCurve]) -> str | None:
    """Return the explanation of the symbols on the curves and of what the axis leaves out; None if there is neither."""
    types = {mark.type for curve in prepared if curve.is_drawn for mark in curve.marks}
    words = [look.words for mark_type, look in MARK_LOOKS.items() if mark_type in types]
    evaluated = [curve for curve in prepared if curve.evaluations]
    # In what the held-out loss differs from the training loss of the same weights, where all agree in it.
    differs = {curve.basis.held_out_in_words for curve in evaluated if curve.basis is not None}
    aside = differs.pop() if len(differs) == 1 else None
    words += [f"◆ held-out loss{'' if aside is None else f' ({aside})'}"] if evaluated else []
    words += ["✕ NaN or infinite"] if any(len(curve.gaps) for curve in prepared) else []
    if (y_range := settled_range(prepared, False)) is not None:
        runs = [curve for curve in prepared if not curve.is_mean and np.isfinite(curve.raw).any()]
        peaks = [(run.name, float(np.nanmax(run.raw))) for run in runs]
        high = [(theme.text(theme.short(name)), _describe_loss(peak)) for name, peak in peaks if peak > y_range[1]]
        beyond = [f"{name} (up to {peak})" for name, peak in high]
        words.append(f"↑ leaves the axis: {', '.join(beyond[:3])}{' …' if len(beyond) > 3 else ''}")
    held_out = [curve.ends_held_out or not curve.is_loss for curve in prepared]
    why = why_not_compared([curve.basis for curve in prepared], held_out)
    alert = why and f"<b><span style='color:{theme.ALERT}'>{theme.text(why)}</span></b>"
    return "<br>".join(filter(None, (alert, " · ".join(words)))) or None


def _height_before(values: Array, at: Indices) -> Array:
    """Return the last finite value before each index, or the first finite value after it."""
    finite = np.flatnonzero(np.isfinite(values))
    if not len(finite):
        return np.zeros(len(at))
    before = np.clip(np.searchsorted(finite, at) - 1, 0, None)
    return np.asarray(values[finite[before]])


def _end_fields(curve: PreparedCurve, x: str, position: str | None, top: float | None) -> dict[str, Any]:
    """Return the number at the end of a curve as a point at its own height, which tables show and sort by."""
    at, value = curve.positions(x, "end"), curve.end_value
    values = [] if value is None or curve.is_quiet else [value]
    above = top is not None and value is not None and value > top
    sign = "↑ " * above + "◆ " * curve.ends_held_out
    symbol, size = ("diamond", 9) if curve.ends_held_out else ("circle", 6)
    return {
        "x": at[: len(values)],
        "y": np.full(len(values), top) if above else np.array(values),
        "mode": "markers" if position is None else "markers+text",
        "marker": {"color": curve.color, "size": size, "symbol": symbol},
        "text": [f"<b>{sign}{_describe_loss(each)}</b>" for each in values],
        "textposition": position or "middle right",
        "textfont": {"color": theme.as_text(curve.color), "size": theme.FONT_PX},
        "cliponaxis": False,
        "hoverinfo": "skip",
    }


def _describe_loss(value: float) -> str:
    """Write a loss with two decimals from 1 to 100, where losses mostly are, else with three significant digits."""
    if 100 <= abs(value) < 1e5:
        return f"{value:,.0f}"
    return f"{value:.2f}" if 1 <= abs(value) < 100 else f"{value:#.3g}"


def _label_positions(prepared: Sequence[PreparedCurve], x: str, top: float | None) -> list[str | None]:
    """Return the position of each end label: labels that would overlap are parted; None leaves one of a crowd out."""
    ends = {
        index: (float(curve.positions(x, "end")[0]), min(curve.end_value, math.inf if top is None else top))
        for index, curve in enumerate(prepared)
        if curve.is_drawn and not curve.is_quiet and curve.end_value is not None
    }
    if len(ends) > theme.MAX_INSIDE:
        beyond = [index for index, (_, end_y) in ends.items() if end_y == top]
        return ["bottom left" if index in beyond[:1] else None for index in range(len(prepared))]
    span_x = max((end_x for end_x, _ in ends.values()), default=0.0) or 1.0
    shown = np.concatenate([curve.raw[curve.raw_index] for curve in prepared] or [np.empty(0)])
    finite = shown[np.isfinite(shown) & (shown <= (math.inf if top is None else top))]
    span_y = (float(np.ptp(finite)) if len(finite) else 0.0) or 1.0
    positions: list[str | None] = ["middle right"] * len(prepared)
    room = LABEL_ROOM * span_x
    for index, (end_x, end_y) in ends.items():
        # What would stand where the label does: other ends beside this one, and curves that pass it.
        beside = []
        for other, (other_x, other_y) in ends.items():
            if other != index and abs(other_x - end_x) < room:
                beside.append((other, other_y))
            elif other != index and other_x > end_x:
                at = prepared[other].line_index
                known = at[np.isfinite(prepared[other].line[at])]
                passing = np.interp(end_x + room / 2, prepared[other].x[x][known], prepared[other].line[known])
                beside.append((other, float(passing)))
        near = [y - end_y or float(index - other) for other, y in beside if abs(y - end_y) < LABEL_ROOM * span_y]
        above, below = sum(d > 0 for d in near), sum(d < 0 for d in near)
        if above and below:
            positions[index] = "middle right" if above == below == 1 else None
        elif near:
            positions[index] = "bottom right" if above else "top right"
    return positions
