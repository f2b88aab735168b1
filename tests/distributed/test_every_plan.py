"""Every plan that the planner may offer runs, and is plain PyTorch: schedules, ZeRO stages, recomputation, tensors.

A representative part by default; everything where WORKBENCH_TEST_ALL is set. Cases that use equally many processes
share one launch.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx, nn

from tests.distributed import zoo
from tests.distributed.harness import forced_plan, launch, place
from workbench.capture import Graph, capture, spec_of
from workbench.execution.build import build_stage
from workbench.execution.context import StepContext
from workbench.execution.optim import OffloadedAdamW
from workbench.execution.shard import full
from workbench.execution.split_backward import Deferral, defer_weight_gradients
from workbench.execution.trainer import Trainer
from workbench.experiment import Experiment

TOLERANCE = 1e-5
MICRO_BATCH = 2
EVERYTHING = bool(os.environ.get("WORKBENCH_TEST_ALL"))
slow = pytest.mark.skipif(not EVERYTHING, reason="WORKBENCH_TEST_ALL runs it")


@dataclass(frozen=True)
class Case:
    """One way to divide a step."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    chunks: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    recompute: str = "none"
    num_microbatches: int = 4
    offload_optimizer: bool = False

    @property
    def world(self) -> int:
        return self.pipeline * self.data * self.tensor


@dataclass(frozen=True)
class Difference:
    """Largest relative differences to plain PyTorch."""

    loss: float
    gradient: float


def differences(name: str, *cases: Case) -> dict[Case, Difference]:
    """Measured on real processes, the same for all cases."""
    [world] = {case.world for case in cases}
    found: dict[Case, Difference] = launch(_measured, world, name, cases)
    return found


def assert_equal_to_plain_pytorch(name: str, *cases: Case) -> None:
    found = differences(name, *cases)
    wrong = {case: error for case, error in found.items() if not max(error.loss, error.gradient) <= TOLERANCE}
    assert not wrong, wrong


def _measured(_rank: int, name: str, cases: tuple[Case, ...]) -> dict[Case, Difference]:
    torch.manual_seed(0)
    model = zoo.MODELS[name]().train()
    specs = {key: spec_of(key, value) for key, value in zoo.batch(name, MICRO_BATCH).items()}
    graph = capture(model, specs, name=name)
    return {case: _difference(name, copy.deepcopy(model), graph, case) for case in cases}


def trainer_of(name: str, model: nn.Module, graph: Graph, case: Case) -> Trainer:
    plan = forced_plan(
        graph,
        pipeline=case.pipeline,
        data=case.data,
        tensor=case.tensor,
        chunks=case.chunks,
        zero=case.zero,
        micro_batch=MICRO_BATCH,
        num_microbatches=case.num_microbatches,
        recompute=case.recompute,
        schedule=case.schedule,
        offload_optimizer=case.offload_optimizer,
    )
    here = place(case.pipeline, case.data, case.tensor)
    context = StepContext(seed=0, device=torch.device("cpu"))
    stage = build_stage(plan, here, model, graph, context)
    experiment = Experiment(model=zoo.MODELS[name], data=lambda: None, steps=1, global_batch=plan.global_batch)
    return Trainer(experiment, plan, graph, stage, context, here)


def _difference(name: str, model: nn.Module, graph: Graph, case: Case) -> Difference:
    batch = zoo.batch(name, MICRO_BATCH * case.num_microbatches * case.data)
    expected_loss, expected = _plainly(name, copy.deepcopy(model), batch)
    trainer = trainer_of(name, model, graph, case)
    part = trainer.gradients(0, part_of(trainer, batch))
    torch.distributed.all_reduce(part)
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    worst = torch.zeros(())
    for key in trainer.stage.named():
        found = trainer.full_gradient(key)
        assert (found is None) == (key not in expected), f"{key}: {found}, and plain PyTorch gives {expected.get(key)}"
        if found is None:
            continue
        error = (found - expected[key]).norm() / max(expected[key].norm().item(), 1e-4 * scale)
        worst = torch.maximum(worst, error)
    torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
    return Difference(abs(part.item() - expected_loss) / abs(expected_loss), worst.item())


def _plainly(name: str, model: nn.Module, batch: zoo.Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients over the whole batch; with BatchNorm a micro-batch at a time, as its statistics are."""
    size = len(next(iter(batch.values())))
    step = MICRO_BATCH if name in zoo.NORMALISED_BY_BATCH else size
    total = 0.0
    for first in range(0, size, step):
        output = model(**{key: value[first : first + step] for key, value in batch.items()})
        loss = loss_of(output)
        (loss * step / size).backward()
        total += loss.item() * step / size
    return total, {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, tuple):
        return output[0]
    return output if isinstance(output, torch.Tensor) else output["loss"]


def part_of(trainer: Trainer, batch: zoo.Batch) -> zoo.Batch:
    """The replica's part of a global batch."""
    first = trainer.place.data_rank * trainer.samples
    return {key: value[first : first + trainer.samples] for key, value in batch.items()}


def test_optimiser_sharding_alone_equals_plain_pytorch() -> None:
    assert_equal_to_plain_pytorch("bert", Case(data=2, zero=1), Case(data=2, zero=1, recompute="full"))


def test_selective_recomputation_changes_no_gradient() -> None:
    assert_equal_to_plain_pytorch("bert", Case(recompute="selective"))


def test_several_stages_a_rank_equal_plain_pytorch() -> None:
    interleaved = Case(pipeline=2, chunks=2, schedule="interleaved")
    zero_bubble = Case(pipeline=2, schedule="zero_bubble")
    chunked_zero_bubble = Case(pipeline=2, chunks=2, schedule="zero_bubble", recompute="full")
    assert_equal_to_plain_pytorch("bert", interleaved, zero_bubble, chunked_zero_bubble)


def test_t5_in_several_stages_a_rank_equals_plain_pytorch() -> None:
    """Its embedding is used in stages of the same rank, and its decoder descends from more than what it receives."""
    cases = [Case(pipeline=2, chunks=chunks, schedule="zero_bubble") for chunks in (1, 2, 3)]
    assert_equal_to_plain_pytorch("t5", *cases, Case(pipeline=2, chunks=3, schedule="interleaved"))


def test_zero_bubble_backwards_leave_weight_gradients_for_later() -> None:
    weight, bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))
    code = fx.symbolic_trace(lambda w, b, x: torch.ops.aten.linear.default(x, w, b).relu())
    deferral, x = Deferral(), torch.randn(5, 4, requires_grad=True)
    defer_weight_gradients(code, 2, deferral)(weight, bias, x).sum().backward()
    assert x.grad is not None
    assert weight.grad is bias.grad is None
    deferral.take()()
    found = weight.grad.clone(), bias.grad.clone()
    weight.grad = bias.grad = None
    code(weight, bias, x).sum().backward()
    assert torch.allclose(found[0], weight.grad, rtol=1e-6)
    assert torch.allclose(found[1], bias.grad, rtol=1e-6)


def _updates(_rank: int, cases: tuple[Case, ...]) -> dict[Case, dict[str, torch.Tensor]]:
    """The parameters after three steps."""
    found = {}
    for case in cases:
        torch.manual_seed(0)
        model = zoo.MODELS["bert"]().train()
        specs = {key: spec_of(key, value) for key, value in zoo.batch("bert", MICRO_BATCH).items()}
        trainer = trainer_of("bert", model, capture(model, specs, name="bert"), case)
        for step in range(3):
            batch = zoo.batch("bert", MICRO_BATCH * case.num_microbatches * case.data, seed=step)
            trainer.step(step, part_of(trainer, batch))
        assert type(trainer.optimizer) is (OffloadedAdamW if case.offload_optimizer else torch.optim.AdamW)
        found[case] = {name: full(p.detach()).clone() for name, p in trainer.stage.named().items()}
    return found


def test_moments_in_the_hosts_memory_change_no_update() -> None:
    zeros = (0, 1, 3) if EVERYTHING else (3,)
    for zero in zeros:
        cases = tuple(Case(data=2, zero=zero, offload_optimizer=offload) for offload in (False, True))
        here, there = launch(_updates, 2, cases).values()
        assert all(torch.equal(here[name], there[name]) for name in here)


def test_tensor_parallel_bert_equals_plain_pytorch() -> None:
    assert_equal_to_plain_pytorch("bert", Case(tensor=2))


@slow
@pytest.mark.parametrize("name", zoo.MODELS)
def test_every_model_under_tensor_parallelism_equals_plain_pytorch(name: str) -> None:
    assert_equal_to_plain_pytorch(name, Case(tensor=2), Case(tensor=2, recompute="selective"))
    assert_equal_to_plain_pytorch(name, Case(tensor=4), Case(pipeline=2, tensor=2), Case(data=2, tensor=2, zero=3))


@slow
@pytest.mark.parametrize("name", ["bert", "t5", "gpt2", "albert"])
def test_every_schedule_times_every_zero_stage_equals_plain_pytorch(name: str) -> None:
    cases = [
        Case(pipeline=2, data=2, chunks=chunks, schedule=schedule, zero=zero, recompute=recompute)
        for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2))
        for zero in ((0, 1, 2, 3) if schedule != "zero_bubble" else (0,))
        for recompute in ("none", "selective")
    ]
    assert_equal_to_plain_pytorch(name, *cases)
    assert_equal_to_plain_pytorch(name, Case(pipeline=4, schedule="zero_bubble", num_microbatches=8))
