"""Compiled blocks: their tail, patterns of GELU and attention, the backward's shapes, and the types of bf16 weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.inductor_prims import force_stride_order
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from transformers.activations import ACT2FN

from tests.distributed import zoo
from workbench.base.tensors import TensorSpec
from workbench.capture import Graph, build_meta, capture
from workbench.capture.operations import retarget
from workbench.execution.blocks.block_module import match_autocast_types
from workbench.execution.blocks.compiled import _HALF_TAIL, _TAIL, FEWEST_SUMS, FuseBackward, _tail, prepare, use_gelu

ALL_BF16 = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
VALUES = ALL_BF16[ALL_BF16.isfinite() & (ALL_BF16.abs() < 100)]
"""Every bf16 number below 100 in absolute value."""
MAX_WRONG_SHARE = 0.006
"""Share of values that may differ from the correctly rounded one: 169 of 34,192 do with AVX2."""


NOT_FINITE = torch.tensor([-math.inf, math.inf, math.nan], dtype=torch.bfloat16)
APPROXIMATE = ("none", "tanh")


@pytest.fixture(autouse=True, scope="module")
def prepared() -> None:
    prepare()


def gelus(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return both kinds of GELU of bf16 values, and then of fp32 values."""
    return tuple(functional.gelu(value, approximate=kind) for value, kind in zip(values, 2 * APPROXIMATE, strict=True))


Both = dict[tuple[torch.dtype, str], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def computed() -> tuple[Both, Both]:
    """Return value and derivative as compiled code computes them, which is compiled once, and as PyTorch does."""
    values = [torch.cat([VALUES, NOT_FINITE])] * 2 + [torch.linspace(-6, 6, 1 << 12)] * 2

    def through(code: Callable[..., tuple[torch.Tensor, ...]]) -> Both:
        leaves = [value.clone().requires_grad_() for value in values]
        results = code(*leaves)
        gradients = torch.autograd.grad(results, leaves, list(map(torch.ones_like, results)))
        cases = [(value.dtype, kind) for value, kind in zip(values, 2 * APPROXIMATE, strict=True)]
        return {
            case: (result.detach(), gradient) for case, result, gradient in zip(cases, results, gradients, strict=True)
        }

    return through(torch.compile(gelus, dynamic=False, fullgraph=True)), through(gelus)


def exact(values: torch.Tensor, approximate: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return GELU and its derivative, computed in fp64."""
    wide = values.double().requires_grad_()
    result = functional.gelu(wide, approximate=approximate)
    [slope] = torch.autograd.grad(result.sum(), wide)
    return result.detach(), slope


@pytest.mark.parametrize("approximate", APPROXIMATE)
def test_compiled_gelu_of_bf16_rounds_nearly_every_value_correctly_and_hides_no_overflow(
    approximate: str, computed: tuple[Both, Both]
) -> None:
    """PyTorch's own GELU is no fixed yardstick: how often it rounds correctly depends on the vector instructions."""
    ours, pytorchs = (each[torch.bfloat16, approximate] for each in computed)
    if approximate == "none":
        assert not ours[0][len(VALUES) :].isfinite().any()
    for one, other, truth in zip(ours, pytorchs, exact(VALUES, approximate), strict=True):
        found, plain = one[: len(VALUES)], other[: len(VALUES)]
        wrong, wrong_plain = ((one != truth.bfloat16()).sum().item() for one in (found, plain))
        assert wrong <= max(wrong_plain, MAX_WRONG_SHARE * len(VALUES))
        torch.testing.assert_close(found.double(), truth, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(("factors", "power"), [(_HALF_TAIL, 0), (_TAIL, -1)])
def test_the_tail_of_the_normal_distribution_is_as_exact_as_is_said(factors: Sequence[float], power: int) -> None:
    wide = VALUES.float()
    polynomial, bell = _tail(wide, factors, power)
    truth = 0.5 * torch.erfc(wide.double().abs() / math.sqrt(2))
    assert ((polynomial * bell).double() - truth).abs().max() < 5e-7


@pytest.mark.parametrize("approximate", APPROXIMATE)
def test_compiled_gelu_of_fp32_is_pytorchs(approximate: str, computed: tuple[Both, Both]) -> None:
    for found, plain in zip(*(each[torch.float32, approximate] for each in computed), strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=2e-6)


def gelu_beside_its_backward(approximate: str, dtype: torch.dtype) -> fx.Graph:
    """Return the graph that the compiler sees when GELU is recomputed for the backward."""

    def step(value: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        backward = torch.ops.aten.gelu_backward(gradient, value, approximate=approximate)
        return functional.gelu(value, approximate=approximate), backward

    return make_fx(step, decomposition_table=select_decomp_table())(*torch.ones(2, 8, dtype=dtype)).graph


@pytest.mark.parametrize("approximate", APPROXIMATE)
def test_gelu_of_bf16_calls_no_function_but_an_exponential(approximate: str) -> None:
    def called(dtype: torch.dtype) -> set[str]:
        graph = gelu_beside_its_backward(approximate, dtype)
        return {node.target.overloadpacket.__name__ for node in graph.nodes if node.op == "call_function"}

    slow = {"erf", "tanh"}
    assert called(torch.float32) & slow
    assert not called(torch.bfloat16) & slow


@pytest.mark.parametrize("approximate", APPROXIMATE)
def test_recomputed_gelu_shares_nothing_with_its_backward_that_the_compiler_would_store(approximate: str) -> None:
    def needed(node: fx.Node) -> set[fx.Node]:
        return {node}.union(*map(needed, node.all_input_nodes))

    graph = fx_graph_cse(gelu_beside_its_backward(approximate, torch.bfloat16))
    again, backward = (needed(result) for result in graph.output_node().all_input_nodes)
    assert max(len(needed(node)) for node in again & backward) < 15  # Inductor stores values that take more than 30


ATEN = torch.ops.aten


class Layer(nn.Module):
    """A linear layer behind Hugging Face's `gelu_new`, gated or not."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.gated, self.activation = gated, ACT2FN["gelu_new"]
        self.last = nn.Linear(16, 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        activated = self.activation(value)
        return self.last(activated * value if self.gated else activated)  # type: ignore[no-any-return]


def captured(gated: bool) -> fx.GraphModule:
    exported = torch.export.export(Layer(gated), (torch.randn(2, 3, 16),), strict=False)
    return exported.module(check_guards=False)


def targets(code: fx.GraphModule) -> list[object]:
    return [node.target for node in code.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_gelu_that_a_product_reads_becomes_one_operation_with_the_same_values(precision: torch.dtype) -> None:
    code = captured(gated=False)
    ours = use_gelu(code)
    assert ATEN.tanh.default in targets(code)
    assert ATEN.tanh.default not in targets(ours)
    [gelu] = ours.graph.find_nodes(op="call_function", target=ATEN.gelu.default)
    assert gelu.meta["val"].shape == (2, 3, 16)

    found = []
    for module in (code, ours):
        value = torch.linspace(-6, 6, 96, dtype=precision).view(2, 3, 16).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            result = module(value)
        [gradient] = torch.autograd.grad(result.sum(), value)
        found.append((result.float(), gradient.float()))
    tolerance = 1e-5 if precision == torch.float32 else 2e-2
    for plain, single in zip(*found, strict=True):
        torch.testing.assert_close(single, plain, rtol=tolerance, atol=tolerance)


def test_a_gelu_that_something_else_reads_keeps_its_dtype_and_form() -> None:
    assert ATEN.tanh.default in targets(use_gelu(captured(gated=True)))


def test_code_without_tanh_is_not_copied() -> None:
    code = fx.symbolic_trace(nn.Linear(2, 2))
    assert use_gelu(code) is code


POSITIONS, FEATURES = 6, 1024
SAMPLES = FEWEST_SUMS // FEATURES


def into_product(gradient: torch.Tensor, weight: torch.Tensor) -> Any:
    """Return what the backward of a linear layer makes of a scaled gradient: that of its input and that of its bias."""
    rows = (gradient * 2).view(-1, FEATURES)
    return rows @ weight, rows.sum(0, keepdim=True, dtype=torch.float32)


def into_sum_only(gradient: torch.Tensor, weight: torch.Tensor) -> Any:
    return weight * 2, (gradient * 2).view(-1, FEATURES).sum(0, keepdim=True)


def read_twice(gradient: torch.Tensor, weight: torch.Tensor) -> Any:
    doubled = gradient * 2
    return doubled.view(-1, FEATURES) @ weight, doubled


def traced(function: Any, device: str, samples: int = SAMPLES) -> fx.Graph:
    with FakeTensorMode():
        gradient = torch.empty(samples, POSITIONS, FEATURES, device=device)
        return make_fx(function)(gradient, torch.empty(FEATURES, 3, device=device)).graph


def calls(graph: fx.Graph) -> Counter[Any]:
    return Counter(node.target for node in graph.nodes if node.op == "call_function")


def test_what_a_product_reads_is_computed_in_its_own_shape_and_summed_by_sample() -> None:
    graph = traced(into_product, "cuda")
    FuseBackward()(graph)
    found = calls(graph)
    assert found[force_stride_order] == 1
    sums = graph.find_nodes(op="call_function", target=ATEN.sum.dim_IntList)
    assert [list(node.meta["val"].shape) for node in sums] == [[SAMPLES, FEATURES], [1, FEATURES]]

    gradient, weight = torch.randn(SAMPLES, POSITIONS, FEATURES), torch.randn(FEATURES, 3)
    for ours, plain in zip(fx.GraphModule({}, graph)(gradient, weight), into_product(gradient, weight), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_few_sums_are_left_to_the_compiler() -> None:
    graph = traced(into_product, "cuda", samples=SAMPLES - 1)
    FuseBackward()(graph)
    assert calls(graph)[force_stride_order] == calls(graph)[ATEN.sum.dim_IntList] == 1


@pytest.mark.parametrize(("function", "device"), [(into_product, "cpu"), (into_sum_only, "cuda"), (read_twice, "cuda")])
def test_other_graphs_stay_as_they_are(function: Any, device: str) -> None:
    graph = traced(function, device)
    before = str(graph)
    FuseBackward()(graph)
    assert str(graph) == before


def test_graphs_of_unknown_sizes_stay_as_they_are() -> None:
    gradient, weight = torch.empty(SAMPLES, POSITIONS, FEATURES), torch.empty(FEATURES, 3)
    graph = make_fx(into_product, tracing_mode="symbolic")(gradient, weight).graph
    before = str(graph)
    with mock.patch.object(FakeTensor, "device", torch.device("cuda")):
        FuseBackward()(graph)
    assert str(graph) == before


CPU = torch.device("cpu")
NAMES = ("bert", "gpt2", "llama", "t5", "vit", "swin", "deberta", "tied-everywhere")


def captured_on_cpu(name: str, batch: zoo.Batch) -> Graph:
    specs = {key: TensorSpec(key, tuple(v.shape), str(v.dtype).removeprefix("torch.")) for key, v in batch.items()}
    graph = capture(build_meta(zoo.MODELS[name]), specs)
    for block in graph.blocks:
        retarget(block.code, CPU)
    return graph


def sent(name: str, *, bf16: bool) -> list[torch.Tensor]:
    """Return what every block sends, given bf16 weights or the same numbers in fp32."""
    torch.manual_seed(0)
    batch = zoo.batch(name, 2)
    graph = captured_on_cpu(name, batch)
    model = zoo.MODELS[name]().train()
    weights = {key: value.detach().bfloat16() for key, value in model.named_parameters()}
    weights = weights if bf16 else {key: value.float() for key, value in weights.items()}
    tensors = dict(model.named_buffers()) | dict(graph.constants)
    values: dict[str, torch.Tensor] = {}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for block in graph.blocks:
            code = match_autocast_types(block.code, len(block.parameters)) if bf16 else block.code
            arguments = [weights[key] for key in block.parameters] + [tensors[key] for key in block.buffers]
            arguments += [values[key] for key in block.receives] + [batch[key] for key in block.inputs]
            arguments += [torch.tensor(8.0) for _ in block.counts]
            values |= dict(zip(block.sends, code(*arguments), strict=True))
    return list(values.values())


@pytest.mark.parametrize("name", NAMES)
def test_blocks_with_bf16_weights_send_what_autocast_computes_from_the_same_numbers(name: str) -> None:
    found, expected = sent(name, bf16=True), sent(name, bf16=False)
    assert [value.dtype for value in found] == [value.dtype for value in expected]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_embedding_tables_stay_bf16_and_only_their_rows_are_cast() -> None:
    batch = zoo.batch("gpt2", 2)
    block = captured_on_cpu("gpt2", batch).blocks[0]
    code = match_autocast_types(block.code, len(block.parameters))
    tables = [node for node in code.graph.nodes if node.op == "placeholder"][: len(block.parameters)]
    assert {user.target for table in tables for user in table.users} == {torch.ops.aten.embedding.default}


BATCH = {"x": TensorSpec("x", (2, 4, 8), "float32")}


class Written(nn.Module):
    """Attention as matmul, mask, softmax, matmul; the mask is made from the Python number `blocked`."""

    def __init__(self, blocked: float):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.blocked = blocked

    def forward(self, x):
        q, k, v = (part.view(2, 4, 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        allowed = torch.ones(2, 1, 4, 4, dtype=torch.bool, device=x.device)
        mask = torch.where(allowed, torch.tensor(self.blocked, dtype=x.dtype, device=x.device), -1e30)
        weights = (q @ k.transpose(-1, -2) / 2.0 + mask).softmax(-1)
        return {"loss": (weights @ v).square().mean()}


def attention_nodes(model):
    return [
        node
        for block in capture(model, BATCH, name="written").blocks
        for node in block.code.graph.nodes
        if node.target is torch.ops.aten.scaled_dot_product_attention.default
    ]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_mask_of_zeros_made_from_a_number_is_removed(device):
    with torch.device(device):
        model = Written(0.0)
    [attention] = attention_nodes(model)
    assert attention.args[3] is None


def test_a_bias_made_from_a_number_is_kept():
    with torch.device("meta"):
        model = Written(0.5)
    [attention] = attention_nodes(model)
    assert attention.args[3] is not None
