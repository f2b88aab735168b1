"""Runs that somebody else wrote: what is no file is not opened, and each run's row is its own failure."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.logs import append_event
from tests.unit.test_figures_live import end, start_run, train
from workbench.base.errors import RunNotFound, WorkbenchError
from workbench.lab.handlers import RunIndex, dashboard_of
from workbench.planning.plan import Plan
from workbench.record.rundir import RunDir, opened, read_file, read_json, write_json
from workbench.runs.launching.device_queue import queue_folder, waiting_and_training
from workbench.runs.registry import list_runs, load_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("odd", "sound"):
        run = start_run(tmp_path / "runs" / name)
        train(run, 1, 100)
        end(run, "finished")
    return tmp_path / "runs"


def _unlinked(path: Path) -> Path:
    path.unlink(missing_ok=True)
    return path


ODD: dict[str, Callable[[RunDir], object]] = {
    "a tail that is a folder": lambda run: _unlinked(run.steps_tail).mkdir(),
    "a tail that is a link to itself": lambda run: _unlinked(run.steps_tail).symlink_to(run.steps_tail),
    "a tail that is a pipe": lambda run: os.mkfifo(_unlinked(run.steps_tail)),
    "a table that is a pipe": lambda run: os.mkfifo(_unlinked(run.steps)),
    "events that are a pipe": lambda run: os.mkfifo(_unlinked(run.events)),
    "events that are endless": lambda run: _unlinked(run.events).symlink_to("/dev/zero"),
    "an experiment of another run": lambda run: _unlinked(run.experiment).symlink_to("../sound/experiment.json"),
    "labels that are a pipe": lambda run: os.mkfifo(_unlinked(run.labels)),
    "a launcher that is a pipe": lambda run: os.mkfifo(_unlinked(run.launcher)),
    "an environment that is a pipe": lambda run: os.mkfifo(_unlinked(run.environment)),
    "ranks that are a pipe": lambda run: (run.ranks.mkdir(), os.mkfifo(run.rank(0))),
    "a header that is empty": lambda run: run.steps_tail.write_bytes(
        struct.pack("<8sII", b"WBsteps1", 8, zlib.crc32(b"{}      ")) + b"{}      "
    ),
    "a time that JSON cannot hold": lambda run: append_event(run.events, "step", step=101, loss=1.0, time=float("inf")),
    "checkpoints of no step": lambda run: write_json(run.checkpoints / "step-²" / "complete.json", {}),
}


@pytest.mark.parametrize("odd", ODD)
def test_a_run_that_cannot_be_read_is_a_row_of_its_own_and_hides_no_other(odd: str, folder: Path) -> None:
    ODD[odd](RunDir(folder / "odd"))
    rows = {row["name"]: row for row in RunIndex().read([folder])["rows"]}
    json.dumps(rows, allow_nan=False)
    assert rows["sound"]["losses"][-1] == (100, 0.1)
    table = list_runs(folder, sort="loss")
    assert "sound  finished" in repr(table)
    assert "odd" in repr(table)
    for answer in (load_run(folder / "odd").row, load_run(folder / "odd").history, load_run(folder / "odd").events):
        try:
            answer()
        except WorkbenchError as error:
            assert "cannot be read" in str(error)  # noqa: PT017 -- some answer, and some cannot
    dashboard_of([load_run(folder / "sound")])


def test_no_link_is_followed_but_one_that_the_user_names(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"token": 1}')
    (folder / "odd" / "labels.json").symlink_to(secret)
    with pytest.raises(RunNotFound, match="is a link, which is not followed"):
        read_json(folder / "odd" / "labels.json")
    (folder / "odd" / "logs").symlink_to(tmp_path)
    (folder / "odd" / "ranks").symlink_to(tmp_path)
    (tmp_path / "0.log").write_text("a secret")
    assert "is a link, which is not followed" in load_run(folder / "odd").logs()
    assert RunDir(folder / "odd").records(RunDir(folder / "odd").ranks) == []
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "plan.json").symlink_to(tmp_path / "other.json")
    with pytest.raises(WorkbenchError, match="not a whole plan"):  # it is read
        Plan.load(tmp_path / "plan.json")


def test_a_file_that_is_larger_than_any_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 10**12)
    with pytest.raises(RunNotFound, match=r"has 1,000,000,000,000 bytes, and at most 33,554,432 are read"):
        read_file(tmp_path / "large")
    with pytest.raises(RunNotFound, match="is a folder"), opened(tmp_path):
        pass


def test_a_strangers_ticket_does_not_hide_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    process = {"pid": os.getpid(), "created": 0.0}
    ticket = {"run": str(tmp_path), "pool": [{}], "count": 1, "devices": None, "supervisor": process}
    write_json(queue_folder() / "000001.json", ticket)
    os.mkfifo(queue_folder() / "000002.json")
    (queue_folder() / "².json").write_text("{}")
    assert waiting_and_training() == []
