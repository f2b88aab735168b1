"""A row of blocks cut into stages whose largest cost is as small as can be, by dynamic programming over NumPy arrays.

`cost[s][i, j]` and `memory[s][i, j]` describe stage `s` made of blocks `i … j - 1`; entries with `j <= i` are ignored,
so that no stage is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

SLACK = 1e-9
"""Relative difference below which two bottlenecks are the same."""


def partition(cost: Sequence[Array], memory: Sequence[Array], limit: float) -> tuple[int, ...] | None:
    """Return cut points `(0, …, n)` that minimise the largest stage cost, then the largest stage memory.

    Every stage must stay within `limit`. Both arguments have one (n + 1, n + 1) matrix per stage. The result is None
    when no cut fits. Time: O(stages · n²), twice.
    """
    not_empty = _not_empty(len(cost[0]))
    within = _each(lambda c, m: np.where(not_empty & (m <= limit), c, np.inf), cost, memory)
    bottleneck, cuts = min_max(within)
    if cuts is None:
        return None
    most = bottleneck * (1 + SLACK)
    return min_max(_each(lambda c, m: np.where(c <= most, m, np.inf), within, memory))[1]


def smallest(memory: Sequence[Array]) -> float:
    """Return the largest stage memory of the cut that minimises it; infinity where every cut has an infinite stage."""
    not_empty = _not_empty(len(memory[0]))
    return min_max(_each(lambda m, _: np.where(not_empty, m, np.inf), memory, memory))[0]


def least_sum(cost: Sequence[Array]) -> float:
    """Return the least sum of stage costs of any cut."""
    not_empty = _not_empty(len(cost[0]))
    reached = np.full(len(cost[0]), np.inf)
    reached[0] = 0.0
    for stage in cost:
        reached = np.where(not_empty, reached[:, None] + stage, np.inf).min(axis=0)
    return float(reached[-1])


def _each(work: Callable[[Array, Array], Array], first: Sequence[Array], second: Sequence[Array]) -> list[Array]:
    """Return `work` for every stage, computed once for stages that share their matrices."""
    pairs = list(zip(first, second, strict=True))
    distinct = {(id(one), id(other)): (one, other) for one, other in pairs}
    done = {key: work(one, other) for key, (one, other) in distinct.items()}
    return [done[id(one), id(other)] for one, other in pairs]


@lru_cache(maxsize=16)
def _not_empty(ends: int) -> npt.NDArray[np.bool_]:
    return np.triu(np.ones((ends, ends), dtype=bool), 1)


def min_max(cost: Sequence[Array]) -> tuple[float, tuple[int, ...] | None]:
    """Return the least possible largest `cost[s][i, j]`, and the cut points that reach it; `inf` forbids a stage."""
    reached = [np.full(len(cost[0]), np.inf)]
    reached[0][0] = -np.inf
    for stage in cost:
        reached.append(np.maximum(reached[-1][:, None], stage).min(axis=0))
    best = float(reached[-1][-1])
    if not np.isfinite(best):
        return np.inf, None
    cuts = [len(cost[0]) - 1]
    for stage, before in zip(reversed(cost), reversed(reached[:-1]), strict=True):
        cuts.append(int(np.maximum(before, stage[:, cuts[-1]]).argmin()))
    return best, tuple(reversed(cuts))
