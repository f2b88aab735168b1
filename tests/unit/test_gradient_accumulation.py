"""Gradients of micro-batches are added for all weights of a block at once, and bf16 copies pass theirs on."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from workbench.execution.blocks import gradient_accumulation
from workbench.execution.blocks.gradient_accumulation import GradientAccumulator
from workbench.execution.blocks.weight_copies import GradientTransfer

COMPILE = torch.compile
SHAPES = (64, 32), (7,), (5, 3)


def allocate(weights: Sequence[nn.Parameter]) -> None:
    for weight in weights:
        weight.grad = torch.full_like(weight, float("nan"))  # uninitialised memory may hold anything


@pytest.mark.parametrize("compiles", [False, True])
def test_bf16_gradients_are_added_in_fp32_to_the_last_bit(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(gradient_accumulation, "MIN_COMPILED_ELEMENTS", sum(math.prod(shape) for shape in SHAPES))
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
