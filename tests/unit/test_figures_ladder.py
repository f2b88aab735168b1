"""Figures of a scaling law: every size and pair has its runs, its line and its band, and all of it can be saved."""

from __future__ import annotations

import csv
import functools

import numpy as np
import pytest

import workbench as wb
from workbench.analysis.ladder import KAPLAN, KaplanLaw, LadderPoint, ScalingLaw, scaling_law
from workbench.base.errors import InvalidArgument

TRUE = KaplanLaw(3e6, 0.15, 3e7, 0.25)
SIZES, TOKENS = (14e3, 26e3, 103e3), (0.2e6, 0.45e6, 1e6)
LATER = (LadderPoint(570e3, 1e6, 2.4), LadderPoint(59e3, 1e6, 2.5), LadderPoint(59e3, 1e6, 2.52))


@functools.cache
def law() -> ScalingLaw:
    random = np.random.default_rng(0)
    return scaling_law(
        [
            LadderPoint(n, d, float(TRUE.loss(n, d) * np.exp(0.005 * random.normal())))
            for n in SIZES
            for d in TOKENS
            for _ in range(2)
        ]
    )


def lines(figure):
    return {trace.name: trace for trace in figure.data if trace.meta == "line"}


def test_each_size_has_a_line_a_band_and_its_runs_and_one_that_was_predicted_is_dashed() -> None:
    figure = wb.figures.ladder(law(), LATER)
    assert [trace.meta for trace in figure.data if trace.meta == "band"] == ["band"] * 5
    drawn = lines(figure)
    assert {name: trace.line.dash for name, trace in drawn.items()} == {
        "14 k parameters": "solid",
        "26 k parameters": "solid",
        "59 k parameters, predicted": "dash",
        "103 k parameters": "solid",
        "570 k parameters, predicted": "dash",
    }
    line = drawn["14 k parameters"]
    assert line.y[10] == pytest.approx(law().predict(14e3, line.x[10]).value)
    marks = {trace.name: trace for trace in figure.data if trace.mode == "markers"}
    assert list(marks["59 k, runs"].y) == [2.5, 2.52]
    assert len(marks["14 k, runs"].x) == 6


def test_the_difference_of_a_pair_is_drawn_over_the_tokens_per_parameter_of_the_larger_model() -> None:
    real = (303e6, 2.39e9)
    pairs = {"1 × 32, 2 × 64": (14e3, 103e3), "held out": (59e3, 570e3)}
    figure = wb.figures.pair_difference(
        law(), pairs, real={"real": real}, others={"pilot": (0.007, -0.08), "again": (0.007, -0.09)}, predicted=LATER
    )
    marks = [trace for trace in figure.data if trace.mode == "markers"]
    assert list(marks[0].x) == [at / 103e3 for at in TOKENS]
    ends = {size: [p.loss for p in law().points if (p.parameters, p.tokens) == (size, 1e6)] for size in (14e3, 103e3)}
    assert marks[0].y[-1] == pytest.approx(np.mean(ends[14e3]) - np.mean(ends[103e3]))
    assert marks[1].y[0] == pytest.approx(2.51 - 2.4)
    assert (marks[2].x, marks[2].y) == ((0.007,), (-0.08,))
    assert marks[2].marker.symbol != marks[3].marker.symbol, "two results beside each other are told apart"
    drawn = lines(figure)
    assert drawn["held out"].line.dash == drawn["real, extrapolated"].line.dash == "dash"
    published = drawn["real, Kaplan et al."]
    assert published.y[-1] == pytest.approx(KAPLAN.difference(*real, published.x[-1] * real[1]))


def test_a_figure_of_the_law_is_saved_as_a_picture_and_as_a_table(tmp_path) -> None:
    figure = wb.figures.pair_difference(law(), {"pair": (14e3, 103e3)})
    assert figure.save(tmp_path / "pair.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(figure.save(tmp_path / "pair.csv").open()))
    assert {"value", "curve", "band"} & {row["shows"] for row in rows}


def test_a_figure_without_a_pair_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="pairs is empty"):
        wb.figures.pair_difference(law(), {})
