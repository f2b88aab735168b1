"""The comparison of a repeated run with the recorded one: two loss curves, step by step."""

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

from workbench.errors import WorkbenchError
from workbench.runs.run import Run

BITWISE, NOISE, DIFFERENT = "bitwise", "within noise", "different"
"""Outcomes of a comparison."""
MAX_POINTS = 20_000
"""Largest number of points of a curve that a notebook holds; the curve's digest covers all points."""
MAX_STRETCHES, MIN_STRETCH = 20, 20
"""Largest number of stretches that a curve is cut into, and smallest number of steps in a stretch."""
NEIGHBOURS = 2
"""Number of stretches on each side whose values also enter the estimate of a stretch's noise."""
SIGNIFICANCE = 0.01
"""Probability that two runs which differ by batch noise alone are called different."""
ROUNDING = 1e-6
"""Relative difference of two mean losses below which they count as equal."""
Column = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LossCurve:
    """Loss by step, as exact numbers."""

    step: Column
    loss: Column
    steps: int
    """Number of logged steps of the whole run; more than `len(step)` if points were left out."""
    digest: str
    """SHA-256 over every step and loss."""

    @staticmethod
    def of(run: Run) -> LossCurve:
        """Return the curve of a run."""
        history = run.history()
        step, loss = np.array(history.step), np.array(history.loss)
        digest = hashlib.sha256(step.astype("<f8").tobytes() + loss.astype("<f8").tobytes()).hexdigest()
        every = max(1, -(-len(step) // MAX_POINTS))
        return LossCurve(step[::every], loss[::every], len(step), digest)

    def to_json(self) -> dict[str, Any]:
        """Return the curve as JSON that `from_json` reads without losing a bit."""
        return {"step": _pack(self.step), "loss": _pack(self.loss), "steps": self.steps, "digest": self.digest}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> LossCurve:
        """Return the curve that `to_json` wrote."""
        return LossCurve(_unpack(value["step"]), _unpack(value["loss"]), int(value["steps"]), value["digest"])


def _pack(column: Column) -> str:
    return base64.b64encode(zlib.compress(column.astype("<f8").tobytes(), 9)).decode()


def _unpack(text: str) -> Column:
    """Return a packed column; raises `WorkbenchError` for one that is damaged, or that expands to more than is written.

    A record of a few kilobytes could otherwise expand to gigabytes.
    """
    most = 8 * (MAX_POINTS + 1)
    try:
        decompressor = zlib.decompressobj()
        content = decompressor.decompress(base64.b64decode(text), most)
        if not decompressor.eof or len(content) % 8:
            raise ValueError(f"it is larger than {MAX_POINTS:,} points, or not whole")
        return np.frombuffer(content, "<f8")
    except (TypeError, ValueError, zlib.error) as error:
        raise WorkbenchError(
            f"The curve in the notebook's record is damaged: {error}. Share the notebook again."
        ) from None


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison, with the numbers behind it."""

    outcome: str
    """`bitwise`, `within noise` or `different`."""
    largest_difference: float
    """Largest absolute difference of two losses at the same step; NaN if the curves cannot be compared."""
    first_step: int | None
    """The first step at which the losses differ; None if there is none."""
    reason: str

    @property
    def same(self) -> bool:
        """True unless the runs are different."""
        return self.outcome != DIFFERENT


def verdict(recorded: LossCurve, again: LossCurve) -> Verdict:
    """Compare two curves; they are equal bit by bit, or differ by no more than batch noise explains, or differ.

    The curve is cut into at most 20 stretches of at least 20 steps. Around each, the batch noise σ is estimated from
    the recorded curve alone, from the median difference of neighbouring losses: σ = median|Δ| / (0.6745 √2), which a
    trend hardly changes. The mean difference of two runs over n different batches has the standard error σ √(2 / n).
    The largest ratio of difference to standard error is compared with the two-sided normal quantile of 1 %, divided by
    the number of stretches (Bonferroni's correction).
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
    return _compare_stretches(common[finite], old[finite], new[finite])


def _compare_stretches(step: Column, old: Column, new: Column) -> Verdict:
    difference = new - old
    largest = float(np.abs(difference).max(initial=0.0))
    differing = np.flatnonzero(difference)
    first = int(step[differing[0]]) if len(differing) else None
    number = max(1, min(MAX_STRETCHES, len(step) // MIN_STRETCH))
    stretches = np.array_split(np.arange(len(step)), number)
    limit = NormalDist().inv_cdf(1 - SIGNIFICANCE / (2 * number))
    ratios = [
        _standard_errors(old[stretch], difference[stretch], noise)
        for stretch, noise in zip(stretches, _noise(old, stretches), strict=True)
    ]
    worst = int(np.argmax(ratios))
    if ratios[worst] <= limit:
        reason = f"at most {ratios[worst]:.2g} standard errors apart in any stretch ({limit:.2g} allowed)"
        return Verdict(NOISE, largest, first, reason)
    where = f"{step[stretches[worst]].mean():.0f}"
    reason = f"{ratios[worst]:.2g} standard errors apart around step {where} ({limit:.2g} allowed)"
    return Verdict(DIFFERENT, largest, first, reason)


def _noise(losses: Column, stretches: Sequence[NDArray[np.int64]]) -> Iterator[float]:
    """Yield the standard deviation of one batch's loss around each stretch."""
    jumps = np.abs(np.diff(losses))
    for index in range(len(stretches)):
        first, last = stretches[max(0, index - NEIGHBOURS)][0], stretches[index : index + NEIGHBOURS + 1][-1][-1]
        near = jumps[first:last]
        yield float(np.median(near)) / (0.6745 * np.sqrt(2)) if len(near) else 0.0


def _standard_errors(old: Column, difference: Column, noise: float) -> float:
    """Return the mean difference of a stretch in units of its standard error."""
    mean = abs(float(difference.mean()))
    if mean <= ROUNDING * abs(float(old.mean())):
        return 0.0
    return mean / (noise * float(np.sqrt(2 / len(old)))) if noise > 0 else float("inf")
