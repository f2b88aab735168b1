"""Tracking with the real W&B client: offline, against a small server of our own, and against a dead port.

Recorders work in one warm process, where their limits are those of tests; a run whose server is dead has its own.
"""

import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from types import SimpleNamespace

import fake_wandb
import pytest
from fake_wandb import FakeWandb
from wandb_log import offline_config, offline_history, offline_summary

from tests.logs import append_event
from tests.patience import PATIENCE_S, eventually
from workbench.base.errors import RunNotFound, WorkbenchError
from workbench.experiment import Tracking
from workbench.record import rundir
from workbench.record.event_log import read_events
from workbench.record.rundir import RunDir, read_json, this_process, write_json, write_record
from workbench.record.step_table import num_logged
from workbench.runs import environment
from workbench.runs.registry import load_run
from workbench.runs.run import Run
from workbench.runs.tracking import delivery as tracking
from workbench.runs.tracking import wandb_tracker
from workbench.runs.tracking.rows import MOST_LAYERS, RowTail

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = SimpleNamespace(name="bert", tracking=Tracking(project="bert-scaling", tags=("trial",)))
KEY = "a" * 40
DEAD_PORT = "http://127.0.0.1:9"
LIMITS = {"NICENESS": 0, "INIT_LIMIT_S": PATIENCE_S, "ANSWER_LIMIT_S": PATIENCE_S, "CONFIRM_LIMIT_S": PATIENCE_S}
"""Constants of recorders that do not depend on how fast the machine is."""
LOSES = LIMITS | {"CONFIRM_LIMIT_S": 0}
"""Those where the server lacks rows for good: a client that has finished sends no more, so that one look tells."""


@pytest.fixture(scope="module")
def warm() -> Iterator[Pool]:
    """Return a process that has imported W&B's client once it has worked."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


@pytest.fixture
def record(warm, run, monkeypatch):
    """Return the start of a recorder in the warm process, which is also where `sync` uploads."""

    def start(*options: str, limits=LIMITS) -> SimpleNamespace:
        arguments = str(run.path), "--upload" in options, tracking.own_environment(), limits
        started = warm.apply_async(fake_wandb.record, arguments)
        return SimpleNamespace(wait=started.get)

    monkeypatch.setattr(tracking, "_spawn", lambda _, *options: start(*options))
    return start


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a tracked run of 30 steps whose supervisor lives; nobody is logged in."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home" / "workbench"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(wandb_tracker, "LOGIN_LIMIT_S", PATIENCE_S)
    run = RunDir(tmp_path / "bert-1")
    run.logs.mkdir(parents=True)
    write_record(
        run.experiment, {"name": "bert", "steps": 30, "learning_rate": 1e-3, "project": EXPERIMENT.tracking.project}
    )
    write_record(run.environment, {"packages": {"torch": "2.13.0"}, "command": ["train.py", "--secret"]})
    write_json(run.tracker, tracking.tracker_settings(run, EXPERIMENT))
    write_json(run.launcher, {"supervisor": this_process()})
    append_event(run.events, "status", state="running", message="")
    append_event(run.events, "start", devices=2, resumed_from=None)
    return run


@pytest.fixture
def server():
    started = []

    def start(**manners) -> FakeWandb:
        started.append(FakeWandb(**manners))
        return started[-1]

    yield start
    for one in started:
        one.close()


def train(run: RunDir, first: int = 1, last: int = 30, state: str | None = "finished", loss: float = 7) -> None:
    for step in range(first, last + 1):
        figures = {"loss": loss / step, "tokens": 64 * step, "seconds": step / 10, "mfu": None}
        append_event(run.events, "step", step=step, **figures, scalars={"accuracy": step / 30})
    if state:
        append_event(run.events, "status", state=state, message="")


def go_on_from(run: RunDir, step: int) -> None:
    """Queue the run again from a checkpoint."""
    write_json(run.resume, {"checkpoint": f"checkpoints/step-{step:08}", "step": step})
    append_event(run.events, "status", state="queued", message="")


def start_from(run: RunDir, step: int) -> None:
    append_event(run.events, "start", devices=2, resumed_from=f"checkpoints/step-{step:08}")


def login(monkeypatch, fake: FakeWandb) -> None:
    """Let this user have a key, which the client need not be asked for."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", fake.url)
    monkeypatch.setattr(wandb_tracker, "logged_in", lambda: True)


def states(run: RunDir) -> list[str]:
    return [event["state"] for event in read_events(run.events) if event["type"] == "tracking"]


def losses(rows: list[dict]) -> list[float]:
    return [row["loss"] for row in rows]


EXPECTED = [7 / step for step in range(1, 31)]


def test_runs_of_an_experiment_are_a_group_and_tracking_can_be_switched_off(run, monkeypatch):
    settings = tracking.tracker_settings(run, EXPERIMENT)
    assert (settings["project"], settings["group"], settings["name"]) == ("bert-scaling", "bert", "bert-1")
    assert settings["tags"] == ["trial"]
    assert settings["id"] == read_json(run.tracker)["id"], "a run that is continued keeps its id"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert tracking.tracker_settings(run, EXPERIMENT) is None


def test_without_a_key_a_resumed_run_is_in_the_offline_file_once_and_wandb_sync_uploads_it(run, record, server):
    train(run, 1, 20, state="stopped", loss=70)
    assert record().wait(PATIENCE_S) == 0
    go_on_from(run, 10)
    again = record()
    start_from(run, 10)
    train(run, 11, 30)
    assert again.wait(PATIENCE_S) == 0
    (file,) = run.tracking.glob("wandb/offline-run-*/run-*.wandb")
    expected = [70 / step for step in range(1, 11)] + EXPECTED[10:]
    rows = offline_history(file)
    assert [row["_step"] for row in rows] == list(range(1, 31))
    assert losses(rows) == expected
    assert [row["accuracy"] for row in rows] == [step / 30 for step in range(1, 31)]
    summary = offline_summary(file)
    assert (summary["_step"], summary["loss"], summary["tokens"]) == (30, EXPECTED[-1], 64 * 30)
    config = offline_config(file)
    assert (config["learning_rate"], config["environment"]) == (1e-3, {"packages": {"torch": "2.13.0"}})
    torn = run.path / "torn"
    torn.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    survived = losses(offline_history(torn))
    assert 0 < len(survived) < 30
    assert survived == expected[: len(survived)]
    assert states(run) == ["offline", "offline"]

    fake = server()
    environment = {**os.environ, "WANDB_BASE_URL": fake.url, "WANDB_API_KEY": KEY}
    synced = subprocess.run(
        [sys.executable, "-m", "wandb", "sync", str(file.parent)], env=environment, capture_output=True, text=True
    )
    assert synced.returncode == 0, synced.stderr
    identity = read_json(run.tracker)["id"]
    assert losses(fake.histories[identity]) == expected
    assert identity in fake.complete


@pytest.mark.representative
def test_logged_in_the_server_has_the_run_with_its_plan_a_resumed_run_continues_it_and_a_colleague_reads_it(
    run, record, warm, server, monkeypatch
):
    fake = server()
    login(monkeypatch, fake)
    download = partial(warm.apply, fake_wandb.download)
    monkeypatch.setattr(wandb_tracker, "download_run", lambda address: download((address, dict(os.environ))))
    write_json(run.plan, {"pipeline": 2})
    run.plan_page.write_text("the plan, drawn")  # otherwise a process would draw it
    first = record()
    train(run, 1, 20, state=None)
    append_event(run.events, "evaluation", step=20, loss=0.5)
    append_event(run.events, "norms", **norms_event(20, layers=2))
    append_event(run.events, "status", state="stopped", message="")
    assert first.wait(PATIENCE_S) == 0
    go_on_from(run, 20)
    second = record()
    start_from(run, 20)
    train(run, 21, 30)
    assert second.wait(PATIENCE_S) == 0
    assert states(run) == ["syncing", "synced"] * 2
    (identity,) = fake.histories
    assert identity == read_json(run.tracker)["id"]
    assert losses(fake.histories[identity]) == EXPECTED
    evaluated = [row for row in fake.histories[identity] if "eval/loss" in row]
    assert [(row["_step"], row["eval/loss"], row["eval/perplexity"]) for row in evaluated] == [
        (20, 0.5, pytest.approx(math.exp(0.5)))
    ]
    assert [row["_step"] for row in fake.histories[identity] if "updates_per_weight/encoder.1" in row] == [20]
    assert tracking.delivery(run).message.startswith("http"), "nothing was rewound"
    bucket = fake.buckets[identity]
    config = {key: value["value"] for key, value in json.loads(bucket["config"]).items() if "value" in value}
    assert bucket["groupName"] == "bert"
    assert (config["learning_rate"], config["plan"], config["environment"]["packages"]) == (
        1e-3,
        {"pipeline": 2},
        {"torch": "2.13.0"},
    )
    assert "command" not in config["environment"]
    assert fake.artifacts == {f"plan-{identity}": {"type": "plan", "state": "COMMITTED"}}
    check_copies(fake, identity)


def check_copies(fake: FakeWandb, identity: str) -> None:
    """Check what a colleague reads of this run, and of one that Workbench has not recorded."""
    fake.histories["other"] = [{"_step": i, "_timestamp": 1e9 + i, "train/loss": 5.0 / (i + 1)} for i in range(4)]
    fake.histories["other"][2]["train/loss"] = "NaN"
    fake.buckets["other"] = {"displayName": "<b>plain</b>", "config": '{"lr": {"value": 0.1}}', "project": "p"}
    mine = load_run(f"wandb:tester/{EXPERIMENT.tracking.project}/{identity}")
    assert mine.history().loss.tolist() == EXPECTED
    assert mine.history().gpu_hours[-1] > 0
    assert (mine.status.state, mine.config["learning_rate"]) == ("finished", 1e-3)
    other = load_run("wandb:tester/p/other")
    assert other.history().loss.tolist()[:2] == [5.0, 2.5]
    assert len(other.history()) == 4
    assert (other.config["lr"], other.alive, other.status.state) == (0.1, False, "running")
    assert "<b>plain" not in other._repr_html_()
    with pytest.raises(RunNotFound, match="not planned by Workbench"):
        _ = other.plan
    with pytest.raises(RunNotFound, match="no run tester/p/missing"):
        load_run("wandb:tester/p/missing")
    with pytest.raises(RunNotFound, match="Write wandb:entity/project/id"):
        load_run("wandb:what")


def test_steps_that_are_repeated_replace_those_on_the_server_also_while_the_recorder_follows(
    run, record, server, monkeypatch, tmp_path
):
    fake = server()
    login(monkeypatch, fake)
    train(run, 1, 20, state="stopped", loss=70)
    assert record().wait(PATIENCE_S) == 0
    go_on_from(run, 10)
    second = record()
    start_from(run, 10)
    train(run, 11, 25, state=None, loss=700)
    identity = read_json(run.tracker)["id"]
    eventually(lambda: len(fake.histories[identity]) == 24, lambda: fake.histories)  # the last row is still open
    assert losses(fake.histories[identity]) == [*(70 / s for s in range(1, 11)), *(700 / s for s in range(11, 25))]
    assert "rewound to step 10" in tracking.tracking_note(run)[1]
    assert fake.asked["RunHistoryKeys"] < 15, "the server is not asked anew for each step"
    write_json(run.resume, {"checkpoint": "checkpoints/step-00000015", "step": 15})
    at_once = tmp_path / "events.jsonl"  # a recorder that sees the failure alone has ended
    for state in ("failed", "queued"):
        rundir.append_event(at_once, "status", state=state, message="", rows=num_logged(run.path))
    with run.events.open("ab") as events:
        events.write(at_once.read_bytes())
    start_from(run, 15)
    train(run, 16, 30)
    assert second.wait(PATIENCE_S) == 0
    rows = fake.histories[identity]
    assert [row["_step"] for row in rows] == list(range(1, 31))
    assert losses(rows) == [*(70 / s for s in range(1, 11)), *(700 / s for s in range(11, 16)), *EXPECTED[15:]]
    assert "synced: " in tracking.tracking_note(run)[1]
    assert "rewound to step 15" in tracking.tracking_note(run)[1]


@pytest.mark.usefixtures("record")
def test_where_the_server_cannot_rewind_the_attempt_is_a_run_of_its_own_in_the_group(run, server, monkeypatch):
    fake = server(rewinds=False)
    login(monkeypatch, fake)
    train(run, 1, 20, state="stopped", loss=70)
    assert tracking.sync(run).state == "synced"
    old = read_json(run.tracker)["id"]
    go_on_from(run, 10)
    start_from(run, 10)
    train(run, 11, 25, state="stopped")
    told = tracking.sync(run)
    assert (told.state, told.step) == ("synced", 25)
    assert f"a run of its own, because W&B could not rewind run {old} to step 10" in told.message
    new = read_json(run.tracker)["id"]
    assert losses(fake.histories[old]) == [70 / step for step in range(1, 21)], "W&B keeps what it has"
    assert losses(fake.histories[new]) == [*(70 / step for step in range(1, 11)), *EXPECTED[10:25]]
    assert fake.buckets[new]["groupName"] == fake.buckets[old]["groupName"] == "bert"
    assert fake.buckets[new]["displayName"] == "bert-1 from step 10"
    assert fake.buckets[new]["notes"].startswith(f"W&B could not rewind run {old} to step 10")

    write_json(run.tracker, tracking.tracker_settings(run, EXPERIMENT))  # as a resumption does
    go_on_from(run, 25)
    start_from(run, 25)
    train(run, 26, 30)
    assert tracking.sync(run).state == "synced"
    assert set(fake.histories) == {old, new}
    assert losses(fake.histories[new])[25:] == EXPECTED[25:]
    assert fake.buckets[new]["displayName"] == "bert-1 from step 10"


def norms_event(step: int, layers: int) -> dict:
    """Return the norms of layers of two parameters each: 3 and 4 times the number of the layer, updated by a tenth."""
    sizes = [float(factor * number) for number in range(1, layers + 1) for factor in (3, 4)]
    return {
        "step": step,
        "tokens": 64.0 * step,
        "parameters": [f"encoder.{at // 2}.{'ab'[at % 2]}" for at in range(2 * layers)],
        "layers": [f"encoder.{at // 2}" for at in range(2 * layers)],
        "elements": [10] * (2 * layers),
        "weights": sizes,
        "gradients": [2 * size for size in sizes],
        "updates": [size / 10 for size in sizes],
        "least": [math.nan] * (2 * layers),
        "most": [math.nan] * (2 * layers),
        "histograms": [],
        "spent_s": 0.0,
    }


def test_norms_of_layers_stand_in_the_row_of_their_step_and_of_many_layers_some_are_spread_over_all(run):
    train(run, 1, 2, state=None)
    append_event(run.events, "norms", **norms_event(2, layers=3))
    train(run, 3, 3, state=None)
    append_event(run.events, "norms", **norms_event(3, layers=500))
    tail = RowTail(run)
    few, many = [row for row in tail.backlog if "weight_norms/encoder.0" in row.metrics]
    assert (few.step, many.step) == (2, 3)
    assert (few.opened_s, sorted(tail.times)) == (None, [1, 2, 3]), "norms open no row of their own"
    layers = {number: math.hypot(3 * (number + 1), 4 * (number + 1)) for number in range(3)}
    expected = {f"weight_norms/encoder.{number}": norm for number, norm in layers.items()}
    expected |= {f"gradient_norms/encoder.{number}": 2 * norm for number, norm in layers.items()}
    expected |= {f"updates_per_weight/encoder.{number}": 0.1 for number in layers}
    assert few.metrics == pytest.approx(expected)
    assert len(many.metrics) == 3 * MOST_LAYERS
    assert {"weight_norms/encoder.0", "weight_norms/encoder.499"} <= set(many.metrics)


def test_rows_are_folded_as_the_history_is(run):
    """Steps repeated without a start replace earlier ones; a line that stands there twice says no more."""
    train(run, 1, 12, state=None, loss=70)
    train(run, 10, 11, state=None)
    append_event(run.events, "evaluation", step=11, loss=0.5, seconds=1.1)
    lines = run.events.read_bytes().splitlines(keepends=True)
    run.events.write_bytes(b"".join([*lines, lines[1]]))
    tail = RowTail(run)
    steps = [(row.step, row.metrics["loss"]) for row in tail.backlog if "loss" in row.metrics]
    assert steps == [(step, (7 if step > 9 else 70) / step) for step in range(1, 12)]
    assert [loss for _, loss in steps] == Run(run.path).history().loss.tolist()
    assert [(row.step, row.metrics["eval/loss"]) for row in tail.backlog if "eval/loss" in row.metrics] == [(11, 0.5)]
    assert tail.resumptions == {9}
    train(run, 12, 13, state=None)
    assert [row.step for row in tail.read()] == [12, 13]
    assert not tail.is_outdated
    start_from(run, 13)
    train(run, 14, 14, state=None)
    assert [row.step for row in tail.read()] == [14]
    start_from(run, 12)
    train(run, 13, 13, state=None)
    assert tail.read() == []
    assert tail.is_outdated


def test_steps_that_the_server_refuses_or_drops_are_named_and_the_next_upload_repairs_them(
    run, record, server, monkeypatch
):
    fake = server(refuses=403)
    login(monkeypatch, fake)
    monkeypatch.setattr(tracking, "_spawn", lambda _, *options: record(*options, limits=LOSES))
    train(run)
    told = tracking.sync(run)
    assert told.state == "failed", "what the server refuses is never called synced"
    assert "the server has 0 of 30 steps; it dropped 1, 2, 3, 4, 5 and 25 more" in told.message
    fake.refuses, fake.drops = None, (7, 9)
    assert "the server has 28 of 30 steps; it dropped 7, 9" in tracking.sync(run).message
    assert "failed: the server has 28 of 30 steps" in tracking.tracking_note(run)[1]
    fake.drops = ()
    assert tracking.sync(run).state == "synced"
    assert losses(fake.histories[read_json(run.tracker)["id"]]) == EXPECTED


GIVES_UP = """
import os, sys
from workbench.runs.tracking import recorder, wandb_tracker
wandb_tracker.INIT_LIMIT_S = 1.0  # clock: a dead port never answers
os._exit(recorder.main(sys.argv[1], upload=False))
"""
"""A recorder that soon takes a server for dead, whatever time the one that writes the offline file then needs."""


def test_a_dead_port_costs_no_point_and_sync_delivers_them_later_with_the_notebook(run, server, monkeypatch):
    dead = {**tracking.own_environment(), "WANDB_BASE_URL": DEAD_PORT, "WANDB_API_KEY": KEY}
    train(run)
    assert subprocess.run([sys.executable, "-c", GIVES_UP, str(run.path)], env=dead).returncode == 1
    assert states(run) == ["offline"]
    assert "W&B did not answer" in tracking.delivery(run).message
    (file,) = run.tracking.glob("wandb/offline-run-*/run-*.wandb")
    assert losses(offline_history(file)) == EXPECTED
    assert [row["accuracy"] for row in offline_history(file)] == [step / 30 for step in range(1, 31)]

    fake = server()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", fake.url)
    run.notebook.write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    told = tracking.sync(run)
    assert (told.state, told.step) == ("synced", 30)
    identity = read_json(run.tracker)["id"]
    assert losses(fake.histories[identity]) == EXPECTED
    assert fake.artifacts[f"notebook-{identity}"]["state"] == "COMMITTED"
    assert not tracking.pending(run)
    monkeypatch.setattr(wandb_tracker, "logged_in", lambda: True)  # as the client has just said
    asked = len(fake.histories[identity])
    assert tracking.sync(run).state == "synced"
    assert len(fake.histories[identity]) == asked, "what is there is not uploaded again"


def test_sync_says_what_it_needs(run):
    with pytest.raises(WorkbenchError, match="wandb login"):
        tracking.sync(run)
    run.tracker.unlink()
    with pytest.raises(WorkbenchError, match="not tracked"):
        tracking.sync(run)
    assert not tracking.pending(run)
    assert tracking.tracking_note(run) == ("W&B", "off")


def test_a_client_that_gives_no_answer_is_not_a_missing_key(run, monkeypatch):
    monkeypatch.setattr(wandb_tracker, "LOGIN_LIMIT_S", 0)
    with pytest.raises(WorkbenchError, match="did not say within 0 s whether there is a key"):
        tracking.sync(run)
    finding = environment._wandb()
    assert (finding.ok, finding.found) == (False, "unknown")
    monkeypatch.setattr(wandb_tracker, "LOGIN_LIMIT_S", PATIENCE_S)
    monkeypatch.setattr(wandb_tracker.sys, "executable", "/bin/false")
    with pytest.raises(WorkbenchError, match="failed to say whether there is a key: exit code 1"):
        tracking.sync(run)


def test_two_recorders_never_work_on_one_run(run, monkeypatch):
    with tracking.recording_alone(run) as alone:
        assert alone
        assert tracking.recording(run)
        monkeypatch.setattr(wandb_tracker, "logged_in", lambda: True)
        with pytest.raises(WorkbenchError, match="still at work"):
            tracking.sync(run)
    assert not tracking.recording(run)


def test_recording_a_step_of_fifty_metrics_takes_the_training_less_than_a_millisecond(run):
    metrics = {f"layer{i}/grad_norm": 1.0 / (i + 1) for i in range(50)}
    seconds = []
    for step in range(200):
        began = time.process_time()  # clock: processor seconds, of which the quickest step takes a tenth
        append_event(run.events, "step", step=step, **metrics)
        seconds.append(time.process_time() - began)  # clock: processor seconds, of which the quickest takes a tenth
    assert min(seconds) < 1e-3, "other work on the machine makes some slower, never all"
