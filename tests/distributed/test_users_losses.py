"""Losses as people return and compute them equal plain PyTorch's over several micro-batches, stages and replicas."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.distributed.harness import launch
from tests.distributed.test_every_plan import MICRO_BATCH, Case, part_of, plan_of, trainer_of
from workbench.capture import Graph, capture, spec_of

TOLERANCE = 1e-5
WIDTH, CLASSES, LENGTH = 16, 5, 6
CASES = (Case(pipeline=2), Case(data=2, num_microbatches=2), Case(data=2, zero=3, num_microbatches=2))


class Layers(nn.Module):
    """A stem, four residual layers and a head; the models below change what happens to the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class FieldsOfTheSchedule(Layers):
    """Fields of the batch have the names of arguments of the schedule's `step`."""

    def forward(self, x: torch.Tensor, target: torch.Tensor, losses: torch.Tensor, return_outputs: torch.Tensor) -> Any:
        logits = self.logits(x) * return_outputs[:, None, None]
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten()) + (logits.mean((1, 2)) * losses).mean()


class LastOfATuple(Layers):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.logits(x)
        return logits, functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


class OverASelection(Layers):
    """A mean over the elements that the batch selects, as many of which as there are differs between samples."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return self.loss(self.logits(x)[keep], y[keep])


class ClassesOfASelection(Layers):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        keep = labels >= 0
        return functional.cross_entropy(self.logits(x)[keep], labels[keep])


class WritesIntoAField(Layers):
    """Changes its input in place, before and after a layer reads it, as preprocessing in forward does."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x -= x.mean(-1, keepdim=True)
        x.mul_(0.1)
        hidden = self.layers[1](self.layers[0](self.stem(x)) + x.repeat(1, 1, 2))
        logits = self.head(self.layers[3](self.layers[2](hidden) + x.sum(-1, keepdim=True)))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "fields of the schedule": FieldsOfTheSchedule,
    "last of a tuple": LastOfATuple,
    "writes": WritesIntoAField,
    "cross-entropy": ClassesOfASelection,
    "mse": lambda: OverASelection(functional.mse_loss),
    "l1": lambda: OverASelection(functional.l1_loss),
    "smooth l1": lambda: OverASelection(functional.smooth_l1_loss),
    "huber": lambda: OverASelection(functional.huber_loss),
}


def batch_of(name: str, size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, LENGTH, 8, generator=generator)
    chance = torch.linspace(0.2, 0.95, size)[:, None]
    keep = torch.rand(size, LENGTH, generator=generator) < chance
    keep[:, 0] = True
    labels = torch.randint(0, CLASSES, (size, LENGTH), generator=generator)
    if name == "fields of the schedule":
        weights = torch.rand(2, size, generator=generator)
        return {"x": x, "target": labels, "losses": weights[0], "return_outputs": weights[1]}
    if name in ("last of a tuple", "cross-entropy", "writes"):
        return {"x": x, "labels": labels.where(keep, -1)}
    return {"x": x, "y": torch.randn(size, LENGTH, CLASSES, generator=generator), "keep": keep}


@functools.cache
def capture_all() -> dict[str, tuple[nn.Module, Graph]]:
    found = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make().train()
        specs = {key: spec_of(key, value) for key, value in batch_of(name, MICRO_BATCH).items()}
        found[name] = model, capture(model, specs, name=name)
    return found


def _worst_differences(_rank: int) -> dict[tuple[str, Case], float]:
    """Return the largest relative difference of the loss or a gradient to plain PyTorch's on the whole batch."""
    found = {}
    for name, (model, graph) in capture_all().items():
        for case in CASES:
            plan = plan_of(graph, case)
            batch, plain, own = batch_of(name, plan.global_batch), copy.deepcopy(model), copy.deepcopy(model)
            output = plain(**copy.deepcopy(batch))
            expected = output[-1] if isinstance(output, tuple) else output
            expected.backward()
            trainer = trainer_of(own, graph, plan)
            loss = trainer.gradients(0, part_of(trainer, batch))
            torch.distributed.all_reduce(loss)
            worst = abs(loss - expected.detach()) / abs(expected.detach())
            gradients = {key: parameter.grad for key, parameter in plain.named_parameters()}
            for key in trainer.stages.model_parameters():
                wanted = gradients[key]
                assert wanted is not None
                worst = torch.maximum(worst, (trainer.full_gradient(key) - wanted).norm() / wanted.norm())
            torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
            found[name, case] = worst.item()
    return found


def test_losses_as_people_return_and_compute_them_equal_plain_pytorch() -> None:
    found = launch(_worst_differences, 2, ahead=capture_all)
    wrong = {key: error for key, error in found.items() if not error <= TOLERANCE}
    assert not wrong, wrong
