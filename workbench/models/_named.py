"""`Model`: one configuration of a `transformers` architecture, as a value."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.errors import InvalidExperiment

if TYPE_CHECKING:
    from torch import nn

LAYOUTS = ("post_ln", "pre_ln")
SIZES = ("hidden_size", "num_layers", "num_heads", "intermediate_size", "vocab_size", "max_positions")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A transformer of a known family (`bert`, `gpt2`, `opt`) at one size.

    Raises `InvalidExperiment` for sizes that cannot make a model.
    """

    name: str
    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    """Rows of the embedding; the data's token ids must be smaller."""
    max_positions: int
    dropout: float
    layout: str = "pre_ln"
    """Where the normalisation stands: `post_ln` after each residual sum, `pre_ln` before each sub-layer."""
    next_sentence: bool = False
    """Whether a BERT is also trained to tell true continuations from random ones."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        for field in SIZES:
            _require_positive_integer(field, getattr(self, field))
        if self.hidden_size % self.num_heads:
            raise InvalidExperiment(
                f"hidden_size={self.hidden_size} is not divisible by num_heads={self.num_heads}. "
                f"Give hidden_size={self.num_heads * max(1, round(self.hidden_size / self.num_heads))}, or "
                f"num_heads={_nearest_divisor(self.hidden_size, self.num_heads)}.",
                hidden_size=self.hidden_size,
                num_heads=self.num_heads,
            )
        if not 0 <= self.dropout < 1:
            raise InvalidExperiment(
                f"dropout={self.dropout!r} is not a probability below 1. Give 0 to switch dropout off.",
                dropout=self.dropout,
            )
        _require_positive_number("initializer_range", self.initializer_range)

    @property
    def objective(self) -> str:
        """What the model is trained on: `mlm_nsp`, `mlm` or `clm`; the data room makes the fields it takes."""
        if self.family != "bert":
            return "clm"
        return "mlm_nsp" if self.next_sentence else "mlm"

    @property
    def is_custom(self) -> bool:
        return False

    def build(self) -> nn.Module:
        """The module in train mode with fresh weights, on the ambient device.

        Under `with torch.device("meta")` nothing is allocated. Input and output embeddings are one
        parameter, as in `transformers`.
        """
        from workbench.models import _hugging_face

        return _hugging_face.build(self)

    def to_json(self) -> dict[str, Any]:
        return {"type": "named", **dataclasses.asdict(self)}


def _require_positive_integer(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidExperiment(
            f"{field}={value!r} must be a whole number of at least 1.", parameter=field, value=value
        )


def _require_positive_number(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidExperiment(
            f"{field}={value!r} must be a finite number above 0. Give 0.02, or about 1/sqrt(hidden_size) for a "
            "narrow model.",
            parameter=field,
            value=value,
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))
