"""The loss is found wherever forward returns it, and `loss` chooses among several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.unit.capture_models import Net, batch_for, interpret
from workbench.base.errors import CaptureError, InvalidExperiment
from workbench.capture import Graph, capture, spec_of
from workbench.capture.outputs import LossChoice
from workbench.experiment import Experiment

BATCH = batch_for("Net")


@dataclass
class Output:
    logits: torch.Tensor
    objective: torch.Tensor
    accuracy: torch.Tensor


class Returns(Net):
    """Returns its logits, its loss and other values in the way of `pack`."""

    def __init__(self, pack: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.pack = pack

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.body(self.stem(x)))
        return self.pack(logits, functional.cross_entropy(logits, labels), (logits.argmax(-1) == labels).float().mean())


def graph_of(model: Returns, loss: LossChoice = None, size: int = 4) -> Graph:
    batch = batch_for("Net", size)
    return capture(model, {key: spec_of(key, value) for key, value in batch.items()}, name="Mine", loss=loss)


PACKED: Mapping[str, Callable[..., Any]] = {
    "nanoGPT": lambda logits, loss, _: (logits, loss),
    "a dict": lambda logits, loss, metric: {"logits": logits, "accuracy": metric, "objective": loss},
    "a dataclass": Output,
    "nested": lambda logits, loss, metric: [{"a": logits}, {"b": (metric, [loss])}],
    "twice": lambda logits, loss, _: {"logits": logits, "total": loss, "parts": [loss]},
}


@pytest.mark.parametrize("how", PACKED)
def test_the_only_scalar_that_a_gradient_reaches_is_the_loss(how: str) -> None:
    torch.manual_seed(0)
    model = Returns(PACKED[how])
    found = interpret(graph_of(model), model, BATCH)
    assert torch.equal(found, Net.forward(model, **BATCH))


def test_logits_of_one_element_are_not_taken_for_the_loss() -> None:
    """At a micro-batch of 1, `return logits, loss` has two tensors of one element."""
    torch.manual_seed(0)
    model = Returns(lambda logits, loss, _: (logits.sum(1), loss))
    batch = batch_for("Net", 1)
    assert torch.equal(interpret(graph_of(model, size=1), model, batch), Net.forward(model, **batch))


def two(logits: torch.Tensor, loss: torch.Tensor, _metric: torch.Tensor) -> dict[str, Any]:
    return {"logits": logits, "main": loss, "aux": {"z": logits.square().mean()}}


def test_several_scalars_are_refused_with_the_choices() -> None:
    with pytest.raises(CaptureError, match="2 scalars that could be its loss") as caught:
        graph_of(Returns(two))
    choices = str(caught.value).partition("experiment: ")[2].partition("; or")[0].split(", or ")
    assert choices == ["loss='main'", "loss=lambda outputs, batch: outputs['aux']['z']"]
    for text in choices:
        graph_of(Returns(two), eval(text.removeprefix("loss=")))


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("main", lambda _, loss: loss),
        (lambda outputs, _batch: outputs["main"] + 0.1 * outputs["aux"]["z"], lambda y, loss: loss + 0.1 * y**2),
        (lambda outputs, batch: functional.cross_entropy(outputs["logits"], batch["labels"]), lambda _, loss: loss),
    ],
    ids=["a name", "a sum", "made from the logits"],
)
def test_a_name_or_a_function_chooses_the_loss(choice: Any, expected: Any) -> None:
    torch.manual_seed(0)
    model = Returns(two)
    logits = model.head(model.body(model.stem(BATCH["x"])))
    wanted = expected(logits, functional.cross_entropy(logits, BATCH["labels"])).mean()
    assert interpret(graph_of(model, choice), model, BATCH).item() == pytest.approx(wanted.item(), rel=1e-6)


def test_an_index_chooses_the_loss() -> None:
    torch.manual_seed(0)
    model = Returns(lambda logits, loss, _: (logits.square().mean(), loss))
    plain = Net.forward(model, **BATCH)
    assert torch.equal(interpret(graph_of(model, 1), model, BATCH), plain)
    assert not torch.equal(interpret(graph_of(model), model, BATCH), plain)


@pytest.mark.parametrize("choice", ["q", 3, 0])
def test_a_choice_that_is_not_there_or_is_no_scalar_is_refused(choice: LossChoice) -> None:
    with pytest.raises(CaptureError, match="loss"):
        graph_of(Returns(PACKED["nanoGPT"]), choice)


def test_a_loss_that_the_model_names_and_leaves_empty_is_not_replaced_by_another_scalar() -> None:
    with pytest.raises(CaptureError, match="returned no loss for a batch of x, labels"):
        graph_of(Returns(lambda logits, _loss, _metric: {"loss": None, "aux_loss": logits.square().mean()}))


def _experiment(loss: Any) -> Experiment:
    samples = [{"x": torch.zeros(8), "labels": torch.tensor(0)}] * 8
    return Experiment(model=Net, data=samples, steps=1, global_batch=2, loss=loss)


@pytest.mark.parametrize("loss", [True, 1.5, ["a"]])
def test_an_experiment_refuses_a_loss_that_chooses_nothing(loss: Any) -> None:
    with pytest.raises(InvalidExperiment, match="neither a name, an index nor a function"):
        _experiment(loss)


def choose(outputs: Any, _batch: Any) -> Any:
    return outputs


@pytest.mark.parametrize("loss", [None, "main", 1])
def test_the_choice_survives_json(loss: Any) -> None:
    experiment = _experiment(loss)
    value = experiment.to_json()
    assert Experiment.from_json(value, {"model": Net, "data": experiment.data}).loss == loss


def test_a_function_survives_json_by_its_name_and_comes_from_the_stored_code() -> None:
    experiment = _experiment(choose)
    again = Experiment.from_json(
        experiment.to_json(), {"model": Net, "data": experiment.data, "loss": experiment.loss.function}
    )
    assert again.loss("outputs", None) == "outputs"


class Adversaries(nn.Module):
    """Returns the losses of two networks, in the order that `first` says."""

    def __init__(self, first: str) -> None:
        super().__init__()
        self.maker, self.judge, self.first = nn.Linear(8, 8), nn.Linear(8, 1), first

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.maker(x)
        judged = self.judge(x).mean() - self.judge(made.detach()).mean()
        fooled = self.judge(made).mean() + 0 * labels.sum()
        return (judged, fooled) if self.first == "judge" else (fooled, judged)


@pytest.mark.parametrize("first", ["judge", "maker"])
def test_the_losses_of_two_networks_in_a_tuple_are_named_and_none_is_chosen(first: str) -> None:
    batch = {key: spec_of(key, value) for key, value in BATCH.items()}
    with pytest.raises(CaptureError, match=r"2 scalars that could be its loss.*loss=0, or loss=1"):
        capture(Adversaries(first), batch)


PARTS: Mapping[str, Callable[..., Any]] = {
    "its parts": lambda logits, loss, _: (loss + logits.square().mean(), loss, loss.exp()),
    "a measure of its input": lambda logits, loss, _: (loss, logits.softmax(-1).square().mean()),
}


@pytest.mark.parametrize("how", PARTS)
def test_the_first_scalar_of_a_tuple_is_the_loss_if_the_others_apply_no_parameters(how: str) -> None:
    torch.manual_seed(0)
    model = Returns(PARTS[how])
    assert torch.equal(interpret(graph_of(model), model, BATCH), model(**BATCH)[0])
