"""Departure of a run from the plateau of context-free prediction, and the end of runs that stay on it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.arguments import checked_arguments
from workbench.errors import InvalidExperiment
from workbench.runs.run import Run
from workbench.units import count

MARGIN = 0.1
"""Distance below the plateau that counts as having left it, in nats."""
WINDOW, LEAST_WINDOW = 0.02, 5
"""Share of the logged steps, and smallest number of them, over which training losses are averaged."""
LEAST_EVALUATIONS = 5
"""Smallest number of held-out losses from which they decide instead of the training losses."""
POLL_S = 0.5


@dataclass(frozen=True)
class Departure:
    """Point at which a loss curve left the plateau of context-free prediction, or that it did not."""

    name: str
    level: float
    """Loss of context-free prediction, in nats."""
    tokens: float | None
    """Tokens at which the curve had left the plateau; None if it did not leave it."""
    step: float | None
    until: float
    """Tokens at the end of the curve."""
    losses: str
    """`held-out` or `training`: the losses that decided."""

    def __bool__(self) -> bool:
        return self.tokens is not None

    def __str__(self) -> str:
        limit = f"{self.level - MARGIN:.2f} nats ({MARGIN} below context-free prediction)"
        if self.tokens is None:
            return f"{self.name}: the {self.losses} loss did not stay below {limit} in {count(self.until)} tokens."
        return f"{self.name}: the {self.losses} loss stays below {limit} from {count(self.tokens)} tokens on."


@checked_arguments
def left_plateau(run: Run, level: float) -> Departure:
    """Return where the loss of a run left the plateau of context-free prediction.

    The rule: the losses are averaged over windows, and the plateau is left at the end of the first window from which on
    every window lies at least `MARGIN` (0.1 nats) below `level`; two windows that do not overlap must show it. Held-out
    losses decide if there are at least five, each a window of its own; otherwise training losses, in windows of 2 % of
    the logged steps and at least 5. A dip that does not last is no departure.

    `level` is the loss of context-free prediction, such as `wb.analysis.context_free(experiment).loss`.
    """
    _check_level(level)
    table: Any = run.evaluations()
    name, losses, window = "eval_loss", "held-out", 1
    if len(table) < LEAST_EVALUATIONS:
        table = run.history()
        name, losses, window = "loss", "training", max(LEAST_WINDOW, round(WINDOW * len(table)))
    loss, tokens, step = (np.asarray(table[column], dtype=np.float64) for column in (name, "tokens", "step"))
    until = float(tokens[-1]) if len(tokens) else 0.0
    means = np.convolve(loss, np.full(window, 1 / window), mode="valid") if len(loss) >= 2 * window else loss[:0]
    above = np.flatnonzero(~(means <= level - MARGIN))  # A NaN counts as above.
    first = int(above[-1]) + 1 if len(above) else 0
    if len(means) - first <= window:
        return Departure(run.name, level, None, None, until, losses)
    left = first + window - 1
    return Departure(run.name, level, float(tokens[left]), float(step[left]), until, losses)


@checked_arguments
def stop_on_plateau(runs: Sequence[Run], level: float, share: float = 1 / 3) -> list[str]:
    """Wait until the runs have ended, and stop each that still sits on the plateau after `share` of its steps.

    A run sits on the plateau if the mean training loss of the last tenth of the steps so far is not at least `MARGIN`
    below `level`. Returns a sentence for each run that was stopped; it wrote a checkpoint, and `run.resume()` goes on.
    Raises `RunFailed` if a run failed.
    """
    _check_level(level)
    if not 0 < share < 1:
        raise InvalidExperiment(
            f"share={share!r} is not a share between 0 and 1. Give 1/3, for instance.", parameter="share"
        )
    if not runs:
        raise InvalidExperiment("There is no run to watch. Give at least one.", parameter="runs")
    undecided, sentences = list(runs), []
    while undecided:
        for run in list(undecided):
            final, history = run.status.final, run.history()  # in this order, so that no step is missed
            needed = math.ceil(share * run.experiment.total_steps)
            reached = int(history.step[-1]) if len(history) else 0
            if reached < needed and not final:
                continue
            undecided.remove(run)
            if reached < needed or final:
                continue
            mean = float(history.loss[history.step > 0.9 * reached].mean())
            if not mean <= level - MARGIN:
                run.stop()
                sentences.append(
                    f"{run.name} was stopped at step {reached} of {run.experiment.total_steps}: its loss of {mean:.3g} "
                    f"is not {MARGIN} below the {level:.3g} nats of context-free prediction. Try half or twice the "
                    f"learning rate, or a longer warm-up; run.resume() would train on."
                )
        time.sleep(POLL_S if undecided else 0)
    for run in runs:
        run.wait()
    return sentences


def _check_level(level: float) -> None:
    if not 0 < level < math.inf:
        raise InvalidExperiment(
            f"level={level!r} is not a loss above 0. Give wb.analysis.context_free(experiment).loss.", parameter="level"
        )
