"""Tracking with the real Trackio: into its database on this machine, into a server of its own, and to a dead port.

Trackio is no requirement: `make test-trackio` installs it and runs this file. Each recorder is a process of its own,
because Trackio reads the folder of its database once, when it is imported.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_runs_tracking import DEAD_PORT, EXPECTED, go_on_from, run, start_from, states, train  # noqa: F401 - a fixture

import workbench as wb
from tests.logs import append_event
from tests.patience import PATIENCE_S
from workbench.base.errors import RunNotFound, WorkbenchError
from workbench.experiment import TRACKERS, Tracking
from workbench.record.rundir import RunDir, read_json, write_json
from workbench.runs.tracking import delivery as tracking
from workbench.runs.tracking.tracker import CLASSES

PROJECT = "bert scaling.2"
"""A name of which Trackio makes a file of another name."""
needs_trackio = pytest.mark.skipif(
    importlib.util.find_spec("trackio") is None, reason="make test-trackio installs Trackio"
)
EXPERIMENT = SimpleNamespace(name="bert", tracking=Tracking(project=PROJECT, tracker="trackio"))
RECORDS = """
import os, sys
from workbench.runs.tracking import recorder, trackio_tracker
recorder.NICENESS, trackio_tracker.CONFIRM_LIMIT_S = 0, float(sys.argv[2])  # clock: of code under test, decides nothing
os._exit(recorder.main(sys.argv[1], upload="--upload" in sys.argv))
"""
SERVES = """
import sys, trackio
print('address', trackio.show(open_browser=False, block_thread=False)[-1], flush=True)
sys.stdin.read()
"""
ROWS = """
import json, sys, trackio
from trackio.sqlite_storage import SQLiteStorage
from trackio.fragments import import_inbox_dir
import_inbox_dir()
runs = [(run.name, run.id, run.config) for run in trackio.Api().runs(sys.argv[2])]
logs = {identity: SQLiteStorage.get_logs(sys.argv[2], run_id=identity) for _, identity, _ in runs}
artifacts = [each["name"] for each in SQLiteStorage.list_artifacts(sys.argv[2])]
json.dump([runs, logs, artifacts], open(sys.argv[1], "w"), default=str)
"""


def python(code: str, *words: object, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, words)]
    environment = {**tracking.own_environment(), **environment}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def tracked(run, tmp_path, monkeypatch):  # noqa: F811
    """Return the run of 30 steps, tracked by Trackio into a folder of this test."""
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WRITE_TOKEN", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "database"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    run.tracker.unlink()
    write_json(run.tracker, tracking.tracker_settings(run, EXPERIMENT))
    monkeypatch.setattr(tracking, "_spawn", lambda _, *options: record(run, *options))
    return run


def record(recorded: RunDir, *options: str) -> subprocess.Popen[str]:
    return python(RECORDS, recorded.path, PATIENCE_S, *options)


def stored(folder: Path) -> SimpleNamespace:
    """Return runs, rows by the run's id and artifacts of the database in a folder."""
    answer = folder.parent / "stored.json"
    assert python(ROWS, answer, PROJECT, TRACKIO_DIR=str(folder), HF_HUB_OFFLINE="1").wait(PATIENCE_S) == 0
    runs, rows, artifacts = json.loads(answer.read_text())
    return SimpleNamespace(runs=runs, rows=rows, artifacts=artifacts)


@needs_trackio
def test_the_database_of_this_machine_has_a_resumed_run_once_with_its_plan_texts_and_numbers(tracked, tmp_path):
    write_json(tracked.plan, {"pipeline": 2})
    tracked.plan_page.write_text("the plan, drawn")  # otherwise a process would draw it
    train(tracked, 1, 20, state="stopped", loss=70)
    assert record(tracked).wait(PATIENCE_S) == 0
    first = read_json(tracked.tracker)["id"]
    assert tracking.tracking_note(tracked) == (
        "Trackio",
        f"{PROJECT}/{first}, synced: `trackio show --project '{PROJECT}'`",
    )
    assert not tracking.pending(tracked)

    go_on_from(tracked, 10)
    start_from(tracked, 10)
    train(tracked, 11, 28, state=None)
    odd = {"flops": 10**21, "grad_norm": float("inf"), "learning_rate": float("nan"), "scalars": {"run": 3.0}}
    append_event(tracked.events, "step", step=29, loss=7 / 29, **odd)
    append_event(tracked.events, "evaluation", step=29, loss=0.5, seconds=1.0)
    append_event(tracked.events, "samples", step=29, samples=[{"prompt": "a", "text": "b", "tokens": 1}])
    train(tracked, 30, 30)
    told = tracking.sync(tracked)
    assert (told.state, told.step) == ("synced", 30)
    assert told.message.endswith("written anew, because its rows there no longer held")

    found = stored(tmp_path / "database")
    [(name, identity, config)] = found.runs
    assert (name, identity) == ("bert-1", read_json(tracked.tracker)["id"])
    assert (config["_Group"], config["learning_rate"], config["plan"]) == ("bert", 1e-3, {"pipeline": 2})
    assert config["environment"] == {"packages": {"torch": "2.13.0"}}, "and no command line"
    rows = found.rows[identity]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 31))
    assert [row["loss"] for row in steps] == [*(70 / step for step in range(1, 11)), *EXPECTED[10:]]
    last = steps[28]
    assert (last["flops"], last["grad_norm"], last["run_"]) == (1e21, float("inf"), 3.0)
    assert last["learning_rate"] != last["learning_rate"], "NaN"
    [evaluated] = [row for row in rows if "eval/loss" in row]
    assert (evaluated["step"], evaluated["eval/loss"]) == (29, 0.5)
    [texts] = [row for row in rows if "samples" in row]
    assert texts["samples"]["_value"] == [{"step": 29, "prompt": "a", "what the model wrote": "b"}]
    assert found.artifacts.count(f"plan-{identity}") == 1


@needs_trackio
def test_a_server_gets_a_run_also_late_goes_on_with_it_and_its_token_stays_out_of_the_run(
    tracked, tmp_path, monkeypatch
):
    train(tracked, 1, 20, state="stopped")
    monkeypatch.setenv("TRACKIO_SERVER_URL", f"{DEAD_PORT}/?write_token=abcdefgh")
    assert record(tracked).wait(PATIENCE_S) == 1
    assert states(tracked) == ["offline"]
    assert "Trackio did not answer" in tracking.delivery(tracked).message
    local = stored(tmp_path / "database")
    assert [row["loss"] for row in local.rows[local.runs[0][1]]] == EXPECTED[:20], "a dead port costs no point"

    server = python(SERVES, TRACKIO_DIR=str(tmp_path / "of-server"))
    try:
        assert server.stdout is not None
        address = next(line.split()[1] for line in server.stdout if line.startswith("address "))
        monkeypatch.setenv("TRACKIO_SERVER_URL", address)
        assert tracking.sync(tracked).state == "synced"
        first = read_json(tracked.tracker)["id"]
        assert tracking.delivery(tracked).message == address.partition("?")[0]
        go_on_from(tracked, 20)
        start_from(tracked, 20)
        train(tracked, 21, 30)
        assert tracking.sync(tracked).state == "synced"
        assert read_json(tracked.tracker)["id"] == first, "it goes on with the same run"
        go_on_from(tracked, 15)
        start_from(tracked, 15)
        train(tracked, 16, 25)
        assert "written anew" in tracking.sync(tracked).message
        assert not tracking.pending(tracked)
        monkeypatch.setenv("TRACKIO_SERVER_URL", f"{DEAD_PORT}/?write_token=abcdefgh")
        assert tracking.pending(tracked), "what one server has, another lacks"
    finally:
        server.communicate("")
    found = stored(tmp_path / "of-server")
    [(_, identity, _)] = found.runs
    assert [row["loss"] for row in found.rows[identity]] == EXPECTED[:25]
    token = address.partition("write_token=")[2].partition("&")[0]
    assert token
    files = [path for path in tracked.path.rglob("*") if path.is_file()]
    assert not [path for path in files if token.encode() in path.read_bytes()]


@needs_trackio
def test_rows_that_trackio_loses_are_named_and_the_next_upload_repairs_them(tracked, monkeypatch):
    train(tracked)
    loses = """
from trackio.run import Run
log = Run.log
Run.log = lambda self, metrics, step=None: None if step in (7, 9) else log(self, metrics, step)
"""
    monkeypatch.setattr(tracking, "_spawn", lambda _, *options: python(loses + RECORDS, tracked.path, 0, *options))
    told = tracking.sync(tracked)
    assert (told.state, "the server has 28 of 30 steps; it dropped 7, 9" in told.message) == ("failed", True)
    monkeypatch.setattr(tracking, "_spawn", lambda _, *options: record(tracked, *options))
    assert tracking.sync(tracked).state == "synced"


def test_what_trackio_needs_is_said_before_a_process_starts(tracked, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "trackio" else object())
    with pytest.raises(WorkbenchError, match=r"tracked by trackio, which is not installed\. Run `pip install trackio`"):
        tracking.check_installed(EXPERIMENT)
    with pytest.raises(WorkbenchError, match="Trackio is not installed here"):
        tracking.sync(tracked)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    tracking.check_installed(EXPERIMENT)
    assert set(TRACKERS) == set(CLASSES)
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:7860/")
    with pytest.raises(WorkbenchError, match="a server without a write token"):
        tracking.sync(tracked)
    with pytest.raises(RunNotFound, match="copied from W&B alone"):
        wb.load_run("trackio:bert-scaling/bert-1")


def test_a_run_of_an_older_version_is_at_weights_and_biases(run, tmp_path):  # noqa: F811
    older = RunDir(tmp_path / "older")
    older.path.mkdir()
    (older.path / "wandb.json").write_text('{"project": "p", "id": "abc"}')
    assert older.tracker.name == "wandb.json"
    assert tracking.tracking_note(older) == ("W&B", "p/abc, offline")
    changed = SimpleNamespace(name="bert", tracking=Tracking(project="p", tracker="trackio"))
    assert tracking.tracker_settings(run, changed)["id"] != read_json(run.tracker)["id"], "another tracker, another run"
