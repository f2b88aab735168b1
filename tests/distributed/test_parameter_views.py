"""Views of parameters that are made once and read by many blocks: plain PyTorch's numbers under every plan."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.distributed import zoo
from tests.distributed.harness import launch, part_of
from tests.distributed.test_every_plan import MICRO_BATCH, Case, plan_of, trainer_of
from tests.distributed.test_unusual_models import wrong_in
from workbench.base.errors import CaptureError, root_exception
from workbench.capture import Graph, capture, operations, spec_of

TOLERANCE = 1e-6
LENGTH, WIDTH, LAYERS = 6, 16, 3


class Attention(nn.Module):
    """Reads `context` by the queries of `x`, with positions added to the queries or to the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: torch.Tensor, context: torch.Tensor, queries: torch.Tensor | float = 0.0) -> torch.Tensor:
        x = x + self.attention(x + queries, context, context, need_weights=False)[0]
        return x + self.inner(x)


class Sequence(nn.Module):
    """Positions, a stack of layers and a head; the models below change what the layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, zoo.CLASSES)
        self.pos = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Attention() for _ in range(LAYERS))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.hidden(x).mean(1)), labels)


class LearnedPositions(Sequence):
    """Positions that every layer adds again."""

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        pos = self.pos[None].expand(len(x), -1, -1)
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, x, pos)
        return x


class ObjectQueries(Sequence):
    """DETR: an encoder, and a decoder whose layers all read the same learned queries, made between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Embedding(3, WIDTH)
        self.decoder = nn.ModuleList(Attention() for _ in range(LAYERS))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x) + self.pos
        for layer in self.layers:
            x = layer(x, x)
        queries = self.queries.weight.unsqueeze(0).expand(len(x), -1, -1)
        found = torch.zeros(len(x), 3, WIDTH, dtype=x.dtype)
        for layer in self.decoder:
            found = layer(found, x, queries)
        return found


class Perceiver(Sequence):
    """Latents that read the whole input again in every other layer; the first layer's input is a view of them."""

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        latents = self.pos[:3].expand(len(x), -1, -1)
        x = self.stem(x)
        for index, layer in enumerate(self.layers):
            latents = layer(latents, x if index % 2 else latents)
        return latents


class EveryView(Sequence):
    """Views whose operations do not say that they are views, or read an activation, in layers that they alternate in;
    one is behind `detach`, one is made of another, and one is a weight that a layer uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.rows = nn.Parameter(torch.randn(LAYERS, WIDTH))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        transposed, flat, rows = torch.einsum("ij->ji", self.matrix), self.pos.flatten(), self.rows.unbind(0)
        like, (with_x, _) = self.pos.expand_as(x), torch.broadcast_tensors(self.pos, x)
        halves, inner, typed = self.pos.chunk(2, -1), self.layers[2].inner[0].weight.t(), self.pos.type_as(x)
        still = self.pos.view(LENGTH, WIDTH).detach()
        for index, layer in enumerate(self.layers):
            x = layer(x, x @ transposed, flat.view(LENGTH, WIDTH) + rows[index])
            x = x + like * with_x + torch.cat(halves, -1).sin() + x @ inner + typed * still
        return x


MODELS: dict[str, Callable[[], Sequence]] = {
    kind.__name__: kind for kind in (LearnedPositions, ObjectQueries, Perceiver, EveryView)
}
RECOMPUTED = ("none", "selective", "full")
CASES = {
    1: [Case(recompute=recompute) for recompute in RECOMPUTED],
    2: [
        *(Case(data=2, zero=3, recompute=recompute) for recompute in RECOMPUTED),
        *(Case(data=2, zero=zero) for zero in (0, 1, 2)),
        Case(data=2, zero=1, offload_optimizer=True),
        Case(pipeline=2),
        Case(pipeline=2, chunks=2, schedule="interleaved", recompute="full"),
        Case(tensor=2),
    ],
    4: [Case(pipeline=2, data=2, zero=3, recompute="full"), Case(pipeline=2, data=2, zero=1, offload_optimizer=True)],
}


def batch_of(_name: str, size: int) -> zoo.Batch:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, zoo.CLASSES, (size,), generator=generator)
    return {"x": torch.randn(size, LENGTH, 8, generator=generator).double(), "labels": labels}


def captured(model: nn.Module) -> Graph:
    return capture(model, {key: spec_of(key, value) for key, value in batch_of("", MICRO_BATCH).items()})


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double().train()  # so that what differs is no rounding


@functools.cache
def capture_all() -> dict[str, tuple[nn.Module, Graph]]:
    models = {name: built(name) for name in MODELS}
    return {name: (model, captured(model)) for name, model in models.items()}


@pytest.mark.parametrize("world", CASES)
def test_views_of_parameters_that_many_blocks_read_equal_plain_pytorch(world: int) -> None:
    assert not (wrong := wrong_in(world, capture_all, CASES[world], batch_of, TOLERANCE)), wrong


def _with_a_planted_view(_rank: int) -> str:
    """Return how a step of ZeRO 3 ends if capture takes no operation for a view."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "_parameter_views", lambda *_: (set(), set()))
        graph = captured(model := built("LearnedPositions"))
    plan = plan_of(graph, Case(data=2, zero=3))
    trainer = trainer_of(model, graph, plan)
    before = [parameter.clone() for parameter in trainer.stages.model_parameters().values()]
    with pytest.raises(RuntimeError) as caught:
        trainer.step(0, part_of(trainer, batch_of("", plan.global_batch)))
    assert all(map(torch.equal, before, trainer.stages.model_parameters().values()))
    error = root_exception(caught.value)
    assert isinstance(error, CaptureError)
    return str(error)


def test_a_view_of_a_freed_weight_is_caught_before_the_first_update() -> None:
    found = launch(_with_a_planted_view, 2)
    assert "'expand' (2, 6, 16)" in found, found


def test_a_view_between_layers_is_no_block_of_its_own_and_is_never_sent() -> None:
    graph = captured(built("ObjectQueries"))
    readers = [block.name for block in graph.blocks if "queries.weight" in block.parameters]
    assert readers == [f"decoder.{index}" for index in range(LAYERS)]
    assert not any("expand" in name for name in graph.values)
