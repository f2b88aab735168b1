"""Selections by a mask: captured with the number of items that examples tell, and never with a wrong result."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.unit.capture_models import Batch, copies, interpret, loss_of
from workbench.base.errors import CaptureError
from workbench.capture import Graph, capture, spec_of
from workbench.capture.captured_model import CapturedModel
from workbench.capture.export import opaque_search
from workbench.capture.export.opaque import opaque_calls
from workbench.experiment import Experiment

PATCHES, WIDTH, SEEN = 8, 16, 4


class Masked(nn.Module):
    """A masked autoencoder: an encoder of the visible patches, and a decoder that predicts the hidden ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.decoder = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        seen = x[~hidden].reshape(len(x), -1, WIDTH)
        for layer in self.layers:
            seen = seen + layer(seen)
        guess = self.decoder(seen).mean(1, keepdim=True)
        return (guess - x[hidden].reshape(len(x), -1, WIDTH)).square().mean()


def batch_of(*hidden: int, seed: int = 0) -> Batch:
    """Return a batch whose samples hide so many of their patches."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(len(hidden), PATCHES, generator=generator).argsort(1)
    mask = order < torch.tensor(hidden)[:, None]
    return {"x": torch.randn(len(hidden), PATCHES, WIDTH, generator=generator), "hidden": mask}


def captured(model: nn.Module, examples: Batch, size: int = 2) -> Graph:
    specs = {name: spec_of(name, field[:size]) for name, field in examples.items()}
    return capture(model, specs, name="Masked", examples=examples)


def labels(graph: Graph) -> list[str]:
    return [call.label for block in graph.blocks for call in opaque_calls(block.code.graph)]


def experiment_of(build: Callable[[], nn.Module], *hidden: int) -> Experiment:
    batch = batch_of(*hidden)
    samples = [{name: field[index] for name, field in batch.items()} for index in range(len(hidden))]
    return Experiment.of(model=build, data=samples, steps=1, global_batch=8, seq_len=1)


def assert_equal_to_plain_pytorch(examples: Batch, batch: Batch) -> None:
    model, same = copies(Masked)
    expected, found = loss_of(model, batch), interpret(captured(same, examples), same, batch)
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    for mine, theirs in zip(same.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_model_that_hides_as_many_patches_of_each_sample_is_captured_layer_by_layer() -> None:
    graph = captured(Masked(), batch_of(*[SEEN] * 4))
    assert {"layers.0", "layers.1"} < {block.name for block in graph.blocks}
    assert set(labels(graph)) == {opaque_search.SELECTION}
    assert all("it took 4 of each sample" in note for note in graph.notes)
    assert_equal_to_plain_pytorch(batch_of(*[SEEN] * 4), batch_of(SEEN, SEEN, seed=1))


def test_its_batch_is_divided_since_numbers_say_so() -> None:
    model = CapturedModel(experiment_of(Masked, *[SEEN] * 16), 2)
    assert model.graph.unknown_coupling
    assert not model.division.coupled


def test_samples_that_hide_different_numbers_give_the_right_number_or_end_the_run() -> None:
    """With as many in a micro-batch together, patches lie where plain PyTorch puts them; otherwise none fit."""
    examples = batch_of(*[SEEN] * 4)
    assert_equal_to_plain_pytorch(examples, batch_of(SEEN - 1, SEEN + 1))
    model = Masked()
    with pytest.raises(
        CaptureError, match=r"x\[mask\] returned tensors of the shapes \[\(9, 16\)\], and \[\(8, 16\)\]"
    ):
        interpret(captured(model, examples), model, batch_of(SEEN - 1, SEEN))


@pytest.mark.parametrize(
    "hidden", [(4, 4, 3, 5), (0, 0, 0, 0), (8, 8, 8, 8)], ids=["different numbers", "nothing", "everything"]
)
def test_no_number_is_learnt_from_masks_that_differ_or_select_all_or_nothing(hidden: tuple[int, ...]) -> None:
    assert not opaque_search.selections_of(Masked().train(), batch_of(*hidden))


def test_without_a_number_the_model_runs_as_written_or_not_at_all() -> None:
    class Uneven(Masked):
        def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            seen = self.layers(x[~hidden]) if isinstance(self.layers, nn.Sequential) else self.layers[0](x[~hidden])
            return self.decoder(self.layers[1](seen)).square().mean()

    examples = batch_of(4, 4, 3, 5)
    model, same = copies(Uneven)
    graph = captured(same, examples)
    assert opaque_search.SELECTION not in labels(graph)
    batch = batch_of(2, 6, seed=1)
    torch.testing.assert_close(interpret(graph, same, batch), loss_of(model, batch))


def test_learning_the_numbers_leaves_the_model_as_it_was() -> None:
    class Counting(Masked):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.last = x
            return super().forward(x, hidden)

    model = Counting().train()
    state, attributes = torch.get_rng_state(), set(vars(model))
    assert len(opaque_search.selections_of(model, batch_of(*[SEEN] * 4))) == 2
    assert model.calls == 0
    assert set(vars(model)) == attributes
    assert torch.equal(torch.get_rng_state(), state)
    assert "__getitem__" not in vars(torch.Tensor)


def test_no_number_is_learnt_from_a_model_that_cannot_be_copied() -> None:
    model = Masked().train()
    model.lock = threading.Lock()
    assert not opaque_search.selections_of(model, batch_of(*[SEEN] * 4))


def test_a_wrong_selection_is_refused_before_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = experiment_of(functools.partial(Masked), *[SEEN] * 16)
    monkeypatch.setattr(opaque_search, "_taken", lambda values, mask: values[~mask])
    with pytest.raises(CaptureError, match="does not compute the model's"):
        _ = CapturedModel(experiment, 2).division
