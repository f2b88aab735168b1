"""What forward draws is drawn in each step, as a plain loop draws it, or refused with its line."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn import functional

from tests.unit.capture_models import Net, captured, copies, interpret, loss_of
from workbench.base.errors import CaptureError
from workbench.capture.coupling.division import Division, division_of
from workbench.capture.export.opaque import opaque_calls
from workbench.capture.export.varying import fresh_draws_refused

BATCH = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), "labels": torch.arange(4)}
STEPS = 200
RNG, OWN = np.random.default_rng(0), torch.Generator()


class Draws(Net):
    """Residual layers, each of which draws a number."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.residual(x, layer(x))
        return x

    def residual(self, x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def drawing(residual: Callable[..., torch.Tensor]) -> type[Draws]:
    return type("Drawing", (Draws,), {"residual": residual})


DRAWN: dict[str, Callable[..., torch.Tensor]] = {
    "a factor": lambda _, x, added: x + added * torch.rand(()),
    "a factor of no dims": lambda _, x, added: x + added * torch.rand([]),
    "a Python number": lambda _, x, added: x + added * torch.rand(1).item(),
    "a list": lambda _, x, added: x + added * torch.rand(2).tolist()[0],
    "an array": lambda _, x, added: x + added * float(torch.rand(1).numpy()[0]),
    "bernoulli": lambda _, x, added: x + added * torch.bernoulli(torch.tensor(0.7)) / 0.7,
    "a whole number": lambda _, x, added: x + added * torch.randint(0, 3, ()),
    "a choice of layers": lambda self, x, _: x + self.layers[int(torch.randint(0, 3, ()))](x),
    "torch.where": lambda _, x, added: torch.where(torch.rand(()) < 0.5, x, x + added),
    "a branch": lambda _, x, added: x if torch.rand(()) < 0.5 else x + added,
    "a branch by bernoulli": lambda _, x, added: x + added if torch.bernoulli(torch.tensor(0.5)) else x,
    "a branch by a normal number": lambda _, x, added: x + added if torch.randn(1) > 0 else x,
    "in place": lambda _, x, added: x + added * torch.empty(()).exponential_(),
    "a permutation": lambda _, x, added: x + added[:, torch.randperm(added.shape[1])],
    "random slopes": lambda _, x, added: x + functional.rrelu(added, training=True),
    "random slopes in place": lambda _, x, added: x + nn.RReLU(inplace=True)(added.clone()),
    "alpha dropout": lambda _, x, added: x + functional.alpha_dropout(added, 0.3, training=True),
    "dropout by channel": lambda _, x, added: x + nn.Dropout1d(0.3)(added[:, None])[:, 0],
    "gumbel": lambda _, x, added: x + functional.gumbel_softmax(added),
}


@pytest.mark.parametrize("how", DRAWN)
def test_a_drawn_number_is_drawn_anew_in_each_step_and_is_that_of_plain_pytorch(how: str) -> None:
    model, same = copies(drawing(DRAWN[how]))
    graph, losses = captured(same, BATCH), set()
    for step in range(12):
        torch.manual_seed(step)
        expected = loss_of(model, BATCH)
        torch.manual_seed(step)
        loss = interpret(graph, same, BATCH)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        losses.add(round(float(expected.detach()), 6))
        if step < 3:
            gradients = (
                torch.autograd.grad(each, [*of.head.parameters()]) for each, of in ((loss, same), (expected, model))
            )
            torch.testing.assert_close(*gradients)
    assert len(losses) > 1


class OwnNoise(torch.autograd.Function):
    """Slopes that are drawn where the comparison cannot reach them, in code that runs as written."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return functional.rrelu(x, training=True)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


@pytest.mark.parametrize(
    "slopes",
    [
        lambda _, x, added: x + functional.rrelu(added, training=True),
        lambda _, x, added: x + nn.RReLU(inplace=True)(added.clone()),
        lambda _, x, added: x + functional.rrelu(added),
        lambda _, x, added: x + OwnNoise.apply(added),
    ],
)
def test_random_slopes_couple_no_samples(slopes: Callable[..., torch.Tensor]) -> None:
    build, one = drawing(slopes), {name: field[:2] for name, field in BATCH.items()}

    def samples(count: int, trial: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(trial)
        return {"x": torch.randn(count, 8, generator=generator), "labels": torch.arange(count) % 5}

    assert division_of(captured(build(), one), build, samples) == Division()


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_rate_that_decides_alone_needs_no_code_that_runs_as_written(rate: float) -> None:
    model, same = copies(drawing(lambda _, x, added: x if torch.rand([]) < rate else x + added))
    graph = captured(same, BATCH)
    assert not [call for block in graph.blocks for call in opaque_calls(block.code.graph)]
    torch.testing.assert_close(interpret(graph, same, BATCH), loss_of(model, BATCH))


AUDIO = {
    "input_values": torch.randn(2, 400, generator=torch.Generator().manual_seed(0)),
    "labels": torch.ones(2, 4).long(),
}
SPEECH = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 12,
}
SPEECH |= {"conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
SPEECH |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "ctc_loss_reduction": "mean"}
STILL = dict.fromkeys(["hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"], 0.0)
STILL |= {"final_dropout": 0.0, "mask_time_prob": 0.0}
"""Options that leave layer drop as the only draw."""


def speech(kind: str, **options: object) -> Callable[[], nn.Module]:
    more = {"Data2VecAudio": {"num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3}, "SEW": {"squeeze_factor": 2}}
    config = getattr(tf, f"{kind}Config")(**(SPEECH | more.get(kind, {}) | options))
    return lambda: getattr(tf, f"{kind}ForCTC")(config)


def test_wav2vec2_drops_its_default_share_of_layers_and_those_of_plain_pytorch() -> None:
    model, same = copies(speech("Wav2Vec2", **STILL))
    graph, calls = captured(same, AUDIO), 0

    def called(*_: object) -> None:
        nonlocal calls
        calls += 1

    for layer in same.wav2vec2.encoder.layers:
        layer.register_forward_hook(called)
    with torch.no_grad():
        for step in range(STEPS):
            torch.manual_seed(step)
            found = interpret(graph, same, AUDIO)
            if step < 20:
                torch.manual_seed(step)
                torch.testing.assert_close(found, loss_of(model, AUDIO), rtol=1e-4, atol=0)
    rate, drawn = model.config.layerdrop, STEPS * len(model.wav2vec2.encoder.layers)
    assert abs((1 - calls / drawn) - rate) < 4 * math.sqrt(rate * (1 - rate) / drawn)


@pytest.mark.parametrize("kind", ["Hubert", "WavLM", "SEW", "UniSpeech", "UniSpeechSat", "Data2VecAudio"])
def test_speech_models_of_default_rates_run_what_they_draw_as_written(kind: str) -> None:
    """Their masks are NumPy's, which are drawn in the module around the layers."""
    graph = captured(speech(kind)(), AUDIO)
    assert any("wav" in label or kind.lower() in label.replace("_", "") for label in labels_of(graph))


def labels_of(graph: object) -> list[str]:
    return [call.label for block in graph.blocks for call in opaque_calls(block.code.graph)]  # type: ignore[attr-defined]


REFUSED: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "Python's": (lambda _, x, added: x + added * random.random(), "Python's random numbers"),
    "Python's, in a branch": (lambda _, x, added: x + added if random.random() < 0.5 else x, "Python's"),
    "NumPy's": (lambda _, x, added: x + added * float(np.random.rand()), "NumPy's random numbers"),
    "a generator of the user's": (lambda _, x, added: x + added * RNG.random(), "RNG"),
    "one that the model holds": (lambda self, x, added: x + added * self.rng.random(), "self.rng"),
    "one without a seed": (lambda _, x, added: x + added * np.random.default_rng().random(), "without a seed"),
    "the system's": (lambda _, x, added: x + added * random.SystemRandom().random(), "the system's"),
    "a new Random": (lambda _, x, added: x + added * random.Random().random(), "without a seed"),
    "torch.seed": (lambda _, x, added: x + added * (torch.seed() % 7), "without a seed"),
    "a torch.Generator": (lambda _, x, added: x + added * torch.rand((), generator=OWN), "torch.Generator of its own"),
    "in code that runs as written": (
        lambda self, x, added: x + added * self.rng.random() if x.sum() < 1e9 else x,
        "draws from self.rng, and its second run",
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_no_step_could_draw_anew_is_refused_with_its_line(how: str) -> None:
    residual, words = REFUSED[how]
    model = drawing(residual)()
    model.rng = random.Random(0)  # type: ignore[assignment]
    with pytest.raises(CaptureError) as refused:
        captured(model, BATCH)
    assert words in str(refused.value)
    assert f"{__file__}:" in str(refused.value)


def test_only_the_thread_that_captures_is_refused_fresh_random_numbers() -> None:
    with fresh_draws_refused("net"):
        with ThreadPoolExecutor(1) as another:
            assert len(another.submit(lambda: os.urandom(16)).result()) == 16
        with pytest.raises(CaptureError, match=r"draws from the system's random numbers"):
            os.urandom(16)


def test_a_seeded_generator_that_forward_makes_gives_the_same_numbers_in_each_step() -> None:
    model, same = copies(drawing(lambda _, x, added: x + added * np.random.default_rng(3).random()))
    torch.testing.assert_close(interpret(captured(same, BATCH), same, BATCH), loss_of(model, BATCH))


class Masked(Net):
    """Attention under a mask that is made in place."""

    def __init__(self, mask: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self.mask = mask

    def body(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.unflatten(1, (4, -1))[:, None]
        return functional.scaled_dot_product_attention(parts, parts, parts, self.mask(4)).flatten(1)


def hides_first(size: int) -> torch.Tensor:
    mask = torch.ones(size, size, dtype=torch.bool)
    mask[:, 0] = False
    return mask


def hides_by_row(size: int) -> torch.Tensor:
    mask = torch.zeros(size, size)
    for row in range(1, size):
        mask[row, :row].fill_(-1e30)
    return mask


@pytest.mark.parametrize("mask", [hides_first, hides_by_row])
def test_a_mask_that_is_written_through_views_masks(mask: Callable[[int], torch.Tensor]) -> None:
    model, same = copies(lambda: Masked(mask))
    torch.testing.assert_close(interpret(captured(same, BATCH), same, BATCH), loss_of(model, BATCH))


def test_a_mask_that_is_drawn_is_drawn_in_each_step() -> None:
    model, same = copies(lambda: Masked(lambda size: torch.zeros(size, size).exponential_() < 2))
    graph = captured(same, BATCH)
    for step in range(5):
        torch.manual_seed(step)
        expected = loss_of(model, BATCH)
        torch.manual_seed(step)
        torch.testing.assert_close(interpret(graph, same, BATCH), expected)
