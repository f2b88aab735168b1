"""What is kept of long event files: it is read in place of the lines, and never believed against them."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from workbench.rundir import append_event
from workbench.runs import event_log
from workbench.runs.event_log import latest_events
from workbench.runs.history import HistoryTail, read_tail

STEPS = 400


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a run of many small blocks, which was resumed once and evaluated."""
    monkeypatch.setattr(event_log, "BLOCK_BYTES", 8192)
    monkeypatch.setattr(event_log, "KEPT_BYTES", 512)
    monkeypatch.setattr(event_log, "SETTLED_S", -1.0)
    path = tmp_path / "events.jsonl"
    append_event(path, "start", devices=2, resumed_from=None)
    train(path, 1, STEPS)
    append_event(path, "start", devices=2, resumed_from="checkpoints/step-00000300")
    train(path, 301, STEPS)
    return path


def train(path: Path, first: int, last: int) -> None:
    for step in range(first, last + 1):
        append_event(path, "step", step=step, loss=7.0 / step, seconds=0.5 * step, mfu=None, grad_norm=float("nan"))
        if step % 8 == 0:
            names = ["GPU 0", "GPU 1"]
            append_event(path, "device", device_type="cuda", names=names, shares=[0.5, None], used_bytes=[step, 2])
        if step % 100 == 0:
            counts = {"tokens": step, "samples": step, "flops": step, "seconds": 0.5 * step, "eval_seconds": 0.1}
            append_event(path, "evaluation", step=step, loss=8.0 / step, metrics={"accuracy": 0.5}, **counts)


def everything(path: Path) -> list[Any]:
    """Return all that a reader can see of the events, in a form that can be compared."""
    tail = HistoryTail(path)
    history = tail.read()
    columns = [history[name].tobytes() for name in history]
    samples = [getattr(tail.utilization, name) for name in ("names", "device_type", "device", "share", "used_bytes")]
    evaluations = tail.evaluations
    losses = [evaluations["eval_loss"], evaluations.metrics.get("accuracy", ()), evaluations["gpu_hours"]]
    milestones, offset, damaged = latest_events(path, 0, 20)
    arrays = [np.asarray(array).tobytes() for array in (*samples[2:], *losses)]
    return [columns, samples[:2], arrays, tail.state, repr(milestones), offset, damaged]


def unkept(path: Path) -> list[Any]:
    """Return the same without anything kept."""
    path.with_suffix(".columns").unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_log, "KEPT_BYTES", 1 << 40)
        return everything(path)


def forbid_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "parsed", lambda *_: pytest.fail("lines were parsed again"))


def test_what_is_kept_says_what_the_lines_say_and_they_are_not_parsed_again(
    events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = unkept(events)
    assert everything(events) == expected
    forbid_parsing(monkeypatch)
    assert everything(events) == expected


def test_a_copied_run_is_not_parsed_again_either(events: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = everything(events)
    (tmp_path / "copy").mkdir()
    for file in (events, events.with_suffix(".columns")):
        (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())
    forbid_parsing(monkeypatch)
    assert everything(tmp_path / "copy" / events.name) == expected


def test_a_run_that_goes_on_adds_to_what_is_kept(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything(events)
    size = events.with_suffix(".columns").stat().st_size
    train(events, STEPS + 1, 2 * STEPS)
    found = everything(events)
    assert events.with_suffix(".columns").stat().st_size > size
    forbid_parsing(monkeypatch)
    assert everything(events) == found
    assert len(HistoryTail(events).read()) == 2 * STEPS


def test_what_is_kept_while_a_run_goes_on_is_all_that_its_first_reader_needs(
    events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "BLOCK_BYTES", 512)
    monkeypatch.setattr(event_log, "KEPT_BYTES", 1)
    keeper = event_log.ColumnKeeper(events)
    keeper.keep()
    train(events, STEPS + 1, STEPS + 200)
    keeper.keep()
    event_log.ColumnKeeper(events).keep()  # another supervisor, of a run that is resumed
    with monkeypatch.context() as patch:
        forbid_parsing(patch)
        found = [block.num_bytes for block in event_log.read_blocks(events, with_columns=False)]
    assert sum(found) == events.stat().st_size
    assert everything(events) == unkept(events)


def test_only_columns_that_are_asked_for_are_read(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = HistoryTail(events).read()  # in memory, because nothing was kept yet
    rows = list[int]()

    class Noted(event_log.KeptSteps):
        def __getitem__(self, row: int) -> Any:
            rows.append(row)
            return super().__getitem__(row)

    monkeypatch.setattr(event_log, "KeptSteps", Noted)
    history = HistoryTail(events).read()
    loss, grad_norm = (event_log.LOGGED.index(name) for name in ("loss", "grad_norm"))
    assert {loss, grad_norm}.isdisjoint(rows)
    blocks_read = len(rows)
    assert np.array_equal(history.last("loss", 5), expected.loss[-5:])
    assert len(rows) <= blocks_read + 1, "the last block alone"
    assert np.array_equal(history.loss, expected.loss)
    once = rows.count(loss)
    assert np.array_equal(history.loss, expected.loss)
    assert rows.count(loss) == once
    assert grad_norm not in rows


def test_a_history_stays_as_it_was_when_its_run_starts_again(events: Path) -> None:
    everything(events)
    tail = HistoryTail(events)
    before = tail.read()
    append_event(events, "start", devices=2, resumed_from="checkpoints/step-00000100")
    train(events, 101, 150)
    after = tail.read()
    assert before.step[-1] == STEPS
    assert np.array_equal(before.loss, 7.0 / before.step)
    assert after.step[-1] == 150
    assert np.array_equal(after.loss, 7.0 / after.step)
    assert np.array_equal(after.last("seconds", 60), 0.5 * after.step[-60:])


def test_a_column_that_is_damaged_after_its_run_was_opened_comes_from_the_events(events: Path) -> None:
    expected = HistoryTail(events).read().loss
    opened = HistoryTail(events).read()
    kept = events.with_suffix(".columns")
    kept.write_bytes(kept.read_bytes()[:1000])
    assert np.array_equal(opened.loss, expected)
    assert np.array_equal(HistoryTail(events).read().loss, expected)
    opened = HistoryTail(events).read()
    kept.unlink()
    events.write_bytes(b"x" * events.stat().st_size)
    with pytest.raises(OSError, match="Read it again"):
        len(opened.tokens)


def test_events_that_agreed_once_are_not_read_again(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(event_log, "SETTLED_S", 60.0)  # what was written just now may change within its time stamp
        expected = everything(events)
    assert everything(events) == expected
    summed = list[bytes]()

    def noted(data: Any, *start: int) -> int:
        summed.append(bytes(data))
        return zlib.crc32(data, *start)

    monkeypatch.setattr(event_log, "zlib", SimpleNamespace(crc32=noted))
    assert everything(events) == expected
    assert summed
    assert not any(b'"type": "step"' in data for data in summed)


def test_changed_events_are_believed_also_if_their_size_and_date_are_the_same(events: Path) -> None:
    everything(events)
    before, text = events.stat(), events.read_bytes()
    for change in (text.replace(b'"step": 30, ', b'"step": 3\x00, '), text[: len(text) // 2], b"", text + text):
        events.write_bytes(change)
        os.utime(events, ns=(before.st_atime_ns, before.st_mtime_ns))
        found = everything(events)
        assert found == unkept(events)
        events.write_bytes(text)


def test_no_damage_to_what_is_kept_changes_what_is_read(events: Path) -> None:
    expected, kept, dice = unkept(events), events.with_suffix(".columns"), random.Random(0)
    everything(events)
    whole = kept.read_bytes()
    for _ in range(30):
        at = dice.randrange(len(whole))
        flipped = whole[:at] + bytes([whole[at] ^ 1 << dice.randrange(8)]) + whole[at + 1 :]
        for damaged in (flipped, whole[:at], whole[:at] + dice.randbytes(7) + whole[at:], whole + dice.randbytes(9)):
            kept.write_bytes(damaged)
            assert everything(events) == expected
            assert everything(events) == expected, "from what was mended"


def test_a_folder_that_cannot_be_written_is_read(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = unkept(events)

    def refused(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(event_log, "_append", refused)
    assert everything(events) == expected
    assert not events.with_suffix(".columns").exists()


def test_short_runs_leave_nothing_beside_their_events(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_event(path, "start", devices=2, resumed_from=None)
    train(path, 1, 50)
    assert len(read_tail(path).read()) == 50
    assert list(tmp_path.iterdir()) == [path]
