"""Static tensors are found by address, and only blocks that launch the same kernels in every step are captured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from workbench.capture.operations import draws_again, is_replayable
from workbench.execution.blocks.cuda_graphs import _StaticTensor


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(12.0).view(3, 4),
        lambda: torch.arange(12.0).view(3, 4).t(),
        lambda: torch.arange(24.0).view(3, 8)[:, 2:6],
        lambda: torch.arange(4.0).expand(3, 4),
        lambda: torch.tensor(7.0),
        lambda: torch.empty(0, 4),
    ],
    ids=["whole", "transposed", "a slice", "expanded", "a number", "empty"],
)
def test_a_static_tensor_is_the_tensor_at_its_address_and_can_be_refilled(make: object) -> None:
    assert callable(make)
    original = make()
    static = _StaticTensor(original)
    assert static.tensor.shape == original.shape
    assert static.tensor.stride() == original.stride()
    assert torch.equal(static.tensor, original)
    assert static.tensor.numel() == 0 or static.tensor.data_ptr() == original.data_ptr()
    value = torch.empty_strided(original.shape, original.stride())
    value.untyped_storage().copy_((torch.zeros(value.untyped_storage().nbytes() // 4) + 3).untyped_storage())
    static.fill(value)
    assert torch.equal(original, value)
    static.fill(None)
    assert not original.any()


class Drawing(torch.nn.Module):
    def __init__(self, attention: float, noise: bool) -> None:
        super().__init__()
        self.attention, self.noise = attention, noise
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=self.attention))
        return x + torch.randn_like(x) if self.noise else x


@pytest.mark.parametrize(
    ("attention", "noise", "again"),
    [
        (0.0, False, set()),
        (0.1, False, {"full"}),
        (0.1, True, {"full", "selective"}),
        (0.0, True, {"full", "selective"}),
    ],
)
def test_operations_that_draw_twice_are_known_for_each_mode_of_checkpointing(
    attention: float, noise: bool, again: set[str]
) -> None:
    code = torch.export.export(Drawing(attention, noise).train(), (torch.ones(1, 2, 4, 8),)).graph_module
    assert {mode for mode in ("none", "selective", "full") if draws_again(code, mode)} == again


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@torch.library.custom_op("workbench_tests::doubled", mutates_args=())
def _doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@_doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _written_where_positive(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[x > 0] = torch.zeros(())
    return x


@pytest.mark.parametrize(
    ("module", "replayable"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Dropout(0.1)), True),
        (Function(lambda x: x[torch.tensor([1, 0])].softmax(0)), True),
        (Function(_written_where_positive), False),
        (Function(lambda x: x.softmax(1).multinomial(1)), False),
        (Function(torch.linalg.inv), False),
        (Function(_doubled), False),
        (nn.GRU(4, 4), False),
    ],
    ids=[
        "a layer",
        "rows by number",
        "elements by a mask",
        "a draw by weights",
        "an inverse",
        "a custom operation",
        "recurrent",
    ],
)
def test_blocks_that_may_copy_numbers_to_the_host_are_not_captured(module: nn.Module, replayable: bool) -> None:
    code = torch.export.export(module.train(), (torch.ones(4, 4),)).graph_module
    assert is_replayable(code, "none") is replayable
