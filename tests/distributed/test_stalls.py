"""A rank that hangs is found: which one, since when, where the others wait, and the end of the run after a limit."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.own_machine import own_machine
from tests.distributed.real_worker import experiment, plan
from tests.patience import eventually
from workbench.rundir import read_json
from workbench.runs.launching import processes
from workbench.runs.launching.launcher import Attempt, start_attempt
from workbench.runs.registry import list_runs
from workbench.runs.run import Run
from workbench.widgets.dashboard import rows_html
from workbench.widgets.run_reader import RunReader

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder of runs that stall after 2 s, and end after 8."""
    for name, value in (("WORKBENCH_STALL_S", 2), ("WORKBENCH_STALL_LIMIT_S", 8), ("PYTHONPATH", ROOT)):
        monkeypatch.setenv(name, str(value))
    yield from own_machine(tmp_path, monkeypatch)


@pytest.mark.usefixtures("folder")
def test_a_stopped_rank_is_named_with_what_waits_for_it_and_ends_the_run_after_the_limit() -> None:
    asked = experiment(steps=1_000_000, checkpoint_every=None)
    run = Run(start_attempt(Attempt(asked, plan(asked, pipeline=2))))
    eventually(lambda: run.row()["step"] >= 5 or run.status.final)
    assert run.status.state == "running", run.logs("launcher")
    pids = {record["rank"]: record["pid"] for record in processes.rank_records(run.directory)}

    os.kill(pids[1], signal.SIGSTOP)
    eventually(lambda: run.status.state == "stalled")
    message = run.status.message
    assert re.search(r"Step [\d,]+ has made no progress for \d+\.\d s, and steps take ", message)
    assert "Rank 1 (stage 1) does not answer: its process is stopped (SIGSTOP)." in message
    assert re.search(r"Waiting: rank 0 \(stage 0\) in \w+ at \w+/\w+\.py:\d+\.", message)
    assert "The run ends after 8.0 s without progress." in message
    assert "torch/distributed" in run.directory.stack(0).read_text()
    assert (run.directory.stacks / "0.collectives.json").exists()
    facts = run.row()
    assert (facts["state"], facts["eta_s"]) == ("stalled", None)
    assert f"{run.name}  stalled" in repr(list_runs())
    snapshot = RunReader(run.path).read()
    assert snapshot.eta_s is None
    assert "Rank 1 (stage 1) does not answer" in rows_html([snapshot], [run.name])

    os.kill(pids[1], signal.SIGCONT)
    stalled_at = facts["step"]
    eventually(lambda: run.status.state == "running" and run.row()["step"] > stalled_at)
    assert run.row()["eta_s"] is not None
    time.sleep(1.0)
    assert run.status.state == "running"

    os.kill(pids[1], signal.SIGSTOP)
    began = time.monotonic()
    eventually(lambda: run.status.final)
    assert time.monotonic() - began > 7.0
    assert run.status.state == "failed"
    assert run.status.message.startswith("rank 1 (stage 1): Stalled: Step ")
    error = read_json(run.directory.error(1))
    assert "rank 1 (stage 1):\nno answer" in error["traceback"]
    assert re.search(r"rank 0 \(stage 0\):\n.*torch/distributed", error["traceback"], re.DOTALL)
    assert not processes.live_workers(run.directory)
