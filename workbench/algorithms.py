"""The optimisers that an experiment can name, one record each: what builds one, and what plans must know of it.

To add one, add a record to `ALGORITHMS` and the function that it names. Planner, cost model, ranks, the rule of widths
and refusals read the record; nothing else knows an optimiser by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

ELEMENT, TENSOR, MODEL = "element", "tensor", "model"
"""Reach of an update: the new value of an element depends on that element alone, on its tensor, or on other tensors."""


@dataclass(frozen=True, kw_only=True)
class WidthRule:
    """The rule of widths (`wb.models.scaling`) for one optimiser, from whose update its factors are derived."""

    counts_depth: bool
    """Default of `depth_rule`: True if the factors count the ratio of the depths as well."""
    matrices_as_base: bool = False
    """True if hidden matrices learn and decay as those of the base model, since an update has one size at any width."""
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Values of `wb.Optimizer` without which the factors are wrong."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One optimiser. The defaults are those of an optimiser of the user's, of which nothing is known."""

    build: str
    """Function that builds it, as `module:name`: text, so that nobody imports torch who only reads the record. It is
    given the parameter groups, the experiment and a `workbench.optimizers.building.Setting`."""
    options: tuple[str, ...] = ()
    """Fields of `wb.Optimizer` that are given for this optimiser alone, or for others that list them as well."""
    reach: str | None = None
    """Reach of an update as plans divide it: `ELEMENT` also where the optimiser adds norms up over the shards of a
    tensor itself. None, which no record of `ALGORITHMS` has, is found by updates of small tensors before a plan
    divides any."""
    has_fused_update: bool = False
    """True if AdamW's fused kernel updates all parameters, or all but the matrices: its state and traffic are those
    that `Profile` has by default. Those of another optimiser are counted while two updates run."""
    updates_matrices: bool = False
    """True if hidden matrices are updated apart, each as a whole by one of the ranks that hold it or a part of it."""
    updates_stored_blocks: bool = False
    """True if the update of a sparse weight is that of its stored blocks: it reads elements and norms only."""
    expected: str | None = None
    """Function that says how large an update is expected to be, as `module:name`; None where no formula does. It is
    given a `workbench.optimizers.expected_update.Update`."""
    can_be_offloaded: bool = False
    """True if its state may stay in the host's memory."""
    widths: WidthRule | None = None
    """The rule of widths; None where none is known."""


ALGORITHMS = {
    "adamw": Algorithm(
        build="workbench.optimizers.building:adamw",
        expected="workbench.optimizers.expected_update:of_adam",
        reach=ELEMENT,
        has_fused_update=True,
        updates_stored_blocks=True,
        can_be_offloaded=True,
        widths=WidthRule(counts_depth=True),
    ),
    "lamb": Algorithm(
        build="workbench.optimizers.building:lamb",
        expected="workbench.optimizers.expected_update:of_lamb",
        reach=ELEMENT,
        updates_stored_blocks=True,
    ),
    "muon": Algorithm(
        build="workbench.optimizers.building:muon",
        expected="workbench.optimizers.expected_update:of_adam",  # of all but the matrices
        options=("muon_scale", "adamw_rate", "parameters", "adamw", "fused_projections"),
        reach=ELEMENT,
        has_fused_update=True,
        updates_matrices=True,
        widths=WidthRule(counts_depth=False, matrices_as_base=True, settings={"muon_scale": "spectral"}),
    ),
    "sgd": Algorithm(
        build="workbench.optimizers.building:sgd",
        expected="workbench.optimizers.expected_update:of_sgd",
        reach=ELEMENT,
        updates_stored_blocks=True,
    ),
}
"""Record of each optimiser by the name that an experiment gives it."""
USER_DEFINED = Algorithm(build="workbench.optimizers.building:user_defined")
"""Record of an optimiser that a callable of the user's builds."""
