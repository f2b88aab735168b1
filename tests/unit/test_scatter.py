"""The scatter between seeds, from ends of runs alone: an interval is as seldom wrong as it says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from workbench.analysis.noise import (
    Scatter,
    combined,
    paired_scatter,
    scatter_of,
    student_quantile,
    usual_scatter,
)

PAIRS = 2000
FALSE = 0.1 + 2 * math.sqrt(0.09 / PAIRS)
"""One tenth, and two standard deviations of counting it in `PAIRS` pairs."""


@pytest.mark.parametrize(("freedom", "t"), [(1, 6.313752), (2.5, 2.558219), (4, 2.131847), (30, 1.697261)])
def test_quantiles_of_students_t_are_those_of_the_tables(freedom: float, t: float) -> None:
    assert student_quantile(freedom) == pytest.approx(t, abs=1e-4)


@pytest.mark.parametrize("ratio", [1.0, 1.5])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_configurations_that_scatter_unlike_are_seldom_called_different(seeds: int, ratio: float) -> None:
    random = np.random.default_rng(seeds)
    wrong = 0
    for _ in range(PAIRS):
        pair = random.normal(0, 1, seeds), random.normal(0, ratio, seeds)
        wrong += abs(pair[0].mean() - pair[1].mean()) > scatter_of(pair).half_width(seeds, seeds)
    assert 0.06 < wrong / PAIRS <= FALSE


@pytest.mark.parametrize(("unstable", "least"), [(1, 0.4), (30, 0.3)])
def test_other_configurations_narrow_an_interval_and_an_unstable_one_does_not_widen_it(
    unstable: float, least: float
) -> None:
    """Of pairs of two seeds, twice the noise apart, 0.32 are found alone, and 0.64 by who knows the noise."""
    random, found, wrong = np.random.default_rng(0), 0, 0
    for _ in range(PAIRS):
        ends = random.normal(0, 1, (8, 2)) * np.array([1, 1, 1, 1, 1, 1, 1, unstable])[:, None]
        scatter = combined(scatter_of(ends[:2]), usual_scatter(ends[2:], "others"))
        value = ends[0].mean() - ends[1].mean()
        wrong += abs(value) > scatter.half_width(2, 2)
        found += value + 2 > scatter.half_width(2, 2)
    assert wrong / PAIRS <= FALSE
    assert found / PAIRS > least


@pytest.mark.parametrize(("configurations", "seeds"), [(2, 5), (3, 3), (6, 2)])
def test_pairing_takes_what_the_runs_of_one_seed_have_in_common_out(configurations: int, seeds: int) -> None:
    """Seeds move all configurations alike by 3, and each run by 1 of its own."""
    random, found, wrong = np.random.default_rng(1), 0, 0
    for _ in range(PAIRS):
        ends = 3 * random.normal(size=seeds) + random.normal(size=(configurations, seeds))
        half = paired_scatter(ends[:2], ends).half_width(seeds, seeds)
        value = ends[0].mean() - ends[1].mean()
        wrong += abs(value) > half
        found += value + 2 * math.sqrt(10) > half
    assert 0.06 < wrong / PAIRS <= FALSE
    assert found / PAIRS > 0.99


def test_few_pairs_are_not_paired_as_that_would_leave_too_few_degrees_of_freedom() -> None:
    ends = np.random.default_rng(0).normal(size=(2, 4))
    assert paired_scatter(ends, ends) is None


def test_what_is_known_counts_as_much_as_it_tells_of_runs_like_these() -> None:
    """A number that is given has 8 degrees of freedom: t is 1.860 in place of 1.645. Seeds add their own."""
    given, own = Scatter(0.1, math.inf), scatter_of([[1.0, 1.4], [1.0, 1.4]])
    assert own.deviation == pytest.approx(0.2 * math.sqrt(2))
    assert own.freedom == pytest.approx(2 * 5 / 6)
    assert combined(None, given).half_width() == pytest.approx(1.8595 * 0.1 * math.sqrt(2), abs=1e-4)
    both = combined(own, given)
    assert both.freedom == pytest.approx(8 + 5 / 3)
    assert 0.1 < both.deviation < own.deviation
    assert combined(None, None) is None


def test_seeds_that_all_end_alike_tell_no_scatter() -> None:
    """Equal ends, up to rounding, are a mistake such as one seed given twice, and no proof that seeds do not matter."""
    assert scatter_of([[2.0, 2.0], [3.0, 3.0 + 1e-9]]) is None
    assert scatter_of([[2.0], [3.0]]) is None
