"""`ModelSource`: the role that every model plays for an experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn


class ModelSource(Protocol):
    """A description of a model, from which every rank builds the same module."""

    @property
    def name(self) -> str:
        """Short name for tables and messages."""

    @property
    def objective(self) -> str | None:
        """Training objective (`mlm_nsp`, `mlm` or `clm`), from which data choose their fields; None if unknown."""

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding; None if unknown."""

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the model accepts, in tokens; None if unknown."""

    @property
    def is_user_defined(self) -> bool:
        """Return True if a user-defined callable builds the model, which JSON can only name."""

    @property
    def is_loaded(self) -> bool:
        """Return True unless only the description of a user-defined callable is here."""

    def build(self) -> nn.Module:
        """Return the module in train mode, with fresh weights, on the ambient device."""

    def to_json(self) -> dict[str, Any]:
        """Return a description from which `workbench.models.from_json` rebuilds this value."""
