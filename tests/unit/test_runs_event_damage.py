"""Damaged logs: no mutation of a finished run's events and steps leaves a wrong value or an unmentioned hole."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.real_worker import experiment
from tests.exhaustive import EXHAUSTIVE
from tests.logs import append_event
from tests.unit.figure_values import plan
from tests.unit.test_runs import make_run
from workbench.base.errors import WorkbenchError
from workbench.record import step_table
from workbench.record.event_log import read_events
from workbench.record.history import HistoryTail
from workbench.record.rundir import RunDir, log_event
from workbench.runs.launching import launcher
from workbench.runs.registry import list_runs
from workbench.runs.run import Run

STEPS = 60
MUTATIONS = 42 if EXHAUSTIVE else 14
"""Mutations of each sort."""
ROW = 8 * (len(step_table.LOGGED) + 1)
"""Bytes of a row of the tail."""


@pytest.fixture
def finished(tmp_path: Path) -> RunDir:
    """Return a run of 60 steps that has finished."""
    return finished_run(tmp_path)


def finished_run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path, steps=STEPS)
    append_event(run.events, "status", state="starting", message="")
    append_event(run.events, "start", devices=1, resumed_from=None)
    for step in range(1, STEPS + 1):
        append_event(run.events, "step", step=step, loss=7.0 / step, grad_norm=1.0, seconds=0.5 * step, tokens=8 * step)
    append_event(run.events, "end", steps=STEPS, seconds=30.0)
    append_event(run.events, "status", state="finished", message="60 steps.")
    return run


def test_a_line_that_lost_its_checksum_and_a_digit_is_damaged(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=STEPS)
    append_event(run.events, "memory", rank=0, peak_bytes=1048576)
    status, whole = run.events.read_bytes().splitlines()
    run.events.write_bytes(status + b"\n" + whole[: whole.index(b"48576")] + b"}\n")
    assert [event["type"] for event in read_events(run.events)] == ["status"]
    assert Run(run.path).row()["damaged_lines"] == 1


def flip(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def digit(data: bytes, dice: random.Random) -> bytes:
    place = dice.choice([place for place, byte in enumerate(data) if 48 <= byte < 58] or [0])
    return data[:place] + dice.choice([d for d in b"0123456789" if d != data[place]]).to_bytes() + data[place + 1 :]


def delete(data: bytes, dice: random.Random) -> bytes:
    place = dice.randrange(len(data))
    return data[:place] + data[place + dice.randint(1, 40) :]


def insert(data: bytes, dice: random.Random) -> bytes:
    place = dice.randrange(len(data))
    return data[:place] + dice.randbytes(dice.randint(1, 9)) + data[place:]


def _repeat(data: bytes, dice: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    at = dice.randrange(len(lines))
    return b"".join([*lines[:at], lines[dice.randrange(at + 1)], *lines[at:]])


def _swap(data: bytes, dice: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    first, second = dice.randrange(len(lines)), dice.randrange(len(lines))
    lines[first], lines[second] = lines[second], lines[first]
    return b"".join(lines)


def _drop(data: bytes, dice: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    del lines[dice.randrange(len(lines))]
    return b"".join(lines)


def _cut(data: bytes, dice: random.Random) -> bytes:
    return data[: dice.randrange(len(data))]


def _unlink(_: bytes, dice: random.Random) -> None:  # noqa: ARG001
    return None


@pytest.mark.parametrize(
    ("name", "block_rows"), [("events.jsonl", 4096), ("steps.tail", 4096), ("steps.tail", 7), ("steps.table", 7)]
)
@pytest.mark.parametrize("mutate", [flip, digit, delete, insert, _repeat, _swap, _drop, _cut, _unlink])
def test_no_mutation_is_silent(
    mutate: Callable[..., bytes | None], name: str, block_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_table, "BLOCK_ROWS", block_rows)
    run = finished_run(tmp_path)
    file = run.path / name
    whole = file.read_bytes()
    dice, found = random.Random(mutate.__name__), 0
    for _ in range(MUTATIONS):
        changed = mutate(whole, dice)
        if changed is None:
            file.unlink(missing_ok=True)
        else:
            file.write_bytes(changed)
        history, facts = HistoryTail(run.events).read(), Run(run.path).row()
        lost = np.isnan(history.loss)
        wrong = ~lost & (history.loss != 7.0 / history.step)
        assert not wrong.any(), history.step[wrong]
        assert np.all(np.diff(history.step) > 0)
        if lost.any():
            assert f"damaged: loss of rows {7 * (int(history.step[lost][0]) // 7):,}" in repr(history)
        if len(history) < STEPS:
            assert facts["damaged_lines"] or history.missing, history
        found += len(history) < STEPS or bool(lost.any())
    assert found or name == "events.jsonl" or mutate in (_repeat, _swap, digit), "the mutations did nothing"


ENDS = {
    "empty": (lambda _: b"", 0, 60),
    "the last row is cut": (lambda data: data[:-50], STEPS - 1, 1),
    "grown": (lambda data: data + b"\x80" * 300, STEPS, 0),
    "zeros, as after a power failure": (lambda data: data[: -30 * ROW] + bytes(30 * ROW), 30, 30),
    "a row is zeros": (lambda data: data[: -30 * ROW] + bytes(ROW) + data[-29 * ROW :], STEPS - 1, 1),
    "no header": (lambda data: b"\xff" * 40 + data[40:], 0, 61),
}


@pytest.mark.parametrize("damage", ENDS)
def test_a_tail_is_read_as_far_as_it_is_whole(damage: str, finished: RunDir) -> None:
    change, steps, damaged = ENDS[damage]
    finished.steps_tail.write_bytes(change(finished.steps_tail.read_bytes()))
    history, facts = HistoryTail(finished.events).read(), Run(finished.path).row()
    assert len(history) == steps
    assert (history.loss == 7.0 / history.step).all()
    assert facts["damaged_lines"] == damaged
    assert "bert-1" in repr(list_runs(finished.path.parent))
    step_table._WRITERS.clear()  # another process goes on
    append_event(finished.events, "step", step=STEPS + 1, loss=7.0 / (STEPS + 1), seconds=31.0)
    assert HistoryTail(finished.events).read().step[-1] == STEPS + 1, "a run that goes on is not hidden by it"


LINES = {
    "empty": (lambda _: b"", 0),
    "a cut line, ended": (lambda data: data[:-40] + b"\n", 1),
    "a line that is not UTF-8": (lambda data: data.replace(b'"finished"', b'"st\xff\xfe"'), 1),
    "no line is UTF-8": (lambda _: b"\xff\xfe\x00\n" * 40, 40),
    "binary without an end": (lambda data: data + b"\x80" * 300, 0),
}


@pytest.mark.parametrize("damage", LINES)
def test_events_are_read_as_far_as_they_are_whole(damage: str, finished: RunDir) -> None:
    change, damaged = LINES[damage]
    finished.events.write_bytes(change(finished.events.read_bytes()))
    assert HistoryTail(finished.events).read().step.tolist() == list(range(1, STEPS + 1))
    assert Run(finished.path).row()["damaged_lines"] == damaged
    append_event(finished.events, "status", state="stopped", message="")
    assert read_events(finished.events)[-1]["type"] == "status", "a run that goes on is not hidden by it"


def test_an_intact_log_is_called_intact(finished: RunDir) -> None:
    assert len(HistoryTail(finished.events).read()) == STEPS
    assert HistoryTail(finished.events).read().missing == 0
    assert Run(finished.path).row()["damaged_lines"] == 0
    assert "damaged" not in repr(Run(finished.path))
    whole = finished.steps_tail.read_bytes()
    finished.steps_tail.write_bytes(whole[: -30 * ROW] + bytes(ROW) + whole[-29 * ROW :])
    assert "1 damaged events and steps skipped" in repr(Run(finished.path))
    assert "1 missing" in repr(HistoryTail(finished.events).read())


def test_a_disk_that_takes_only_a_part_of_a_line_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, room = os.write, [0]

    def little(descriptor: int, data: bytes) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = min(len(data), 7, room[0])
        room[0] -= count
        return write(descriptor, bytes(data[:count]))

    events = tmp_path / "events.jsonl"
    monkeypatch.setattr(step_table, "BLOCK_ROWS", 5)
    monkeypatch.setattr(os, "write", little)
    for episode in range(8):
        for step in range(10 * episode, 10 * episode + 10):
            step_table.log_step(tmp_path, step=step, loss=1.0)
            log_event(events, "checkpoint", step=step)
            room[0] += 50  # the disk fills up faster than room is made
        room[0] = 500
    room[0] = 10**6
    append_event(events, "end", steps=80, seconds=1.0)
    step_table.log_step(tmp_path, step=80, loss=1.0)
    for name in ("checkpoint", "step"):
        logged = [event["step"] for event in read_events(events) if event["type"] == name]
        assert logged == list(range(80 + (name == "step")))
    room[0] = 5
    with pytest.raises(OSError, match="No space left"):
        append_event(events, "end", steps=80, seconds=1.0)
    assert events.read_bytes().endswith(b"}\n"), "nothing is left of what could not be written"


def test_a_launch_into_a_full_disk_leaves_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> dict[str, str]:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(launcher, "environment", full)
    with (
        pytest.raises(WorkbenchError, match=r"No space left on device\. Free some space"),
        launcher.written(launcher.Attempt(experiment(), plan(2, 8))),
    ):
        pass
    assert list((tmp_path / "runs").iterdir()) == []


ODDITIES = {
    "experiment.json": ("[]", "{}", '{"steps": "many"}', '{"steps": 1e400}', "[" * 100_000, "\x00"),
    "launcher.json": ("[]", '{"plan": 5}', '{"supervisor": "me"}', '{"workers": 7}'),
    "environment.json": ("5",),
    "events.jsonl": (
        '{"type": "status", "state": 5, "time": "now", "message": {}}\n',
        '{"type": "memory", "rank": {}}\n',
    ),
}


@pytest.mark.usefixtures("finished")
@pytest.mark.parametrize(("file", "text"), [(file, text) for file, texts in ODDITIES.items() for text in texts])
def test_one_odd_run_never_hides_the_table(file: str, text: str, tmp_path: Path) -> None:
    odd = make_run(tmp_path, name="odd")
    (odd.path / file).write_text(text)
    table = list_runs(tmp_path)
    assert "bert-1  finished" in repr(table)
    assert "odd" in repr(table)
    assert "bert-1" in table._repr_html_()
