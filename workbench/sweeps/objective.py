"""The number that a sweep minimises: held-out loss where the experiment evaluates, else the last training losses."""

from __future__ import annotations

import math

from workbench.runs.records.history import Evaluations, History

TAIL = 0.1
"""Share of the steps, at the end, whose mean training loss is the objective of a run without evaluation."""
HELD_OUT = "held-out loss"
TRAINING = "mean training loss of the last 10 % of the steps"
"""The objective in words, with evaluation and without."""


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
