"""Triton kernels for what an update by AdamW or Muon does to every element, each in one pass over memory.

PyTorch's fused AdamW moves 28 bytes per weight. Clipping in front of it reads and writes every gradient once more
(8 bytes), and copying the new weights to bf16 reads them again (6 bytes). `adamw` multiplies gradients by a factor as
it reads them and writes the copies beside the weights: 30 bytes in all, or 28 with gradients in bf16.

Around Muon's matrix products, which are PyTorch's, its operations read and write a matrix some twenty times.
`move_momenta` reads gradients and momenta, and writes momenta and, where this rank sends them, directions in the dtype
of the products. `add_updates` reads weights and updates, and writes weights and their bf16 copies. `sum_of_squares`
reads gradients, for their norm.

The host launches few operations for all tensors together: where a model is small, it takes longer than the device.

Gradients are fp32 or bf16, and stay in memory as they were; all arithmetic is in fp32. One launch updates a list of
tensors: each program finds the addresses of its tensor in a table on the device. What these functions cannot read or
write they leave to PyTorch. With the environment variable `TRITON_INTERPRET=1`, set before Triton is imported, the
kernels run on the CPU, for tests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.optimizers.parameters import sent

ELEMENTS, WARPS = 2048, 8
"""Elements that a program updates, and its warps: each thread reads 32 bytes of each fp32 tensor."""
ALIGNMENT = tl.constexpr(16)
"""Multiple of bytes at which tensors must begin for wide loads; a gradient in a bucket may begin elsewhere."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
NOWHERE = -1
"""Offset of a direction that is not written."""
KNOWN_TABLES = 8
"""Tables that are kept on the device: gradients come and go, and soon lie where others lay before."""


class TensorTable:
    """The addresses of lists of tensors, on their device. They are sent only when they are none of the last ones."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self._known: dict[tuple[tuple[int, ...], ...], Tensor] = {}
        self._counts = torch.empty(0)
        self.table = self.programs = torch.empty(0)
        """The table, int64 [tensors, columns], and each program's tensor and part of it, int32 [programs, 2].

        Columns are the number of elements, 1 if what is read is bf16, address of the copy or offset of the direction,
        and addresses of what is read and of the state.
        """

    def fill(self, read: Sequence[Tensor], written: Sequence[Tensor | int | None], *state: Sequence[Tensor]) -> bool:
        """Fill the table and return True, or return False if the kernels cannot read or write one of the tensors.

        `read` are gradients or updates, in fp32 or bf16. `written` are weights' bf16 copies, None where there is none,
        or offsets of directions. `state` are lists of the fp32 tensors that change, as weights and momenta.
        """
        # A gradient may lie where the one before it did, in another order of dims.
        if not all(tensor.is_contiguous() for tensor in read):
            return False
        sizes = [tensor.numel() for tensor in read]
        halves = [int(tensor.dtype == torch.bfloat16) for tensor in read]
        places = [place.data_ptr() if isinstance(place, Tensor) else place or 0 for place in written]
        addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in (read, *state)]
        rows = list(zip(sizes, halves, places, *addresses, strict=True))
        if rows == self._rows:
            return True
        if not all(tensor.dtype in TYPES for tensor in read):
            return False
        if not all(t.dtype == torch.float32 and t.is_contiguous() for tensors in state for t in tensors):
            return False
        device, key = read[0].device, tuple(rows)
        self.table = self._known.pop(key) if key in self._known else sent(torch.tensor(rows), device)
        self._known[key] = self.table  # behind all others
        if len(self._known) > KNOWN_TABLES:
            del self._known[next(iter(self._known))]
        if sizes != [row[0] for row in self._rows]:
            parts = -(-torch.tensor(sizes) // ELEMENTS)
            tensor = torch.repeat_interleave(torch.arange(len(sizes)), parts)
            part = torch.arange(len(tensor)) - (parts.cumsum(0) - parts)[tensor]
            self.programs = sent(torch.stack([tensor, part], dim=1).int(), device)
        self._rows = rows
        return True

    def counts(self, states: Sequence[dict[str, Any]]) -> Tensor:
        """Return the counts `step` of optimiser states as one tensor [states], and make each of them a view of it."""
        addresses = [state["step"].data_ptr() for state in states]
        first, size = self._counts.data_ptr(), self._counts.itemsize
        if addresses != [first + index * size for index in range(self._counts.numel())]:
            self._counts = torch.stack([state["step"] for state in states])
            for state, count in zip(states, self._counts.unbind(), strict=True):
                state["step"] = count
        return self._counts

    def launch(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        """Let a kernel pass over the tensors."""
        if len(self.programs):
            kernel[(len(self.programs),)](
                self.table, self.programs, *arguments,
                COLUMNS=self.table.shape[1], ELEMENTS=ELEMENTS, num_warps=WARPS, **constants,
            )  # fmt: skip


def scalar(given: Tensor | None, default: float, device: torch.device) -> Tensor:
    """Return an fp32 scalar on the device: the given one, or one of the default."""
    return torch.full((), default, dtype=torch.float32, device=device) if given is None else given


def adamw(
    table: TensorTable,
    gradients: Sequence[Tensor],
    state: Sequence[Sequence[Tensor]],
    copies: Sequence[Tensor | None],
    states: Sequence[dict[str, Any]],
    group: Mapping[str, Any],
    *,
    factor: Tensor | None,
    skips: Tensor | None,
) -> bool:
    """Update parameters, first and second moments (`state`) by `torch.optim.AdamW`'s formulas.

    The `step` of the optimiser's `states` counts the updates. Gradients are multiplied by `factor`. Where `skips` is 1,
    nothing changes. Both are fp32 scalars on the device. Returns False, and does nothing, if the kernel cannot read or
    write one of the tensors.
    """
    if not table.fill(gradients, copies, *state):
        return False
    device = table.table.device
    counts = table.counts(states)
    counts += 1 if skips is None else 1 - skips
    factor, skips = scalar(factor, 1, device), scalar(skips, 0, device)
    rate, betas = group["lr"], group["betas"]
    logs = [math.log(beta) if beta else -math.inf for beta in betas]
    table.launch(adamw_kernel, counts, factor, skips, rate, *betas, *logs, rate * group["weight_decay"], group["eps"])
    return True


def move_momenta(
    table: TensorTable,
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    buffer: Tensor,
    sizes: Sequence[int],
    momentum: float,
    *,
    factor: Tensor | None,
    skips: Tensor | None,
) -> bool:
    """Move momenta towards gradients times `factor`, and write the directions ahead of them (Nesterov) to `buffer`.

    `sizes` are the elements of the directions that are written one after another, those of the first momenta. Where
    `skips` is 1, momenta stay, and are the directions. `factor` and `skips` are fp32 scalars on the device. Returns
    False, and does nothing, if the kernel cannot read or write one of the tensors.
    """
    offsets = [buffer.itemsize * begin for begin in itertools.accumulate(sizes[:-1], initial=0)][: len(sizes)]
    if not table.fill(gradients, offsets + [NOWHERE] * (len(momenta) - len(sizes)), momenta):
        return False
    scalars = scalar(factor, 1, buffer.device), scalar(skips, 0, buffer.device)
    table.launch(direction_kernel, *scalars, buffer.data_ptr(), 1 - momentum, DTYPE=TYPES[buffer.dtype])
    return True


def add_updates(
    table: TensorTable,
    parameters: Sequence[Tensor],
    updates: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    rates: Sequence[float],
    decays: Sequence[float],
    *,
    skips: Tensor | None,
) -> bool:
    """Take the part `decays` of each weight from it, and its update times its rate.

    Where `skips`, an fp32 scalar on the device, is 1, nothing changes. Returns False, and does nothing, if the kernel
    cannot read or write one of the tensors.
    """
    if not table.fill(updates, copies, parameters):
        return False
    device = table.table.device
    scales = sent(torch.tensor([rates, decays]), device)
    table.launch(update_kernel, scales, scalar(skips, 0, device), len(rates))
    return True


def sum_of_squares(table: TensorTable, tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the sum of the squares of all elements, an fp32 scalar on the device, or None if the kernel cannot read.

    The order of its summands is fixed, so that equal tensors at equally aligned addresses have the same sum.
    """
    if not table.fill(tensors, [None] * len(tensors)):
        return None
    parts = torch.empty(len(table.programs), device=table.table.device)
    table.launch(squares_kernel, parts)
    return parts.sum()


# Each kernel finds its program's elements and whether loads may be wide; the function behind it updates them.


@triton.jit
def adamw_kernel(
    table_ptr, programs_ptr, counts_ptr, factor_ptr, skips_ptr, rate, first_beta, second_beta, first_log, second_log,
    decay, eps, COLUMNS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Update `ELEMENTS` elements of one weight; `decay` is the part of it that weight decay takes.

    Counts are those of the updates, with this one; logs are those of the betas.
    """
    if tl.load(skips_ptr) == 0:
        program = programs_ptr + 2 * tl.program_id(0)
        tensor = tl.load(program).to(tl.int64)
        begin = tl.load(program + 1).to(tl.int64) * ELEMENTS
        row = table_ptr + tensor * COLUMNS
        left, half, copy = tl.load(row) - begin, tl.load(row + 1), tl.load(row + 2)
        gradient, parameter = tl.load(row + 3), tl.load(row + 4)
        first, second = tl.load(row + 5), tl.load(row + 6)
        count = tl.load(counts_ptr + tensor).to(tl.float64)  # 1 - beta ** count would lose digits in fp32
        step_size = rate / (1 - tl.exp(count * first_log)).to(tl.float32)
        scale = 1 / tl.sqrt(1 - tl.exp(count * second_log)).to(tl.float32)
        factor = tl.load(factor_ptr)
        if left >= ELEMENTS and (parameter | gradient | first | second | copy) % ALIGNMENT == 0:
            _update(
                parameter, gradient, first, second, copy, half, begin, left, factor, step_size, scale,
                first_beta, second_beta, decay, eps, True, ELEMENTS,
            )  # fmt: skip
        else:
            _update(
                parameter, gradient, first, second, copy, half, begin, left, factor, step_size, scale,
                first_beta, second_beta, decay, eps, False, ELEMENTS,
            )  # fmt: skip


@triton.jit
def _update(
    parameter, gradient, first, second, copy, half, begin, left, factor, step_size, scale,
    first_beta, second_beta, decay, eps, WIDE: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    inside = None if WIDE else tl.arange(0, ELEMENTS) < left
    weights = pointers_to(parameter, begin, tl.float32, WIDE, ELEMENTS)
    firsts = pointers_to(first, begin, tl.float32, WIDE, ELEMENTS)
    seconds = pointers_to(second, begin, tl.float32, WIDE, ELEMENTS)
    weight = tl.load(weights, mask=inside)
    slope = loaded(gradient, half, begin, left, WIDE, ELEMENTS) * factor
    mean = tl.load(firsts, mask=inside)
    variance = tl.load(seconds, mask=inside)
    square = slope * slope
    weight -= decay * weight
    mean = tl.fma(mean, first_beta, tl.fma(slope, -first_beta, slope))
    variance = tl.fma(variance, second_beta, tl.fma(square, -second_beta, square))
    weight -= step_size * mean / (tl.sqrt(variance) * scale + eps)
    tl.store(weights, weight, mask=inside)
    tl.store(firsts, mean, mask=inside)
    tl.store(seconds, variance, mask=inside)
    store(copy, weight, begin, left, tl.bfloat16, WIDE, ELEMENTS)


@triton.jit
def direction_kernel(
    table_ptr, programs_ptr, factor_ptr, skips_ptr, buffer, part,
    COLUMNS: tl.constexpr, DTYPE: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Move `ELEMENTS` elements of one momentum; `part` is what it takes of a gradient.

    Directions are written to the address `buffer`.
    """
    program = programs_ptr + 2 * tl.program_id(0)
    begin = tl.load(program + 1).to(tl.int64) * ELEMENTS
    row = table_ptr + tl.load(program).to(tl.int64) * COLUMNS
    left, half, offset = tl.load(row) - begin, tl.load(row + 1), tl.load(row + 2)
    gradient, momentum = tl.load(row + 3), tl.load(row + 4)
    direction = buffer + offset if offset >= 0 else offset * 0
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
    inside = None if WIDE else tl.arange(0, ELEMENTS) < left
    means = pointers_to(momentum, begin, tl.float32, WIDE, ELEMENTS)
    mean = tl.load(means, mask=inside)
    slope = loaded(gradient, half, begin, left, WIDE, ELEMENTS)
    slope = tl.where(skips != 0, mean, slope * factor)
    mean += part * (slope - mean)
    tl.store(means, mean, mask=inside)
    store(direction, mean - part * (mean - slope), begin, left, DTYPE, WIDE, ELEMENTS)


@triton.jit
def update_kernel(table_ptr, programs_ptr, rates_ptr, skips_ptr, count, COLUMNS: tl.constexpr, ELEMENTS: tl.constexpr):
    """Add the update to `ELEMENTS` elements of one of `count` weights."""
    if tl.load(skips_ptr) == 0:
        program = programs_ptr + 2 * tl.program_id(0)
        tensor = tl.load(program).to(tl.int64)
        begin = tl.load(program + 1).to(tl.int64) * ELEMENTS
        row = table_ptr + tensor * COLUMNS
        left, half, copy = tl.load(row) - begin, tl.load(row + 1), tl.load(row + 2)
        update, parameter = tl.load(row + 3), tl.load(row + 4)
        rate, decay = tl.load(rates_ptr + tensor), tl.load(rates_ptr + count + tensor)
        if left >= ELEMENTS and (parameter | update | copy) % ALIGNMENT == 0:
            _add(parameter, update, copy, half, begin, left, rate, decay, True, ELEMENTS)
        else:
            _add(parameter, update, copy, half, begin, left, rate, decay, False, ELEMENTS)


@triton.jit
def _add(
    parameter, update, copy, half, begin, left, rate, decay, WIDE: tl.constexpr, ELEMENTS: tl.constexpr
):  # fmt: skip
    inside = None if WIDE else tl.arange(0, ELEMENTS) < left
    weights = pointers_to(parameter, begin, tl.float32, WIDE, ELEMENTS)
    weight = tl.load(weights, mask=inside)
    change = loaded(update, half, begin, left, WIDE, ELEMENTS)
    weight -= decay * weight
    weight -= rate * change
    tl.store(weights, weight, mask=inside)
    store(copy, weight, begin, left, tl.bfloat16, WIDE, ELEMENTS)


@triton.jit
def squares_kernel(table_ptr, programs_ptr, parts_ptr, COLUMNS: tl.constexpr, ELEMENTS: tl.constexpr):
    """Write the sum of the squares of `ELEMENTS` elements of one tensor."""
    number = tl.program_id(0)
    begin = tl.load(programs_ptr + 2 * number + 1).to(tl.int64) * ELEMENTS
    row = table_ptr + tl.load(programs_ptr + 2 * number).to(tl.int64) * COLUMNS
    left, half, address = tl.load(row) - begin, tl.load(row + 1), tl.load(row + 3)
    if left >= ELEMENTS and address % ALIGNMENT == 0:
        elements = loaded(address, half, begin, left, True, ELEMENTS)
        tl.store(parts_ptr + number, tl.sum(elements * elements))
    else:
        elements = tl.where(tl.arange(0, ELEMENTS) < left, loaded(address, half, begin, left, False, ELEMENTS), 0.0)
        tl.store(parts_ptr + number, tl.sum(elements * elements))


# An address is that of a tensor's first element. If `WIDE`, it is a multiple of `ALIGNMENT`, and all `ELEMENTS` behind
# `begin` belong to the tensor; otherwise only the first `left` of them.


@triton.jit
def pointers_to(address, begin, DTYPE: tl.constexpr, WIDE: tl.constexpr, ELEMENTS: tl.constexpr):
    pointer = address.to(tl.pointer_type(DTYPE))
    return (tl.multiple_of(pointer, ALIGNMENT) if WIDE else pointer) + begin + tl.arange(0, ELEMENTS)


@triton.jit
def loaded(address, half, begin, left, WIDE: tl.constexpr, ELEMENTS: tl.constexpr):
    """Return elements of a gradient or an update in fp32; it is bf16 if `half` is 1."""
    inside = None if WIDE else tl.arange(0, ELEMENTS) < left
    if half != 0:
        elements = tl.load(pointers_to(address, begin, tl.bfloat16, WIDE, ELEMENTS), mask=inside).to(tl.float32)
    else:
        elements = tl.load(pointers_to(address, begin, tl.float32, WIDE, ELEMENTS), mask=inside)
    return elements


@triton.jit
def store(address, elements, begin, left, DTYPE: tl.constexpr, WIDE: tl.constexpr, ELEMENTS: tl.constexpr):
    """Write elements in this dtype, unless the address is 0."""
    if address != 0:
        inside = None if WIDE else tl.arange(0, ELEMENTS) < left
        tl.store(pointers_to(address, begin, DTYPE, WIDE, ELEMENTS), elements.to(DTYPE), mask=inside)
