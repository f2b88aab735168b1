"""A run in the calling process: a breakpoint stops here, an exception is raised here, and the values are the same."""

from __future__ import annotations

import itertools
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import PartialState

import workbench as wb
from tests.distributed import real_worker
from tests.distributed.real_worker import experiment, plan, trained
from workbench.base.errors import NonFiniteLoss, WorkbenchError
from workbench.execution.blocks.step_context import FIRST_RECORDED
from workbench.experiment import Experiment
from workbench.figures.timeline_view import draw_timeline, measured_timeline
from workbench.planning.prediction import timeline as simulated
from workbench.record.event_log import read_events
from workbench.runs.launching import processes

SEEN: list[tuple[int, str]] = []
"""Process and type of tensor at each stop at the breakpoint in the model."""


class Stopping(torch.nn.Module):
    """A model with a breakpoint in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = real_worker.experiment().model.build()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        breakpoint()
        loss: torch.Tensor = self.inner(input_ids=input_ids, labels=labels)["loss"]
        return loss


def stop() -> None:
    """Stand for the debugger, which looks at the frame of the breakpoint."""
    SEEN.append((os.getpid(), type(sys._getframe(1).f_locals["input_ids"]).__name__))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(sys, "breakpointhook", stop)
    SEEN.clear()
    return tmp_path


def asked(steps: int = 4, **changes: Any) -> Experiment:
    return real_worker.experiment(
        **{"steps": steps, "checkpoint_every": 2, "warmup_steps": 1, "lr_schedule": "constant", **changes}
    )


def state() -> dict[str, Any]:
    """Return what a rank changes of its process."""
    return {
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "random": (torch.get_rng_state().tolist(), random.getstate()),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "group": torch.distributed.is_initialized(),
        "accelerate": dict(PartialState._shared_state),
    }


@pytest.mark.parametrize("stages", [1, 2])
def test_a_run_here_has_the_values_of_one_elsewhere_and_leaves_this_process_as_it_was(
    stages: int, folder: Path
) -> None:
    """The rank of a second stage is a process of its own."""
    experiment = asked()
    plan = real_worker.plan(experiment, pipeline=stages)
    before, children = state(), processes.descendants(os.getpid())  # some are of earlier tests, and are about to end
    here = wb.runs.debug(experiment, plan)
    assert state() == before
    assert [child for child in processes.descendants(os.getpid()) if child not in children] == []
    elsewhere = real_worker.trained(folder / "elsewhere", experiment, plan)
    assert real_worker.curve(here.directory) == real_worker.curve(elsewhere)
    assert (here.status.state, here.status.message, here.alive) == ("finished", "4 steps.", False)
    assert [each.step for each in here.checkpoints] == [2, 4]
    assert not here.directory.rank(0).exists()
    assert here.directory.rank(1).exists() == (stages == 2)


def test_a_run_here_is_resumed_here_and_evaluated_as_any_other() -> None:
    experiment = asked(eval_data=real_worker.Words(), eval_every=2, eval_samples=8)
    plan = real_worker.plan(experiment)
    whole, part = wb.runs.debug(experiment, plan), wb.runs.debug(experiment.replace(steps=2), plan)
    resumed = wb.runs.debug(experiment, plan, resume=part)
    assert resumed.path == part.path
    assert real_worker.curve(resumed.directory) == real_worker.curve(whole.directory)
    assert resumed.evaluate().loss == pytest.approx(whole.evaluations().eval_loss[-1], rel=1e-6)


def test_a_breakpoint_in_the_model_stops_here_where_it_is_captured_and_where_it_computes() -> None:
    experiment = asked(model=Stopping)
    plan = real_worker.plan(experiment)
    SEEN.clear()
    assert wb.runs.debug(experiment, plan).status.state == "finished"
    assert {process for process, _ in SEEN} == {os.getpid()}
    assert {kind for _, kind in SEEN} == {"FakeTensor", "Tensor"}


def test_an_exception_of_the_training_is_raised_here_with_its_own_frames_and_written_down() -> None:
    experiment = asked(learning_rate=1e30, optimizer="sgd")
    with pytest.raises(NonFiniteLoss) as raised:
        wb.runs.debug(experiment, real_worker.plan(experiment))
    assert "worker.py" in {Path(frame.path).name for frame in raised.traceback}
    [run] = wb.list_runs()
    assert (run.status.state, run.alive) == ("failed", False)
    assert str(raised.value).splitlines()[0] in str(run.error())


def test_what_goes_wrong_after_the_end_was_logged_does_not_fail_a_run_that_has_finished(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Accelerator, "end_training", lambda _: 1 / 0)
    experiment = asked(steps=2, global_batch=2)
    run = wb.runs.debug(experiment, real_worker.plan(experiment))
    assert str(run.status).startswith("finished: 2 steps")
    assert run.error() is None
    assert [each.step for each in run.checkpoints] == [2]
    assert "ZeroDivisionError" in capfd.readouterr().err, "and is told"


def test_a_process_that_has_an_accelerator_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PartialState._shared_state, "device", "cpu")
    experiment = asked()
    with pytest.raises(WorkbenchError, match=r"Restart it, or launch the run .*wb\.launch"):
        wb.runs.debug(experiment, real_worker.plan(experiment))
    assert not wb.list_runs()


def ends(lanes: Any) -> dict[tuple[str, int, int], Any]:
    return {(action.type, action.stage, action.micro_batch): action for lane in lanes for action in lane}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_recorded_step_ran_the_schedule_that_the_plan_draws(tmp_path: Path, schedule: str) -> None:
    asked = experiment(steps=FIRST_RECORDED + 2)
    chosen = plan(asked, pipeline=2, schedule=schedule)
    events = read_events(trained(tmp_path / "run", asked, chosen).events)
    recorded = [event for event in events if event["type"] == "actions"]
    assert [(event["rank"], event["step"]) for event in sorted(recorded, key=lambda e: e["rank"])] == [
        (0, FIRST_RECORDED + 1),
        (1, FIRST_RECORDED + 1),
    ]
    measured = measured_timeline(events)
    assert measured is not None
    for planned_lane, measured_lane in zip(simulated(chosen).lanes, measured.lanes, strict=True):
        order = [(a.type, a.stage, a.micro_batch) for a in planned_lane]
        assert [(a.type, a.stage, a.micro_batch) for a in measured_lane] == order
        assert all(a.end_ms <= b.start_ms for a, b in itertools.pairwise(measured_lane))
    found = ends(measured.lanes)
    for _, stage, micro_batch in (key for key in found if key[0] == "F" and key[1] > 0):
        assert found["F", stage - 1, micro_batch].end_ms <= found["F", stage, micro_batch].start_ms + 1.0
    drawn = draw_timeline(chosen, measured).data
    predicted, recorded_too = ({trace.name for trace in drawn if trace.yaxis == axis} for axis in ("y", "y2"))
    assert predicted == recorded_too | {"exposed communication", "update"}, "a recorded step has the schedule's actions"
    assert "forward" in predicted
