"""Capture: what the blocks compute is what the model computes, cut where its layers are cut."""

from __future__ import annotations

import copy
import itertools
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.distributed import zoo
from workbench.capture import Graph, build_meta, capture, spec_of
from workbench.errors import CaptureError
from workbench.models import as_model

Batch = dict[str, torch.Tensor]


class Net(nn.Module):
    """A stem, four residual layers and a head; the models below change one thing about it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(16, 5)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.body(self.stem(x))), labels)


class PreActivation(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(functional.relu_(self.norm2(self.conv1(functional.relu_(self.norm1(x))))))


class OverwritesItsInput(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu_(x)
        return x + self.conv1(x)


class ResStage(nn.Module):
    def __init__(self, width: int, depth: int, layer: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.project = nn.Conv2d(width // 2, width, 1)
        self.layers = nn.ModuleList(layer(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.project(x)
        for layer in self.layers:
            x = layer(x)
        return x


class ResNet(nn.Module):
    """Lists in lists, as Swin and the ResNets of `transformers` have them."""

    def __init__(self, layer: Callable[[int], nn.Module] = PreActivation) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.stages = nn.Sequential(ResStage(8, 2, layer), ResStage(16, 3, layer))
        self.head = nn.Linear(16, 5)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.stages(self.stem(pixels)).mean((2, 3))), labels)


class CalledByName(Net):
    """As SqueezeBERT does: no hook sees the layers themselves."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer.forward(x)
        return x


class NoGradStatistic(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with torch.no_grad():
                scale = layer[0].weight.abs().mean() + x.abs().mean()
            x = x + layer(x) / scale
        return x


class NoGradHalf(Net):
    """Frozen lower layers, with one nested region that is not."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for layer in self.layers[:2]:
                x = x + layer(x)
            with torch.enable_grad():
                y = self.layers[2](x)
        return x + y + self.layers[3](x)


class NoGradBuffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.steps += 1
        return super().body(x - self.average)


class AssignedBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(16))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        before = self.average
        self.average = 0.9 * before + 0.1 * x.detach().mean(0)
        return super().body(x - before)


class NoGradNoise(Net):
    """Noise that depends on no parameter and must still be drawn once."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            noise = functional.dropout(x, 0.5)
        hidden = self.body(self.stem(x + noise))
        return functional.cross_entropy(self.head(hidden), labels) + (hidden[:, :8] * noise).mean()


class AutocastForward(Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x, labels)


class Constants(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(16.0) / 16, persistent=False)
        self.plain = torch.linspace(0, 1, 16)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(x * torch.tensor([1.0, 2.0] * 8) + self.positions + self.plain) + torch.tensor(0.5)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)
        self.layers[1].requires_grad_(False)


class WritesLearned(Frozen):
    """What is trained is written into what is frozen, which is then read by its first name."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(self.layers[0](x.clone()))
        return x + self.layers[2](x)


class OneLayer(nn.Module):
    """One layer used four times, in no list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 5)
        self.layer = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for _ in range(4):
            x = self.layer(x)
        return functional.cross_entropy(self.head(x), labels)


class SharedNorm(Net):
    """The same BatchNorm before the first and after the last layer: its statistics have one home."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().body(self.norm(x)))


class UpdatesAfterTheLoss(Net):
    """Its last layer returns the loss; what follows belongs to no layer, and does not read it."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 5)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(self.linear(x), labels)

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(self.Last())
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers[:-1]:
            x = layer(x)
        loss = self.layers[-1](x, labels)
        self.steps += 1
        return loss


class Weighted(Net):
    """A weighted mean and a negative log-likelihood, under autocast; label 0 is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([3.0, 1.0, 0.5, 2.0, 0.1]))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.body(self.stem(x)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            weighted = functional.cross_entropy(logits, labels, weight=self.weight, ignore_index=0)
        return weighted + functional.nll_loss(functional.log_softmax(logits, -1), labels, ignore_index=0)


class Smoothed(Weighted):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.body(self.stem(x)))
        return functional.cross_entropy(logits, labels, weight=self.weight, ignore_index=0, label_smoothing=0.1)


class LayerDrop(Net):
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.layerdrop = rate

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < self.layerdrop:
                continue
            x = x + layer(x)
        return x


SMALL: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        CalledByName,
        NoGradStatistic,
        NoGradHalf,
        NoGradBuffers,
        AssignedBuffer,
        NoGradNoise,
        AutocastForward,
        Constants,
        Frozen,
        OneLayer,
        SharedNorm,
        UpdatesAfterTheLoss,
        Weighted,
        Smoothed,
        LayerDrop,
    )
}
IMAGES: dict[str, Callable[[], nn.Module]] = {"ResNet": ResNet, "Overwrites": lambda: ResNet(OverwritesItsInput)}
ALWAYS = ("bert", "gpt2", "albert", "t5", "electra-discriminator", *zoo.BY_HAND)
"""The rest of the zoo where WORKBENCH_TEST_ALL is set."""
ROUNDED = ("llama", "qwen3", "mixtral", "electra-discriminator", "Smoothed")
"""A causal mask becomes a flag of the attention kernel, a mean over a selection a quotient: equal but for rounding."""
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: make for name, make in zoo.MODELS.items() if name in ALWAYS or os.environ.get("WORKBENCH_TEST_ALL")},
    "bert with dropout": lambda: zoo.bert_pretraining(0.1),
    **SMALL,
    **IMAGES,
}


def batch_for(name: str, size: int = 4, seed: int = 0) -> Batch:
    if name in zoo.MODELS or name.startswith("bert"):
        return zoo.batch(name.partition(" ")[0], size, seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (size, 3, 8, 8) if name in IMAGES else (size, 8)
    labels = torch.arange(size) % 5
    return {"pixels" if name in IMAGES else "x": torch.randn(shape, generator=generator), "labels": labels}


def captured(model: nn.Module, batch: Batch, name: str = "model") -> Graph:
    return capture(model, {key: spec_of(key, value) for key, value in batch.items()}, name=name)


def interpret(graph: Graph, model: nn.Module, batch: Batch, counts: list[torch.Tensor] | None = None) -> torch.Tensor:
    """The least that runs a graph: block after block over a table of values. Returns the loss."""
    parameters = dict(model.named_parameters())
    buffers = {**dict(model.named_buffers()), **graph.constants}
    counts = counts or [count.code(*(batch[name] for name in count.inputs)).float() for count in graph.label_counts]
    values: Batch = {}
    for block in graph.blocks:
        sent = block.code(
            *(parameters[name] for name in block.parameters),
            *(buffers[name] for name in block.buffers),
            *(values[name] for name in block.receives),
            *(batch[name] for name in block.inputs),
            *(counts[index] for index in block.counts),
        )
        values |= dict(zip(block.sends, sent, strict=True))
    return values[graph.loss]


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    output = model(**batch)
    if isinstance(output, torch.Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output["loss"]


def copies(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = make().train()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("name", MODELS)
def test_the_blocks_in_order_are_bit_equal_to_eager(name: str) -> None:
    eager, mine = copies(MODELS[name])
    batch = batch_for(name)
    graph = captured(mine, batch)
    for step in range(2):
        torch.manual_seed(step)
        expected = loss_of(eager, batch)
        expected.backward()
        torch.manual_seed(step)
        found = interpret(graph, mine, batch)
        found.backward()
        assert found.item() == pytest.approx(expected.item(), rel=1e-6 if name in ROUNDED else 0, abs=0)
    for (key, one), other in zip(eager.named_parameters(), mine.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), key
        if one.grad is None or other.grad is None:
            continue
        if name in ROUNDED:
            assert (one.grad - other.grad).norm() <= 1e-6 * one.grad.norm() + 1e-8, key
        else:
            assert torch.equal(one.grad, other.grad), key
    for (key, one), other in zip(eager.named_buffers(), mine.buffers(), strict=True):
        assert torch.equal(one, other), f"buffer {key} did not advance as in eager"


@pytest.mark.parametrize("name", [*SMALL, *IMAGES])
def test_only_tensors_cross_a_cut_and_each_was_sent_before(name: str) -> None:
    graph = captured(MODELS[name](), batch_for(name))
    for cut in range(1, len(graph.blocks)):
        sent = {value for block in graph.blocks[:cut] for value in block.sends}
        read = {value for block in graph.blocks[cut:] for value in block.receives}
        assert set(graph.crossing(cut)) == sent & read
    assert graph.loss in graph.blocks[-1].sends


def test_identical_layers_share_one_kind_and_one_code() -> None:
    graph = captured(zoo.bert_pretraining(), batch_for("bert"))
    layers = [block for block in graph.blocks if ".layer." in block.name]
    assert [block.name for block in layers] == [f"bert.encoder.layer.{i}" for i in range(4)]
    assert len({block.block_type for block in layers}) == 1
    assert len({id(block.code) for block in layers}) == 1
    assert len(graph.blocks) == 6


def test_layers_that_differ_in_a_constant_do_not_share_code() -> None:
    class Scaled(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            for index, layer in enumerate(self.layers):
                x = x + layer(x) * (1 + index)
            return x

    graph = captured(Scaled(), batch_for("Scaled"))
    assert len({block.block_type for block in graph.blocks if block.name.startswith("layers")}) == 4


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("albert", ["albert.encoder.albert_layer_groups.0"] * 4),
        ("t5", [f"{half}.block.{i}" for half in ("encoder", "decoder") for i in range(3)]),
        ("OneLayer", ["layer"] * 4),
        ("ResNet", [f"stages.{s}.layers.{i}" for s, depth in ((0, 2), (1, 3)) for i in range(depth)]),
        ("CalledByName", [f"layers.{i}" for i in range(4)]),
        ("NoGradHalf", [f"layers.{i}" for i in range(4)]),
        ("AutocastForward", [f"layers.{i}" for i in range(4)]),
    ],
)
def test_layers_are_blocks_wherever_the_model_keeps_them(name: str, expected: list[str]) -> None:
    graph = captured(MODELS[name](), batch_for(name))
    names = [block.name for block in graph.blocks]
    assert len(set(names)) == len(names)
    found = [block.name.partition(" ")[0] for block in graph.blocks]
    assert [layer for layer in found if layer in expected] == expected


def test_swin_blocks_are_the_layers_inside_its_stages() -> None:
    import transformers as tf

    config = tf.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=3
    )
    batch = {"pixel_values": torch.zeros(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    graph = captured(tf.SwinForImageClassification(config).train(), batch)
    layers = [block.name for block in graph.blocks if ".blocks." in block.name]
    assert layers == [f"swin.encoder.layers.{s}.blocks.{i}" for s in (0, 1) for i in (0, 1)]


class Bottleneck(nn.Module):
    """As the inverted residuals of torchvision: a list with its input added to what it gives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        parts = [nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(3)]
        self.conv = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x)


class Group(nn.Module):
    """As those of RCAN or SwinIR: residual layers, and a residual around them all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(PreActivation(width), PreActivation(width), nn.Conv2d(width, width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class Dense(nn.Module):
    """As those of DenseNet: every layer reads all before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d((1 + i) * width, width, 1), nn.ReLU()) for i in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, dim=1)))
        return found[-1]


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (Bottleneck, [""]),
        (Group, [".body.0", ".body.1", ".body.2"]),
        (Dense, [".layers.0", ".layers.1", ".layers.2"]),
    ],
)
def test_a_list_is_opened_unless_something_goes_around_plain_members(
    layer: Callable[[int], nn.Module], expected: list[str]
) -> None:
    make = lambda: ResNet(layer)  # noqa: E731
    graph = captured(make().train(), batch_for("ResNet"))
    layers = [f"stages.{s}.layers.{i}" for s, depth in ((0, 2), (1, 3)) for i in range(depth)]
    found = [block.name for block in graph.blocks if ".layers." in block.name]
    assert found == [f"{path}{inner}" for path in layers for inner in expected]
    eager, model = copies(make)
    assert torch.equal(interpret(graph, model, batch_for("ResNet")), loss_of(eager, batch_for("ResNet")))


class FillsWithTheLeast(Net):
    """Attention written out as most people write it: scores that must not count are the least of their type."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            scores = layer(x)
            least = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(torch.arange(16) > 11, least).clamp(min=least)
            x = x + torch.where(torch.arange(16) < 1, least, scores).softmax(-1)
        return x


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_least_number_of_fp32_is_one_that_bf16_has(dtype: torch.dtype | None) -> None:
    """Autocast's scores are bf16, whatever they were in the capture."""
    eager, model = copies(FillsWithTheLeast)
    batch = batch_for("FillsWithTheLeast")
    graph = captured(model, batch)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        expected, found = loss_of(eager, batch), interpret(graph, model, batch)
    assert torch.isfinite(found)
    assert torch.equal(found, expected)


def _empty(y: torch.Tensor) -> torch.Tensor:
    return torch.zeros(y.shape, dtype=y.dtype, device=y.device)


def _turned(y: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(y), device=y.device).flip(0)


def _everywhere(y: torch.Tensor) -> torch.Tensor:
    return _turned(y)[:, None].expand_as(y)


WRITES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "index_add_": lambda y: _empty(y).index_add_(0, _turned(y), y),
    "index_add": lambda y: _empty(y).index_add(0, _turned(y), y, alpha=2),
    "index_put_": lambda y: _empty(y).index_put_((_turned(y),), y),
    "index_copy_": lambda y: _empty(y).index_copy_(0, _turned(y), y),
    "scatter_add_": lambda y: _empty(y).scatter_add_(0, _everywhere(y), y),
    "scatter": lambda y: _empty(y).scatter(0, _everywhere(y), y),
    "scatter_reduce": lambda y: _empty(y).scatter_reduce(0, _everywhere(y), y, "sum"),
    "masked_scatter": lambda y: _empty(y).masked_scatter(y > 0, y),
    "lerp": lambda y: torch.lerp(_empty(y), y, 0.3),
}


@pytest.mark.parametrize("name", WRITES)
def test_values_are_written_in_the_type_that_the_tensor_has(name: str) -> None:
    """It was made in the type of activations that autocast makes bf16, and the capture has in fp32."""

    class Writes(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + WRITES[name](layer(x))
            return x

    batch = batch_for("Writes")
    eager, model = copies(Writes)
    graph = captured(model, batch)
    assert torch.equal(interpret(graph, model, batch), loss_of(eager, batch))
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = interpret(graph, model, batch), loss_of(eager, batch)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=0)


def test_a_slice_by_a_whole_number_in_a_tensor_has_a_known_size() -> None:
    """As DeBERTa cuts its relative positions."""

    class Slices(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            span = torch.tensor(4)
            return super().body(torch.cat([x[:, 16 - span :], x[:, : 16 - span]], dim=-1))

    graph = captured(Slices(), batch_for("Slices"))
    targets = {str(node.target) for block in graph.blocks for node in block.code.graph.nodes}
    assert not any(".item." in target or "local_scalar" in target for target in targets)


def test_members_of_a_sequential_without_parameters_join_the_layer_before_them() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(self.net(x), labels)

    graph = captured(Plain(), batch_for("Plain"))
    assert [block.name for block in graph.blocks] == ["net.0", "net.2", "net.4"]


def test_parameters_keep_their_names_and_a_tied_one_goes_by_the_first() -> None:
    model = zoo.bert_pretraining()
    graph = captured(model, batch_for("bert"))
    assert set(graph.parameters) == dict(model.named_parameters()).keys()
    tied = "bert.embeddings.word_embeddings.weight"
    assert graph.ties[tied] == ("cls.predictions.decoder.weight",)
    holders = [block.index for block in graph.blocks if tied in block.parameters]
    assert holders == [0, 5]
    assert graph.parameter_count == sum(parameter.numel() for parameter in model.parameters())


def test_frozen_parameters_are_named() -> None:
    graph = captured(Frozen(), batch_for("Frozen"))
    assert graph.frozen == {"stem.weight", "stem.bias", "layers.1.0.weight", "layers.1.0.bias"}
    assert "1.32 k parameters (901 trained), 6 blocks" in repr(graph)
    assert "trained" not in repr(captured(Net(), batch_for("Net")))


def test_parameters_that_only_no_grad_reaches_are_frozen() -> None:
    graph = captured(NoGradHalf(), batch_for("NoGradHalf"))
    assert graph.frozen == {"stem.weight", "stem.bias"} | {
        f"layers.{i}.0.{p}" for i in (0, 1) for p in ("weight", "bias")
    }


@pytest.mark.parametrize(
    ("make", "partly"),
    [
        (Net, False),
        (Frozen, True),
        (NoGradHalf, True),
        (WritesLearned, False),
        (zoo.bert_pretraining, False),
        (zoo.bert_half_frozen, True),
    ],
)
def test_a_gradient_has_to_come_back_to_what_a_trained_parameter_made(
    make: Callable[[], nn.Module], partly: bool
) -> None:
    """As autograd sees the same blocks with real weights."""
    model = make()
    batch = batch_for("bert" if make.__name__.startswith("bert") else "Net")
    graph = captured(model, batch)
    weights, buffers = dict(model.named_parameters()), {**dict(model.named_buffers()), **graph.constants}
    values: dict[str, torch.Tensor] = {}
    for block in graph.blocks:
        arguments = [weights[n].requires_grad_(n not in graph.frozen) for n in block.parameters]
        received = [*(values[n] for n in block.receives), *(batch[n] for n in block.inputs)]
        counts = [torch.ones(()) for _ in block.counts]
        sent = block.code(*arguments, *(buffers[n] for n in block.buffers), *received, *counts)
        values |= dict(zip(block.sends, sent, strict=True))
    assert {n for n, value in values.items() if value.requires_grad} == graph.differentiated
    assert (len(graph.differentiated) < len(values)) == partly


def test_masks_and_labels_are_inputs_of_the_blocks_that_read_them_and_never_sent() -> None:
    graph = captured(zoo.bert_pretraining(), batch_for("bert"))
    first, layer, last = graph.blocks[0], graph.blocks[1], graph.blocks[-1]
    assert set(first.inputs) == {"input_ids", "token_type_ids"}
    assert set(layer.inputs) == {"attention_mask"}
    assert set(last.inputs) == {"labels", "next_sentence_label"}
    for cut in range(1, len(graph.blocks)):
        [crossing] = graph.crossing(cut)
        assert graph.values[crossing].shape == (4, zoo.SEQ, 32)


@pytest.mark.parametrize("layer", [PreActivation, OverwritesItsInput])
def test_a_value_written_in_place_is_never_cut(layer: Callable[[int], nn.Module]) -> None:
    """Were it cut, the stage before would keep the value from before the write, and send that."""
    torch.manual_seed(0)
    model = ResNet(layer).train()
    batch = batch_for("ResNet")
    graph = captured(model, batch)
    values: Batch = {}
    sent: Batch = {}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **batch}
    counts = [torch.tensor(4.0)] * len(graph.label_counts)
    for block in graph.blocks:
        names = (*block.parameters, *block.buffers, *block.receives, *block.inputs)
        found = block.code(*((tensors | values)[name] for name in names), *(counts[i] for i in block.counts))
        values |= dict(zip(block.sends, found, strict=True))
        sent |= {name: value.detach().clone() for name, value in zip(block.sends, found, strict=True)}
    for name, value in values.items():
        assert torch.equal(value, sent[name]), f"{name} changed after it was sent"
    assert len(graph.blocks) == (8 if layer is PreActivation else 3)


def test_a_buffer_that_forward_changes_lives_in_one_block() -> None:
    for name in ("SharedNorm", "NoGradBuffers", "AssignedBuffer", "ResNet"):
        graph = captured(MODELS[name](), batch_for(name))
        homes = list(itertools.chain.from_iterable(block.buffers for block in graph.blocks))
        assert len(homes) == len(set(homes)), name
    assert "average" in captured(AssignedBuffer(), batch_for("AssignedBuffer")).blocks[0].buffers


def test_label_counts_are_those_of_the_batch() -> None:
    batch = batch_for("bert", size=4)
    model = zoo.bert_pretraining()
    graph = captured(model, batch)
    counts = [int(count.code(*(batch[name] for name in count.inputs))) for count in graph.label_counts]
    assert counts == [int((batch["labels"] != -100).sum()), 4]
    batch = batch_for("gpt2", size=4)
    [count] = captured(zoo.gpt2(), batch).label_counts
    assert int(count.code(batch["labels"])) == int((batch["labels"][:, 1:] != -100).sum()), "GPT-2 shifts its labels"


@pytest.mark.parametrize("name", ["bert", "gpt2", "electra-discriminator", "Weighted", "Smoothed"])
def test_losses_of_micro_batches_over_the_global_count_sum_to_the_mean_over_the_batch(name: str) -> None:
    batch = batch_for(name, size=8)
    parts = [{key: value[i : i + 2] for key, value in batch.items()} for i in range(0, 8, 2)]
    torch.manual_seed(0)
    model = MODELS[name]().train()
    graph = captured(model, parts[0])
    assert all(block.counts for block in graph.blocks[-1:])
    counts = [count.code(*(batch[key] for key in count.inputs)).float() for count in graph.label_counts]
    summed = sum(interpret(graph, model, part, counts).item() for part in parts)
    means = sum(loss_of(model, part).item() for part in parts) / len(parts)
    whole = loss_of(model, batch).item()
    assert summed == pytest.approx(whole, rel=2e-6)
    assert means != pytest.approx(whole, rel=1e-5), "the batch does not tell the two apart"


def test_capture_on_meta_computes_nothing_and_gives_the_same_blocks() -> None:
    batch = batch_for("bert")
    model = build_meta(zoo.bert_pretraining)
    on_meta = captured(model, batch)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    on_cpu = captured(zoo.bert_pretraining(), batch)
    for one, other in zip(on_meta.blocks, on_cpu.blocks, strict=True):
        assert (one.name, one.parameters, one.inputs) == (other.name, other.parameters, other.inputs)
    assert len(on_meta.block_types) == len(
        on_cpu.block_types
    )  # strides, and so no-op copies, may differ between devices
    assert on_meta.signature == on_cpu.signature


def test_a_model_whose_constructor_needs_real_numbers_is_built_all_the_same() -> None:
    class DropPath(Net):
        def __init__(self) -> None:
            super().__init__()
            self.rates = torch.linspace(0, 0.1, 4).tolist()

    model = build_meta(DropPath)
    assert model.rates[-1] == pytest.approx(0.1)
    assert len(captured(model, batch_for("DropPath")).blocks) == 6


def test_a_model_of_the_users_own_whose_constructor_needs_real_numbers_is_built_all_the_same() -> None:
    class DropPath(Net):
        def __init__(self) -> None:
            super().__init__()
            self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]

    assert len(build_meta(as_model(DropPath).build).rates) == 4


@pytest.mark.parametrize("where", ["buffer", "parameter", "attribute", "forward"])
def test_a_model_on_meta_may_meet_tensors_of_the_cpu(where: str) -> None:
    class Table(Net):
        def __init__(self) -> None:
            super().__init__()
            table = torch.from_numpy(np.arange(16, dtype=np.float32))
            if where == "parameter":
                table = nn.Parameter(table)
            if where == "buffer":
                self.register_buffer("table", table)
            elif where != "forward":
                self.table = table
            self.layers[3] = self.layers[0]

        def body(self, x: torch.Tensor) -> torch.Tensor:
            table = torch.arange(16.0, device="cpu") if where == "forward" else self.table
            return super().body(x + table)

    on_meta, on_cpu = captured(build_meta(Table), batch_for("Table")), captured(Table(), batch_for("Table"))
    assert [block.name for block in on_meta.blocks] == [block.name for block in on_cpu.blocks]
    assert on_meta.ties == on_cpu.ties


def test_bert_of_two_billion_parameters_is_captured_on_meta_in_seconds_and_under_two_gigabytes() -> None:
    code = """
        import resource, sys, time
        from workbench import models
        from workbench.capture import build_meta, capture
        from workbench.tensors import TensorSpec
        names = ("input_ids", "token_type_ids", "labels")
        batch = {name: TensorSpec(name, (2, 512), "int64") for name in names}
        batch["next_sentence_label"] = TensorSpec("next_sentence_label", (2,), "int64")
        started = time.perf_counter()
        factory = models.bert(hidden_size=1920, num_layers=54, num_heads=30).build
        graph = capture(build_meta(factory), batch)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds = time.perf_counter() - started
        print(len(graph.blocks), len(graph.block_types), graph.parameter_count, seconds, peak * 1024)
    """
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=True
    )
    blocks, kinds, parameters, seconds, peak_bytes = map(float, answer.stdout.split())
    assert (blocks, kinds) == (56, 3)
    assert parameters == pytest.approx(2.457e9, rel=1e-3)
    assert seconds < 30, "4 s when the machine is idle"
    assert peak_bytes < 2 * 2**30


def refused(model: nn.Module, name: str = "Mine", batch: Batch | None = None) -> CaptureError:
    with pytest.raises(CaptureError) as caught:
        captured(model, batch or batch_for(name), name)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return caught.value


def line_of(kind: type, text: str) -> int:
    source = Path(__file__).read_text().splitlines()
    first = next(i for i, line in enumerate(source) if line.strip().startswith(f"class {kind.__name__}"))
    return next(i for i, line in enumerate(source[first:], first + 1) if text in line)


def test_a_branch_on_a_tensors_value_is_refused_with_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    class Branches(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                x = -x
            return super().body(x)

    error = refused(Branches())
    assert error.facts["file"] == __file__
    assert error.facts["line"] == line_of(Branches, "if x.sum() > 0")
    assert f"{__file__}:{error.facts['line']} (`if x.sum() > 0:`) depends on the values of a tensor" in str(error)
    assert "torch.where" in str(error)
    assert capfd.readouterr() == ("", ""), "nothing but the error speaks"


def test_a_selection_by_values_is_refused_with_its_line() -> None:
    class Selects(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            kept = x[x[:, 0] > 0]
            return super().body(kept).repeat(2, 1)[:4]

    error = refused(Selects())
    assert error.facts["file"] == __file__
    assert error.facts["line"] in (line_of(Selects, "kept = x["), line_of(Net, "return functional.cross_entropy"))
    assert "by a mask" in str(error)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, value):
        return value.clone()

    @staticmethod
    def backward(_ctx, gradient):
        return 2 * gradient


def test_a_custom_autograd_function_is_refused_because_its_backward_would_be_lost() -> None:
    class Straight(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return Doubled.apply(super().body(x))

    error = refused(Straight())
    assert error.facts["line"] == line_of(Straight, "Doubled.apply")
    assert "Doubled" in str(error)
    assert "register_autograd" in str(error)
    assert torch.equal(Doubled.apply(torch.ones(2)), torch.ones(2)), "the function itself is as before"


def test_a_hook_on_a_tensor_is_refused_with_its_line_because_it_would_be_lost() -> None:
    class Scales(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            x.register_hook(lambda gradient: gradient / 2)
            return super().body(x)

    error = refused(Scales())
    assert error.facts["line"] == line_of(Scales, "x.register_hook")
    assert "detach()" in str(error)


def test_a_derivative_in_forward_is_refused_with_its_line() -> None:
    class Penalty(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = super().forward(x.requires_grad_(), labels)
            return loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().mean()

    assert refused(Penalty()).facts["line"] == line_of(Penalty, "torch.autograd.grad")


@pytest.mark.parametrize("what", ["parameter", "module"])
def test_backward_hooks_are_refused_because_nothing_would_call_them(what: str) -> None:
    model = Net()
    if what == "parameter":
        model.head.weight.register_hook(lambda gradient: 0 * gradient)
    else:
        model.head.register_full_backward_hook(lambda _module, inputs, _outputs: inputs)
    assert f"backward hook on the {what} head" in str(refused(model))


@pytest.mark.parametrize("source", ["random", "numpy"])
def test_random_numbers_that_are_not_torchs_are_refused_because_they_would_be_drawn_once(source: str) -> None:
    class Draws(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return super().body(x) * (random.random() if source == "random" else np.random.rand())

    assert "Draw from torch's" in str(refused(Draws()))


def test_a_loss_that_waits_for_labels_is_told_so() -> None:
    class NoLabels(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, object]:  # type: ignore[override]
            return {"loss": None if labels is None else super().forward(x, labels)}

    assert "returned no loss for a batch of x" in str(refused(NoLabels(), batch={"x": torch.zeros(4, 8)}))


def test_the_torch_function_patched_during_a_failed_capture_is_put_back() -> None:
    before = torch.rand, torch.autograd.Function.__dict__["apply"]
    refused(LayerDrop(0.1))
    assert (torch.rand, torch.autograd.Function.__dict__["apply"]) == before


def test_layerdrop_that_could_drop_is_refused_with_its_line() -> None:
    error = refused(LayerDrop(0.1))
    assert error.facts["line"] == line_of(LayerDrop, "torch.rand([])")


def test_a_forward_without_a_field_of_the_batch_is_told_the_fields() -> None:
    class NoLabels(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.head(self.body(self.stem(x))).sum()

    assert "x [4, 8], labels [4]: let forward take exactly these" in str(refused(NoLabels()))


def test_a_forward_that_needs_more_than_the_batch_is_told_the_fields() -> None:
    class More(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x * mask, labels)

    message = str(refused(More()))
    assert "'mask'" in message
    assert "let forward take exactly these" in message


@pytest.mark.parametrize("result", ["logits", "dict", "nothing", "labels"])
def test_a_model_that_returns_no_scalar_loss_is_refused(result: str) -> None:
    class NoLoss(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> object:  # type: ignore[override]
            logits = self.head(self.body(self.stem(x)))
            return {"logits": logits, "dict": {"logits": logits}, "nothing": None, "labels": labels.sum()}[result]

    assert "Let forward return a scalar loss" in str(refused(NoLoss()))


@pytest.mark.parametrize("how", ["batch alone", "no_grad", "detach", "frozen"])
def test_a_loss_that_no_parameter_can_learn_from_is_refused(how: str) -> None:
    class Unlearnable(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(how != "no_grad"):
                loss = x.mean() if how == "batch alone" else super().forward(x, labels)
            return loss.detach() if how == "detach" else loss

    model = Unlearnable().requires_grad_(how != "frozen")
    assert "depends on no trainable parameter" in str(refused(model))


def test_a_parameter_written_in_forward_is_refused() -> None:
    class Clamps(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.head.weight.clamp_(-0.1, 0.1)
            return super().body(x)

    message = str(refused(Clamps()))
    assert "writes to its parameter head.weight" in message
    assert __file__ in message


def test_a_number_made_in_one_layer_and_used_in_another_is_refused() -> None:
    class Numbers(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            scale = x.mean().item()
            return super().body(x) * scale

    assert "keep a number (.item()) a tensor" in str(refused(Numbers()))


def test_a_batch_that_does_not_fit_the_model_is_refused_with_the_shapes() -> None:
    message = str(refused(Net(), batch={"x": torch.zeros(4, 7), "labels": torch.zeros(4, dtype=torch.long)}))
    assert "x [4, 7]" in message
    assert "see that model(**batch) runs" in message


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(CaptureError, match="batch without fields"):
        capture(Net(), {})
