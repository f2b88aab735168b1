"""What figures write: labels that tell runs apart, no false precision, one unit for all that stands together."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from figure_values import curve, in_one_line, plan

from workbench.analysis.contrast import setting_differences
from workbench.analysis.curve import Curve
from workbench.base.units import gib
from workbench.data import corpus
from workbench.experiment import Experiment
from workbench.figures import theme
from workbench.figures.curves_view import loss_curves
from workbench.figures.plan_view import show_plan
from workbench.figures.run_views import differences
from workbench.figures.sweep_view import scaling_efficiency
from workbench.figures.timeline_view import prediction
from workbench.models import bert_large
from workbench.record.rundir import RunDir, write_record
from workbench.runs.registry import distinct_names
from workbench.runs.run import Run
from workbench.sweeps.grid import MeasuredCell
from workbench.widgets.dashboard import swatch
from workbench.widgets.live_widget import CurveSettings, LiveLossFigure


def run(folder: Path, name: str, **settings: object) -> Run:
    (folder / name).mkdir()
    called = settings.pop("called", "tiny")
    experiment = Experiment.of(model=bert_large(), data=corpus("demo"), steps=10, global_batch=8, name=called)
    experiment = experiment.replace(**settings)
    write_record(RunDir(folder / name).experiment, experiment.to_json())
    return Run(folder / name)


def test_runs_of_one_experiment_are_named_by_the_settings_that_differ(tmp_path: Path) -> None:
    runs = [run(tmp_path, f"{seed}-{rate}", learning_rate=rate, seed=seed) for seed in (0, 1) for rate in (1e-3, 2e-3)]
    names = distinct_names(runs)
    assert len(set(names)) == 4
    assert set(names[1].split(" · ")) == {"learning_rate 0.002", "seed 0"}


def test_experiments_of_several_names_are_named_by_them_and_equal_ones_by_their_folders(tmp_path: Path) -> None:
    assert distinct_names([run(tmp_path, "1", called="a"), run(tmp_path, "2", called="b")]) == ["a", "b"]
    assert distinct_names([run(tmp_path, "3"), run(tmp_path, "4")]) == ["3", "4"]
    several = [run(tmp_path, f"{name}{seed}", called=name, seed=seed) for name in "ab" for seed in (0, 1)]
    assert distinct_names(several) == ["a · seed 0", "a · seed 1", "b · seed 0", "b · seed 1"]


def diverging(name: str, factor: float, steps: int = 12) -> Curve:
    """A loss that explodes before a divergence can be told from a spike."""
    calm = curve(name, steps=steps)
    loss = np.array([10.4, 9.8, 9.1, *(9.0 * factor**step for step in range(1, steps - 2))])
    return Curve(name, {**calm.columns, "loss": loss})


def test_one_of_many_runs_that_explodes_leaves_the_axis_with_an_arrow_and_a_note() -> None:
    runs = [*(curve(f"tame {seed}", seed=seed) for seed in range(5)), diverging("wild & long", 12.6)]
    figure = loss_curves(runs)
    low, high = figure.layout.yaxis.range
    assert 3 < low < 4
    assert 10 < high < 12
    [arrow] = [trace for trace in figure.data if trace.meta == "end" and trace.name == "wild &amp; long"]
    assert arrow.y[0] == high
    assert arrow.text[0].startswith("<b>↑ ")
    assert "leaves the axis: wild &amp; long (up to 7.20e+10)" in figure.layout.title.subtitle.text


def test_a_spike_and_a_high_beginning_stay_within_the_axis() -> None:
    spiky = curve("spiky")
    loss = spiky.columns["loss"].copy()
    loss[700] = 30.0
    figure = loss_curves([curve("tame", seed=1), Curve("spiky", {**spiky.columns, "loss": loss})])
    assert figure.layout.yaxis.range is None
    loss[700] = 3000.0
    low, high = loss_curves([Curve("spiky", {**spiky.columns, "loss": loss})]).layout.yaxis.range
    assert low < 4 < 10 < high < 12


def test_a_logarithmic_loss_has_whole_numbers_at_its_ticks() -> None:
    figure = loss_curves([curve()], log_y=True)
    assert figure.layout.yaxis.tickformat == theme.LOG_TICKS
    linear, log = (button.args[0]["yaxis.tickformat"] for button in figure.layout.updatemenus[1].buttons)
    assert (linear, log) == (None, theme.LOG_TICKS)


def test_sizes_that_stand_together_have_one_unit() -> None:
    assert gib(2**20) == "1.0 MiB"
    assert gib(2**20, like=2**34) == "0.001 GiB"
    assert gib(2**33, like=2**34) == "8.0 GiB"
    small = plan(2)
    stages = tuple(replace(s, memory=replace(s.memory, activations=2**20 * (1 + 999 * s.index))) for s in small.stages)
    bars = show_plan(replace(small, stages=stages)).select_traces({"meta": "memory"})
    assert all("GiB" in words for bar in bars for words in bar.hovertext)


def test_bytes_that_differ_are_written_as_sizes() -> None:
    machines = [{"environment": {"memory_bytes": size, "load_average": size}} for size in (9731227648, 2**34)]
    assert setting_differences(machines) == (("environment.memory_bytes", ("9.1 GiB", "16.0 GiB")),)


@pytest.mark.parametrize(("width", "written"), [(0.0, False), (0.02, True)])
def test_an_interval_of_no_width_is_not_written_under_the_pointer(width: float, written: bool) -> None:
    from workbench.analysis.contrast import Difference

    x = np.linspace(1e6, 2e6, 5)
    value = np.full(5, 0.208)
    item = Difference(("a", "b"), "tokens", x, value, value - width, value + width, None, None)
    [line] = [trace for trace in differences([item]).data if trace.meta == "difference"]
    assert (" to " in line.hovertemplate) == written


def test_an_efficiency_measured_on_a_busy_machine_says_so() -> None:
    one, two = replace(plan(1), pipeline=1), plan(1, data=2)

    def drawn(load: float) -> str:
        cells = [MeasuredCell({}, each, "finished", 900.0, load=load) for each in (one, two)]
        return in_one_line(scaling_efficiency(cells).layout.title.subtitle.text)

    assert "machine was busy when 2 of 2 cells were measured (up to 2.4 processes for each core)" in drawn(2.4)
    assert "busy" not in drawn(1.0)


@pytest.mark.parametrize("color", theme.PALETTE)
def test_words_in_a_curves_colour_can_be_read(color: str) -> None:
    assert 1.05 / (theme.luminance(theme.as_text(color)) + 0.05) >= 4.5


def test_the_keys_of_many_runs_differ() -> None:
    assert len({swatch(index) for index in range(32)}) == 32
    assert len({(theme.series_color(index), theme.series_dash(index)) for index in range(40)}) == 40


def lab(color: str, sees: np.ndarray) -> np.ndarray:
    """Return the CIELAB coordinates of a colour as somebody sees it, by a matrix on linear RGB."""
    values = np.array(theme.rgb(color)) / 255
    linear = np.clip(sees @ np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4), 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])
    xyz = to_xyz @ linear / np.array([0.9505, 1.0, 1.0888])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


# Machado, Oliveira and Fernandes (2009), severity 1.0
COLOUR_VISION = {
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


@pytest.mark.parametrize("sees", COLOUR_VISION)
def test_curves_whose_colours_look_alike_to_some_differ_in_their_dashes(sees: str) -> None:
    seen = [lab(color, np.array(COLOUR_VISION[sees])) for color in theme.PALETTE]
    pairs = list(combinations(range(len(seen)), 2))
    alike = [pair for pair in pairs if np.linalg.norm(seen[pair[0]] - seen[pair[1]]) < 10]
    assert alike or sees == "tritanopia"
    assert all(theme.series_dash(one) != theme.series_dash(other) for one, other in alike)


def test_percentages_beside_a_prediction_say_what_they_are() -> None:
    subtitle = prediction(plan(), {"step_ms": 700.0}).layout.title.subtitle.text
    words = "percentages: how far the prediction lies above (+) or below (−) the measurement"
    assert words in in_one_line(subtitle)


def test_times_and_hours_have_units_that_are_true_on_every_machine() -> None:
    figure = loss_curves([curve("a")], y="step_ms", x="gpu_hours")
    assert figure.layout.yaxis.tickformat == ",", "9,000 ms, not 9k ms"
    assert "Device-" in figure.layout.xaxis.title.text, "also on a machine without a GPU"


def test_a_live_figure_of_many_runs_grows_with_its_legend_and_says_the_nearest() -> None:
    def shown(runs: int) -> LiveLossFigure:
        curves = [curve(f"rate {index}") for index in range(runs)]
        nothing = {"history": [], "step": 0, "marks": (), "evaluations": None, "look": None}
        snapshots = [SimpleNamespace(curve=each, **nothing) for each in curves]
        return LiveLossFigure(snapshots, CurveSettings("step", 0.0), lambda: None)

    few, many = (shown(runs).figure.layout for runs in (2, 20))
    assert (few.height, few.hovermode) == (400, "x unified")
    assert many.hovermode == "closest"
    plots = [layout.height - layout.margin.t - layout.margin.b for layout in (few, many)]
    assert plots[0] == plots[1], "the legend takes nothing from the curves"
