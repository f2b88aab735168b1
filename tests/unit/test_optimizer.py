"""The optimiser computes the same bits as PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from workbench.execution.optimizer import OffloadedAdamW, PartwiseAdamW


@pytest.mark.parametrize(
    ("optimizer_type", "fused"), [(PartwiseAdamW, None), (PartwiseAdamW, True), (OffloadedAdamW, None)]
)
def test_updates_and_state_equal_those_of_torch(optimizer_type: Any, fused: bool | None) -> None:
    def trained(make: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
        generator = torch.Generator().manual_seed(0)
        weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5,), (2, 2))]
        groups = [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:], "weight_decay": 0.0}]
        optimizer = make(groups, lr=1e-2, betas=(0.9, 0.98), eps=1e-6, fused=fused)
        for step in range(5):
            for weight in weights[: 2 + step % 2]:  # the last has no gradient in some steps
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return [weight.detach() for weight in weights], optimizer.state_dict()

    found, expected = trained(optimizer_type), trained(torch.optim.AdamW)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    assert found[1].keys() == expected[1].keys()
    torch.testing.assert_close(found[1]["state"], expected[1]["state"], rtol=0, atol=0)
