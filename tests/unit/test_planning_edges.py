"""Corners of planning: groups that straddle nodes, shared and frozen parameters, NumPy's numbers, damaged plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cost_values import layered_profile
from plan_values import H200 as FOUR_H200
from plan_values import PROFILE, costs_of, plan_of, strategy_of

from workbench.base.errors import PlanInfeasible, PlanMismatch
from workbench.base.units import GIB, count, duration, flops_per_s
from workbench.cost import Cluster
from workbench.cost.hardware import H200, V100, Link, all_reduce_s
from workbench.cost.memory import ParameterTable
from workbench.cost.profile import Profile
from workbench.measure.detection import with_memory
from workbench.planning import prediction
from workbench.planning.explanation import explain
from workbench.planning.plan import Plan
from workbench.planning.planner import weigh
from workbench.planning.prediction import peak_holdings
from workbench.planning.request import Request, memory_limit_bytes
from workbench.planning.search import what_if
from workbench.planning.stage_costs import DeviceCosts

# Clusters


def fewest_in_a_node(cluster: Cluster, size: int, stride: int) -> int:
    """Of every group, counted one by one; its size where none leaves its node."""
    found = size
    for start in range(0, cluster.gpus, size * stride):
        for place in range(stride):
            nodes = [(start + place + member * stride) // cluster.gpus_per_node for member in range(size)]
            found = min(found, *(nodes.count(node) for node in nodes))
    return found


@pytest.mark.parametrize(("gpus", "per_node"), [(12, 6), (12, 8), (24, 8), (14, 7), (20, 5), (6, 4), (7, 3)])
def test_a_group_that_straddles_two_nodes_takes_the_link_between_them(gpus: int, per_node: int) -> None:
    cluster = replace(Cluster.of("h200", gpus=gpus), gpus_per_node=per_node)
    for stride in range(1, gpus + 1):
        for size in range(1, gpus // stride + 1):
            if gpus % (size * stride) == 0:
                fewest = fewest_in_a_node(cluster, size, stride)
                between = Link(min(cluster.intra.bandwidth, fewest * cluster.inter.bandwidth), cluster.inter.latency_s)
                assert cluster.group_link(size, stride) == (cluster.intra if fewest == size else between)


def test_replicas_that_straddle_two_nodes_make_a_step_longer() -> None:
    """Three stages of four replicas on nodes of six: the second stage has two of its replicas in each node."""
    strategy: dict[str, Any] = {"pipeline": 3, "data": 4, "zero": 0, "global_batch": 48, "micro_batch": 1}
    straddling = plan_of(cluster=Cluster.of("h200", gpus=12, nodes=2), **strategy)
    slower = replace(straddling.cluster, inter=Link(1e9, 1e-4))
    aligned = plan_of(cluster=replace(slower, gpus_per_node=4), **strategy)
    assert plan_of(cluster=slower, **strategy).prediction.step_ms > 1.2 * aligned.prediction.step_ms


def test_a_tied_table_of_the_first_and_last_stage_is_reduced_over_the_link_between_their_nodes() -> None:
    cluster = Cluster.of("h200", gpus=14, nodes=2)
    pricer = costs_of(PROFILE, cluster)
    table = 4 * PROFILE.parameters["table"]
    found = pricer.of(strategy_of(pipeline=14, num_microbatches=64)).tied_ms(tuple(range(15)))
    assert found == pytest.approx(1e3 * all_reduce_s(float(table), 2, cluster.inter))
    frozen = costs_of(replace(PROFILE, frozen=frozenset({"table"})), cluster)
    assert frozen.of(strategy_of(pipeline=14, num_microbatches=64)).tied_ms(tuple(range(15))) == 0


def test_more_devices_come_in_nodes_of_the_clusters_own_size() -> None:
    four_a_node = Cluster.of("h200", gpus=16, nodes=4)
    assert four_a_node.resized(16) == four_a_node
    assert four_a_node.resized(32).nodes == 8
    assert FOUR_H200.resized(32).nodes == 4
    assert what_if(PROFILE, four_a_node, global_batch=64, seq_len=512, gpus=16) == plan_of(cluster=four_a_node)
    with pytest.raises(PlanInfeasible, match="gpus='8' is not a whole number"):
        FOUR_H200.resized("8")  # type: ignore[arg-type]


def test_processes_of_one_processor_share_it_however_many_they_are() -> None:
    device = replace(H200, type="cpu")
    two = replace(FOUR_H200, device=device, gpus=2, gpus_per_node=2)
    for other in (two.resized(1), two.resized(8)):
        assert other.gpus * other.device.peak_flops["fp32"] == 2 * device.peak_flops["fp32"]
        assert other.gpus * other.device.memory_bandwidth == 2 * device.memory_bandwidth
        assert other.gpus * other.device.memory_bytes == pytest.approx(2 * device.memory_bytes)


def test_a_device_of_the_table_with_other_memory_has_what_it_says() -> None:
    assert with_memory(V100, int(15.8 * GIB)).usable_bytes < 16 * GIB < V100.usable_bytes
    assert with_memory(H200, H200.memory_bytes + GIB) is H200


def test_a_device_smaller_than_its_libraries_offers_nothing() -> None:
    tiny = replace(FOUR_H200, device=replace(H200, memory_bytes=GIB))
    with pytest.raises(PlanInfeasible, match=r"each H200 offers 0\.0 KiB to tensors"):
        plan_of(cluster=tiny)


# Parameters that are shared or frozen


def reduced_ms(profile: Profile) -> tuple[float, float, float]:
    """Of the whole model over four replicas, without latency: all-reduce, all-gather, reduce-scatter."""
    over = DeviceCosts(profile, H200).collectives(4, 1, Link(1e11, 0.0))
    reduce, gather, again, scatter = (float(matrix[0, -1]) for matrix in over)
    assert again == gather, "all blocks have a backward"
    return reduce, gather, scatter


def test_what_blocks_share_is_reduced_and_gathered_once() -> None:
    """As in ALBERT: one layer's weights in all layers."""
    blocks = tuple(
        replace(block, parameters=("layer.0.weight",)) if block.name.startswith("layer") else block
        for block in PROFILE.blocks
    )
    names = ("table", "head.bias", "layer.0.weight")
    shared = replace(PROFILE, blocks=blocks, parameters={name: PROFILE.parameters[name] for name in names})
    gigabytes = shared.parameter_count * 4 / 1e9
    reduce, gather, scatter = reduced_ms(shared)
    assert reduce == pytest.approx(1e3 * gigabytes * 1.5 / 100)
    assert (gather, scatter) == (pytest.approx(reduce / 4), pytest.approx(reduce / 2))


def test_a_frozen_parameter_is_gathered_and_never_reduced() -> None:
    layers = frozenset(name for name in PROFILE.parameters if name.startswith("layer"))
    some = replace(PROFILE, frozen=layers)
    left = (PROFILE.parameter_count - sum(PROFILE.parameters[name] for name in layers)) / PROFILE.parameter_count
    for before, after, share in zip(reduced_ms(PROFILE), reduced_ms(some), (left, 1.0, left), strict=True):
        assert after == pytest.approx(share * before)
    frozen = plan_of(replace(PROFILE, frozen=frozenset(PROFILE.parameters)), data=4, zero=0)
    assert frozen.prediction.communication_ms == frozen.prediction.optimizer_ms == 0
    assert all(stage.memory.gradients == stage.memory.optimizer == 0 for stage in frozen.stages)


def test_a_block_without_a_backward_is_gathered_for_its_forward_alone() -> None:
    """Nothing comes back to it. (FSDP2 gathers the highest such block again all the same: it prefetches.)"""
    embedding, layer, head = PROFILE.block_types
    kinds = (replace(embedding, backward=()), replace(layer, backward=()), head)
    _, gather, again, _ = DeviceCosts(replace(PROFILE, block_types=kinds), H200).collectives(4, 1, Link(1e11, 0.0))
    left = PROFILE.parameters["table"] + PROFILE.parameters["head.bias"]
    assert again[0, -1] == pytest.approx(gather[0, -1] * left / PROFILE.parameter_count)


def test_the_largest_block_counts_for_gradients_where_it_is_trained() -> None:
    table = ParameterTable(replace(layered_profile(vocabulary=10**9), frozen=frozenset({"table"})))
    assert table.largest[0, -1] > 10**9
    assert table.largest_trained[0, -1] == 50_000_000


# Requests


def test_numpys_numbers_are_numbers() -> None:
    """`for degree in np.arange(…)`, a column of a table."""
    asked: dict[str, Any] = {"pipeline": 2, "data": 2, "zero": 1, "micro_batch": 4, "global_batch": 64}
    found = plan_of(**{name: np.int64(value) for name, value in asked.items()})
    assert found == plan_of(**asked)
    assert Plan.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert Cluster.of("h200", gpus=np.int32(16), nodes=np.int64(2)) == Cluster.of("h200", gpus=16, nodes=2)
    assert memory_limit_bytes(np.float32(32)) == memory_limit_bytes(np.int64(32)) == 32 * GIB
    with pytest.raises(PlanInfeasible, match=r"micro_batch=2\.0 is not a whole number"):
        plan_of(micro_batch=np.float64(2))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"zero": 1, "micro_batch": 64},
            "with zero=1 suits a global batch of 64 samples in micro-batches of 64 and .* in whole micro-batches, and",
        ),
        (
            {"schedule": "1f1b", "micro_batch": 64},
            "a global batch of 64 in micro-batches of 64 gives no such number on 4",
        ),
        ({"memory_limit_bytes": memory_limit_bytes(1e-12)}, "does not fit 4 × H200.*your limit of"),
        (
            {"global_batch": 100_003},
            "does not fit.*Choose a global batch of 100004, a multiple of 4 devices, or give the plan more",
        ),
    ],
)
def test_a_refusal_is_true_and_its_way_out_is_one(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanInfeasible, match=sentence):
        plan_of(**changes)


def test_a_row_that_the_table_lacks_is_told_by_its_number() -> None:
    plans = weigh(PROFILE, "bf16", Request(64, 512, FOUR_H200))
    assert plans[np.int64(0)] is plans.best
    with pytest.raises(IndexError, match=rf"There is no row 999: the table has rows 0 to {len(plans) - 1}\."):
        plans[999]
    with pytest.raises(TypeError, match="slice"):
        plans[0:2]  # type: ignore[index]


def test_of_two_sharding_stages_that_are_the_same_one_is_weighed() -> None:
    """In a step of one micro-batch gradients are reduced once under ZeRO 2 as under ZeRO 1."""
    one, two = (plan_of(data=4, zero=zero, micro_batch=16) for zero in (1, 2))
    assert one.prediction.step_ms == pytest.approx(two.prediction.step_ms, rel=1e-12)
    assert one.stages[0].memory == two.stages[0].memory
    assert (one.zero, two.zero) == (1, 2), "what is asked for is planned"
    rows = {(row.zero, row.micro_batch * row.data == 64) for row in plan_of(data=4).candidates}
    assert (1, True) in rows
    assert (2, False) in rows
    assert (2, True) not in rows


def test_a_step_of_many_micro_batches_is_planned_as_quickly_as_one_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read off a schedule of few of them."""
    built: list[int] = []
    build = prediction.build_schedule
    monkeypatch.setattr(prediction, "build_schedule", lambda *given: built.append(given[2]) or build(*given))
    assert peak_holdings("gpipe", 4, 200_000, 1) == (((200_000, 0),),) * 4
    assert sum(built) <= 16


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_no_part_of_memory_is_less_than_nothing(chunks: int) -> None:
    """In a step of one micro-batch gradients come as activations go: not before, of a stage that is still to run."""
    found = plan_of(
        replace(PROFILE, compiled=False),
        cluster=Cluster.of("h200", gpus=2),
        global_batch=1,
        pipeline=2,
        schedule="interleaved",
        chunks=chunks,
    )
    for stage in found.stages:
        memory = stage.memory
        assert memory.parameters > 0
        assert 0 <= memory.gradients <= 4 * stage.parameters
        assert min(memory.activations, memory.optimizer, memory.workspace) >= 0


# Plans


def test_a_plan_is_saved_and_loaded(tmp_path: Path) -> None:
    plan = plan_of()
    assert Plan.load(plan.save(tmp_path / "plans" / "plan.json")) == plan


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: {},
        lambda _: [],
        lambda plan: {**plan, "stages": None},
        lambda plan: {**plan, "stages": [{"index": 0}]},
        lambda plan: {**plan, "cluster": {**plan["cluster"], "intra": 3}},
        lambda plan: {**plan, "wings": 2},
        lambda plan: {key: value for key, value in plan.items() if key != "format"},
    ],
)
def test_what_is_not_a_whole_plan_is_refused(damage: Any) -> None:
    value = json.loads(json.dumps(plan_of().to_json()))
    with pytest.raises(PlanMismatch, match=r"not a whole plan .*plan again with wb\.plan"):
        Plan.from_json(damage(value))


def test_a_plan_is_explained_with_a_profile_of_its_own_precision_and_kind_of_device() -> None:
    stored = Plan.from_json(plan_of().to_json())
    with pytest.raises(PlanMismatch, match="is for fp32 on cuda, and the plan is for bf16 on cuda"):
        explain(stored, replace(PROFILE, precision="fp32"))
    with pytest.raises(PlanMismatch, match="is for bf16 on cpu"):
        explain(stored, replace(PROFILE, device_type="cpu"))


def test_degrees_that_were_fixed_are_not_taken_for_a_slow_device() -> None:
    """A plan from a file does not say what was asked of it: what its strategy cost is told apart."""
    fixed = plan_of(pipeline=4, micro_batch=1)
    assert explain(fixed, PROFILE).changes == explain(fixed).changes, "the request is known here"
    found = {change.constraint: change for change in explain(Plan.from_json(fixed.to_json()), PROFILE).changes}
    assert found["degrees"].plan.division() == plan_of().division()
    assert found["degrees"].gain > 0.5
    assert found["memory"].gain == pytest.approx(0, abs=1e-9)
    assert all(change.plan.pipeline == 4 for name, change in found.items() if name != "degrees")


# Words


def test_rates_are_written_with_the_prefixes_of_the_field() -> None:
    rates = (989e12, 999.9e9, 183e9, 5e6, 4e15)
    assert [flops_per_s(rate) for rate in rates] == [
        "989 TFLOP/s",
        "1 TFLOP/s",
        "183 GFLOP/s",
        "5 MFLOP/s",
        "4 PFLOP/s",
    ]


def test_no_number_is_written_with_an_exponent_because_it_is_rounded() -> None:
    assert [count(number) for number in (999.6, 999_600, 999.4)] == ["1 k", "1 M", "999"]
    assert [duration(seconds) for seconds in (0.9996, 0.9994, 59.97, 59.9, 3599.6, 3600)] == [
        "1.0 s",
        "999 ms",
        "1 min 00 s",
        "59.9 s",
        "1 h 00 min",
        "1 h 00 min",
    ]
    written = [duration(0.001 * 1.0001**power) for power in range(0, 170_000, 7)]
    assert not [words for words in written if "e+" in words or "60.0 s" in words or "60 min" in words]
