"""Alerts of a run are noted once, and posted to a webhook that was asked for, whatever becomes of it."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.patience import eventually
from workbench.record.rundir import EventTail, RunDir, write_record
from workbench.runs.launching import processes
from workbench.runs.launching.alerts import WEBHOOK, AlertWatch, fall

STEPS, STRETCH = 1000, 100


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "bert-1")
    run.logs.mkdir(parents=True)
    write_record(run.experiment, {"steps": STEPS, "tracking": {"log_every": 1}})
    return run


def told(run: RunDir) -> list[tuple[str, int]]:
    return [(event["alert"], event["step"]) for event in EventTail(run.events).read() if event["type"] == "alert"]


def watched(run: RunDir, losses: Any, first: int = 1, watch: AlertWatch | None = None) -> AlertWatch:
    watch = AlertWatch(run) if watch is None else watch
    for step, loss in enumerate(losses, start=first):
        watch.note_step(step, float(loss))
    return watch


def noise(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(0, 0.05, count)


def test_a_loss_that_falls_is_no_plateau_and_one_that_stays_is_told_once_until_it_has_fallen_again(run: RunDir) -> None:
    falling = 5 - np.linspace(0, 2, 400) + noise(400)
    watch = watched(run, falling)
    assert told(run) == []
    watched(run, 3 + noise(400, 1), 401, watch)
    [(alert, step)] = told(run)
    assert alert == "plateau"
    assert 401 + STRETCH <= step <= 401 + 2 * STRETCH
    watched(run, 3 - np.linspace(0, 1, 200) + noise(200, 2), 801, watch)
    watched(run, 2 + noise(400, 3), 1001, watch)
    assert [alert for alert, _ in told(run)] == ["plateau", "plateau"]


def test_the_standard_error_is_that_of_means_of_white_noise() -> None:
    draws = np.array([fall(noise(2 * STRETCH, seed)) for seed in range(300)])
    assert draws[:, 0].std() == pytest.approx(0.05 * math.sqrt(2 / STRETCH), rel=0.15)
    assert math.sqrt((draws[:, 1] ** 2).mean()) == pytest.approx(0.05 * math.sqrt(2 / STRETCH), rel=0.15)


def test_a_loss_that_is_not_finite_is_told_when_it_begins(run: RunDir) -> None:
    watched(run, [3.0, math.nan, math.nan, 3.0, math.inf])
    assert told(run) == [("not finite", 2), ("not finite", 5)]


@pytest.mark.parametrize("steps", [True, "many", None, 10**9, -1])
def test_a_damaged_experiment_is_watched_all_the_same(run: RunDir, steps: Any) -> None:
    write_record(run.experiment, {"steps": steps, "tracking": 3})
    watched(run, [3.0, math.nan])
    assert told(run) == [("not finite", 2)]


class Hook(BaseHTTPRequestHandler):
    """A webhook that keeps what it is told, and answers with the code at the end of its address."""

    kept: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).kept.append({"path": self.path, **body})
        self.send_response(int(self.path.rpartition("-")[2]))
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Return the address of a webhook up to the code that it answers with, and the list of what it was told."""
    handler = type("KeepingHook", (Hook,), {"kept": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook-q8Zr3vT1-", handler.kept  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


def test_all_four_alerts_are_posted_and_secrets_are_masked(
    run: RunDir, hook: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, kept = hook
    monkeypatch.setenv(WEBHOOK, f"{address}200")
    monkeypatch.setenv("SERVICE_PASSWORD", "tr0ub4dor-and-3")
    watch = watched(run, [math.nan])
    watch.tell("plateau", "The loss stays.", 2)
    watch.note_state("running", "")
    watch.note_state("failed", f"rank 0: tr0ub4dor-and-3 was refused by {address}200")
    watch.note_state("finished", "1000 steps.")
    eventually(lambda: len(kept) == 4)
    assert {each["alert"] for each in kept} == {"not finite", "plateau", "failed", "ended"}
    assert {each["run"] for each in kept} == {"bert-1"}
    [failed] = [each for each in kept if each["alert"] == "failed"]
    assert failed["text"] == failed["content"]
    assert failed["text"].startswith("bert-1: The run has failed. rank 0: *** was refused by ***")
    eventually(lambda: run.log("alerts").read_text().count("posted\n") == 4)
    stored = b"".join(path.read_bytes() for path in run.path.rglob("*") if path.is_file())
    assert b"q8Zr3vT1" not in stored, "the address is a secret"


def test_a_webhook_that_fails_is_noted_without_its_address_and_disturbs_nothing(
    run: RunDir, hook: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        closed = free.getsockname()[1]
    failing = {
        f"{hook[0]}500": "not posted: the webhook answered 500 Internal Server Error",
        f"http://127.0.0.1:{closed}/hook-q8Zr3vT1": "not posted: the webhook was not reached: [Errno 111] Connection",
        "http://[q8Zr3vT1": "not posted: $WORKBENCH_WEBHOOK is no address",
        "file:///etc/q8Zr3vT1": "not posted: $WORKBENCH_WEBHOOK is no address that begins with https://",
    }
    for address, said in failing.items():
        monkeypatch.setenv(WEBHOOK, address)
        AlertWatch(run).tell("plateau", "The loss stays.", 2)
        eventually(lambda: said in run.log("alerts").read_text(), run.log("alerts").read_text)  # noqa: B023
        run.log("alerts").unlink()
    monkeypatch.setattr(processes, "start_detached", lambda *_, **__: 1 / 0)
    AlertWatch(run).tell("plateau", "The loss stays.", 3)
    assert len(told(run)) == len(failing) + 1


def test_nothing_is_sent_where_nobody_has_asked_for_it(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WEBHOOK, raising=False)
    monkeypatch.setattr(processes, "start_detached", lambda *_, **__: pytest.fail("a process was started"))
    watched(run, [math.nan]).note_state("failed", "rank 0")
    assert told(run) == [("not finite", 1)]
