"""Configure PyTorch's compiler (Inductor): kernels of long rows, GELU in low precision, random numbers."""

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
"""Largest number of elements per row that a kernel keeps in registers. Inductor's own limit is 1,024: it reads longer
rows twice and computes everything fused into them twice."""


class LongRowChoices(InductorChoices):
    """Inductor's choices, except that reductions (LayerNorm) keep rows of up to `LONGEST_ROW` elements in registers."""

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        inner = features.get_reduction_hint() == ReductionHint.INNER
        if config.triton.persistent_reductions and inner and not cooperative_reduction:
            numel = features.reduction_numel
            if numel.is_number and int(numel) <= LONGEST_ROW:
                return True
        return bool(InductorChoices.should_use_persistent_reduction(features, cooperative_reduction))

    def uuid(self) -> str:
        """Return a part of the key under which Inductor caches compiled code."""
        return f"workbench: rows of {LONGEST_ROW}"


GELU, GELU_BACKWARD = torch.ops.aten.gelu.default, torch.ops.aten.gelu_backward.default
LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Dtypes for which GELU is computed as written here: its kernels read and write so little in these dtypes that the
error function, about 30 instructions, would be their bottleneck."""
_STOCK = {operation: decompositions[operation] for operation in (GELU, GELU_BACKWARD)}
_TAIL = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
_HALF_TAIL = tuple(factor / 2 for factor in _TAIL)
_TAIL_SCALE = 0.3275911 / math.sqrt(2)
_TANH_SCALE, _TANH_CUBE = math.sqrt(2 / math.pi), 0.044715


def prepare() -> None:
    """Configure the compiler for the rest of this process.

    An early call starts the compiler's helper processes, which import torch themselves, before a compilation waits for
    them.
    """
    config.inductor_choices_class = LongRowChoices
    # With this setting a recomputation draws from the generator state that its forward found, which `StepContext`
    # seeds. By default, on GPUs, the compiler uses generators of its own that are seeded once for all steps: masks
    # would depend on the number of steps this process has trained.
    functorch.graphsafe_rng_functionalization = False
    if torch.are_deterministic_algorithms_enabled():
        config.deterministic = True  # kernels chosen by their speed could add up in another order
    decompositions.update({GELU: _gelu, GELU_BACKWARD: _gelu_backward})
    fast_random_decomps.cache_clear()  # it caches a copy of `decompositions`
    if torch.cuda.is_available():
        maybe_warm_pool()


def _gelu(value: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """Compute GELU (Hendrycks and Gimpel, 2016) of bf16 and fp16 in fp32; for fp32 use Inductor's decomposition."""
    if value.dtype not in LOW_PRECISION:
        plain: torch.Tensor = _STOCK[GELU](value, approximate=approximate)
        return plain
    wide = value.float()
    share, _ = _share_and_slope(wide, approximate, _HALF_TAIL, 1.0)
    return (wide * share).to(value.dtype)


def _gelu_backward(gradient: torch.Tensor, value: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    if value.dtype not in LOW_PRECISION:
        plain: torch.Tensor = _STOCK[GELU_BACKWARD](gradient, value, approximate=approximate)
        return plain
    wide = value.float()
    # This computes the same numbers as the forward by other operations. If GELU is recomputed beside its backward, the
    # compiler would otherwise store the common share in fp32: as much memory as two of the bf16 tensors around it.
    share, slope = _share_and_slope(wide, approximate, _TAIL, 0.5)
    return (gradient.float() * (share + wide * slope)).to(value.dtype)


def _share_and_slope(
    value: torch.Tensor, approximate: str, tail_factors: Sequence[float], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the share of each fp32 element that GELU passes, and the derivative of that share.

    The share is the normal distribution function, with its tail by Abramowitz and Stegun, 7.1.26. Its error is below
    3e-7, a quarter of the error that PyTorch's own error function causes in GELU. `scale` times `tail_factors` must be
    half of `_TAIL`. With `approximate="tanh"`, (1 + tanh(u)) / 2 is computed as 1 / (1 + exp(-2 u)).
    """
    if approximate == "tanh":
        slope = 2 * _TANH_SCALE * (1 + 3 * _TANH_CUBE * value * value)
        share = torch.sigmoid(2 * _TANH_SCALE * value * (1 + _TANH_CUBE * value * value))
        return share, share * (1 - share) * slope
    bell = torch.exp(-0.5 * value * value)
    near = 1 / (1 + _TAIL_SCALE * value.abs())
    polynomial = tail_factors[0] * near + tail_factors[1]
    for factor in tail_factors[2:]:
        polynomial = polynomial * near + factor
    tail = polynomial * near * (scale * bell)
    return torch.where(value < 0, tail, 1 - tail), bell / math.sqrt(2 * math.pi)
