"""Attention whose operands broadcast runs on fused kernels, with the numbers that PyTorch computes without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.base.tensors import TensorSpec
from workbench.capture import capture
from workbench.capture.blocks.attention import broadcast_attention, repeats_heads
from workbench.cost import Cluster
from workbench.cost.graph_profiler import profile_graph
from workbench.cost.profile import ATTENTION
from workbench.execution.build import runners

SAMPLES, ROWS, WIDTH = 2, 12, 8
CASES: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "one head of keys": (((SAMPLES, 4), (SAMPLES, 1), (SAMPLES, 1)), {"is_causal": True}),
    "one head of values": (((SAMPLES, 4), (SAMPLES, 4), (SAMPLES, 1)), {}),
    "one head of queries": (((SAMPLES, 1), (SAMPLES, 4), (SAMPLES, 4)), {}),
    "groups": (((SAMPLES, 4), (SAMPLES, 2), (SAMPLES, 2)), {"enable_gqa": True, "scale": 0.2}),
    "groups and a mask": (((SAMPLES, 4), (SAMPLES, 2), (SAMPLES, 2)), {"enable_gqa": True, "mask": (1, 4)}),
    "queries of all samples": (((1, 4), (SAMPLES, 4), (SAMPLES, 4)), {"mask": (SAMPLES, 1)}),
    "no heads": (((SAMPLES,), (SAMPLES,), (SAMPLES,)), {"is_causal": True}),
    "latents": (((), (SAMPLES,), (SAMPLES,)), {"mask": (SAMPLES,)}),
    "keys of no sample": (((SAMPLES, 4), (4,), ()), {"mask": ()}),
    "one matrix": (((), (), ()), {}),
    "five dims": (((SAMPLES, 3, 4), (SAMPLES, 3, 4), (SAMPLES, 3, 4)), {"mask": (4,)}),
    "five dims, masks of all": (((SAMPLES, 3, 4), (3, 4), (SAMPLES, 1, 4)), {"mask": (SAMPLES, 1, 1)}),
    "five dims, one mask of heads": (((SAMPLES, 3, 4), (3, 4), (3, 4)), {"mask": (1, 1, 4)}),
    "five dims, one head of keys": (((SAMPLES, 3, 4), (SAMPLES, 3, 1), (SAMPLES, 3, 1)), {"is_causal": True}),
}


class Called(TorchDispatchMode):
    """Note the operations of PyTorch that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CASES)
def test_operands_that_broadcast_have_the_numbers_of_pytorch_on_a_fused_kernel(case: str) -> None:
    leads, options = CASES[case]
    options = dict(options)
    torch.manual_seed(0)
    operands = [torch.randn(*lead, ROWS, WIDTH, requires_grad=True) for lead in leads]
    mask = options.pop("mask", None)
    given = None if mask is None else torch.randn(*mask, ROWS, ROWS)
    expected = scaled_dot_product_attention(*operands, given, **options)
    weights = torch.randn_like(expected)
    of_pytorch = torch.autograd.grad((expected * weights).sum(), operands)
    with Called() as called:
        found = broadcast_attention(*operands, given, **options)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad((found * weights).sum(), operands), of_pytorch)
    assert "_scaled_dot_product_flash_attention_for_cpu" in called.names
    assert "bmm" not in called.names


class MultiQuery(nn.Module):
    """Attention of four heads that read one head of keys and values, as Falcon has it, between linear layers."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.queries, self.keys, self.out = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 1)
        self.masked = masked

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query = self.queries(x).unflatten(-1, (4, 8)).transpose(1, 2)
        key, value = self.keys(x).unsqueeze(1).chunk(2, -1)
        mixed = scaled_dot_product_attention(query, key, value, mask.unsqueeze(1) if self.masked else None)
        return self.out(mixed.transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.parametrize("masked", [False, True])
def test_a_block_of_multi_query_attention_runs_on_a_fused_kernel(masked: bool) -> None:
    batch = {name: TensorSpec(name, (2, 12, size), "float32") for name, size in (("x", 32), ("mask", 12))}
    torch.manual_seed(0)
    model = MultiQuery(masked)
    graph = capture(model, batch)
    (block,) = graph.blocks
    run = runners(graph, {block.block_type: block.code}, torch.device("cpu"), compile=False, recompute="none")
    values = {name: torch.randn(spec.shape) for name, spec in batch.items()}
    parameters = dict(model.named_parameters())
    arguments = [parameters[name] for name in block.parameters] + [values[name] for name in block.inputs]
    with Called() as called:
        (found,) = run[block.block_type](*arguments)
    torch.testing.assert_close(found, model(**values))
    assert "_scaled_dot_product_flash_attention_for_cpu" in called.names


def test_copies_of_heads_are_priced_and_scores_are_not() -> None:
    saved = []
    for masked in (False, True):
        batch = {name: TensorSpec(name, (2, 12, size), "float32") for name, size in (("x", 32), ("mask", 12))}
        graph = capture(MultiQuery(masked), batch)
        profile = profile_graph(graph, Cluster.of("h200", gpus=4).device, "bf16", compiled=True)
        saved.append(profile.block_types[0].saved_bytes)
    copies = 2 * 2 * 12 * (32 - 8)  # keys and values in bf16, of four heads and not of one
    assert copies <= saved[1] - saved[0] <= copies + 4 * 12 * 12  # and what attention keeps of the mask


class Latents(nn.Module):
    """Latents attend to every sample, and samples of five dims to themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.keys, self.out = nn.Parameter(torch.randn(12, 8)), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.keys(x)
        mixed = scaled_dot_product_attention(self.latents, keys, keys)
        parts = mixed.unflatten(-1, (1, 2, 4)).movedim(1, 3)
        parts = scaled_dot_product_attention(parts, parts, parts)
        return self.out(parts.movedim(3, 1).flatten(2)).square().mean()


def test_attention_of_other_dims_trains_and_is_priced_as_attention() -> None:
    batch = {"x": TensorSpec("x", (2, 12, 8), "float32")}
    torch.manual_seed(0)
    model = Latents()
    graph = capture(model, batch)
    profile = profile_graph(graph, Cluster.of("h200", gpus=4).device, "bf16", compiled=True)
    assert [kernel.family for kernel in profile.block_types[0].forward].count(ATTENTION) == 2
    (block,) = graph.blocks
    run = runners(graph, {block.block_type: block.code}, torch.device("cpu"), compile=False, recompute="none")
    x, parameters = torch.randn(2, 12, 8), dict(model.named_parameters())
    with Called() as called:
        (found,) = run[block.block_type](*(parameters[name] for name in block.parameters), x)
    torch.testing.assert_close(found, model(x))
    assert "_scaled_dot_product_flash_attention_for_cpu" in called.names
    assert "bmm" not in called.names


def test_a_gpu_copies_heads_of_keys_where_its_kernels_for_groups_do_not_run() -> None:
    heads = (8, 2, 2)
    assert not repeats_heads("cuda", torch.bfloat16, heads, False, False)
    assert repeats_heads("cuda", torch.bfloat16, heads, True, True)
    assert repeats_heads("cuda", torch.float32, heads, False, True)
    assert repeats_heads("cuda", torch.bfloat16, (8, 8, 2), False, False)
    assert not repeats_heads("cuda", torch.float32, (8, 8, 8), True, False)
