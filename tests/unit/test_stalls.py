"""A stall is told from what takes long, and the rank that the others wait for is found in their stacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_runs import make_run

from workbench.execution.heartbeat import Heartbeat, read_beat
from workbench.rundir import RunDir, append_event, process_record, read_json, this_process, write_json
from workbench.runs.launching import stalls
from workbench.runs.launching.stalls import StallWatch
from workbench.runs.run import Run

ROOT = Path(__file__).parents[2]
RANK = """
import sys, time
sys.path[:0] = {paths!r}
from pathlib import Path
from workbench.execution.heartbeat import Heartbeat
from workbench.rundir import RunDir
beat = Heartbeat(RunDir(Path({run!r})), {rank})
beat.begin({activity!r}, 7)

def loads_forever():
    print("ready", flush=True)
    time.sleep(600)

loads_forever()
"""
COLLECTIVE = """
import sys
sys.path[:0] = {paths!r}
exec(compile(open({code!r}).read(), "/env/torch/distributed/distributed_c10d.py", "exec"))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(stalls, "LOOK_S", 0.0)
    monkeypatch.setenv("WORKBENCH_STALL_S", "0.2")
    monkeypatch.setenv("WORKBENCH_STALL_LIMIT_S", "1000")
    return make_run(tmp_path, supervisor=this_process())


@pytest.fixture
def started(run: RunDir, tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Return two ranks: rank 0 is in a collective by the name of its file, and rank 1 loads data."""
    found = []
    for rank, activity in enumerate(("step", "batch")):
        code = RANK.format(paths=[str(ROOT)], run=str(run.path), rank=rank, activity=activity)
        if rank == 0:
            (tmp_path / "rank.py").write_text(code)
            code = COLLECTIVE.format(paths=[str(ROOT)], code=str(tmp_path / "rank.py"))
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        write_json(run.rank(rank), {**process_record(process.pid), "rank": rank, "stage": rank})
        found.append(process)
    yield found
    for process in found:
        process.kill()
        process.wait()


def watched(run: RunDir, step_ms: float = 10.0, steps: int = 5) -> StallWatch:
    watch = StallWatch(run)
    for _ in range(steps):
        watch.note_step(step_ms)
    return watch


def status_after(watch: StallWatch, run: RunDir, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        watch.look()
        time.sleep(0.02)
    return Run(run.path).status.state


def test_the_rank_that_waits_for_nobody_is_named(run: RunDir, started: list[subprocess.Popen[str]]) -> None:
    assert status_after(watched(run), run, 0.6) == "stalled"
    message = Run(run.path).status.message
    assert "Step 7 has made no progress" in message
    assert "Rank 1 (stage 1) is busy in loads_forever at " in message
    assert "Waiting: rank 0 (stage 0) in loads_forever at distributed/distributed_c10d.py:" in message
    assert "Rank 0" not in message
    os.kill(started[1].pid, signal.SIGKILL)
    started[1].wait()
    assert status_after(watched(run), run, 7.0) == "stalled"
    assert "Rank 1 (stage 1) does not answer: its process is gone." in Run(run.path).status.message


@pytest.mark.usefixtures("started")
def test_after_the_limit_the_error_of_the_rank_holds_all_stacks(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_STALL_LIMIT_S", "0.5")
    watch = watched(run)
    assert not watch.look()
    status_after(watch, run, 1.0)
    assert watch.look()
    error = read_json(run.error(1))
    assert (error["rank"], error["type"]) == (1, "Stalled")
    assert error["traceback"].count("in loads_forever") == 2


@pytest.mark.parametrize(
    ("activity", "timed"),
    [
        ("starting", "batch"),
        ("evaluation", "batch"),
        ("checkpoint", "batch"),
        ("locating", "leaving"),
        ("ending", "leaving"),
    ],
)
def test_what_may_take_long_is_no_stall(activity: str, timed: str, run: RunDir) -> None:
    beat = Heartbeat(run, 0)
    write_json(run.rank(0), {**this_process(), "rank": 0, "stage": 0})
    beat.begin(activity, 3)
    watch = watched(run)
    assert status_after(watch, run, 0.4) == "running"
    beat.begin(timed)
    assert status_after(watch, run, 0.6) == "stalled"
    what = "Leaving the process groups after step 3" if timed == "leaving" else "Step 3"
    assert f"{what} has made no progress" in Run(run.path).status.message
    beat.begin("step", 4)
    assert status_after(watch, run, 0.1) == "running"
    assert (beaten := read_beat(run, 0)) is not None
    assert (beaten.step, beaten.activity) == (4, "step")


def test_neither_the_first_steps_nor_a_step_of_nine_medians_is_a_stall(run: RunDir) -> None:
    write_json(run.rank(0), {**this_process(), "rank": 0, "stage": 0})
    Heartbeat(run, 0).begin("step", 3)
    assert status_after(watched(run, steps=2), run, 0.4) == "running"
    assert status_after(watched(run, step_ms=200.0), run, 0.9) == "running"
    assert status_after(watched(run, step_ms=40.0), run, 0.6) == "stalled"


def test_a_stalled_run_has_no_time_left_in_any_table(run: RunDir) -> None:
    for step in (1, 2):
        append_event(run.events, "step", step=step, loss=1.0, step_ms=100.0)
    assert Run(run.path).row()["eta_s"] == pytest.approx(9.8)
    append_event(run.events, "status", state="stalled", message="Step 3 has made no progress.")
    facts = Run(run.path).row()
    assert (facts["state"], facts["eta_s"]) == ("stalled", None)
    assert "stalled, step 2 of 100" in repr(Run(run.path))
