"""What capture rewrites computes what the model wrote: its loss and every gradient are those of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.unit.capture_models import Net, batch_for, captured, copies, interpret, loss_of

HEADS, TOKENS = 2, 4


class Layered(Net):
    """A network whose layers compute `run` of two linear layers."""

    def __init__(self, run: Callable[[nn.Linear, nn.Linear, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.run, self.layers = run, nn.ModuleList(nn.ModuleList([nn.Linear(16, 16)] * 2) for _ in range(2))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in self.layers:
            x = x + self.run(first, second, x)
        return x


def written_under_no_grad(first: nn.Linear, second: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = torch.zeros_like(x)
    found.add_(first(x))
    with torch.no_grad():
        found.mul_(0.5).add_(second(x))
    return found.sin()


def written_behind_a_view(view: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """Return a layer that writes to what was viewed in a way that no schema of torch declares."""

    def run(first: nn.Linear, second: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        found = first(x)
        seen = view(found)
        found.add_(1.0)
        return second(seen.sin())

    return run


def written_by_another_name(same: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """Return a layer that writes to what an operation returned as it was given, of which there was a view before."""

    def run(first: nn.Linear, second: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        found = first(x)
        seen = found[:, :8]
        same(found).add_(1.0)
        return second(found.sin()) * seen.repeat(1, 2)

    return run


def in_inference_mode(first: nn.Linear, second: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    @torch.inference_mode()
    def teach(x: torch.Tensor) -> torch.Tensor:
        return first(x)

    with torch.inference_mode():
        more = second(x)
        with torch.inference_mode(mode=False):
            taught = second(x)
    return second(x) * (teach(x).clone() + more.clone()) + taught


def drawn_between(first: nn.Linear, _second: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return first(x) * torch.empty_like(x).random_(3, 4)


def of_one(first: nn.Linear, second: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Keep a copy of what is written, and write to a copy."""
    before, found = first(x), second(x)
    kept, copied = torch.cat([torch.empty(0), before]), torch.cat([found])
    before[:, 0] = 1.0
    copied[:, 1] = 0.0
    return before.sin() + kept.cos() + copied + found


def attended(mask: Callable[[], torch.Tensor]) -> object:
    def run(first: nn.Linear, second: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        query, value = (layer(x).view(-1, TOKENS, HEADS, 2).transpose(1, 2) for layer in (first, second))
        scores = query @ value.transpose(-2, -1) / 2 + mask()
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(1)

    return run


def distance() -> torch.Tensor:
    return -(torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).abs()


LAYERS = {
    "a sum that is written under no_grad": written_under_no_grad,
    "a transposition by einsum": written_behind_a_view(lambda x: torch.einsum("ij->ji", x).t()),
    "an einsum of the usual order": written_behind_a_view(lambda x: torch.einsum("ji", x).t()),
    "a broadcast": written_behind_a_view(lambda x: torch.broadcast_tensors(x, x[0].detach())[0]),
    "a dropout without effect": written_by_another_name(lambda x: functional.alpha_dropout(x, 0.5, False)),
    "the type that it has": written_by_another_name(lambda x: x.type_as(x)),
    "at least two dims": written_by_another_name(torch.atleast_2d),
    "inference mode": in_inference_mode,
    "a draw between two numbers": drawn_between,
    "a cat of one tensor": of_one,
    "a bias of whole numbers": attended(distance),
    "a bias of truths": attended(lambda: distance() > -2),
    "a bias of each key": attended(lambda: torch.arange(4.0)),
    "a row of which all is masked": attended(lambda: torch.full((TOKENS, TOKENS), -1e30).triu()),
}


def assert_as_plain(model: Net, same: Net) -> None:
    """Compare loss and gradients of a model in plain PyTorch with those of the graph of a copy of it."""
    batch = batch_for("Net")
    expected, found = loss_of(model, batch), interpret(captured(same, batch), same, batch)
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    for mine, theirs in zip(same.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("how", LAYERS)
def test_a_rewritten_layer_has_the_loss_and_the_gradients_of_plain_pytorch(how: str) -> None:
    model, same = copies(lambda: Layered(LAYERS[how]))  # type: ignore[arg-type]
    assert_as_plain(model, same)


def test_a_loss_that_is_added_to_in_place_is_captured() -> None:
    class Added(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.logits(x)
            loss = functional.cross_entropy(logits, labels)
            loss += 0.1 * logits.square().mean()
            loss *= 0.5
            return loss, logits

    model, same = copies(Added)
    assert_as_plain(model, same)


def test_a_product_with_a_sparse_matrix_is_captured() -> None:
    class Convolved(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("adjacent", torch.eye(16).roll(1, 0).to_sparse())

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return super().body(torch.sparse.mm(self.adjacent, x.t()).t())

    model, batch = Convolved(), batch_for("Net")
    torch.testing.assert_close(interpret(captured(model, batch), model, batch), loss_of(model, batch))
