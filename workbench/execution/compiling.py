"""What the compiler is told besides its defaults."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import config
from torch._inductor.async_compile import maybe_warm_pool
from torch._inductor.choices import InductorChoices
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


def prepare() -> None:
    """For every compilation of this process from now on. Called early, it saves their wait for the compiler's helpers,
    processes that themselves import torch."""
    config.inductor_choices_class = Choices
    if torch.cuda.is_available():
        maybe_warm_pool()
