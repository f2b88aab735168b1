"""Every term of a predicted step and every constant of the cost model, by a value that is worked out here by hand.

The device moves 1e9 bytes a second, of which kernels reach half, so that a byte takes 2e-6 ms; FSDP2's copies reach
0.4, 2.5e-6 ms a byte. It has 1e12 FLOP/s. The model has two equal layers of a million weights each; micro-batches have
two samples. A product of 2e9 FLOPs reaches a quarter of the peak: half of the share of large ones, which is a half.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from plan_values import costs_of, strategy_of

from workbench.cost import hardware, memory, profile, sparse_matrices
from workbench.cost.hardware import Cluster, Device, Efficiency, Link
from workbench.cost.profile import (
    ATTENTION,
    GEMM,
    STREAM,
    BlockCost,
    BlockTypeCost,
    DividedCosts,
    Kernel,
    ParameterUpdate,
    Profile,
    RelativeTime,
    SparseCosts,
)
from workbench.planning import plan as plans
from workbench.planning import search, stage_costs
from workbench.planning.request import Request
from workbench.planning.search import checked_search
from workbench.strategy import Fixed, Strategy

EFFICIENCY = Efficiency(
    gemm=0.5,
    gemm_half_flops=2e9,
    attention_forward=0.25,
    attention_backward=0.4,
    bandwidth=0.5,
    launch_s=1e-3,
    compiled_launch_s=2e-3,
    block_forward_s=1e-3,
    block_backward_s=2e-3,
    selective_recompute=0.4,
    overlapped_link=0.5,
    action_s=3e-3,
    sharded_block_s=4e-3,
    sharded_collective_s=5e-3,
    matrix_s=6e-3,
    collective_s=7e-3,
    stored_product_s=9e-3,
    step_s=20e-3,
    captured_block_s=0.1e-3,
    captured_action_s=0.5e-3,
)
DEVICE = Device("round", "cuda", 10**11, {"bf16": 1e12, "fp32": 5e11}, 1e9, efficiency=EFFICIENCY)
FAST, SLOW = Link(1e9, 1e-3, paired=0.8), Link(1e8, 1e-3, paired=0.8)
"""Links of which collectives beside compute reach half."""
LAYER = BlockTypeCost(
    block_type="layer",
    forward=(Kernel(GEMM, 1e9, 0.0, 0.0), Kernel(STREAM, 0.0, 5e6, 20e6, 3)),
    backward=(Kernel(GEMM, 2e9, 0.0, 0.0, 2), Kernel(ATTENTION, 1e9, 0.0, 0.0), Kernel(STREAM, 0.0, 10e6, 0.0)),
    model_flops=1e9,
    saved_bytes=3e6,
    workspace_bytes=1e6,
    weight_copy_bytes=2e6,
    cast_elements=1e6,
    products_bytes=1e6,
    model_backward_flops=2e9,
    capturable=("none", "selective"),
)
NAMES = ("layer.0", "layer.1")
MODEL = Profile(
    *("round", "0" * 16, "bf16", "cuda", True),
    block_types=(LAYER,),
    blocks=tuple(BlockCost(name, 0, (f"{name}.weight",), 4e5) for name in NAMES),
    parameters={f"{name}.weight": 10**6 for name in NAMES},
    frozen=frozenset(),
    crossing_bytes=(0.0, 1e6, 0.0),
)


def cluster(link: Link = FAST, **changes: float) -> Cluster:
    device = dataclasses.replace(DEVICE, efficiency=dataclasses.replace(EFFICIENCY, **changes))
    return Cluster(device, 2, 2, link, link)


def terms(model: Profile = MODEL, on: Cluster | None = None, **choices: Any) -> dict[str, float]:
    """Milliseconds of the whole model as one stage with one strategy, of two micro-batches of two samples."""
    strategy = strategy_of(**{"micro_batch": 2, "num_microbatches": 2, **choices})
    found = costs_of(model, on or cluster()).of(strategy).whole
    return {field.name: float(getattr(found, field.name)) for field in dataclasses.fields(found)}


def check(found: dict[str, float], **expected: float) -> None:
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_a_block_takes_the_longer_of_arithmetic_and_traffic_of_each_kernel_and_its_launches() -> None:
    for compiled, launch_ms in ((True, 2.0), (False, 1.0)):
        costs = dataclasses.replace(MODEL, compiled=compiled).at(2, DEVICE)
        products, streams = 8.0 + launch_ms, 60.0 + 3 * launch_ms
        assert costs.forward_ms == pytest.approx([products + streams] * 2)
        assert costs.backward_ms == pytest.approx([(16.0 + 2 * launch_ms) + (5.0 + launch_ms) + (40.0 + launch_ms)] * 2)
        assert costs.full_recompute_ms == pytest.approx([products + streams, 0.0]), "the last block is not recomputed"
        assert costs.selective_recompute_ms == pytest.approx([(0.4 if compiled else 1.0) * streams, 0.0])
        # Casts of a million weights: 6 bytes each forward, 8 backward, and a share of 6 in what is recomputed.
        expected = [12.0] * 2, [16.0] * 2, [(0.4 if compiled else 1.0) * 12.0] * 2
        assert np.array(costs.casts_ms) == pytest.approx(np.array(expected))
        assert [ms.tolist() for ms in costs.host_ms] == [[1.0, 1.0], [2.0, 2.0]]
    forward_attention = Kernel(ATTENTION, 1e9, 0.0, 0.0)
    assert forward_attention.seconds(2, DEVICE, "bf16", backward=False, compiled=True) == pytest.approx(8e-3 + 2e-3)
    assert forward_attention.seconds(2, DEVICE, "fp32", backward=False, compiled=True) == pytest.approx(16e-3 + 2e-3)


def test_one_device_keeps_bf16_copies_and_updates_in_one_pass() -> None:
    """Two layers of 76 and 69 ms, without casts of 12 and 16. AdamW moves 28 bytes of each of two million weights, the
    norm 4, and the copy 2; clipping and copying by themselves 8 and 4 more. The moving average moves 3 × 4."""
    base = {"forward": 128.0, "backward": 106.0, "host": 6.0, "host_wait": 0.0}
    check(terms(), **base, forward_wait=0.0, backward_wait=0.0, step_wait=0.0, optimizer=136.0, orthogonalisation=0.0)
    check(terms(dataclasses.replace(MODEL, optimizer_in_one_pass=False)), **base, optimizer=184.0)
    check(terms(dataclasses.replace(MODEL, average_bytes=4.0)), optimizer=136.0 + 48.0)
    check(terms(dataclasses.replace(MODEL, precision="fp32")), optimizer=128.0)
    update = {"layer.0.weight": ParameterUpdate(4.0, 20.0)}
    check(terms(dataclasses.replace(MODEL, parameter_updates=update)), optimizer=136.0 - 8 * 2.0)
    # One micro-batch: gradients stay in bf16 and are added to nothing; norm and update read them.
    check(terms(num_microbatches=1), forward=128.0, backward=106.0 - 10 * 4.0, optimizer=136.0 - 4 * 4.0)
    # A mask is read twice with a weight and its gradient, which are read and written: 18 bytes of a million weights.
    masked = SparseCosts(0.5, 1, {"layer.0.weight": 10**6}, 0.0)
    check(terms(dataclasses.replace(MODEL, sparse=masked)), optimizer=136.0 + 36.0)


def test_weights_that_several_blocks_of_a_stage_read_are_cast_with_each_use() -> None:
    """They have no bf16 copies: the casts of 12 and 16 ms of each layer stay. A CUDA graph's gradients are copied,
    16 ms each. In two stages each layer is the only one that reads the weight, and has a copy of it."""
    blocks = tuple(dataclasses.replace(block, parameters=("weight",)) for block in MODEL.blocks)
    model = dataclasses.replace(MODEL, blocks=blocks, parameters={"weight": 10**6})
    base = {"forward": 128.0 + 2 * 12.0, "backward": 106.0 + 2 * 16.0}
    check(terms(model), **base)
    check(terms(model, cuda_graphs=True), **{**base, "backward": base["backward"] + 2 * 16.0})
    sharded = {"data": 2, "zero": 3}
    check(terms(model, **sharded), forward=terms(MODEL, **sharded)["forward"])
    for mode, again in (("full", 64.0 + 12.0), ("selective", 26.4)):
        found = costs_of(model, cluster(), modes=(mode,)).of(
            strategy_of(micro_batch=2, num_microbatches=2, recompute=mode)
        )
        assert float(found.whole.backward) == pytest.approx(base["backward"] + again)
    for each in (model, MODEL):
        chosen = {"low_precision": True, "cuda_graphs": True, "devices": 2}
        compute = stage_costs.device_costs(each, DEVICE).compute(2, 1, ("none",), None, FAST, **chosen)
        assert [compute.forward[i, i + 1] for i in (0, 1)] == pytest.approx([64.0, 64.0])
        assert [compute.backward[0, i, i + 1] for i in (0, 1)] == pytest.approx([53.0, 53.0])


def test_checkpointing_adds_what_it_computes_again() -> None:
    """The first layer is computed again, without its casts, and launched again: 1 ms, of which selective takes a half,
    and of that the share of a compiled backward."""
    for mode, added, launched in (("full", 64.0, 1.0), ("selective", 26.4 - 4.8, 0.5 * 0.4)):
        costs = costs_of(MODEL, cluster(), modes=(mode,))
        found = costs.of(strategy_of(micro_batch=2, num_microbatches=2, recompute=mode)).whole
        assert float(found.backward) == pytest.approx(106.0 + added)
        assert float(found.host) == pytest.approx(6.0 + launched)


def test_replicas_reduce_gradients_beside_the_backward() -> None:
    """8e6 bytes over two devices, of a link that a pair reaches 0.8 of and collectives beside compute half: 10 ms there
    and 10 back, or 100 on the slow link, and 2 × 1 ms for each layer. Compute hides 0.8 of its time, and what is hidden
    costs it 0.3."""
    base = {"forward": 152.0, "backward": 138.0, "optimizer": 128.0, "forward_wait": 0.0, "backward_wait": 0.0}
    check(terms(data=2), **base, step_wait=0.3 * 24.0)
    hidden = 0.8 * 138.0
    check(terms(data=2, on=cluster(SLOW)), **base, step_wait=204.0 - hidden + 0.3 * hidden)


SHARDED = {"forward": 128.0, "backward": 66.0, "optimizer": 64.0}
"""Products get bf16 weights; FSDP2 adds gradients by itself: (12 - 2) bytes of a million weights a layer, 20 ms."""


@pytest.mark.parametrize(
    ("zero", "forward_wait", "backward_wait", "step_wait", "launched"),
    [
        # All-gathers of bf16 weights: 4 + 2 ms; reduce-scatters of fp32 gradients: 8 + 2 ms; 0.3 of both are exposed.
        # Copies around a gather: 7 bytes of 2e6 weights, 35 ms. Into a buffer: 6 bytes, 30 ms; added: 12 / 2, 30 ms.
        (1, 0.3 * 3 + 17.5, 3 * 5.0 + 5 * 5.0, 0.3 * 10 + 8 * 5.0, (0.5 + 0.5) * 5.0),
        (2, 0.3 * 3 + 17.5, 0.3 * 10 + 30.0 + 15.0, 0.0, (0.5 + 1.0) * 5.0),
        (3, 0.3 * 6 + 35.0, 0.3 * 16 + 35.0 + 30.0 + 15.0, 0.0, (1.0 + 1.0) * 5.0),
    ],
)
def test_sharded_replicas_gather_weights_and_scatter_gradients(
    zero: int, forward_wait: float, backward_wait: float, step_wait: float, launched: float
) -> None:
    found = terms(data=2, zero=zero)
    check(found, **SHARDED, forward_wait=forward_wait, backward_wait=backward_wait, step_wait=step_wait)
    # The host: 3 ms a layer, 2 × 4 for hooks, and 5 for each collective that is launched.
    check(found, host=2 * (3.0 + 2 * 4.0 + launched))


def test_replicas_of_one_micro_batch_under_zero_1_gather_and_scatter_once() -> None:
    found = terms(data=2, zero=1, num_microbatches=1)
    check(found, **SHARDED, forward_wait=0.3 * 6 + 35.0, backward_wait=0.0, step_wait=0.3 * 10 + 30.0)


def test_what_is_captured_is_launched_at_once_and_what_is_not_is_reduced_behind_the_backward() -> None:
    """An all-reduce that has the link for itself takes half of 24 ms, and 16 bytes of each gradient are copied."""
    check(terms(cuda_graphs=True), host=2 * 2 * 0.1, forward=128.0)
    launched = dataclasses.replace(MODEL, block_types=(dataclasses.replace(LAYER, capturable=()),))
    check(terms(launched, data=2, cuda_graphs=True), host=6.0, step_wait=0.5 * 24.0 + 16 * 2e6 * 2e-6)
    check(terms(data=2, cuda_graphs=True), step_wait=0.3 * 24.0)


def test_a_device_waits_for_a_host_that_takes_longer() -> None:
    """Half a second for each direction of a layer, 2 s in all, and 20 ms for half of a step."""
    slow = {"block_forward_s": 0.5, "block_backward_s": 0.5}
    found = terms(on=cluster(**slow))
    waits = 2000.0 + 20.0 / 2 - (128.0 + 106.0)
    check(found, host=2000.0, host_wait=waits, forward=128.0 + waits / 2, backward=106.0 + waits / 2)
    # Muon's two matrices take the host 6 ms each, but the device's update of 126 ms hides that.
    muon = {name: ParameterUpdate(4.0, 24.0, 0.0, 10**6) for name in MODEL.parameters}
    matrices = dataclasses.replace(MODEL, parameter_updates=muon)
    own = terms(matrices)["optimizer"]
    check(terms(matrices, on=cluster(**slow, matrix_s=0.5)), host_wait=waits + (2 * 500.0 - own) / 2)
    # Stages of a pipeline have actions beside their blocks, captured or not.
    check(terms(pipeline=2), host=6.0 + 2 * 3.0)
    check(terms(pipeline=2, cuda_graphs=True), host=0.4 + 2 * 0.5)
    # A third of what a launched product with stored blocks takes is the forward's.
    stored = dataclasses.replace(LAYER.forward[0], relative=RelativeTime(0.5, 1e-3))
    sparse = dataclasses.replace(LAYER, forward=(stored, *LAYER.forward[1:]))
    costs = dataclasses.replace(MODEL, block_types=(sparse,)).at(2, DEVICE)
    assert [ms[0] for ms in costs.host_ms] == pytest.approx([1.0 + 3.0, 2.0 + 6.0])
    # Its arithmetic takes a half, and traffic 1e-3 of the 2,000 FLOPs that the device does meanwhile: 2.5 in all.
    assert costs.forward_ms[0] == pytest.approx((0.5 + 2.0) * 8.0 + 2.0 + 66.0)
    # All-reduces of the tensor axis are launched by the host: two forward, one backward.
    reduced = dataclasses.replace(LAYER, forward_reduced_bytes=(1e6, 1e6), backward_reduced_bytes=(1e6,))
    costs = dataclasses.replace(MODEL, block_types=(reduced,)).at(2, DEVICE)
    assert [ms[0] for ms in costs.host_ms] == pytest.approx([1.0 + 14.0, 2.0 + 7.0])


def test_collectives_and_sends_take_their_bytes_over_the_bandwidth_and_the_latency_of_each_round() -> None:
    link = Link(1e9, 1e-3, paired=0.5)
    assert hardware.point_to_point_s(4e6, link) == pytest.approx(1e-3 + 4e-3)
    assert hardware.all_gather_s(4e6, 4, link) == pytest.approx(2e-3 + 3e-3)
    assert hardware.reduce_scatter_s(4e6, 4, link) == pytest.approx(2e-3 + 3e-3)
    assert hardware.all_reduce_s(4e6, 4, link) == pytest.approx(2 * (2e-3 + 3e-3))
    assert hardware.all_reduce_s(4e6, 2, link) == pytest.approx(2 * (1e-3 + 4e-3)), "a pair reaches half"
    costs = costs_of(MODEL, cluster()).of(strategy_of(pipeline=2, micro_batch=2, num_microbatches=2))
    assert costs.send_ms[0].tolist() == pytest.approx([0.0, 1.0 + 2.0, 0.0])


def test_tensor_parallel_ranks_reduce_in_a_block_and_a_gpu_stands_still_around_each_reduction() -> None:
    """Two reductions of 2 × 1 MB forward, one backward: 2 × (1 + 1.25) ms each by the link, and 0.04 of no kernel."""
    reduced = dataclasses.replace(LAYER, forward_reduced_bytes=(1e6, 1e6), backward_reduced_bytes=(1e6,))
    model = dataclasses.replace(MODEL, divided={2: DividedCosts((reduced,), MODEL.parameters)})
    for kind, gap_ms in (("cuda", 0.04), ("cpu", 0.0)):
        device = dataclasses.replace(DEVICE, type=kind)
        chosen = {"low_precision": True, "cuda_graphs": False, "devices": 2}
        compute = stage_costs.device_costs(model, device).compute(2, 2, ("none",), None, FAST, **chosen)
        each = 2 * (1.0 + 1.25) + gap_ms
        assert compute.forward_reduced[0, 2] == pytest.approx(2 * 2 * each)
        assert compute.backward_reduced[0, 0, 2] == pytest.approx(2 * each)


def test_a_plan_adds_its_terms_up() -> None:
    """On one device, two micro-batches of 234 ms and an update of 136. Of two stages, the second begins after 67 ms;
    its two micro-batches take 2 × 117 ms, and the first stage ends 3 + 53 ms later, and updates its layer."""
    request = Request(4, 10, Cluster(DEVICE, 1, 1, FAST, FAST), None, Fixed(micro_batch=2, recompute="none"))
    request = dataclasses.replace(request, evaluated=6)
    found = checked_search(MODEL, "bf16", request).plan()
    predicted = found.prediction
    step_ms = 2 * (128.0 + 106.0) + 136.0
    assert predicted.step_ms == pytest.approx(step_ms)
    assert (predicted.compute_ms, predicted.optimizer_ms) == pytest.approx((2 * 234.0, 136.0))
    assert predicted.bubble_ms == pytest.approx(predicted.communication_ms) == pytest.approx(predicted.host_ms) == 0.0
    assert predicted.tokens_per_s == pytest.approx(40 / (step_ms / 1e3))
    assert predicted.mfu == pytest.approx(4 * 2 * 3e9 / (step_ms / 1e3) / 1e12)
    assert predicted.evaluation_s == pytest.approx(3 * 0.128)
    choices = {"pipeline": 2, "micro_batch": 2, "schedule": "1f1b", "recompute": "none"}
    request = Request(4, 10, cluster(), None, Fixed(**choices))
    piped = checked_search(MODEL, "bf16", request).plan().prediction
    assert piped.step_ms == pytest.approx(64 + 3 + 2 * 117 + 3 + 53 + 68)


def bytes_of(**choices: Any) -> tuple[float, ...]:
    strategy: Strategy = strategy_of(**{"micro_batch": 2, "num_microbatches": 2, **choices})
    costs = costs_of(MODEL, cluster(), modes=("none",)).of(strategy)
    state = costs.state()
    kinds = (state.parameters, state.gradients, state.optimizer)
    return *(float(each[0, -1]) / 1e6 for each in kinds), float(costs.activations().held[0, 0, -1]) / 1e6


def test_a_device_holds_the_bytes_of_its_state() -> None:
    """In MB of two million weights: fp32 weights 8, bf16 copies 4, gradients 8, AdamW 16; 2 × 3 MB of each layer."""
    assert bytes_of() == pytest.approx((12.0, 8.0, 16.0, 12.0))
    assert bytes_of(num_microbatches=1)[1] == pytest.approx(4.0), "gradients in bf16"
    assert bytes_of(data=2)[:3] == pytest.approx((8.0, 16.0, 16.0)), "DDP's buckets are a second copy"
    assert bytes_of(data=2)[3] == pytest.approx(12.0 + 4.0), "copies of a micro-batch"
    assert bytes_of(data=2, zero=1)[:3] == pytest.approx((4.0 + 4.0, 8.0, 8.0))
    assert bytes_of(data=2, zero=2)[:3] == pytest.approx((4.0 + 4.0, 4.0, 8.0))
    assert bytes_of(data=2, zero=3)[:3] == pytest.approx((4.0 + 2 * 2.0, 4.0, 8.0)), "two layers are whole at once"
    assert dataclasses.replace(DEVICE, memory_bytes=200, reserved_bytes=100).usable_bytes == 94


CONSTANTS: dict[Any, dict[str, Any]] = {
    profile: (
        {"ADAMW": 8, "ADAMW_UPDATE": 28, "MUON_UPDATE": 24, "ACCUMULATE_BYTES": 12, "LIMITED_CLOCK": 0.98}
        | {"CASTS_FORWARD_BYTES": 6, "CASTS_BACKWARD_BYTES": 8}
    ),
    memory: (
        {"FP32": 4, "BF16": 2, "MASK_BYTES": 1, "IN_TRANSIT_BYTES": 2**28, "PREFETCHED_BLOCKS": 2}
        | {"ROUND_ELEMENTS": 2**25, "GRAM_BYTES": 50, "PRODUCTS": 15}
    ),
    hardware: {"FRAGMENTATION": 0.06, "HOST_SHARE": 0.8},
    sparse_matrices: {"INDEX_BYTES": 4},
    stage_costs: (
        {"RELAUNCHED": {"selective": 0.5, "full": 1.0}, "OVERLAP": 0.8, "INTERFERENCE": 0.3, "HOST_BOUND": 0.5}
        | {"INTERLEAVED_SLOWDOWN": 0.08, "SHARDING_BANDWIDTH": 0.4, "ALL_REDUCE_COPY_BYTES": 16, "MOST_GRAPHS": 4096}
        | {"GRAPH_BYTES": 2**18, "GRAPH_ALL_REDUCE_BYTES": 11 * 2**14, "NORM_BYTES": 4, "CLIP_BYTES": 8}
        | {"MASKING_BYTES": 18, "REDUCTION_GAP_MS": 0.04}
    ),
    search: {"STORED_BLOCKS_GAIN": 0.08, "CUDA_GRAPHS_SLACK": 0.02, "CUDA_GRAPHS_GAIN": 0.01},
    plans: {"BUILD_SHARE": 0.6},
}
"""What was counted or measured, as each constant's docstring says."""
OF_A_GPU = (
    {"gemm": 0.75, "gemm_half_flops": 2e9, "attention_forward": 0.45, "attention_backward": 0.35, "bandwidth": 0.85}
    | {"launch_s": 6e-6, "compiled_launch_s": 2.5e-6, "block_forward_s": 0.8e-3, "block_backward_s": 1e-3}
    | {"selective_recompute": 0.4, "overlapped_link": 0.6, "in_step": 1.05, "sustained": 1.03, "host_in_step": 0.95}
    | {"action_s": 1e-3, "sharded_block_s": 0.8e-3, "sharded_collective_s": 1.2e-3, "matrix_s": 0.15e-3}
    | {"collective_s": 80e-6, "stored_product_s": 1.3e-3, "step_s": 4.2e-3, "captured_block_s": 0.1e-3}
    | {"captured_action_s": 0.6e-3}
)


def test_constants_are_those_that_were_counted_or_measured() -> None:
    """The other tests here show where a constant counts; this one, that none changed without a measurement."""
    found = {module: {name: getattr(module, name) for name in names} for module, names in CONSTANTS.items()}
    assert found == CONSTANTS
    assert dataclasses.asdict(Efficiency()) == OF_A_GPU
    of_h200 = {**OF_A_GPU, "gemm": 0.62, "gemm_half_flops": 4e9, "bandwidth": 0.8}
    assert dataclasses.asdict(hardware.H200.efficiency) == of_h200
    speeds = {
        "h200": (139.8, 989e12, 67e12, 4800e9, 55e9, 145e9, 350e9, 7.5e-6, 0.8, 42e9),
        "h100": (79.1, 989e12, 67e12, 3350e9, 54e9, None, 340e9, 10e-6, 1.0, 42e9),
        "a100": (79.1, 312e12, 19.5e12, 2039e9, 20e9, None, 225e9, 10e-6, 1.0, 21e9),
        "v100": (31.7, None, 15.7e12, 900e9, 20e9, None, 110e9, 12e-6, 1.0, 5.3e9),
    }
    for name, shown in speeds.items():
        device, _, intra, inter, *_ = hardware.NODES[name]
        rates = device.peak_flops.get("bf16"), device.peak_flops["fp32"], device.memory_bandwidth
        host = device.host_bandwidth, device.shared_host_bandwidth
        links = intra.bandwidth, intra.latency_s, intra.paired, inter.bandwidth
        assert (round(device.memory_bytes / 2**30, 1), *rates, *host, *links) == shown
        assert device.reserved_bytes == pytest.approx(1.6 * 2**30, abs=1)
