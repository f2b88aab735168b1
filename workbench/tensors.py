"""`TensorSpec`: name, shape and dtype of a tensor that need not exist."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element of each dtype, by torch's name without the `torch.`."""


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
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def is_floating(self) -> bool:
        return self.dtype.startswith(("float", "bfloat", "complex"))

    def batched(self, batch: int) -> TensorSpec:
        """Return this spec of one sample with a leading batch dim."""
        return TensorSpec(self.name, (batch, *self.shape), self.dtype)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}

    @staticmethod
    def from_json(value: dict[str, Any]) -> TensorSpec:
        return TensorSpec(value["name"], tuple(value["shape"]), value["dtype"])
