"""AdamW's update of a list of tensors in one Triton kernel, which also scales gradients and writes bf16 copies.

PyTorch's fused update moves 28 bytes per weight. Clipping in front of it reads and writes every gradient once more
(8 bytes), and copying the new weights to bf16 reads them again (6 bytes). This kernel multiplies gradients by a factor
as it reads them and writes the copies beside the weights: 30 bytes in all, or 28 with gradients in bf16. Gradients stay
in memory as they were.

With the environment variable `TRITON_INTERPRET=1`, set before Triton is imported, it runs on the CPU, for tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS, WARPS = 2048, 8
"""Elements that a program updates, and its warps: each thread reads 32 bytes of each tensor."""
ALIGNMENT = tl.constexpr(16)
"""Multiple of bytes at which tensors must begin for wide loads; a gradient in a bucket may begin elsewhere."""
COLUMNS = tl.constexpr(7)
"""Columns of the table of tensors: addresses of parameter, gradient, both moments and copy, 1 if the gradient is bf16,
and number of elements."""


class TensorTable:
    """The addresses of one list of tensors, on their device. They are sent only when one of them has changed."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self.table = self.programs = torch.empty(0)
        """The table, int64 [tensors, columns], and each program's tensor and part of it, int32 [programs, 2]."""

    def has(self, rows: list[tuple[int, ...]]) -> bool:
        return rows == self._rows

    def fill(self, rows: list[tuple[int, ...]], device: torch.device) -> None:
        """Fill the table; the last column of each row is the number of elements of the tensor."""
        if self.has(rows):
            return
        sizes = [row[-1] for row in rows]
        self.table = sent(torch.tensor(rows), device)
        if sizes != [row[-1] for row in self._rows]:
            parts = -(-torch.tensor(sizes) // ELEMENTS)
            tensor = torch.repeat_interleave(torch.arange(len(sizes)), parts)
            part = torch.arange(len(tensor)) - (parts.cumsum(0) - parts)[tensor]
            self.programs = sent(torch.stack([tensor, part], dim=1).int(), device)
        self._rows = rows


def fill(table: TensorTable, tensors: Sequence[Sequence[Tensor]], copies: Sequence[Tensor | None]) -> bool:
    """Fill a table and return True, or return False if the kernel cannot update one of the tensors.

    `tensors` are the parameters, their gradients in fp32 or bf16, and their first and second moments.
    """
    # A gradient may lie where the one before it did, in another order of dims.
    if not all(gradient.is_contiguous() for gradient in tensors[1]):
        return False
    sizes = [parameter.numel() for parameter in tensors[0]]
    copied = [0 if copy is None else copy.data_ptr() for copy in copies]
    halves = [int(gradient.dtype == torch.bfloat16) for gradient in tensors[1]]
    rows = list(zip(*([t.data_ptr() for t in each] for each in tensors), copied, halves, sizes, strict=True))
    if table.has(rows):
        return True
    if not all(gradient.dtype in (torch.float32, torch.bfloat16) for gradient in tensors[1]):
        return False
    if not all(t.dtype == torch.float32 and t.is_contiguous() for t in [*tensors[0], *tensors[2], *tensors[3]]):
        return False
    table.fill(rows, tensors[0][0].device)
    return True


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; the host does not wait for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def update(
    table: TensorTable,
    steps: Sequence[Tensor],
    *,
    factor: Tensor | None,
    skips: Tensor | None,
    rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
) -> None:
    """Update the tensors of a table once, by `torch.optim.AdamW`'s formulas in fp32, and count their `steps`.

    Gradients are multiplied by `factor`. Where `skips` is 1, nothing changes. Both are fp32 scalars on the device.
    """
    factor = torch.ones_like(steps[0]) if factor is None else factor
    skips = torch.zeros_like(steps[0]) if skips is None else skips
    # Without `alpha`, PyTorch takes the scalar tensor for a number, which it reads: the host would wait for the device.
    torch._foreach_add_(list(steps), 1 - skips, alpha=1)
    counts = torch.stack(list(steps)).double()
    corrections = torch.stack([1 - betas[0] ** counts, (1 - betas[1] ** counts).sqrt()], dim=1).float()
    if len(table.programs):
        adamw_kernel[(len(table.programs),)](
            table.table, table.programs, corrections, factor, skips, rate, *betas, rate * weight_decay, eps,
            ELEMENTS=ELEMENTS, num_warps=WARPS,
        )  # fmt: skip


@triton.jit
def adamw_kernel(
    table_ptr,
    programs_ptr,
    corrections_ptr,
    factor_ptr,
    skips_ptr,
    rate,
    first_beta,
    second_beta,
    decay,
    eps,
    ELEMENTS: tl.constexpr,
):
    """Update `ELEMENTS` elements of one tensor; `decay` is the part of a weight that weight decay takes."""
    if tl.load(skips_ptr) == 0:
        program = programs_ptr + 2 * tl.program_id(0)
        tensor = tl.load(program).to(tl.int64)
        begin = tl.load(program + 1).to(tl.int64) * ELEMENTS
        row = table_ptr + tensor * COLUMNS
        parameter, gradient = tl.load(row), tl.load(row + 1)
        first, second, copy = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
        half = tl.load(row + 5)
        left = tl.load(row + 6) - begin
        step_size = rate / tl.load(corrections_ptr + 2 * tensor)
        scale = 1 / tl.load(corrections_ptr + 2 * tensor + 1)
        factor = tl.load(factor_ptr)
        if left >= ELEMENTS and (parameter | gradient | first | second | copy) % ALIGNMENT == 0:
            _update(
                parameter, gradient, first, second, copy, half, begin, left, factor, step_size, scale,
                first_beta, second_beta, decay, eps, WIDE=True, ELEMENTS=ELEMENTS,
            )  # fmt: skip
        else:
            _update(
                parameter, gradient, first, second, copy, half, begin, left, factor, step_size, scale,
                first_beta, second_beta, decay, eps, WIDE=False, ELEMENTS=ELEMENTS,
            )  # fmt: skip


@triton.jit
def _update(
    parameter,
    gradient,
    first,
    second,
    copy,
    half,
    begin,
    left,
    factor,
    step_size,
    scale,
    first_beta,
    second_beta,
    decay,
    eps,
    WIDE: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Update the elements behind `begin` of the tensors at these addresses; all of them are there if `WIDE`."""
    place = tl.arange(0, ELEMENTS)
    inside = None if WIDE else place < left
    weights = pointer_to(parameter, tl.float32, WIDE) + begin + place
    firsts = pointer_to(first, tl.float32, WIDE) + begin + place
    seconds = pointer_to(second, tl.float32, WIDE) + begin + place
    weight = tl.load(weights, mask=inside)
    if half != 0:
        slope = tl.load(pointer_to(gradient, tl.bfloat16, WIDE) + begin + place, mask=inside).to(tl.float32)
    else:
        slope = tl.load(pointer_to(gradient, tl.float32, WIDE) + begin + place, mask=inside)
    slope *= factor
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
    if copy != 0:
        tl.store(pointer_to(copy, tl.bfloat16, WIDE) + begin + place, weight.to(tl.bfloat16), mask=inside)


@triton.jit
def pointer_to(address, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """Return a pointer to an address, a multiple of `ALIGNMENT` if `WIDE`."""
    pointer = address.to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, ALIGNMENT) if WIDE else pointer
