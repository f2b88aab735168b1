"""Sparse weights as an axis of the plan: what masked and block-sparse ones cost, and which of them is chosen."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_models import Net, batch_for
from capture_models import captured as capture_net
from cost_values import bert, graph_of
from plan_values import costs_of, plan_of, strategy_of

import workbench as wb
from workbench.base.errors import PlanInfeasible, PlanMismatch
from workbench.capture import Graph
from workbench.capture.captured_model import CapturedModel
from workbench.cost import Cluster
from workbench.cost.graph_profiler import profile_graph
from workbench.cost.profile import DENSE, GEMM, BlockMeasurement, Profile, break_even_sparsity, corrected_profile
from workbench.cost.sparse_matrices import (
    SparseMatrices,
    block_sparse_obstacle,
    check_sparsity,
    none_and_all_stored,
    relative_times,
    sparse_matrices,
)
from workbench.experiment import Experiment
from workbench.planning.explanation import explain
from workbench.planning.plan import Plan
from workbench.planning.planner import profile
from workbench.planning.search import what_if
from workbench.sparsity import Dynamic, Static
from workbench.sparsity.kernels import BlockIndex
from workbench.sparsity.pattern import initial, is_present

ONE, FOUR, V100 = Cluster.of("h200", gpus=1), Cluster.of("h200", gpus=4), Cluster.of("v100", gpus=1)
LAYERS, WIDTH = 4, 1024
BASE_BLOCKS = "blocks_bert_base_1xH200_4182f403.json"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SPARSE_ELEMENTS = LAYERS * 12 * WIDTH**2


@cache
def captured() -> Graph:
    return graph_of(bert(hidden_size=WIDTH, num_layers=LAYERS, num_heads=16, max_positions=512), 2, 512)


@cache
def profile_of(block: int, sparsity: float, precision: str = "bf16", obstacle: str = "") -> Profile:
    static = Static(sparsity, block)
    sparse = SparseMatrices(captured(), static, sparse_matrices(captured(), static), obstacle)
    return profile_graph(captured(), ONE.device, precision, compiled=True, sparse=sparse)


@cache
def dense() -> Profile:
    return profile_graph(captured(), ONE.device, "bf16", compiled=True)


def break_even_at(block: int) -> float:
    shapes = sparse_matrices(captured(), Static(0.9, block)).values()
    return break_even_sparsity(none_and_all_stored(block, shapes), ONE.device)


def plan(block: int, sparsity: float, **changes: Any) -> Plan:
    return plan_of(profile_of(block, sparsity), **{"cluster": ONE, **changes})


def experiment(**changes: Any) -> Experiment:
    model = wb.models.bert(hidden_size=64, num_layers=1, num_heads=4, max_positions=64)
    fields = {"model": model, "data": wb.data.corpus("demo", vocab_size=400), "seq_len": 32, "steps": 200}
    return Experiment.of(**{**fields, "sparsity": Static(0.5, 16), **changes})


@pytest.mark.parametrize("block", [16, 32, 64])
def test_the_planner_changes_to_block_sparse_weights_beyond_the_break_even_sparsity(block: int) -> None:
    """They must also save 8 % of the step, of which the products are a part."""
    at = break_even_at(block)
    assert not plan(block, at - 0.06).block_sparse
    assert not plan(block, at).block_sparse
    assert plan(block, min(0.99, at + (0.03 if block == 16 else 0.12))).block_sparse


def test_stored_blocks_that_promise_less_than_the_price_is_exact_to_are_not_chosen() -> None:
    at = break_even_at(32)
    chosen, faster = plan(32, at + 0.02), plan(32, at + 0.02, block_sparse=True)
    assert 0.92 * chosen.prediction.step_ms < faster.prediction.step_ms < chosen.prediction.step_ms
    assert not chosen.block_sparse
    assert "which are taken where they save 8% or more" in chosen.notes[0]
    candidates = [row for row in chosen.candidates if row.block_sparse and "faster" in row.verdict]
    assert all(row.verdict.endswith("if the price of stored blocks is exact") for row in candidates)
    assert candidates


@pytest.mark.parametrize(("row", "micro_batch"), [(2, 1024), (4, 512)])
def test_measured_trainings_with_stored_blocks_took_what_is_predicted_and_are_not_chosen(
    row: int, micro_batch: int
) -> None:
    """One H100, BERT-Medium at 90 %: 109.4 ms with blocks of 16, 80.4 with blocks of 32, and 76 masked."""
    measured = json.loads((RESULTS / "sparse_training_1xH100_a4d6c56.json").read_text())["rows"]
    stored, masked = measured[row], measured[row - 1]
    cluster = Plan.from_json(stored["plan"]).cluster
    trained = Experiment.of(
        model=wb.models.bert(hidden_size=512, num_layers=8, num_heads=8, dropout=0.0),
        data=wb.data.corpus("demo", vocab_size=30522),
        seq_len=128,
        global_batch=1024,
        sparsity=Static(0.9, 16 if row == 2 else 32),
    )
    costs = profile(trained, cluster)
    sizes = {"global_batch": 1024, "seq_len": 128, "cluster": cluster}
    found = what_if(costs, **sizes, micro_batch=micro_batch, block_sparse=True)
    assert found.prediction.step_ms == pytest.approx(stored["measured_ms"], rel=0.08)
    chosen = what_if(costs, **sizes)
    assert not chosen.block_sparse
    assert chosen.prediction.step_ms == pytest.approx(masked["measured_ms"], rel=0.03)


STORED = [
    row
    for row in json.loads((RESULTS / "sparse_training_1xH200_4182f403.json").read_text())["rows"]
    if row["plan"]["block_sparse"]
]
"""Measured trainings of BERT-Base with stored blocks."""


def test_there_are_nine_measured_steps_of_bert_base_with_stored_blocks() -> None:
    assert len(STORED) == 9


@pytest.mark.parametrize("case", dict.fromkeys(row["case"] for row in STORED))
def test_measured_steps_of_bert_base_with_stored_blocks_took_what_is_predicted(case: str) -> None:
    """One H200; the prices were fitted to layers alone. Of the launched plan the host's time is a fitted number."""
    blocks = [BlockMeasurement(**block) for block in json.loads((RESULTS / BASE_BLOCKS).read_text())["blocks"]]
    block, percent = (*map(int, re.findall(r"\d+", case)), 90)[:2]
    trained = Experiment.of(
        model=wb.models.bert(hidden_size=768, num_layers=12, num_heads=12, dropout=0.0),
        data=wb.data.corpus("demo", vocab_size=30522),
        seq_len=128,
        global_batch=512,
        sparsity=Static(percent / 100, block),
    )
    costs = corrected_profile(profile(trained, ONE), ONE.device, blocks)
    sizes = {"global_batch": 512, "seq_len": 128, "cluster": ONE}
    for row in (row for row in STORED if row["case"] == case):
        captured_graphs = row["plan"]["cuda_graphs"]
        found = what_if(costs, **sizes, micro_batch=512, cuda_graphs=captured_graphs, block_sparse=True)
        error = found.prediction.step_ms / row["measured_ms"] - 1
        if case == "base-sparse-16-at-95":
            assert error == pytest.approx(-0.080, abs=0.002), "the one that misses the goal of 8 %"
        else:
            assert abs(error) < 0.08
    chosen = what_if(costs, **sizes)
    assert chosen.cuda_graphs
    assert chosen.block_sparse == (case not in ("base-sparse-16", "base-sparse-32-at-80"))


def test_block_sparse_products_take_their_times_over_dense_ones() -> None:
    masked, sparse = profile_of(32, 0.9), profile_of(32, 0.9).block_sparse
    assert sparse is not None
    layer, forward, backward = masked.blocks[1].block_type, [], []
    for outputs, inputs in [(WIDTH, WIDTH)] * 4 + [(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]:
        stored = Static(0.9, 32).kept(outputs * inputs // 32**2) / (outputs * inputs // 32**2)
        times = relative_times(32, outputs, inputs, stored)
        forward.append(times.forward)
        backward += times[1:]
    of_type = sparse.block_types[layer]
    for kernels, times in ((of_type.forward, forward), (of_type.backward, backward)):
        found = sorted(kernel.relative.on(ONE.device) for kernel in kernels if kernel.family == GEMM)
        assert found == pytest.approx(sorted(time.on(ONE.device) for time in times))
    assert {kernel.relative for cost in masked.block_types for kernel in (*cost.forward, *cost.backward)} == {DENSE}


def test_block_sparse_weights_gradients_and_moments_take_the_stored_share_of_memory() -> None:
    masked, sparse = profile_of(64, 0.9), profile_of(64, 0.9).block_sparse
    assert sparse is not None
    strategy = strategy_of(micro_batch=2, num_microbatches=2)
    before, after = (costs_of(each, ONE).of(strategy).state() for each in (masked, sparse))
    stored = sum(sparse.parameters[name] for name in sparse_matrices(captured(), Static(0.9, 64)))
    assert stored == pytest.approx(0.1 * SPARSE_ELEMENTS, rel=0.01)
    absent = SPARSE_ELEMENTS - stored
    assert (before.parameters - after.parameters)[0, -1] == pytest.approx((4 + 2) * absent)  # and bf16 copies
    assert (before.gradients - after.gradients)[0, -1] == pytest.approx(4 * absent)
    assert (before.optimizer - after.optimizer)[0, -1] == pytest.approx(8 * absent)
    shape = (4 * WIDTH, WIDTH)
    pattern = initial(shape, 64, Static(0.9, 64).kept(1024), "0/weight")
    index = BlockIndex.from_mask(is_present(pattern), 64)
    name = next(name for name, spec in captured().parameters.items() if spec.shape == shape)
    assert sparse.pattern_bytes[name] == pattern.nbytes + index.data.nbytes


def test_masks_take_a_byte_an_element_and_two_passes_over_the_weights() -> None:
    strategy = strategy_of(data=2, zero=2, micro_batch=2, num_microbatches=2)
    for zero, share in ((0, 1.0), (2, 0.5)):
        plain, masked = (
            costs_of(each, FOUR).of(replace(strategy, zero=zero)) for each in (dense(), profile_of(64, 0.9))
        )
        more = (masked.state().total - plain.state().total)[0, -1]
        assert more == pytest.approx(share * SPARSE_ELEMENTS + SPARSE_ELEMENTS / 64**2)
        device = ONE.device
        by_hand_ms = 1e3 * share * 18 * SPARSE_ELEMENTS / (device.memory_bandwidth * device.efficiency.bandwidth)
        assert masked.whole.optimizer - plain.whole.optimizer == pytest.approx(by_hand_ms)
        assert masked.whole.busy == pytest.approx(plain.whole.busy)


def test_a_plan_says_how_it_executes_sparse_weights_and_what_the_other_way_would_take() -> None:
    chosen, other = plan(64, 0.9), plan(64, 0.9, block_sparse=False)
    assert chosen.block_sparse
    assert "block-sparse weights" in repr(chosen)
    assert not other.block_sparse
    assert other.prediction.step_ms > chosen.prediction.step_ms
    assert other.peak_bytes > chosen.peak_bytes
    [note] = chosen.notes
    assert note in explain(chosen, profile_of(64, 0.9)).sentences()
    for figure in (
        "90 %",
        "64 × 64",
        f"{other.prediction.step_ms:.1f} ms",
        f"{chosen.prediction.step_ms:.1f} ms",
        "0.53",
    ):
        assert figure in note
    assert "because block_sparse is False" in other.notes[0]
    assert sum(stage.parameters for stage in chosen.stages) == sum(stage.parameters for stage in other.stages)
    assert Plan.from_json(chosen.to_json()) == chosen
    assert not plan_of(dense(), cluster=ONE).notes


def test_flops_of_absent_blocks_are_no_part_of_the_predicted_mfu() -> None:
    masked, whole = plan(64, 0.9, block_sparse=False), plan_of(dense(), cluster=ONE)
    found, sparse = masked.prediction, profile_of(64, 0.9).sparse
    assert found.mfu is not None
    assert whole.prediction.mfu is not None
    assert sparse is not None
    share = 1 - sparse.absent_flops / dense().flops_per_sample
    assert found.mfu * found.step_ms == pytest.approx(share * whole.prediction.mfu * whole.prediction.step_ms)


def test_block_sparse_weights_are_never_divided_over_devices() -> None:
    rows = plan(64, 0.9, cluster=FOUR).candidates
    sparse = [row for row in rows if row.block_sparse]
    assert any(row.data > 1 for row in sparse)
    assert any(row.pipeline > 1 for row in sparse)
    assert all(row.can_be_block_sparse for row in sparse)
    assert any(row.zero for row in rows)


def test_measured_blocks_correct_block_sparse_ones_too() -> None:
    plain = profile_of(64, 0.9)
    layer = plain.blocks[1].block_type
    forward, backward = plain.analytic_ms(layer, 8, ONE.device)
    measured = BlockMeasurement(1, 8, 2 * forward, 2 * backward, 5e8, 1e8)
    corrected = corrected_profile(plain, ONE.device, [measured])
    before, after = plain.block_sparse, corrected.block_sparse
    assert before is not None
    assert after is not None
    assert after.at(8, ONE.device).forward_ms[1] == pytest.approx(2 * before.at(8, ONE.device).forward_ms[1])
    assert after.block_types[layer].saved_bytes == corrected.block_types[layer].saved_bytes


def test_plans_without_kernels_or_known_rates_are_masked_and_say_why() -> None:
    on_cpu = replace(profile_of(64, 0.9), device_type="cpu", precision="fp32")
    cpu = replace(ONE, device=replace(ONE.device, type="cpu", name="CPU"))
    assert "need a CUDA device" in plan_of(on_cpu, cluster=cpu, precision="fp32").notes[0]
    assert "V100 does not" in plan(64, 0.9, cluster=V100).notes[0]
    fp32 = profile_of(64, 0.9, "fp32")
    assert "not in fp32" in plan_of(fp32, cluster=ONE, precision="fp32").notes[0]
    assert plan_of(fp32, cluster=ONE, precision="fp32", block_sparse=True).block_sparse
    assert "too small" in plan_of(profile_of(8, 0.9, obstacle="blocks of 8 are too small"), cluster=ONE).notes[0]


@pytest.mark.parametrize(
    ("profile", "choices", "message"),
    [
        (dense, {}, "dense weights"),
        (lambda: profile_of(8, 0.9, obstacle="blocks of 8 are too small"), {}, "too small"),
        (lambda: profile_of(64, 0.9), {"zero": 1}, "zero=1 divides"),
        (lambda: profile_of(64, 0.9), {"tensor": 2}, "tensor=2 divides"),
        (lambda: profile_of(64, 0.9), {"cluster": V100}, "multiplies in bf16"),
    ],
)
def test_block_sparse_weights_that_are_asked_for_in_vain_are_refused(
    profile: Any, choices: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanInfeasible, match=f"block_sparse=True does not run here: .*{message}"):
        plan_of(profile(), **{"cluster": FOUR, "block_sparse": True, **choices})


def test_a_block_sparse_choice_is_a_bool() -> None:
    with pytest.raises(PlanInfeasible, match="block_sparse='masked' is neither True nor False"):
        wb.plan(experiment(), FOUR, block_sparse="masked")


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({}, ""),
        ({"sparsity": None}, "dense weights"),
        ({"sparsity": Static(0.5, 8)}, "none for blocks of 8"),
        ({"sparsity": Dynamic(0.5, 16, regrow="gradient", updates=3)}, "gradients of absent blocks"),
        ({"optimizer": "muon"}, "whole of a weight"),
    ],
)
def test_the_reason_why_weights_can_only_be_masked_is_a_clause(changes: dict[str, Any], obstacle: str) -> None:
    tried = experiment(**changes)
    found = block_sparse_obstacle(tried, wb.planning.graph(tried))
    assert obstacle in found
    assert bool(obstacle) == bool(found)


def test_a_weight_that_several_blocks_read_can_only_be_masked() -> None:
    pattern = experiment(sparsity=Static(0.0, 16, "layers"))
    own, shared = Net(), Net()
    shared.layers = torch.nn.ModuleList([shared.layers[0]] * 4)
    for net, obstacle in (
        (own, ""),
        (shared, "the model reads layers.0.0.weight otherwise than in one matrix product"),
    ):
        assert block_sparse_obstacle(pattern, capture_net(net, batch_for("Net"))) == obstacle


def test_a_block_sparse_plan_of_another_experiment_is_refused_before_a_process_starts() -> None:
    block_sparse = replace(plan(64, 0.9), block_sparse=True)
    for changes, message in (({"sparsity": None}, "dense weights"), ({"sparsity": Static(0.5, 8)}, "blocks of 8")):
        with pytest.raises(PlanMismatch, match=message):
            check_sparsity(experiment(**changes), block_sparse, CapturedModel(experiment(**changes), 2))
    check_sparsity(experiment(), block_sparse, CapturedModel(experiment(), 2))
    with pytest.raises(PlanMismatch, match="parts of weights"):
        check_sparsity(experiment(), replace(block_sparse, tensor=2), CapturedModel(experiment(), 2))
