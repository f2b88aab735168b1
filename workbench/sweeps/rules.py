"""Rules that end hopeless runs of a sweep early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from workbench.validation import FromZero, Real, checked_value

PRUNERS = ("median", "halving")
"""Rules that compare a run with the others: Optuna's `MedianPruner` and `SuccessiveHalvingPruner`."""
FIRST_RUNS = 3
"""Complete runs before the median rule stops any."""


@checked_value()
class Diverged:
    """Rule that ends a run whose training loss is above a value after a step, or is not finite."""

    above: Real
    after: FromZero = 0

    def reason(self, step: int, loss: float) -> str | None:
        """Return why a run with this loss at this step ends, or None if it goes on."""
        if not math.isfinite(loss):
            return f"The loss was {loss} at step {step}."
        if step > self.after and loss > self.above:
            return f"The loss was {loss:.4g} at step {step}, above {self.above:g} after step {self.after}."
        return None


Rule = Diverged | str | None


def diverged(above: Any, after: Any = 0) -> Diverged:
    """Return the rule that ends a run whose training loss is above `above` after step `after`, or is not finite."""
    return Diverged(above, after)


def rule_from_json(value: Any) -> Rule:
    """Return the rule in the settings of a sweep."""
    return Diverged(**value) if isinstance(value, Mapping) else value


def why_none(rule: Rule, finished: int) -> str:
    """Return why a rule has stopped no run, as the end of a sentence, after so many runs that finished."""
    if rule is None:
        return ": the sweep has no rule for it (stop=)"
    if isinstance(rule, Diverged):
        return f": no loss was above {rule.above:g} after step {rule.after}, or not finite"
    if rule == "median" and finished < FIRST_RUNS:
        return f": the median rule stops none before {FIRST_RUNS} runs have finished, and {finished} have"
    return f": none was behind the others by the {rule} rule"
