"""The search over strategies: it loses nothing, and its plans fit."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from cost_values import layered_profile, uneven_profile
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_values import CAPTURABLE, PROFILE, costs_of, plan_of, with_host

from workbench.cost import Cluster
from workbench.errors import PlanInfeasible, PlanMismatch
from workbench.planning.checkpointing import MixedStages
from workbench.planning.options import Option, options
from workbench.planning.plan import Plan
from workbench.planning.prediction import bound_ms, predict, timeline
from workbench.planning.request import Request
from workbench.planning.search import Search
from workbench.planning.stage_cuts import Cutter
from workbench.units import GIB


def test_what_alike_options_share_is_what_each_would_have() -> None:
    request = Request(64, 512, with_host(1e-2, action_s=3e-3))
    shared = list(options(CAPTURABLE, request))
    assert any(c.strategy.chunks > 1 and c.strategy.offload_optimizer and c.strategy.cuda_graphs for c in shared)
    for costs in shared:
        alone = costs_of(CAPTURABLE, request.cluster).of(costs.strategy)
        expected = alone.times(MixedStages.whole_model(len(CAPTURABLE.blocks)))
        for name in ("busy", "host_wait", "host", "ending", "optimizer"):
            assert float(getattr(costs.whole, name)) == pytest.approx(float(getattr(expected, name))), (
                name,
                costs.strategy,
            )
        assert np.allclose(costs.busy, alone.times(MixedStages.every(len(costs.profile.blocks))).busy)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    gpus=st.sampled_from([1, 2, 4, 6, 8]),
    limit_gib=st.sampled_from([None, 2, 3, 4, 6, 8, 12]),
    compiled=st.booleans(),
    batch=st.sampled_from([12, 16, 24]),
)
def test_pruning_loses_nothing(seed: int, gpus: int, limit_gib: int | None, compiled: bool, batch: int) -> None:
    """The same options, every one of them cut and simulated: none is faster than the plan, nor than its own bound."""
    profile = replace(uneven_profile(seed), compiled=compiled)
    limit = None if limit_gib is None else limit_gib * GIB
    request = Request(batch, 512, Cluster.of("h200", gpus=gpus, nodes=2 if gpus == 8 else 1), limit)
    steps = []
    for costs in options(profile, request):
        option = Option.of(costs)
        cut, needed = Cutter(costs).best(request.offered_bytes)
        assert option.least_bytes <= needed * (1 + 1e-9)
        if cut is not None:
            times = costs.times(cut.stages)
            steps.append(predict(costs, cut, times, request).step_ms)
            assert option.bound_ms <= steps[-1] * (1 + 1e-9)
            assert bound_ms(costs, cut, times) <= steps[-1] * (1 + 1e-9)
    try:
        chosen = Search(profile, request).plan()
    except PlanInfeasible:
        assert not steps
        return
    assert chosen.prediction.step_ms == pytest.approx(min(steps), rel=1e-9)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_choice_is_the_fastest_of_everything_that_fits(compiled: bool) -> None:
    """Force each option in turn; none that fits may be faster than the free choice, nor than its own bound."""
    profile = replace(layered_profile(layers=8), compiled=compiled)
    chosen = plan_of(profile, global_batch=32, memory_limit_bytes=12 * GIB)
    assert [row.verdict for row in chosen.candidates].count("chosen") == 1
    tried = 0
    for row in chosen.candidates:
        fixed = {name: getattr(row, name) for name in FIXED}
        try:
            forced = plan_of(profile, global_batch=32, memory_limit_bytes=12 * GIB, **fixed)
        except PlanInfeasible:
            assert row.verdict.startswith(("needs", "at least"))
            continue
        assert row.step_ms is not None, "said not to fit"
        assert forced.prediction.step_ms >= chosen.prediction.step_ms * (1 - 1e-9)
        assert forced.prediction.step_ms >= row.step_ms * (1 - 1e-9), "a bound exceeded the simulated step"
        tried += 1
    assert tried > 100


FIXED = ("pipeline", "data", "zero", "micro_batch", "schedule", "chunks", "offload_optimizer", "cuda_graphs")


@settings(max_examples=25)
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
        with pytest.raises(PlanInfeasible, match=r"needs .* a device, and (each H200 offers|your limit of)"):
            plan_of(profile, cluster=cluster, memory_limit_bytes=limit_gib * GIB)
        return
    assert plan.peak_bytes <= min(limit_gib * GIB, cluster.device.usable_bytes)
    assert plan.world == gpus
    assert plan.micro_batch * plan.num_microbatches * plan.data == 64
    assert [plan.stages[0].first_block, *(s.end_block for s in plan.stages)][-1] == layers + 2
    assert all(a.end_block == b.first_block for a, b in pairwise(plan.stages))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_plan_of_another_format_is_refused() -> None:
    stored = plan_of().to_json()
    with pytest.raises(PlanMismatch, match=r"has format 99.*Plan again"):
        Plan.from_json({**stored, "format": 99})


H200_BF16_FLOPS = 989e12
"""Dense bf16 FLOP/s of one H200 (NVIDIA's data sheet of November 2024)."""


@pytest.mark.parametrize("changes", [{}, {"pipeline": 4}, {"pipeline": 2, "zero": 2}, {"data": 4, "zero": 3}])
def test_the_parts_of_a_prediction_sum_to_the_step(changes: dict[str, int]) -> None:
    found = plan_of(**changes).prediction
    parts = found.compute_ms + found.host_ms + found.bubble_ms + found.communication_ms + found.optimizer_ms
    assert parts == pytest.approx(found.step_ms)
    assert min(found.compute_ms, found.optimizer_ms) > 0
    assert found.bubble_ms >= -1e-6
    flops_of_the_step = 64 * PROFILE.flops_per_sample
    assert found.mfu == pytest.approx(flops_of_the_step / (found.step_ms / 1e3) / (4 * H200_BF16_FLOPS))
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
    """torch's schedule refuses fewer; GPipe runs them."""
    rows = [row for row in plan_of().candidates if row.schedule == "1f1b"]
    assert rows
    assert all(r.pipeline <= 64 // (r.data * r.micro_batch) for r in rows)
    assert any(r.pipeline > 64 // (r.data * r.micro_batch) for r in plan_of(schedule="gpipe").candidates)
