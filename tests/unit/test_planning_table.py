"""The table of a search, its frontier of memory against speed, explanations of plans, and sliders."""

from __future__ import annotations

import gc
import itertools
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from cost_values import layered_profile
from plan_values import H200, PROFILE, plan_of, with_host

import workbench as wb
from workbench.analysis.pareto import pareto_front
from workbench.base.errors import InvalidArgument, PlanInfeasible, PlanMismatch
from workbench.base.units import GIB
from workbench.cost import Cluster
from workbench.cost.hardware import FRAGMENTATION
from workbench.figures.figure import picture
from workbench.planning import stage_costs
from workbench.planning.explanation import explain
from workbench.planning.plan import Plan
from workbench.planning.planner import FASTEST_SHOWN, weigh
from workbench.planning.request import Request
from workbench.planning.search import uncollected, what_if


def test_the_table_says_in_how_many_blocks() -> None:
    profile = layered_profile(layers=20)
    plans = weigh(profile, "bf16", Request(64, 512, H200, 14 * GIB))
    row = next(row for row in plans.rows if row.recompute == "mixed" and row.selective_blocks and not row.full_blocks)
    again = plans[plans.rows.index(row)]
    assert again.recomputed_blocks["selective"] == row.selective_blocks
    assert re.search(r"selective in \d+ of 22", repr(plans))


def test_the_fastest_rows_of_the_table_are_weighed_to_the_end() -> None:
    plans = weigh(layered_profile(layers=20), "bf16", Request(64, 512, H200, 14 * GIB))
    shown = [row for _, row in plans.shown() if row.step_ms is not None]
    assert len(shown) == FASTEST_SHOWN
    assert all(row.bubble_fraction is not None for row in shown)
    steps = [row.step_ms for row in shown]
    assert steps == sorted(steps)
    assert "≥ " not in "".join(repr(plans).splitlines()[: FASTEST_SHOWN + 2])
    for number in (1, FASTEST_SHOWN - 1):
        assert plans[number].prediction.step_ms == pytest.approx(plans.rows[number].step_ms)


def test_every_row_of_the_table_can_be_had_as_a_plan() -> None:
    plans = weigh(layered_profile(layers=8), "bf16", Request(32, 512, H200, 5 * GIB))
    assert plans.searched >= len(plans)
    assert plans[0] is plans.best
    first, second = itertools.islice(plans, 2)
    assert first is plans.best
    assert second.division() == plans[1].division()
    every = list(plans)
    assert len(every) <= sum(row.step_ms is not None for row in plans.rows) < len(plans)
    assert all(plan.peak_bytes <= 5 * GIB * (1 - FRAGMENTATION) for plan in every), "those that fit"
    shown = plans.shown()
    assert any(row.step_ms is None for _, row in shown)
    for number, row in shown:
        if row.step_ms is None:
            with pytest.raises(PlanInfeasible):
                plans[number]
        elif row.peak_bytes is not None:
            found = plans[number]
            assert (found.pipeline, found.data, found.zero) == (row.pipeline, row.data, row.zero)
            assert (found.schedule, found.chunks, found.micro_batch) == (row.schedule, row.chunks, row.micro_batch)
            assert found.prediction.step_ms >= row.step_ms * (1 - 1e-9)


def test_no_row_is_said_to_be_faster_than_the_chosen() -> None:
    """Also those that were never cut: on 16 GPUs, host-offloaded twins of what fits as it is."""
    for fixed in ({"pipeline": 4}, {"data": 4}, {}):
        plan = plan_of(layered_profile(layers=14), cluster=Cluster.of("h200", gpus=16), global_batch=128, **fixed)
        assert not [row for row in plan.candidates if row.verdict.startswith(("-", "at least -"))]
        steps = [row.step_ms for row in plan.candidates if row.step_ms is not None]
        assert min(steps) == plan.prediction.step_ms


def test_what_nearly_fits_is_in_the_table_however_long_it_is() -> None:
    profile, limit = layered_profile(layers=24, elements=45_000_000), 20 * GIB
    plans = weigh(profile, "bf16", Request(1440, 512, Cluster.of("h200", gpus=8), limit))
    assert plans.searched > 600
    rejected = [row for row in plans.rows if row.step_ms is None]
    assert 0 < len(rejected) <= 60
    sizes = [row.peak_bytes for row in rejected]
    assert sizes == sorted(sizes, key=lambda size: size or 0)
    assert all("needs at least" in row.verdict for row in rejected)
    assert "your limit of 20.0 GiB leaves 18.8 GiB to tensors" in repr(plans)


def test_the_table_reads_without_knowing_the_words() -> None:
    plans = weigh(replace(PROFILE, model="<b>mine</b>"), "bf16", Request(64, 512, H200))
    text, page = repr(plans), plans._repr_html_()
    assert "<b>mine</b> on 4 × H200, 64 samples of 512 tokens a step" in text
    for words in ("chosen", "% slower", "GiB", " ms"):
        assert words in text
        assert words in page
    assert "pipeline-parallel degree: the stages are spread over this many ranks" in page
    assert "&lt;b&gt;mine" in page
    assert "<b>mine" not in page


def test_an_explanation_names_each_kind_of_constraint() -> None:
    """Compute, memory, links, divisibility of the batch, and what was asked for."""
    starved = replace(H200, intra=replace(H200.intra, bandwidth=H200.intra.bandwidth / 400))
    uneven = explain(plan_of(layered_profile(layers=8), global_batch=33))
    assert "divisibility" in {change.constraint for change in uneven.changes}
    assert "the global batch were 32, a multiple of 4 devices" in repr(uneven)
    kinds = {change.constraint: change.category for change in uneven.changes}
    assert (kinds["arithmetic"], kinds["memory"], kinds["links in a node"]) == ("compute", "memory", "link")
    linked = explain(plan_of(pipeline=1, zero=0, global_batch=8, cluster=starved))
    gains = {change.constraint: change.gain for change in linked.changes}
    assert gains["links in a node"] > gains["arithmetic"]
    assert "PP: ranks that the model's stages are spread over" in repr(linked)
    whole = explain(plan_of(pipeline=1))
    assert "Bubble: 0 ms (0.0%)" in repr(whole)


@pytest.mark.representative
def test_an_explanation_names_what_binds_and_what_would_change() -> None:
    profile = layered_profile(layers=54, elements=45_000_000)
    free = explain(plan_of(profile))
    assert sum(part.share for part in free.parts) == pytest.approx(1)
    assert {"arithmetic", "memory bandwidth", "host", "memory", "links in a node", "global batch"} == {
        change.constraint for change in free.changes
    }
    tight = explain(plan_of(profile, memory_limit_bytes=24 * GIB))
    assert tight.binding == "memory limit"
    assert "Binding constraint: your memory limit of 24.0 GiB. If the memory limit of 24.0 GiB were lifted, " in repr(
        tight
    )
    lifted = next(change for change in tight.changes if change.constraint == "memory limit")
    lifted_ms, tight_ms = lifted.plan.prediction.step_ms, tight.plan.prediction.step_ms
    assert f"would take {lifted_ms:,.0f} ms instead of {tight_ms:,.0f} ms." in repr(tight)
    assert lifted.plan.prediction == free.plan.prediction, "computed by planning again"
    assert f"{lifted.gain:.1%} more tokens/s, with {lifted.plan.division()}" in repr(tight)
    fixed = explain(plan_of(profile, pipeline=4, micro_batch=1))
    assert fixed.binding in ("micro_batch=1", "pipeline=4")
    two_nodes = explain(plan_of(profile, cluster=Cluster.of("h200", gpus=16)))
    assert "links between nodes" in {change.constraint for change in two_nodes.changes}


def test_a_plan_whose_device_waits_for_its_host_says_so() -> None:
    fixed: dict[str, Any] = {"pipeline": 4, "micro_batch": 2, "recompute": "none"}
    slow = plan_of(**fixed, cluster=with_host(1e-2, action_s=3e-3))
    [part] = [part for part in explain(slow).parts if part.name == "Waiting for the host"]
    assert part.ms == slow.prediction.host_ms > slow.prediction.compute_ms
    assert part.ms + slow.prediction.compute_ms <= slow.prediction.step_ms
    gains = {change.constraint: change.gain for change in explain(slow).changes}
    assert gains["host"] > 0.5 > gains["arithmetic"]
    quick = explain(plan_of(**fixed, cluster=with_host(0.0)))
    assert "Waiting for the host" not in {part.name for part in quick.parts}
    assert all(change.gain == 0.0 for change in quick.changes if change.constraint == "host")


def test_a_plan_from_a_file_is_explained_with_a_profile() -> None:
    plan = plan_of(memory_limit_bytes=12 * GIB)
    stored = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert explain(stored).changes == ()
    assert "give the model's profile: wb.planning.explain(plan, profile)" in repr(explain(stored))
    assert explain(stored, PROFILE).changes == explain(plan).changes
    with pytest.raises(PlanMismatch, match="Make the profile of the same model"):
        explain(stored, replace(PROFILE, signature="1" * 16))


def test_a_slider_is_answered_as_a_search_would_and_once() -> None:
    settings: dict[str, Any] = {"global_batch": 64, "seq_len": 512, "gpus": 8, "memory_limit_gib": 20.0}
    found = what_if(PROFILE, H200, **settings)
    assert found == plan_of(cluster=Cluster.of("h200", gpus=8), memory_limit_bytes=20 * GIB)
    assert what_if(PROFILE, H200, **settings) is found
    assert what_if(PROFILE, H200, **{**settings, "gpus": 16}).cluster.nodes == 2
    with pytest.raises(PlanInfeasible, match="does not fit"):
        what_if(PROFILE, H200, global_batch=64, seq_len=512, memory_limit_gib=0.1)
    for wrong in (0, -3, "32", float("nan")):
        with pytest.raises(PlanInfeasible, match=r"memory_limit_gib=.* must be a number greater than 0"):
            what_if(PROFILE, H200, global_batch=64, seq_len=512, memory_limit_gib=wrong)


def test_garbage_is_collected_after_a_move_not_within_and_only_where_it_was() -> None:
    collections = 0

    def counted(phase: str, _: Any) -> None:
        nonlocal collections
        collections += phase == "start"

    assert gc.isenabled()
    gc.callbacks.append(counted)
    try:
        with uncollected(), uncollected():
            collections = 0
            kept: list[list[int]] = [[] for _ in range(20 * gc.get_threshold()[0])]
            assert collections == 0
        assert gc.isenabled()
        kept += [[] for _ in range(20 * gc.get_threshold()[0])]
        assert collections > 0
        gc.disable()
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.callbacks.remove(counted)


def test_what_earlier_moves_left_behind_changes_no_answer() -> None:
    """Prices are kept between moves of a slider; a search that starts from nothing finds the same."""
    profile, settings = layered_profile(layers=16), {"global_batch": 64, "seq_len": 512}
    moves: list[dict[str, Any]] = [{}, {"micro_batch": 2}, {"gpus": 2}, {"gpus": 8}, {"micro_batch": 8}]
    moves += [{"memory_limit_gib": float(limit)} for limit in (5, 6, 8, 12, 80)]
    warm = [what_if(profile, H200, **{**settings, **move}) for move in moves]
    for move, found in zip(moves, warm, strict=True):
        stage_costs.device_costs.cache_clear()
        limit = move.get("memory_limit_gib")
        asked = {**settings, "micro_batch": move.get("micro_batch"), "cluster": H200.resized(move.get("gpus", 4))}
        cold = plan_of(profile, **asked, memory_limit_bytes=None if limit is None else int(limit * GIB))
        assert cold == found


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
    assert figure.layout.xaxis.title.text == "predicted memory of the fullest device (MiB)", "0.004 GiB says little"
    assert figure.layout.yaxis.title.text == "predicted step (ms)"
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
    fewer = wb.figures.frontier(wb.grid(experiment, H200, zero=[0, 3], tensor=1))
    shown = [
        {each.name: each.marker.line.color for each in one.data if each.showlegend is None} for one in (figure, fewer)
    ]
    assert shown[1]["ZeRO 3"] == shown[0]["ZeRO 3"] != shown[0]["ZeRO 1"], "a colour means one way of sharding"
    assert picture(figure)[:4] == b"\x89PNG"


def test_the_front_leaves_out_what_another_plan_beats_in_both():
    assert pareto_front([(9, 2.0), (4, 3.0), (9, 2.5)]) == [(4, 3.0), (9, 2.0)]
    assert pareto_front([(9, 2.0), (4, 1.0)]) == [(4, 1.0)]
