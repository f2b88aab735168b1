"""History: events in, NumPy columns out."""

import math

import numpy as np
import pytest

from workbench.analysis.contrast import contrast as contrast_curves
from workbench.analysis.curve import Curve, curves_of
from workbench.analysis.smoothing import smoothed
from workbench.figures.curves_view import loss_curves
from workbench.figures.run_views import compare
from workbench.rundir import RunDir, append_event, write_record
from workbench.runs.records.history import History, HistoryTail, final_loss, recent_pace
from workbench.runs.registry import list_runs
from workbench.runs.run import Run
from workbench.units import time_left
from workbench.widgets.run_reader import RunReader


@pytest.fixture
def events(tmp_path):
    return tmp_path / "events.jsonl"


def log_steps(path, first, last, seconds_a_step=1.0, **fields):
    for step in range(first, last + 1):
        figures = {"loss": 7.0 / step, "learning_rate": 1e-4, "grad_norm": 1.0, "step_ms": 1e3 * seconds_a_step}
        totals = {"tokens": 64 * step, "samples": 4 * step, "flops": 1e9 * step, "seconds": seconds_a_step * step}
        append_event(path, "step", step=step, **{**figures, **totals, "tokens_per_s": 64.0, "mfu": None, **fields})


def test_a_run_without_events_has_an_empty_history(events):
    history = HistoryTail(events).read()
    assert len(history) == 0
    assert "no step yet" in repr(history)


def test_unknown_figures_are_nan(events):
    log_steps(events, 1, 2, grad_norm=None)
    history = HistoryTail(events).read()
    assert np.isnan(history.mfu).all()
    assert np.isnan(history["grad_norm"]).all()
    assert history.loss.tolist() == [7.0, 3.5]


def test_gpu_hours_count_each_stretch_with_its_own_devices(events):
    append_event(events, "start", devices=4, world=4, resumed_from=None)
    log_steps(events, 1, 10, seconds_a_step=360.0)
    append_event(events, "start", devices=["cuda:0"] * 8, world=8, resumed_from="/runs/a/checkpoints/step-00000010")
    log_steps(events, 11, 20, seconds_a_step=360.0)
    history = HistoryTail(events).read()
    assert history.gpu_hours[9] == pytest.approx(4.0)
    assert history.gpu_hours[19] == pytest.approx(4.0 + 8.0)


def test_steps_repeated_after_a_resumption_replace_the_earlier_ones(events):
    append_event(events, "start", devices=1, world=1, resumed_from=None)
    log_steps(events, 1, 7)
    append_event(events, "start", devices=1, world=1, resumed_from="checkpoints/step-00000005")
    assert HistoryTail(events).read().step.tolist() == [1, 2, 3, 4, 5]
    log_steps(events, 6, 8, loss=1.0)
    history = HistoryTail(events).read()
    assert history.step.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert history.loss[4:].tolist() == [7.0 / 5, 1.0, 1.0, 1.0]


def test_a_tail_grows_by_what_arrived_and_never_changes_what_it_gave(events):
    tail = HistoryTail(events)
    log_steps(events, 1, 3)
    first = tail.read()
    assert tail.events == []
    append_event(events, "start", devices=1, world=1, resumed_from=2)
    log_steps(events, 3, 2000, loss=0.5)
    second = tail.read()
    assert [event["type"] for event in tail.events] == ["start"]
    assert first.loss.tolist() == [7.0, 3.5, 7 / 3]
    assert second.step.tolist() == list(range(1, 2001))
    assert second.loss[2] == 0.5
    assert len(tail.read()) == 2000
    assert tail.events == []


def test_a_torn_last_line_waits_for_its_end(events):
    log_steps(events, 2, 2)
    second = events.read_bytes()
    events.unlink()
    log_steps(events, 1, 1)
    with events.open("ab") as file:
        file.write(second[:20])
    tail = HistoryTail(events)
    assert len(tail.read()) == 1
    with events.open("ab") as file:
        file.write(second[20:])
    assert tail.read().step.tolist() == [1, 2]


def test_a_line_that_cannot_be_read_costs_only_itself(events):
    log_steps(events, 1, 1)
    with events.open("a") as file:
        file.write('{"type": "st{"type": "step"}\n\n')
    log_steps(events, 2, 2)
    assert HistoryTail(events).read().step.tolist() == [1, 2]


def test_columns_are_read_only_and_equally_long(events):
    log_steps(events, 1, 5)
    history = HistoryTail(events).read()
    assert {len(history[name]) for name in history} == {5}
    with pytest.raises(ValueError, match="read-only"):
        history.loss[0] = 0.0
    assert isinstance(history, History)


def test_every_place_that_prints_the_loss_of_an_ended_run_prints_the_same(tmp_path):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    write_record(run.environment, {})
    write_record(run.experiment, {"steps": 200, "name": "run"})
    append_event(run.events, "start", devices=1, resumed_from=None)
    for step in range(1, 201):
        append_event(run.events, "step", step=step, tokens=step, loss=2 + 1 / step + 0.1 * (-1) ** step * (step % 7))
    append_event(run.events, "status", state="finished", message="200 steps.")
    read = Run(run.path)
    final = final_loss(read.history().step, read.history().loss)
    assert abs(final - read.history().loss[-1]) > 0.05, "the last step alone would say something else"
    assert read.row()["loss"] == pytest.approx(final, abs=1e-12)
    assert f"→ {final:.4g})" in repr(read.history())
    assert f"loss {final:.4g}" in RunReader(run.path).read().facts
    curve = Curve("run", read.history())
    [end] = [trace for trace in loss_curves([curve], x="step").data if trace.meta == "end"]
    assert end.text[0] == f"<b>{final:.2f}</b>"


def test_a_runs_number_is_its_last_held_out_loss_in_the_row_the_order_and_the_verdict(tmp_path):
    def run(name, training, held_out):
        at = RunDir(tmp_path / name)
        at.path.mkdir()
        write_record(at.environment, {})
        write_record(at.experiment, {"steps": 200, "name": name})
        append_event(at.events, "start", devices=1, resumed_from=None)
        for step in range(0, 201, 50):
            for each in range(max(1, step - 49), step + 1):
                append_event(at.events, "step", step=each, tokens=each, loss=training + 1 / each)
            more = {"flops": step, "seconds": float(step), "eval_seconds": 0.1, "samples": step, "evaluated": 8}
            append_event(at.events, "evaluation", step=step, tokens=step, loss=held_out + 1 / (step + 1), **more)
        append_event(at.events, "status", state="finished", message="200 steps.")
        return Run(at.path)

    memorised, general = run("memorised", 1.0, 3.0), run("general", 2.0, 2.5)
    for each, last in ((memorised, 3.0), (general, 2.5)):
        row = each.row()
        assert row["loss"] == row["eval_loss"] == last + 1 / 201
        assert row["training_loss"] < row["loss"]
        assert f"held-out loss {row['loss']:.4g}" in RunReader(each.path).read().facts
        [end] = [trace for trace in compare([each]).data if trace.meta == "end"]
        assert (end.text[0], list(end.y)) == (f"<b>◆ {row['loss']:.2f}</b>", [row["loss"]])
    assert [each.name for each in list_runs(tmp_path, sort="loss")] == ["general", "memorised"]
    verdict = contrast_curves(curves_of([memorised, general]))
    assert verdict.loss == "Held-out loss"
    assert {name: loss.value for name, loss in verdict.standings[0].losses.items()} == {
        "memorised": 3.0 + 1 / 201,
        "general": 2.5 + 1 / 201,
    }


def test_the_final_loss_of_a_long_run_is_the_end_of_its_smoothed_curve_and_reads_its_end_alone():
    step = np.arange(1, 5001)
    loss = 3 + 4 * np.exp(-step / 500) + np.random.default_rng(0).normal(0, 0.1, len(step))
    line = smoothed(step.astype(float), loss, 0.01 * step[-1])
    assert final_loss(step, loss) == pytest.approx(line[-1], abs=1e-4)
    assert final_loss(step[-501:], loss[-501:]) == pytest.approx(final_loss(step, loss), abs=1e-12)
    assert final_loss(1e4 * step, loss) == pytest.approx(final_loss(step, loss), abs=1e-12)
    assert math.isnan(final_loss([], []))
    assert final_loss([1, 2], [1.0, math.inf]) == math.inf
    assert final_loss([99, 100], [None, 2.0]) == 2.0


def test_the_time_left_is_told_from_minutes_and_in_one_step_of_its_size():
    """One slow step among three hundred does not move it; steps of another speed do after five minutes."""
    seconds, steps = np.arange(1.0, 1001.0), np.arange(1, 1001)
    assert recent_pace(seconds, steps) == pytest.approx(1.0)
    late = np.where(steps == 1000, 1029.0, seconds)  # a checkpoint took half a minute
    assert recent_pace(late, steps) == pytest.approx(1.1, abs=0.02)
    assert recent_pace(np.append(seconds, 1000 + 0.5 * np.arange(1, 601)), np.arange(1, 1601)) == pytest.approx(0.5)
    assert math.isnan(recent_pace([1.0], [1]))
    told = [time_left(each) for each in (3, 43, 58, 400, 1500, 3500, 5460, 6360, 8280, 30000)]
    assert told == ["10 s", "40 s", "1 min", "7 min", "25 min", "1 h", "1 h 30 min", "1 h 45 min", "2 h 15 min", "8 h"]
