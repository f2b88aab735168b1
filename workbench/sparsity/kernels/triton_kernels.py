"""The Triton kernels of block-sparse products, and how they are launched.

Triton is imported with this module, when a product first runs on a GPU. With the environment variable
`TRITON_INTERPRET=1`, set before Triton is imported, the same kernels run on the CPU, for tests.

The kernels read tiles of many tokens and compute one line of blocks each: tensor cores want one long side, which the
tokens are, and several blocks of the line are gathered side by side, so that each step multiplies 64 columns or more.
No two programs add to the same number, so results are the same to the last bit in every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.sparsity.kernels.index import GROUP_COLUMNS, Lines, Sections

GRADIENT_TOKENS = 64
"""Tokens per step of the weight gradient; one number for all configurations, because it fixes the order of sums."""
PROGRAMS_PER_MULTIPROCESSOR = 8
"""Programs that the weight gradient is divided into, per multiprocessor, if there are tokens enough.

Two to four run at a time; with fewer programs, many multiprocessors would wait for the last ones."""
SMALLEST_SPLIT = 1024
"""Fewest tokens that a program of the weight gradient sums over, if it is one of several."""
RESIDENT_PROGRAMS = 4
"""Programs of the weight gradient that a multiprocessor of Hopper runs at a time, with 54 KiB of shared memory each."""
CACHED_SPLIT_BYTES = 20 << 20
"""Bytes of both inputs in the tokens of one split, where its programs do not all run at a time.

Such programs read the same tokens at different times. The L2 cache of Hopper has 50 MiB, and holds some data twice."""
MULTIPROCESSORS_WITHOUT_GPU = 4
"""Multiprocessors that the interpreter plans for, so that tests divide the tokens too."""

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def _bench(call: Any, quantiles: Any) -> Any:
    return triton.testing.do_bench(call, warmup=3, rep=12, quantiles=quantiles)


def _tuned(configs: list[Any], orientation: str) -> Any:
    """Return a decorator that measures the configurations once per shape and keeps the fastest.

    The configurations differ in what a program computes and in how its loads overlap, never in the order of a sum. So
    processes that choose differently still compute the same numbers.
    """
    return triton.autotune(
        configs[:1] if _INTERPRETED else configs,
        key=["num_lines", "num_blocks", "tokens_key", "BLOCK", orientation],
        do_bench=_bench,
        cache_results=True,
    )


@triton.jit
def _multiply(left, right, total, PRECISION: tl.constexpr):
    """Return left × right + total in fp32; the interpreter multiplies the bits of bf16 numbers unless they are cast."""
    if _INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total)
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def _spread(first, STRIDE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the offsets of the columns of several blocks, from those of their first columns, multiples of `BLOCK`."""
    offsets = first[:, None] + (tl.arange(0, BLOCK) * STRIDE)[None, :]
    # The compiler loses sight of the alignment in the reshape, and would load single numbers without it.
    return tl.max_contiguous(tl.multiple_of(tl.reshape(offsets, (COLUMNS,)), BLOCK), BLOCK if STRIDE == 1 else 1)


@_tuned(
    [
        triton.Config({"TOKENS": 128, "COLUMNS": 64}, num_warps=4, num_stages=3),
        triton.Config({"TOKENS": 128, "COLUMNS": 64}, num_warps=4, num_stages=2),
        triton.Config({"TOKENS": 128, "COLUMNS": 64}, num_warps=4, num_stages=4),
        triton.Config({"TOKENS": 256, "COLUMNS": 64}, num_warps=8, num_stages=2),
        triton.Config({"TOKENS": 128, "COLUMNS": 128}, num_warps=4, num_stages=2),
        triton.Config({"TOKENS": 64, "COLUMNS": 128}, num_warps=4, num_stages=2),
    ],
    "TRANSPOSED",
)
@triton.jit
def product_kernel(
    input_ptr,
    values_ptr,
    bias_ptr,
    output_ptr,
    starts_ptr,
    others_ptr,
    slots_ptr,
    order_ptr,
    num_tokens,
    num_lines,
    num_blocks,
    tokens_key,
    input_stride,
    output_stride,
    TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute one line of blocks of input × weightᵀ, or of input × weight if transposed, for `TOKENS` tokens."""
    line = tl.load(order_ptr + tl.program_id(0))
    first_token = tl.program_id(1).to(tl.int64) * TOKENS
    token = tl.arange(0, TOKENS)
    valid = first_token + token < num_tokens
    column = tl.arange(0, COLUMNS)
    outer = tl.arange(0, BLOCK)
    input_ptr += first_token * input_stride
    start = tl.load(starts_ptr + line)
    end = tl.load(starts_ptr + line + 1)
    total = tl.full((TOKENS, BLOCK), 0, tl.float32)
    # The next step's index entries are loaded a step ahead: the addresses of its tiles depend on them.
    entry = start + tl.arange(0, COLUMNS // BLOCK)
    other = tl.load(others_ptr + entry, mask=entry < end, other=0)
    slot = tl.load(slots_ptr + entry, mask=entry < end, other=0) if TRANSPOSED else entry
    for position in range(start, end, COLUMNS // BLOCK):
        present = position + column // BLOCK < end
        source = _spread(other * BLOCK, 1, BLOCK, COLUMNS)
        tile = tl.load(
            input_ptr + token[:, None] * input_stride + source[None, :],
            mask=valid[:, None] & present[None, :],
            other=0.0,
        )
        if TRANSPOSED:
            place = _spread(slot * (BLOCK * BLOCK), BLOCK, BLOCK, COLUMNS)[:, None] + outer[None, :]
        else:
            place = (position * (BLOCK * BLOCK) + column // BLOCK * (BLOCK * BLOCK) + column % BLOCK)[:, None]
            place += (outer * BLOCK)[None, :]
        weight = tl.load(values_ptr + place, mask=present[:, None], other=0.0)
        entry += COLUMNS // BLOCK
        other = tl.load(others_ptr + entry, mask=entry < end, other=0)
        if TRANSPOSED:
            slot = tl.load(slots_ptr + entry, mask=entry < end, other=0)
        total = _multiply(tile, weight, total, PRECISION)
    if HAS_BIAS:
        total += tl.load(bias_ptr + line * BLOCK + outer).to(tl.float32)[None, :]
    output_ptr += first_token * output_stride
    tl.store(
        output_ptr + token[:, None] * output_stride + (line * BLOCK + outer)[None, :],
        total.to(output_ptr.dtype.element_ty),
        mask=valid[:, None],
    )


@_tuned(
    [
        triton.Config({}, num_warps=4, num_stages=3),
        triton.Config({}, num_warps=4, num_stages=4),
        triton.Config({}, num_warps=8, num_stages=3),
    ],
    "BY_COLUMN",
)
@triton.jit
def weight_gradient_kernel(
    gathered_ptr,
    shared_ptr,
    output_ptr,
    group_lines_ptr,
    group_starts_ptr,
    starts_ptr,
    others_ptr,
    slots_ptr,
    num_tokens,
    num_lines,
    num_blocks,
    tokens_key,
    split_tokens,
    gathered_stride,
    shared_stride,
    BY_COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum one group of blocks of the weight gradient over `split_tokens` tokens.

    The blocks of a group are in one line (row, or column if `BY_COLUMN`), so that they share one of their two inputs.
    """
    group = tl.program_id(0)
    line = tl.load(group_lines_ptr + group)
    if line < 0:
        return
    split = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    outer = tl.arange(0, BLOCK)
    token = tl.arange(0, TOKENS)
    entry = tl.load(group_starts_ptr + group) + column // BLOCK
    present = entry < tl.load(starts_ptr + line + 1)
    other = tl.load(others_ptr + entry, mask=present, other=0)
    first = split * split_tokens
    steps = tl.cdiv(tl.minimum(split_tokens, num_tokens - first), TOKENS)
    gathered_ptrs = gathered_ptr + first * gathered_stride
    gathered_ptrs = gathered_ptrs + token[:, None] * gathered_stride + (other * BLOCK + column % BLOCK)[None, :]
    shared_ptrs = shared_ptr + first * shared_stride
    shared_ptrs = shared_ptrs + token[:, None] * shared_stride + (line * BLOCK + outer)[None, :]
    total = tl.full((COLUMNS, BLOCK), 0, tl.float32)
    for step in range(steps):
        valid = first + step * TOKENS + token < num_tokens
        gathered = tl.load(gathered_ptrs, mask=valid[:, None] & present[None, :], other=0.0)
        shared = tl.load(shared_ptrs, mask=valid[:, None], other=0.0)
        total = _multiply(tl.trans(gathered), shared, total, PRECISION)
        gathered_ptrs += TOKENS * gathered_stride
        shared_ptrs += TOKENS * shared_stride
    if BY_COLUMN:
        slot = tl.load(slots_ptr + entry, mask=present, other=0)
        place = (slot * (BLOCK * BLOCK) + column % BLOCK * BLOCK)[:, None] + outer[None, :]
    else:
        place = (entry * (BLOCK * BLOCK) + column % BLOCK)[:, None] + (outer * BLOCK)[None, :]
    output_ptr += split * num_blocks * (BLOCK * BLOCK)
    tl.store(output_ptr + place, total.to(output_ptr.dtype.element_ty), mask=present[:, None])


def product(values: Tensor, lines: Lines, hidden: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return hidden [tokens, in] × a weight of lines of blocks [tokens, out], plus the bias.

    `lines` are the rows of blocks of the weight, or the columns if the product is with the weight itself (transposed).
    """
    num_blocks, block, _ = values.shape
    num_lines, tokens = len(lines.order), len(hidden)
    output = hidden.new_empty(tokens, num_lines * block)
    if output.numel() == 0:
        return output
    product_kernel[lambda chosen: (num_lines, triton.cdiv(tokens, chosen["TOKENS"]))](
        hidden,
        values,
        hidden if bias is None else bias,
        output,
        lines.starts,
        lines.others,
        lines.slots,
        lines.order,
        tokens,
        num_lines,
        num_blocks,
        triton.next_power_of_2(tokens),
        hidden.stride(0),
        output.stride(0),
        TRANSPOSED=transposed,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        PRECISION=_precision(),
    )
    return output


def weight_gradient(gradient: Tensor, hidden: Tensor, sections: Sections, block: int) -> Tensor:
    """Return the stored blocks of gradientᵀ [out, tokens] × hidden [tokens, in], in the gradient's dtype.

    The tokens are divided among programs if there are too few blocks to occupy the device, or so many that the inputs
    would not stay in the cache. The sums of the parts are then added in fp32 by a second kernel, in a fixed order.
    """
    by_column = len(sections.by_row.order) > len(sections.by_column.order)
    lines = sections.by_column if by_column else sections.by_row
    shared, gathered = (hidden, gradient) if by_column else (gradient, hidden)
    num_blocks, num_groups, tokens = len(lines.others), len(sections.groups.lines), len(hidden)
    if tokens == 0 or num_blocks == 0:
        return gradient.new_zeros(num_blocks, block, block)
    input_bytes, multiprocessors = gradient.nbytes + hidden.nbytes, MULTIPROCESSORS_WITHOUT_GPU
    if hidden.device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(hidden.device).multi_processor_count
    splits = _splits(num_groups, num_blocks * block**2, tokens, input_bytes, multiprocessors)
    split_tokens = triton.cdiv(triton.cdiv(tokens, splits), GRADIENT_TOKENS) * GRADIENT_TOKENS
    splits = triton.cdiv(tokens, split_tokens)
    dtype = gradient.dtype if splits == 1 else torch.float32
    sums = gradient.new_empty(splits, num_blocks, block, block, dtype=dtype)
    weight_gradient_kernel[(num_groups, splits)](
        gathered,
        shared,
        sums,
        *sections.groups,
        *lines[:3],
        tokens,
        len(lines.order),
        num_blocks,
        triton.next_power_of_2(tokens),
        split_tokens,
        gathered.stride(0),
        shared.stride(0),
        BY_COLUMN=by_column,
        BLOCK=block,
        PRECISION=_precision(),
        TOKENS=GRADIENT_TOKENS,
        COLUMNS=GROUP_COLUMNS,
    )
    return sums[0] if splits == 1 else sums.sum(0).to(gradient.dtype)


def _splits(num_groups: int, num_values: int, tokens: int, input_bytes: int, multiprocessors: int) -> int:
    """Return into how many parts the weight gradient divides the tokens.

    Where the groups of one part are more than the device runs at a time, some start when others are at its end. Parts
    are then so short that these find their inputs in the cache, unless writing and reading the sums of all parts, which
    are 8 bytes for each of `num_values` and part, would take more traffic than reading both inputs.
    """
    wanted: int = triton.cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors, num_groups)
    if num_groups > RESIDENT_PROGRAMS * multiprocessors:
        cached = triton.cdiv(input_bytes, CACHED_SPLIT_BYTES)
        wanted = max(wanted, min(cached, input_bytes // (8 * num_values)))
    return max(1, min(wanted, tokens // SMALLEST_SPLIT))


def _precision() -> str:
    """Return how fp32 numbers are multiplied: exactly, unless PyTorch itself may use TF32."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
