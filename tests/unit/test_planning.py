"""Schedules against their theorems, the partition against brute force, the search against trying everything."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from cost_values import layered_profile
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.cost import Cluster
from workbench.errors import PlanInfeasible, PlanMismatch, UnknownParameter
from workbench.planning import Plan, bubble_fraction, search, simulate, timeline
from workbench.planning.partition import partition
from workbench.planning.pricing import Degrees, Pricer
from workbench.planning.schedules import SCHEDULES, build_schedule, most_in_flight, step_ms
from workbench.units import GIB

H200 = Cluster.of("h200", gpus=4)
PROFILE = layered_profile()
pipelines = st.integers(1, 6)
milliseconds = st.floats(0.5, 20.0)


def plan_of(profile: Any = PROFILE, **changes: Any) -> Plan:
    return search(profile, **{"global_batch": 64, "seq_len": 512, "precision": "bf16", "cluster": H200, **changes})


# Schedules


@given(stages=pipelines, more=st.integers(0, 12))
def test_1f1b_holds_at_most_p_minus_s_microbatches(stages: int, more: int) -> None:
    count = stages + more
    found = simulate(build_schedule("1f1b", stages, count), [1.0] * stages, [2.0] * stages)
    assert found.in_flight == tuple(stages - stage for stage in range(stages))
    assert found.in_flight == tuple(most_in_flight("1f1b", stage, stages, count) for stage in range(stages))


@given(stages=pipelines, count=st.integers(1, 12))
def test_gpipe_holds_every_microbatch(stages: int, count: int) -> None:
    found = simulate(build_schedule("gpipe", stages, count), [1.0] * stages, [2.0] * stages)
    assert set(found.in_flight) == {count} == {most_in_flight("gpipe", 0, stages, count)}


@given(name=st.sampled_from(sorted(SCHEDULES)), stages=pipelines, more=st.integers(0, 12), forward=milliseconds)
def test_the_bubble_of_equal_stages_is_p_minus_1_over_m_plus_p_minus_1(
    name: str, stages: int, more: int, forward: float
) -> None:
    count = stages + more
    found = simulate(build_schedule(name, stages, count), [forward] * stages, [2 * forward] * stages)
    assert found.bubble_fraction == pytest.approx(bubble_fraction(stages, count), abs=1e-9)


@given(name=st.sampled_from(sorted(SCHEDULES)), stages=pipelines, count=st.integers(1, 8), data=st.data())
def test_nothing_runs_before_what_it_needs(name: str, stages: int, count: int, data: st.DataObject) -> None:
    forward = data.draw(st.lists(milliseconds, min_size=stages, max_size=stages))
    backward = data.draw(st.lists(milliseconds, min_size=stages, max_size=stages))
    found = simulate(build_schedule(name, stages, count), forward, backward, 0.7)
    times = {(a.kind, a.stage, a.micro_batch): a for lane in found.lanes for a in lane}
    assert len(times) == 2 * stages * count
    for (kind, stage, i), action in times.items():
        if kind == "F" and stage:
            assert action.start_ms >= times["F", stage - 1, i].end_ms + 0.7 - 1e-9
        if kind == "B":
            before = times["F", stage, i] if stage == stages - 1 else times["B", stage + 1, i]
            assert action.start_ms >= before.end_ms + (0.0 if stage == stages - 1 else 0.7) - 1e-9
    for lane in found.lanes:
        assert all(first.end_ms <= second.start_ms + 1e-9 for first, second in pairwise(lane))


@settings(deadline=None, max_examples=60)
@given(name=st.sampled_from(sorted(SCHEDULES)), stages=st.integers(1, 5), count=st.integers(1, 120), data=st.data())
def test_a_long_step_is_extended_as_simulating_all_of_it_would(
    name: str, stages: int, count: int, data: st.DataObject
) -> None:
    forward = data.draw(st.lists(milliseconds, min_size=stages, max_size=stages))
    backward = data.draw(st.lists(milliseconds, min_size=stages, max_size=stages))
    send = data.draw(st.lists(st.floats(0, 5), min_size=stages, max_size=stages))
    whole = simulate(build_schedule(name, stages, count), forward, backward, send)
    assert step_ms(name, count, forward, backward, send)[0] == pytest.approx(whole.step_ms)
    length, bubble = step_ms(name, count, forward, backward, send, exact_actions=2 * stages * 40)
    assert length == pytest.approx(whole.step_ms, rel=0.02)
    assert bubble == pytest.approx(whole.bubble_fraction, abs=0.02)


# Partition


def brute_force(cost: Any, memory: Any, limit: float) -> tuple[float, float] | None:
    """The best (bottleneck, memory) over every cut."""
    stages, blocks = memory.shape[0], cost.shape[0] - 1
    found = []
    for inner in combinations(range(1, blocks), stages - 1):
        spans = list(pairwise((0, *inner, blocks)))
        peaks = [memory[s, i, j] for s, (i, j) in enumerate(spans)]
        if max(peaks) <= limit:
            found.append((max(cost[i, j] for i, j in spans), max(peaks)))
    return min(found, default=None)


@settings(deadline=None, max_examples=200)
@given(blocks=st.integers(1, 9), data=st.data())
def test_the_partition_is_the_best_of_all_cuts(blocks: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, blocks))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    each = rng.integers(1, 6, blocks + 1).astype(float)
    total = each.cumsum() - each[0]
    cost = total[None] - total[:, None] + rng.integers(0, 3, (blocks + 1, blocks + 1))
    memory = rng.integers(1, 20, (stages, blocks + 1, blocks + 1)).astype(float)
    limit = float(data.draw(st.integers(5, 25)))
    best = brute_force(cost, memory, limit)
    cuts = partition(cost, memory, limit)
    assert (cuts is None) == (best is None)
    if cuts is not None:
        spans = list(pairwise(cuts))
        assert cuts[0] == 0
        assert cuts[-1] == blocks
        assert all(i < j for i, j in spans)
        assert (max(cost[i, j] for i, j in spans), max(memory[s, i, j] for s, (i, j) in enumerate(spans))) == best


# Search


def test_the_choice_is_the_fastest_of_everything_that_fits() -> None:
    """Force each option in turn; none that fits may be faster than the free choice."""
    chosen = plan_of()
    tried = 0
    for row in chosen.candidates:
        try:
            forced = plan_of(
                pipeline=row.pipeline,
                data=row.data,
                zero=row.zero,
                micro_batch=row.micro_batch,
                recompute=row.recompute,
            )
        except PlanInfeasible:
            assert row.verdict.startswith("needs")
            continue
        assert forced.prediction.step_ms >= chosen.prediction.step_ms * (1 - 1e-9)
        assert forced.prediction.step_ms >= (row.step_ms or 0) * (1 - 1e-9), "a bound exceeded the simulated step"
        tried += 1
    assert tried > 20
    assert [row.verdict for row in chosen.candidates].count("chosen") == 1


@settings(deadline=None, max_examples=25)
@given(
    layers=st.integers(2, 20),
    elements=st.integers(1_000_000, 150_000_000),
    gpus=st.sampled_from([1, 2, 4, 8]),
    limit_gib=st.integers(4, 140),
)
def test_a_plan_stays_within_its_limit_and_survives_json(layers: int, elements: int, gpus: int, limit_gib: int) -> None:
    cluster = Cluster.of("h200", gpus=gpus)
    profile = layered_profile(layers, elements)
    try:
        plan = plan_of(profile, cluster=cluster, memory_limit_bytes=limit_gib * GIB)
    except PlanInfeasible:
        with pytest.raises(PlanInfeasible, match=r"needs .* a device, and each H200 offers"):
            plan_of(profile, cluster=cluster, memory_limit_bytes=limit_gib * GIB)
        return
    assert plan.peak_bytes <= min(limit_gib * GIB, cluster.device.usable_bytes)
    assert plan.world == gpus
    assert plan.micro_batch * plan.num_microbatches * plan.data == 64
    assert [plan.stages[0].first_block, *(s.end_block for s in plan.stages)][-1] == layers + 2
    assert all(a.end_block == b.first_block for a, b in pairwise(plan.stages))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_plan_stored_before_recompute_was_a_word_is_still_read() -> None:
    plan = plan_of(recompute="full")
    old = json.loads(json.dumps(plan.to_json()))
    old["format"] = 1
    del old["offload_optimizer"]
    for stage in old["stages"]:
        stage["recompute"] = True
    for row in old["candidates"]:
        row["recompute"] = row["recompute"] == "full"
        for name in ("tensor", "schedule", "chunks", "offload_optimizer"):
            del row[name]
    assert Plan.from_json(old) == plan
    with pytest.raises(PlanMismatch, match=r"format 99.*Update workbench"):
        Plan.from_json({**old, "format": 99})


@pytest.mark.parametrize("changes", [{}, {"pipeline": 4}, {"pipeline": 2, "zero": 2}, {"data": 4, "zero": 3}])
def test_the_parts_of_a_prediction_sum_to_the_step(changes: dict[str, int]) -> None:
    found = plan_of(**changes).prediction
    parts = found.compute_ms + found.bubble_ms + found.communication_ms + found.optimizer_ms
    assert parts == pytest.approx(found.step_ms)
    assert min(found.compute_ms, found.optimizer_ms) > 0
    assert found.bubble_ms >= -1e-6
    assert found.mfu is not None
    assert 0 < found.mfu < 1
    assert found.tokens_per_s == pytest.approx(64 * 512 / found.step_ms * 1e3)


def test_the_timeline_of_a_plan_is_its_predicted_pipeline() -> None:
    plan = plan_of(pipeline=4, micro_batch=2)
    found = timeline(plan)
    assert len(found.lanes) == 4
    assert found.bubble_fraction == pytest.approx(plan.prediction.bubble_fraction, abs=0.01)
    assert found.step_ms < plan.prediction.step_ms


def test_what_fits_one_device_is_not_pipelined_when_replicas_are_faster() -> None:
    assert plan_of(layered_profile(layers=12, elements=12_000_000)).pipeline == 1


def test_a_tight_limit_makes_the_planner_split_or_shard() -> None:
    free = plan_of(layered_profile(layers=54, elements=45_000_000), cluster=Cluster.of("h200", gpus=4))
    tight = plan_of(layered_profile(layers=54, elements=45_000_000), memory_limit_bytes=20 * GIB)
    assert free.peak_bytes > 20 * GIB
    assert tight.peak_bytes <= 20 * GIB
    assert tight.pipeline > 1 or tight.zero >= 2
    assert tight.prediction.step_ms > free.prediction.step_ms


def test_earlier_stages_of_1f1b_are_charged_for_more_microbatches() -> None:
    profile = layered_profile(layers=10)
    plan = plan_of(profile, pipeline=4, micro_batch=2, recompute="none")
    layers = [
        sum(name.startswith("layer") for name in plan.block_names[s.first_block : s.end_block]) for s in plan.stages
    ]
    per_layer = [stage.memory.activations / count for stage, count in zip(plan.stages[:3], layers, strict=False)]
    assert per_layer[0] > per_layer[1] > per_layer[2]


def test_1f1b_has_at_least_as_many_microbatches_as_stages() -> None:
    """torch's schedule refuses fewer."""
    assert all(r.pipeline <= 64 // (r.data * r.micro_batch) for r in plan_of().candidates)
    assert any(r.pipeline > 64 // (r.data * r.micro_batch) for r in plan_of(schedule="gpipe").candidates)


def test_a_tied_table_across_stages_costs_a_reduction() -> None:
    pricer = Pricer(PROFILE, H200)
    degrees = Degrees(2, 2, 0, "none", 4, 8)
    last = len(PROFILE.blocks)
    assert pricer.tied_ms(degrees, (0, 7, last)) > 0
    assert pricer.tied_ms(Degrees(1, 4, 0, "none", 4, 4), (0, last)) == 0
    separate = replace(
        PROFILE,
        blocks=(*PROFILE.blocks[:-1], replace(PROFILE.blocks[-1], parameters=("head.bias",))),
    )
    assert Pricer(separate, H200).tied_ms(degrees, (0, 7, last)) == 0


# What is refused, and how


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pipeline": 3}, "pipeline=3 does not divide 4 devices. Choose one of 1, 2, 4."),
        ({"pipeline": 2, "data": 1}, "pipeline=2 × data=1 uses 2 of 4 devices. Give data=2"),
        ({"data": 4, "global_batch": 6}, "cannot be divided over data=4 replicas.*multiple of 4, such as 8"),
        ({"micro_batch": 5}, "cannot be divided into micro-batches of 5.*Choose one of 1, 2, 4, 8, 16, 32, 64"),
        ({"global_batch": 3, "pipeline": 4}, "No division of 4 devices suits a global batch of 3.*such as 4"),
        ({"zero": 1}, "zero=1 is not a ZeRO stage that runs here. Choose 0"),
        ({"recompute": True}, "recompute=True is not a kind of activation checkpointing.*Choose one of 'none'"),
        ({"schedule": "1fib"}, "There is no schedule '1fib'. Did you mean '1f1b'"),
        ({"micro_batch": 0}, "micro_batch=0 must be at least 1"),
        ({"memory_limit_bytes": 64 << 20}, "does not fit 4 × H200.*each H200 offers.*64.0 MiB.*Raise the memory limit"),
    ],
)
def test_bad_input_is_one_sentence_with_the_way_out(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanInfeasible, match=sentence):
        plan_of(**changes)


def test_more_stages_than_blocks_is_refused() -> None:
    with pytest.raises(PlanInfeasible, match=r"more stages than the 3 blocks of layered. Choose at most 3"):
        plan_of(layered_profile(layers=1), pipeline=4)


def test_what_does_not_fit_names_what_the_user_forbade() -> None:
    huge = layered_profile(layers=60, elements=600_000_000)
    with pytest.raises(PlanInfeasible, match=r"Allow activation checkpointing, or.*more than 4 devices") as caught:
        plan_of(huge, recompute="none")
    assert caught.value.facts["needed_bytes"] > caught.value.facts["offered_bytes"]


def test_a_profile_for_other_hardware_is_refused() -> None:
    with pytest.raises(PlanMismatch, match="is for bf16 on cuda, and the plan is for fp32 on cuda"):
        plan_of(precision="fp32")


def test_a_misspelt_parameter_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownParameter, match="Did you mean 'micro_batch'"):
        plan_of(micro_batches=4)


# Speed


def test_planning_is_fast_enough_to_drag_a_slider() -> None:
    profile = layered_profile(layers=54, elements=45_000_000)
    started = time.perf_counter()
    plan_of(profile, global_batch=256)
    assert time.perf_counter() - started < 1.0
    started = time.perf_counter()
    plan_of(profile, global_batch=4096, cluster=Cluster.of("h200", gpus=1024))
    assert time.perf_counter() - started < 10.0
