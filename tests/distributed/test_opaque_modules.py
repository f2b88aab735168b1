"""Models with a part that `torch.export` cannot follow: under every plan they equal plain PyTorch."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.distributed.harness import launch
from tests.distributed.test_every_plan import MICRO_BATCH, Case, part_of, plan_of, trainer_of
from tests.distributed.test_unusual_models import WIDTH, batch_of, captured, difference, spec_of
from tests.unit.capture_models import Net
from workbench.capture import Graph, build_meta, capture
from workbench.capture.export.opaque import is_opaque

TOLERANCE = 1e-5
ALONE = (Case(num_microbatches=4), *(Case(num_microbatches=2, recompute=mode) for mode in ("full", "selective")))
CASES = (
    Case(pipeline=2, num_microbatches=4),
    Case(data=2),
    Case(data=2, zero=3, num_microbatches=2),
    Case(data=2, zero=3, num_microbatches=2, recompute="full"),
)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2.5 * ctx.saved_tensors[0] ** 2 * gradient  # not the derivative: export would take that


class OwnFunction(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(x + 0.1 * Cubed.apply(x))


class Layered(Net):
    """A residual network whose layers are of the class `Layer`."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))


class Branching(Layered):
    class Layer(Layered.Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            return x.tanh() if float(self.linear.weight.detach().sum()) > 0 else x.sin()


class Reentrant(Layered):
    class Layer(Layered.Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda x: self.linear(x).tanh(), x, use_reentrant=True)


class Derivative(Layered):
    """A layer that returns the derivative of a function of its input, as physics-informed networks do."""

    class Layer(Layered.Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x if x.requires_grad else x.detach().requires_grad_()
            with torch.enable_grad():
                [slope] = torch.autograd.grad(self.linear(y).tanh().pow(2).sum(), y, create_graph=True)
            return slope


class Packed(Layered):
    """Has recurrent layers, which store other weights than those of their last call in one piece on a GPU."""

    class Flattened(nn.LSTM):
        """Does so on a CPU too, as cuDNN's kernel for it does: a weight's data become a view of the piece."""

        def flatten_parameters(self) -> None:
            with torch.no_grad():
                for weight in self._flat_weights:
                    weight.set_(weight.clone())

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = Packed.Flattened(4, WIDTH, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            lengths = (x[:, 0].detach() > 0).long().cpu() + 2
            packed = pack_padded_sequence(x.unflatten(1, (-1, 4)), lengths, batch_first=True, enforce_sorted=False)
            out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=4)
            return out.mean(1)


class Hooked(Layered):
    class Layer(Layered.Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            if y.requires_grad:
                y.register_hook(lambda gradient: 0.5 * gradient)
            return y.tanh()


class Loss(nn.Module):
    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = [row for row in range(len(labels)) if int(labels[row]) >= 0]
        return torch.stack([functional.cross_entropy(logits[row], labels[row]) for row in rows]).mean()


class OwnLoss(Net):
    def __init__(self) -> None:
        super().__init__()
        self.loss = Loss()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> object:
        return self.loss(self.logits(x), labels)


class Assigned(nn.Module):
    """The matching of a detector's loss: it needs sizes above 0."""

    def forward(self, sizes: torch.Tensor) -> torch.Tensor:
        if not (sizes.detach() > 0).all():
            raise ValueError("sizes are below 0")
        return torch.tensor([int(row.argmax()) for row in sizes], device=sizes.device)


class Matched(Net):
    """Makes the module of its loss in forward, as DETR does."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> object:
        logits = self.logits(x)
        chosen = Assigned()(logits.exp())
        return functional.cross_entropy(logits, labels) + logits.gather(1, chosen[:, None]).square().mean()


class Mapped(Layered):
    class Layer(Layered.Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.vmap(lambda row: row / (1 + row.norm()))(self.linear(x))


class Spectral(Layered):
    """Hands a spectrum, which is complex, to a module that export cannot follow."""

    class Layer(Layered.Layer):
        class Inverse(nn.Module):
            def forward(self, spectrum: torch.Tensor, length: int) -> torch.Tensor:
                return torch.istft(spectrum, 4, 2, window=torch.ones(4, device=spectrum.device), length=length)

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.inverse = self.Inverse()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            window = torch.ones(4, device=x.device)
            spectrum = torch.stft(self.linear(x), 4, 2, window=window, return_complex=True)
            return x + self.inverse(spectrum / (1 + spectrum.abs()), x.shape[1])


MODELS: dict[str, type[nn.Module]] = {
    model.__name__: model
    for model in (OwnFunction, Branching, Reentrant, Derivative, Packed, Hooked, OwnLoss, Matched, Mapped, Spectral)
}


@functools.cache
def capture_all(device: str | torch.device = "cpu") -> dict[str, tuple[nn.Module, Graph]]:
    found = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make().to(device).train()
        found[name] = model, captured(name, model)
    return found


def compared(_rank: int, cases: tuple[Case, ...], device: str | torch.device = "cpu") -> dict[tuple[str, Case], float]:
    """Return the largest relative difference from plain PyTorch for every model and case."""
    found: dict[tuple[str, Case], float] = {}
    for name, (model, graph) in capture_all(device).items():
        assert any(is_opaque(block.code) for block in graph.blocks), name
        for case in cases:
            plan = plan_of(graph, case)
            batch = {key: value.to(device) for key, value in batch_of(name, plan.global_batch).items()}
            found[name, case] = difference(copy.deepcopy(model), graph, plan, batch)
    return found


def test_models_with_opaque_parts_equal_plain_pytorch() -> None:
    found = launch(compared, 1, ALONE, ahead=capture_all) | launch(compared, 2, CASES, ahead=capture_all)
    wrong = {key: error for key, error in found.items() if not error <= TOLERANCE}
    assert not wrong, wrong


@pytest.mark.parametrize("name", MODELS)
def test_capture_without_weights_finds_the_same_opaque_blocks(name: str) -> None:
    real, meta = captured(name, MODELS[name]().train()), captured(name, build_meta(MODELS[name]))
    assert [block.block_type for block in real.blocks] == [block.block_type for block in meta.blocks]


class Spoken(nn.Module):
    """A model of speech whose loss allocates as much as the values of the lengths say."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.letters = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6)

    def forward(self, x: torch.Tensor, text: torch.Tensor, spoken: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
        scores = self.letters(self.hidden(x).relu()).log_softmax(-1)
        return functional.ctc_loss(scores.transpose(0, 1), text, spoken, said)


@functools.cache
def capture_spoken() -> tuple[nn.Module, dict[str, torch.Tensor], Graph]:
    torch.manual_seed(0)
    model = Spoken().train()
    batch = {"x": torch.randn(16, 12, WIDTH), "text": torch.randint(1, 6, (16, 3))}
    batch |= {"spoken": torch.tensor(8 * [12, 11]), "said": torch.tensor(8 * [3, 2])}
    specs = {key: spec_of(key, value[:MICRO_BATCH]) for key, value in batch.items()}
    return model, batch, capture(model, specs, name="Spoken")


def _spoken(_rank: int, cases: tuple[Case, ...]) -> dict[Case, float]:
    (model, batch, graph), found = capture_spoken(), {}
    for case in cases:
        plan = plan_of(graph, case)
        part = {key: value[: plan.global_batch] for key, value in batch.items()}
        found[case] = difference(copy.deepcopy(model), graph, plan, part)
    return found


def test_a_ctc_loss_equals_that_of_plain_pytorch() -> None:
    replicas = Case(data=2), Case(data=2, zero=3, num_microbatches=2)
    found = launch(_spoken, 1, ALONE, ahead=capture_spoken) | launch(_spoken, 2, replicas, ahead=capture_spoken)
    assert max(found.values()) <= TOLERANCE, found


class Drawing(Layered):
    """Opaque layers that draw random numbers, from Python's generator too, and count their calls in a buffer."""

    class Layer(Layered.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            x = functional.dropout(self.linear(x), 0.3) * (0.5 + random.random())
            return x if float(x.detach().abs().max()) > 0 else x.tanh()


@functools.cache
def capture_drawing() -> tuple[nn.Module, Graph]:
    torch.manual_seed(0)
    model = Drawing().train()
    return model, captured("Drawing", model)


def _drawn(
    _rank: int, cases: tuple[Case, ...]
) -> dict[Case, tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    (model, graph), found = capture_drawing(), {}
    for case in cases:
        torch.manual_seed(len(found))  # what was drawn before must not matter
        plan = plan_of(graph, case)
        batch = batch_of("Drawing", 4 * MICRO_BATCH)
        trainer = trainer_of(copy.deepcopy(model), graph, plan)
        loss = trainer.gradients(0, part_of(trainer, batch))
        torch.distributed.all_reduce(loss)
        gradients = {key: trainer.full_gradient(key) for key in trainer.stages.model_parameters()}
        buffers = {key: value.clone() for key, value in trainer.stages.model_buffers().items()}
        found[case] = loss.item(), {k: g.clone() for k, g in gradients.items() if g is not None}, buffers
    return found


def test_opaque_layers_draw_the_same_numbers_under_every_plan_and_write_buffers_once() -> None:
    alone, two = (Case(num_microbatches=4),), (Case(data=2, num_microbatches=2), Case(pipeline=2, num_microbatches=4))
    [(loss, gradients, buffers)] = launch(_drawn, 1, alone, ahead=capture_drawing).values()
    others = launch(_drawn, 2, two, ahead=capture_drawing).items()
    assert {float(value) for key, value in buffers.items() if key.endswith("calls")} == {4.0}
    for case, (other_loss, other, counted) in others:
        assert abs(loss - other_loss) <= 1e-6 * abs(loss), case
        for key, gradient in other.items():
            assert torch.allclose(gradient, gradients[key], rtol=1e-5, atol=1e-7), (case, key)
        calls = {float(value) for key, value in counted.items() if key.endswith("calls")}
        assert calls == {4.0 / case.data}, case
