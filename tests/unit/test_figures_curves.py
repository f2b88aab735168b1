"""Loss curves and panels show every run in its colour, from few points that lose no spike."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from figure_values import curve

from workbench.analysis.contrast import difference
from workbench.analysis.curve import CHUNK_POINTS, X_AXES, Curve, Mark, position_in_widths, smoothed
from workbench.base.errors import UnknownParameter
from workbench.figures import theme
from workbench.figures.curves_view import _describe_loss, loss_curves
from workbench.figures.figure import Figure, picture
from workbench.figures.panels_view import panel_names, panels
from workbench.figures.prepared_curve import MAX_POINTS, decimated, diverged_at, focused, gap_starts
from workbench.figures.run_views import differences
from workbench.figures.twin import Twin
from workbench.record.history import Utilization, final_loss


def parts(figure: Any, part: str) -> list[Any]:
    return [trace for trace in figure.data if trace.meta == part]


def test_each_run_has_a_pale_raw_trace_behind_and_a_smoothed_line_in_front() -> None:
    figure = loss_curves([curve("a"), curve("b", seed=1)])
    raw, line = parts(figure, "raw"), parts(figure, "line")
    assert [trace.name for trace in line] == ["a", "b"]
    order = [id(trace) for trace in figure.data]
    assert max(order.index(id(each)) for each in raw) < min(order.index(id(each)) for each in line)
    assert all(behind.line.width < front.line.width for behind, front in zip(raw, line, strict=True))


def test_one_legend_entry_switches_everything_that_a_run_draws() -> None:
    figure = loss_curves([curve("same name"), curve("same name", seed=1)])
    groups = {trace.legendgroup for trace in figure.data}
    assert len(groups) == 2
    for group in groups:
        assert sum(trace.showlegend for trace in figure.data if trace.legendgroup == group) == 1
    assert figure.layout.legend.groupclick == "togglegroup"


def test_a_run_keeps_one_colour_in_all_its_traces() -> None:
    figure = loss_curves([curve("a"), Curve("b", curve(seed=1).columns)])
    line, end = parts(figure, "line"), parts(figure, "end")
    assert [trace.line.color for trace in line] == [trace.marker.color for trace in end]
    assert line[0].line.color != line[1].line.color


def test_no_trace_has_more_points_than_a_browser_redraws_at_once() -> None:
    figure = loss_curves([curve("long", steps=100_000), curve("short", steps=50)])
    assert max(len(trace.x) for trace in figure.data) <= MAX_POINTS
    assert len(parts(figure, "raw")[1].x) == 50


def test_many_runs_share_a_budget_of_points() -> None:
    figure = loss_curves([curve(str(i), steps=3000, seed=i) for i in range(50)])
    assert sum(len(trace.x) for trace in figure.data) < 80_000


def test_decimation_keeps_the_lowest_and_the_highest_value_and_both_ends() -> None:
    values = np.random.default_rng(0).normal(size=1_000_000)
    values[123_456], values[654_321] = 50.0, -50.0
    kept = decimated(values)
    assert len(kept) <= MAX_POINTS
    assert {0, 123_456, 654_321, 999_999} <= set(kept.tolist())


def test_decimation_keeps_a_nan_for_every_gap() -> None:
    values = np.ones(50_000)
    values[1000:1010] = np.nan
    values[40_000] = np.inf
    kept = decimated(values)
    assert gap_starts(values).tolist() == [1000, 40_000]
    assert {1000, 40_000} <= set(kept.tolist())


def test_a_nan_loss_breaks_the_line_and_is_marked_where_it_begins() -> None:
    columns = dict(curve(steps=200).columns)
    columns["loss"] = np.where((columns["step"] >= 100) & (columns["step"] < 105), np.nan, columns["loss"])
    figure = loss_curves([Curve("diverged", columns)], x="step")
    [mark], [line] = parts(figure, "nan"), parts(figure, "line")
    assert list(mark.x) == [100]
    assert mark.y[0] == pytest.approx(columns["loss"][98])
    assert np.isnan(line.y).sum() == 5


def test_a_run_of_nan_alone_still_draws() -> None:
    columns = {"step": np.arange(5), "tokens": np.arange(5), "loss": np.full(5, np.nan)}
    figure = loss_curves([Curve("nan", columns)])
    assert parts(figure, "end") == []
    assert len(parts(figure, "nan")) == 1


def test_a_run_of_one_point_is_drawn_as_a_point() -> None:
    [line] = parts(loss_curves([curve(steps=1)]), "line")
    assert "markers" in line.mode
    assert len(line.x) == 1


def test_a_run_without_a_step_says_so() -> None:
    figure = loss_curves([Curve("new", {name: [] for name in ("step", "tokens", "loss")})])
    assert [note.text for note in figure.layout.annotations] == ["no step recorded yet"]
    assert (figure.layout.xaxis.showticklabels, figure.layout.yaxis.showticklabels) == (False, False)
    menus = [button.label for menu in figure.layout.updatemenus for button in menu.buttons]
    assert not [label for label in menus if "smoothing" in label], "nothing is averaged yet"


def test_the_menu_of_smoothing_stands_below_the_title_of_the_x_axis_and_above_a_legend() -> None:
    for names in (["a"], [f"a run with a long name {number}" for number in range(12)]):
        figure = loss_curves([curve(name, seed=seed) for seed, name in enumerate(names)])
        menu = figure.layout.updatemenus[3]
        title_px = figure.layout.xaxis.title.standoff or theme.TEMPLATE.layout.xaxis.title.standoff
        assert menu.pad.t >= 20 + title_px + theme.FONT_PX * theme.LINE_SPACING, "ticks, and the title below them"
        legend_px = 0 if len(names) == 1 else theme.height_below(names) - theme.AXIS_PX
        assert figure.layout.margin.b - legend_px >= menu.pad.t + 28


def test_the_end_of_each_line_carries_the_final_loss_of_the_tables() -> None:
    columns = curve("a", steps=1000).columns
    final = final_loss(columns["step"], columns["loss"])
    for smoothing in (0.0, 0.01, 0.1):
        [end] = parts(loss_curves([curve("a", steps=1000)], smoothing=smoothing), "end")
        assert end.text[0] == f"<b>{final:.2f}</b>"
        assert list(end.y) == [final]


@pytest.mark.parametrize(("loss", "label"), [(10.946, "10.95"), (5.417, "5.42"), (0.05123, "0.0512"), (0.0, "0.00")])
def test_an_end_label_tells_losses_apart(loss: float, label: str) -> None:
    assert _describe_loss(loss) == label


def test_labels_of_two_runs_that_end_together_stand_above_and_below() -> None:
    low, high = curve("low"), curve("high")
    raised = Curve("high", {**high.columns, "loss": high.columns["loss"] + 0.1})
    positions = [trace.textposition for trace in parts(loss_curves([low, raised]), "end")]
    assert positions == ["bottom right", "top right"]


def test_a_label_makes_way_for_a_run_that_goes_on_past_it() -> None:
    short, long = curve("short", steps=1000), curve("long", steps=2000)
    figure = loss_curves([Curve("short", {**short.columns, "loss": short.columns["loss"] + 0.05}), long])
    assert parts(figure, "end")[0].textposition == "top right"


@pytest.mark.parametrize("x", X_AXES)
def test_every_x_axis_has_a_title_with_its_unit(x: str) -> None:
    columns = {**curve().columns, "samples": np.arange(1, 2001) * 64}
    figure = loss_curves([Curve("run", columns)], x=x)
    words = {
        "step": "Step",
        "tokens": "(M)",
        "samples": "(k)",
        "time": "minutes",
        "flops": "EFLOP",
        "gpu_hours": "Device-minutes",
    }
    assert words[x] in figure.layout.xaxis.title.text


def test_the_menu_switches_every_trace_to_another_axis_and_retitles_it() -> None:
    figure = loss_curves([curve("a"), curve("b", steps=300)], x="tokens")
    menu = figure.layout.updatemenus[0]
    by_label = {button.label: button.args for button in menu.buttons}
    data, layout = by_label["x: step"]
    assert [len(x) for x in data["x"]] == [len(trace.x) for trace in figure.data]
    assert data["x"][-1] == [300.0]
    assert layout["xaxis.title.text"] == "Step"
    assert menu.buttons[menu.active].label == "x: tokens"


def test_the_menu_offers_no_axis_that_a_run_did_not_record() -> None:
    columns = {name: curve().columns[name] for name in ("step", "loss", "tokens")}
    figure = loss_curves([curve("a"), Curve("b", columns)])
    assert [button.label for button in figure.layout.updatemenus[0].buttons] == ["x: step", "x: tokens"]


def test_an_unknown_axis_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownParameter, match="Did you mean 'tokens'"):
        loss_curves([curve()], x="token")


def test_an_axis_that_a_run_lacks_is_refused_with_those_it_has() -> None:
    columns = {name: curve().columns[name] for name in ("step", "loss", "tokens")}
    with pytest.raises(UnknownParameter, match="step, tokens"):
        loss_curves([Curve("b", columns)], x="flops")


def test_a_column_that_nobody_recorded_is_refused() -> None:
    with pytest.raises(UnknownParameter, match="grad_norm"):
        loss_curves([curve()], y="grad_nrom")


def test_a_name_is_text_and_never_markup() -> None:
    [line] = parts(loss_curves([curve("<a href='x'>run</a>")]), "line")
    assert "<a" not in line.name


def test_a_name_is_never_taken_for_a_value_of_the_curve() -> None:
    """`%{y}` in a name would stand for a value in hover texts, and vanish from the legend."""
    name = "50%{y} of it"
    [shown] = parts(loss_curves([curve(name)]), "line")
    assert "%{y} of" not in shown.name
    assert shown.name.replace("\u200b", "") == name
    hovers = [trace.hovertemplate for trace in panels([curve(name)]).data if trace.hovertemplate]
    assert hovers
    assert all("%{y} of" not in hover for hover in hovers)


def test_a_long_name_leaves_room_for_the_curves() -> None:
    names = [f"bert-large {'tuned ' * 40}seed {seed}" for seed in (1, 2)]
    shown = [trace.name for trace in parts(loss_curves([curve(name) for name in names]), "line")]
    assert all(len(name) == 48 and name.startswith("bert-large tuned") for name in shown)
    assert [name[-6:] for name in shown] == ["seed 1", "seed 2"]


def test_no_two_of_many_runs_share_colour_and_line() -> None:
    curves = [curve(f"run-{index}", steps=20) for index in range(40)]
    looks = {(trace.line.color, trace.line.dash) for trace in parts(loss_curves(curves), "line")}
    assert len(looks) == 40
    found = [difference(other, curves[0]) for other in curves[1:20]]
    assert len({(t.line.color, t.line.dash) for t in parts(differences(found), "difference")}) == 19


def test_a_picture_leaves_out_what_a_logarithmic_axis_cannot_show() -> None:
    falling = Curve("falling", {"step": np.arange(1, 11), "loss": np.linspace(3, -3, 10)})
    assert picture(loss_curves([falling], x="step", log_y=True)).startswith(b"\x89PNG")


def test_smoothing_leaves_a_constant_alone_and_a_straight_line_straight() -> None:
    x = np.arange(1.0, 1001.0)
    assert smoothed(x, np.full(1000, 3.5), 10.0) == pytest.approx(np.full(1000, 3.5))
    middle = slice(200, 800)
    assert smoothed(x, 2 * x, 10.0)[middle] == pytest.approx((2 * x)[middle])


def test_a_learning_rate_has_the_corners_that_it_was_given_at_any_smoothing() -> None:
    made = curve("ramp", steps=300)
    rate = np.minimum(np.arange(1, 301) / 100, 1.0)
    run = Curve("ramp", {**made.columns, "learning_rate": rate})
    for smoothing in (0.01, 0.1):
        figure = loss_curves([run], y="learning_rate", x="step", smoothing=smoothing)
        [line] = parts(figure, "line")
        assert not [menu for menu in figure.layout.updatemenus if "smoothing" in menu.buttons[0].label]
        drawn = np.interp(np.arange(1, 301), np.asarray(line.x, dtype=float), np.asarray(line.y, dtype=float))
        assert drawn == pytest.approx(rate), "no measurement, but what was set"


def test_smoothing_equals_the_weighted_mean_that_it_states() -> None:
    x = np.cumsum(np.random.default_rng(1).uniform(0.5, 1.5, 600)) + 100
    y = np.random.default_rng(2).normal(size=600)
    width = 7.0  # all of x lies beyond five widths, where the width is constant
    weights = np.exp(-np.abs(x[:, None] - x[None, :]) / width)
    assert smoothed(x, y, width) == pytest.approx(weights @ y / weights.sum(axis=1))


def test_smoothing_does_not_lag_behind_a_falling_loss() -> None:
    columns = curve(steps=4000).columns
    clean = 4 + 6.4 * np.exp(-np.asarray(columns["step"]) / 200)
    line = smoothed(columns["tokens"].astype(float), columns["loss"], 0.01 * columns["tokens"][-1])
    assert np.abs(line - clean)[20:].max() < 0.25  # a one-sided average of that width is off by 0.7
    assert abs((line - clean)[20:].mean()) < 0.01


def test_smoothing_of_a_million_points_takes_no_noticeable_time() -> None:
    import time

    x = np.arange(1.0, 1_000_001.0)
    began = time.process_time()  # clock: processor seconds, with forty times what it takes
    smoothed(x, np.sin(x), 1000.0)
    assert time.process_time() - began < 2.0  # clock: processor seconds, with forty times what it takes


def test_the_average_of_a_long_column_is_the_weighted_sum_that_defines_it() -> None:
    """Three chunks of points with a gap at a chunk's edge, for a narrow and a wide average, checked at some points."""
    random = np.random.default_rng(0)
    x = np.cumsum(random.exponential(1.0, 3 * CHUNK_POINTS))
    y = np.sin(x / 300) + random.normal(0, 1, len(x))
    y[CHUNK_POINTS - 5 : CHUNK_POINTS + 5] = np.nan
    known = np.isfinite(y)
    for width, error in (
        (20.0, 1e-9),
        (0.05 * x[-1], 0.01 / np.sqrt(4 * 0.05 * len(x))),
    ):  # a hundredth of the noise left
        line = smoothed(x, y, width)
        assert np.array_equal(np.isfinite(line), known)
        for at in (0, 7, 500, CHUNK_POINTS - 6, CHUNK_POINTS + 5, 2 * CHUNK_POINTS, len(x) - 1):
            position = position_in_widths(x[known], width)
            weights = np.exp(-np.abs(position - position[known[:at].sum()]))
            assert line[at] == pytest.approx(weights @ y[known] / weights.sum(), abs=error)


def test_two_runs_of_different_length_are_smoothed_over_the_same_number_of_tokens() -> None:
    long, short = curve("long", steps=2000), curve("short", steps=200)
    alone = parts(loss_curves([short], smoothing=0.01), "line")[0]
    beside = parts(loss_curves([long, short], smoothing=0.001), "line")[1]
    assert beside.y == pytest.approx(alone.y)


def test_a_zoomed_curve_keeps_every_spike_of_what_is_visible_and_an_outline_of_the_rest() -> None:
    x = np.arange(1_000_000, dtype=np.float64)
    values = np.random.default_rng(0).normal(size=len(x))
    values[500_300], values[501_200] = 40.0, -40.0
    kept = focused(x, values, decimated(values, 1200), (500_000.0, 502_000.0), 1200)
    inside = kept[(kept >= 500_000) & (kept <= 502_000)]
    assert {500_300, 501_200} <= set(inside.tolist())
    assert len(inside) > 900
    assert {0, 999_999} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()


def test_what_is_visible_of_a_short_stretch_is_drawn_whole() -> None:
    x = np.arange(100_000, dtype=np.float64)
    kept = focused(x, np.sin(x), decimated(np.sin(x), 1000), (10_000.0, 10_100.0), 1000)
    assert set(range(10_000, 10_101)) <= set(kept.tolist())


def test_checkpoints_and_resumptions_stand_on_the_curve_at_their_step() -> None:
    events = (Mark("checkpoint", 500, "checkpoint at step 500"), Mark("resume", 1000, "resumed <here>"))
    figure = loss_curves([Curve("a", curve("a").columns, marks=events)], x="step")
    [marks], [line] = parts(figure, "mark"), parts(figure, "line")
    assert list(marks.x) == [500, 1000]
    assert list(marks.customdata) == ["checkpoint at step 500", "resumed &lt;here&gt;"]
    assert marks.y[0] == pytest.approx(np.interp(500, line.x, line.y), abs=0.05)
    assert "checkpoint" in figure.layout.title.subtitle.text


def test_a_loss_that_turns_and_climbs_is_marked_at_its_lowest() -> None:
    step = np.arange(1, 2001)
    loss = np.where(step < 1200, 4 + 6 * np.exp(-step / 200), 4 + (step - 1200) / 100.0)
    loss = loss + np.random.default_rng(0).normal(0, 0.1, len(step))
    figure = loss_curves([Curve("diverges", {"step": step, "loss": loss})], x="step")
    [mark] = parts(figure, "mark")
    assert 700 <= mark.x[0] <= 1210


def test_noise_a_plateau_and_a_single_spike_are_no_divergence() -> None:
    for seed in range(20):
        columns = dict(curve(seed=seed).columns)
        columns["loss"][1500] = 9.0
        line = smoothed(columns["tokens"].astype(float), columns["loss"], 0.01 * columns["tokens"][-1])
        assert diverged_at(columns["loss"], line) is None


def test_panels_show_what_was_recorded_in_the_runs_colours() -> None:
    runs = [curve("a"), curve("b", seed=1)]
    peaks = [{0: {"peak_bytes": 2**30, "limit_bytes": 4 * 2**30}, 1: {"peak_bytes": 2**31}}, {}]
    assert panel_names(runs, peaks) == ["tokens_per_s", "mfu", "memory"]
    figure = panels(runs, peaks)
    lines = [trace for trace in figure.data if trace.meta == "line"]
    assert [line.line.color for line in lines[:2]] == [line.line.color for line in lines[2:]]
    assert lines[2].y[0] == pytest.approx(40.0)
    [bars, _] = [trace for trace in figure.data if trace.meta == "memory"]
    assert list(bars.y) == [1.0, 2.0]
    [limit] = [trace for trace in figure.data if trace.meta == "limit"]
    assert [height for height in limit.y if height is not None] == [4.0, 4.0]


def test_a_bar_of_memory_has_the_limit_of_its_own_device_above_it_and_the_axis_says_what_the_line_is() -> None:
    runs = [curve("a"), curve("b", seed=1), curve("c", seed=2)]
    sizes = [{0: (1, 4), 1: (2, 4)}, {0: (60, 140)}, {1: (3, None)}]
    peaks = [{r: {"peak_bytes": p * 2**30, "limit_bytes": m and m * 2**30} for r, (p, m) in s.items()} for s in sizes]
    figure = panels(runs, peaks)
    places = [(trace, rank) for trace in parts(figure, "memory") for rank in trace.x]
    bars = {(trace.name, rank): (rank + trace.offset, trace.width) for trace, rank in places}
    left_ends = sorted((left, left + width) for left, width in bars.values())
    assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(left_ends)), "no bar covers another"
    [limit] = parts(figure, "limit")
    lines = [(limit.x[at], limit.x[at + 1], limit.y[at]) for at in range(0, len(limit.x), 3)]
    expected = [(*bars[name, rank], height) for name, rank, height in (("a", 0, 4), ("a", 1, 4), ("b", 0, 140))]
    assert np.allclose(lines, [(left, left + width, height) for left, width, height in expected])
    [title] = [axis.title.text for axis in figure.select_xaxes() if str(axis.title.text).startswith("rank")]
    assert "limit" in title
    assert "limit" not in str(panels(runs, [{0: {"peak_bytes": 2**30}}, {}, {}]).layout.to_plotly_json())


@pytest.mark.parametrize("ends", [(2.1, 2.9), (5.1, 9.9), (1.05, 1.45), (1.0, 1000.0), (3.2, 9.0), (0.021, 0.05)])
def test_a_logarithmic_axis_has_at_least_two_ticks_however_narrow_it_is(ends: tuple[float, float]) -> None:
    low, high = ends
    figure = Figure(theme.marks([low, high], [low, high], "", {"color": theme.INK}))
    figure.laid_out(xaxis=theme.log_axis((low, high)), yaxis=theme.log_axis((low, high)), height=400)
    twin = Twin(figure, 600)
    twin.draw()
    for axis in twin._axes.values():
        ticks, labels = axis.ticks(300.0)
        assert len(ticks) >= 2
        assert [float(label.replace(",", "")) for label in labels] == pytest.approx(ticks)
    given = figure.layout.xaxis.tickvals  # else plotly.js chooses ticks for the range that is shown
    assert given is None or sum(low <= tick <= high for tick in given) >= 2


def test_a_wait_for_data_has_a_panel_if_it_matters() -> None:
    def waiting(*shares: float) -> Curve:
        columns = curve("waits", steps=len(shares)).columns
        return Curve("waits", {**columns, "data_wait": np.array(shares)})

    once = waiting(0.9, *[0.01] * 99)
    assert panel_names([once]) == ["tokens_per_s", "mfu"], "the first batch alone is no reason"
    often = waiting(0.9, *[0.3] * 99)
    assert panel_names([once, often]) == ["tokens_per_s", "mfu", "data_wait"]
    figure = panels([often], x="step", names=["data_wait"])
    [line] = [trace for trace in figure.data if trace.meta == "line"]
    assert line.y[-1] == pytest.approx(30.0)
    assert figure.layout.annotations[0].text == "Waiting for<br>data (%)"
    assert panel_names([waiting(np.nan)]) == ["tokens_per_s", "mfu"]


def usage(name: str, devices: int, moments: int = 500) -> Utilization:
    """Samples of 0.1 s to 200 s: device d is busy for (90 - 10 d) %."""
    time, device = np.repeat(np.linspace(0.1, 200.0, moments), devices), np.tile(np.arange(devices), moments)
    names = tuple(f"{name} {index}" for index in range(devices))
    return Utilization("cuda", names, time, device.astype(float), 0.9 - 0.1 * device, np.full(len(time), 2.0**30))


def timed(name: str, begun: float = 0.0) -> Curve:
    columns = dict(curve(name).columns)
    return Curve(name, {**columns, "time": begun + columns["seconds"]})


def test_utilisation_shows_each_device_pale_and_their_mean_along_the_training() -> None:
    runs = [timed("a"), timed("b"), timed("c")]
    figure = panels(runs, (), "step", usage=[usage("GPU", 2), None, usage("GPU", 1)], names=["utilization"])
    assert figure.layout.annotations[0].text == "GPU use (%)"
    means = parts(figure, "utilization")
    assert [len(trace.x) > 0 for trace in means] == [True, False, True]
    assert np.allclose(means[0].y, 85.0)
    assert means[0].x[-1] == pytest.approx(2000, abs=5)  # 200 s are 2,000 steps
    assert means[0].customdata[0] == "GPU 0 90%, 1.0 GiB · GPU 1 80%, 1.0 GiB"
    pale = parts(figure, "raw")[0]
    assert set(np.round(pale.y[np.isfinite(pale.y)])) == {80.0, 90.0}
    assert np.isnan(pale.y).sum() == 1, "one gap between two devices"


def test_samples_from_outside_a_runs_steps_and_of_no_run_have_no_panel() -> None:
    late = timed("a", begun=150.0)
    figure = panels([late], (), "tokens", usage=[usage("GPU", 1)], names=["utilization"])
    [mean] = parts(figure, "utilization")
    assert max(mean.x) == pytest.approx(500 * 8192 / 1e6, rel=0.02)
    assert "utilization" not in panel_names([late], (), [None])
    assert "utilization" in panel_names([late], (), [usage("GPU", 1)])


def test_a_run_that_diverges_does_not_flatten_the_others() -> None:
    wild = curve("wild")
    loss = wild.columns["loss"].copy()
    loss[1000:] = np.exp(np.linspace(math.log(loss[1000]), 25, 1000))
    figure = loss_curves([curve("tame", seed=1), Curve("wild", {**wild.columns, "loss": loss})])
    low, high = figure.layout.yaxis.range
    assert high - low < 10
    linear, log = (button.args[0]["yaxis.range"] for button in figure.layout.updatemenus[1].buttons)
    assert list(linear) == [low, high]
    assert log[1] < math.log10(high) + 0.1
    assert loss_curves([curve("tame", seed=1)]).layout.yaxis.range is None
