"""On GPUs, models with opaque parts and models whose loss compares samples equal plain PyTorch, as they do on CPUs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import pytest
import torch

from tests.distributed import test_gathered_losses, test_opaque_modules, zoo
from tests.distributed.harness import launch
from tests.distributed.test_gathered_losses import REPLICAS
from tests.gpu.machine import DEVICE, here, needs
from tests.unit import coupled_models, test_division
from tests.unit.capture_models import MODELS as OWN_MODELS
from tests.unit.capture_models import batch_for, captured
from workbench.capture import build_meta
from workbench.capture.coupling.division import PARTS, division_fault

EQUAL = [name for name in dict.fromkeys(test_division.EQUAL) if name != "Constants"]
"""`Constants` adds tensors that it makes on the CPU, and does not run on a GPU by itself either."""


def _multiply_in_fp32() -> None:
    """Keep products in full fp32, those of cuDNN's LSTMs and convolutions included, which are TF32 unless told."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def _opaque(rank: int, cases: tuple[Any, ...]) -> Mapping[Hashable, float]:
    _multiply_in_fp32()
    return test_opaque_modules.compared(rank, cases, here())


def _gathered(rank: int, cases: tuple[Any, ...]) -> Mapping[Hashable, float]:
    _multiply_in_fp32()
    return test_gathered_losses.compared(rank, cases, here())


DIVISIONS = {
    "opaque, alone": (_opaque, 1, test_opaque_modules.ALONE),
    "opaque, divided": (_opaque, 2, test_opaque_modules.CASES),
    "gathered, alone": (_gathered, 1, test_gathered_losses.ALONE),
    "gathered, over replicas": (_gathered, 2, REPLICAS[:2]),
    "gathered, over shards": (_gathered, 2, REPLICAS[2:]),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs(DIVISIONS[kind][1])) for kind in DIVISIONS])
def test_models_that_are_hard_to_divide_equal_plain_pytorch(kind: str) -> None:
    compared, world, cases = DIVISIONS[kind]
    found: Mapping[Hashable, float] = launch(compared, world, cases, device=DEVICE)
    wrong = {case: error for case, error in found.items() if not error <= 1e-5}
    assert found
    assert not wrong, wrong


def _faults(_rank: int) -> dict[str, str]:
    """What comparing a whole batch with its micro-batches says of models, with their dropout, on this device."""
    torch.set_float32_matmul_precision("highest")
    found = {}
    for name in EQUAL:
        make = {**zoo.MODELS, **OWN_MODELS}[name]
        graph = captured(build_meta(make), batch_for(name, 2))

        def samples(count: int, trial: int, name: str = name) -> dict[str, torch.Tensor]:
            return {key: field.to(here()) for key, field in batch_for(name, count, trial).items()}

        found[name] = division_fault(graph, lambda make=make: make().to(here()), samples, PARTS)
    for name, make in coupled_models.COUPLED.items():
        batch = torch.utils.data.default_collate(coupled_models.samples_for(name))
        graph = captured(build_meta(make), {key: field[:2] for key, field in batch.items()})

        def rows(count: int, _: int, batch: dict[str, torch.Tensor] = batch) -> dict[str, torch.Tensor]:
            return {key: field[:count].to(here()) for key, field in batch.items()}

        found[name] = division_fault(graph, lambda make=make: make().to(here()), rows, PARTS)
    return found


@needs(1)
def test_numbers_on_the_device_find_the_losses_that_compare_samples_and_raise_no_false_alarm() -> None:
    found = launch(_faults, 1, device=DEVICE)
    coupled = {name for name, fault in found.items() if fault}
    assert coupled == {*coupled_models.COUPLED, *test_division.COUPLED_ON_PURPOSE}, found
