"""On GPUs, three steps of an unmodified BERT under every type of plan equal those of plain PyTorch.

Losses, norms, gradients and weights are compared in fp32, without TF32 and dropout.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.harness import launch, trainer_for
from tests.distributed.test_every_plan import MICRO_BATCH, Case, part_of, plan_of
from tests.distributed.test_training import GLOBAL_BATCH, MODELS, Outcome, batch_of, experiment_of, plain
from tests.gpu.machine import DEVICE, DEVICES, here, needs, together
from workbench.capture import Graph, capture, spec_of
from workbench.execution.build import build_model
from workbench.execution.parallel.sharding import local
from workbench.execution.trainer import Trainer
from workbench.optimizers.adamw import OffloadedAdamW, ShardedAdamW

TOLERANCE = 1e-5
STEPS = 3
FLOOR = 1e-3
"""Smallest norm, as a share of the largest tensor's, that differences are taken relative to."""


def case(data: int = 1, **choices: int | str | bool) -> Case:
    return Case(data=data, num_microbatches=GLOBAL_BATCH // MICRO_BATCH // data, **choices)


CASES = (
    case(recompute="full"),
    case(recompute="selective", offload_optimizer=True),
    case(pipeline=2),
    case(pipeline=2, schedule="gpipe", recompute="selective"),
    case(pipeline=2, chunks=2, schedule="interleaved"),
    case(data=2),
    case(data=2, zero=1),
    case(data=2, zero=2),
    case(data=2, zero=3),
    case(data=2, zero=3, recompute="full", offload_optimizer=True),
    case(tensor=2),
    case(tensor=2, recompute="selective"),
    case(pipeline=4),
    case(data=4),
    case(data=4, zero=2),
    case(tensor=4),
    case(pipeline=2, data=2),
    case(pipeline=2, data=2, zero=1),
    case(pipeline=2, data=2, zero=3),
    case(pipeline=2, data=2, chunks=2, schedule="interleaved", zero=2, offload_optimizer=True),
    case(pipeline=2, tensor=2),
    case(data=2, tensor=2, zero=3),
)


@dataclass(frozen=True)
class Difference:
    """The largest relative differences from plain PyTorch."""

    loss: float
    norm: float
    gradient: float
    weight: float


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(c, marks=[needs(c.world), together(f"equivalence-{c.world}")], id=f"{c.world}-{number}")
        for number, c in enumerate(CASES)
    ],
)
def test_training_on_gpus_equals_plain_pytorch(chosen: Case) -> None:
    found = differences(chosen.world)[chosen]
    assert max(asdict(found).values()) <= TOLERANCE, f"{chosen}: {found}"


@functools.cache
def differences(world: int) -> Mapping[Case, Difference]:
    """Return the differences of all cases with `world` devices, which share one start of the processes."""
    assert world <= DEVICES
    found: Mapping[Case, Difference] = launch(
        _measured, world, tuple(c for c in CASES if c.world == world), device=DEVICE
    )
    return found


def _measured(_rank: int, cases: tuple[Case, ...]) -> dict[Case, Difference]:
    torch.set_float32_matmul_precision("highest")
    expected = plain("bert", STEPS, device=DEVICE)
    model, graph = _captured()
    found = {}
    for chosen in cases:
        try:
            found[chosen] = _difference(_trainer(chosen, copy.deepcopy(model), graph), expected)
        except Exception as error:
            raise RuntimeError(f"under {chosen}") from error
    return found


def _difference(trainer: Trainer, expected: Outcome) -> Difference:
    losses, norms = [], []
    for step in range(STEPS):
        batch = {name: value.to(here()) for name, value in batch_of("bert", step).items()}
        loss, squared_norm, _ = trainer.step(step, part_of(trainer, batch)).scalars.tolist()
        losses.append(loss)
        norms.append(squared_norm**0.5)
    _check_offload(trainer)
    assert isinstance(trainer.optimizer, ShardedAdamW)
    factor = trainer.optimizer.gradient_factor
    assert factor is not None
    is_clipped = DEVICE == "cpu" or trainer.plan.offload_optimizer  # AdamW's kernel clips as it reads a gradient
    gradients, weights = {}, {}
    for name, parameter in trainer.stages.model_parameters().items():
        gradient = trainer.full_gradient(name)
        assert gradient is not None, f"{name} received no gradient"
        gradients[name], weights[name] = gradient if is_clipped else gradient * factor, trainer.full(name, parameter)
    worst = torch.tensor([_worst(gradients, expected.gradients), _worst(weights, expected.parameters)], device=here())
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return Difference(
        max(abs(found / value - 1) for found, value in zip(losses, expected.losses, strict=True)),
        max(abs(found / value - 1) for found, value in zip(norms, expected.norms, strict=True)),
        *worst.tolist(),
    )


def _captured() -> tuple[nn.Module, Graph]:
    model = build_model(MODELS["bert"], 0, here(), seed=0)
    specs = {key: spec_of(key, value[:MICRO_BATCH]) for key, value in batch_of("bert", 0).items()}
    return model, capture(model, specs, name="bert")


def trainer_on_device(chosen: Case) -> Trainer:
    """Return a trainer of one case for this rank."""
    return _trainer(chosen, *_captured())


def _trainer(chosen: Case, model: nn.Module, graph: Graph) -> Trainer:
    return trainer_for(experiment_of("bert"), model, graph, plan_of(graph, chosen), here())


def _check_offload(trainer: Trainer) -> None:
    """Assert that the moments are in host memory exactly if the plan offloads them."""
    asked = trainer.plan.offload_optimizer
    assert isinstance(trainer.optimizer, OffloadedAdamW) is asked
    moments = [local(state["exp_avg"]) for state in trainer.optimizer.state.values()]
    assert {moment.device.type for moment in moments} == {"cpu" if asked else here().type}


def _worst(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference of a tensor of this rank, relative to its norm."""
    floor = FLOOR * max(value.norm().item() for value in expected.values())
    return max(
        ((value - expected[name]).norm() / max(expected[name].norm().item(), floor)).item()
        for name, value in found.items()
    )
