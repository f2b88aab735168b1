"""What happens to real ranks when a training goes wrong: it diverges, is rewound, or its disk is full."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import pytest

from tests.distributed.real_worker import Ranks, curve, directory, eventually, experiment, plan, reach
from workbench.execution.checkpoint.files import complete_checkpoints, step_of
from workbench.planning.plan import Plan
from workbench.rundir import RunDir, read_events
from workbench.runs.launching import run_directory
from workbench.runs.launching.launcher import prepare
from workbench.runs.launching.run_directory import Attempt
from workbench.runs.run import Run

DIVERGING = {"learning_rate": 1e30, "warmup_steps": 2, "steps": 100_000}
"""The first step of the warm-up changes nothing, and the second one destroys the weights."""


@pytest.fixture(scope="module")
def chosen() -> Plan:
    """Return the plan of every run here: it depends on none of the fields that they change."""
    return plan(experiment())


def assert_saved_and_stopped(run: RunDir, ranks: Ranks, number: int) -> None:
    """Send a signal to the only rank, and assert that it has stopped with a checkpoint of its last step."""
    os.kill(ranks.processes[0].pid or 0, number)
    ranks.wait()
    [end] = [event for event in read_events(run.events) if event["type"] == "end"]
    assert step_of(complete_checkpoints(run.checkpoints)[-1]) == end["steps"]
    assert Run(run.path).status.state == "stopped"


def test_a_run_that_asks_for_it_trains_on_without_a_finite_loss_and_an_interrupt_saves_it(
    tmp_path: Path, chosen: Plan
) -> None:
    run = directory(tmp_path, experiment(**DIVERGING, stop_on_non_finite=False), chosen)
    ranks = Ranks(run, 1)
    reach(run, 8)
    assert not math.isfinite(curve(run)[8][0])
    assert_saved_and_stopped(run, ranks, signal.SIGINT)


def test_a_closed_terminal_saves_as_a_request_to_stop_does(tmp_path: Path, chosen: Plan) -> None:
    run = directory(tmp_path, experiment(steps=100_000), chosen)
    ranks = Ranks(run, 1)
    reach(run, 2)
    assert_saved_and_stopped(run, ranks, signal.SIGHUP)


def test_a_run_that_was_rewound_never_returns_to_the_curve_that_it_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: Plan
) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path))
    asked = experiment(steps=12, checkpoint_every=3, keep_checkpoints=9)
    run = prepare(Attempt(asked, chosen, directory=tmp_path / "run"))
    Ranks(run, 1).wait()
    whole = curve(run)
    with monkeypatch.context() as killed:  # between setting the later checkpoints aside and the rest
        killed.setattr(run_directory, "what_was_started", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(Attempt(asked, chosen, resume=run.checkpoint(3)))
    assert run_directory.checkpoint_of(run.path) == run.checkpoint(3)
    prepare(Attempt(asked, chosen, resume=run.checkpoint(3)))
    ranks = Ranks(run, 1)
    eventually(lambda: 3 < max(curve(run)) < 12)
    ranks.kill(0)
    assert run.checkpoint(12) not in complete_checkpoints(run.checkpoints)
    assert (run.path / "attempts" / "1" / "checkpoints" / "step-00000012" / "complete.json").exists()
    prepare(Attempt(asked, chosen, resume=run.path))
    Ranks(run, 1).wait()
    assert curve(run) == whole
