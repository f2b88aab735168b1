"""The table of steps: what a killed process leaves, what readers beside a writer see, and where it is damaged."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.record import step_table
from workbench.record.event_log import LogTail, read_events
from workbench.record.history import HistoryTail
from workbench.record.rundir import append_event
from workbench.record.step_table import StepTable, latest_steps, log_step, log_steps, num_logged

ROWS = 10


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_table, "BLOCK_ROWS", ROWS)


def another_process() -> None:
    """Forget what this process knows of the tables that it has written."""
    step_table._WRITERS.clear()


def steps_of(folder: Path) -> list[float]:
    table = StepTable(folder)
    table.refresh()
    return table.column("step").tolist()


def test_a_row_says_what_was_logged_to_the_bit_and_nothing_of_what_was_not(tmp_path: Path) -> None:
    row = {"step": 3, "loss": math.nan, "grad_norm": math.inf, "tokens": 2**40, "seconds": 1 / 3, "mfu": None}
    log_step(tmp_path, **row, scalars={"accuracy": 0.1, "late": None}, time=5.0)
    log_step(tmp_path, step=4, loss=-0.0, scalars={"late": math.nan})
    first, second = read_events(tmp_path / "events.jsonl")
    assert math.isnan(first.pop("loss"))  # type: ignore[misc]
    unknown = {name: None for name in step_table.LOGGED if name not in (*row, "time")}
    row.pop("loss")
    assert first == {"type": "step", "time": 5.0, **unknown, **row, "scalars": {"accuracy": 0.1}}
    assert (first["tokens"], first["mfu"], first["scalars"]) == (2**40, None, {"accuracy": 0.1})  # type: ignore[typeddict-item]
    assert isinstance(first["step"], int)  # type: ignore[typeddict-item]
    assert math.isnan(second["scalars"]["late"])  # type: ignore[typeddict-item]
    assert set(second["scalars"]) == {"late"}  # type: ignore[typeddict-item]


@pytest.mark.parametrize("count", [1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS, 3 * ROWS + 4])
def test_a_process_that_is_killed_at_any_byte_loses_at_most_the_row_that_it_wrote(count: int, tmp_path: Path) -> None:
    """What the files are after each call of the system, and in the middle of each, is read, and gone on from."""
    stages = list[dict[str, bytes]]()

    def seen() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    write = os.write

    def in_halves(descriptor: int, data: Any) -> int:
        """Write a half; the caller goes on with the rest."""
        done = write(descriptor, bytes(data[: max(1, len(data) // 2)]))
        stages.append(seen())
        return done

    def noted(function: Any) -> Any:
        def called(*arguments: Any) -> Any:
            result = function(*arguments)
            stages.append(seen())
            return result

        return called

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", in_halves)
        for name in ("replace", "ftruncate", "close"):
            patch.setattr(os, name, noted(getattr(os, name)))
        for step in range(1, count + 1):
            log_step(tmp_path, step=step, loss=7.0 / step)
    whole = 0
    for number, files in enumerate(stages):
        folder = tmp_path / "killed" / str(number)
        folder.mkdir(parents=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        found = steps_of(folder)
        assert found == list(range(1, len(found) + 1))
        assert len(found) >= whole, "a row that was whole is never lost"
        whole = max(whole, len(found))
        another_process()
        log_steps(folder, [{"step": step, "loss": 1.0} for step in (100, 101)])
        assert steps_of(folder) == [*found, 100, 101]
    assert whole == count


def test_two_writers_lose_nothing_to_each_other(tmp_path: Path) -> None:
    for step in range(1, 36, 2):
        log_step(tmp_path, step=step)
        first = dict(step_table._WRITERS)
        another_process()
        log_step(tmp_path, step=step + 1, scalars={"other": 1.0} if step > 20 else None)
        step_table._WRITERS.update(first)
    assert steps_of(tmp_path) == list(range(1, 37))


def test_a_row_is_not_written_into_a_tail_that_another_writer_has_just_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the opening of a tail and its lock, a second writer makes a block of it and begins another one."""
    log_step(tmp_path, step=1)
    lock = step_table.fcntl.flock
    first = dict(step_table._WRITERS)

    def as_the_second(descriptor: int, how: int) -> None:
        monkeypatch.setattr(step_table.fcntl, "flock", lock)
        second = step_table._Writer(tmp_path)
        second.waiting.append({"step": 2.0, "other": 1.0})
        second.write_waiting()
        lock(descriptor, how)

    monkeypatch.setattr(step_table.fcntl, "flock", as_the_second)
    os.link(tmp_path / "steps.tail", tmp_path / "kept by a backup")  # a name is left of what was replaced
    log_step(tmp_path, step=3)
    assert first == step_table._WRITERS
    assert steps_of(tmp_path) == [1, 2, 3]


def test_a_block_of_a_later_version_replaces_no_row(tmp_path: Path) -> None:
    log_steps(tmp_path, [{"step": step, "loss": 7.0 / step} for step in range(1, 6)])
    columns = [np.full(5, value).tobytes() for value in (3.0, 9.0)]
    for more in ({"version": 2}, {}):
        head = {"first": 0, "rows": 5, "names": ["step", "loss"], "crc32": list(map(zlib.crc32, columns)), **more}
        (tmp_path / "steps.table").write_bytes(step_table._header(head) + b"".join(columns))
        table = StepTable(tmp_path)
        assert table.refresh() == 5
        assert table.column("loss").tolist() == [7.0 / step for step in range(1, 6)]
        assert table.num_lost == (0 if more else 1), "what contradicts the tail is told"


def test_a_torn_block_hides_none_that_follows_it(tmp_path: Path) -> None:
    log_steps(tmp_path, [{"step": step, "loss": 7.0 / step} for step in range(1, 36)])
    whole = (tmp_path / "steps.table").read_bytes()
    head = {"first": 0, "rows": 10_000, "names": ["step"], "crc32": [0]}
    (tmp_path / "steps.table").write_bytes(step_table._header(head) + whole)
    assert steps_of(tmp_path) == list(range(1, 36))


def test_a_header_of_a_trillion_rows_takes_no_memory(tmp_path: Path) -> None:
    log_steps(tmp_path, [{"step": step, "loss": 7.0 / step} for step in range(1, 6)])
    header, start = step_table._read_header(os.open(tmp_path / "steps.tail", os.O_RDONLY), 0)  # type: ignore[misc]
    names, first = header["names"], 10**12
    rows = (tmp_path / "steps.tail").read_bytes()[start:]
    width = 8 * (len(names) + 1)
    moved = b""
    for at in range(5):
        values = rows[at * width : (at + 1) * width - 8]
        moved += values + step_table._row_checksum(values, first + at).to_bytes(8, "little")
    (tmp_path / "steps.tail").write_bytes(step_table._header({"first": first, "names": names}) + moved)
    history = HistoryTail(tmp_path / "events.jsonl").read()
    assert history.step.tolist() == [1, 2, 3, 4, 5]
    assert [event["step"] for event in LogTail(tmp_path / "events.jsonl").read()] == [1, 2, 3, 4, 5]  # type: ignore[typeddict-item]
    table = StepTable(tmp_path)
    table.refresh()
    assert table.num_lost == first, "rows that are stated and stand nowhere are told"


def test_readers_beside_a_writer_see_every_step_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from workbench.record import step_table\n"
        "step_table.BLOCK_ROWS = 50\n"
        "for step in range(1, 4001): step_table.log_step(Path(sys.argv[1]), step=step, loss=7.0 / step)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment)
    tail, log, seen = HistoryTail(tmp_path / "events.jsonl"), LogTail(tmp_path / "events.jsonl"), list[Any]()
    while writer.poll() is None:
        history = tail.read()
        assert history.step.tolist() == list(range(1, len(history) + 1))
        assert np.array_equal(history.last("loss", 60), 7.0 / history.step[-60:])
        assert steps_of(tmp_path)[: len(history)] == history.step.tolist()
        seen += log.read()
        latest = [event["step"] for event in latest_steps(tmp_path, 5)]
        assert latest == list(range(max(latest, default=0) - len(latest) + 1, max(latest, default=0) + 1))
    assert writer.returncode == 0
    assert len(tail.read()) == 4000
    assert [event["step"] for event in [*seen, *log.read()]] == list(range(1, 4001))


def test_a_damaged_column_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    log_steps(tmp_path, [{"step": step, "loss": 7.0 / step, "tokens": step} for step in range(1, 36)])
    table = StepTable(tmp_path)
    assert table.refresh() == 35
    whole = (tmp_path / "steps.table").read_bytes()
    at = table._blocks[1].start + 8 * ROWS * table._blocks[1].names.index("loss") + 3
    (tmp_path / "steps.table").write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
    history = HistoryTail(tmp_path / "events.jsonl").read()
    assert history.tokens.tolist() == list(range(1, 36))
    assert np.flatnonzero(np.isnan(history.loss)).tolist() == list(range(10, 20))
    assert "damaged: loss of rows 10 to 19 of steps.table" in repr(history)


def test_a_block_without_a_header_is_counted_and_those_after_it_are_read(tmp_path: Path) -> None:
    log_steps(tmp_path, [{"step": step, "loss": 7.0 / step} for step in range(1, 36)])
    whole = (tmp_path / "steps.table").read_bytes()
    second = whole.index(b"WBsteps1", 1)
    (tmp_path / "steps.table").write_bytes(whole[:second] + bytes(20) + whole[second + 20 :])
    history, table = HistoryTail(tmp_path / "events.jsonl").read(), StepTable(tmp_path)
    assert history.step.tolist() == [*range(1, 11), *range(21, 36)]
    assert (table.refresh(), table.num_lost) == (35, 10)
    assert "of steps.table" in repr(history)


def test_events_and_steps_come_in_the_order_in_which_they_were_written_however_often_they_are_read(
    tmp_path: Path,
) -> None:
    events = tmp_path / "events.jsonl"
    tails = {every: (LogTail(events), list[Any]()) for every in (1, 3, 1000)}
    written = list[tuple[str, int]]()
    clock = itertools.count(1.0)

    def write(name: str, step: int, **fields: Any) -> None:
        written.append((name, step))
        if name == "step":
            log_step(tmp_path, step=step, time=next(clock))
        else:
            append_event(events, name, step=step, time=next(clock), **fields)
        for every, (tail, found) in tails.items():
            if len(written) % every == 0:
                found += tail.read()

    write("start", 0, rows=0)
    for step in range(1, 24):
        write("step", step)
        if step % 4 == 0:
            write("evaluation", step, loss=1.0, seconds=1.0)
    clock = itertools.count(3.0)  # the clock was set back
    write("start", 12, rows=num_logged(tmp_path))
    for step in range(13, 20):
        write("step", step)
        if step % 4 == 0:
            write("evaluation", step, loss=1.0, seconds=1.0)
    for tail, found in tails.values():
        found += tail.read()
        assert [(event["type"], event["step"]) for event in found if event["type"] != "evaluation"] == [
            each for each in written if each[0] != "evaluation"
        ]
        assert sorted((event["type"], event["step"]) for event in found) == sorted(written)
    assert [(event["type"], event["step"]) for event in tails[1000][1]] == written
    assert [step["step"] for step in latest_steps(tmp_path, 20)] == [*range(11, 24), *range(13, 20)]


def test_the_events_of_a_run_are_printed_as_lines_of_json(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    (folder / "experiment.json").write_text("{}")
    append_event(folder / "events.jsonl", "start", devices=1, rows=0)
    log_steps(folder, [{"step": 1, "loss": math.inf}, {"step": 2, "loss": 0.5, "scalars": {"accuracy": 0.25}}])
    command = [sys.executable, "-m", "workbench.cli", "export-events", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    start, first, second = (json.loads(line, parse_constant=pytest.fail) for line in printed.splitlines())
    assert (start["type"], first["loss"], second["scalars"]["accuracy"]) == ("start", None, 0.25)
