"""Products of rows with experts' matrices: one operation, whatever a model wrote, in the precision of autocast."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from tests.distributed import zoo
from workbench.capture import build_meta, capture
from workbench.capture.experts import grouped_mm
from workbench.cost import Cluster
from workbench.cost.graph_profiler import profile_graph
from workbench.execution.blocks.weight_copies import read_only_by_products
from workbench.tensors import TensorSpec

EXPERTS, ROWS, INSIDE, OUTSIDE = 4, 24, 16, 8
ENDS = torch.tensor([5, 5, 17, ROWS], dtype=torch.int32)
"""The second expert has no rows."""


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, INSIDE, generator=generator, dtype=dtype, requires_grad=True)
    return rows, torch.randn(EXPERTS, OUTSIDE, INSIDE, generator=generator, dtype=dtype, requires_grad=True)


def one_by_one(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    parts = torch.tensor_split(rows, ENDS[:-1].long())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


@pytest.mark.parametrize("transposed", [True, False])
def test_each_row_is_multiplied_by_its_experts_matrix_and_gradients_are_right(transposed: bool) -> None:
    (rows, weights), (rows_again, weights_again) = operands(torch.float64), operands(torch.float64)
    turned, turned_again = weights.transpose(1, 2), weights_again.transpose(1, 2)
    if not transposed:
        turned, turned_again = turned.contiguous(), turned_again.contiguous()
    found, expected = grouped_mm(rows, turned, ENDS), one_by_one(rows_again, turned_again)
    torch.testing.assert_close(found, expected)
    found.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    torch.testing.assert_close(rows.grad, rows_again.grad)
    torch.testing.assert_close(weights.grad, weights_again.grad)
    assert weights.grad is not None
    assert not weights.grad[1].any()


def test_gradients_of_operands_without_requires_grad_are_not_computed() -> None:
    rows, weights = operands()
    product = grouped_mm(rows.detach(), weights.transpose(1, 2), ENDS)
    with FlopCounterMode(display=False) as counter:
        product.backward(torch.ones_like(product))
    assert counter.get_total_flops() == 2 * ROWS * INSIDE * OUTSIDE


def test_autocast_runs_grouped_products_in_bf16_and_returns_fp32_gradients() -> None:
    rows, weights = operands()
    with torch.autocast("cpu", torch.bfloat16):
        product = grouped_mm(rows, weights.transpose(1, 2), ENDS)
    assert product.dtype == torch.bfloat16
    product.float().sum().backward()
    assert rows.grad is not None
    assert rows.grad.dtype == torch.float32
    assert weights.grad is not None
    assert weights.grad.dtype == torch.float32


class ByTorch(torch.nn.Module):
    """A layer that calls torch's own grouped product, which takes bf16 only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(32, INSIDE)
        self.experts = torch.nn.Parameter(torch.randn(EXPERTS, INSIDE, OUTSIDE))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = self.table(input_ids).flatten(0, 1).bfloat16()
        ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (rows.shape[0] // EXPERTS)
        logits = functional.grouped_mm(rows, self.experts.bfloat16(), offs=ends)
        return functional.cross_entropy(logits.float(), labels.flatten())


def specs() -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, (2, zoo.SEQ), "int64") for name in ("input_ids", "labels")}


def products(code: fx.GraphModule) -> list[fx.Node]:
    found = [node for node in code.graph.nodes if "grouped_mm" in str(node.target)]
    assert {node.target for node in found} == {torch.ops.workbench.grouped_mm.default}
    return found


def test_mixtures_of_transformers_call_one_operation_without_a_cast_before_it() -> None:
    block = capture(build_meta(zoo.mixtral), specs()).blocks[1]
    found = products(block.code)
    assert len(found) == 2
    assert all(node.args[0].target is not torch.ops.aten.to.dtype for node in found)  # type: ignore[union-attr]
    read = read_only_by_products(block.code, len(block.parameters))
    experts = [name for name, only in zip(block.parameters, read, strict=True) if only and "experts" in name]
    assert len(experts) == 2


def test_a_call_of_torchs_grouped_product_becomes_the_same_operation_in_its_own_type() -> None:
    [block] = capture(ByTorch(), specs()).blocks
    [product] = products(block.code)
    rows, weights = (value.meta["val"] for value in product.args[:2])  # type: ignore[union-attr]
    assert rows.dtype == weights.dtype == torch.bfloat16


def test_experts_are_priced_for_their_rows_in_bf16() -> None:
    graph = capture(build_meta(zoo.mixtral), specs())
    costs = profile_graph(graph, Cluster.of("h200").device, "bf16", compiled=True)
    layer = costs.block_types[costs.blocks[1].block_type]
    grouped = [kernel.flops for kernel in layer.forward]
    chosen = 2 * zoo.SEQ  # two experts for each token
    expected = 2 * chosen * (zoo.HIDDEN * 2 * zoo.INNER + zoo.INNER * zoo.HIDDEN)
    attention = 2 * zoo.SEQ * zoo.HIDDEN * (2 * zoo.HIDDEN + zoo.HIDDEN)  # half as many keys and values
    router, scores = 2 * zoo.SEQ * zoo.HIDDEN * 4, 2 * 2 * zoo.SEQ * zoo.SEQ * zoo.HIDDEN
    assert sum(grouped) == pytest.approx(expected + attention + router + scores)


def test_compiled_experts_give_the_same_loss_and_gradients() -> None:
    rows, matrices = operands()

    def loss(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return grouped_mm(rows, matrices.transpose(1, 2), ENDS).float().pow(2).mean()

    found = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        ours = [copy.deepcopy(value.detach()).requires_grad_() for value in (rows, matrices)]
        result = function(*ours)
        result.backward()
        found.append([result.detach(), *(value.grad for value in ours)])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=0, atol=0)
