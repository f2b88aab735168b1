"""What happens to real ranks when a training goes wrong: it diverges, is rewound, or its disk is full."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.distributed.real_worker import Ranks, curve, directory, eventually, experiment, plan, reach, trained
from workbench.execution.checkpoint.files import complete_checkpoints, step_of
from workbench.execution.checkpoint.model_export import export_checkpoint
from workbench.rundir import read_events, read_json
from workbench.runs import Run
from workbench.runs.launching import run_directory
from workbench.runs.launching.launcher import prepare

DIVERGING = {"learning_rate": 1e30, "warmup_steps": 2, "steps": 8, "checkpoint_every": 1, "keep_checkpoints": 2}
"""The first step of the warm-up changes nothing, and the second one destroys the weights."""


def test_a_loss_that_is_not_finite_fails_the_run_and_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    asked = experiment(**DIVERGING)
    run = directory(tmp_path / "run", asked, plan(asked, pipeline=2))
    ranks = Ranks(run, 2)
    for process in ranks.processes:
        process.join(60)
    assert [process.exitcode for process in ranks.processes] == [1, 1]
    error, logged = read_json(run.error(0)), curve(run)
    step = max(logged)
    assert error["type"] == "NonFiniteLoss"
    assert f"Step {step} has loss " in error["message"]
    assert not all(math.isfinite(value) for value in logged[step])
    assert all(math.isfinite(value) for earlier in range(1, step) for value in logged[earlier])
    assert Run(run.path).status.state == "failed"
    last = complete_checkpoints(run.checkpoints)[-1]
    assert step_of(last) == step - 1
    [weights] = [file for file in export_checkpoint(last, tmp_path / "model") if file.suffix == ".safetensors"]
    assert all(bool(tensor.isfinite().all()) for tensor in load_file(weights).values())


def test_a_run_that_asks_for_it_trains_on_without_a_finite_loss(tmp_path: Path) -> None:
    asked = experiment(**DIVERGING, stop_on_non_finite=False)
    run = trained(tmp_path, asked, plan(asked))
    assert len(curve(run)) == 8
    assert not math.isfinite(curve(run)[8][0])
    assert [event["state"] for event in read_events(run.events) if event["type"] == "status"][-1] == "finished"


def test_a_run_that_was_rewound_never_returns_to_the_curve_that_it_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path))
    asked = experiment(steps=12, checkpoint_every=3, keep_checkpoints=9)
    chosen = plan(asked)
    run = prepare(asked, chosen, directory=tmp_path / "run")
    Ranks(run, 1).wait()
    whole = curve(run)
    with monkeypatch.context() as killed:  # between setting the later checkpoints aside and the rest
        killed.setattr(run_directory, "what_was_started", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(asked, chosen, resume=run.checkpoint(3))
    assert run_directory.checkpoint_of(run.path) == run.checkpoint(3)
    prepare(asked, chosen, resume=run.checkpoint(3))
    ranks = Ranks(run, 1)
    eventually(lambda: 3 < max(curve(run)) < 12)
    ranks.kill(0)
    assert run.checkpoint(12) not in complete_checkpoints(run.checkpoints)
    assert (run.path / "attempts" / "1" / "checkpoints" / "step-00000012" / "complete.json").exists()
    prepare(asked, chosen, resume=run.path)
    Ranks(run, 1).wait()
    assert curve(run) == whole


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupt_or_a_closed_terminal_saves_as_a_request_to_stop_does(tmp_path: Path, number: int) -> None:
    asked = experiment(steps=100_000)
    run = directory(tmp_path, asked, plan(asked))
    ranks = Ranks(run, 1)
    reach(run, 2)
    os.kill(ranks.processes[0].pid or 0, number)
    ranks.wait()
    [end] = [event for event in read_events(run.events) if event["type"] == "end"]
    assert [step_of(path) for path in complete_checkpoints(run.checkpoints)] == [end["steps"]]
    assert Run(run.path).status.state == "stopped"
