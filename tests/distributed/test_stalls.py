"""A rank that hangs is found: which one, since when, where the others wait, and the end of the run after a limit."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import worlds
from tests.distributed.own_machine import own_machine
from tests.distributed.real_worker import ENDLESS, experiment, plan, reach
from tests.distributed.test_launch import forked
from tests.patience import PATIENCE_S, Clock, eventually
from workbench.execution import heartbeat
from workbench.record.rundir import RunDir, read_json
from workbench.runs.launching import fork_server, processes, stalls, supervisor
from workbench.runs.launching.launcher import Attempt, write_attempt
from workbench.runs.registry import list_runs
from workbench.runs.run import Run
from workbench.widgets.dashboard import rows_html
from workbench.widgets.run_reader import RunReader

ROOT = Path(__file__).parents[2]


class Supervised(threading.Thread):
    """A supervisor in a thread of this process, whose watch for stalls has a clock that the test turns."""

    def __init__(self, run: RunDir, world: int) -> None:
        super().__init__(daemon=True)
        self.run_dir, self.clock, self.looks, self.answers_from = run, Clock(), 0, 0
        self.record: Any = {
            "plan": {"world": world, "device_type": "cpu", "precision": "fp32"},
            "worker": processes.WORKER,
            "devices": ("cpu",),
        }
        self.time, self.monotonic = self.clock.time, self.clock.monotonic

    def run(self) -> None:
        supervisor.supervise(self.run_dir, self.record, supervisor.Nodes())

    def fork(self, command: list[str], environment: dict[str, str]) -> Supervised:
        """Start the launcher, and return what the supervisor waits for: this object."""
        self.launcher = forked(command, environment, self.run_dir.log("launcher"))
        self.pid = self.launcher.pid
        return self

    def wait(self, seconds: float) -> int | None:
        """Wait for the end of the launcher, as its supervisor does between two looks at the ranks."""
        self.looks += 1
        self.launcher.join(seconds)
        return self.launcher.exitcode

    def turn(self, seconds: float) -> None:
        """Turn the clock, and return when the supervisor has looked at it."""
        self.clock.now += seconds
        seen = self.looks
        eventually(lambda: self.looks > seen + 1 or not self.is_alive())

    def stop_rank(self, pid: int) -> None:
        """Stop the process of rank 1; rank 0 will write its stacks behind those that it has written."""
        file = self.run_dir.stack(0)
        self.answers_from = file.stat().st_size if file.exists() else 0
        os.kill(pid, signal.SIGSTOP)

    def sleep(self, seconds: float) -> None:  # clock: its own, which the test turns
        """Wait, in place of the watch, until rank 0 has written all of its stacks; they end in those of its module."""
        written = self.run_dir.stack(0)
        eventually(lambda: written.read_bytes()[self.answers_from :].decode().endswith(worlds.OUTERMOST))
        self.clock.now += seconds


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder of runs."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield from own_machine(tmp_path, monkeypatch)


@pytest.mark.usefixtures("folder")
@pytest.mark.representative
def test_a_stopped_rank_is_named_with_what_waits_for_it_and_ends_the_run_after_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = experiment(steps=ENDLESS, checkpoint_every=None)
    run = Run(write_attempt(Attempt(asked, plan(asked, pipeline=2))))
    supervised = Supervised(run.directory, 2)
    monkeypatch.setattr(stalls, "time", supervised)
    monkeypatch.setattr(fork_server, "fork", supervised.fork)
    monkeypatch.setattr(heartbeat, "ANSWER_S", PATIENCE_S)
    supervised.start()
    reach(run.directory, 5)
    assert run.status.state == "running", run.logs("launcher")
    pids = {record["rank"]: record["pid"] for record in processes.rank_records(run.directory)}

    supervised.stop_rank(pids[1])
    eventually(lambda: run.status.state == "stalled" or supervised.turn(20))
    message = run.status.message
    assert re.search(r"Step [\d,]+ has made no progress for \d+ min \d\d s, and steps take ", message), message
    assert "Rank 1 (stage 1) does not answer: its process is stopped (SIGSTOP)." in message
    assert re.search(r"Waiting: rank 0 \(stage 0\) in \w+ at \w+/\w+\.py:\d+\.", message)
    assert "The run ends after 30 min 00 s without progress." in message
    assert "torch/distributed" in run.directory.stack(0).read_text()
    assert (run.directory.stacks / "0.collectives.json").exists()
    facts = run.row()
    assert (facts["state"], facts["eta_s"]) == ("stalled", None)
    assert f"{run.name}  stalled" in repr(list_runs())
    snapshot = RunReader(run.path).read()
    assert snapshot.eta_s is None
    assert "Rank 1 (stage 1) does not answer" in rows_html([snapshot], [run.name])

    os.kill(pids[1], signal.SIGCONT)
    reach(run.directory, facts["step"] + 1)
    supervised.turn(59)
    assert run.status.state == "running"
    assert run.row()["eta_s"] is not None

    supervised.stop_rank(pids[1])
    eventually(lambda: run.status.state == "stalled" or supervised.turn(20))
    supervised.turn(1600)
    assert run.status.state == "stalled"
    supervised.turn(300)
    supervised.join(PATIENCE_S)
    assert run.status.state == "failed"
    assert run.status.message.startswith("rank 1 (stage 1): Stalled: Step ")
    error = read_json(run.directory.error(1))
    assert "rank 1 (stage 1):\nno answer" in error["traceback"]
    assert re.search(r"rank 0 \(stage 0\):\n.*torch/distributed", error["traceback"], re.DOTALL)
    assert not processes.live_workers(run.directory)
