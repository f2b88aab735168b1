"""Memory against speed: the fastest plan for each memory limit, and the front of a grid."""

from __future__ import annotations

import json

import pytest
from plan_values import H200, PROFILE, plan_of

import workbench as wb
from workbench.analysis.pareto import pareto_front
from workbench.errors import InvalidArgument
from workbench.figures.figure import picture
from workbench.planning.plan import Plan
from workbench.planning.request import Request
from workbench.planning.table import weigh


def test_the_frontier_is_the_fastest_plan_of_each_limit_and_every_step_down_in_memory_costs_time():
    plans = weigh(PROFILE, "bf16", Request(64, 512, H200))
    front = plans.frontier(6)
    steps = [plan.prediction.step_ms for plan in front]
    assert len(front) >= 3
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] == pytest.approx(plans.best.prediction.step_ms), "the last limit is what the device offers"
    for plan in front:
        assert plan.memory_limit_bytes is not None
        assert plan.peak_bytes <= plan.memory_limit_bytes
        again = weigh(PROFILE, "bf16", Request(64, 512, H200, plan.memory_limit_bytes)).best
        assert again.prediction == plan.prediction
    assert plans.frontier(1)[0].peak_bytes == front[0].peak_bytes
    figure = wb.figures.frontier(plans)
    *points, line = figure.data
    assert sum(len(trace.x) for trace in points if trace.text) == len(line.x) == len(plans.frontier())
    hovers = [word for trace in points for word in trace.text or ()]
    assert any("wb.launch(experiment, plan=plans.frontier()[0])" in word for word in hovers)
    with pytest.raises(InvalidArgument, match="limits=0 is no number of memory limits"):
        plans.frontier(0)


def test_what_offloading_takes_of_the_host_is_part_of_the_plan():
    on, off = (plan_of(pipeline=2, zero=1, schedule="1f1b", offload_optimizer=offload) for offload in (True, False))
    trained = [stage.parameters for stage in on.stages]
    assert on.host_bytes == 8 * max(trained) // on.data, "two moments of four bytes, sharded over the replicas"
    assert on.host_traffic_bytes == 2 * on.host_bytes
    assert Plan.from_json(json.loads(json.dumps(on.to_json()))) == on
    assert (off.host_bytes, off.host_traffic_bytes) == (0, 0)


def test_every_plan_of_a_grid_is_a_point_that_says_what_it_takes_of_the_host_and_what_launches_it():
    model = wb.models.gpt2(64, 2, 2, vocab_size=300, max_positions=32)
    data = wb.data.corpus("demo", vocab_size=300)
    experiment = wb.Experiment(model=model, data=data, global_batch=8, seq_len=32)
    grid = wb.grid(
        experiment, H200, zero=[0, 1, 3], offload_optimizer=[False, True], recompute=["none", "full"], tensor=1
    )
    figure = wb.figures.frontier(grid)
    hovers = {word for trace in figure.data for word in trace.text or ()}
    assert len(hovers) == len(grid.feasible) == 12
    for cell in grid.feasible:
        call = ", ".join(f"{name}={cell.choices[name]!r}" for name in ("zero", "offload_optimizer", "recompute"))
        [word] = [word for word in hovers if f"wb.launch(experiment, plan=grid.cell({call}).plan)" in word]
        assert ("over PCIe in a step" in word) == cell.choices["offload_optimizer"]
        assert eval(f"grid.cell({call}).plan") == cell.plan
    named = {trace.name for trace in figure.data}
    assert named == {
        "replicas", "ZeRO 1", "ZeRO 3", "optimiser on the host", "no checkpointing", "full", "Pareto front"
    }  # fmt: skip
    assert picture(figure)[:4] == b"\x89PNG"


def test_the_front_leaves_out_what_another_plan_beats_in_both():
    assert pareto_front([(9, 2.0), (4, 3.0), (9, 2.5)]) == [(4, 3.0), (9, 2.0)]
    assert pareto_front([(9, 2.0), (4, 1.0)]) == [(4, 1.0)]
