"""Scatter of the ends of runs between seeds, how well it is known, and the interval of a difference that follows.

The end of a run scatters between seeds with a standard deviation that is estimated from few runs, so the interval of a
difference is Student's: t times the deviation times sqrt(1/n1 + 1/n2). Deviations of several configurations are pooled,
as their variances are in a moderated t (Smyth 2004, https://doi.org/10.2202/1544-6115.1027): what is known from other
runs enters as if it had been measured with a limited number of degrees of freedom, because recipes differ in scatter.
The noise along a curve moves its end as well, so the scatter of ends holds it already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

CONFIDENCE = 0.9
"""Share of equal pairs that an interval leaves without a verdict."""
SIMILARITY = 8.0
"""Degrees of freedom that the scatter of other runs counts at most.

Variances that follow a scaled inverse chi-squared distribution of 8 degrees of freedom are those of recipes whose
deviations differ by a factor of about 1.3: sqrt(trigamma(4)) / 2 = 0.27 in the logarithm.
"""
OWN_SHARE = (SIMILARITY - 3) / (SIMILARITY - 2)
"""Share of the degrees of freedom that is left when two configurations of so unlike variances are pooled.

It is Satterthwaite's (1946) number for two variances a and b, E[(a + b)^2] / (2 E[a^2 + b^2]), and 5/6.
"""
LEAST_PAIRED_FREEDOM = 4
"""Degrees of freedom from which runs are paired by seed.

With fewer, t grows by more than pairing gains, unless the two runs of a seed are correlated by more than one half.
"""
RESOLUTION = 1e-6
"""Share of a loss below which a deviation is rounding of 32-bit numbers and no noise."""
ANGLES = 20_001
"""Points of the integral of Student's t; its quantiles are then right to five digits."""


@dataclass(frozen=True)
class Scatter:
    """Standard deviation of one run's end between seeds, and the degrees of freedom of its square."""

    deviation: float
    freedom: float
    source: str = "as given"
    """The runs it comes from, in words that follow "seeds scatter by 0.02"."""

    def of_others(self) -> Scatter:
        """Return what this says of other runs: fewer degrees of freedom, as recipes differ in their scatter."""
        return Scatter(self.deviation, 1 / (1 / self.freedom + 1 / SIMILARITY), self.source)

    def half_width(self, first: int = 1, second: int = 1) -> float:
        """Return how far the means of two equal recipes with so many seeds lie apart at most, in 90 % of cases."""
        return student_quantile(self.freedom) * self.deviation * math.sqrt(1 / first + 1 / second)

    def describe(self) -> str:
        """Return the deviation and its source in words."""
        return f"seeds scatter by {self.deviation:.2g} {self.source}"


def scatter_of(groups: Sequence[Sequence[float]], source: str = "in their own runs") -> Scatter | None:
    """Return the pooled scatter of groups of ends, each around its own mean; None if no group has two unlike ends."""
    several = [np.asarray(ends) for ends in groups if len(ends) > 1]
    freedom = sum(len(ends) - 1 for ends in several)
    squares = sum(float(np.var(ends)) * len(ends) for ends in several)
    if not freedom or math.sqrt(squares / freedom) <= RESOLUTION * max(abs(float(np.mean(ends))) for ends in several):
        return None
    return Scatter(math.sqrt(squares / freedom), freedom * (OWN_SHARE if len(several) > 1 else 1.0), source)


def usual_scatter(groups: Sequence[Sequence[float]], source: str) -> Scatter | None:
    """Return the scatter that is usual among configurations: the median, which an unstable one does not raise.

    Each variance is divided by the median of its chi-squared distribution, (1 - 2 / 9f)^3 of its degrees of freedom f
    (Wilson and Hilferty 1931). A median is worth 2 / pi of a mean's degrees of freedom.
    """
    known = [own for ends in groups if (own := scatter_of([ends], source)) is not None]
    if not known:
        return None
    variance = np.median([own.deviation**2 / (1 - 2 / (9 * own.freedom)) ** 3 for own in known])
    freedom = sum(own.freedom for own in known)
    return Scatter(math.sqrt(variance), freedom * 2 / math.pi, source) if len(known) > 2 else scatter_of(groups, source)


def combined(own: Scatter | None, others: Scatter | None) -> Scatter | None:
    """Return the scatter of runs from their own and that of others; None if neither is known."""
    known = [part for part in (own, others and others.of_others()) if part is not None]
    if not known:
        return None
    freedom = sum(part.freedom for part in known)
    variance = sum(part.freedom * part.deviation**2 for part in known) / freedom
    return Scatter(math.sqrt(variance), freedom, " and ".join(part.source for part in known))


def paired_scatter(pair: Sequence[Sequence[float]], table: Sequence[Sequence[float]]) -> Scatter | None:
    """Return the scatter that is left when the effects of seeds and configurations are removed from a table of ends.

    `table` has a row for each configuration and a column for each seed; `pair` is two of its rows, which count fully,
    the others as other runs do. This is the residual of a randomised block design (Fisher 1935). None if it has fewer
    than `LEAST_PAIRED_FREEDOM` degrees of freedom.
    """

    def squares(rows: Sequence[Sequence[float]]) -> float:
        ends = np.asarray(rows)
        return float(((ends - ends.mean(0) - ends.mean(1, keepdims=True) + ends.mean()) ** 2).sum())

    seeds, spare = len(pair[0]) - 1, len(table) - 2
    if seeds * (spare + 1) < LEAST_PAIRED_FREEDOM:
        return None
    source = "between the pairs of one seed"
    own = Scatter(math.sqrt(squares(pair) / seeds), seeds, source)
    rest = math.sqrt(max(0.0, squares(table) - squares(pair)) / (spare * seeds)) if spare else 0.0
    return combined(own, Scatter(rest, spare * seeds, "in other configurations") if spare else None)


def student_quantile(freedom: float) -> float:
    """Return the t that holds `CONFIDENCE` of Student's distribution between -t and t."""
    return _quantile(round(min(freedom, 1000.0), 2))


@lru_cache(maxsize=4096)
def _quantile(freedom: float) -> float:
    """Integrate Student's density, which is cos(angle)^(freedom - 1) with t = sqrt(freedom) tan(angle)."""
    angle = np.linspace(0, np.pi / 2, ANGLES)
    density = np.cos(angle) ** (freedom - 1)
    share = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(math.sqrt(freedom) * np.tan(np.interp(CONFIDENCE, share / share[-1], angle)))
