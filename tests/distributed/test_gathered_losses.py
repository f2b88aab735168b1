"""A loss that compares samples over micro-batches and replicas is plain PyTorch's of the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

from tests.distributed.harness import forced_plan, launch
from tests.distributed.test_every_plan import part_of, trainer_of
from tests.unit.coupled_models import GATHERED, TwoTower, samples_for
from workbench.capture import Graph, capture, spec_of
from workbench.capture.gathering import with_tail_of
from workbench.planning.plan import Plan

TOLERANCE = 1e-5
BATCH = 8
ALONE: tuple[dict[str, Any], ...] = ({"num_microbatches": 4}, {"num_microbatches": 4, "recompute": "full"})
REPLICAS: tuple[dict[str, Any], ...] = (
    {"data": 2, "num_microbatches": 1},
    *({"data": 2, "num_microbatches": 2, "zero": zero} for zero in range(4)),
)


def _compared(_rank: int, cases: tuple[dict[str, Any], ...]) -> dict[str, float]:
    """Largest relative difference of a loss or a gradient from plain PyTorch's, for every model and division."""
    return {f"{name}, {choices}": error for name in GATHERED for choices, error in _differences(name, cases)}


def _differences(name: str, cases: tuple[dict[str, Any], ...]) -> Iterator[tuple[dict[str, Any], float]]:
    torch.manual_seed(0)
    model = GATHERED[name]().train()
    batch = default_collate(samples_for(name, BATCH))
    graphs: dict[int, Graph] = {}

    def captured(size: int) -> Graph:
        if size not in graphs:
            specs = {key: spec_of(key, field[:size]) for key, field in batch.items()}
            graphs[size] = capture(model, specs, name=name, gathers=True)
        return graphs[size]

    for choices in cases:
        size = BATCH // choices["num_microbatches"] // choices.get("data", 1)
        graph = with_tail_of(captured(size), captured(BATCH))
        plan = forced_plan(graph, pipeline=1, micro_batch=size, gathers=True, **choices)
        yield choices, _difference(copy.deepcopy(model), graph, plan, batch)


def _difference(model: nn.Module, graph: Graph, plan: Plan, batch: dict[str, torch.Tensor]) -> float:
    plain = copy.deepcopy(model)
    trainer = trainer_of(model, graph, plan)
    worst = torch.zeros(())
    for _step in range(2):  # no gradient of the first stays
        expected = plain(**batch)
        plain.zero_grad()
        expected.backward()
        loss = trainer.gradients(0, part_of(trainer, batch))
        torch.distributed.all_reduce(loss)
        worst = torch.maximum(worst, abs(loss - expected.detach()) / abs(expected.detach()))
        gradients = {key: p.grad for key, p in plain.named_parameters() if p.grad is not None}
        scale = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        for key in trainer.stages.model_parameters():
            found = trainer.full_gradient(key)
            assert (found is None) == (key not in gradients), key
            if found is not None:
                worst = torch.maximum(worst, (found - gradients[key]).norm() / scale)
    buffers = dict(plain.named_buffers())
    for key, buffer in trainer.stages.model_buffers().items():
        if key in buffers:
            torch.testing.assert_close(buffer, buffers[key])
    torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
    return worst.item()


class _TwoDropouts(TwoTower):
    """Two towers whose outputs dropout thins out."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.dropout(x, 0.5), functional.dropout(y, 0.5))


def _outputs_of_both_forwards(_rank: int) -> list[list[torch.Tensor]]:
    model = _TwoDropouts().train()
    batch = default_collate(samples_for("two towers", BATCH))
    graphs = [
        capture(model, {key: spec_of(key, field[:size]) for key, field in batch.items()}, gathers=True)
        for size in (2, BATCH)
    ]
    graph = with_tail_of(*graphs)
    trainer = trainer_of(model, graph, forced_plan(graph, pipeline=1, micro_batch=2, num_microbatches=4, gathers=True))
    *_, towers, _tail = trainer.stages.stages[0].block_modules()
    sent = []
    towers.register_forward_hook(lambda _module, _given, values: sent.append([value.detach() for value in values]))
    trainer.gradients(0, batch)
    return sent


def test_dropout_draws_the_same_numbers_in_both_forwards_of_a_micro_batch() -> None:
    sent = launch(_outputs_of_both_forwards, 1)
    assert len(sent) == 8
    torch.testing.assert_close(sent[:4], sent[4:], rtol=0, atol=0)
    assert all(not torch.equal(one, other) for one, other in zip(sent[0], sent[1], strict=True))


def test_micro_batches_in_one_process_equal_plain_pytorch_of_the_whole_batch() -> None:
    wrong = {case: error for case, error in launch(_compared, 1, ALONE).items() if not error <= TOLERANCE}
    assert not wrong, wrong


def test_replicas_under_every_zero_stage_equal_plain_pytorch_of_the_whole_batch() -> None:
    wrong = {case: error for case, error in launch(_compared, 2, REPLICAS).items() if not error <= TOLERANCE}
    assert not wrong, wrong
