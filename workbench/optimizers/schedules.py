"""Learning-rate schedules: the multiple of the peak rate at each step."""

from __future__ import annotations

import math
from collections.abc import Callable

DECAY_SHARE = 0.2
"""Last fraction of the steps in which `wsd` decays to 0, the share that Hägele et al. recommend (arXiv:2405.18392)."""


def learning_rate_factor(step: int, warmup: int, steps: int, schedule: str | Callable[[int], float]) -> float:
    """Return the multiple of the peak learning rate for the update after `step` completed steps.

    A linear warm-up reaches 1 at update `warmup`. Then the schedule decays to 0 at `steps` (`linear`, `cosine`), stays
    (`constant`), stays and decays linearly in the last fifth of the steps (`wsd`: warm-up, stable, decay,
    arXiv:2404.06395), or falls with the square root of the step (`inverse_sqrt`, arXiv:1706.03762). A user-defined
    function gives the factor of every step, and there is no warm-up.
    """
    if not isinstance(schedule, str):
        return float(schedule(step))
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    if schedule == "inverse_sqrt":
        return math.sqrt(max(1, warmup) / (step + 1))
    if schedule == "wsd":
        decay = max(1, round(DECAY_SHARE * steps))
        return min(1.0, max(0, steps - step) / decay)
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
