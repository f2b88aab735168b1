"""What the compiler is told besides its defaults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch import config as functorch
from torch._inductor import config
from torch._inductor.async_compile import maybe_warm_pool
from torch._inductor.choices import InductorChoices
from torch._inductor.decomposition import decompositions, fast_random_decomps
from torch._inductor.runtime.hints import ReductionHint

LONGEST_ROW = 2048
"""Elements of a row that a kernel holds in registers. Inductor's own limit is 1,024; longer rows are read twice, and
all that is fused into them is computed twice."""


class Choices(InductorChoices):
    """Inductor's, but for LayerNorm and its like over rows of up to `LONGEST_ROW` elements."""

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        inner = features.get_reduction_hint() == ReductionHint.INNER
        if config.triton.persistent_reductions and inner and not cooperative_reduction:
            numel = features.reduction_numel
            if numel.is_number and int(numel) <= LONGEST_ROW:
                return True
        return bool(InductorChoices.should_use_persistent_reduction(features, cooperative_reduction))

    def uuid(self) -> str:
        """Part of the key under which compiled code is kept."""
        return f"workbench: rows of {LONGEST_ROW}"


GELU, GELU_BACKWARD = torch.ops.aten.gelu.default, torch.ops.aten.gelu_backward.default
HALVES = (torch.bfloat16, torch.float16)
"""Of these, GELU is computed as written here: its kernels read and write so little that the error function, about 30
instructions, is what they wait for."""
_STOCK = {operation: decompositions[operation] for operation in (GELU, GELU_BACKWARD)}
_TAIL = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
_HALF_TAIL = tuple(factor / 2 for factor in _TAIL)
_TAIL_SCALE = 0.3275911 / math.sqrt(2)
_TANH_SCALE, _TANH_CUBE = math.sqrt(2 / math.pi), 0.044715


def prepare() -> None:
    """For every compilation of this process from now on. Called early, it saves their wait for the compiler's helpers,
    processes that themselves import torch."""
    config.inductor_choices_class = Choices
    # What is computed again draws its random numbers from the state that its forward found, which `StepContext` seeds.
    # Otherwise, on GPUs, from generators of the compiler's own, seeded once for all steps: masks would depend on how
    # many steps this process has trained.
    functorch.graphsafe_rng_functionalization = False
    if torch.are_deterministic_algorithms_enabled():
        config.deterministic = True  # no kernel is chosen by how fast it ran: another would add up in another order
    decompositions.update({GELU: _gelu, GELU_BACKWARD: _gelu_backward})
    fast_random_decomps.cache_clear()  # a copy of `decompositions`
    if torch.cuda.is_available():
        maybe_warm_pool()


def _gelu(value: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """GELU (Hendrycks and Gimpel, 2016) of bf16 and fp16, computed in fp32; fp32 stays as Inductor has it."""
    if value.dtype not in HALVES:
        plain: torch.Tensor = _STOCK[GELU](value, approximate=approximate)
        return plain
    wide = value.float()
    share, _ = _share_and_slope(wide, approximate, _HALF_TAIL, 1.0)
    return (wide * share).to(value.dtype)


def _gelu_backward(gradient: torch.Tensor, value: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    if value.dtype not in HALVES:
        plain: torch.Tensor = _STOCK[GELU_BACKWARD](gradient, value, approximate=approximate)
        return plain
    wide = value.float()
    # The same numbers by other operations: where GELU is computed again beside its backward, the compiler would keep
    # the share that both read, in fp32: as much memory as two of the tensors that they read and write.
    share, slope = _share_and_slope(wide, approximate, _TAIL, 0.5)
    return (gradient.float() * (share + wide * slope)).to(value.dtype)


def _share_and_slope(
    value: torch.Tensor, approximate: str, tail_factors: Sequence[float], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What GELU lets through of each fp32 element, and that share's derivative; `scale` times the factors is half of
    `_TAIL`.

    The normal distribution, its tail by Abramowitz and Stegun, 7.1.26: within 3e-7, a quarter of what PyTorch's own
    error function is off for GELU. For `tanh`, (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)).
    """
    if approximate == "tanh":
        slope = 2 * _TANH_SCALE * (1 + 3 * _TANH_CUBE * value * value)
        share = torch.sigmoid(2 * _TANH_SCALE * value * (1 + _TANH_CUBE * value * value))
        return share, share * (1 - share) * slope
    bell = torch.exp(-0.5 * value * value)
    near = 1 / (1 + _TAIL_SCALE * value.abs())
    tail = _polynomial(tail_factors, near) * near * (scale * bell)
    return torch.where(value < 0, tail, 1 - tail), bell / math.sqrt(2 * math.pi)


def _polynomial(factors: Sequence[float], value: torch.Tensor) -> torch.Tensor:
    """Of `value`, the factor of its highest power first."""
    result = factors[0] * value + factors[1]
    for factor in factors[2:]:
        result = result * value + factor
    return result
