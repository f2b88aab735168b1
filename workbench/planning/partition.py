"""Cutting a row of blocks into stages: optimal, by a dynamic program over NumPy arrays.

`cost[s, i, j]` (or `cost[i, j]`, alike for all) and `memory[s, i, j]` describe stage `s` made of blocks
`i … j - 1`; entries with `j <= i` are ignored, so that no stage is empty.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

SLACK = 1e-9
"""Relative difference below which two bottlenecks are the same."""


def partition(cost: Array, memory: Array, limit: float) -> tuple[int, ...] | None:
    """Cut points `(0, …, n)` that minimise the largest stage cost, then the largest stage memory.

    Every stage must stay within `limit`. `cost` is (stages, n + 1, n + 1) or (n + 1, n + 1), `memory`
    (stages, n + 1, n + 1).
    None when no cut fits. O(stages · n²), twice.
    """
    allowed = _not_empty(cost.shape[-1]) & (memory <= limit)
    bottleneck, cuts = _min_max(np.where(allowed, cost, np.inf))
    if cuts is None:
        return None
    good_enough = allowed & (cost <= bottleneck * (1 + SLACK))
    return _min_max(np.where(good_enough, memory, np.inf))[1]


@lru_cache(maxsize=16)
def _not_empty(ends: int) -> npt.NDArray[np.bool_]:
    return np.triu(np.ones((ends, ends), dtype=bool), 1)


def _min_max(cost: Array) -> tuple[float, tuple[int, ...] | None]:
    """Cut points that minimise the largest `cost[s, i, j]`; `inf` forbids a stage."""
    stages, ends, _ = cost.shape
    best = np.full(ends, np.inf)
    best[0] = -np.inf
    columns = np.arange(ends)
    origins = np.zeros((stages, ends), dtype=np.intp)
    for stage in range(stages):
        worst = np.maximum(best[:, None], cost[stage])
        origins[stage] = worst.argmin(axis=0)
        best = worst[origins[stage], columns]
    if not np.isfinite(best[-1]):
        return np.inf, None
    cuts = [ends - 1]
    for stage in reversed(range(stages)):
        cuts.append(int(origins[stage, cuts[-1]]))
    return float(best[-1]), tuple(reversed(cuts))
