"""Opaque calls: which models have them, what their operation does with memory, and that wrong ones are caught."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import workbench as wb
from tests.unit.capture_models import MODELS, Net, batch_for, captured, copies, interpret, loss_of
from workbench.base.errors import CaptureError, PlanInfeasible
from workbench.capture import build_meta
from workbench.capture.captured_model import CapturedModel
from workbench.capture.coupling.division import Division
from workbench.capture.export import opaque
from workbench.capture.export.opaque import is_opaque
from workbench.cost.graph_profiler import profile_graph
from workbench.cost.hardware import Cluster
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
        return x.tanh() if float(self.linear.weight.detach().abs().max()) > 0 else x.sin()


@pytest.mark.parametrize("name", MODELS)
def test_no_model_that_export_follows_has_an_opaque_call(name: str) -> None:
    graph = captured(MODELS[name]().train(), batch_for(name), name)
    assert not any(is_opaque(block.code) for block in graph.blocks)


def test_only_the_layer_that_export_cannot_follow_is_opaque() -> None:
    graph = captured(Middle(Branches()), batch_for("Net"))
    assert [block.name for block in graph.blocks if is_opaque(block.code)] == ["layers.1"]
    [note] = graph.notes
    assert note.startswith("layers.1 runs as written")


def test_the_running_averages_of_a_norm_in_an_opaque_layer_advance_once() -> None:
    """The backward runs the layer again."""

    class Normed(Branches):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.Sequential(nn.BatchNorm1d(16), nn.BatchNorm1d(16, momentum=None))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norms(super().forward(x))

    model, same = copies(lambda: Middle(Normed()))
    graph = captured(same, batch_for("Net"))
    for seed in range(2):
        batch = batch_for("Net", seed=seed)
        loss_of(model, batch).backward()
        interpret(graph, same, batch).backward()
    expected = dict(model.named_buffers())
    assert {name.rpartition(".")[2] for name in expected} == {"running_mean", "running_var", "num_batches_tracked"}
    for name, buffer in same.named_buffers():
        torch.testing.assert_close(buffer, expected[name])


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


class HoldsNumbers(nn.Module):
    """A layer that branches on a buffer of the constructor's numbers, which a model without values does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("width", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.pad(self.linear(x).unfold(1, int(self.width), 1).mean(-1), (int(self.width) - 1, 0))


def test_a_model_without_values_is_tried_with_those_that_its_constructor_makes() -> None:
    assert is_opaque(captured(build_meta(lambda: Middle(HoldsNumbers())), batch_for("Net")).blocks[2].code)


class Assigned(nn.Module):
    """The matching of a loss, which is on sizes."""

    def forward(self, sizes: torch.Tensor) -> torch.Tensor:
        if not (sizes.detach() >= 0).all():
            raise ValueError("sizes are below 0")
        return torch.tensor([int(row.argmax()) for row in sizes])


def test_a_module_that_forward_makes_is_opaque_alone_and_is_tried_on_positive_numbers() -> None:
    class Matched(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            found = self.head(self.body(self.stem(x)))
            chosen = Assigned()(found.sigmoid())
            return functional.cross_entropy(found, labels) + found.gather(1, chosen[:, None]).square().mean()

    graph = captured(Matched(), batch_for("Net"))
    calls = [call.label for block in graph.blocks for call in opaque.opaque_calls(block.code.graph)]
    assert calls == ["Assigned"]


class GivesItself(torch.autograd.Function):
    """A reversible network's function: its backward adds to the gradients of the module's parameters itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.module(x).backward(gradient)
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return GivesItself.apply(x, self.linear)


@pytest.mark.parametrize("build", [lambda make: make(), build_meta])
def test_a_function_that_is_given_a_module_is_not_opaque_without_its_parameters(build: Any) -> None:
    graph = captured(build(lambda: Middle(Reversible())), batch_for("Net"))
    [block] = [block for block in graph.blocks if is_opaque(block.code)]
    assert block.parameters == ("layers.1.linear.weight", "layers.1.linear.bias")


class Flexible(nn.Module):
    """Causal attention with a bias by distance, by FlexAttention or as a matrix."""

    def __init__(self, as_matrix: bool = False) -> None:
        super().__init__()
        self.linear, self.as_matrix = nn.Linear(16, 16), as_matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.linear(x).unflatten(-1, (1, 4, 4))
        if self.as_matrix:
            at = torch.arange(4)
            distance = at[:, None] - at
            bias = torch.where(distance >= 0, -0.3 * distance, -torch.inf)
            return functional.scaled_dot_product_attention(query, query, query, attn_mask=bias).flatten(1)
        mask = create_block_mask(lambda _b, _h, to, of: to >= of, None, None, 4, 4, device=x.device)
        return flex_attention(
            query, query, query, score_mod=lambda score, _b, _h, to, of: score - 0.3 * (to - of), block_mask=mask
        ).flatten(1)


def test_layers_of_flex_attention_run_as_written_and_learn_on_a_cpu() -> None:
    """Compared with the same attention by a matrix, since PyTorch alone refuses this backward on a CPU."""
    model, same = copies(lambda: Middle(Flexible(as_matrix=True)))
    same.layers[1].as_matrix = False
    batch = batch_for("Net")
    graph = captured(same, batch)
    assert [block.name for block in graph.blocks if is_opaque(block.code)] == ["layers.1"]
    assert "FlexAttention does not run while a model is exported" in graph.notes[0]
    expected, found = loss_of(model, batch), interpret(graph, same, batch)
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    for mine, theirs in zip(same.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_numbers_are_compared_for_a_model_of_flex_attention() -> None:
    samples = [{"x": torch.randn(8), "labels": torch.tensor(index % 5)} for index in range(16)]
    experiment = Experiment.of(model=lambda: Middle(Flexible()), data=samples, steps=1, global_batch=8, seq_len=1)
    assert CapturedModel(experiment, 2).division == Division()


class Encoded(nn.Module):
    """A model without a list of layers, whose one module export cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.encoder, self.head = nn.Linear(8, 16), Branches(), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.encoder(self.stem(x))), labels)


def test_a_module_that_runs_as_written_is_a_block_of_its_own() -> None:
    assert [block.name for block in captured(Encoded(), batch_for("Net")).blocks] == ["stem", "encoder", "head"]


class LeavesEarly(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
            if x.mean() > 1:
                break
        return x


class OfADerivative(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            [slope] = torch.autograd.grad(super().body(x).square().sum(), x, create_graph=True)
        return slope


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (LeavesEarly, "which layers run is known only from values that they compute"),
        (OfADerivative, "the derivative goes back through all layers"),
    ],
)
def test_a_model_of_one_block_says_why_no_pipeline_divides_it(model: type[nn.Module], reason: str) -> None:
    samples = [{"x": torch.randn(8), "labels": torch.tensor(index % 5)} for index in range(16)]
    experiment = Experiment.of(model=model, data=samples, steps=1, global_batch=8, seq_len=1)
    [note] = [note for note in CapturedModel(experiment, 2).graph.notes if "one block" in note]
    assert reason in note
    with pytest.raises(PlanInfeasible, match=f"more stages than the 1 block of .*{reason}"):
        wb.plan(experiment, Cluster.of("h200", gpus=2), pipeline=2)


class Wide(Branches):
    """A layer that keeps, of each sample, 1,000 times as many numbers for a moment as it returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.repeat(1, 1000).sin().cos().unflatten(1, (1000, 16)).mean(1))


class ThreeWide(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wide() for _ in range(3))


def test_opaque_layers_of_one_class_are_priced_once_with_what_their_second_forward_keeps() -> None:
    graph = captured(ThreeWide(), batch_for("Net"))
    layers = [block for block in graph.blocks if is_opaque(block.code)]
    assert len({block.block_type for block in layers}) == 3  # each has code of its own
    profile = profile_graph(graph, Cluster.of("h200", gpus=1).device, "fp32", compiled=False)
    [first, second] = [profile.blocks[block.index].block_type for block in layers[:2]]
    assert first == second
    assert profile.blocks[layers[0].index].opaque == ("layers.0",)
    kept = 2 * 1000 * 16 * 4  # the results of repeat and sin
    assert kept <= profile.block_types[first].workspace_bytes <= 1.1 * kept


def test_a_plan_says_which_share_of_a_step_runs_as_written() -> None:
    samples = [{"x": torch.randn(8), "labels": torch.tensor(index % 5)} for index in range(16)]
    experiment = Experiment.of(model=ThreeWide, data=samples, steps=1, global_batch=8, seq_len=1)
    [note] = [note for note in wb.plan(experiment).notes if note.startswith("Of the predicted time")]
    layers = re.findall(r"layers\.\d (\d+\.\d)%", note)
    assert len(layers) == 3
    assert 50 < sum(map(float, layers)) < 100
