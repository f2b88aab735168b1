"""`TensorSpec`: name, shape and dtype of a tensor that need not exist."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of one tensor; `dtype` is torch's name without the `torch.`."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)  # as in `float8_e4m3fn`; `bool` alone has no number
        return self.numel * (1 if bits is None else int(bits[0]) // 8)

    @property
    def is_floating(self) -> bool:
        return self.dtype.startswith(("float", "bfloat", "complex"))

    def batched(self, batch: int) -> TensorSpec:
        """Return this spec of one sample with a leading batch dim."""
        return TensorSpec(self.name, (batch, *self.shape), self.dtype)


def spec_of(name: str, value: Any) -> TensorSpec:
    """Return the `TensorSpec` of a real, meta or fake tensor."""
    return TensorSpec(name, tuple(int(size) for size in value.shape), str(value.dtype).removeprefix("torch."))
