"""Efficiency against linear: bars are device time relative to the first plan, and their parts make up the gap."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from plan_values import H200, plan_of

import workbench as wb
from workbench.errors import InvalidArgument, PlanMismatch
from workbench.figures.figure import picture
from workbench.planning.plan import Plan
from workbench.sweeps.measured import MeasuredCell, MeasuredGrid

ONE = plan_of(cluster=wb.Cluster.of("h200", gpus=1))
REPLICAS = [plan_of(cluster=H200, pipeline=1, tensor=1, zero=zero) for zero in (0, 3)]
NETWORK = plan_of(cluster=wb.Cluster.of("h200", gpus=32), pipeline=1, tensor=1, zero=3)


def measured(plan: Plan, step_ms: float | None, state: str = "finished") -> MeasuredCell:
    return MeasuredCell({"zero": plan.zero}, plan, state, step_ms, "Out of memory." if state == "failed" else "")


def traces(points: Sequence[Plan | MeasuredCell]) -> dict[str, Any]:
    return {trace.name: trace for trace in wb.figures.scaling_efficiency(points).data}


def test_the_bars_are_the_device_time_of_a_token_and_their_parts_sum_to_it():
    plans = [ONE, *REPLICAS, NETWORK]
    drawn = traces(plans)
    heights = [sum(trace.y[at] for trace in drawn.values()) for at in range(len(plans))]
    expected = [plan.world * plan.prediction.step_ms / ONE.prediction.step_ms for plan in plans]
    assert heights == pytest.approx(expected, rel=0.01)
    communication = drawn["exposed communication"].y
    assert communication[0] == 0
    assert communication[3] > communication[2] > 0, "a network between nodes is slower than links within one"
    figure = wb.figures.scaling_efficiency(plans)
    assert list(figure.data[0].text) == [f"{1 / height:.0%}" for height in expected]
    assert not figure.layout.annotations, "words on a bar belong to it: it keeps its colour in a dark theme"
    assert list(figure.layout.xaxis.ticktext) == ["1", "4<br>ZeRO 0", "4<br>ZeRO 3", "32<br>ZeRO 3"]
    assert picture(figure)


def test_a_batch_of_another_size_is_compared_by_the_token():
    larger = plan_of(cluster=H200, pipeline=1, tensor=1, zero=3, global_batch=128)
    heights = [sum(trace.y[1] for trace in traces([ONE, plan]).values()) for plan in (REPLICAS[1], larger)]
    step, other = REPLICAS[1].prediction.step_ms, larger.prediction.step_ms
    assert heights[1] / heights[0] == pytest.approx(other / step / 2, rel=0.01)
    assert heights[1] < heights[0], "a larger batch hides more communication"


def test_measured_points_stand_relative_to_the_measured_first_and_failed_ones_are_marked():
    points = [measured(ONE, 1000.0), measured(REPLICAS[0], 500.0), measured(REPLICAS[1], None, "failed"), NETWORK]
    drawn = traces(points)
    assert list(drawn["measured"].y) == [1.0, 2.0]
    assert "efficiency 50%" in drawn["measured"].text[1]
    assert list(drawn["failed"].text) == ["Out of memory."]
    assert "measured" not in traces([ONE, *points[1:]]), "without a measured first point there is nothing to relate to"


def test_a_pipeline_is_named_by_its_degrees():
    pipeline = plan_of(cluster=H200, pipeline=4)
    assert wb.figures.scaling_efficiency([ONE, pipeline]).layout.xaxis.ticktext[1] == "4<br>PP 4 × DP 1"


def test_no_plan_and_plans_of_two_models_are_refused():
    with pytest.raises(InvalidArgument, match="the plan on one device first"):
        wb.figures.scaling_efficiency([])
    other = Plan.from_json({**REPLICAS[0].to_json(), "model": "other", "signature": "1" * 16})
    with pytest.raises(PlanMismatch, match="layered and other"):
        wb.figures.scaling_efficiency([ONE, other])
    with pytest.raises(InvalidArgument, match="cannot use points"):
        wb.figures.scaling_efficiency(ONE)


@pytest.mark.parametrize(
    ("predicted", "correlation", "regret"),
    [
        ((10.0, 20.0, 30.0), 1.0, 0.0),
        ((30.0, 20.0, 10.0), -1.0, 2.0),
        ((10.0, 30.0, 20.0), 0.5, 0.0),
        ((10.0, 10.0, 20.0), 3**0.5 / 2, 1.0),
        ((10.0, 10.0, 10.0), float("nan"), 2.0),
    ],
)
def test_a_prediction_that_is_the_same_for_all_cells_earns_neither_correlation_nor_regret(
    monkeypatch: pytest.MonkeyPatch, predicted: Sequence[float], correlation: float, regret: float
) -> None:
    plans = [dataclasses.replace(ONE, prediction=dataclasses.replace(ONE.prediction, step_ms=ms)) for ms in predicted]
    cells = tuple(measured(plan, 10.0 * (1 + at)) for at, plan in enumerate(plans))
    monkeypatch.setattr(MeasuredGrid, "measured", lambda _: cells)
    found = MeasuredGrid.__new__(MeasuredGrid)
    assert found.rank_correlation == pytest.approx(correlation, nan_ok=True)
    assert found.regret == pytest.approx(regret)
