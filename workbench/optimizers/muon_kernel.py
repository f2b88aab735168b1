"""Muon's passes over memory in two Triton kernels; the products between them are PyTorch's.

PyTorch's operations read and write a matrix some twenty times in an update. `directions` reads gradients and momenta,
and writes momenta and, where this rank sends them, directions in the dtype of the products. `add` reads weights and
updates, and writes weights and their bf16 copies. A skipped update changes neither momenta nor weights.

With the environment variable `TRITON_INTERPRET=1`, set before Triton is imported, they run on the CPU, for tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.optimizers.adamw_kernel import ALIGNMENT, ELEMENTS, WARPS, TensorTable, pointer_to, sent

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
NOWHERE = -1
"""Offset of a direction that is not written."""
DIRECTION_COLUMNS, UPDATE_COLUMNS = tl.constexpr(5), tl.constexpr(4)
"""Columns of the tables: addresses of gradient and momentum, offset of the direction in its buffer, 1 if the gradient
is bf16, number of elements; and addresses of parameter, update and copy, number of elements."""


def fill_directions(
    table: TensorTable, gradients: Sequence[Tensor], momenta: Sequence[Tensor], sizes: Sequence[int]
) -> bool:
    """Fill a table and return True, or return False if the kernel cannot read or write one of the tensors.

    `sizes` are the elements of the directions that are written one after another, those of the first momenta.
    """
    if not all(gradient.is_contiguous() for gradient in gradients):
        return False
    offsets = [*itertools.accumulate(sizes[:-1], initial=0)][: len(sizes)] + [NOWHERE] * (len(momenta) - len(sizes))
    halves = [int(gradient.dtype == torch.bfloat16) for gradient in gradients]
    addresses = ([t.data_ptr() for t in each] for each in (gradients, momenta))
    rows = list(zip(*addresses, offsets, halves, [momentum.numel() for momentum in momenta], strict=True))
    if not table.has(rows):
        if not all(gradient.dtype in (torch.float32, torch.bfloat16) for gradient in gradients):
            return False
        if not all(momentum.dtype == torch.float32 and momentum.is_contiguous() for momentum in momenta):
            return False
        table.fill(rows, momenta[0].device)
    return True


def fill_updates(
    table: TensorTable, parameters: Sequence[Tensor], updates: Sequence[Tensor], copies: Sequence[Tensor | None]
) -> bool:
    """Fill a table and return True, or return False if the kernel cannot read or write one of the tensors.

    Updates are of one dtype.
    """
    if not all(update.is_contiguous() and update.dtype == updates[0].dtype for update in updates):
        return False
    copied = [0 if copy is None else copy.data_ptr() for copy in copies]
    addresses = ([t.data_ptr() for t in each] for each in (parameters, updates))
    rows = list(zip(*addresses, copied, [parameter.numel() for parameter in parameters], strict=True))
    if not table.has(rows):
        if not all(parameter.dtype == torch.float32 and parameter.is_contiguous() for parameter in parameters):
            return False
        table.fill(rows, parameters[0].device)
    return True


def directions(
    table: TensorTable, buffer: Tensor, momentum: float, *, factor: Tensor | None, skips: Tensor | None
) -> None:
    """Move momenta towards gradients times `factor`, and write the directions ahead of them (Nesterov) to `buffer`.

    Where `skips` is 1, momenta stay, and are the directions. Both are fp32 scalars on the device.
    """
    if len(table.programs):
        one, zero = torch.ones((), device=buffer.device), torch.zeros((), device=buffer.device)
        direction_kernel[(len(table.programs),)](
            table.table, table.programs, one if factor is None else factor, zero if skips is None else skips,
            buffer.data_ptr(), 1 - momentum,
            DTYPE=TYPES[buffer.dtype], ITEM=buffer.itemsize, ELEMENTS=ELEMENTS, num_warps=WARPS,
        )  # fmt: skip


def add(
    table: TensorTable,
    rates: Sequence[float],
    decays: Sequence[float],
    *,
    dtype: torch.dtype,
    skips: Tensor | None,
) -> None:
    """Take the part `decays` of each weight from it, and its update, of this dtype, times its rate.

    Where `skips`, an fp32 scalar on the device, is 1, nothing changes.
    """
    if len(table.programs):
        device = table.table.device
        update_kernel[(len(table.programs),)](
            table.table, table.programs, sent(torch.tensor([rates, decays]), device),
            torch.zeros((), device=device) if skips is None else skips, len(rates),
            DTYPE=TYPES[dtype], ELEMENTS=ELEMENTS, num_warps=WARPS,
        )  # fmt: skip


@triton.jit
def direction_kernel(
    table_ptr, programs_ptr, factor_ptr, skips_ptr, buffer, part,
    DTYPE: tl.constexpr, ITEM: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Move `ELEMENTS` elements of one momentum; `part` is what it takes of a gradient.

    Directions are written to the address `buffer`, in elements of `ITEM` bytes.
    """
    program = programs_ptr + 2 * tl.program_id(0)
    begin = tl.load(program + 1).to(tl.int64) * ELEMENTS
    row = table_ptr + tl.load(program).to(tl.int64) * DIRECTION_COLUMNS
    gradient, momentum, offset, half = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    left = tl.load(row + 4) - begin
    direction = buffer + offset * ITEM if offset >= 0 else offset * 0
    factor, skips = tl.load(factor_ptr), tl.load(skips_ptr)
    if left >= ELEMENTS and (gradient | momentum | direction) % ALIGNMENT == 0:
        _move(gradient, momentum, direction, half, begin, left, factor, skips, part, DTYPE, True, ELEMENTS)
    else:
        _move(gradient, momentum, direction, half, begin, left, factor, skips, part, DTYPE, False, ELEMENTS)


@triton.jit
def _move(
    gradient, momentum, direction, half, begin, left, factor, skips, part,
    DTYPE: tl.constexpr, WIDE: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Move the elements behind `begin` of the momentum at this address; all of them are there if `WIDE`."""
    place = tl.arange(0, ELEMENTS)
    inside = None if WIDE else place < left
    means = pointer_to(momentum, tl.float32, WIDE) + begin + place
    mean = tl.load(means, mask=inside)
    if half != 0:
        slope = tl.load(pointer_to(gradient, tl.bfloat16, WIDE) + begin + place, mask=inside).to(tl.float32)
    else:
        slope = tl.load(pointer_to(gradient, tl.float32, WIDE) + begin + place, mask=inside)
    slope = tl.where(skips != 0, mean, slope * factor)
    mean += part * (slope - mean)
    tl.store(means, mean, mask=inside)
    if direction != 0:
        ahead = mean - part * (mean - slope)
        tl.store(pointer_to(direction, DTYPE, WIDE) + begin + place, ahead.to(DTYPE), mask=inside)


@triton.jit
def update_kernel(table_ptr, programs_ptr, rates_ptr, skips_ptr, count, DTYPE: tl.constexpr, ELEMENTS: tl.constexpr):
    """Update `ELEMENTS` elements of one of `count` weights."""
    if tl.load(skips_ptr) == 0:
        program = programs_ptr + 2 * tl.program_id(0)
        tensor = tl.load(program).to(tl.int64)
        begin = tl.load(program + 1).to(tl.int64) * ELEMENTS
        row = table_ptr + tensor * UPDATE_COLUMNS
        parameter, update, copy = tl.load(row), tl.load(row + 1), tl.load(row + 2)
        left = tl.load(row + 3) - begin
        rate, decay = tl.load(rates_ptr + tensor), tl.load(rates_ptr + count + tensor)
        if left >= ELEMENTS and (parameter | update | copy) % ALIGNMENT == 0:
            _add(parameter, update, copy, begin, left, rate, decay, DTYPE, True, ELEMENTS)
        else:
            _add(parameter, update, copy, begin, left, rate, decay, DTYPE, False, ELEMENTS)


@triton.jit
def _add(
    parameter, update, copy, begin, left, rate, decay,
    DTYPE: tl.constexpr, WIDE: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Update the elements behind `begin` of the weight at this address; all of them are there if `WIDE`."""
    place = tl.arange(0, ELEMENTS)
    inside = None if WIDE else place < left
    weights = pointer_to(parameter, tl.float32, WIDE) + begin + place
    weight = tl.load(weights, mask=inside)
    change = tl.load(pointer_to(update, DTYPE, WIDE) + begin + place, mask=inside).to(tl.float32)
    weight -= decay * weight
    weight -= rate * change
    tl.store(weights, weight, mask=inside)
    if copy != 0:
        tl.store(pointer_to(copy, tl.bfloat16, WIDE) + begin + place, weight.to(tl.bfloat16), mask=inside)
