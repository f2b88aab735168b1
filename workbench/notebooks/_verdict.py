"""Did a second run come out the same? Two loss curves, step by step."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.runs import Run

BITWISE, NOISE, DIFFERENT = "bitwise", "within noise", "different"
KEPT_POINTS = 20_000
"""Of a curve, in a notebook; its digest is over all of them."""
MOST_STRETCHES, SHORTEST_STRETCH = 20, 20
NEIGHBOURS = 2
"""Stretches on each side that a stretch's noise is estimated from as well."""
SIGNIFICANCE = 0.01
"""Chance that two runs which differ by batch noise alone are called different."""
ROUNDING = 1e-6
"""Relative; differences below it are nobody's concern."""
Column = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LossCurve:
    """Loss by step, as exact numbers."""

    step: Column
    loss: Column
    steps: int
    """Logged steps of the whole run; more than `len(step)` where points were left out."""
    digest: str
    """SHA-256 over every step and loss."""

    @staticmethod
    def of(run: Run) -> LossCurve:
        history = run.history()
        step, loss = np.array(history.step), np.array(history.loss)
        digest = hashlib.sha256(step.astype("<f8").tobytes() + loss.astype("<f8").tobytes()).hexdigest()
        kept = slice(None, None, max(1, -(-len(step) // KEPT_POINTS)))
        return LossCurve(step[kept], loss[kept], len(step), digest)

    def to_json(self) -> dict[str, Any]:
        return {"step": _packed(self.step), "loss": _packed(self.loss), "steps": self.steps, "digest": self.digest}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> LossCurve:
        return LossCurve(_unpacked(value["step"]), _unpacked(value["loss"]), int(value["steps"]), value["digest"])


def _packed(column: Column) -> str:
    return base64.b64encode(zlib.compress(column.astype("<f8").tobytes(), 9)).decode()


def _unpacked(text: str) -> Column:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f8")


@dataclass(frozen=True)
class Verdict:
    """`kind` is bitwise, within noise, or different."""

    kind: str
    largest_difference: float
    """Of two losses at the same step."""
    first_step: int | None
    """At which the losses differ at all."""
    reason: str

    @property
    def same(self) -> bool:
        return self.kind != DIFFERENT


def verdict(recorded: LossCurve, again: LossCurve) -> Verdict:
    """Bitwise: every loss of every step is equal. Within noise: no stretch of the curve differs by more than the
    scatter of the loss from batch to batch explains.

    The curve is cut into at most 20 stretches of at least 20 steps. Around each, batch noise σ is estimated from the
    recorded curve alone, by the median difference of neighbouring losses: σ = median|Δ| / (0.6745 √2), which a trend
    hardly moves. The mean difference of two runs that drew different batches would have the deviation σ √(2 / n). The
    largest of these ratios is compared with the normal quantile at 1 %, divided by their number (Bonferroni).
    """
    if recorded.digest == again.digest:
        return Verdict(BITWISE, 0.0, None, f"all {recorded.steps:,} losses are equal to the last bit")
    if recorded.steps != again.steps:
        reason = f"{again.steps:,} steps were logged instead of {recorded.steps:,}"
        return Verdict(DIFFERENT, float("nan"), None, reason)
    common, left, right = np.intersect1d(recorded.step, again.step, return_indices=True)
    old, new = recorded.loss[left], again.loss[right]
    finite = np.isfinite(old)
    if not len(common) or not np.array_equal(finite, np.isfinite(new)):
        return Verdict(DIFFERENT, float("nan"), None, "the losses are not numbers at the same steps")
    return _judged(common[finite], old[finite], new[finite])


def _judged(step: Column, old: Column, new: Column) -> Verdict:
    difference = new - old
    largest = float(np.abs(difference).max(initial=0.0))
    moved = np.flatnonzero(difference)
    first = int(step[moved[0]]) if len(moved) else None
    number = max(1, min(MOST_STRETCHES, len(step) // SHORTEST_STRETCH))
    stretches = np.array_split(np.arange(len(step)), number)
    limit = NormalDist().inv_cdf(1 - SIGNIFICANCE / (2 * number))
    ratios = [
        _ratio(old[part], difference[part], noise)
        for part, noise in zip(stretches, _noise(old, stretches), strict=True)
    ]
    worst = int(np.argmax(ratios))
    if ratios[worst] <= limit:
        reason = f"at most {ratios[worst]:.2g} standard errors apart in any stretch ({limit:.2g} allowed)"
        return Verdict(NOISE, largest, first, reason)
    where = f"{step[stretches[worst]].mean():.0f}"
    reason = f"{ratios[worst]:.2g} standard errors apart around step {where} ({limit:.2g} allowed)"
    return Verdict(DIFFERENT, largest, first, reason)


def _noise(losses: Column, stretches: Sequence[NDArray[np.int64]]) -> Iterator[float]:
    """The scatter of one batch's loss, in each stretch."""
    jumps = np.abs(np.diff(losses))
    for index in range(len(stretches)):
        first, last = stretches[max(0, index - NEIGHBOURS)][0], stretches[index : index + NEIGHBOURS + 1][-1][-1]
        near = jumps[first:last]
        yield float(np.median(near)) / (0.6745 * np.sqrt(2)) if len(near) else 0.0


def _ratio(old: Column, difference: Column, noise: float) -> float:
    """How many standard errors the mean difference of a stretch is away from none."""
    mean = abs(float(difference.mean()))
    if mean <= ROUNDING * abs(float(old.mean())):
        return 0.0
    return mean / (noise * float(np.sqrt(2 / len(old)))) if noise > 0 else float("inf")
