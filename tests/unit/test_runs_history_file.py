"""A long history: read in bulk as line by line, kept beside its events, and never trusted where it no longer holds."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench.rundir import RunDir, append_event, this_process, write_json
from workbench.runs import History, HistoryTail, Run
from workbench.runs.launching import supervisor
from workbench.runs.records import event_lines as lines
from workbench.runs.records import history
from workbench.runs.records import history_cache as history_file
from workbench.runs.records.history import latest, read_history

KEPT = "history.bin"
STEPS = 6000
"""Long enough to be read in bulk and to be kept."""


def step_line(step: int, **fields: Any) -> str:
    figures = {"loss": 7.0 / step, "learning_rate": 1e-4, "grad_norm": 1.25, "step_ms": 250.5, "mfu": None}
    totals = {"tokens": 64 * step, "samples": step, "flops": 1e9 * step, "seconds": 0.25 * step, "tokens_per_s": 256.0}
    return json.dumps({"type": "step", "time": 1e9 + step / 4, "step": step, **figures, **totals, **fields}) + "\n"


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


def without_keeping(events: Path) -> History:
    """The truth: read line by line, from a copy that has nothing kept beside it."""
    copy = events.parent / "copy" / events.name
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(events, copy)
    (copy.parent / KEPT).unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BULK_BYTES", sys.maxsize)
        return read_history(copy)


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
    monkeypatch.setattr(lines, "BULK_BYTES", sys.maxsize)
    slowly = lines.parsed(block)
    monkeypatch.setattr(lines, "BULK_BYTES", 1)
    quickly = lines.parsed(block)
    assert np.array_equal(quickly.steps, slowly.steps, equal_nan=True)
    assert quickly.others == slowly.others


def test_lines_as_they_are_written_are_read_in_bulk(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_event(events, "checkpoint", step=3, path="p", seconds=0.1)
    write_steps(events, STEPS + 1, STEPS + 5, loss=float("nan"))
    monkeypatch.setattr(lines, "_line_by_line", lambda _: pytest.fail("read line by line"))
    assert len(read_history(events)) == STEPS + 5


def test_blocks_end_where_lines_do(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = events.read_bytes()
    with events.open("ab") as file:
        file.write(b'{"type": "ste')
    for size in (100, 1000, 10**6):  # the first below the length of a line
        monkeypatch.setattr(lines, "BLOCK_BYTES", size)
        found = list(lines.blocks(events))
        assert b"".join(found) == whole
        assert all(block.endswith(b"\n") for block in found)


def test_a_long_history_is_kept_and_opened_without_being_parsed(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_event(events, "checkpoint", step=STEPS, path="p", seconds=0.1)
    first_tail = HistoryTail(events)
    first = first_tail.read()
    assert (events.parent / KEPT).exists()
    monkeypatch.setattr(history, "parsed", lambda _: pytest.fail("parsed again"))
    tail = HistoryTail(events)
    assert same(tail.read(), first)
    assert tail.events == first_tail.events
    assert [event["type"] for event in tail.events] == ["start", "checkpoint"]
    assert not read_history(events).loss.flags.writeable


def test_the_supervisor_leaves_a_long_run_read(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor.keep_history(RunDir(events.parent))
    monkeypatch.setattr(history, "parsed", lambda _: pytest.fail("parsed again"))
    assert len(read_history(events)) == STEPS


def test_a_short_history_is_not_kept(tmp_path: Path) -> None:
    write_steps(tmp_path / "events.jsonl", 1, 100)
    read_history(tmp_path / "events.jsonl")
    assert not (tmp_path / KEPT).exists()


def test_what_was_appended_since_is_parsed_and_joined(events: Path) -> None:
    read_history(events)
    write_steps(events, STEPS + 1, STEPS + 10)
    append_event(events, "start", devices=4, world=4, resumed_from=f"checkpoints/step-{STEPS + 5:08d}")
    write_steps(events, STEPS + 6, STEPS + 8, loss=0.5)
    tail = HistoryTail(events)
    found = tail.read()
    assert found.step[-1] == STEPS + 8
    assert same(found, without_keeping(events))
    write_steps(events, STEPS + 9, STEPS + 20)
    assert same(tail.read(), without_keeping(events))


def test_a_file_that_is_being_written_is_kept_up_to_its_last_whole_line(events: Path) -> None:
    line = step_line(STEPS + 1).encode()
    with events.open("ab") as file:
        file.write(line[:40])
    assert len(read_history(events)) == STEPS
    with events.open("ab") as file:
        file.write(line[40:])
    assert same(read_history(events), without_keeping(events))


def test_readers_beside_a_writer_never_keep_anything_but_the_truth(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from test_runs_history_file import step_line\n"
        "with open(sys.argv[2], 'a', buffering=5000) as file:\n"  # lines are torn at the edges of its buffer
        "    for step in range(1, 30001): file.write(step_line(step))"
    )
    arguments = [sys.executable, "-c", code, str(Path(__file__).parent), str(events)]
    writer = subprocess.Popen(arguments, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    lengths = []
    while writer.poll() is None:
        found = read_history(events)
        lengths.append(len(found))
        assert found.step.tolist() == list(range(1, len(found) + 1))
    assert writer.returncode == 0
    assert (tmp_path / KEPT).exists()
    assert len(read_history(events)) == 30000
    assert same(read_history(events), without_keeping(events))


@pytest.mark.parametrize("seed", range(12))
def test_damage_is_noticed_and_the_events_are_read_again(events: Path, seed: int) -> None:
    truth = read_history(events)
    kept = events.parent / KEPT
    whole, chance = kept.read_bytes(), random.Random(seed)
    at = chance.randrange(len(whole)) if seed % 2 else chance.randrange(2000)
    flipped = bytes([whole[at] ^ (1 << chance.randrange(8))])
    for damaged in (whole[:at], whole[:at] + flipped + whole[at + 1 :], b"", whole + b"\n"):
        kept.write_bytes(damaged)
        assert same(read_history(events), truth)
        assert len(history_file.load(events).tables["steps"].T) == STEPS  # type: ignore[union-attr]


def test_padding_is_the_only_part_that_no_digest_covers(events: Path) -> None:
    read_history(events)
    whole = (events.parent / KEPT).read_bytes()
    header = whole.index(b"\n", whole.index(b"\n") + 1) + 1
    assert not any(whole[header : header + -header % history_file.ALIGNMENT])


def test_another_format_is_read_anew(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_file, "FORMAT", 0)
    read_history(events)
    monkeypatch.undo()
    assert history_file.load(events) is None
    assert len(read_history(events)) == STEPS
    assert history_file.load(events) is not None


def test_events_that_were_replaced_or_changed_are_read_anew(events: Path) -> None:
    read_history(events)
    changed = events.read_text().replace('"loss": 7.0,', '"loss": 8.0,')  # of step 1: as long as before
    time.sleep(0.01)
    events.write_text(changed + step_line(STEPS + 1))
    assert read_history(events).loss[0] == 8.0
    events.unlink()
    write_steps(events, 1, 50)
    assert len(read_history(events)) == 50


def test_a_copied_run_is_opened_without_being_parsed(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read_history(events)
    copy = shutil.copytree(events.parent, events.parent.parent / "copied")
    monkeypatch.setattr(history, "parsed", lambda _: pytest.fail("parsed again"))
    assert same(read_history(copy / events.name), first)


@pytest.mark.parametrize("kept_before", [True, False])
def test_a_folder_that_cannot_be_written_is_read_all_the_same(
    events: Path, kept_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kept_before:
        read_history(events)
        write_steps(events, STEPS + 1, 2 * STEPS)
    events.parent.chmod(0o555)
    real_open = Path.open

    def refusing(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if "w" in mode:  # root, as in CI's containers, may write anywhere
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, mode, *rest, **options)

    monkeypatch.setattr(Path, "open", refusing)
    try:
        assert len(read_history(events)) == (2 * STEPS if kept_before else STEPS)
        assert (events.parent / KEPT).exists() == kept_before
        assert not list(events.parent.glob("*.part"))
    finally:
        events.parent.chmod(0o755)


def test_on_a_network_disk_the_columns_are_copied_not_mapped(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read_history(events)
    monkeypatch.setattr(history_file, "LOCAL_DISKS", set())
    kept = history_file.load(events)
    assert kept is not None
    (events.parent / KEPT).write_bytes(b"")  # another host removes it
    assert np.array_equal(kept.tables["steps"][0], first.step)


def test_a_removed_history_stays_whole_for_who_opened_it(events: Path) -> None:
    first = without_keeping(events)
    read_history(events)
    opened = HistoryTail(events)
    found = opened.read()
    (events.parent / KEPT).unlink()
    write_steps(events, STEPS + 1, STEPS + 1)
    assert same(found, first)
    assert len(opened.read()) == STEPS + 1


def test_the_latest_of_a_long_run_is_what_its_events_say(events: Path) -> None:
    run = RunDir(events.parent)
    write_json(run.experiment, {"steps": 2 * STEPS})
    write_json(run.environment, {})
    write_json(run.launcher, {"supervisor": this_process()})
    append_event(events, "status", state="running", message="")
    append_event(events, "memory", rank=0, stage=0, device="cpu", peak_bytes=7, reserved_bytes=7, limit_bytes=None)
    write_steps(events, STEPS + 1, STEPS + 30, loss=0.25)
    cold = Run(run.path).summary()
    read_history(events)
    assert (run.path / KEPT).exists()
    follower = Run(run.path)
    assert follower.summary() == cold
    assert cold["step"] == STEPS + 30
    assert cold["loss"] == 0.25
    assert cold["peak_bytes"] == 7
    assert [event["type"] for event in follower.milestones()] == ["start", "status", "memory"]
    write_steps(events, STEPS + 31, STEPS + 31, loss=0.125)
    append_event(events, "end", steps=STEPS + 31, seconds=1.0)
    assert follower.summary()["loss"] == 0.125
    events_now, offset = latest(events)
    assert offset == events.stat().st_size
    assert [event["type"] for event in events_now if event["type"] != "step"] == ["start", "status", "memory", "end"]
