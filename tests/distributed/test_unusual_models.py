"""Models as people write them at home: their losses and gradients are plain PyTorch's under every plan as well."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn import functional

from tests.distributed import zoo
from tests.distributed.harness import CPU, LINK, launch, plain_step, unlike_plain
from tests.distributed.test_every_plan import MICRO_BATCH, Case, plan_of, trainer_of
from tests.unit.capture_models import Net
from workbench.capture import Graph, build_meta, capture, spec_of
from workbench.cost.graph_profiler import profile_graph
from workbench.cost.hardware import Cluster
from workbench.planning.plan import Plan
from workbench.planning.search import what_if

TOLERANCE = 1e-5
WIDTH = 16


class WritesIntoViews(Net):
    """Halves of a layer's output are written into an empty tensor: no operation takes them as its input."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            out[:, : WIDTH // 2] = self.left(x)
            out[:, WIDTH // 2 :] = self.right(x).tanh()
            return out

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))


class OddParameters(Net):
    """A scalar that all layers use, two dtypes in one layer, complex numbers, a transposed matrix, a lone vector."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.layers[1].register_parameter("turn", nn.Parameter(torch.randn(WIDTH // 2, dtype=torch.complex64)))
        self.layers[2][0].weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t() * 0.1)
        self.spectrum = nn.Linear(WIDTH // 2, WIDTH // 2, dtype=torch.complex64)
        self.query, self.project = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x + layer(x) * self.scale
            if index == 1:
                numbers = torch.view_as_complex(x.unflatten(1, (-1, 2))) * layer.turn
                x = torch.view_as_real(numbers + self.spectrum(self.spectrum(numbers))).flatten(1)
        return x + self.project(self.query)


class Routed(Net):
    """A router that is trained by nothing: only its choice is used; of another value, only the sign. The target is
    made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.codes = nn.Linear(WIDTH, 2), nn.Embedding(2, WIDTH, sparse=True)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        choice = self.router(x).argmax(-1)
        return super().body(x) * (x > 0) + self.codes(choice)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> object:
        made = torch.zeros(len(x), dtype=torch.long, device=x.device)
        return functional.cross_entropy(self.logits(x), made) + functional.cross_entropy(self.logits(x), labels)


class Branches(Net):
    """Takes one of two ways, by a parameter; values of an attention are wider than its queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(WIDTH, 4)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = super().body(x)
        few, seen = self.narrow(x).view(-1, 1, 2, 2), x.view(-1, 1, 2, WIDTH // 2)
        x = x + functional.scaled_dot_product_attention(few, few, seen).flatten(1)
        return torch.cond(self.narrow.bias.sum() > 0, lambda x: x.sin() * 0.5, lambda x: x.cos(), (x,))


@dataclass
class Output:
    """An output type that `torch.export` does not know."""

    logits: torch.Tensor
    loss: torch.Tensor


class Gpt(nn.Module):
    """A model as in lectures: literal sizes in views, a mask without a device, a cell that stores what it saw."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.out, self.cell = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, width = x.shape
            query, key, value = self.mix(x).split([16, 4, 4], dim=-1)
            heads = query.view(batch, length, 4, 4).transpose(1, 2)
            scores = heads @ key.unsqueeze(1).transpose(2, 3) / 2  # one key for all heads
            scores = scores + torch.full((length, length), -torch.inf).triu(1)
            seen = (scores.softmax(-1) @ value.unsqueeze(1)).transpose(1, 2).reshape(batch, length, width)
            flat = self.out(seen).view(batch * length, width)
            flat = flat + functional.scaled_dot_product_attention(x, x, x, is_causal=True).view(batch * length, width)
            return x + self.cell(flat, x.view(batch * length, width)).view(batch, length, width)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(zoo.VOCAB, WIDTH)
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, zoo.VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        batch, length = input_ids.shape
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x).view(batch * length, zoo.VOCAB)
        return Output(logits, functional.cross_entropy(logits, labels.view(batch * length)))


class LoopsOverExperts(Net):
    """Layers that select the rows of each expert in turn: their numbers depend on the router's choice."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 3)
            experts = (nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(3))
            self.experts = nn.ModuleList(experts)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, chosen = self.router(x).softmax(-1).topk(2, -1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows, rank = torch.where(chosen == index)
                out[rows] += expert(x[rows]) * weights[rows, rank, None]
            return out

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))


def llama_with_a_cache() -> nn.Module:
    """GPT-2 with its default configuration, which returns a cache of keys and values."""
    sizes = {"vocab_size": zoo.VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, **heads, max_position_embeddings=zoo.SEQ))


MODELS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind for kind in (WritesIntoViews, OddParameters, Routed, Branches, LoopsOverExperts, Gpt)
} | {"llama": llama_with_a_cache}
CASES = (
    Case(pipeline=2),
    Case(pipeline=2, recompute="selective"),
    Case(data=2),
    Case(data=2, zero=1, recompute="full"),
    Case(data=2, zero=3),
    Case(tensor=2),
)


def batch_of(name: str, size: int) -> zoo.Batch:
    return zoo.batch("gpt2" if name in ("Gpt", "llama") else "unet", size)


def captured(name: str, model: nn.Module) -> Graph:
    return capture(model, {key: spec_of(key, value) for key, value in batch_of(name, MICRO_BATCH).items()}, name=name)


@functools.cache
def capture_all() -> dict[str, tuple[nn.Module, Graph]]:
    found = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make().train()
        found[name] = model, captured(name, model)
    return found


Captured = Callable[[], dict[str, tuple[nn.Module, Graph]]]


def wrong_in(
    world: int,
    models: Captured,
    cases: Sequence[Case],
    batch_of: Callable[[str, int], zoo.Batch],
    tolerance: float = TOLERANCE,
) -> dict[tuple[str, Case], float]:
    """Return the differences of models from plain PyTorch that are too large, measured on so many processes."""
    found = launch(_compared, world, models, cases, batch_of, ahead=models)
    return {key: error for key, error in found.items() if not error <= tolerance}


def _compared(
    _rank: int, models: Captured, cases: Sequence[Case], batch_of: Callable[[str, int], zoo.Batch]
) -> dict[tuple[str, Case], float]:
    found = {}
    for name, (model, graph) in models().items():
        for case in cases:
            plan = plan_of(graph, case)
            found[name, case] = difference(copy.deepcopy(model), graph, plan, batch_of(name, plan.global_batch))
    return found


def difference(model: nn.Module, graph: Graph, plan: Plan, batch: zoo.Batch) -> float:
    """Return the largest relative difference of the loss and of the gradients of one step to plain PyTorch's."""
    plain = plain_step(model, batch)
    return max(unlike_plain(trainer_of(model, graph, plan), batch, *plain))


def test_models_written_in_unusual_ways_equal_plain_pytorch() -> None:
    assert not (wrong := wrong_in(2, capture_all, CASES, batch_of)), wrong


@pytest.mark.parametrize("name", MODELS)
def test_models_written_in_unusual_ways_are_planned_from_the_meta_device(name: str) -> None:
    """Capture on the meta device finds the same blocks as with real numbers."""
    graph = captured(name, build_meta(MODELS[name]))
    assert [block.name for block in graph.blocks] == [block.name for block in captured(name, MODELS[name]()).blocks]
    plan = what_if(
        profile_graph(graph, CPU, "fp32", compiled=False),
        global_batch=16,
        seq_len=zoo.SEQ,
        cluster=Cluster(CPU, 2, 2, LINK, LINK),
        pipeline=2,
    )
    assert plan.pipeline == 2


class Noisy(Net):
    """Numbers that are drawn in place, dropout inside of a recurrent layer, and a power iteration on buffers."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.5, batch_first=True)
            self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gumbel = -torch.empty_like(x).exponential_().log()
            return self.linear(self.rnn((x * torch.empty_like(x).uniform_(0.5, 1.5))[:, None])[0][:, 0]) + gumbel

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))


def _noisy(_rank: int) -> dict[str, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Gradients and buffers of one step, by how activations are recomputed; other numbers were drawn before each."""
    torch.manual_seed(0)
    model = Noisy().train()
    graph = captured("Noisy", model)
    found = {}
    for recompute in ("none", "full", "selective"):
        trainer = trainer_of(copy.deepcopy(model), graph, plan_of(graph, Case(recompute=recompute)))
        trainer.gradients(0, batch_of("Noisy", 4 * MICRO_BATCH))
        gradients = {key: parameter.grad.clone() for key, parameter in trainer.stages.model_parameters().items()}
        found[recompute] = gradients, {key: value.clone() for key, value in trainer.stages.model_buffers().items()}
    return found


def test_every_kind_of_noise_is_drawn_again_in_a_recomputation_and_buffers_advance_once() -> None:
    found = launch(_noisy, 1)
    for recompute in ("full", "selective"):
        for one, other in zip(found["none"], found[recompute], strict=True):
            assert one.keys() == other.keys()
            different = [key for key in one if not torch.allclose(one[key], other[key], rtol=1e-5, atol=1e-7)]
            assert not different, f"{recompute}: {different}"


LENGTH = 6
LOSS_CASES = (Case(pipeline=2), Case(data=2, num_microbatches=2), Case(data=2, zero=3, num_microbatches=2))


class FieldsOfTheSchedule(Net):
    """Fields of the batch have the names of arguments of the schedule's `step`."""

    def forward(self, x: torch.Tensor, target: torch.Tensor, losses: torch.Tensor, return_outputs: torch.Tensor) -> Any:
        logits = self.logits(x) * return_outputs[:, None, None]
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten()) + (logits.mean((1, 2)) * losses).mean()


class LastOfATuple(Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.logits(x)
        return logits, functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


class OverASelection(Net):
    """A mean over the elements that the batch selects, as many of which as there are differs between samples."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return self.loss(self.logits(x)[keep], y[keep])


class ClassesOfASelection(Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        keep = labels >= 0
        return functional.cross_entropy(self.logits(x)[keep], labels[keep])


class WritesIntoAField(Net):
    """Changes its input in place, before and after a layer reads it, as preprocessing in forward does."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x -= x.mean(-1, keepdim=True)
        x.mul_(0.1)
        hidden = self.layers[1](self.layers[0](self.stem(x)) + x.repeat(1, 1, 2))
        logits = self.head(self.layers[3](self.layers[2](hidden) + x.sum(-1, keepdim=True)))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


LOSSES: dict[str, Callable[[], nn.Module]] = {
    "fields of the schedule": FieldsOfTheSchedule,
    "last of a tuple": LastOfATuple,
    "writes": WritesIntoAField,
    "cross-entropy": ClassesOfASelection,
    "mse": lambda: OverASelection(functional.mse_loss),
    "l1": lambda: OverASelection(functional.l1_loss),
    "smooth l1": lambda: OverASelection(functional.smooth_l1_loss),
    "huber": lambda: OverASelection(functional.huber_loss),
    "kl": lambda: OverASelection(lambda found, y: functional.kl_div(found.log_softmax(-1), y.softmax(-1))),
}


def batch_for(name: str, size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, LENGTH, 8, generator=generator)
    chance = torch.linspace(0.2, 0.95, size)[:, None]
    keep = torch.rand(size, LENGTH, generator=generator) < chance
    keep[:, 0] = True
    labels = torch.randint(0, zoo.CLASSES, (size, LENGTH), generator=generator)
    if name == "fields of the schedule":
        weights = torch.rand(2, size, generator=generator)
        return {"x": x, "target": labels, "losses": weights[0], "return_outputs": weights[1]}
    if name in ("last of a tuple", "cross-entropy", "writes"):
        return {"x": x, "labels": labels.where(keep, -1)}
    return {"x": x, "y": torch.randn(size, LENGTH, zoo.CLASSES, generator=generator), "keep": keep}


@functools.cache
def capture_losses() -> dict[str, tuple[nn.Module, Graph]]:
    found = {}
    for name, make in LOSSES.items():
        torch.manual_seed(0)
        model = make().train()
        specs = {key: spec_of(key, value) for key, value in batch_for(name, MICRO_BATCH).items()}
        found[name] = model, capture(model, specs, name=name)
    return found


@pytest.mark.representative
def test_losses_as_people_return_and_compute_them_equal_plain_pytorch() -> None:
    assert not (wrong := wrong_in(2, capture_losses, LOSS_CASES, batch_for)), wrong
