"""On a GPU, kernels that are there anyway compute the tail of a backward, and torch's grouped products are right."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor import config, metrics
from torch.nn import functional

from tests.gpu.machine import DEVICE
from workbench.capture.export import rewrites
from workbench.execution.blocks.compiled import prepare
from workbench.execution.blocks.rewriting import hashed_dropout

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="the pass leaves a CPU's graphs as they are")


class Layer(nn.Module):
    """The end of a BERT layer: two products, GELU, dropout, the residual and LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(1024, 4096), nn.Linear(4096, 1024), nn.LayerNorm(1024)

    def forward(self, value: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        projected = self.second(functional.gelu(self.first(value)))
        return self.norm(value + hashed_dropout(projected, 0.1, seed, 1))


def gradients(layer: Layer, value: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Return the gradients of a compiled step, and the number of kernels that the compiler wrote for it."""
    torch._dynamo.reset()
    metrics.reset()
    seed = torch.full((), 7, dtype=torch.int64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16), config.patch(force_disable_caches=True):
        result = torch.compile(layer, dynamic=False, fullgraph=True)(value, seed)
        found = torch.autograd.grad(result, [value, *layer.parameters()], torch.ones_like(result) + value.detach())
    return list(found), metrics.generated_kernel_count


def test_a_layers_backward_has_two_kernels_fewer_and_the_same_gradients() -> None:
    torch.manual_seed(0)
    prepare()
    layer = Layer().cuda()
    value = torch.randn(64, 512, 1024, device="cuda", requires_grad=True)
    ours, kernels = gradients(layer, value)
    with config.patch(post_grad_custom_post_pass=None):
        plain, more = gradients(layer, value)
    assert kernels == more - 2
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * other.abs().max().item())


ROWS, INSIDE, OUTSIDE = 4096, 512, 1024
CASES = {"even": (1024, 2048, 3072, 4096), "uneven": (3, 1500, 1501, 4096), "some without rows": (0, 4096, 4096, 4096)}


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_gives_what_single_products_give(
    case: str, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = torch.tensor(CASES[case], dtype=torch.int32, device="cuda")

    def computed(kernel: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        rows = torch.randn(ROWS, INSIDE, device="cuda", requires_grad=True)
        weights = torch.randn(4, OUTSIDE, INSIDE, device="cuda", requires_grad=True)
        turned = weights.transpose(1, 2) if transposed else weights.transpose(1, 2).contiguous()
        if not kernel:
            monkeypatch.setattr(rewrites, "_has_kernel", lambda *_: False)
        with torch.autocast("cuda", torch.bfloat16):
            product = rewrites.grouped_mm(rows, turned, ends)
        assert product.dtype == torch.bfloat16
        product.float().pow(2).mean().backward()
        monkeypatch.undo()
        assert rows.grad is not None
        assert weights.grad is not None
        return [product.float(), rows.grad, weights.grad]

    assert rewrites._has_kernel(torch.empty(8, 8, device="cuda", dtype=torch.bfloat16), torch.empty(4, 8, 8))
    for found, expected in zip(computed(kernel=True), computed(kernel=False), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
        assert float((found - expected).norm() / expected.norm()) < 5e-3
