"""Under bf16 every plan is as exact as plain PyTorch under autocast, measured against fp32 gradients.

A few models run by default, all of `zoo.MODELS` in `make test-exhaustive`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed import zoo
from tests.distributed.harness import HALF, launch, part_of, plain_step, trainer_for
from tests.distributed.test_every_plan import MICRO_BATCH, Case, captured_once, plan_of
from tests.distributed.test_training import experiment_of
from tests.exhaustive import EXHAUSTIVE
from workbench.capture import Graph
from workbench.execution.blocks.block_module import WeightCopies, read_only_by_products
from workbench.execution.gradients import GradientAccumulator
from workbench.experiment import Experiment
from workbench.optimizers.adamw import ShardedAdamW
from workbench.planning.plan import Plan

CASES = (Case(pipeline=2), *(Case(data=2, zero=zero, num_microbatches=2) for zero in (0, 1, 3)), Case(tensor=2))
FAILS_PLAINLY = ("deberta",)
"""Models whose own code fails under autocast: it fills bf16 scores with the lowest fp32 number. (Plans train them.)"""
REPRESENTATIVE = ("gpt2", "llama", "t5", "vit")
TRIED = REPRESENTATIVE if not EXHAUSTIVE else sorted(set(zoo.MODELS) - set(FAILS_PLAINLY))
NO_WORSE = 1.5
"""Largest allowed error relative to autocast's: bf16 all-gathers and all-reduces add to its rounding."""
Gradients = Mapping[str, torch.Tensor]


def plain_gradients(name: str, model: nn.Module, batch: zoo.Batch) -> dict[str, torch.Tensor]:
    _, plain = plain_step(model, batch, MICRO_BATCH if name in zoo.NORMALISED_BY_BATCH else None)
    return {key: p.grad for key, p in plain.named_parameters() if p.grad is not None}


def distance(found: Gradients, exact: Gradients) -> float:
    """Return the distance of all ranks' gradients from the exact ones, relative to the norm of the exact ones."""
    sums = torch.zeros(2)
    for name, value in found.items():
        sums += torch.tensor([(value.float() - exact[name]).square().sum().item(), exact[name].square().sum().item()])
    torch.distributed.all_reduce(sums)
    return float((sums[0] / sums[1]).sqrt())


def measured(_rank: int, name: str) -> dict[str, float]:
    model, graph = captured_once(name)
    batch = zoo.batch(name, 4 * MICRO_BATCH)
    exact = plain_gradients(name, model, batch)
    with HALF():
        found = {"autocast": distance(plain_gradients(name, model, batch), exact)}
    for case in CASES:
        plan = dataclasses.replace(plan_of(graph, case), precision="bf16")
        experiment = Experiment(model=zoo.MODELS[name], data=lambda: None, steps=1, global_batch=plan.global_batch)
        trainer = trainer_for(experiment, copy.deepcopy(model), graph, plan)
        trainer.gradients(0, part_of(trainer, batch))
        ours = {key: trainer.full_gradient(key) for key in trainer.stages.model_parameters()}
        found[str(case)] = distance({key: value for key, value in ours.items() if value is not None}, exact)
    return found


@pytest.mark.parametrize("name", TRIED)
def test_gradients_are_as_exact_as_autocasts(name: str) -> None:
    found = launch(measured, 2, name, ahead=functools.partial(captured_once, name))
    assert max(found.values()) < NO_WORSE * found["autocast"], found


STEPS = 3
COPIED = (
    Case(pipeline=2),
    Case(pipeline=2, chunks=2, schedule="interleaved"),
    Case(pipeline=2, recompute="full", schedule="gpipe"),
    Case(pipeline=1, tensor=2),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Results of one training, gathered from all ranks."""

    copies: int
    """Number of weight copies on the rank with the fewest."""
    bf16_gradients: int
    """Number of weights on this rank whose gradients are bf16."""
    losses: list[float]
    weights: dict[str, torch.Tensor]


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2"])
def test_bf16_weight_copies_train_to_the_last_bit_as_autocast_does(name: str) -> None:
    found = launch(_outcomes, 2, name, COPIED, ahead=functools.partial(captured_once, name))
    for case, (copied, cast) in zip(COPIED, found, strict=True):
        assert cast.copies == 0
        assert copied.copies > 0, case
        assert copied.losses == cast.losses, case
        assert copied.losses[-1] != copied.losses[0]
        assert all(torch.equal(value, cast.weights[key]) for key, value in copied.weights.items()), case


def _outcomes(_rank: int, name: str, cases: tuple[Case, ...]) -> list[tuple[Outcome, Outcome]]:
    model, graph = captured_once(name)
    found = []
    for case in cases:
        plan = dataclasses.replace(plan_of(graph, case), precision="bf16")
        copied = _outcome(name, copy.deepcopy(model), graph, plan)
        with autocast_alone():
            found.append((copied, _outcome(name, copy.deepcopy(model), graph, plan)))
    return found


@contextmanager
def autocast_alone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "keeps_weight_copies", lambda _plan, _precision: False)
        yield


def _outcome(name: str, model: nn.Module, graph: Graph, plan: Plan, **changes: Any) -> Outcome:
    trainer = trainer_for(experiment_of("bert", **changes), model, graph, plan)
    stage, here = trainer.stages, trainer.coordinate
    losses = [
        float(trainer.step(step, part_of(trainer, zoo.batch(name, plan.global_batch, seed=step))).scalars[0])
        for step in range(STEPS)
    ]
    copies = sum(len(module.weight_copies) for held in stage.stages for module in held.block_modules())
    of_ranks: list[Any] = [None] * plan.world
    weights = {f"{key} of rank {here.rank}": value.detach() for key, value in stage.model_parameters().items()}
    dist.all_gather_object(of_ranks, (copies, weights))
    return Outcome(
        min(number for number, _ in of_ranks),
        sum(w.grad is not None and w.grad.dtype == torch.bfloat16 for w in stage.model_parameters().values()),
        losses,
        {k: v for _, held in of_ranks for k, v in held.items()},
    )


def test_gradients_kept_in_bf16_train_as_gradients_in_fp32_do() -> None:
    """PyTorch's update casts them first; one tensor-parallel micro-batch makes each gradient once."""
    kept, cast = launch(_kept_and_cast, 2, ahead=functools.partial(captured_once, "bert"))
    assert kept.losses == cast.losses
    assert all(torch.equal(value, cast.weights[key]) for key, value in kept.weights.items())


def _kept_and_cast(_rank: int) -> list[Outcome]:
    model, graph = captured_once("bert")
    found = []
    for keeps, num_microbatches in ((True, 1), (False, 1), (True, 2)):
        plan = dataclasses.replace(plan_of(graph, Case(tensor=2, num_microbatches=num_microbatches)), precision="bf16")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ShardedAdamW, "reads_bf16_gradients", keeps)
            found.append(_outcome("bert", copy.deepcopy(model), graph, plan, clip_norm=None))
    assert [each.bf16_gradients for each in found] == [found[0].copies, 0, 0]
    return found[:2]


def test_a_copy_is_renewed_unless_the_optimiser_has_written_it_since_the_weight_changed() -> None:
    copies = WeightCopies([], {}, {}, GradientAccumulator(compiles=False))
    weights = [nn.Parameter(torch.full((2,), 3.0)) for _ in range(3)]
    copies.copies = {weight: torch.zeros(2, dtype=torch.bfloat16) for weight in weights}
    written = {weight: weight._version for weight in weights[:2]}
    with torch.no_grad():
        weights[1].detach()[0] = 5.0
    copies.refresh(written)
    assert [copy.tolist() for copy in copies.copies.values()] == [[0.0, 0.0], [5.0, 3.0], [3.0, 3.0]]


def test_only_weights_that_nothing_but_products_reads_are_copied() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaled, self.plain = nn.Linear(4, 4), nn.Linear(4, 4)
            self.norm = nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.plain(self.norm(self.scaled(x))) * self.scaled.bias

    code = torch.export.export(Layer(), (torch.ones(2, 4),)).graph_module
    names = ["scaled.weight", "scaled.bias", "plain.weight", "plain.bias", "norm.weight", "norm.bias"]
    found = dict(zip(names, read_only_by_products(code, len(names)), strict=True))
    assert [name for name, wanted in found.items() if wanted] == ["scaled.weight", "plain.weight", "plain.bias"]
