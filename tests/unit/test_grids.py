"""Grids of plans, whose cells are plans or refusals, and efficiency against linear."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import pytest
from plan_values import plan_of

import workbench as wb
from workbench.base.errors import InvalidArgument, PlanInfeasible, PlanMismatch, UnknownParameter
from workbench.base.units import GIB, gib
from workbench.figures.figure import picture
from workbench.planning.plan import Plan
from workbench.sweeps.grid import MeasuredCell, MeasuredGrid, lost_time

MODEL = wb.models.gpt2(256, 4, 4, vocab_size=512, max_positions=128, name="tiny-gpt")
EXPERIMENT = wb.Experiment(model=MODEL, data=wb.data.corpus("demo", vocab_size=512), global_batch=64, seq_len=128)
H200 = wb.Cluster.of("h200", gpus=4)
SMALL = dataclasses.replace(
    H200, device=dataclasses.replace(H200.device, memory_bytes=int(0.17 * GIB), reserved_bytes=0)
)
"""Four devices that hold a micro-batch of 2 under this model, and not one of 32."""
FIXED = {"zero": 0, "recompute": "none", "schedule": "1f1b", "offload_optimizer": False, "cuda_graphs": False}
AXES = {"tensor": [1, 2], "pipeline": [1, 2, 4], "micro_batch": [2, 32], **FIXED}


@pytest.fixture(scope="module")
def grid() -> wb.sweeps.Grid:
    return wb.grid(EXPERIMENT, SMALL, **AXES)


@pytest.mark.representative
def test_every_cell_is_the_plan_of_its_choices_or_its_refusal(grid):
    assert len(grid) == 2 * 3 * 2
    assert grid.cells[1].choices == {"tensor": 1, "pipeline": 1, "micro_batch": 32, **FIXED}
    for cell in (grid.best, grid.worst):
        planned = wb.plan(EXPERIMENT, SMALL, **cell.choices)
        assert dataclasses.replace(cell.plan, candidates=()) == dataclasses.replace(planned, candidates=())
        assert {name: getattr(planned, name) for name in cell.choices} == cell.choices
    steps = [cell.step_ms for cell in grid.feasible]
    assert steps == sorted(steps)
    assert grid.ratio == pytest.approx(steps[-1] / steps[0])
    assert grid.ratio > 1
    assert [cell.plan is None for cell in grid] == sorted(cell.plan is None for cell in grid.cells)


def test_a_cell_that_does_not_fit_says_which_device_overflows_and_by_how_much(grid):
    cell = grid.cell(tensor=2, pipeline=1, micro_batch=32)
    needed = wb.plan(EXPERIMENT, H200, **cell.choices).peak_bytes
    over = needed - SMALL.device.usable_bytes
    assert cell.overflow_bytes == pytest.approx(over, abs=1)
    assert cell.reason == f"stage 0 needs {gib(needed)}, {gib(over)} more than each H200 offers"
    piped = grid.cell(tensor=2, pipeline=2, micro_batch=32)
    assert re.match(r"stage 1 needs [\d.]+ GiB, ", piped.reason), "the last stage has the logits"


def test_a_cell_whose_degrees_do_not_divide_is_one_sentence(grid):
    cell = grid.cell(tensor=2, pipeline=4, micro_batch=2)
    assert cell.reason == "pipeline=4 × tensor=2 uses 8 of 4 devices"
    assert cell.overflow_bytes is None
    assert cell.refusal.startswith(cell.reason)


def test_the_reason_is_the_part_that_costs_most_time(grid):
    plan = grid.best.plan
    for part, words in {"bubble_ms": "bubble", "host_ms": "host-bound", "communication_ms": "communication"}.items():
        parts = dict.fromkeys(("bubble_ms", "host_ms", "communication_ms", "optimizer_ms"), 0.0)
        lost = dataclasses.replace(plan.prediction, step_ms=100.0, compute_ms=57.0, **{**parts, part: 43.0})
        assert lost_time(dataclasses.replace(plan, prediction=lost)) == (words, 0.43)
    even = dataclasses.replace(plan.prediction, step_ms=100.0, compute_ms=100.0, **parts | {"communication_ms": 0.0})
    slow, quick = (dataclasses.replace(plan.stages[0], forward_ms=ms, backward_ms=0.0) for ms in (3.0, 1.0))
    uneven = dataclasses.replace(plan, prediction=even, pipeline=2, stages=(quick, slow))
    assert lost_time(uneven) == ("uneven stages", pytest.approx(1 / 3))


def test_the_sentences_name_the_best_and_the_worst(grid):
    headline, count, best, worst = repr(grid).split("\n")
    assert headline == "tiny-gpt on 4 × H200, batch 64"
    fixed = "zero=0, recompute='none', schedule='1f1b', offload_optimizer=False, cuda_graphs=False"
    assert count == f"12 cells with {fixed}, {len(grid.feasible)} of them with a plan."
    assert best.startswith("Best: tensor=")
    assert worst.startswith("Worst: tensor=")
    assert f"{grid.ratio:.2f} times the best." in worst
    assert grid.best.reason in best
    assert grid._repr_html_().count("<tr>") == 13
    assert [row["step_ms"] for row in grid.rows()] == [
        None if cell.plan is None else cell.step_ms for cell in grid.cells
    ]


def test_the_heat_map_frames_the_best_and_the_worst(grid):
    figure = wb.figures.heat_map(grid)
    assert (figure.data[0].colorscale[-1][1], figure.data[0].reversescale) == ("#fde725", None), "the fastest is yellow"
    [cells] = figure.data
    assert list(cells.x) == ["2", "32"]
    assert (cells.y[0], len(cells.y)) == ("TP 1 · PP 1", 6)
    assert sorted(value for line in cells.z for value in line if value == value)[-1] == 1.0
    words = [note.text for note in figure.layout.annotations]
    assert sum(word.startswith("+ ") for word in words) == sum(cell.overflow_bytes is not None for cell in grid.cells)
    assert len(words) == sum(cell.plan is None for cell in grid.cells), "the others have a dash"
    assert set(words) >= {"–"}
    assert "uses 8 of 4 devices" in cells.customdata[5][0]
    _, best, _, worst = figure.layout.shapes
    assert cells.z[int(best.y0 + 0.5)][int(best.x0 + 0.5)] == 1.0
    assert cells.z[int(worst.y0 + 0.5)][int(worst.x0 + 0.5)] == pytest.approx(1 / grid.ratio)
    assert list(wb.figures.heat_map(grid, x="tensor").data[0].x) == ["1", "2"]
    assert picture(figure)[:4] == b"\x89PNG"


def test_a_grid_without_a_plan_is_drawn_and_has_no_best():
    grid = wb.grid(EXPERIMENT, H200, tensor=[4], pipeline=[4], micro_batch=[1, 2])
    assert not grid.feasible
    assert not wb.figures.heat_map(grid).layout.shapes
    with pytest.raises(PlanInfeasible, match=r"None of the 2 cells has a plan\. The first says: pipeline=4 × tensor=4"):
        _ = grid.best


@pytest.mark.parametrize(
    ("axes", "sentence"),
    [
        ({}, "A grid needs an axis: "),
        ({"tensor": []}, "The axis 'tensor' has no values. Give a list, such as tensor="),
        ({"tenser": [1]}, "'tenser' is no choice of a plan. Did you mean 'tensor'?"),
        (
            {"learning_rate": [1e-3]},
            "'learning_rate' is no choice of a plan. It is a value of the experiment: wb.sweep(",
        ),
        ({"tensor": range(1, 80), "pipeline": range(1, 80)}, "The grid has 6,241 cells, more than 5,000."),
    ],
)
def test_wrong_axes_are_refused_in_one_sentence(axes, sentence):
    with pytest.raises(InvalidArgument) as caught:
        wb.grid(EXPERIMENT, H200, **axes)
    assert str(caught.value).startswith(sentence)


def test_wrong_values_cells_and_directions_are_refused(grid):
    with pytest.raises(PlanInfeasible, match="tensor=0 must be 1 or more"):
        wb.grid(EXPERIMENT, H200, tensor=[1, 0])
    with pytest.raises(InvalidArgument, match=r"The grid has no cell \{'tensor': 3\}\. Give one value of each axis"):
        grid.cell(tensor=3)
    with pytest.raises(UnknownParameter, match=r"'data' cannot be an axis here\. Give x, one of tensor, pipeline"):
        wb.figures.heat_map(grid, x="data")


def test_the_v100_is_in_the_table_with_both_memories():
    small, large = (wb.Cluster.of(name, gpus=8).device for name in ("v100-16gb", "v100-32gb"))
    assert small.usable_bytes < 14 * GIB < 28 * GIB < large.usable_bytes
    assert small.peak_flops == large.peak_flops


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


def test_a_time_that_was_measured_on_a_busy_machine_decides_nothing():
    step_ms = ONE.prediction.step_ms

    def cells(times: float, load: float = 1.0) -> list[MeasuredCell]:
        return [
            dataclasses.replace(measured(plan, times * plan.prediction.step_ms), load=load) for plan in (ONE, *REPLICAS)
        ]

    judged = {(times, load): wb.sweeps.verdict(True, cells(times, load)) for times in (1.0, 4.2) for load in (1.0, 4.5)}
    assert judged[1.0, 1.0] == "confirmed"
    assert judged[1.0, 4.5] == judged[4.2, 4.5] == "not judged: the machine was busy (4.5 processes wanted each core)"
    assert "the median step took 4.2 times as long as predicted" in judged[4.2, 1.0]
    assert wb.sweeps.verdict(False, [*cells(1.0), measured(ONE, 9 * step_ms)]) == "not confirmed", "one is an exception"
    assert wb.sweeps.verdict(None, cells(4.2, 4.5)) == "did not run"
    assert wb.sweeps.verdict(False, load=2.0).startswith("not judged: the machine was busy (2.0 ")
    assert wb.sweeps.verdict(False, cells(0.5)) == "not confirmed", "other work makes no step shorter"
