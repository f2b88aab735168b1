"""What chooses for all samples keeps the batch whole, although the samples at hand take one branch only."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.unit.capture_models import captured, interpret, loss_of
from workbench.capture.captured_model import CapturedModel
from workbench.capture.coupling import division
from workbench.experiment import Experiment

WIDTH, COUNT = 16, 8
Loss = Callable[..., torch.Tensor]


class Chooses(nn.Module):
    """Residual layers and a head; `loss` is given the model, its states, logits, losses by sample, and the batch."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)
        self.warmth = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.randn(5))
        self.loss = loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor, flag: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        logits = self.head(x)
        losses = functional.cross_entropy(logits, labels, reduction="none") * self.warmth
        fields = {"labels": labels, "flag": flag, "partner": partner}
        return self.loss(SimpleNamespace(model=self, x=x, losses=losses, logits=logits, **fields))


def batch_of(count: int = COUNT, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch = {"x": torch.randn(count, WIDTH, generator=generator), "labels": torch.arange(count) % 5}
    return batch | {"flag": torch.zeros(count), "partner": torch.arange(count).flip(0)}


def case(**changes: Any) -> dict[str, torch.Tensor]:
    """Return a batch as none of the samples at hand: sample 0 has another value."""
    batch = batch_of(seed=1)
    for name, value in changes.items():
        batch[name][slice(None) if value is ALL_TWO else 0] = 2 if value is ALL_TWO else value
    return batch


def known(loss: Loss, micro_batch: int = 2) -> CapturedModel:
    batch = batch_of(2 * COUNT)
    batch["partner"] %= micro_batch
    samples = [{name: field[at] for name, field in batch.items()} for at in range(2 * COUNT)]
    data = Experiment.of(model=lambda: Chooses(loss), data=samples, steps=1, global_batch=COUNT, seq_len=1)
    return CapturedModel(data, micro_batch)


def hardest(losses: torch.Tensor) -> torch.Tensor:
    return losses.topk(len(losses) // 2).values.mean()


def by_branch(is_chosen: Callable[..., Any]) -> Loss:
    def loss(at: Any) -> torch.Tensor:
        if is_chosen(at):
            return 2 * at.losses.mean()
        return at.losses.mean()

    return loss


def by_where(is_chosen: Callable[..., Any]) -> Loss:
    return lambda at: torch.where(is_chosen(at), 1.0, 0.1) * at.losses.mean()


ALL_TWO: Any = object()
"""Stands for labels that are all 2."""
FAR = 50 * torch.ones(WIDTH)
"""A sample with a large loss."""
CHOSEN: dict[str, tuple[Loss, dict[str, Any]]] = {
    "the largest": (by_where(lambda at: at.losses.max() > 9), {"x": FAR}),
    "the smallest": (by_where(lambda at: (-at.losses).amin() < -9), {"x": FAR}),
    "whether any": (by_where(lambda at: (at.losses > 9).any()), {"x": FAR}),
    "whether all": (by_where(lambda at: ~(at.losses < 9).all()), {"x": FAR}),
    "which is largest": (by_where(lambda at: (at.x[:, 0] < 9).float().argmax() == 0), {"x": FAR}),
    "the median": (by_where(lambda at: at.x.median() > 0.3), {"x": FAR}),
    "the first of a sort": (by_where(lambda at: at.losses.sort(descending=True).values[0] > 9), {"x": FAR}),
    "the first of topk": (by_where(lambda at: at.losses.topk(1).values > 9), {"x": FAR}),
    "a count of classes": (
        by_where(lambda at: torch.bincount(at.labels, minlength=5)[4] > 1),
        {"labels": 4},
    ),
    "a flag": (by_where(lambda at: at.flag.any()), {"flag": 1.0}),
    "the first flag": (by_where(lambda at: at.flag[0] > 0), {"flag": 1.0}),
    "the largest as a number": (by_branch(lambda at: at.losses.max().item() > 9), {"x": FAR}),
    "the largest, by if": (by_branch(lambda at: at.losses.max() > 9), {"x": FAR}),
    "a flag, by if": (by_branch(lambda at: at.flag.any()), {"flag": 1.0}),
    "a count of flags, by if": (by_branch(lambda at: (at.flag != 0).sum() > 0), {"flag": 1.0}),
    "the first flag, by if": (by_branch(lambda at: at.flag[0] > 0), {"flag": 1.0}),
    "torch.equal, by if": (by_branch(lambda at: not torch.equal(at.flag, 0 * at.flag)), {"flag": 1.0}),
    "the first flag, added": (lambda at: (at.losses + at.flag[0]).mean(), {"flag": 1.0}),
    "the first flag beside a mean": (lambda at: at.losses.mean() + at.flag[0], {"flag": 1.0}),
    "the first flag in a weight": (lambda at: at.losses.mean() * at.model.table[at.flag[0].long()], {"flag": 1.0}),
    "a number of classes": (by_branch(lambda at: len(at.labels.unique()) > 4), {}),
    "the size of a selection": (by_branch(lambda at: at.x[at.flag > 0].numel() > 0), {"flag": 1.0}),
    "the shape of what is not zero": (by_branch(lambda at: at.flag.nonzero().shape[0] > 0), {"flag": 1.0}),
    "a loop over a selection": (
        lambda at: at.losses.mean() + sum(row.square().mean() for row in at.x[at.flag > 0]),
        {"flag": 1.0},
    ),
    "a remainder": (by_branch(lambda at: at.labels.sum().item() % 37 == 16), {"labels": ALL_TWO}),
    "a remainder of int": (by_branch(lambda at: int(at.labels.sum()) % 37 == 16), {"labels": ALL_TWO}),
    "a set of labels": (by_branch(lambda at: len(set(at.labels.tolist())) > 2), {}),
    "a sum of NumPy's": (by_branch(lambda at: at.labels.cpu().numpy().sum() == 16), {"labels": ALL_TWO}),
}


@pytest.mark.parametrize("how", CHOSEN)
def test_a_choice_for_all_samples_keeps_the_batch_whole_and_its_value(how: str) -> None:
    loss, changes = CHOSEN[how]
    assert known(loss).division.coupled
    torch.manual_seed(0)
    model, batch = Chooses(loss), case(**changes)
    expected = loss_of(model, batch)
    torch.testing.assert_close(interpret(captured(model, batch), model, batch), expected)
    parts = [{name: field[at : at + 2] for name, field in batch.items()} for at in range(0, COUNT, 2)]
    assert abs(sum(loss_of(model, part) for part in parts) / len(parts) - expected) > 1e-3 * abs(expected)


def mixed(order: Callable[..., torch.Tensor]) -> Loss:
    return lambda at: functional.cross_entropy(at.model.head(at.x + order(at.x)), at.labels)


def written(count: int) -> torch.Tensor:
    """Return positions that are written backwards through a view."""
    order = torch.arange(count)
    order[:] = order.flip(0)
    return order


def bags(at: Any, starts: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the mean over bags of three rows of a table."""
    found = at.labels[:, None].repeat(1, 3).flatten()
    begins = starts(torch.arange(0, len(found), 3))
    return functional.embedding_bag(found, at.model.head.weight, begins, mode="sum").tanh().mean() + at.losses.mean()


def shifted(starts: torch.Tensor) -> torch.Tensor:
    starts[1:] -= 1
    return starts


def messages(at: Any, where: torch.Tensor) -> torch.Tensor:
    """Return the loss, and a mean over places of a flat tensor that others are added to."""
    flat = at.x.flatten()
    return at.losses.mean() + torch.zeros_like(flat).index_add(0, where, flat[where].tanh()).relu().mean()


ORDERS: dict[str, Loss] = {
    "a permutation": mixed(lambda x: x[torch.randperm(len(x))]),
    "of labels": lambda at: functional.cross_entropy(at.logits, at.labels[torch.randperm(len(at.x))]),
    "index_select": mixed(lambda x: x.index_select(0, torch.randperm(len(x)))),
    "gather": mixed(lambda x: x.gather(0, torch.randperm(len(x))[:, None].expand(-1, WIDTH))),
    "take_along_dim": mixed(lambda x: torch.take_along_dim(x, torch.randperm(len(x))[:, None], 0)),
    "an embedding": mixed(lambda x: functional.embedding(torch.randperm(len(x)), x)),
    "a roll": mixed(lambda x: x.roll(1, 0)),
    "a flip": mixed(lambda x: x.flip(0)),
    "backwards": mixed(lambda x: x[torch.arange(len(x) - 1, -1, -1)]),
    "shifted": mixed(lambda x: x[(torch.arange(len(x)) + 1) % len(x)]),
    "drawn samples": mixed(lambda x: x[torch.randint(0, len(x), (len(x),))]),
    "an order of draws": mixed(lambda x: x[torch.rand(len(x)).argsort()]),
    "an order that is written": mixed(lambda x: x[written(len(x))]),
    "bags that begin in the sample before": lambda at: bags(at, shifted),
    "places that labels name": lambda at: messages(at, at.labels),
    "a field": lambda at: functional.cross_entropy(at.model.head(at.x + at.x[at.partner]), at.labels),
    "columns by the labels of all": lambda at: at.logits[:, at.labels].logsumexp(-1).mean(),
}


@pytest.mark.parametrize("how", ORDERS)
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_another_order_of_the_samples_mixes_them_at_any_size(
    how: str, micro_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(division, "MOST_FLOPS", 1)  # no numbers are compared
    found = known(ORDERS[how], micro_batch).division
    assert found.coupled or (
        "positions" not in how and micro_batch == 1 and how in ("backwards", "shifted") and found.note
    )


WITHIN: dict[str, Loss] = {
    "one place of each": lambda at: -at.logits.log_softmax(-1)[torch.arange(len(at.x)), at.labels].mean(),
    "a table": lambda at: (at.losses * at.model.table[at.labels]).mean(),
    "other dims": lambda at: at.losses.mean() + (at.x[:, torch.randperm(WIDTH)] * at.x.flip(1)).mean(),
    "a place in a flat tensor": lambda at: (
        at.losses.mean() + at.x.flatten()[torch.arange(len(at.x)) * WIDTH + 2].mean()
    ),
    "bags of its own": lambda at: bags(at, lambda starts: starts),
    "a bag for each in a table": lambda at: (
        functional.embedding_bag(at.labels[:, None].repeat(1, 3), at.model.head.weight, padding_idx=1).tanh().mean()
        + at.losses.mean()
    ),
    "messages between places of its own": lambda at: messages(at, torch.arange(len(at.x)) * WIDTH + at.labels),
    "a permutation in each": lambda at: (
        at.losses.mean() + at.x.gather(1, torch.rand(at.x.shape).argsort(1)[:, :3]).square().mean()
    ),
    "each sample's largest": lambda at: torch.where(at.x.max(1).values > 0, at.losses, 0.5 * at.losses).mean(),
    "a shift that a softmax undoes": lambda at: (
        at.losses.mean() + (at.logits - at.logits.max()).softmax(1).square().mean()
    ),
    "a table in the type of others": lambda at: (
        (at.x + at.model.head.weight.detach()[:1].type_as(at.x)).square().mean() + at.losses.mean()
    ),
    "a check": lambda at: torch.where(torch.isfinite(at.losses).all(), at.losses.mean(), torch.zeros(())),
}


@pytest.mark.parametrize("how", WITHIN)
def test_what_stays_within_each_sample_is_divided(how: str) -> None:
    assert known(WITHIN[how]).division == division.Division()


def late(self: Any, losses: torch.Tensor, is_late: Callable[[Any], Any]) -> torch.Tensor:
    """Return the mean of the hardest half once it is late."""
    self.steps.add_(1)
    return hardest(losses) if is_late(self) else losses.mean()


LATE: dict[str, Loss] = {
    "a counter": lambda at: late(at.model, at.losses, lambda s: s.steps > 4),
    "a counter as a number": lambda at: late(at.model, at.losses, lambda s: s.steps.item() > 400),
    "each tenth step": lambda at: late(at.model, at.losses, lambda s: int(s.steps) % 10 == 9),
    "a parameter": lambda at: late(at.model, at.losses, lambda s: s.warmth < 0.5),
    "a parameter as a number": lambda at: late(at.model, at.losses, lambda s: float(s.warmth) < 0.5),
    "a draw": lambda at: late(at.model, at.losses, lambda _: torch.rand(()) < 0.01),
    "a draw of Python's": lambda at: late(
        at.model, at.losses, lambda s: s.warmth.isfinite() and random.random() < 0.01
    ),
    "a mean over the batch that bends": lambda at: late(
        at.model, at.losses.mean().clamp(min=0.3).expand(2), lambda s: s.steps > 4
    ),
    "a sum": lambda at: at.losses.sum() if at.model.steps.add_(1) > 4 else at.losses.mean(),
    "a mixture": lambda at: (
        at.losses[torch.randperm(len(at.x))].square().mean() if at.model.steps.add_(1) > 4 else at.losses.mean()
    ),
    "a branch that fails on few samples": lambda at: (
        at.losses[[0, 5]].mean() if at.model.steps.add_(1) > 4 else at.losses.mean()
    ),
}


@pytest.mark.parametrize("how", LATE)
def test_a_branch_that_comes_later_keeps_the_batch_whole(how: str) -> None:
    random.seed(0)  # of which no early draw takes the branch: a forward that takes it once in a while is refused
    assert known(LATE[how]).division.coupled


def test_hard_examples_after_a_warm_up_have_the_value_of_plain_pytorch() -> None:
    torch.manual_seed(0)
    model, batch = Chooses(LATE["a counter"]), batch_of()
    graph = captured(model, batch)
    for step in (0, 3, 4, 9):
        model.steps.fill_(step)
        expected = loss_of(model, batch)
        model.steps.fill_(step)
        torch.testing.assert_close(interpret(graph, model, batch), expected)


def dropped(at: Any) -> torch.Tensor:
    x = at.x
    for layer in at.model.layers:
        if torch.rand(()) < 0.1:
            continue
        x = x + layer(x).relu()
    return functional.cross_entropy(at.model.head(x), at.labels)


def routed(at: Any) -> torch.Tensor:
    x = at.x
    chosen, found = x[:, :2].argmax(1), torch.zeros_like(x)
    for index, layer in enumerate(at.model.layers):
        mask = chosen == index
        if mask.any():
            found[mask] = layer(x[mask])
    return functional.cross_entropy(at.model.head(x + found), at.labels)


def hit(at: Any) -> torch.Tensor:
    """Loop over the experts that have tokens, as `transformers` does."""
    mask, found = functional.one_hot(at.x[:, :2].argmax(1), 2).T, torch.zeros_like(at.x)
    for [index] in (mask.sum(-1) > 0).nonzero():
        tokens = torch.where(mask[index])[0]
        found.index_add_(0, tokens, at.model.layers[index](at.x[tokens]))
    return functional.cross_entropy(at.model.head(at.x + found), at.labels)


def by_sample(at: Any) -> torch.Tensor:
    total = torch.zeros(())
    for row, label, flag in zip(at.logits, at.labels, at.flag, strict=True):
        total = total + functional.cross_entropy(2 * row if flag > 0 else row, label)
    return total / len(at.logits)


def checked(at: Any) -> torch.Tensor:
    if float(at.model.warmth) > 1e9 or (at.labels < 0).any():
        raise ValueError("labels below zero")
    assert at.losses.max() < 1e9
    return at.losses.mean()


SEPARATE: dict[str, Loss] = {
    "layer drop": dropped,
    "a random depth": lambda at: (
        sum((at.model.layers[0](at.x) for _ in range(int(torch.randint(1, 4, ())))), at.x).square().mean()
        + at.losses.mean()
    ),
    "a smaller step after a warm-up": lambda at: (
        0.5 * at.losses.mean() if at.model.steps.add_(1) > 4 else at.losses.mean()
    ),
    "each loss bent after a warm-up": lambda at: (
        at.losses.clamp(max=3) if at.model.steps.add_(1) > 4 else at.losses
    ).mean(),
    "experts": routed,
    "experts that have tokens": hit,
    "a branch by each sample": by_sample,
    "checks": checked,
}


@pytest.mark.parametrize("how", SEPARATE)
def test_branches_that_keep_the_samples_apart_are_divided(how: str) -> None:
    assert known(SEPARATE[how]).division.coupled == ()
