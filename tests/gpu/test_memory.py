"""Where the tensors of a step lie on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.harness import launch
from tests.distributed.test_every_plan import part_of
from tests.distributed.test_training import batch_of
from tests.gpu.machine import DEVICE, here, needs
from tests.gpu.test_equivalence import case, trainer_on_device
from workbench.execution.shard import local

pytestmark = [pytest.mark.gpu, needs(2)]
DEFAULT_STREAM = 0


@pytest.mark.skipif(DEVICE != "cuda", reason="only CUDA keeps memory for the stream that asked for it")
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sharded_gradients_lie_in_memory_that_activations_left(zero: int) -> None:
    assert launch(_streams_of_gradients, 2, zero, device=DEVICE) == {DEFAULT_STREAM}


def _streams_of_gradients(_rank: int, zero: int) -> set[int]:
    trainer = trainer_on_device(case(data=2, zero=zero))
    batch = {name: value.to(here()) for name, value in batch_of("bert", 0).items()}
    trainer.gradients(0, part_of(trainer, batch))
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    gradients = [local(parameter.grad) for parameter in trainer.stage.named().values() if parameter.grad is not None]
    return {segment["stream"] for segment in segments for gradient in gradients if _lies_in(gradient, segment)}


def _lies_in(tensor: torch.Tensor, segment: dict[str, Any]) -> bool:
    return 0 <= tensor.data_ptr() - int(segment["address"]) < int(segment["total_size"])
