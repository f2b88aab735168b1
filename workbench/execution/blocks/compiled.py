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

from workbench.execution.blocks.fused_backward import FuseBackward

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
_BELL_SCALE = -0.5 * math.log2(math.e)
_TANH_SCALE, _TANH_CUBE = 2 * math.sqrt(2 / math.pi), 0.044715
_TANH_POWER = -math.log2(math.e) * _TANH_SCALE


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
    config.post_grad_custom_post_pass = FuseBackward()
    fast_random_decomps.cache_clear()  # it caches a copy of `decompositions`
    if torch.cuda.is_available():
        maybe_warm_pool()


def _gelu(value: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """Compute GELU (Hendrycks and Gimpel, 2016) of bf16 and fp16 in fp32; for fp32 use Inductor's decomposition."""
    if value.dtype not in LOW_PRECISION:
        plain: torch.Tensor = _STOCK[GELU](value, approximate=approximate)
        return plain
    wide = value.float()
    if approximate == "tanh":
        return (wide * _tanh_share(wide)).to(value.dtype)
    polynomial, bell = _tail(wide, _HALF_TAIL, 0)
    return (torch.where(wide > 0, wide, 0) - wide.abs() * polynomial * bell).to(value.dtype)


def _gelu_backward(gradient: torch.Tensor, value: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    if value.dtype not in LOW_PRECISION:
        plain: torch.Tensor = _STOCK[GELU_BACKWARD](gradient, value, approximate=approximate)
        return plain
    wide = value.float()
    if approximate == "tanh":
        share, square = _tanh_share(wide), wide * wide
        slope = share + wide * share * (1 - share) * (_TANH_SCALE + 3 * _TANH_SCALE * _TANH_CUBE * square)
    else:
        # This computes the same numbers as the forward by other operations. If GELU is recomputed beside its backward,
        # the compiler would otherwise store what they share in fp32: as much memory as two of the bf16 tensors.
        polynomial, bell = _tail(wide, _TAIL, -1)
        excess = bell * (math.sqrt(2 / math.pi) * wide.abs() - polynomial)
        slope = torch.where(wide < 0, -excess, 1 + excess)
    return (gradient.float() * slope).to(value.dtype)


def _tail(value: torch.Tensor, factors: Sequence[float], power: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a polynomial, and exp(-value^2 / 2) times 2 to the power `power`.

    With `_HALF_TAIL` and 0, or `_TAIL` and -1, their product is the share of a normal distribution beyond the absolute
    value (Abramowitz and Stegun, 7.1.26), with an error below 5e-7 in fp32. On an H200, a square root's reciprocal and
    a power of 2 take fewer instructions than a division and an exponential.
    """
    root = torch.rsqrt(1 + _TAIL_SCALE * value.abs())
    near = root * root
    polynomial = factors[0] * near + factors[1]
    for factor in factors[2:]:
        polynomial = polynomial * near + factor
    return polynomial * near, torch.exp2(_BELL_SCALE * value * value + power)


def _tanh_share(value: torch.Tensor) -> torch.Tensor:
    """Return (1 + tanh(u)) / 2, with u by GELU's approximation, as 1 / (1 + exp(-2 u))."""
    power = value * (_TANH_POWER + _TANH_POWER * _TANH_CUBE * value * value)
    root = torch.rsqrt(1 + torch.exp2(power))
    return root * root
