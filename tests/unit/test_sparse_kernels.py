"""Block-sparse products equal masked dense ones, in Triton's interpreter and on the CPU's reference path."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import nn

from tests.exhaustive import exhaustive
from tests.unit.sparse_kernel_cases import Case, differences, mask_of, miniature, random_mask
from workbench.base.errors import InvalidArgument
from workbench.cost import Cluster
from workbench.cost.profile import break_even_sparsity
from workbench.cost.sparse_matrices import none_and_all_stored, relative_times
from workbench.sparsity.kernels import (
    BlockIndex,
    BlockSparseLinear,
    block_sparse_linear,
    move,
    replace_linears,
    to_compact,
    to_dense,
)

ROOT = Path(__file__).parents[2]
CASE = Case(16, 128, 64, 0.5)


MEASURED = {"h100": "sparse_kernels_1xH100_a4d6c56.json", "h200": "sparse_kernels_1xH200_4182f403.json"}
H100 = Cluster.of("h100", gpus=1).device


def index_of(case: Case, seed: int = 0) -> BlockIndex:
    torch.manual_seed(seed)
    return BlockIndex.from_mask(random_mask(case), case.block)


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run_cases(*arguments: str, **environment: str) -> Any:
    """Run the cases in a process of their own: Triton is interpreted only if a variable is set before its import."""
    answer = subprocess.run(
        [sys.executable, "-m", "tests.unit.sparse_kernel_cases", *arguments],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


@functools.cache
def interpreted() -> dict[str, Any]:
    found: dict[str, Any] = run_cases(TRITON_INTERPRET="1")
    return found


@needs_triton
@pytest.mark.parametrize("block", [16, 32, 64])
def test_kernels_equal_masked_dense_products_in_the_interpreter(block: int) -> None:
    pairs = [pair for pair in zip(miniature(), interpreted()["differences"], strict=True) if pair[0].block == block]
    stored = {case: mask_of(case) for case, _ in pairs}
    assert {case.sparsity for case, mask in stored.items() if mask.any()} >= {0.0, 0.5, 0.9, 0.99}
    sparse = [mask for case, mask in stored.items() if case.sparsity > 0 and mask.any()]
    assert all((~mask).all(dim).any() for mask in sparse for dim in (0, 1)), "some rows and columns are empty"
    for case, found in pairs:
        assert max(found.values()) < case.tolerance, (case, found)


@needs_triton
def test_tokens_are_divided_to_occupy_the_gpu_and_to_stay_in_its_cache() -> None:
    parts = interpreted()["parts"]
    assert parts["blocks of 64, a tenth stored"] == math.ceil(8 * 132 / 210), "programs for every multiprocessor"
    many = parts["blocks of 16, a tenth stored"]
    assert 16384 / many * (7680 + 1920) * 2 <= 20 << 20, "the inputs of a part fit into the cache"
    half = parts["blocks of 16, half stored"]
    assert 8 * half * 28800 * 16**2 <= 16384 * (7680 + 1920) * 2, "sums take less traffic than the inputs"
    assert 1 < half < many


@needs_triton
@pytest.mark.parametrize("block", [16, *(pytest.param(block, marks=exhaustive) for block in (32, 64))])
def test_kernels_compile_for_hopper_to_tensor_core_products_and_wide_copies(block: int) -> None:
    """A kernel that lost sight of its alignment would still be right, and several times slower."""
    for name, found in run_cases(str(block), TRITON_INTERPRET="0").items():
        assert found["wgmma"] >= 4, name
        assert found["async"] >= 18, name
        assert found["narrow"] == 0, name
        assert found["loads"] <= 30, name


@pytest.mark.parametrize("case", [CASE, Case(64, 256, 64, 0.9, "bfloat16"), Case(32, 64, 64, 0.99)], ids=str)
def test_the_reference_path_equals_masked_dense_products(case: Case) -> None:
    assert max(differences(case).values()) < case.tolerance
    assert "workbench.sparsity.kernels.triton_kernels" not in sys.modules, "the CPU needs no Triton"


@pytest.mark.parametrize("case", miniature()[:6], ids=str)
def test_index_arrays_name_every_block_once_in_both_orders(case: Case) -> None:
    index = index_of(case)
    mask = index.mask
    by_row, by_column, groups = index.sections
    for lines, others_mask in ((by_row, mask), (by_column, mask.T)):
        counts = lines.starts.diff()
        assert counts.tolist() == others_mask.sum(1).tolist()
        assert lines.others.tolist() == others_mask.nonzero()[:, 1].tolist()
        assert sorted(lines.slots.tolist()) == list(range(index.num_blocks))
        assert counts[lines.order].tolist() == sorted(counts.tolist(), reverse=True)
    rows, cols = index.coordinates
    assert rows[by_column.slots].tolist() == by_column.others.tolist()
    assert cols[by_column.slots].tolist() == mask.T.nonzero()[:, 0].tolist()
    starts = (by_column if case.rows > case.cols else by_row).starts
    covered = [
        entry
        for line, first in zip(groups.lines.tolist(), groups.first.tolist(), strict=True)
        if line >= 0
        for entry in range(first, min(first + 128 // case.block, int(starts[line + 1])))
    ]
    assert covered == list(range(index.num_blocks))


def test_the_index_of_a_number_of_blocks_has_one_length() -> None:
    torch.manual_seed(0)
    spread = torch.zeros(64, dtype=torch.bool)
    spread[:16] = True
    patterns = [spread[torch.randperm(64)].view(8, 8) for _ in range(50)]
    patterns += [
        spread.view(8, 8),
        spread.view(8, 8).T,
        torch.eye(8, dtype=torch.bool).roll(3, 0) | torch.eye(8).bool(),
    ]
    assert len({len(BlockIndex.from_mask(mask, 16).data) for mask in patterns}) == 1


def test_dense_to_compact_and_back_keeps_stored_blocks_and_zeroes_the_others() -> None:
    index = index_of(CASE)
    dense = torch.randn(CASE.rows, CASE.cols)
    elements = index.mask.repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert torch.equal(to_dense(to_compact(dense, index), index), dense * elements)


def test_a_move_keeps_surviving_blocks_and_zeroes_regrown_ones() -> None:
    old, new = index_of(CASE), index_of(CASE, seed=1)
    dense = torch.randn(CASE.rows, CASE.cols)
    both = (old.mask & new.mask).repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert 0 < int(both.sum()) < int(new.mask.sum()) * 256
    assert torch.equal(to_dense(move(to_compact(dense, old), old, new), new), dense * both)


def test_the_operators_are_consistent_under_compilation_and_export() -> None:
    index = index_of(CASE)
    hidden = torch.randn(24, CASE.cols, requires_grad=True)
    weight = torch.randn(index.num_blocks, 16, 16, requires_grad=True)
    bias = torch.randn(CASE.rows, requires_grad=True)
    operators = torch.ops.workbench
    shape = (index.data, CASE.rows, CASE.cols)
    torch.library.opcheck(operators.block_sparse_product.default, (hidden, weight, bias, *shape, False))
    torch.library.opcheck(operators.block_sparse_product.default, (torch.randn(24, 128), weight, None, *shape, True))
    torch.library.opcheck(
        operators.block_sparse_weight_gradient.default,
        (torch.randn(24, CASE.rows), hidden.detach(), weight.detach(), *shape),
    )


def test_a_compiled_layer_equals_the_layer_and_follows_its_moving_pattern() -> None:
    torch.manual_seed(0)
    masks = [torch.zeros(32, dtype=torch.bool).index_fill(0, torch.randperm(32)[:9], True).view(8, 4) for _ in range(2)]
    layer = BlockSparseLinear.from_linear(nn.Linear(64, 128), masks[0], 16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    hidden = torch.randn(3, 8, 64)
    for mask in masks:
        layer.move_pattern(mask)
        gradients = []
        for run in (layer, compiled):
            run(hidden).square().sum().backward()
            assert layer.weight.grad is not None
            gradients.append(layer.weight.grad)
            layer.weight.grad = None
        assert torch.equal(compiled(hidden), layer(hidden))
        assert torch.equal(*gradients)
        assert torch.equal(layer.pattern.mask, mask)


def test_autocast_multiplies_in_bf16_and_returns_fp32_gradients() -> None:
    index = index_of(CASE)
    layer = BlockSparseLinear(torch.randn(index.num_blocks, 16, 16), index, torch.zeros(128))
    hidden = torch.randn(8, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(hidden)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert layer.weight.grad is not None
    assert hidden.grad is not None
    assert layer.weight.grad.dtype == hidden.grad.dtype == torch.float32


def test_the_optimiser_sees_compact_weights_only_and_regrown_blocks_start_afresh() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    old = torch.zeros(4, 8, dtype=torch.bool)
    old[:, :2] = True
    new = old.clone()
    new[0] = torch.arange(8) % 4 == 1  # block 1 of the first row survives, block 0 is pruned, block 5 is regrown
    dense = model[2].weight.detach().clone()
    replace_linears(model, {"2": old}, 16)
    layer = model[2]
    assert isinstance(layer, BlockSparseLinear)
    kept = to_dense(layer.weight.detach(), layer.pattern)
    assert torch.equal(kept, dense * old.repeat_interleave(16, 0).repeat_interleave(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    state = optimizer.state[layer.weight]
    assert state["exp_avg"].shape == layer.weight.shape == (8, 16, 16)
    before, first = to_dense(layer.weight.detach(), layer.pattern), to_dense(state["exp_avg_sq"], layer.pattern)
    layer.move_pattern(new, optimizer)
    survived = (old & new).repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert torch.equal(to_dense(layer.weight.detach(), layer.pattern), before * survived)
    assert torch.equal(to_dense(state["exp_avg_sq"], layer.pattern), first * survived)
    assert first[:16, 16:32].any()
    assert not layer.weight[1].any()


def test_bad_input_is_refused_in_a_sentence() -> None:
    index = index_of(CASE)
    weight = torch.zeros(index.num_blocks, 16, 16)
    mask = torch.ones(4, 4, dtype=torch.bool)
    layer = BlockSparseLinear.from_linear(nn.Linear(64, 64), mask, 16)
    refused = {
        "There are kernels for blocks of 16, 32, 64, and none for 8": lambda: BlockIndex.from_mask(mask, 8),
        "A mask of blocks is a matrix of bools": lambda: BlockIndex.from_mask(mask.int(), 16),
        r"has shape [128, 32], and its pattern is for [128, 64]": lambda: to_compact(torch.zeros(128, 32), index),
        "The compact weight has shape [3, 16, 16]": lambda: to_dense(torch.zeros(3, 16, 16), index),
        "The input has 32 features, and the weight takes 64": lambda: block_sparse_linear(
            torch.zeros(2, 32), weight, index
        ),
        "Cast one of them, or use autocast": lambda: block_sparse_linear(torch.zeros(2, 64).half(), weight, index),
        "The layer has 16 blocks, and the new pattern has 4": lambda: layer.move_pattern(torch.eye(4).bool()),
        "cannot move to a pattern of blocks of 16 of a weight [64, 64]": lambda: move(weight, index, layer.pattern),
        "The model has no linear layer '5'. Its linear layers are 0": lambda: replace_linears(
            nn.Sequential(nn.Linear(64, 64)), {"5": mask}, 16
        ),
    }
    for message, call in refused.items():
        with pytest.raises(InvalidArgument, match=re.escape(message)):
            call()


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize(("block", "rms"), [(64, 0.05), (32, 0.06), (16, 0.14)])
def test_the_price_of_stored_blocks_is_that_of_the_measured_layers(name: str, block: int, rms: float) -> None:
    device = Cluster.of(name, gpus=1).device
    content = json.loads((ROOT / "benchmarks" / "results" / MEASURED[name]).read_text())
    dense = {row["layer"]: row["step_ms"] for row in content["rows"] if row["contender"] == "dense"}
    measured = [row for row in content["rows"] if row["contender"] == "block-sparse" and row["block"] == block]
    errors = []
    for row in measured:
        times = relative_times(block, row["rows"], row["cols"], 1 - row["sparsity"])
        errors.append(sum(time.on(device) for time in times) / 3 * dense[row["layer"]] / row["step_ms"] - 1)
    assert len(errors) == (18 if name == "h100" else 24)
    assert math.sqrt(fmean(error**2 for error in errors)) < rms
    found = {row["layer"]: row["measured"] for row in content["break_even"] if row["block"] == block}
    for row in measured:
        products = none_and_all_stored(block, [(row["rows"], row["cols"])])
        assert break_even_sparsity(products, device) == pytest.approx(found[row["layer"]], abs=0.055)


def test_narrow_layers_break_even_later_or_never() -> None:
    def point(*widths: int) -> float:
        return break_even_sparsity(none_and_all_stored(32, [(width, width) for width in widths]), H100)

    points = [point(width) for width in (1920, 768, 512, 64)]
    assert points == sorted(points)
    assert points[-1] == 1
    assert point(64, 1920) == pytest.approx(points[0], abs=0.01)
