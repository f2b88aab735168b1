"""Block-sparse products against masked dense ones, as the unit tests and the GPU tests compare them.

    TRITON_INTERPRET=1 python -m tests.unit.sparse_kernel_cases   # the kernels on the CPU; prints differences as JSON
    python -m tests.unit.sparse_kernel_cases 16                   # compiles the kernels; prints the instructions

Triton reads the variable when it is imported, so that tests start a process of its own.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from workbench.sparsity.kernels.index import BlockIndex, to_compact, to_dense
from workbench.sparsity.kernels.operators import block_sparse_linear

BERT_BASE = ((64, 64), (256, 64), (64, 256))
"""Weights [rows, cols] of attention and of both feed-forward layers, a twelfth of their size."""
SCALED_BERT = ((128, 128), (512, 128), (128, 512))
"""The same of scaled BERT, a fifteenth of their size."""
SPARSITIES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)
SPARSEST = ((16, 256, 512), (32, 768, 512), (64, 1024, 1536))
"""Block and weight [rows, cols], of the proportions above, that keep a few blocks at a sparsity of 0.99."""


@dataclass(frozen=True)
class Case:
    """One product: a weight [rows, cols] of blocks, its sparsity, and the dtype of all tensors."""

    block: int
    rows: int
    cols: int
    sparsity: float
    dtype: str = "float32"
    tokens: int = 72

    @property
    def tolerance(self) -> float:
        """Largest difference from the masked dense product in fp32, relative to its norm: rounding of the result."""
        return 1e-5 if self.dtype == "float32" else 6e-3


def miniature() -> list[Case]:
    """Return the cases for the interpreter: all blocks and sparsities over the shapes, and both dtypes.

    Some small weights lose their last block to their sparsity; the larger ones at the end do not.
    """
    dtypes = itertools.cycle(("float32", "bfloat16"))
    orders = {16: SCALED_BERT + BERT_BASE, 32: BERT_BASE + SCALED_BERT, 64: SCALED_BERT + BERT_BASE}
    cases = [
        Case(block, *shape, sparsity, next(dtypes))
        for block, shapes in orders.items()
        for shape, sparsity in zip(shapes, SPARSITIES, strict=True)
    ]
    cases += [Case(*sizes, sparsity, next(dtypes)) for sizes in SPARSEST for sparsity in (0.9, 0.99)]
    return cases + [Case(block, 128, 256, 0.5, tokens=300) for block in (16, 64)]


def random_mask(case: Case) -> Tensor:
    """Return a random mask of the case's sparsity, with an empty row and an empty column if it is sparse."""
    mask = torch.rand(case.rows // case.block, case.cols // case.block) >= case.sparsity
    if case.sparsity > 0:
        mask[len(mask) // 2] = False
        mask[:, mask.shape[1] // 2] = False
    return mask


def mask_of(case: Case) -> Tensor:
    """Return the case's own random mask."""
    torch.manual_seed(case.rows + case.cols)
    return random_mask(case)


def differences(case: Case, device: str = "cpu") -> dict[str, float]:
    """Return the difference of output and gradients from those of the masked dense product in fp32.

    They are relative to the norm of the dense one, and absolute where that is zero.
    """
    dtype, mask = getattr(torch, case.dtype), mask_of(case)
    elements = mask.repeat_interleave(case.block, 0).repeat_interleave(case.block, 1).to(device)
    dense, hidden, bias, gradient = (
        torch.randn(shape).to(device, dtype)
        for shape in ((case.rows, case.cols), (2, case.tokens // 2, case.cols), (case.rows,), (case.tokens, case.rows))
    )
    index = BlockIndex.from_mask(mask.to(device), case.block)
    sparse = [tensor.clone().requires_grad_() for tensor in (to_compact(dense, index), hidden, bias)]
    output = block_sparse_linear(sparse[1], sparse[0], index, sparse[2])
    output.backward(gradient.view_as(output))
    exact = [tensor.float().requires_grad_() for tensor in (dense, hidden, bias)]
    expected = functional.linear(exact[1], exact[0] * elements, exact[2])
    expected.backward(gradient.float().view_as(expected))
    assert sparse[0].grad is not None
    pairs = {
        "output": (output, expected),
        "gradient to the weight": (to_dense(sparse[0].grad, index), exact[0].grad),
        "gradient to the input": (sparse[1].grad, exact[1].grad),
        "gradient to the bias": (sparse[2].grad, exact[2].grad),
    }
    return {name: _difference(*pair) for name, pair in pairs.items()}


def _difference(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    size = float(expected.detach().norm())
    return float((found.detach().float() - expected.detach()).norm()) / (size or 1)


def compiled(block: int) -> dict[str, dict[str, int]]:
    """Compile the first configuration of each kernel for Hopper, which needs no GPU, and count instructions by kernel.

    `async` copies to shared memory bring 16 bytes each, `narrow` ones fewer; `wgmma` multiplies on the tensor cores.
    """
    from workbench.sparsity.kernels import triton_kernels as kernels

    product, gradient = kernels.product_kernel, kernels.weight_gradient_kernel
    common = {"BLOCK": block, "PRECISION": "ieee"}
    return {
        "forward": _instructions(product, common | {"TRANSPOSED": False, "HAS_BIAS": True}),
        "gradient to the input": _instructions(product, common | {"TRANSPOSED": True, "HAS_BIAS": False}),
        "gradient to the weight": _instructions(gradient, common | {"BY_COLUMN": True, "TOKENS": 64, "COLUMNS": 128}),
    }


def _instructions(kernel: Any, constants: dict[str, Any]) -> dict[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    config, names = kernel.configs[0], kernel.fn.arg_names
    constants = constants | config.kwargs
    numbers = {"input_ptr", "values_ptr", "bias_ptr", "output_ptr", "gathered_ptr", "shared_ptr"}
    types = {name: "*bf16" if name in numbers else "*i32" if name.endswith("_ptr") else "i32" for name in names}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = [name for name in names if name.endswith(("_ptr", "_stride")) or name == "num_tokens"]
    source = ASTSource(
        fn=kernel.fn,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    copies = re.findall(r"cp\.async\.c[ag]\S* \[.*?\], \[.*?\], (\w+)", code)
    return {
        "wgmma": code.count("wgmma.mma_async"),
        "async": copies.count("0x10"),
        "narrow": len(copies) - copies.count("0x10"),
        "loads": code.count("ld.global"),
    }


def parts_of_tokens() -> dict[str, int]:
    """Return into how many parts the weight gradient divides 16,384 tokens of a weight [7680, 1920] on a Hopper GPU."""
    from workbench.sparsity.kernels.triton_kernels import _splits

    tokens, input_bytes, multiprocessors = 16384, 16384 * (7680 + 1920) * 2, 132
    groups_and_values = {
        "blocks of 64, a tenth stored": (210, 360 * 64**2),
        "blocks of 16, a tenth stored": (840, 5760 * 16**2),
        "blocks of 16, half stored": (3720, 28800 * 16**2),
    }
    return {
        name: _splits(groups, values, tokens, input_bytes, multiprocessors)
        for name, (groups, values) in groups_and_values.items()
    }


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(compiled(int(sys.argv[1]))))
        return
    from workbench.sparsity.kernels import triton_kernels

    parts = parts_of_tokens()
    triton_kernels.SMALLEST_SPLIT = 64  # so that the tokens of small cases are divided too
    with mock.patch.object(triton_kernels, "product", wraps=triton_kernels.product) as product:
        found = [differences(case) for case in miniature()]
    assert product.call_count == 2 * len(found), "forward and gradient to the input have run in the interpreter"
    print(json.dumps({"differences": found, "parts": parts}))


if __name__ == "__main__":
    main()
