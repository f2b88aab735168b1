"""Masks of hashed dropout look random, depend on seed and salt, and are not stored for the backward."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any
from unittest import mock

import pytest
import torch
from torch.fx import symbolic_trace
from torch.nn import functional

from workbench.capture.operations import DROPOUT
from workbench.execution.blocks.activation_checkpointing import checkpointed_when_compiled
from workbench.execution.blocks.dropout import has_active_dropout, hashed_dropout, use_hashed_dropout

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
