"""Units: every axis and every word has the value that its unit says, in numbers that are worked out here by hand."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from figure_values import curve, plan

import workbench as wb
from tests.logs import append_event
from workbench.analysis.contrast import Difference
from workbench.analysis.curve import X_AXES, Curve
from workbench.analysis.pareto import ParetoPoint
from workbench.base.units import count, duration, flops_per_s, gib, milliseconds, time_left
from workbench.figures.curves_view import loss_curves
from workbench.figures.figure import Figure
from workbench.figures.panels_view import panels
from workbench.figures.plan_view import show_plan
from workbench.figures.run_views import differences, draw_pareto
from workbench.figures.timeline_view import draw_timeline, measured_timeline
from workbench.figures.twin import Twin
from workbench.record.columns import COLUMNS, FinishedStep, logged_columns
from workbench.record.history import HistoryTail, Utilization
from workbench.record.rundir import RunDir, write_json, write_record
from workbench.sweeps.grid import Cell, Grid
from workbench.sweeps.queue import Entry, QueueDir, Result
from workbench.widgets.live_widget import CurveSettings, LiveLossFigure, LivePanelsFigure
from workbench.widgets.run_reader import RunReader

DRAWN = [
    *(("step", 3.0, "Step", 3.0), ("step", 5e6, "Step", 5e6)),
    *(("tokens", 2e12, "Tokens (T)", 2.0), ("tokens", 5e9, "Tokens (B)", 5.0), ("tokens", 3e7, "Tokens (M)", 30.0)),
    *(("tokens", 4e3, "Tokens (k)", 4.0), ("tokens", 512.0, "Tokens", 512.0)),
    *(("samples", 4e9, "Samples (B)", 4.0), ("samples", 2.5e6, "Samples (M)", 2.5)),
    *(("samples", 6e3, "Samples (k)", 6.0), ("samples", 64.0, "Samples", 64.0)),
    *(("time", 28_800.0, "Training time (hours)", 8.0), ("time", 7_200.0, "Training time (hours)", 2.0)),
    *(("time", 7_080.0, "Training time (minutes)", 118.0), ("time", 844.8, "Training time (minutes)", 14.08)),
    *(("time", 119.0, "Training time (seconds)", 119.0), ("time", 0.5, "Training time (seconds)", 0.5)),
    *(("flops", 3e21, "Model FLOPs (ZFLOP, 10²¹)", 3.0), ("flops", 7e18, "Model FLOPs (EFLOP, 10¹⁸)", 7.0)),
    *(("flops", 2e15, "Model FLOPs (PFLOP, 10¹⁵)", 2.0), ("flops", 9e12, "Model FLOPs (TFLOP, 10¹²)", 9.0)),
    *(("flops", 4e9, "Model FLOPs (GFLOP, 10⁹)", 4.0), ("flops", 4e6, "Model FLOPs (MFLOP, 10⁶)", 4.0)),
    *(("gpu_hours", 2.5, "Device-hours", 2.5), ("gpu_hours", 0.5, "Device-minutes", 30.0)),
]
"""Axis, largest value as it is recorded (seconds, hours of devices), title, and the place of that value on the axis."""
assert {x for x, *_ in DRAWN} == set(X_AXES)


@pytest.mark.parametrize(("x", "recorded", "title", "shown"), DRAWN)
def test_an_axis_shows_a_value_in_the_unit_that_it_names(x: str, recorded: float, title: str, shown: float) -> None:
    unit = X_AXES[x].unit(recorded)
    assert (unit.title, recorded / unit.scale) == (title, pytest.approx(shown))


def test_the_words_for_a_value_on_an_axis_have_its_unit() -> None:
    told = {
        "step": {1: "1 step", 30_500: "30.5 k steps"},
        "tokens": {30.1e6: "30.1 M tokens", 1: "1 token", 2.5e12: "2.5 T tokens"},
        "samples": {4096: "4.1 k samples", 1: "1 sample"},
        "time": {0.25: "250 ms", 59: "59.0 s", 844.8: "14 min 05 s", 11_520: "3 h 12 min"},
        "flops": {3.14159e18: "3.14e+18 FLOPs"},
        "gpu_hours": {2.5: "2.5 device-hours", 1: "1 device-hour", 0.1: "0.1 device-hours"}
        | {0.05: "3 device-minutes", 1 / 60: "1 device-minute"},
    }
    assert set(told) == set(X_AXES)
    found = {x: {value: X_AXES[x].describe(value) for value in words} for x, words in told.items()}
    assert found == told


def test_numbers_with_units_are_told_in_words() -> None:
    assert [gib(2**30 * 36.7), gib(2**20 * 5), gib(2048), gib(0)] == ["36.7 GiB", "5.0 MiB", "2.0 KiB", "0.0 KiB"]
    assert [count(n) for n in (2.46e9, 340e6, 30_500, 7, 1e12)] == ["2.46 B", "340 M", "30.5 k", "7", "1 T"]
    rates = [flops_per_s(rate) for rate in (2e18, 1.5e15, 809e12, 183e9, 5e6)]
    assert rates == ["2 EFLOP/s", "1.5 PFLOP/s", "809 TFLOP/s", "183 GFLOP/s", "5 MFLOP/s"]
    assert [duration(s) for s in (0.213, 4.2, 485, 11_520)] == ["213 ms", "4.2 s", "8 min 05 s", "3 h 12 min"]
    assert [milliseconds(ms) for ms in (1421, 2.5, 485_000)] == ["1,421 ms", "2.5 ms", "8 min 05 s"]
    left = [time_left(s) for s in (38, 420, 1500, 5400, 36_000)]
    assert left == ["40 s", "7 min", "25 min", "1 h 30 min", "10 h"]


STEPS = 64
COSTS = {
    "step": 64.0,
    "tokens": 3.2e7,
    "samples": 6400.0,
    "seconds": 844.8,
    "flops": 2e15,
    "gpu_hours": 844.8 * 2 / 3600,
}
"""A run of two devices that ends after 14.08 minutes, hence after 28.16 device-minutes."""
ENDS = {
    "step": ("Step", 64.0),
    "tokens": ("Tokens (M)", 32.0),
    "samples": ("Samples (k)", 6.4),
    "time": ("Training time (minutes)", 14.08),
    "flops": ("Model FLOPs (PFLOP, 10¹⁵)", 2.0),
    "gpu_hours": ("Device-minutes", 28.16),
}
assert set(ENDS) == set(X_AXES)
RISING = np.arange(1, STEPS + 1) / STEPS


def run(name: str = "run") -> Curve:
    recorded = {name: RISING * end for name, end in COSTS.items()}
    return Curve(name, {**curve(steps=STEPS).columns, **recorded})


@pytest.fixture
def sweep(tmp_path: Path) -> wb.sweeps.Sweep:
    """A sweep of one run of two devices."""
    directory = QueueDir(tmp_path / "sweep")
    settings = {"experiment": {}, "axes": {"learning_rate": [1e-3]}, "sampler": "grid", "trials": None}
    write_json(directory.settings_file, {**settings, "seeds": [0], "stop": None})
    directory.write_queue([entry := Entry(0, {"learning_rate": 0}, 0)])
    path = RunDir(directory.run(entry))
    write_record(path.experiment, {"learning_rate": 1e-3, "seed": 0, "name": "sweep", "steps": STEPS})
    write_record(path.environment, {})
    append_event(path.events, "start", devices=["cuda:0", "cuda:1"], world=2)
    for step in range(1, STEPS + 1):
        logged = {name: value * step / STEPS for name, value in COSTS.items() if name != "gpu_hours"}
        logged |= {name: int(logged[name]) for name in ("step", "tokens", "samples")}
        append_event(path.events, "step", loss=5 / step, step_ms=13_200.0, tokens_per_s=1e4, **logged)
    append_event(path.events, "status", state="finished", message="")
    result = Result("finished", 5 / STEPS, STEPS, COSTS["seconds"], gpu_hours=COSTS["gpu_hours"])
    directory.write_result(entry, result)
    return wb.sweeps.load_sweep(directory.path)


def ends_of(figure: Any) -> tuple[str, float]:
    """Title of the x axis, and where its curves end."""
    axes = [figure.layout[name] for name in figure.layout if name.startswith("xaxis")]
    [title] = {axis.title.text for axis in axes if axis.title.text}
    drawn = (trace.x for trace in figure.data if trace.x is not None)
    return title, max(float(np.nanmax(np.asarray(x, float))) for x in drawn if len(x))


def difference(x: str) -> Figure:
    along, value = RISING * COSTS[X_AXES[x].column], np.linspace(1, 2, STEPS)
    return differences([Difference(("a", "b"), x, along, value, value - 0.1, value + 0.1, None, None)])


FIGURES: dict[str, Callable[[str], Figure]] = {
    "loss": lambda x: loss_curves([run()], x=x),
    "panels": lambda x: panels([run()], x=x, names=["tokens_per_s", "mfu"]),
    "difference": difference,
}


@pytest.mark.parametrize("x", ENDS)
@pytest.mark.parametrize("name", FIGURES)
def test_each_figure_ends_where_its_run_does_in_the_unit_of_its_axis(name: str, x: str) -> None:
    assert ends_of(FIGURES[name](x)) == (ENDS[x][0], pytest.approx(ENDS[x][1]))


@pytest.mark.parametrize("x", ENDS)
def test_figures_of_runs_on_disk_end_where_their_runs_do(sweep: wb.sweeps.Sweep, x: str) -> None:
    title, end = ENDS[x]
    assert ends_of(wb.figures.seed_bands(sweep, x=x)) == (title, pytest.approx(end))
    if x in ("step", "gpu_hours"):
        assert ends_of(wb.figures.best_so_far(sweep, x=x)) == (f"{title} of all runs", pytest.approx(end))
    snapshot, settings = RunReader(sweep.runs[0].path).read(), CurveSettings(x, 0.0)
    live, beside = LiveLossFigure([snapshot], settings, lambda: None), LivePanelsFigure()
    beside.draw([snapshot], settings, None, now=True)
    for drawn in (live.static_figure([snapshot], settings), beside.figure):
        assert ends_of(drawn) == (title, pytest.approx(end))


def test_the_menu_of_axes_moves_every_curve_to_the_unit_of_its_title() -> None:
    for button in loss_curves([run()]).layout.updatemenus[0].buttons:
        data, layout = button.args
        title, end = next(ENDS[x] for x, axis in X_AXES.items() if button.label == f"x: {axis.label}")
        assert layout["xaxis.title.text"] == title
        assert max(x[-1] for x in data["x"] if x) == pytest.approx(end, rel=1e-5)


def test_a_table_and_a_picture_have_the_values_of_the_axis(tmp_path: Path) -> None:
    figure = loss_curves([run()], x="time", smoothing=0.0)
    with figure.save(tmp_path / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["Training time (minutes)"]) == pytest.approx(14.08)
    [axes] = [axes for axes in Twin(figure, 900).draw().axes if axes.lines]
    assert max(float(np.nanmax(line.get_xdata())) for line in axes.lines) == pytest.approx(14.08)


STEP = FinishedStep(
    step=10,
    loss=2.0,
    grad_norm=1.5,
    learning_rate=1e-3,
    step_s=0.25,
    waited_s=0.05,
    seconds=2.5,
    tokens_per_sample=128,
    samples_per_step=8,
    samples=80,
    flops_per_step=1e12,
    flops=1e13,
    peak_flops=1e13,
    spikes=1,
)


def test_a_step_is_logged_in_the_units_of_its_columns() -> None:
    """A step of 0.25 s over 1,024 tokens and 1 TFLOP, on devices of 10 TFLOP/s, that waited for 0.05 s."""
    counts = {"step": 10, "spikes": 1, "tokens": 10_240, "samples": 80, "flops": 1e13, "seconds": 2.5}
    rates = {"step_ms": 250.0, "tokens_per_s": 4096.0, "mfu": 0.4, "data_wait": 0.2}
    found = logged_columns(STEP)
    assert found == pytest.approx({"loss": 2.0, "grad_norm": 1.5, "learning_rate": 1e-3, **counts, **rates})
    assert set(found) == {name for name, column in COLUMNS.items() if column.value is not None}


def test_device_hours_of_a_history_are_devices_times_hours(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    append_event(run.events, "start", devices=["cuda:0", "cuda:1"], world=2, resumed_from=None)
    append_event(run.events, "step", step=1, loss=1.0, seconds=1800.0)
    assert HistoryTail(run.events).read().gpu_hours.tolist() == [1.0]


def test_shares_are_drawn_in_percent_and_memory_in_gibibytes() -> None:
    columns = {**run().columns, "mfu": np.full(STEPS, 0.4), "time": np.arange(STEPS) + 0.0}
    columns["data_wait"] = np.full(STEPS, 0.2)
    peak = {0: {"peak_bytes": 6 * 2**30, "limit_bytes": 8 * 2**30}}
    devices = np.zeros(STEPS), np.full(STEPS, 0.7), np.full(STEPS, 2.0**30)
    usage = Utilization("cuda", ("GPU 0",), np.arange(STEPS) + 0.0, *devices)
    figure = panels([Curve("run", columns)], [peak], x="step", smoothing=0.0, usage=[usage])
    titles = [note.text.replace("<br>", " ") for note in figure.layout.annotations]

    def heights(title: str) -> set[float]:
        axis = f"y{titles.index(title) + 1}" if titles.index(title) else "y"
        values = (np.asarray(trace.y, float) for trace in figure.data if (trace.yaxis or "y") == axis)
        return {round(float(v), 6) for y in values for v in y if np.isfinite(v)}

    shown = {"MFU (%)": {40.0}, "Waiting for data (%)": {20.0}, "GPU use (%)": {70.0}, "Peak memory (GiB)": {6.0, 8.0}}
    assert {title: heights(title) for title in shown} == shown


def test_memory_of_a_plan_is_drawn_in_the_unit_of_its_axis() -> None:
    """Stage 0 of a plan with stages of 14 blocks of 44 M parameters in 16 bytes each, 4 GiB, and 2 GiB beside."""
    figure = show_plan(plan())
    assert figure.layout.xaxis2.title.text == "peak of a device<br>(GiB)"
    parts = sum(bar.x[0] for bar in figure.select_traces({"meta": "memory"}))
    assert parts == pytest.approx(14 * 44e6 * 16 / 2**30 + 4 + 2)


@pytest.mark.parametrize(("step_ms", "unit", "shown"), [(800.0, "ms", 800.0), (2500.0, "s", 2.5)])
def test_plans_are_drawn_at_their_memory_and_their_step(step_ms: float, unit: str, shown: float) -> None:
    fast = plan(1)
    one = dataclasses.replace(fast, prediction=dataclasses.replace(fast.prediction, step_ms=step_ms))
    experiment: Any = SimpleNamespace(model=SimpleNamespace(name="model"), global_batch=8)
    figure = wb.figures.frontier(Grid(experiment, one.cluster, {"zero": (0,)}, (Cell({"zero": 0}, one, ""),)))
    places = [(trace.x[0], trace.y[0]) for trace in figure.data if trace.x[0] is not None]
    assert figure.layout.yaxis.title.text.endswith(f"step ({unit})")
    assert figure.layout.xaxis.title.text.endswith("(GiB)")
    assert len(places) == 2, "the plan's mark, and the line through those that no other plan beats"
    assert np.array(places) == pytest.approx(np.array([(one.peak_bytes / 2**30, shown)] * 2))


def test_a_timeline_is_in_milliseconds() -> None:
    """Predicted from the stages' times, and measured from clocks in seconds and actions in milliseconds."""
    figure = draw_timeline(plan(1, blocks=1, microbatches=1))
    assert figure.layout.xaxis.title.text.startswith("time (ms)")
    # One stage of one block: 0.4 ms forward and 0.9 ms backward (`figure_values._stage`), in a step of 800 ms.
    bars = [(bar.base[0], bar.base[0] + bar.x[0]) for bar in figure.data if len(bar.x)]
    assert np.array(bars) == pytest.approx(np.array([(0.0, 0.4), (0.4, 1.3), (1.3, 740.0), (740.0, 800.0)]))
    actions = [["F", 0, 0, 1.0, 3.0]], [["F", 1, 0, 0.0, 2.0]]
    events = [
        {"type": "actions", "step": 1, "rank": rank, "origin_s": 5.0 + 0.004 * rank, "actions": actions[rank]}
        for rank in (0, 1)
    ]
    timeline = measured_timeline(events)
    found = [moment for lane in timeline.lanes for action in lane for moment in (action.start_ms, action.end_ms)]
    assert found == pytest.approx([0.0, 2.0, 3.0, 5.0])


def test_points_of_the_pareto_figure_stand_at_their_seconds_and_gflop() -> None:
    figure = draw_pareto([ParetoPoint("a", "m", "dense", 1, 12.5, 640.0, (3.0,))])
    assert {trace.x[0] for trace in figure.data if trace.y[0] == 3.0} == {12.5, 640.0}
    assert figure.layout.xaxis2.title.text == "Training time (s)"
