"""On a GPU, a block that is not finite is found behind CUDA graphs and compiled code, and the weights stay."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.distributed.harness import launch, trainer_for
from tests.distributed.test_every_plan import Case, part_of, plan_of
from tests.distributed.test_non_finite import BROKEN, MICRO_BATCH, Fragile, fields
from tests.gpu.machine import DEVICE, here, needs
from workbench.capture import capture, spec_of
from workbench.execution.blocks.cuda_graphs import WARM_UP_STEPS
from workbench.execution.observation import BACKWARD, FORWARD, locate
from workbench.experiment import Experiment

STEPS = WARM_UP_STEPS + 2
OPTIMIZERS = ("adamw", "lamb", "muon", "sgd")
TRAININGS = [(case, optimizer) for case in (Case(cuda_graphs=True), Case(recompute="full")) for optimizer in OPTIMIZERS]
TRAININGS.append((Case(offload_optimizer=True), "adamw"))  # the only one that offloads


@needs(1)
@pytest.mark.parametrize(("case", "optimizer"), TRAININGS, ids=str)
def test_the_block_is_found_on_a_gpu_and_the_weights_stay(case: Case, optimizer: str) -> None:
    assert launch(_located, 1, case, optimizer, device=DEVICE) == []


def _located(_rank: int, case: Case, optimizer: str) -> list[str]:
    torch.manual_seed(0)
    wrong, model = [], Fragile()
    specs = {key: spec_of(key, value) for key, value in fields(MICRO_BATCH).items()}
    graph = capture(model, specs, name="fragile")
    [broken] = [block.index for block in graph.blocks if f"layers.{BROKEN}" in block.name]
    plan = plan_of(graph, case)
    for changed, place in (("divisor", FORWARD), ("root", BACKWARD)):
        asked = Experiment(model=Fragile, data=lambda: None, steps=99, global_batch=plan.global_batch)
        asked = asked.replace(optimizer=optimizer)
        trainer = trainer_for(asked, copy.deepcopy(model).to(here()), graph, plan, here(), compiles=True)
        context, stages = trainer.context, trainer.stages
        whole = {name: value.to(here()) for name, value in fields(plan.global_batch).items()}
        bad = {**whole, changed: whole[changed].clone()}
        bad[changed][-1] = 0.0
        part, damaged = part_of(trainer, whole), part_of(trainer, bad)
        for step in range(STEPS):
            assert trainer.step(step, part).scalars.isfinite().all()
        before = [weight.detach().clone() for weight in stages.model_parameters().values()]
        trainer.step(STEPS, damaged)
        trainer.step(STEPS + 1, part)
        if any((a != b).any() for a, b in zip(before, stages.model_parameters().values(), strict=True)):
            wrong.append(f"{changed}: the weights moved")
        if case.cuda_graphs and DEVICE == "cuda":
            assert context.cuda_graphs is not None
            assert context.cuda_graphs.replays
        origin, sentence = locate(trainer, STEPS, damaged, trainer.count_labels_on_host(damaged))
        if origin is None or (origin.source, origin.block, origin.micro_batch) != (place, broken, 3):
            wrong.append(f"{changed}: {origin} {sentence}")
        torch._dynamo.reset()  # which compiles no code more often than a few times in one process
    return wrong
