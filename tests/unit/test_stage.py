"""A stage frees values as soon as it can, and its blocks see only what they use."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, permutations
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.fx import symbolic_trace
from torch.nn import functional

from tests.distributed import zoo
from tests.unit.capture_models import captured
from workbench.capture import Block, Graph, capture, spec_of
from workbench.capture.operations import DROPOUT
from workbench.execution.blocks.block_module import BlockProgram, GradientTransfer, checkpointed_when_compiled
from workbench.execution.blocks.rewriting import has_active_dropout, hashed_dropout, use_hashed_dropout
from workbench.execution.blocks.step_context import StepContext
from workbench.execution.build import runners
from workbench.execution.gradients import GradientAccumulator
from workbench.execution.parallel.mesh import MeshCoordinate
from workbench.execution.parallel.stage import StageModule

CPU = torch.device("cpu")


def stage_of(name: str, first: int = 0) -> tuple[Graph, StageModule, zoo.Batch]:
    """Return a model from block `first` on as one uncompiled stage."""
    model = {**zoo.MODELS, "bert-half-frozen": zoo.bert_half_frozen}[name]().eval()
    batch = zoo.batch(name, 2)
    graph = capture(model, {key: spec_of(key, value) for key, value in batch.items()}, name=name)
    context = StepContext(0, CPU)
    context.loss_denominators = [torch.ones(()) for _ in graph.label_counts]
    stage = StageModule(
        graph,
        first,
        context,
        num_microbatches=1,
        parameters=dict(model.named_parameters()),
        buffers={**dict(model.named_buffers()), **graph.constants},
        programs=[BlockProgram(block, block.code) for block in graph.blocks[first:]],
    )
    return graph, stage, batch


@pytest.mark.parametrize("name", ["bert", "skips"])
def test_a_value_is_freed_when_no_later_block_reads_it(name: str) -> None:
    """The stage runs without autograd, which would keep the values that its backward needs."""
    graph, stage, batch = stage_of(name)
    made: dict[str, weakref.ref[torch.Tensor]] = {}
    alive: list[set[str]] = []

    def note(module: Any, _arguments: Any, sent: tuple[torch.Tensor, ...]) -> None:
        alive.append({name for name, value in made.items() if value() is not None})
        made.update({name: weakref.ref(value) for name, value in zip(module.block.sends, sent, strict=True)})

    for module in stage.block_modules():
        module.register_forward_hook(note)
    with torch.no_grad():
        stage(**batch)
    for block, values in zip(graph.blocks, alive, strict=True):
        before = {name for earlier in graph.blocks[: block.index] for name in earlier.sends}
        assert values == before & {name for later in graph.blocks[block.index :] for name in later.receives}
    assert max(map(len, alive)) < len(graph.values) - 1, "some value was freed"


@pytest.mark.parametrize(("name", "borrowing"), [("bert", 2), ("albert", 6)])
def test_a_block_is_given_the_shared_parameters_that_it_uses_and_no_others(name: str, borrowing: int) -> None:
    """FSDP2 makes a gradient, of zeros if need be, for every parameter that a block is given."""
    graph, stage, batch = stage_of(name)
    given: list[set[str]] = []
    for module in stage.block_modules():
        module.register_forward_pre_hook(lambda _, arguments: given.append(set(arguments[0])))
    stage(**batch)
    uses = Counter(name for block in graph.blocks for name in block.parameters)
    shared = {name for name, times in uses.items() if times > 1}
    assert given == [shared & set(block.parameters) for block in graph.blocks]
    assert sum(map(bool, given)) == borrowing


@pytest.mark.parametrize(("name", "asked"), [("bert", True), ("bert-half-frozen", False)])
def test_a_stage_computes_a_gradient_of_what_it_receives_only_where_something_before_it_is_trained(
    name: str, asked: bool
) -> None:
    """PyTorch's pipeline asks for a gradient of every received value."""
    _, stage, batch = stage_of(name, first=2)
    [received] = (torch.randn(spec.shape, requires_grad=True) for spec in stage.received)
    stage(received, **batch).backward()
    assert (received.grad is not None) == asked
    trained = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    assert trained
    assert all(parameter.grad is not None for parameter in trained)


RATES = (0.9, 0.8, 0.7)


class Layer(nn.Module):
    def __init__(self, rate: float, eps: float, dropout: float) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8, eps=eps), nn.Linear(8, 8)
        self.rate, self.dropout = rate, nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = (self.rate + torch.rand(len(x), 1)).floor()  # stochastic depth, as Hugging Face's models write it
        return x + self.dropout(self.linear(self.norm(x))) / self.rate * kept


class Residual(nn.Module):
    def __init__(
        self, rates: tuple[float, ...] = RATES, eps: tuple[float, ...] = (1e-5,), dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        each = eps * (len(rates) // len(eps))
        self.layers = nn.ModuleList(Layer(rate, e, dropout) for rate, e in zip(rates, each, strict=True))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x), labels)


def graph_of(model: nn.Module) -> Graph:
    return captured(model.train(), {"x": torch.randn(4, 8), "labels": torch.randint(3, (4,))})


def layers_of(graph: Graph) -> list[Block]:
    found = [block for block in graph.blocks if block.name.startswith("layers.")]
    assert len(found) == 3
    return found


def compiled(graph: Graph, recompute: str = "none") -> dict[str, Any]:
    """Return runners that are traced as those of a GPU, and that run operation by operation."""
    torch._dynamo.reset()
    counters.clear()
    real = torch.compile
    codes = {block.block_type: block.code for block in graph.blocks}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda code, **how: real(code, backend="aot_eager_decomp_partition", **how))
        return runners(graph, codes, CPU, True, recompute)


def compilations() -> int:
    """Return the number of graphs that were compiled since the last call of `compiled`."""
    return counters["stats"]["unique_graphs"]


def outcome(run: Any, graph: Graph, block: Block, *seed: torch.Tensor) -> list[torch.Tensor]:
    """Return what a block returns for the same weights, value and random numbers in every call, and the gradients."""
    torch.manual_seed(0)
    specs = [graph.parameters[name] for name in block.parameters] + [graph.values[name] for name in block.receives]
    given = [torch.randn(spec.shape).requires_grad_() for spec in specs]
    [value] = run(*given, *seed)
    return [value, *torch.autograd.grad(value.square().sum(), given)]


def test_layers_with_rates_of_their_own_are_one_type_to_measure() -> None:
    layers = layers_of(graph_of(Residual()))
    assert len({layer.block_type for layer in layers}) == 3
    assert len({layer.cost_type for layer in layers}) == 1
    without = layers_of(graph_of(Residual((1.0, 0.8, 0.7))))
    assert len({layer.cost_type for layer in without}) == 2, "a division by 1 may cost nothing"


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_compiled_code_computes_with_the_rate_of_each_layer(recompute: str) -> None:
    graph = graph_of(Residual())
    run = compiled(graph, recompute)
    outcomes = []
    for layer in layers_of(graph):
        found, expected = (outcome(each, graph, layer) for each in (run[layer.block_type], layer.code))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
        outcomes.append(found[0])
    assert compilations() == 1
    assert not torch.equal(outcomes[0], outcomes[1])


def test_the_seed_of_a_dropout_comes_behind_the_numbers() -> None:
    graph, seed = graph_of(Residual(dropout=0.5)), torch.tensor(3)
    run = compiled(graph)
    first, second, _ = layers_of(graph)
    once, again = (outcome(run[first.block_type], graph, first, seed) for _ in range(2))
    torch.testing.assert_close(once, again)
    assert not torch.equal(once[0], outcome(run[first.block_type], graph, first, seed + 1)[0])
    assert not torch.equal(once[0], outcome(run[second.block_type], graph, second, seed)[0])
    assert compilations() == 1


def test_layers_whose_numbers_cannot_be_tensors_are_compiled_one_by_one() -> None:
    graph = graph_of(Residual(eps=(1e-5, 1e-6, 1e-7)))
    run = compiled(graph)
    for layer in layers_of(graph):
        found, expected = (outcome(each, graph, layer) for each in (run[layer.block_type], layer.code))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert compilations() == 3


COMPILE = torch.compile
SHAPES = (64, 32), (7,), (5, 3)


def allocate(weights: Sequence[nn.Parameter]) -> None:
    for weight in weights:
        weight.grad = torch.full_like(weight, float("nan"))  # uninitialised memory may hold anything


@pytest.mark.parametrize("compiles", [False, True])
def test_bf16_gradients_are_added_in_fp32_to_the_last_bit(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(
        "workbench.execution.gradients.MIN_COMPILED_ELEMENTS", sum(math.prod(shape) for shape in SHAPES)
    )
    monkeypatch.setattr(torch, "compile", lambda code, **given: compiled.append(code) or COMPILE(code, **given))
    weights = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    accumulator = GradientAccumulator(compiles)
    generator = torch.Generator().manual_seed(0)
    expected = [torch.zeros(shape) for shape in SHAPES]
    for _ in range(3):
        gradients = [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]
        gradients[0] = gradients[0].t().contiguous().t()  # the layout in which a matrix product leaves it
        for total, gradient in zip(expected, gradients, strict=True):
            total += gradient.float()
        accumulator.add(weights, gradients, allocate)
    assert len(compiled) == (1 if compiles else 0)
    for weight, total in zip(weights, expected, strict=True):
        assert weight.grad is not None
        assert torch.equal(weight.grad, total)


def test_small_blocks_are_added_without_compiling_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    weight, accumulator = nn.Parameter(torch.zeros(8)), GradientAccumulator(compiles=True)
    for _ in range(2):
        accumulator.add([weight], [torch.ones(8, dtype=torch.bfloat16)], allocate)
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 8


def test_a_weight_whose_first_gradient_comes_late_is_allocated_beside_others_that_accumulate() -> None:
    first, second = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    accumulator, allocated = GradientAccumulator(compiles=False), []
    one = torch.ones(4, dtype=torch.bfloat16)

    def recording_allocate(weights: Sequence[nn.Parameter]) -> None:
        allocated.append(list(weights))
        allocate(weights)

    accumulator.add([first], [one], recording_allocate)
    accumulator.add([first, second], [one, one], recording_allocate)
    assert [len(weights) for weights in allocated] == [1, 1]
    assert allocated[1][0] is second
    assert first.grad is not None
    assert second.grad is not None
    assert first.grad.tolist() == [2.0] * 4
    assert second.grad.tolist() == [1.0] * 4


def test_copies_pass_their_gradients_on_when_the_last_one_that_a_backward_reaches_has_arrived() -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    copies = [weight.detach().bfloat16().requires_grad_() for weight in weights]
    transfer = GradientTransfer(list(zip(copies, weights, strict=True)), GradientAccumulator(compiles=False))
    (3 * copies[0]).sum().backward()  # the other copy takes no part
    assert weights[0].grad is not None
    assert weights[1].grad is None
    (copies[0] + 5 * copies[1]).sum().backward()
    assert [weight.grad.tolist() for weight in weights if weight.grad is not None] == [[4.0] * 2, [5.0] * 2]
    assert all(copy.grad is None for copy in copies)
    del transfer


def test_copies_are_freed_together_with_their_gradient_transfer() -> None:
    weight = nn.Parameter(torch.zeros(2))
    copy = weight.detach().bfloat16().requires_grad_()
    transfer = GradientTransfer([(copy, weight)], GradientAccumulator(compiles=False))
    copy.sum().backward()
    memory = weakref.ref(copy)
    gc.disable()
    try:
        del copy, transfer
        assert memory() is None
    finally:
        gc.enable()


def test_a_weight_with_gradients_of_its_own_dtype_keeps_what_arrives_in_contiguous_memory() -> None:
    weights = [nn.Parameter(torch.empty(2, 3)) for _ in range(3)]
    gradients = [torch.randn(2, 3).bfloat16(), torch.randn(3, 2).bfloat16().t(), torch.randn(2, 3).bfloat16()]
    for weight in weights[:2]:
        weight.grad_dtype = torch.bfloat16
    GradientAccumulator(compiles=False).add(weights, gradients, allocate)
    assert weights[0].grad is gradients[0]
    assert weights[1].grad is not None
    assert weights[2].grad is not None
    assert weights[1].grad.is_contiguous()
    assert torch.equal(weights[1].grad, gradients[1])
    assert torch.equal(weights[2].grad, gradients[2].float()), "other weights accumulate in fp32"


def test_first_gradients_of_several_dtypes_are_copied_exactly() -> None:
    weights = [nn.Parameter(torch.empty(3)) for _ in range(4)]
    gradients = [torch.randn(3, dtype=dtype) for dtype in (torch.bfloat16, torch.float32) * 2]

    GradientAccumulator(compiles=False).add(weights, gradients, allocate)
    for weight, gradient in zip(weights, gradients, strict=True):
        assert weight.grad is not None
        assert torch.equal(weight.grad, gradient.float())


RATE = 0.1
SHAPE = (512, 1920)
SEEDS = (0x1A2B3C4D5E6F7081, 0x7081921324354657, 5, 6, 5 + (1 << 32))
"""Seeds as the step's context makes them, two neighbours, and two that share their low word."""


def mask(seed: int, salt: int = 1, shape: tuple[int, ...] = SHAPE, rate: float = RATE) -> torch.Tensor:
    return hashed_dropout(torch.ones(shape), rate, torch.tensor(seed), salt) > 0


def sigmas(share: torch.Tensor, expected: float, count: int) -> float:
    """Return the distance of a share from its expectation, in standard deviations of independent draws."""
    return abs(share.item() - expected) / (expected * (1 - expected) / count) ** 0.5


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_elements_are_dropped_at_the_rate_and_the_rest_scaled(rate: float) -> None:
    found = hashed_dropout(torch.full(SHAPE, 3.0), rate, torch.tensor(SEEDS[0]), 1)
    assert found.unique().tolist() == pytest.approx([0, 3 / (1 - rate)])
    assert sigmas((found == 0).float().mean(), rate, found.numel()) < 4


def test_rows_columns_and_neighbours_are_independent() -> None:
    kept = mask(SEEDS[0]).float()
    for dim, other in ((0, 1), (1, 0)):
        sums = kept.sum(dim)
        expected = SHAPE[dim] * RATE * (1 - RATE)
        assert sums.var().item() == pytest.approx(expected, rel=6 * (2 / SHAPE[other]) ** 0.5)
    flat = kept.flatten()
    for apart in (1, 2, 4, 8, 32, 128, 1920, 4096, 1 << 19):
        both = (flat[apart:] * flat[:-apart]).mean()
        assert sigmas(both, (1 - RATE) ** 2, len(flat) - apart) < 4.5, apart


def test_masks_of_other_seeds_and_salts_are_independent() -> None:
    masks = [mask(seed, salt) for seed in SEEDS for salt in (1, 2)]
    for first, second in combinations(masks, 2):
        assert sigmas((first & second).float().mean(), (1 - RATE) ** 2, first.numel()) < 4.5


def test_the_gradient_passes_where_the_value_did() -> None:
    value = torch.randn(SHAPE, requires_grad=True)
    hashed_dropout(value, RATE, torch.tensor(SEEDS[0]), 1).backward(torch.ones(SHAPE))
    assert value.grad is not None
    torch.testing.assert_close(value.grad, mask(SEEDS[0]) / (1 - RATE))


def half(value: torch.Tensor, weight: torch.Tensor, seed: torch.Tensor, salt: int) -> torch.Tensor:
    """Compute half of a post-LayerNorm block: product, dropout, residual sum, norm."""
    return functional.layer_norm(value + hashed_dropout(value @ weight, RATE, seed, salt), value.shape[-1:])


def layer(value: torch.Tensor, weight: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    return half(half(value, weight, seed, 1), weight, seed, 2)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_code_stores_no_mask_and_no_more_than_without_dropout(recompute: str) -> None:
    def stored(rate: float) -> Counter[tuple[torch.dtype, tuple[int, ...]]]:
        def block(*arguments: torch.Tensor) -> Any:
            return (
                layer(*arguments) if recompute == "none" else checkpointed_when_compiled(recompute, layer, *arguments)
            )

        found: Counter[tuple[torch.dtype, tuple[int, ...]]] = Counter()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            found[tensor.dtype, tuple(tensor.shape)] += tensor.numel() > 1
            return tensor

        inputs = torch.randn(8, 32, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True), torch.tensor(5)
        with mock.patch(f"{__name__}.RATE", rate), torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            # Inductor's partitioner decides what is stored; its kernels would take as long again for each case.
            code = torch.compile(block, backend="aot_eager_decomp_partition", dynamic=False, fullgraph=True)
            code(*inputs).sum().backward()
        return +found

    torch._dynamo.reset()
    with_dropout = stored(RATE)
    torch._dynamo.reset()
    assert with_dropout == stored(0.0)
    assert not [dtype for dtype, _ in with_dropout if not dtype.is_floating_point], "neither masks nor hashes"


def test_compiled_code_draws_the_same_masks() -> None:
    compiled = torch.compile(hashed_dropout, dynamic=False, fullgraph=True)
    value = torch.randn(8, 33, requires_grad=True)
    for seed in SEEDS:
        eager, found = (draw(value, RATE, torch.tensor(seed), 3) for draw in (hashed_dropout, compiled))
        torch.testing.assert_close(found, eager)
        gradients = [torch.autograd.grad(result.square().sum(), value)[0] for result in (eager, found)]
        torch.testing.assert_close(gradients[1], gradients[0])


def test_only_active_dropouts_are_replaced_and_each_has_its_own_salt() -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        x = DROPOUT(x, 0.5, True) + DROPOUT(x, 0.5, True)
        return DROPOUT(DROPOUT(x, 0.0, True), 0.5, False)

    code = symbolic_trace(block)
    assert has_active_dropout(code)
    found = use_hashed_dropout(code)
    assert [node.target for node in found.graph.find_nodes(op="placeholder")] == ["x", "dropout_seed"]
    calls = found.graph.find_nodes(op="call_function", target=hashed_dropout)
    assert [call.args[3] for call in calls] == [1, 2]
    ones = torch.ones(1000)
    assert set(found(ones, torch.tensor(SEEDS[0])).unique().tolist()) == {0.0, 2.0, 4.0}
    assert not has_active_dropout(symbolic_trace(lambda x: DROPOUT(x, 0.5, False)))


def test_a_rank_finds_its_place_on_a_mesh_by_the_names_of_the_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Axes in another order, and an axis that is not known yet, change nothing."""

    class Axis:
        def __init__(self, rank: int, size: int) -> None:
            self.get_local_rank, self.size, self.get_group = lambda: rank, lambda: size, lambda: f"group of {size}"

    class Mesh(dict[str, Axis]):
        mesh_dim_names = property(tuple)

    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    axes = {"cp": Axis(0, 7), "tp": Axis(1, 2), "dp_shard": Axis(2, 3), "pp": Axis(3, 5)}
    for names in permutations(axes):
        here = MeshCoordinate.from_mesh(Mesh({name: axes[name] for name in names}))
        assert (here.pipeline_rank, here.data_rank, here.tensor_rank) == (3, 2, 1)
        assert (here.pipeline, here.data, here.tensor, here.pipeline_group) == (5, 3, 2, "group of 5")
        assert (here.devices_per_stage, here.rank_in_stage) == (6, 5)
