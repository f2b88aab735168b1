"""The number that a sweep minimises, and the rules that end hopeless runs early.

The objective is the held-out loss where the experiment evaluates, else the mean of the last training losses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from workbench.runs.history import Evaluations, History
from workbench.validation import FromZero, Real, checked_value

TAIL = 0.1
"""Share of the steps, at the end, whose mean training loss is the objective of a run without evaluation."""
HELD_OUT = "held-out loss"
TRAINING = "mean training loss of the last 10 % of the steps"
"""The objective in words, with evaluation and without."""
PRUNERS = ("median", "halving")
"""Rules that compare a run with the others: Optuna's `MedianPruner` and `SuccessiveHalvingPruner`."""
FIRST_RUNS = 3
"""Complete runs before the median rule stops any."""


def objective(history: History, steps: int, evaluations: Evaluations | None = None) -> float | None:
    """Return the objective of a run of this number of steps; None if nothing was measured or the loss is not finite.

    `evaluations` holds the held-out losses of an experiment that evaluates.
    """
    if evaluations is None:
        return window_mean(history, (1 - TAIL) * steps, steps)
    last = float(evaluations.eval_loss[-1]) if len(evaluations) else math.nan
    return last if math.isfinite(last) else None


def window_mean(history: History, after: float, until: float) -> float | None:
    """Return the mean training loss of the steps after `after`, up to `until`; None without a logged step there."""
    losses = history.loss[(history.step > after) & (history.step <= until)]
    if not len(losses):
        losses = history.loss[history.step <= until][-1:]
    mean = float(losses.mean()) if len(losses) else math.nan
    return mean if math.isfinite(mean) else None


def reports(history: History, steps: int, evaluations: Evaluations | None = None) -> list[tuple[int, float]]:
    """Return (step, value) pairs at which runs are compared while they train.

    They are the evaluations, or the mean training loss of each tenth of the steps.
    """
    if evaluations is not None:
        pairs = zip(evaluations.step.tolist(), evaluations.eval_loss.tolist(), strict=True)
        return [(int(step), value) for step, value in pairs if math.isfinite(value) and 0 < step < steps]
    tenth = max(1, steps // 10)
    reached = int(history.step[-1]) if len(history) else 0
    means = [(end, window_mean(history, end - tenth, end)) for end in range(tenth, min(reached, steps - 1) + 1, tenth)]
    return [(end, mean) for end, mean in means if mean is not None]


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
