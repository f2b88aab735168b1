"""Requests that cannot be planned: one sentence each, with a way out."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from cost_values import layered_profile
from plan_values import plan_of

from workbench.cost import Cluster
from workbench.errors import PlanInfeasible, PlanMismatch, UnknownParameter
from workbench.planning.refusals import apart
from workbench.units import GIB


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
            {"pipeline": 4, "schedule": "1f1b", "micro_batch": 64},
            "Choose micro_batch=1, 2, 4, 8 or 16, or schedule='g",
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
        (
            {"schedule": "interleaved", "pipeline": 4, "micro_batch": 1, "global_batch": 9},
            "in equal rounds of as many",
        ),
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
        (
            {"cuda_graphs": True, "zero": 1},
            "does not run here: under zero=1 FSDP2 moves.*Remove cuda_graphs=True",
        ),
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


def test_planning_is_fast_enough_to_drag_a_slider() -> None:
    profile = layered_profile(layers=54, elements=45_000_000)
    started = time.process_time()
    plan_of(profile, global_batch=256)
    assert time.process_time() - started < 1.0
    started = time.process_time()
    plan_of(profile, global_batch=4096, cluster=Cluster.of("h200", gpus=1024))
    assert time.process_time() - started < 10.0
