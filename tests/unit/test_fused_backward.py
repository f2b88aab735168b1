"""The pass over the compiler's graphs changes shapes and the order of sums, on GPUs and for products only."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch._inductor.inductor_prims import force_stride_order
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from workbench.execution.blocks.fused_backward import FEWEST_SUMS, FuseBackward

ATEN = torch.ops.aten
POSITIONS, FEATURES = 6, 1024
SAMPLES = FEWEST_SUMS // FEATURES


def into_product(gradient: torch.Tensor, weight: torch.Tensor) -> Any:
    """Return what the backward of a linear layer makes of a scaled gradient: that of its input and that of its bias."""
    rows = (gradient * 2).view(-1, FEATURES)
    return rows @ weight, rows.sum(0, keepdim=True, dtype=torch.float32)


def into_sum_only(gradient: torch.Tensor, weight: torch.Tensor) -> Any:
    return weight * 2, (gradient * 2).view(-1, FEATURES).sum(0, keepdim=True)


def read_twice(gradient: torch.Tensor, weight: torch.Tensor) -> Any:
    doubled = gradient * 2
    return doubled.view(-1, FEATURES) @ weight, doubled


def traced(function: Any, device: str, samples: int = SAMPLES) -> fx.Graph:
    with FakeTensorMode():
        gradient = torch.empty(samples, POSITIONS, FEATURES, device=device)
        return make_fx(function)(gradient, torch.empty(FEATURES, 3, device=device)).graph


def calls(graph: fx.Graph) -> Counter[Any]:
    return Counter(node.target for node in graph.nodes if node.op == "call_function")


def test_what_a_product_reads_is_computed_in_its_own_shape_and_summed_by_sample() -> None:
    graph = traced(into_product, "cuda")
    FuseBackward()(graph)
    found = calls(graph)
    assert found[force_stride_order] == 1
    sums = graph.find_nodes(op="call_function", target=ATEN.sum.dim_IntList)
    assert [list(node.meta["val"].shape) for node in sums] == [[SAMPLES, FEATURES], [1, FEATURES]]

    gradient, weight = torch.randn(SAMPLES, POSITIONS, FEATURES), torch.randn(FEATURES, 3)
    for ours, plain in zip(fx.GraphModule({}, graph)(gradient, weight), into_product(gradient, weight), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_few_sums_are_left_to_the_compiler() -> None:
    graph = traced(into_product, "cuda", samples=SAMPLES - 1)
    FuseBackward()(graph)
    assert calls(graph)[force_stride_order] == calls(graph)[ATEN.sum.dim_IntList] == 1


@pytest.mark.parametrize(("function", "device"), [(into_product, "cpu"), (into_sum_only, "cuda"), (read_twice, "cuda")])
def test_other_graphs_stay_as_they_are(function: Any, device: str) -> None:
    graph = traced(function, device)
    before = str(graph)
    FuseBackward()(graph)
    assert str(graph) == before


def test_graphs_of_unknown_sizes_stay_as_they_are() -> None:
    gradient, weight = torch.empty(SAMPLES, POSITIONS, FEATURES), torch.empty(FEATURES, 3)
    graph = make_fx(into_product, tracing_mode="symbolic")(gradient, weight).graph
    before = str(graph)
    with mock.patch.object(FakeTensor, "device", torch.device("cuda")):
        FuseBackward()(graph)
    assert str(graph) == before
