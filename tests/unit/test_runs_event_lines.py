"""A long history is read in bulk with the same result as line by line, also while it is being written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench.rundir import RunDir, append_event, event_line, this_process, write_json, write_record
from workbench.runs.records import event_lines
from workbench.runs.records.history import History, HistoryTail, final_loss, latest_events
from workbench.runs.run import Run

STEPS = 6000
"""Number of steps whose lines fill more than `event_lines.BULK_BYTES`."""


def step_line(step: int, **fields: Any) -> str:
    figures = {"loss": 7.0 / step, "learning_rate": 1e-4, "grad_norm": 1.25, "step_ms": 250.5, "mfu": None}
    totals = {"tokens": 64 * step, "samples": step, "flops": 1e9 * step, "seconds": 0.25 * step, "tokens_per_s": 256.0}
    return event_line("step", **{"time": 1e9 + step / 4, "step": step, **figures, **totals, **fields}).decode()


def write_steps(events: Path, first: int, last: int, **fields: Any) -> None:
    with events.open("a") as file:
        file.writelines(step_line(step, **fields) for step in range(first, last + 1))


@pytest.fixture
def events(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    append_event(path, "start", devices=2, world=2, resumed_from=None)
    write_steps(path, 1, STEPS)
    return path


def same(first: History, second: History) -> bool:
    return all(np.array_equal(first[name], second[name], equal_nan=True) for name in first)


def line_by_line(events: Path) -> History:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_lines, "BULK_BYTES", sys.maxsize)
        return HistoryTail(events).read()


ODD_LINES = (
    '{"type": "step", "time": 1.0, "step": 7, "loss": NaN}',
    '{"type": "step", "time": 1.0, "step": 8, "loss": Infinity}',
    '{"type": "step", "time": 1.0, "step": 9, "loss": "0.5"}',
    '{"type": "step", "time": 1.0, "step": 10, "loss": "much"}',
    '{"type": "step", "time": 1.0, "loss": 3.0}',
    '{"type": "step", "time": 1.0, "step": 11, "layers": [1, 2, {"a": "b"}], "note": "x"}',
    '{"step": 12, "type": "step", "loss": 1}',
    '{"type": "step", "ti',
    '{"type": "st{"type": "step"}',
    "",
    "7",
    '{"type": "start", "time": 2.0, "devices": 4, "resumed_from": "checkpoints/step-00000003"}',
    '{"type": "start", "time": 2.0, "devices": ["cuda:0"], "resumed_from": null}',
    '{"type": "checkpoint", "time": 2.0, "step": 4, "path": "p", "seconds": 0.1}',
    '{"type": "status", "time": 2.0, "state": "running", "message": "step"}',
    '{"type": "actions", "time": 2.0, "rank": 0, "step": 4, "actions": [["F", 0, 1, 0.0, 1.0]]}',
)
LINE = st.one_of(
    st.sampled_from(ODD_LINES),
    st.integers(1, 30).map(lambda step: step_line(step).rstrip()),
    st.integers(1, 30).map(lambda step: step_line(step, grad_norm=None, extra=step).rstrip()),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(LINE, max_size=40))
def test_lines_in_bulk_are_what_they_are_one_by_one(monkeypatch: pytest.MonkeyPatch, written: list[str]) -> None:
    block = "".join(f"{line}\n" for line in written).encode()
    monkeypatch.setattr(event_lines, "BULK_BYTES", sys.maxsize)
    slowly = event_lines.parsed(block)
    monkeypatch.setattr(event_lines, "BULK_BYTES", 1)
    quickly = event_lines.parsed(block)
    assert np.array_equal(quickly.steps, slowly.steps, equal_nan=True)
    assert quickly.others == slowly.others


def test_lines_as_they_are_written_are_read_in_bulk(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_event(events, "checkpoint", step=3, path="p", seconds=0.1)
    write_steps(events, STEPS + 1, STEPS + 5, loss=float("nan"))
    monkeypatch.setattr(event_lines, "_line_by_line", lambda _: pytest.fail("read line by line"))
    assert len(HistoryTail(events).read()) == STEPS + 5


def test_blocks_end_where_lines_do(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = events.read_bytes()
    with events.open("ab") as file:
        file.write(b'{"type": "ste')
    for size in (100, 1000, 10**6):  # the first below the length of a line
        monkeypatch.setattr(event_lines, "BLOCK_BYTES", size)
        found = list(event_lines.blocks(events))
        assert b"".join(found) == whole
        assert all(block.endswith(b"\n") for block in found)


def test_a_tail_in_bulk_follows_resumptions_as_line_by_line(events: Path) -> None:
    tail = HistoryTail(events)
    tail.read()
    write_steps(events, STEPS + 1, STEPS + 10)
    append_event(events, "start", devices=4, world=4, resumed_from=f"checkpoints/step-{STEPS + 5:08d}")
    write_steps(events, STEPS + 6, STEPS + 8, loss=0.5)
    history = tail.read()
    assert history.step[-1] == STEPS + 8
    assert same(history, line_by_line(events))
    write_steps(events, STEPS + 9, STEPS + 20)
    assert same(tail.read(), line_by_line(events))


def test_a_file_that_is_being_written_is_read_up_to_its_last_whole_line(events: Path) -> None:
    line = step_line(STEPS + 1).encode()
    with events.open("ab") as file:
        file.write(line[:40])
    assert len(HistoryTail(events).read()) == STEPS
    with events.open("ab") as file:
        file.write(line[40:])
    assert same(HistoryTail(events).read(), line_by_line(events))


def test_readers_beside_a_writer_see_every_step_once(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from test_runs_event_lines import step_line\n"
        "with open(sys.argv[2], 'a', buffering=5000) as file:\n"  # lines are torn at the edges of its buffer
        "    for step in range(1, 30001): file.write(step_line(step))"
    )
    arguments = [sys.executable, "-c", code, str(Path(__file__).parent), str(events)]
    writer = subprocess.Popen(arguments, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    while writer.poll() is None:
        history = HistoryTail(events).read()
        assert history.step.tolist() == list(range(1, len(history) + 1))
    assert writer.returncode == 0
    assert len(HistoryTail(events).read()) == 30000
    assert same(HistoryTail(events).read(), line_by_line(events))


def test_the_latest_of_a_long_run_is_what_its_events_say(events: Path) -> None:
    run = RunDir(events.parent)
    write_record(run.experiment, {"steps": 2 * STEPS})
    write_record(run.environment, {})
    write_json(run.launcher, {"supervisor": this_process()})
    append_event(events, "status", state="running", message="")
    append_event(events, "memory", rank=0, stage=0, device="cpu", peak_bytes=7, reserved_bytes=7, limit_bytes=None)
    write_steps(events, STEPS + 1, STEPS + 30, loss=0.25)
    append_event(events, "device", device_type="cpu", names=["CPU"], shares=[0.5], used_bytes=[7])
    follower = Run(run.path)
    losses = [7.0 / step for step in range(1, STEPS + 1)] + [0.25] * 30
    facts = follower.row()
    assert (facts["step"], facts["peak_bytes"]) == (STEPS + 30, 7)
    assert facts["loss"] == pytest.approx(final_loss(range(1, STEPS + 31), losses))
    assert [event["type"] for event in follower.milestones()] == ["start", "status", "memory"]
    write_steps(events, STEPS + 31, STEPS + 31, loss=0.125)
    append_event(events, "end", steps=STEPS + 31, seconds=1.0)
    assert follower.row()["loss"] == pytest.approx(final_loss(range(1, STEPS + 32), [*losses, 0.125]))
    events_now, offset, _ = latest_events(events)
    assert offset == events.stat().st_size
    assert [event["type"] for event in events_now if event["type"] != "step"] == ["start", "status", "memory", "end"]
