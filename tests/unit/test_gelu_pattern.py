"""A GELU that a model writes out is compiled as PyTorch's operation, where a product alone reads it."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from transformers.activations import ACT2FN

from workbench.execution.blocks.gelu_pattern import use_gelu

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
