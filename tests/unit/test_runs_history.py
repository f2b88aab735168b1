"""The history of a run: steps written by a rank, and read as columns while it grows."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plan_values import plan_of

import workbench as wb
from tests.logs import append_event
from workbench.analysis.contrast import contrast_curves
from workbench.analysis.curve import Curve, curves_of, smoothed
from workbench.base.errors import NonFiniteLoss, UnknownParameter
from workbench.base.units import count, time_left
from workbench.execution.blocks.step_context import Timestamp
from workbench.execution.step_log import StepLog
from workbench.execution.trainer import StepResult
from workbench.experiment import Experiment
from workbench.figures.curves_view import loss_curves
from workbench.figures.panels_view import panel_names
from workbench.figures.run_views import compare
from workbench.record import step_table
from workbench.record.event_log import UNREAD, mark_step, read_events, read_state
from workbench.record.history import History, HistoryTail, final_loss, recent_pace
from workbench.record.rundir import RunDir, this_process, write_json, write_record
from workbench.record.step_table import StepTable
from workbench.runs.registry import list_runs, measurements
from workbench.runs.run import Run
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


@pytest.mark.parametrize("block_rows", [3, 4096])
def test_logged_scalars_are_columns_and_nan_where_a_step_logs_none(events, monkeypatch, block_rows):
    monkeypatch.setattr(step_table, "BLOCK_ROWS", block_rows)
    append_event(events, "start", devices=1, world=1, resumed_from=None)
    for step in range(1, 7):
        log_steps(events, step, step, **({"scalars": {"accuracy": step / 10, "b-2": None}} if step % 2 else {}))
    first = HistoryTail(events).read()
    again = HistoryTail(events)
    known = [0.1, np.nan, 0.3, np.nan, 0.5, np.nan]
    for history in (first, again.read()):
        assert history.scalars == ("accuracy",), "a scalar without a value is none"
        np.testing.assert_array_equal(history["accuracy"], known)
        np.testing.assert_array_equal(history.last("accuracy", 2), known[-2:])
    append_event(events, "start", devices=1, world=1, resumed_from="checkpoints/step-00000003")
    log_steps(events, 4, 5, scalars={"late": 2.0})
    for tail in (again, HistoryTail(events)):
        history = tail.read()
        np.testing.assert_array_equal(history.accuracy, [*known[:3], np.nan, np.nan])
        np.testing.assert_array_equal(history["late"], [np.nan, np.nan, np.nan, 2.0, 2.0])
    drawn = loss_curves([Curve("run", history)], "step", 0.0, y="accuracy")
    assert [trace.y.tolist() for trace in drawn.data if trace.meta == "line"] == [[0.1, 0.3]]
    assert "accuracy" in panel_names([Curve("run", history)])
    with pytest.raises(UnknownParameter, match="accuracy"):
        loss_curves([Curve("run", history)], y="acuracy")


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
    first, before = tail.read(), tail.state
    assert not before.starts
    append_event(events, "start", devices=1, world=1, resumed_from=2)
    log_steps(events, 3, 2000, loss=0.5)
    second = tail.read()
    assert (len(tail.state.starts), before.starts) == (1, ())
    assert first.loss.tolist() == [7.0, 3.5, 7 / 3]
    assert second.step.tolist() == list(range(1, 2001))
    assert second.loss[2] == 0.5
    state = tail.state
    assert len(tail.read()) == 2000
    assert tail.state == state


def test_a_state_is_the_same_however_many_events_arrive_at_a_time(tmp_path):
    path = tmp_path / "events.jsonl"
    counts = {"tokens": 1.0, "samples": 1.0, "flops": 1.0, "seconds": 1.0, "eval_seconds": 0.1}

    def attempt(first: int, last: int, **start: Any) -> None:
        append_event(path, "status", state="starting", message="")
        append_event(path, "phase", name="capture", seconds=1.0)
        append_event(path, "start", devices=2, **start)
        for step in range(first, last + 1):
            log_steps(path, step, step)
            append_event(path, "evaluation", step=step, loss=7.0 / step, **counts)
            append_event(path, "samples", step=step, samples=[], seconds=0.1)
            append_event(path, "checkpoint", step=step, path=f"step-{step:08d}", seconds=0.1)
        for rank in range(last - first):
            append_event(path, "memory", rank=rank, stage=0, device="cpu", peak_bytes=step + rank)
        append_event(path, "checkpoint_problem", step=last, path="", message="The disk is full.")
        append_event(path, "tracking", state="syncing", message="")

    attempt(1, 6, resumed_from=None)
    attempt(4, 5, resumed_from="checkpoints/step-00000003")
    append_event(path, "status", state="failed", message="it was killed")
    append_event(path, "data_evaluation", step=5, loss=1.0, data="other", **counts)
    whole, tail = read_state(path), HistoryTail(path)
    tail.read()
    assert replace(whole, steps=()) == tail.state
    assert (list(whole.evaluations), list(whole.texts)) == ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    assert [mark_step(mark) for mark in whole.marks] == [1, 2, 3, 3, 4, 5], "the resumption is the second 3"
    assert list(whole.memory) == [0], "the first attempt had five ranks"
    assert (whole.evaluations[3].attempt, whole.evaluations[4].attempt) == (1, 2)
    assert [step["step"] for step in whole.steps] == [4, 5], "the last one, and the distance of two"
    assert whole.problems == ("The checkpoint of step 5 could not be written: The disk is full.",)
    assert whole.status is not None
    assert whole.status.message == "it was killed"
    events = [event for event in read_events(path) if event["type"] != "step"]
    for size in range(1, len(events) + 1):
        state = UNREAD
        for first in range(0, len(events), size):
            state = state.after(events[first : first + size])
        assert replace(state, offset=whole.offset, steps=whole.steps) == whole


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


@pytest.mark.parametrize("steps", [3, 200, 9000])
def test_a_runs_speed_is_one_number_in_its_row_the_live_view_the_table_and_beside_the_prediction(tmp_path, steps):
    """The machine slows down: the last steps alone, and the mean, would say something else than the median."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    write_record(run.experiment, {"steps": steps, "name": "run"})
    at = np.arange(1, steps + 1)
    slow = 1000.0 * (2 - at / steps) ** 2 + 10 * (at % 7)
    append_event(run.events, "start", devices=1, world=1, resumed_from=None)
    speeds = zip(at.tolist(), slow.tolist(), strict=True)
    step_table.log_steps(run.path, [figures(step, tokens_per_s=speed, mfu=speed / 1e4) for step, speed in speeds])
    append_event(run.events, "status", state="finished", message="")
    counted = slow[min(10, steps // 2) :][-4096:]
    expected, read = float(np.median(counted)), Run(run.path)
    assert steps < 100 or abs(expected / np.median(slow[-20:]) - 1) > 0.05
    assert read.row()["tokens_per_s"] == pytest.approx(expected, rel=1e-6)
    assert read.row()["mfu"] == pytest.approx(expected / 1e4, rel=1e-6)
    assert measurements(read)["tokens_per_s"] == pytest.approx(expected, rel=1e-6)
    assert f"{count(expected)} tokens/s" in RunReader(run.path).read().facts


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


STEPS = 6000
"""Number of steps of which the table has a block."""


def figures(step: int, **fields: Any) -> dict[str, Any]:
    row = {"loss": 7.0 / step, "learning_rate": 1e-4, "grad_norm": 1.25, "step_ms": 250.5, "mfu": None}
    totals = {"tokens": 64 * step, "samples": step, "flops": 1e9 * step, "seconds": 0.25 * step, "tokens_per_s": 256.0}
    return {"time": 1e9 + step / 4, "step": step, **row, **totals, **fields}


def write_steps(long_events: Path, first: int, last: int, **fields: Any) -> None:
    step_table.log_steps(long_events.parent, [figures(step, **fields) for step in range(first, last + 1)])


@pytest.fixture
def long_events(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    append_event(path, "start", devices=2, world=2, resumed_from=None)
    write_steps(path, 1, STEPS)
    return path


def same(first: History, second: History) -> bool:
    return list(first) == list(second) and all(np.array_equal(first[n], second[n], equal_nan=True) for n in first)


def test_a_tail_follows_resumptions_as_a_reader_that_comes_later(long_events: Path) -> None:
    tail = HistoryTail(long_events)
    before = tail.read()
    write_steps(long_events, STEPS + 1, STEPS + 10)
    append_event(long_events, "start", devices=4, world=4, resumed_from=f"checkpoints/step-{STEPS + 5:08d}")
    write_steps(long_events, STEPS + 6, STEPS + 8, loss=0.5)
    history = tail.read()
    assert history.step[-1] == STEPS + 8
    assert same(history, HistoryTail(long_events).read())
    write_steps(long_events, STEPS + 9, STEPS + 20)
    assert same(tail.read(), HistoryTail(long_events).read())
    append_event(long_events, "start", devices=4, world=4, resumed_from="checkpoints/step-00000100")
    write_steps(long_events, 101, 150, loss=0.25)
    history = tail.read()
    assert history.step.tolist() == list(range(1, 151))
    assert np.array_equal(history.last("loss", 60), [*(7.0 / np.arange(91, 101)), *[0.25] * 50])
    assert same(history, HistoryTail(long_events).read())
    assert (len(before), before.loss[-1]) == (STEPS, 7.0 / STEPS), "a history stays as it was"


def test_only_columns_that_are_asked_for_are_read(long_events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, column = list[tuple[str, int]](), StepTable.column

    def noted(table: StepTable, name: str, first: int = 0, end: int | None = None) -> Any:
        read.append((name, (len(table) if end is None else end) - first))
        return column(table, name, first, end)

    monkeypatch.setattr(StepTable, "column", noted)
    history = HistoryTail(long_events).read()
    assert {name for name, count in read if count} == {"step"}
    read.clear()
    assert history.last("loss", 20)[-1] == 7.0 / STEPS
    assert read == [("loss", 20)], "the rest of it is not read"
    assert len(history.loss) == len(history.loss) == STEPS
    assert read == [("loss", 20), ("loss", STEPS)], "once"


def test_the_latest_of_a_long_run_is_what_its_events_say(long_events: Path) -> None:
    run = RunDir(long_events.parent)
    write_record(run.experiment, {"steps": 2 * STEPS})
    write_record(run.environment, {})
    write_json(run.launcher, {"supervisor": this_process()})
    append_event(long_events, "status", state="running", message="")
    append_event(long_events, "memory", rank=0, stage=0, device="cpu", peak_bytes=7, reserved_bytes=7, limit_bytes=None)
    write_steps(long_events, STEPS + 1, STEPS + 30, loss=0.25)
    append_event(long_events, "device", device_type="cpu", names=["CPU"], shares=[0.5], used_bytes=[7])
    follower = Run(run.path)
    losses = [7.0 / step for step in range(1, STEPS + 1)] + [0.25] * 30
    facts = follower.row()
    assert (facts["step"], facts["peak_bytes"]) == (STEPS + 30, 7)
    assert facts["loss"] == pytest.approx(final_loss(range(1, STEPS + 31), losses))
    assert [event["type"] for event in follower.milestones()] == ["start", "status", "memory"]
    write_steps(long_events, STEPS + 31, STEPS + 31, loss=0.125)
    append_event(long_events, "end", steps=STEPS + 31, seconds=1.0)
    assert follower.row()["loss"] == pytest.approx(final_loss(range(1, STEPS + 32), [*losses, 0.125]))
    assert read_state(long_events).offset == long_events.stat().st_size
    assert [event["type"] for event in follower.milestones()] == ["start", "status", "memory", "end"]


H200_BF16_FLOPS = 989e12
"""Dense bf16 FLOP/s of one H200 (NVIDIA's data sheet of November 2024)."""
CPU = torch.device("cpu")
ASKED = Experiment(model=torch.nn.Identity, data=[{}], steps=10, global_batch=64, seq_len=512)


def result(loss: float, norm: float = 4.0) -> StepResult:
    return StepResult(torch.tensor([loss, norm, 0.0]), 1e-3)


def test_the_measured_mfu_is_the_models_flops_over_those_that_the_devices_could_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    plan = plan_of(pipeline=2, micro_batch=2)
    assert plan.world == 4
    log = StepLog(ASKED, plan, CPU, tmp_path / "events.jsonl", seconds=0.0)
    for step in range(3):
        clock[0] += 0.25
        log.add(step, result(7.0))
    log.flush()
    steps = [event for event in read_events(tmp_path / "events.jsonl") if event["type"] == "step"]
    assert [event["step"] for event in steps] == [1, 2, 3]
    for event in steps:
        assert event["step_ms"] == pytest.approx(250.0)
        assert event["mfu"] == pytest.approx(plan.flops_per_step / 0.25 / (4 * H200_BF16_FLOPS))
        assert event["tokens_per_s"] == pytest.approx(64 * 512 / 0.25)
        assert event["grad_norm"] == 2.0
    assert steps[-1]["seconds"] == pytest.approx(0.75)


def test_the_wait_for_data_is_the_share_of_a_step_before_its_batch_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    log = StepLog(ASKED, plan_of(pipeline=2, micro_batch=2), CPU, tmp_path / "events.jsonl", seconds=0.0)
    for step, (wait, compute) in enumerate([(0.3, 0.1), (0.05, 0.2), (0.0, 0.25)]):
        clock[0] += wait
        arrived = Timestamp.now(CPU)
        clock[0] += compute
        log.add(step, result(7.0), arrived)
    log.flush()
    clock[0] += 0.5
    log.add(3, result(7.0))
    log.flush()
    waits = [event["data_wait"] for event in read_events(tmp_path / "events.jsonl") if event["type"] == "step"]
    assert waits == [pytest.approx(0.75), pytest.approx(0.2), 0.0, None]


@pytest.mark.parametrize("is_text", [True, False])
def test_a_loss_below_the_entropy_of_any_text_is_told_once(tmp_path: Path, is_text: bool) -> None:
    log = StepLog(
        ASKED.replace(data=wb.data.corpus("demo")) if is_text else ASKED,
        plan_of(pipeline=2, micro_batch=2),
        CPU,
        tmp_path / "events.jsonl",
        seconds=0.0,
    )
    for step, loss in enumerate((2.0, 0.0014, 0.0012)):
        log.add(step, result(loss))
    log.flush()
    told = read_state(tmp_path / "events.jsonl").problems
    assert len(told) == is_text
    assert not is_text or told[0].startswith(
        "The loss of step 2, 0.0014, is less than the entropy of any text, 0.1 nats"
    )


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf), (math.inf, math.nan)])
def test_a_step_that_is_not_finite_is_logged_and_raised(tmp_path: Path, loss: float, norm: float) -> None:
    for stops in (True, False):
        events = tmp_path / str(stops) / "events.jsonl"
        events.parent.mkdir()
        asked = ASKED.replace(stop_on_non_finite=stops, log_every=5)
        log = StepLog(asked, plan_of(pipeline=2, micro_batch=2), CPU, events, seconds=0.0)
        log.add(2, result(loss, norm))
        if stops:
            with pytest.raises(NonFiniteLoss, match="Step 3 has loss") as raised:
                log.flush()
            assert raised.value.facts["step"] == 3
        else:
            assert log.flush() is False
        assert [event["step"] for event in read_events(events) if event["type"] == "step"] == [3]
