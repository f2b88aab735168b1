"""Captured blocks compute what the model computes, and their boundaries are those of its layers."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.distributed import zoo
from tests.unit.capture_models import (
    IMAGES,
    MODELS,
    ROUNDED,
    SMALL,
    AssignedBuffer,
    Batch,
    Frozen,
    Net,
    NoGradHalf,
    OverwritesItsInput,
    PreActivation,
    ResNet,
    WritesLearned,
    batch_for,
    captured,
    copies,
    interpret,
    loss_of,
)
from workbench.capture import build_meta
from workbench.capture.operations import mutated_arguments, op_name
from workbench.models import as_model


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


def test_identical_layers_share_one_block_type_and_one_code() -> None:
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
    """A list with its input added to its output, as the inverted residuals of torchvision have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        parts = [nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(3)]
        self.conv = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x)


class Group(nn.Module):
    """Residual layers, and a residual connection around them all, as in RCAN or SwinIR."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(PreActivation(width), PreActivation(width), nn.Conv2d(width, width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class Dense(nn.Module):
    """A block of DenseNet: every layer reads all layers before it."""

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
    [(Bottleneck, [""]), (Group, [".body.0", ".body.1", ".body.2"]), (Dense, [".layers.0", ".layers.1", ".layers.2"])],
)
def test_a_list_is_opened_unless_a_residual_connection_goes_around_plain_members(
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
    """Written-out attention that masks scores with the least number of their type."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            scores = layer(x)
            least = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(torch.arange(16) > 11, least).clamp(min=least)
            x = x + torch.where(torch.arange(16) < 1, least, scores).softmax(-1)
        return x


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_least_number_of_fp32_is_clamped_to_the_range_of_bf16(dtype: torch.dtype | None) -> None:
    """Autocast computes scores in bf16 that were fp32 in the capture."""
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
def test_written_values_are_cast_to_the_type_of_the_tensor(name: str) -> None:
    """The tensor is made in the type of activations, which is fp32 in the capture and bf16 under autocast."""

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


def test_a_slice_by_an_integer_tensor_has_a_known_size() -> None:
    """DeBERTa slices its relative positions so."""

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


def test_parameters_keep_their_names_and_a_tied_one_goes_by_its_first() -> None:
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
def test_differentiated_values_are_those_that_require_grad_with_real_weights(
    make: Callable[[], nn.Module], partly: bool
) -> None:
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


class InPlace(nn.Module):
    """Writes into results in place: read before and after, by a number, and where a view of it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = self.first(x)
        before = 2.0 * found
        found += self.second(x)
        found.mul_(0.5).add_(before)
        with torch.no_grad():
            found.mul_(1.5)  # whose gradient is that of before
        seen = before[:, :4]
        before -= 1.0  # `seen` sees it
        rows = self.head(found)
        rows[:, 0] = 0.0
        return functional.mse_loss(rows + seen, y) + before.mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_into_results_become_results_of_their_own_where_no_view_sees_them(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, batch = InPlace(), {"x": torch.randn(4, 8), "y": torch.randn(4, 4)}
    graph = captured(model, batch)
    written = [node for block in graph.blocks for node in block.code.graph.nodes if mutated_arguments(node)]
    assert sorted(op_name(node) for node in written) == ["fill_", "mul_", "sub_"]
    weights = dict(model.named_parameters())
    values, tensors = {}, {**weights, **graph.constants, **batch}
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        right = model(**batch)
        for block in graph.blocks:
            names = (*block.parameters, *block.buffers, *block.receives, *block.inputs)
            counts = [torch.tensor(16.0)] * len(block.counts)
            values |= dict(zip(block.sends, block.code(*((tensors | values)[n] for n in names), *counts), strict=True))
    [loss] = [values[name] for name in graph.blocks[-1].sends]
    assert torch.equal(loss, right)
    for found, expected in zip(*(torch.autograd.grad(each, weights.values()) for each in (loss, right)), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("layer", [PreActivation, OverwritesItsInput])
def test_no_boundary_parts_a_value_from_a_later_write_to_it(layer: Callable[[int], nn.Module]) -> None:
    """A boundary there would make the earlier stage send the value from before the write."""
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
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}  # as a rank has it, without values
    on_cpu = captured(zoo.bert_pretraining(), batch)
    for one, other in zip(on_meta.blocks, on_cpu.blocks, strict=True):
        assert (one.name, one.parameters, one.inputs) == (other.name, other.parameters, other.inputs)
    assert on_meta.block_types == on_cpu.block_types
    assert on_meta.signature == on_cpu.signature


def test_a_model_whose_constructor_needs_real_numbers_is_built_on_the_cpu() -> None:
    class DropPath(Net):
        def __init__(self) -> None:
            super().__init__()
            self.rates = torch.linspace(0, 0.1, 4).tolist()
            self.last = torch.tensor(0.1).item()

    model = build_meta(DropPath)
    assert (model.rates[-1], model.last) == (pytest.approx(0.1), pytest.approx(0.1))
    assert len(build_meta(as_model(DropPath).build).rates) == 4
    assert len(captured(model, batch_for("DropPath")).blocks) == 6


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


def test_bert_of_two_billion_parameters_is_captured_on_meta_under_two_gigabytes() -> None:
    code = """
        import resource
        from workbench import models
        from workbench.capture import build_meta, capture
        from workbench.base.tensors import TensorSpec
        names = ("input_ids", "token_type_ids", "labels")
        batch = {name: TensorSpec(name, (2, 512), "int64") for name in names}
        batch["next_sentence_label"] = TensorSpec("next_sentence_label", (2,), "int64")
        factory = models.bert(hidden_size=1920, num_layers=54, num_heads=30).build
        graph = capture(build_meta(factory), batch)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(len(graph.blocks), len(graph.block_types), graph.parameter_count, peak * 1024)
    """
    answer = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    blocks, block_types, parameters, peak_bytes = map(float, answer.stdout.split())
    assert (blocks, block_types) == (56, 3)
    assert parameters == pytest.approx(2.457e9, rel=1e-3)
    assert peak_bytes < 2 * 2**30
