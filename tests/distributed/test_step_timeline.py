"""A recorded step has every action of the schedule once, in the schedule's order, none before its inputs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.real_worker import experiment, plan, trained
from workbench.execution.step_timeline import FIRST_RECORDED
from workbench.figures.run_views import measured_timeline
from workbench.figures.timeline_view import timeline
from workbench.planning.prediction import timeline as simulated
from workbench.rundir import read_events


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
    drawn = timeline(chosen, measured).data
    predicted, recorded_too = ({trace.name for trace in drawn if trace.yaxis == axis} for axis in ("y", "y2"))
    assert predicted == recorded_too | {"exposed communication", "update"}, "a recorded step has the schedule's actions"
    assert "forward" in predicted
