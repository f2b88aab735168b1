"""On a GPU, torch's kernel for grouped products gives the numbers of one product per expert."""

from __future__ import annotations

import pytest
import torch

from workbench.capture import experts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU is needed, and none is here")
ROWS, INSIDE, OUTSIDE = 4096, 512, 1024
CASES = {
    "even": (1024, 2048, 3072, 4096),
    "uneven": (3, 1500, 1501, 4096),
    "some without rows": (0, 4096, 4096, 4096),
}


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
            monkeypatch.setattr(experts, "_has_kernel", lambda *_: False)
        with torch.autocast("cuda", torch.bfloat16):
            product = experts.grouped_mm(rows, turned, ends)
        assert product.dtype == torch.bfloat16
        product.float().pow(2).mean().backward()
        monkeypatch.undo()
        assert rows.grad is not None
        assert weights.grad is not None
        return [product.float(), rows.grad, weights.grad]

    assert experts._has_kernel(torch.empty(8, 8, device="cuda", dtype=torch.bfloat16), torch.empty(4, 8, 8))
    for found, expected in zip(computed(kernel=True), computed(kernel=False), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
        assert float((found - expected).norm() / expected.norm()) < 5e-3
