"""On GPUs, models with opaque parts and models whose loss compares samples equal plain PyTorch, as they do on CPUs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import pytest
import torch

from tests.distributed import test_gathered_losses, test_opaque_modules
from tests.distributed.harness import launch
from tests.gpu.machine import DEVICE, here, needs

pytestmark = pytest.mark.gpu


def _opaque(rank: int, cases: tuple[Any, ...]) -> Mapping[Hashable, float]:
    torch.set_float32_matmul_precision("highest")
    return test_opaque_modules.compared(rank, cases, here())


def _gathered(rank: int, cases: tuple[Any, ...]) -> Mapping[Hashable, float]:
    torch.set_float32_matmul_precision("highest")
    return test_gathered_losses.compared(rank, cases, here())


MODELS = {
    "opaque, alone": (_opaque, 1, test_opaque_modules.ALONE),
    "opaque, divided": (_opaque, 2, test_opaque_modules.CASES),
    "gathered, alone": (_gathered, 1, test_gathered_losses.ALONE),
    "gathered, over replicas": (_gathered, 2, test_gathered_losses.REPLICAS),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs(MODELS[kind][1])) for kind in MODELS])
def test_models_that_are_hard_to_divide_equal_plain_pytorch(kind: str) -> None:
    compared, world, cases = MODELS[kind]
    found: Mapping[Hashable, float] = launch(compared, world, cases, device=DEVICE)
    wrong = {case: error for case, error in found.items() if not error <= 1e-5}
    assert found
    assert not wrong, wrong
