"""Block-sparse kernels on a GPU: equal to masked dense products, the same in every run, compiled and captured.

python -m pytest -q tests/gpu/test_sparse_kernels.py
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from tests.gpu.machine import DEVICE
from tests.unit.sparse_kernel_cases import BERT_BASE, SCALED_BERT, Case, differences, miniature, random_mask
from workbench.sparsity.kernels import BlockIndex, BlockSparseLinear, block_sparse_linear, to_compact
from workbench.sparsity.pattern import initial, uniform

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="on a CPU the unit tests run these kernels in the interpreter")
FULL_SIZE = [
    Case(block, rows * scale, cols * scale, sparsity, "bfloat16", tokens=4096)
    for block in (16, 32, 64)
    for shapes, scale in ((BERT_BASE, 12), (SCALED_BERT, 15))
    for (rows, cols), sparsity in zip(shapes, (0.0, 0.9, 0.95), strict=True)
]


@pytest.mark.parametrize("case", [*miniature(), *FULL_SIZE], ids=str)
def test_kernels_equal_masked_dense_products(case: Case) -> None:
    assert max(differences(case, "cuda").values()) < case.tolerance


def test_half_precision_products_are_supported() -> None:
    case = Case(32, 256, 512, 0.8, "float16", tokens=500)
    assert max(differences(case, "cuda").values()) < case.tolerance


@pytest.mark.parametrize("block", [16, 32, 64])
def test_every_configuration_and_every_run_give_the_same_bits(block: int) -> None:
    """Processes may choose different configurations, and replicas and resumed runs must not differ."""
    from workbench.sparsity.kernels import triton_kernels

    case = Case(block, 768, 3072, 0.9, "bfloat16", tokens=4000)
    results = []
    for number in range(6):
        for kernel in (triton_kernels.product_kernel, triton_kernels.weight_gradient_kernel):
            configs = kernel.configs
            kernel.cache = _Always(configs[number % len(configs)])
        results.append(_output_and_gradients(case))
    for kernel in (triton_kernels.product_kernel, triton_kernels.weight_gradient_kernel):
        kernel.cache = {}
    for result in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(result, results[0], strict=True))


class _Always(dict):  # type: ignore[type-arg]
    """A tuner's cache with one configuration for every key."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.config = config

    def __contains__(self, _key: object) -> bool:
        return True

    def __getitem__(self, _key: object) -> object:
        return self.config


def test_a_layer_runs_compiled_under_autocast() -> None:
    layer, hidden = _layer(), torch.randn(4, 100, 768, device="cuda")
    compiled = torch.compile(layer, fullgraph=True)
    gradients = []
    for run in (layer, compiled):
        with torch.autocast("cuda", torch.bfloat16):
            output = run(hidden)
        output.float().square().mean().backward()
        assert output.dtype == torch.bfloat16
        assert layer.weight.grad is not None
        gradients.append(layer.weight.grad)
        layer.weight.grad = None
    assert torch.equal(*gradients)


def test_a_captured_product_follows_its_moving_pattern() -> None:
    """The index is an input of the kernels, so that a CUDA graph stays valid while the pattern moves."""
    layer, hidden = _layer(), torch.randn(512, 768, device="cuda")

    def step() -> torch.Tensor:
        layer.weight.grad = None
        output = layer(hidden)
        output.square().sum().backward()
        return output

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
        gradient = layer.weight.grad
    mask = layer.pattern.mask
    layer.move_pattern(mask.roll(1, 1))
    graph.replay()
    assert gradient is not None
    replayed = output.clone(), gradient.clone()
    expected = step()
    assert torch.equal(replayed[0], expected)
    assert torch.equal(replayed[1], layer.weight.grad)


def test_activations_of_more_than_two_billion_elements_are_addressed() -> None:
    case = Case(64, 64, 8192, 0.99, "bfloat16", tokens=2**31 // 8192 + 128)
    free, _ = torch.cuda.mem_get_info()
    if free < 20 << 30:
        pytest.skip("20 GiB of free GPU memory are needed")
    index = BlockIndex.from_mask(random_mask(dataclasses.replace(case, sparsity=0.5)).cuda(), 64)
    hidden = torch.randn(case.tokens, case.cols, device="cuda", dtype=torch.bfloat16)
    weight = to_compact(torch.randn(64, 8192, device="cuda", dtype=torch.bfloat16), index)
    tail = block_sparse_linear(hidden[-128:].clone(), weight, index)
    assert torch.equal(block_sparse_linear(hidden, weight, index)[-128:], tail)


def _layer() -> BlockSparseLinear:
    torch.manual_seed(0)
    mask = random_mask(Case(32, 1536, 768, 0.9))
    return BlockSparseLinear.from_linear(nn.Linear(768, 1536, device="cuda"), mask, 32)


def _output_and_gradients(case: Case) -> list[torch.Tensor]:
    torch.manual_seed(0)
    mask = random_mask(case)
    index = BlockIndex.from_mask(mask.cuda(), case.block)
    weight = torch.randn(index.num_blocks, case.block, case.block).cuda().bfloat16().requires_grad_()
    hidden = torch.randn(case.tokens, case.cols).cuda().bfloat16().requires_grad_()
    output = block_sparse_linear(hidden, weight, index)
    output.square().sum().backward()
    assert weight.grad is not None
    assert hidden.grad is not None
    return [output.detach(), weight.grad, hidden.grad]


def test_patterns_are_hashed_to_the_same_bits_on_a_gpu() -> None:
    for key, shape in (("0/weight/0", (768, 3072)), ("7/layer.0/159", (33, 7))):
        assert torch.equal(uniform([key], shape, "cuda").cpu(), uniform([key], shape))
    assert torch.equal(initial((768, 768), 4, 3686, "0/weight", "cuda").cpu(), initial((768, 768), 4, 3686, "0/weight"))
