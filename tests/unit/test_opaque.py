"""Opaque calls: which models have them, what their operation does with memory, and that wrong ones are caught."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.capture_models import MODELS, Net, batch_for, captured, copies, interpret, loss_of
from workbench.capture import opaque
from workbench.capture.captured_model import CapturedModel
from workbench.capture.opaque import is_opaque
from workbench.errors import CaptureError
from workbench.experiment import Experiment


class Middle(Net):
    """A network whose second layer export cannot follow."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers[1] = layer


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x.tanh() if float(x.detach().sum()) > 0 else x.sin()


@pytest.mark.parametrize("name", MODELS)
def test_no_model_that_export_follows_has_an_opaque_call(name: str) -> None:
    graph = captured(MODELS[name]().train(), batch_for(name), name)
    assert not any(is_opaque(block.code) for block in graph.blocks)


def test_only_the_layer_that_export_cannot_follow_is_opaque() -> None:
    graph = captured(Middle(Branches()), batch_for("Net"))
    assert [block.name for block in graph.blocks if is_opaque(block.code)] == ["layers.1"]
    [note] = graph.notes
    assert note.startswith("layers.1 runs as written")


@pytest.mark.parametrize("how", ["returns its input", "returns a view of it", "returns a parameter"])
def test_a_result_that_shares_memory_with_an_argument_is_copied(how: str) -> None:
    class Passes(Branches):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            shared = {"returns its input": x, "returns a view of it": x.view(-1, 16)}
            return shared.get(how, self.linear.weight[:4])

    def make() -> nn.Module:
        return Middle(Passes())

    model, same = copies(make)
    batch = batch_for("Net")
    expected, found = loss_of(model, batch), interpret(captured(same, batch), same, batch)
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    for mine, theirs in zip(same.parameters(), model.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad)


class Selects(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[x[:, 0] > 0]


class Overwrites(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2))


@pytest.mark.parametrize(("layer", "reason"), [(Selects, "shapes"), (Overwrites, "writes to a tensor")])
def test_the_module_around_a_call_that_cannot_be_opaque_is(layer: type[Branches], reason: str) -> None:
    """Alone, such a layer is refused: its results have no fixed shape, or another reader of its input would differ."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x * 1.0).mean(0)

    graph = captured(Middle(Around()), batch_for("Net"))
    [note] = graph.notes
    assert note.startswith("layers.1 runs as written")

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + labels[0]

    alone = Alone()
    alone.inner.linear = nn.Linear(8, 8)
    with pytest.raises(CaptureError, match=f"(?s)It cannot run as it is either: .*{reason}"):
        captured(alone, batch_for("Net"))


def test_a_wrong_gradient_of_an_opaque_call_is_refused_before_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [{"x": torch.randn(8), "labels": torch.tensor(index % 5)} for index in range(16)]
    experiment = Experiment.of(
        model=functools.partial(Middle, Branches()), data=samples, steps=1, global_batch=8, seq_len=1
    )
    assert not CapturedModel(experiment, 2).division.coupled
    right = opaque._Run.backward

    def doubled(ctx: Any, *gradients: torch.Tensor) -> Any:
        return tuple(None if found is None else 2 * found for found in right(ctx, *gradients))

    monkeypatch.setattr(opaque._Run, "backward", staticmethod(doubled))
    with pytest.raises(CaptureError, match="does not compute the model's"):
        _ = CapturedModel(experiment, 2).division
