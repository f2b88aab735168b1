"""Gradients reuse the memory of activations, and a start needs little memory beyond the model."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import workbench as wb
from tests.distributed.harness import launch, trainer_for
from tests.distributed.test_every_plan import MICRO_BATCH, Case, part_of, plan_of
from tests.distributed.test_training import batch_of
from tests.gpu.machine import DEVICE, here, needs
from tests.gpu.test_equivalence import case, trainer_on_device
from workbench.capture import capture
from workbench.execution.build import build_model
from workbench.execution.parallel.sharding import local

pytestmark = needs(2)
DEFAULT_STREAM = 0
LAYERS = 8
MODEL = wb.models.bert(hidden_size=512, num_layers=LAYERS, num_heads=8, vocab_size=512, max_positions=64)
EXPERIMENT = wb.Experiment(
    model=MODEL, data=wb.data.corpus("demo", vocab_size=512), steps=1, global_batch=8, seq_len=64
)


@pytest.mark.skipif(DEVICE != "cuda", reason="only CUDA keeps memory for the stream that allocated it")
def test_sharded_gradients_lie_in_memory_freed_by_activations() -> None:
    assert launch(_streams_of_gradients, 2, device=DEVICE) == {zero: {DEFAULT_STREAM} for zero in (1, 2, 3)}


def _streams_of_gradients(_rank: int) -> dict[int, set[int]]:
    return {zero: _streams_under(zero) for zero in (1, 2, 3)}


def _streams_under(zero: int) -> set[int]:
    trainer = trainer_on_device(case(data=2, zero=zero))
    batch = {name: value.to(here()) for name, value in batch_of("bert", 0).items()}
    trainer.gradients(0, part_of(trainer, batch))
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    gradients = [
        local(parameter.grad) for parameter in trainer.stages.model_parameters().values() if parameter.grad is not None
    ]
    return {
        segment["stream"]
        for segment in segments
        for gradient in gradients
        if 0 <= gradient.data_ptr() - int(segment["address"]) < int(segment["total_size"])
    }


@pytest.mark.skipif(DEVICE != "cuda", reason="only CUDA counts allocated memory")
def test_a_start_needs_little_memory_beyond_the_model_that_is_built() -> None:
    for (division, on_host, most), (peak, after) in zip(STARTS, launch(_starts, 2, device=DEVICE), strict=True):
        assert peak < most, (division, on_host)
        assert after < 1 / 2 + 1 / LAYERS, (division, on_host)


STARTS = (
    (Case(data=2, zero=3), True, 1 / 2 + 2 / LAYERS),
    (Case(tensor=2), False, 1 + 1 / LAYERS),
    (Case(pipeline=2), False, 1 + 1 / LAYERS),
)
"""A division, whether the model is built on the host, and the most memory that the start takes, in models."""


def _starts(_rank: int) -> list[tuple[float, float]]:
    return [_built(division, on_host) for division, on_host, _ in STARTS]


def _built(division: Case, on_host: bool) -> tuple[float, float]:
    """Return the peak allocated until the trainer exists, and the memory then, as shares of the model."""
    gc.collect()  # what the last trainer was made of
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = build_model(MODEL.build, 0, torch.device("cpu") if on_host else here(), seed=0)
    size = sum(weight.nbytes for weight in model.parameters())
    specs = EXPERIMENT.data.reads(EXPERIMENT).batch_specs()
    graph = capture(model, {name: spec.batched(MICRO_BATCH) for name, spec in specs.items()}, name="bert")
    trainer = trainer_for(EXPERIMENT, model, graph, plan_of(graph, division), here())
    assert {weight.device for weight in trainer.stages.model_parameters().values()} == {here()}
    return (torch.cuda.max_memory_allocated() - before) / size, (torch.cuda.memory_allocated() - before) / size
