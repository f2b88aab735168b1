"""The cost model against torch itself, against closed forms, and against its own arithmetic."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cost_values import bert, gpt2, graph_of, layered_profile
from plan_values import strategy_of
from torch import nn
from torch.nn import functional

from tests.distributed import zoo
from workbench.base.errors import CaptureError, InvalidArgument, PlanInfeasible, UnknownParameter
from workbench.capture import Block, Graph, capture, spec_of
from workbench.cost import Cluster, Link, Profile
from workbench.cost.graph_profiler import profile_graph
from workbench.cost.hardware import NODES, Node, all_gather_s, all_reduce_s, point_to_point_s, reduce_scatter_s
from workbench.cost.memory import Activations, ParameterTable, StageState, activations, stage_state
from workbench.cost.profile import BlockCosts, BlockTypeCost
from workbench.measure import detection
from workbench.measure.calibration import local_cluster
from workbench.measure.detection import GEMM_SHARE, with_measured_rates

H200 = Cluster.of("h200", gpus=4)
CPU = local_cluster(processes=2)


# Clusters


@pytest.mark.parametrize("name", [*NODES, "H200", "RTX 4090"])
def test_every_named_cluster_survives_json(name: str) -> None:
    cluster = Cluster.of(name, gpus=16)
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


def test_this_machine_survives_json_and_is_measured_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    first = local_cluster(processes=2)
    again = local_cluster(processes=2)
    assert again.device.peak_flops == first.device.peak_flops
    assert first.device.peak_flops["fp32"] > 1e8
    assert Cluster.from_json(json.loads(json.dumps(first.to_json()))) == first


@pytest.mark.parametrize(
    ("torch_name", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("Tesla V100-SXM3-32GB", "V100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA H100 NVL", None),
    ],
)
def test_a_gpu_matches_the_table_only_if_speed_and_links_match(torch_name: str, name: str | None) -> None:
    node = Node.of_card(torch_name)
    assert (node.device.name if node else None) == name


def test_a_card_is_one_record_by_which_clusters_are_made_and_the_cards_of_a_machine_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h200, link = NODES["h200"], replace(NODES["h200"].intra, bandwidth=800e9)
    card = replace(h200.device, name="B300", memory_bytes=270 << 30)
    made = h200._replace(device=card, intra=link, card="nvidia b300 sxm6 ac")
    monkeypatch.setitem(NODES, "b300", made)
    assert Cluster.of("b300", gpus=2).intra == link
    properties = SimpleNamespace(total_memory=270 << 30)
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_name=lambda _: "NVIDIA B300 SXM6 AC",
        get_device_properties=lambda _: properties,
    )
    monkeypatch.setattr("torch.cuda", cuda)
    assert detection.local_gpu_name() == "B300"
    assert detection.detected_cluster(None).intra == link
    monkeypatch.delitem(NODES, "b300")
    monkeypatch.setattr(detection, "_rates", lambda _: {"fp32": 1e13, "bf16": 1e14, "bandwidth": 1e12})
    unknown = detection.detected_cluster(None)
    assert unknown.intra == detection.PCIE
    assert "its links are taken for those of PCIe until wb.measure.calibrate() measures them" in unknown.device.measured


def test_a_listed_card_keeps_its_data_sheets_peak_and_takes_its_measured_efficiency() -> None:
    card = Cluster.of("rtx-4090", gpus=2).device
    found = with_measured_rates(card, {"bf16": 120e12, "fp32": 60e12, "bandwidth": 900e9})
    assert found.peak("bf16") == card.peak("bf16")
    assert found.efficiency.gemm == pytest.approx(GEMM_SHARE * 120 / 165.2)
    assert found.efficiency.bandwidth == pytest.approx(900 / 1008)


def test_an_unknown_device_name_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownParameter, match="Did you mean 'h200'"):
        Cluster.of("h20", gpus=1)


def test_a_containers_memory_is_its_limit(tmp_path: Any, monkeypatch: Any) -> None:
    from workbench.measure import detection as detect

    limit, none = tmp_path / "memory.max", tmp_path / "none"
    monkeypatch.setattr(detect, "CONTAINER_LIMITS", (limit, none))
    whole = detect._host_bytes()
    limit.write_text("max\n")
    assert detect._host_bytes() == whole
    limit.write_text("1073741824\n")
    assert detect._host_bytes() == 1 << 30


def test_a_devices_share_of_its_host_is_known_and_stored() -> None:
    one, eight = Cluster.of("h200", gpus=1), Cluster.of("h200", gpus=8)
    assert one.host_bytes == eight.host_bytes == 256 << 30
    assert Cluster.from_json(json.loads(json.dumps(one.to_json()))).host_offered_bytes == 0.8 * (256 << 30)
    older = {key: value for key, value in one.to_json().items() if key != "host_bytes"}
    assert Cluster.from_json(older).host_offered_bytes == float("inf"), "not known, not checked"


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "4", True, None])
def test_a_number_of_devices_that_is_not_whole_is_refused(wrong: Any) -> None:
    with pytest.raises(PlanInfeasible, match=r"Cluster\.gpus=.* (must be 1 or more|is not a whole number)"):
        Cluster.of("h200", gpus=wrong)
    if wrong is not None:
        with pytest.raises((PlanInfeasible, InvalidArgument), match=r"must be 1 or more|Give a whole number"):
            local_cluster(wrong)
        with pytest.raises(PlanInfeasible, match=r"8 GPUs cannot be divided evenly"):
            Cluster.of("h200", gpus=8, nodes=wrong if wrong is not True else 0)


def test_nodes_must_share_the_gpus_evenly() -> None:
    with pytest.raises(PlanInfeasible, match="10 GPUs cannot be divided evenly over 4 nodes"):
        Cluster.of("h200", gpus=10, nodes=4)
    assert Cluster.of("h200", gpus=256).nodes == 32


# Communication


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    link = Link(100e9, 1e-5)
    parts = reduce_scatter_s(1e9, 8, link) + all_gather_s(1e9, 8, link)
    assert all_reduce_s(1e9, 8, link) == pytest.approx(parts)
    assert all_reduce_s(1e9, 8, Link(100e9, 0.0)) == pytest.approx(2 * 7 / 8 * 1e9 / 100e9)


def test_an_all_reduce_of_two_reaches_its_own_share_of_the_bandwidth() -> None:
    link = Link(100e9, 1e-5, paired=0.5)
    assert all_reduce_s(1e9, 2, link) == pytest.approx(2e-5 + 1e9 / 50e9)
    assert all_reduce_s(1e9, 4, link) == all_reduce_s(1e9, 4, Link(100e9, 1e-5))


def test_a_group_of_one_communicates_nothing() -> None:
    assert all_reduce_s(1e9, 1, Link(1e9, 1.0)) == 0.0
    assert point_to_point_s(1e9, Link(1e9, 0.5)) == pytest.approx(1.5)


# What a block costs


def test_model_flops_are_six_per_weight_and_token_plus_attention() -> None:
    """PaLM (arXiv:2204.02311, appendix B): 6 N + 12 L H Q T per token; N without embeddings that are only looked up."""
    hidden, layers, vocab, seq_len = 64, 3, 512, 32
    model = bert(next_sentence=False)
    found = profile_graph(graph_of(model, seq_len=seq_len), H200.device, "bf16", compiled=True)
    weights = layers * 12 * hidden**2 + hidden**2 + hidden * vocab
    per_token = 6 * weights + 12 * layers * hidden * seq_len
    assert found.flops_per_sample == pytest.approx(seq_len * per_token, rel=1e-6)


def test_equal_layers_are_one_block_type() -> None:
    found = profile_graph(graph_of(bert(num_layers=5)), H200.device, "bf16", compiled=True)
    assert len(found.blocks) == 7
    assert len(found.block_types) == 3
    assert len({block.block_type for block in found.blocks[1:-1]}) == 1


@pytest.mark.parametrize("samples", [1, 4])
def test_costs_do_not_depend_on_the_micro_batch_of_the_capture(samples: int) -> None:
    ours = profile_graph(graph_of(bert(), samples=samples), H200.device, "bf16", compiled=True).at(8, H200.device)
    reference = profile_graph(graph_of(bert(), samples=2), H200.device, "bf16", compiled=True).at(8, H200.device)
    np.testing.assert_allclose(ours.forward_ms, reference.forward_ms, rtol=1e-6)
    np.testing.assert_allclose(ours.saved_bytes, reference.saved_bytes, rtol=1e-2)


def test_a_faster_device_is_never_slower() -> None:
    costs = profile_graph(graph_of(bert(hidden_size=512, num_heads=8)), H200.device, "bf16", compiled=True)
    slow = costs.at(64, Cluster.of("v100").device)
    fast = costs.at(64, Cluster.of("a100").device)
    assert (fast.forward_ms <= slow.forward_ms).all()


def test_fusion_moves_no_more_bytes_than_single_operations() -> None:
    graph = graph_of(bert())

    def traffic(compiled: bool) -> float:
        found = profile_graph(graph, H200.device, "bf16", compiled=compiled)
        return sum(kernel.bytes for kind in found.block_types for kernel in (*kind.forward, *kind.backward))

    assert traffic(True) < 0.8 * traffic(False)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("make", "left_out"), [(bert, 0), (partial(bert, layout="pre_ln"), 1), (gpt2, 1)])
def test_checkpointing_recomputes_no_product_that_only_a_residual_sum_reads(
    make: Callable[..., Any], left_out: int, dropout: float
) -> None:
    """A block's backward does not read what its forward adds to the residual last, unless that is then normalised."""
    kind = profile_graph(graph_of(make(dropout=dropout), seq_len=32), H200.device, "bf16", compiled=True).block_types[1]
    query_key_value, attention_out, up, down = 3 * 64, 2 * 64, 256, 64
    assert sum(kernel.flops for kernel in kind.forward if not kernel.recomputed) == left_out * 2 * 32 * down * up
    kept = 2 * 32 * (query_key_value + attention_out + up + (1 - left_out) * down)
    assert kept <= kind.products_bytes < kept + 2 * 32 * down, "and a log-sum-exp"


class _Layer(nn.Module):
    """A layer that adds its residual in place, to a view of it, or not; perhaps with BatchNorm or random slopes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(16, 64), nn.Linear(64, 16)
        self.norm = nn.BatchNorm1d(16) if how == "norm" else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.down(functional.gelu(self.up(self.norm(x))))
        if self.how == "in place":
            found += x
        elif self.how == "view":
            found.view(-1).add_(x.view(-1))
        else:
            found = x + (functional.rrelu(found, training=True) if self.how == "slopes" else found)
        return found


class _Layers(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(_Layer(how) for _ in range(4)), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x), labels)


def test_checkpointing_is_priced_as_a_block_can_do_it() -> None:
    """What ranks do: a view that is written keeps no products; BatchNorm and random slopes are never repeated."""
    batch = {"x": torch.zeros(8, 16), "labels": torch.zeros(8, dtype=torch.int64)}

    def costs(how: str) -> tuple[BlockCosts, dict[str, list[float]]]:
        graph = capture(_Layers(how), {key: spec_of(key, value) for key, value in batch.items()}, name=how)
        found = profile_graph(graph, H200.device, "bf16", compiled=True)
        kept = {mode: activations_of(found).held[at, 0, 2:4].tolist() for at, mode in enumerate(("none", "full"))}
        return found.at(8, H200.device), kept

    for how in ("plain", "in place"):
        blocks, kept = costs(how)
        assert (blocks.selective_recompute_ms[1:4] < blocks.full_recompute_ms[1:4]).all()
        assert kept["full"] < kept["none"]
    blocks, _ = costs("view")
    assert (blocks.selective_recompute_ms == blocks.full_recompute_ms).all()
    assert (blocks.full_recompute_ms[1:4] > 0).all()
    for how in ("norm", "slopes"):
        blocks, kept = costs(how)
        assert not (blocks.selective_recompute_ms + blocks.full_recompute_ms).any()
        assert kept["full"] == kept["none"]


def test_selective_checkpointing_adds_less_to_a_compiled_backward() -> None:
    graph = graph_of(bert())
    share = H200.device.efficiency.selective_recompute
    for compiled, most in ((True, share), (False, 1.0)):
        costs = profile_graph(graph, H200.device, "bf16", compiled=compiled).at(8, H200.device)
        assert (costs.selective_recompute_ms[:-1] > 0).all()
        assert costs.selective_recompute_ms[-1] == costs.full_recompute_ms[-1] == 0, "the last block is not recomputed"
        assert (costs.selective_recompute_ms <= most * costs.full_recompute_ms).all()
        assert (costs.full_recompute_ms <= costs.forward_ms).all()


@pytest.mark.parametrize(
    "model",
    [bert(dropout=0.1), bert(dropout=0.0), bert(layout="pre_ln", dropout=0.1), gpt2()],
    ids=["post_ln", "post_ln without dropout", "pre_ln", "gpt2"],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_saved_activations_are_what_autograd_saves(model: Any, precision: str) -> None:
    """Every block type runs for real at another micro-batch; the tensors that autograd saves are the oracle."""
    costs = profile_graph(graph_of(model), CPU.device, precision, compiled=False)
    real = graph_of(model, samples=6)
    for index in {block.block_type: block.index for block in reversed(real.blocks)}.values():
        expected = costs.block_types[costs.blocks[index].block_type].saved_bytes * 6
        assert expected == pytest.approx(_really_saved(real, real.blocks[index], precision), rel=0.1)


def _really_saved(graph: Graph, block: Block, precision: str) -> int:
    """Return the bytes of distinct memory saved for one block's backward, without parameters and their casts."""
    weights = [torch.randn(graph.parameters[name].shape).requires_grad_() for name in block.parameters]
    buffers = [_zeros(graph.buffers[name]) for name in block.buffers]
    # Not leaves: autocast would keep one cast of a leaf for all its uses.
    received = [torch.randn(graph.values[name].shape).requires_grad_().clone() for name in block.receives]
    inputs = [_zeros(graph.batch[name]) for name in block.inputs]
    counts = [torch.ones(()) for _ in block.counts]
    saved: dict[int, torch.Tensor] = {}
    resident = {tensor.untyped_storage().data_ptr() for tensor in [*weights, *buffers]}
    shapes = {tuple(sorted(weight.shape)) for weight in weights if weight.ndim > 1}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_cast = tensor.dtype == torch.bfloat16 and tuple(sorted(tensor.shape)) in shapes
        if storage.data_ptr() not in resident and not is_cast:
            saved[storage.data_ptr()] = tensor
        return tensor

    for node in block.code.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.update_kwarg("device", torch.device("cpu"))
    block.code.recompile()
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        outputs = block.code(*weights, *buffers, *received, *inputs, *counts)
        assert outputs is not None
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def _zeros(spec: Any) -> torch.Tensor:
    return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))


# Tensor parallelism


def test_a_tensor_parallel_rank_has_its_share_of_products_and_activations() -> None:
    """(12 + 24 / t) bytes per token and hidden unit: bf16 with an fp32 residual stream and recomputed masks;
    Megatron's 10 + 24 / t has half of such a stream and keeps masks (arXiv:2205.05198, section 4)."""
    hidden, samples, tokens = 256, 2, 128
    model = bert(hidden_size=hidden, num_heads=8, max_positions=tokens)
    whole = profile_graph(graph_of(model, samples, tokens), H200.device, "bf16", compiled=True)
    assert list(whole.divided) == [2, 4, 8]
    for degree in whole.divided:
        part = whole.on_tensor_axis(degree)
        layer, divided = whole.block_types[1], part.block_types[1]
        assert _flops(divided) == pytest.approx(_flops(layer) / degree)
        per_unit = divided.saved_bytes / (hidden * tokens)
        assert per_unit == pytest.approx(12 + 24 / degree, rel=0.01)
        in_sum = tuple(size / (hidden * tokens) for size in divided.forward_reduced_bytes)
        assert in_sum == (2, 2)
        assert tuple(size / (hidden * tokens) for size in divided.backward_reduced_bytes) == (2, 2)
        layers = [n for n in whole.parameters if ".layer.0." in n and n.endswith("weight") and "Norm" not in n]
        assert all(part.parameters[n] * degree == whole.parameters[n] for n in layers)
        assert part.flops_per_sample == whole.flops_per_sample, "MFU counts the model, not the rank"


def profile_of_bert(make: Callable[[], torch.nn.Module]) -> Profile:
    """Return the profile of a model that has real weights."""
    batch = {name: spec_of(name, value) for name, value in zoo.batch("bert", 4).items()}
    return profile_graph(capture(make().train(), batch, name="bert"), H200.device, "bf16", compiled=True)


def test_a_checkpointed_block_repeats_no_all_reduce_that_its_backward_does_not_need() -> None:
    """BERT normalises the last sum of a layer; GPT passes it on."""
    for model, repeated in ((bert(), 2), (gpt2(), 1)):
        layer = profile_graph(graph_of(model), H200.device, "bf16", compiled=True).on_tensor_axis(2).block_types[1]
        assert len(layer.forward_reduced_bytes) == 2
        assert layer.recompute_reduced_bytes == layer.forward_reduced_bytes[:repeated]


def test_frozen_lower_layers_reduce_no_gradient_over_the_tensor_axis() -> None:
    found = profile_of_bert(zoo.bert_half_frozen).on_tensor_axis(2)
    layers = [found.block_types[block.block_type] for block in found.blocks[1:5]]
    assert [len(layer.forward_reduced_bytes) for layer in layers] == [2] * 4
    assert [len(layer.backward_reduced_bytes) for layer in layers] == [0, 0, 1, 2]


def test_a_degree_that_does_not_divide_the_heads_is_not_offered() -> None:
    found = profile_graph(graph_of(bert(num_heads=4), 2, 32), H200.device, "bf16", compiled=True)
    assert list(found.divided) == [2, 4]


def _flops(kind: BlockTypeCost) -> float:
    return sum(kernel.flops for kernel in (*kind.forward, *kind.backward))


# Memory of a stage


def state_of(found: Profile, **changes: Any) -> StageState:
    strategy = strategy_of(**{"micro_batch": 4, "num_microbatches": 8, **changes})
    return stage_state(found, ParameterTable(found), strategy)


def activations_of(found: Profile, **changes: Any) -> Activations:
    strategy = strategy_of(**{"micro_batch": 4, "num_microbatches": 8, **changes})
    return activations(found.at(4, H200.device), ParameterTable(found), strategy, found, ("none", "full"))


def test_a_tied_parameter_is_counted_once_in_a_stage_and_once_in_each_that_holds_it() -> None:
    found = layered_profile(layers=4, elements=10, vocabulary=1000)
    table = ParameterTable(found)
    assert table.elements[0, 6] == 4 * 10 + 1000 + 30_000
    assert table.elements[0, 3] == 2 * 10 + 1000
    assert table.elements[3, 6] == 2 * 10 + 1000 + 30_000


def test_training_state_is_sixteen_bytes_a_parameter_without_sharding() -> None:
    found = layered_profile()
    memory = state_of(found)
    whole = (0, len(found.blocks))
    state = memory.parameters[whole] + memory.gradients[whole] + memory.optimizer[whole]
    assert state == 16 * found.parameter_count


def test_zero_3_shards_all_state_and_zero_2_keeps_all_gathered_weights() -> None:
    found = layered_profile()
    whole = (0, len(found.blocks))
    two, three = state_of(found, zero=2, data=4), state_of(found, zero=3, data=4)
    for memory in (two, three):
        assert memory.gradients[whole] + memory.optimizer[whole] == 12 * found.parameter_count / 4
    assert two.parameters[whole] == (4 / 4 + 2) * found.parameter_count
    assert three.parameters[whole] < two.parameters[whole]


def test_weight_copies_that_are_kept_for_a_step_are_counted_once() -> None:
    found = profile_graph(graph_of(bert(hidden_size=256, num_heads=8), 2, 64), H200.device, "bf16", compiled=True)
    whole, layer = (0, len(found.blocks)), found.block_types[1]
    matrices = 12 * 256 * 256
    assert layer.cast_elements == pytest.approx(matrices, rel=0.01), "and their biases"
    more = state_of(found).parameters[whole] - state_of(found, data=2).parameters[whole]
    own = sum(min(found.block_types[b.block_type].cast_elements, 2 * matrices) for b in found.blocks)
    assert 0.9 * own <= more / 2 <= own
    cast, kept = (activations_of(found, data=data) for data in (2, 1))
    assert (cast.of(3) - kept.of(3))[0, 1, 2] == pytest.approx(3 * 2 * layer.cast_elements, rel=0.01)


def test_checkpointing_holds_block_inputs_and_one_blocks_activations_besides_those_of_the_last_block() -> None:
    found = layered_profile()
    memory, plain, checkpointed = activations_of(found), (0, 0, len(found.blocks)), (1, 0, len(found.blocks))
    inputs, last = (
        4 * sum(block.input_bytes for block in found.blocks[:-1]),
        (0, len(found.blocks) - 1, len(found.blocks)),
    )
    assert memory.held[checkpointed] == pytest.approx(inputs + memory.held[last])
    assert memory.newest[checkpointed] < 0.5 * memory.newest[plain]
    assert memory.newest[checkpointed] > memory.held[checkpointed]


def test_each_further_micro_batch_in_flight_holds_as_much_as_the_last() -> None:
    memory, stage = activations_of(layered_profile()), (0, 1, 5)
    assert memory.of(3)[stage] - memory.of(2)[stage] == pytest.approx(memory.held[stage])


def test_gradients_of_a_steps_only_micro_batch_appear_while_activations_are_freed() -> None:
    found = layered_profile(layers=4, elements=50_000_000, vocabulary=1000)
    whole, (embedding, layer, head) = (0, 0, len(found.blocks)), (kind.saved_bytes * 4 for kind in found.block_types)

    def peak(**changes: Any) -> float:
        state = state_of(found, zero=1, data=4, **changes)
        return float(state.total[whole[1:]] + activations_of(found, zero=1, data=4, **changes).newest[whole])

    def resident(gradients: float, **changes: Any) -> float:
        state = state_of(found, zero=1, data=4, **changes)
        return float((state.total - state.gradients)[whole[1:]]) + gradients

    everything = embedding + 4 * layer + head + 4 * 90e6
    tied_and_head = 1000 + 30_000
    assert peak() == pytest.approx(resident(4 * found.parameter_count) + everything), "of the micro-batch before"
    assert peak(num_microbatches=1) == pytest.approx(resident(4 * tied_and_head / 4, num_microbatches=1) + everything)
    wide = layered_profile(layers=4, elements=50_000_000_000, vocabulary=1000)
    state = state_of(wide, zero=1, data=4, num_microbatches=1)
    newest = activations_of(wide, zero=1, data=4, num_microbatches=1).newest[whole]
    assert state.gradients[whole[1:]] == wide.parameter_count
    assert newest == pytest.approx(embedding + layer + 4 * 9e6), "all are there when the first layer runs backward"


def test_frozen_lower_layers_have_no_backward_and_keep_nothing_for_one() -> None:
    whole, half = profile_of_bert(zoo.bert_pretraining), profile_of_bert(zoo.bert_half_frozen)
    all_trained, costs = whole.at(4, H200.device), half.at(4, H200.device)
    frozen, first, rest = slice(0, 3), 3, slice(4, None)
    np.testing.assert_allclose(costs.forward_ms, all_trained.forward_ms, rtol=2e-3)  # less is written
    for cost in (costs.backward_ms, costs.host_ms[1], costs.saved_bytes, costs.input_bytes, costs.weight_copy_bytes):
        assert not cost[frozen].any()
    assert 0 < costs.backward_ms[first] < all_trained.backward_ms[first], "nobody asks for its input's gradient"
    np.testing.assert_allclose(costs.backward_ms[rest][:-1], all_trained.backward_ms[rest][:-1])
    layers, head = half.block_types[1:3], half.block_types[-1]
    assert layers[0].model_backward_flops == 0 < layers[1].model_backward_flops < 2 * layers[1].model_flops
    assert half.block_types[half.blocks[4].block_type].model_backward_flops == 2 * layers[0].model_flops
    assert head.model_backward_flops < 2 * head.model_flops, "its decoder is the frozen embedding's"
    assert (
        half.flops_per_sample
        < whole.flops_per_sample
        == 3 * sum(whole.block_types[block.block_type].model_flops for block in whole.blocks)
    )


def test_a_frozen_parameter_has_no_gradient_and_no_optimizer_state() -> None:
    from dataclasses import replace

    found = replace(layered_profile(layers=2, elements=100, vocabulary=1000), frozen=frozenset({"layer.0.weight"}))
    memory = state_of(found)
    assert memory.parameters[1, 2] == 400
    assert memory.gradients[1, 2] == memory.optimizer[1, 2] == 0


class Spectral(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = torch.nn.Linear(8, 16), torch.nn.Linear(9, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.stem(x)).abs()
        return torch.nn.functional.cross_entropy(self.head(spectrum), labels)


def test_an_operation_that_does_not_take_bf16_is_refused_with_its_line() -> None:
    batch = {"x": torch.zeros(2, 8), "labels": torch.zeros(2, dtype=torch.long)}
    graph = capture(Spectral(), {name: spec_of(name, value) for name, value in batch.items()}, name="Spectral")
    profile_graph(graph, H200.device, "fp32", compiled=True)
    said = r"Spectral: fft_rfft at .*test_cost.py:\d+ \(`spectrum = .*cannot run in bf16: Unsupported.*precision='fp32'"
    with pytest.raises(CaptureError, match=said):
        profile_graph(graph, H200.device, "bf16", compiled=True)


def test_blocks_that_launch_the_same_in_every_step_can_be_captured() -> None:
    """A head over labelled rows cannot, unless tensor parallelism divides it; nor can recomputed attention dropout."""
    found = profile_graph(graph_of(bert(dropout=0.1)), H200.device, "bf16", compiled=True)
    capturable = [found.block_types[block.block_type].capturable for block in found.blocks]
    assert set(capturable[1:-1]) == {("none", "selective")}
    assert capturable[-1] == ()
    divided = found.on_tensor_axis(2)
    assert divided.block_types[divided.blocks[-1].block_type].capturable == ("none", "selective", "full")
    still = profile_graph(graph_of(bert(dropout=0.0)), H200.device, "bf16", compiled=True)
    assert still.block_types[still.blocks[1].block_type].capturable == ("none", "selective", "full")
