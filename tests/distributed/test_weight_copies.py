"""bf16 weight copies, cast once per step, train to the last bit as autocast does, which casts for every use."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed import zoo
from tests.distributed.harness import coordinate, launch
from tests.distributed.test_every_plan import Case, captured_once, part_of, plan_of
from tests.distributed.test_training import experiment_of
from workbench.capture import Graph
from workbench.execution.blocks.context import StepContext
from workbench.execution.blocks.gradient_accumulation import GradientAccumulator
from workbench.execution.blocks.weight_copies import WeightCopies, read_only_by_products
from workbench.execution.build import build_stage
from workbench.execution.trainer import Trainer
from workbench.optimizers.adamw import ShardedAdamW
from workbench.planning.plan import Plan

STEPS = 3
CASES = (
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
    found = launch(_outcomes, 2, name, CASES, ahead=functools.partial(captured_once, name))
    for case, (copied, cast) in zip(CASES, found, strict=True):
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
    here = coordinate(plan.pipeline, plan.data, plan.tensor)
    context = StepContext(seed=0, device=torch.device("cpu"))
    stage = build_stage(plan, here, model, graph, context, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    trainer = Trainer(experiment_of("bert", **changes), plan, graph, stage, context, here)
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
