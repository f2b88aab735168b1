"""Sparse training: which blocks of a model's weights exist, and how the pattern of these blocks moves.

    wb.Experiment(..., sparsity=wb.sparsity.Dynamic(sparsity=0.9, block=16))

Weights outside of the pattern are zero throughout the training, as are their gradients. Dynamic patterns follow
Dietrich et al., "Towards structured dynamic sparse pre-training of BERT" (arXiv:2108.06277); regrowth by gradients is
RigL (arXiv:1911.11134). `workbench.sparsity.pattern` computes patterns,
and `workbench.sparsity.kernels` has products that leave absent blocks out.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from workbench.base.arguments import checked_arguments
from workbench.base.errors import InvalidExperiment
from workbench.base.validation import LargeCount, Line, Positive, Share, TrueOrFalse, checked_value, known

__all__ = ["Dynamic", "Static", "learning_rate"]


def __dir__() -> list[str]:
    return __all__


REGROWTH = ("random", "gradient")


@checked_value()
class Static:
    """A random pattern of blocks that stays as it is throughout the training."""

    sparsity: Share = 0.9
    """Share of the blocks of each weight that are absent."""
    block: LargeCount = 16
    """Rows and columns of a block."""
    scope: Line = "encoder"
    """Weights that become sparse: matrices whose name contains this word between dots, or matches this pattern
    (`fnmatch`, such as `"*.mlp.*"`). Embedding tables and output heads always stay dense."""
    rescaled: TrueOrFalse = False
    """True divides the initial weights by the square root of the present share, so that outputs of a layer vary as they
    do with all weights (Evci et al., arXiv:2010.03533): right for random weights, wrong for trained ones."""

    @property
    def label(self) -> str:
        """Return a short description, such as `90 % static 16×16`, or `90 % static 16×16, rescaled`."""
        pattern = f"{100 * self.sparsity:g} % {type(self).__name__.lower()} {self.block}×{self.block}"
        return pattern + (", rescaled" if self.rescaled else "")

    def covers(self, name: str) -> bool:
        """Return True if the parameter of this name is in the scope."""
        return f".{self.scope}." in f".{name}." or fnmatch.fnmatchcase(name, self.scope)

    def kept(self, blocks: int) -> int:
        """Return how many of the blocks of a weight are present."""
        return round((1 - self.sparsity) * blocks)

    def update_steps(self, steps: int) -> tuple[int, ...]:  # noqa: ARG002 - a static pattern has none
        """Return the numbers of completed steps, of `steps` in all, after which the pattern moves."""
        return ()

    def to_json(self) -> dict[str, Any]:
        """Return the fields, and the type, for `from_json`."""
        return {"type": type(self).__name__.lower(), **vars(self)}


@checked_value()
class Dynamic(Static):
    """A pattern that moves: at each update the smallest blocks are pruned, and equally many others regrow from zero.

    The size of a block is the sum of its absolute values. The share of blocks that is pruned falls from `prune_ratio`
    to 0 as a half cosine over the training. Regrown weights begin without optimiser state.
    """

    updates: LargeCount = 160
    """Number of updates of the pattern, at equal distances between the first step and the last."""
    prune_ratio: Annotated[Positive, Field(le=1)] = 0.5
    """Share of the present blocks that an update at the start would prune."""
    regrow: Annotated[str, PlainValidator(known(REGROWTH))] = "random"
    """Choice of the blocks that regrow among the absent ones: `random` without replacement, or `gradient` for those
    with the largest sum of absolute gradients of the weights, as if these were present."""

    @property
    def label(self) -> str:
        """Return a short description, such as `90 % dynamic 16×16, by gradient`."""
        return super().label + (", by gradient" if self.regrow == "gradient" else "")

    def update_steps(self, steps: int) -> tuple[int, ...]:
        """Return the numbers of completed steps, of `steps` in all, after which the pattern moves."""
        return tuple(-(-(update + 1) * steps // (self.updates + 1)) for update in range(self.updates))

    def ratio(self, step: int, steps: int) -> float:
        """Return the share of present blocks that an update after `step` of `steps` steps prunes."""
        return self.prune_ratio * 0.5 * (1 + math.cos(math.pi * step / steps))  # RigL's cosine decay (arXiv:1911.11134)


TYPES: Mapping[str, type[Static]] = {"static": Static, "dynamic": Dynamic}


def from_json(value: Mapping[str, Any]) -> Static:
    """Rebuild what `to_json` described."""
    fields = dict(value)
    return TYPES[fields.pop("type")](**fields)


@checked_arguments
def learning_rate(dense: float, sparsity: float) -> float:
    """Return the learning rate at a sparsity for a model whose best rate without sparsity is `dense`.

    The rule was fitted to BERT-Medium with random 16×16 and 1×1 patterns: η(s) = η(0) · exp(1.969 s² + 0.2905 s)
    (arXiv:2108.06277). Raises `InvalidExperiment` for a rate that is not above 0 and a sparsity outside of [0, 1).
    """
    if not 0 < dense < math.inf:
        raise InvalidExperiment(
            f"dense={dense!r} is no learning rate. Give one above 0, such as 2e-4.", parameter="dense"
        )
    if not 0 <= sparsity < 1:
        raise InvalidExperiment(
            f"sparsity={sparsity!r} is no share of blocks. Give a number from 0 to below 1, such as 0.9.",
            parameter="sparsity",
        )
    return dense * math.exp(1.969 * sparsity**2 + 0.2905 * sparsity)
