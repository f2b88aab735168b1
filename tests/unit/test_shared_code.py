"""Blocks that differ in numbers only are measured and compiled once, and each computes with its own numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

from tests.unit.capture_models import captured
from workbench.capture import Block, Graph
from workbench.execution.build import runners

RATES = (0.9, 0.8, 0.7)
CPU = torch.device("cpu")


class Layer(nn.Module):
    def __init__(self, rate: float, eps: float, dropout: float) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8, eps=eps), nn.Linear(8, 8)
        self.rate, self.dropout = rate, nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = (self.rate + torch.rand(len(x), 1)).floor()  # stochastic depth, as Hugging Face's models write it
        return x + self.dropout(self.linear(self.norm(x))) / self.rate * kept


class Residual(nn.Module):
    def __init__(
        self, rates: tuple[float, ...] = RATES, eps: tuple[float, ...] = (1e-5,), dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        each = eps * (len(rates) // len(eps))
        self.layers = nn.ModuleList(Layer(rate, e, dropout) for rate, e in zip(rates, each, strict=True))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x), labels)


def graph_of(model: nn.Module) -> Graph:
    return captured(model.train(), {"x": torch.randn(4, 8), "labels": torch.randint(3, (4,))})


def layers_of(graph: Graph) -> list[Block]:
    found = [block for block in graph.blocks if block.name.startswith("layers.")]
    assert len(found) == 3
    return found


def compiled(graph: Graph, recompute: str = "none") -> dict[str, Any]:
    """Return runners that are traced as those of a GPU, and that run operation by operation."""
    torch._dynamo.reset()
    counters.clear()
    real = torch.compile
    codes = {block.block_type: block.code for block in graph.blocks}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda code, **how: real(code, backend="aot_eager_decomp_partition", **how))
        return runners(graph, codes, CPU, True, recompute)


def compilations() -> int:
    """Return the number of graphs that were compiled since the last call of `compiled`."""
    return counters["stats"]["unique_graphs"]


def outcome(run: Any, graph: Graph, block: Block, *seed: torch.Tensor) -> list[torch.Tensor]:
    """Return what a block returns for the same weights, value and random numbers in every call, and the gradients."""
    torch.manual_seed(0)
    specs = [graph.parameters[name] for name in block.parameters] + [graph.values[name] for name in block.receives]
    given = [torch.randn(spec.shape).requires_grad_() for spec in specs]
    [value] = run(*given, *seed)
    return [value, *torch.autograd.grad(value.square().sum(), given)]


def test_layers_with_rates_of_their_own_are_one_type_to_measure() -> None:
    layers = layers_of(graph_of(Residual()))
    assert len({layer.block_type for layer in layers}) == 3
    assert len({layer.cost_type for layer in layers}) == 1
    without = layers_of(graph_of(Residual((1.0, 0.8, 0.7))))
    assert len({layer.cost_type for layer in without}) == 2, "a division by 1 may cost nothing"


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_compiled_code_computes_with_the_rate_of_each_layer(recompute: str) -> None:
    graph = graph_of(Residual())
    run = compiled(graph, recompute)
    outcomes = []
    for layer in layers_of(graph):
        found, expected = (outcome(each, graph, layer) for each in (run[layer.block_type], layer.code))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
        outcomes.append(found[0])
    assert compilations() == 1
    assert not torch.equal(outcomes[0], outcomes[1])


def test_the_seed_of_a_dropout_comes_behind_the_numbers() -> None:
    graph, seed = graph_of(Residual(dropout=0.5)), torch.tensor(3)
    run = compiled(graph)
    first, second, _ = layers_of(graph)
    once, again = (outcome(run[first.block_type], graph, first, seed) for _ in range(2))
    torch.testing.assert_close(once, again)
    assert not torch.equal(once[0], outcome(run[first.block_type], graph, first, seed + 1)[0])
    assert not torch.equal(once[0], outcome(run[second.block_type], graph, second, seed)[0])
    assert compilations() == 1


def test_layers_whose_numbers_cannot_be_tensors_are_compiled_one_by_one() -> None:
    graph = graph_of(Residual(eps=(1e-5, 1e-6, 1e-7)))
    run = compiled(graph)
    for layer in layers_of(graph):
        found, expected = (outcome(each, graph, layer) for each in (run[layer.block_type], layer.code))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert compilations() == 3
