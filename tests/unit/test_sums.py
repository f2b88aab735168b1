"""Gradients of micro-batches are added up a block at a time."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from workbench.execution.blocks import gradient_accumulation as sums_module
from workbench.execution.blocks.gradient_accumulation import Sums
from workbench.execution.blocks.weight_copies import Handover

COMPILE = torch.compile
SHAPES = (64, 32), (7,), (5, 3)


def begin(weights: Sequence[nn.Parameter]) -> None:
    for weight in weights:
        weight.grad = torch.full_like(weight, float("nan"))  # whatever memory held


@pytest.mark.parametrize("compiles", [False, True])
def test_halves_are_added_up_in_fp32_to_the_last_bit(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(sums_module, "WORTH_COMPILING", sum(math.prod(shape) for shape in SHAPES))
    monkeypatch.setattr(torch, "compile", lambda code, **given: compiled.append(code) or COMPILE(code, **given))
    weights = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    sums = Sums(compiles)
    generator = torch.Generator().manual_seed(0)
    expected = [torch.zeros(shape) for shape in SHAPES]
    for _ in range(3):
        gradients = [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]
        gradients[0] = gradients[0].t().contiguous().t()  # as a product leaves it
        for total, gradient in zip(expected, gradients, strict=True):
            total += gradient.float()
        sums.give(weights, gradients, begin)
    assert len(compiled) == (1 if compiles else 0)
    for weight, total in zip(weights, expected, strict=True):
        assert weight.grad is not None
        assert torch.equal(weight.grad, total)


def test_what_is_too_little_to_be_worth_a_kernel_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    weight, sums = nn.Parameter(torch.zeros(8)), Sums(compiles=True)
    for _ in range(2):
        sums.give([weight], [torch.ones(8, dtype=torch.bfloat16)], begin)
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 8


def test_a_weight_whose_gradient_comes_late_begins_beside_others_that_go_on() -> None:
    first, second = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    sums, begun = Sums(compiles=False), []
    one = torch.ones(4, dtype=torch.bfloat16)

    def noted(weights: Sequence[nn.Parameter]) -> None:
        begun.append(list(weights))
        begin(weights)

    sums.give([first], [one], noted)
    sums.give([first, second], [one, one], noted)
    assert [len(weights) for weights in begun] == [1, 1]
    assert begun[1][0] is second
    assert first.grad is not None
    assert second.grad is not None
    assert first.grad.tolist() == [2.0] * 4
    assert second.grad.tolist() == [1.0] * 4


def test_copies_hand_over_what_a_backward_reaches_when_the_last_of_it_has_come() -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    copies = [weight.detach().bfloat16().requires_grad_() for weight in weights]
    handover = Handover(list(zip(copies, weights, strict=True)), Sums(compiles=False))
    (3 * copies[0]).sum().backward()  # the other one plays no part
    assert weights[0].grad is not None
    assert weights[1].grad is None
    (copies[0] + 5 * copies[1]).sum().backward()
    assert [weight.grad.tolist() for weight in weights if weight.grad is not None] == [[4.0] * 2, [5.0] * 2]
    assert all(copy.grad is None for copy in copies)
    del handover


def test_copies_are_let_go_with_what_hands_them_over() -> None:
    weight = nn.Parameter(torch.zeros(2))
    copy = weight.detach().bfloat16().requires_grad_()
    handover = Handover([(copy, weight)], Sums(compiles=False))
    copy.sum().backward()
    memory = weakref.ref(copy)
    gc.disable()
    try:
        del copy, handover
        assert memory() is None
    finally:
        gc.enable()
