"""Contrasts over seeds: the interval, its verdict, and which runs make one configuration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import workbench as wb
from tests.logs import append_event
from workbench.analysis.curve import Curve
from workbench.analysis.seed_contrast import (
    SeedContrast,
    contrast_seeds,
    group_names,
    seed_groups,
)
from workbench.base.errors import InvalidArgument, InvalidExperiment, UnknownParameter
from workbench.figures.figure import picture
from workbench.figures.run_views import contrast_report, draw_contrast
from workbench.record.rundir import RunDir, write_json, write_record
from workbench.sparsity import Dynamic, Static
from workbench.sweeps.queue import Entry, QueueDir, Result
from workbench.sweeps.sweep import Sweep


def run(end: float, steps: int = 50, tokens_per_step: int = 100, held_out: float | None = None) -> Curve:
    step = np.arange(1.0, steps + 1)
    costs = {"tokens": step * tokens_per_step, "flops": step * 1e9 * tokens_per_step, "gpu_hours": step / 100}
    at = [0, steps // 2 - 1, steps - 1]
    evaluations = {name: values[at] for name, values in {"step": step, **costs}.items()}
    evaluations["eval_loss"] = np.array([9.0, 6.0, held_out or 0.0])
    return Curve("run", {"step": step, "loss": end + 5 / step, **costs}, evaluations=evaluations if held_out else None)


def test_a_difference_larger_than_the_seeds_spread_is_told_from_one_that_is_not() -> None:
    runs = {"a": [run(4.0), run(4.1), run(3.9)], "b": [run(5.0), run(5.1), run(4.9)], "c": [run(4.1), run(4.3)]}
    found = contrast_seeds(runs)
    assert [item.names for item in found.differences[:2]] == [("b", "a"), ("c", "a")]
    assert [item.axis for item in found.differences[::2]] == ["tokens", "flops", "gpu_hours"]
    clear, unclear = found.differences[:2]
    half = clear.margin
    assert clear.distinguishable
    assert (clear.value, clear.low, clear.high) == pytest.approx((1.0, 1.0 - half, 1.0 + half), abs=1e-3)
    assert not unclear.distinguishable
    assert "a is lower than b" in repr(found)
    assert "c and a are too close to call" in repr(found)
    assert [row[-1] for row in found.table[1]].count("too close to call") == 3
    points = [trace for trace in draw_contrast(found).data if trace.error_x.array is not None]
    assert [trace.x[0] for trace in points] == pytest.approx([item.value for item in found.differences[:2]])
    assert {trace.y[1][0] for trace in points} == {"equal tokens, FLOPs, device-hours"}, "one row where they are equal"
    assert points[0].error_x.array[0] == pytest.approx(half)
    assert points[0].marker.color != points[1].marker.color, "an unclear difference is pale"


def test_runs_are_compared_where_all_have_spent_the_same_and_by_their_held_out_loss() -> None:
    small, large = [run(4.0, held_out=3.0), run(4.0, held_out=3.2)], [run(4.0, 50, 200, 2.0), run(4.0, 50, 200, 2.2)]
    found = contrast_seeds({"small": small, "large": large})
    tokens, _, hours = found.differences
    assert found.loss == "Held-out loss"
    assert (tokens.at, hours.at) == (5000, 0.5)
    assert tokens.means == pytest.approx((6.0, 3.1)), "half of the larger batch's training"
    assert hours.means == pytest.approx((2.1, 3.1))
    with pytest.raises(UnknownParameter, match="share no stretch"):
        contrast_seeds({"a": [Curve("a", {"step": [1.0], "loss": [4.0]})] * 2, "b": small})


def test_a_metric_is_compared_over_seeds_with_the_interval_of_its_own_ends_and_more_is_not_called_better() -> None:
    def with_accuracy(last: float) -> Curve:
        curve = run(4.0, held_out=3.0)
        assert curve.evaluations is not None
        return replace(curve, evaluations={**curve.evaluations, "accuracy": np.array([0.5, 0.6, last])})

    ends = {"a": [0.80, 0.82, 0.81], "b": [0.90, 0.91, 0.92]}
    found = contrast_seeds({name: list(map(with_accuracy, each)) for name, each in ends.items()}, metric="accuracy")
    tokens = found.differences[0]
    assert found.loss == "Held-out accuracy"
    half = 2.132 * 0.01 * (2 / 3) ** 0.5  # Student's t of four degrees of freedom holds 90 % within 2.132
    assert (tokens.value, tokens.margin) == pytest.approx((0.1, half), rel=0.1)
    assert "b is higher than a (+0.100 ±" in repr(found)
    assert "better" not in str(draw_contrast(found).layout.title.text)
    assert "Held-out accuracy minus that of" in draw_contrast(found).layout.xaxis.title.text
    with pytest.raises(UnknownParameter, match=r"run has no metric 'f1' of held-out samples. It has none"):
        contrast_seeds({"a": [run(4.0, held_out=3.0)] * 2, "b": [run(4.0)] * 2}, metric="f1")


def test_seeds_that_ended_alike_cannot_tell_and_no_interval_is_invented() -> None:
    found = contrast_seeds({"a": [run(4.0)] * 2, "b": [run(5.0)] * 2})
    assert not any(item.distinguishable for item in found.differences)
    assert "the seeds of b and of a ended alike: cannot tell" in repr(found)
    assert "(+1, 90% interval" not in repr(found)
    assert "±" not in repr(contrast_report(found))
    assert picture(draw_contrast(found)).startswith(b"\x89PNG")


def test_runs_that_differ_in_their_seed_alone_are_one_configuration() -> None:
    described = [
        {"experiment": {"learning_rate": rate, "seed": seed, "name": f"{rate}{seed}"}, "plan": {"zero": zero}}
        for rate, seed, zero in ((1e-3, 0, 0), (1e-4, 0, 0), (1e-3, 1, 0), (1e-4, 1, 0), (1e-4, 1, 3), (1e-3, 0, 0))
    ]
    assert seed_groups(described) == [[0, 2], [1, 3], [4], [5]], "the same seed again is none, whatever its plan"
    seeds_of_plans = [{"experiment": {"seed": seed}, "plan": {"data": gpus}} for gpus, seed in ((4, 0), (1, 1), (1, 2))]
    assert seed_groups(seeds_of_plans) == [[0, 1, 2]], "a seed that ran on other GPUs is one of the same training"
    twice = [{"experiment": {"seed": seed}, "plan": {"data": gpus}} for gpus in (1, 4) for seed in (0, 1, 2)]
    assert seed_groups([*twice, *seeds_of_plans[:1]]) == [[0, 1, 2], [3, 4, 5], [6]], "two plans with seeds stay apart"
    named = [{"experiment": {**each["experiment"], "name": "a"}} for each in described[:2]]
    assert group_names(named) == ["learning_rate 0.001", "learning_rate 0.0001"]
    assert group_names(described[:2]) == ["0.0010", "0.00010"], "configurations that have names keep them"


def test_configurations_that_differ_in_their_sparsity_are_named_by_its_label() -> None:
    patterns = (None, Static(0.9, 4), Dynamic(0.9, 1))
    described = [{"experiment": {"seed": 0, "sparsity": each and each.to_json()}} for each in patterns]
    assert group_names(described) == ["sparsity dense", "sparsity 90 % static 4×4", "sparsity 90 % dynamic 1×1"]


@pytest.fixture
def sweep(tmp_path) -> Sweep:
    directory = QueueDir(tmp_path / "sweep")
    settings = {"experiment": {}, "axes": {"learning_rate": [1e-3, 1e-4]}, "sampler": "grid", "trials": None}
    write_json(directory.settings_file, {**settings, "seeds": [0, 1], "stop": None})
    directory.write_queue([Entry(0, {"learning_rate": at}, seed) for at in (0, 1) for seed in (0, 1)])
    for entry in directory.queue():
        path = RunDir(directory.run(entry))
        values = {"learning_rate": [1e-3, 1e-4][entry.choices["learning_rate"]], "seed": entry.seed, "name": "sweep"}
        write_record(path.experiment, values)
        write_record(path.environment, {})
        append_event(path.events, "start", devices=1, world=1)
        for step in range(1, 11):
            loss = 5 - entry.choices["learning_rate"] + 0.01 * entry.seed
            append_event(path.events, "step", step=step, loss=loss, tokens=100 * step, flops=1e9 * step, seconds=step)
        append_event(path.events, "status", state="finished", message="10 steps.")
        directory.write_result(entry, Result("finished", 5.0 - entry.choices["learning_rate"], 10, 1.0))
    return wb.sweeps.load_sweep(directory.path)


def test_bands_of_runs_are_those_of_their_configurations_over_the_seeds(sweep: Sweep) -> None:
    figure = wb.figures.seed_bands(sweep.runs, x="step")
    means = {trace.name: trace for trace in figure.data if trace.meta == "mean"}
    ends = {name: trace.y[-1] for name, trace in means.items()}
    assert ends == pytest.approx({"learning_rate 0.001": 5.005, "learning_rate 0.0001": 4.005})
    band = next(trace for trace in figure.data if trace.meta == "band")
    assert (min(band.y), max(band.y)) == (5.0, 5.01)
    assert "Mean over 2 seeds, whose band holds them all" in figure.layout.title.subtitle.text
    assert "thin lines" not in figure.layout.title.subtitle.text
    assert {trace.mode for trace in means.values()} == {"lines"}, "training losses have no dots"
    of_one_seed = wb.figures.seed_bands([row.runs[0] for row in sweep.rows()], x="step")
    assert of_one_seed.layout.title.subtitle.text == "One seed of each"


def test_contrast_takes_a_sweep_and_runs_with_seeds_and_compares_with_the_best_and_the_first(sweep: Sweep) -> None:
    found = wb.contrast(sweep)
    assert isinstance(found, SeedContrast)
    assert {item.names for item in found.differences} == {("learning_rate 0.001", "learning_rate 0.0001")}
    assert found.differences[0].value == pytest.approx(1.0)
    assert picture(draw_contrast(found)).startswith(b"\x89PNG")
    by_hand = wb.contrast(sweep.runs)
    assert isinstance(by_hand, SeedContrast)
    assert by_hand.differences[0].value == pytest.approx(-1.0)
    mixed = wb.contrast(sweep.runs[:3])
    assert not isinstance(mixed, SeedContrast), "one configuration has one seed"
    assert "in the runs with several seeds" in repr(mixed), "the other tells how far seeds move an end"
    first, *_, other = sweep.runs
    assert "one seed each: cannot tell" in repr(wb.contrast([first, other]))
    for scatter in (0.1, sweep, sweep.runs):
        assert "is lower than" in repr(wb.contrast([first, other], scatter=scatter))
    assert "too close to call" in repr(wb.contrast([first, other], scatter=1.0))
    for wrong, words in ((0.0, "no standard deviation"), ([first, other], "no two of the 2 finished runs")):
        with pytest.raises(InvalidArgument, match=words):
            wb.contrast([first, other], scatter=wrong)
    with pytest.raises(InvalidExperiment, match="y='f1' is compared over seeds, and these 2 runs are 2 configurations"):
        wb.contrast([first, other], y="f1")
    for refused in (wb.contrast, wb.figures.seed_bands):
        with pytest.raises(UnknownParameter, match=r"'f1'.* no metric|no metric 'f1'"):
            refused(sweep.runs, y="f1")
    sweep.directory.result_file(sweep.directory.queue()[0]).unlink()
    with pytest.raises(InvalidExperiment, match="1 of 2 configurations"):
        wb.contrast(sweep)
