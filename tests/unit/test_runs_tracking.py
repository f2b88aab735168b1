"""Tracking with the real W&B client, offline and against a small server of our own."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_wandb import FakeWandb

from workbench.rundir import RunDir, append_event, read_events, read_json, this_process, write_json
from workbench.runs import tracking

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = SimpleNamespace(project="bert-scaling", tags=("trial",))
KEY = "a" * 40

TRAIN = """
    import json, pathlib, sys
    from accelerate import Accelerator
    from workbench.rundir import RunDir, append_event, read_json
    run = RunDir(pathlib.Path(sys.argv[1]))
    accelerator = Accelerator(log_with="wandb", cpu=True)
    accelerator.init_trackers(**read_json(run.tracking_settings), config={"steps": 30})
    for step in range(1, 31):
        accelerator.log({"loss": 7 / step, "tokens": 64 * step}, step=step)
        append_event(run.events, "step", step=step, loss=7 / step)
    accelerator.end_training()
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = RunDir(tmp_path / "bert-1")
    run.tracking.mkdir(parents=True)
    write_json(run.tracking_settings, tracking.tracker_settings(run, EXPERIMENT))
    write_json(run.launcher, {"supervisor": this_process()})
    return run


def train(run: RunDir) -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent(TRAIN), str(run.path)], check=True, timeout=120)


def uploader(run: RunDir, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "workbench.runs.tracking", str(run.path)]
    return subprocess.Popen(command, env={**os.environ, **environment})


def states(run: RunDir) -> list[str]:
    return [event["state"] for event in read_events(run.events) if event["type"] == "tracking"]


def test_the_mode_is_always_offline_and_tracking_can_be_switched_off(run, monkeypatch):
    settings = tracking.tracker_settings(run, EXPERIMENT)
    assert settings["project_name"] == "bert-scaling"
    assert settings["init_kwargs"]["wandb"]["mode"] == "offline"
    assert settings["init_kwargs"]["wandb"]["tags"] == ["trial"]
    json.dumps(settings)
    monkeypatch.setenv("WANDB_MODE", "online")
    assert tracking.tracker_settings(run, EXPERIMENT)["init_kwargs"]["wandb"]["mode"] == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert tracking.tracker_settings(run, EXPERIMENT) is None


def test_a_logged_in_user_finds_every_step_on_the_server_and_in_the_offline_file(run):
    server = FakeWandb()
    upload = uploader(run, WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY)
    train(run)
    append_event(run.events, "status", state="finished", message="")
    assert upload.wait(60) == 0
    losses = [event["loss"] for event in read_events(run.events) if event["type"] == "step"]
    (file,) = tracking.offline_files(run)
    assert [row["loss"] for row in tracking.offline_history(file)] == losses
    torn = file.with_name("torn")
    torn.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    survived = [row["loss"] for row in tracking.offline_history(torn)]
    assert 0 < len(survived) < 30
    assert survived == losses[: len(survived)]
    identity = read_json(run.tracking_settings)["init_kwargs"]["wandb"]["id"]
    assert [row["loss"] for row in server.histories[identity]] == losses
    assert identity in server.complete
    assert states(run) == ["syncing", "synced"]
    server.close()


def test_a_server_that_is_gone_costs_the_uploader_its_time_limit_and_nothing_else(run):
    limits = {"WORKBENCH_SYNC_GRACE_S": "1", "WORKBENCH_SYNC_LIMIT_S": "1"}
    upload = uploader(run, WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY=KEY, **limits)
    train(run)
    append_event(run.events, "status", state="finished", message="")
    assert upload.wait(60) == 1
    assert states(run) == ["syncing", "failed"]


def test_nothing_is_uploaded_without_a_key(run):
    assert uploader(run).wait(60) == 0
    assert states(run) == []
