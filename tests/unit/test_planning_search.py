"""The search over strategies: it loses nothing, and its plans fit."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cost_values import layered_profile, uneven_profile
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_values import CAPTURABLE, PROFILE, costs_of, plan_of, with_host

from workbench.base.errors import PlanInfeasible, PlanMismatch, UnknownParameter
from workbench.base.units import GIB
from workbench.cost import Cluster
from workbench.planning import search, stage_costs
from workbench.planning.plan import Plan
from workbench.planning.prediction import bound_ms, predict, timeline
from workbench.planning.request import Request, apart
from workbench.planning.search import Option, Search, options
from workbench.planning.stage_costs import MixedStages
from workbench.planning.stage_cuts import Cutter


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
@pytest.mark.representative
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


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pipeline": 3}, "pipeline=3 does not divide 4 devices. Choose one of 1, 2, 4."),
        ({"pipeline": 2, "data": 1}, "pipeline=2 × data=1 uses 2 of 4 devices. Give data=2"),
        ({"data": 4, "global_batch": 6}, "cannot be divided over data=4 replicas.*multiple of 4, such as 8"),
        ({"micro_batch": 5}, "cannot be divided into micro-batches of 5.*Choose one of 1, 2, 4, 8, 16, 32, 64"),
        (
            {"global_batch": 3, "schedule": "1f1b"},
            "needs at least as many micro-batches.*batch of 3 gives no such number on 4",
        ),
        (
            {"global_batch": 3, "schedule": "1f1b"},
            "Choose schedule='gpipe' or 'interleaved', or a global batch of 4, or 3 devices.",
        ),
        (
            {"cluster": Cluster.of("h200", gpus=31)},
            "No division of 31 devices suits.*64 samples and 14 blocks.*Choose a",
        ),
        ({"cluster": Cluster.of("h200", gpus=31)}, "Choose a global batch of 62, or 28 devices."),
        ({"zero": 4}, "zero=4 must be at most 3."),
        ({"zero": 2.0}, "zero=2.0 is not a whole number"),
        (
            {"zero": 3, "pipeline": 4},
            "zero=3 shards over data-parallel replicas, and pipeline=4 on 4 devices leaves one",
        ),
        ({"zero": 2, "data": 1}, "and data=1 makes one. Leave zero out, or make room for data=2."),
        ({"zero": 2, "cluster": Cluster.of("h200", gpus=1)}, "one device holds one. Leave zero out"),
        ({"tensor": 2}, "tensor=2 does not divide most of layered: attention heads.*Choose 1"),
        (
            {"schedule": "interleaved", "pipeline": 1},
            "stages of several pipeline ranks, and these degrees make one. Le",
        ),
        ({"chunks": 2, "data": 4}, "chunks=2 interleaves the stages of several pipeline ranks, and these degrees make"),
        (
            {"chunks": 9},
            "with 9 stages on each pipeline rank cuts a pipeline of 2 into 18 stages, and layered has 14 blocks.",
        ),
        ({"chunks": 9}, "Choose chunks=1, 2, 3, 4, 5, 6 or 7."),
        ({"schedule": "interleaved", "pipeline": 4, "micro_batch": 1, "global_batch": 9}, "in equal rounds of as many"),
        ({"schedule": "1f1b", "chunks": 2}, "chunks=2 needs an interleaved schedule, and 1f1b has one stage"),
        ({"recompute": True}, "recompute=True is not one of the choices. Known names: full, none, selective."),
        ({"schedule": "1fib"}, "There is no schedule '1fib'. Did you mean '1f1b'"),
        ({"schedule": "1F1B"}, "There is no schedule '1F1B'. Did you mean '1f1b'"),
        ({"micro_batch": 0}, "micro_batch=0 must be 1 or more."),
        ({"global_batch": None}, "global_batch=None is not a whole number. Give a whole number."),
        ({"seq_len": "512"}, "seq_len='512' is not a whole number. Give a whole number."),
        ({"pipeline": True}, "pipeline=True is not a whole number. Give a whole number."),
        ({"offload_optimizer": "cpu"}, "offload_optimizer='cpu' is neither True nor False."),
        ({"cuda_graphs": 1}, "cuda_graphs=1 is neither True nor False. Give one of them."),
        ({"cuda_graphs": True, "zero": 1}, "does not run here: under zero=1 FSDP2 moves.*Remove cuda_graphs=True"),
        ({"cluster": "h200"}, r"cluster='h200' is not a Cluster. Give wb.Cluster.of\(\"h200\", gpus=4\)"),
        ({"memory_limit_bytes": 64 << 20}, "does not fit 4 × H200.*your limit of 64.0 MiB leaves 60.2 MiB to tensors"),
        (
            {"memory_limit_bytes": 64 << 20},
            r"Raise the memory limit to at least [0-9.]+ GiB, or give the plan more than 4",
        ),
    ],
)
def test_bad_input_is_one_sentence_with_the_way_out(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanInfeasible, match=sentence):
        plan_of(**changes)


def test_the_way_out_of_a_contradiction_is_one() -> None:
    """What a refusal proposes plans."""
    with pytest.raises(PlanInfeasible, match="Choose micro_batch=1, 2, 4, 8 or 16, or schedule='gpipe'"):
        plan_of(pipeline=4, schedule="1f1b", micro_batch=64)
    assert plan_of(pipeline=4, schedule="1f1b", micro_batch=16).num_microbatches == 4
    assert plan_of(pipeline=4, schedule="gpipe", micro_batch=64).num_microbatches == 1
    for gpus, batch in ((31, 62), (28, 64)):
        assert plan_of(cluster=Cluster.of("h200", gpus=gpus), global_batch=batch).world == gpus


def test_the_memory_limit_that_a_refusal_asks_for_is_the_least_that_suffices() -> None:
    with pytest.raises(PlanInfeasible, match="raise the memory limit to at least") as caught:
        plan_of(pipeline=1, memory_limit_bytes=GIB // 4)
    least_gib = float(re.findall(r"to at least ([0-9.]+) GiB", str(caught.value))[0])
    assert plan_of(pipeline=1, memory_limit_bytes=int(least_gib * GIB)).peak_bytes <= least_gib * GIB
    with pytest.raises(PlanInfeasible):
        plan_of(pipeline=1, memory_limit_bytes=int((least_gib - 0.1) * GIB))


def test_an_interleaved_schedule_that_is_asked_for_may_have_stages_of_one_block() -> None:
    small = layered_profile(layers=4)
    assert all(row.chunks == 1 or row.chunks * row.pipeline <= 3 for row in plan_of(small).candidates)
    assert plan_of(small, schedule="interleaved").chunks >= 2


def test_a_zero_stage_that_is_asked_for_is_what_the_plan_has() -> None:
    for stage in (1, 2, 3):
        rows = plan_of(zero=stage).candidates
        assert {row.zero for row in rows} == {stage}
        assert min(row.data for row in rows) > 1


def test_sizes_that_differ_are_never_written_alike() -> None:
    assert apart(0.97 * GIB, 0.96 * GIB) == ("0.97 GiB", "0.96 GiB")
    assert apart(10.0 * GIB, 4.0 * GIB) == ("10.0 GiB", "4.0 GiB")
    assert apart(10.004 * GIB, 10.0 * GIB) == ("10.004 GiB", "10.000 GiB")
    assert apart(10.00004 * GIB, 10.0 * GIB) == ("just over 10.000 GiB", "10.000 GiB")


def test_more_stages_than_blocks_is_refused() -> None:
    with pytest.raises(PlanInfeasible, match=r"more stages than the 3 blocks of layered. Choose at most 3"):
        plan_of(layered_profile(layers=1), pipeline=4)


def test_what_does_not_fit_names_what_the_user_forbade() -> None:
    huge = layered_profile(layers=60, elements=600_000_000)
    with pytest.raises(PlanInfeasible, match=r"Allow activation checkpointing, or.*more than 4 devices") as caught:
        plan_of(huge, recompute="none", offload_optimizer=False)
    assert caught.value.facts["needed_bytes"] > caught.value.facts["offered_bytes"]


def test_a_profile_for_other_hardware_is_refused() -> None:
    with pytest.raises(PlanMismatch, match="is for bf16 on cuda, and the plan is for fp32 on cuda"):
        plan_of(precision="fp32")


def test_a_misspelt_parameter_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownParameter, match="Did you mean 'micro_batch'"):
        plan_of(micro_batches=4)


def test_planning_does_little_enough_work_to_drag_a_slider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of hundreds of options on 4 devices, and of more on 1,024, most are dropped by a bound: few are priced, which
    takes a third of a millisecond each, and fewer are simulated."""
    profile, done = layered_profile(layers=54, elements=45_000_000), Counter[str]()
    for module, name in ((stage_costs.StrategyCosts, "times"), (search, "predict")):
        monkeypatch.setattr(module, name, counted(getattr(module, name), name, done))
    plan_of(profile, global_batch=256)
    assert done["times"] < 250
    assert done["predict"] < 10
    done.clear()
    plan_of(profile, global_batch=4096, cluster=Cluster.of("h200", gpus=1024))
    assert done["times"] < 600
    assert done["predict"] < 100


def counted(function: Any, name: str, done: Counter[str]) -> Any:
    def count(*given: Any, **named: Any) -> Any:
        done[name] += 1
        return function(*given, **named)

    return count
