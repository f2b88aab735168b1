"""Compiled GELU rounds nearly every bf16 value correctly, and its backward stores nothing extra."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import fx
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from workbench.execution.blocks.compiled import _HALF_TAIL, _TAIL, _tail, prepare

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
def test_recomputed_gelu_shares_nothing_with_its_backward_that_the_compiler_would_store(
    approximate: str,
) -> None:
    def needed(node: fx.Node) -> set[fx.Node]:
        return {node}.union(*map(needed, node.all_input_nodes))

    graph = fx_graph_cse(gelu_beside_its_backward(approximate, torch.bfloat16))
    again, backward = (needed(result) for result in graph.output_node().all_input_nodes)
    assert max(len(needed(node)) for node in again & backward) < 15  # Inductor stores values that take more than 30
