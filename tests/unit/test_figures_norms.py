"""Maps of norms show each layer at each recorded step, and how far an update lies outside of what is expected."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.logs import append_event
from tests.patience import eventually
from tests.unit.test_figures_live import end, start_run, train
from workbench.base.errors import InvalidArgument, UnknownParameter
from workbench.figures.figure import has_twin
from workbench.figures.norms_view import draw_magnitudes, draw_norms, outside
from workbench.lab.handlers import dashboard_of
from workbench.record.norms import Norms, NormsTail, norms_of
from workbench.record.rundir import RunDir, write_record
from workbench.runs.run import Run
from workbench.widgets import live

NAMES = ["block.0.weight", "block.0.bias", "block.1.weight"]
LAYERS = ["block.0", "block.0", "block.1"]


def event(step: int, **changes: Any) -> dict[str, Any]:
    counted = [{"layer": "block.0", "of": "updates", "zeros": 1, "first": 117, "counts": [3, 0, 1], "not_finite": 0}]
    fields = {"parameters": NAMES, "layers": LAYERS, "elements": [12, 4, 9], "histograms": counted, "spent_s": 0.25}
    norms = {"weights": [3.0, 4.0, 2.0], "gradients": [1.0, 2.0, 3.0], "updates": [0.3, 0.4, 0.02]}
    return {"step": step, "tokens": step * 64, **fields, **norms, "least": [0.1] * 3, "most": [0.4] * 3, **changes}


def norms(*steps: int, **changes: Any) -> Norms:
    return norms_of([event(step, **changes) for step in steps])


def test_a_layer_has_the_norm_of_its_parameters_together_and_only_of_those_that_are_trained() -> None:
    layers = norms(1, 2, gradients=[math.nan, 2.0, math.nan]).by_layer()
    assert layers.parameters == ("block.0", "block.1")
    np.testing.assert_allclose(layers.weights, [[5.0, 2.0]] * 2)
    np.testing.assert_allclose(layers.gradients, [[2.0, np.nan]] * 2)
    assert layers.elements.tolist() == [16, 9]


def test_the_first_map_is_measured_the_second_expected_and_the_third_how_far_apart_they_are() -> None:
    figure = draw_norms(norms(1, 10, 20), "run")
    measured, expected, apart = figure.data
    assert list(measured.x) == ["1", "10", "20"]
    assert list(measured.y) == ["block.0", "block.1"]
    np.testing.assert_allclose(10 ** np.array(measured.z), [[0.1] * 3, [0.01] * 3])
    np.testing.assert_allclose(10 ** np.array(expected.z), [[0.2 * math.sqrt(2) / 5] * 3, [0.1] * 3])
    np.testing.assert_allclose(apart.z, [[0.0] * 3, [math.log2(0.02 / 0.1)] * 3])
    assert (measured.zmin, measured.zmax) == (expected.zmin, expected.zmax), "equal colours stand for equal numbers"
    assert "At step 20, of 2 layers, 1 moves less than the optimiser lets expect" in figure.layout.title.subtitle.text
    assert "0.25 s" in figure.layout.title.subtitle.text.replace("<br>", "")
    assert has_twin(figure)


def test_outside_is_a_power_of_two_and_an_end_that_is_met_but_for_rounding_is_inside() -> None:
    value, least, most = np.array([8.0, 0.5, 1.5, 2.002, np.nan]), np.full(5, 1.0), np.full(5, 2.0)
    np.testing.assert_allclose(outside(value, least, most), [2, -1, 0, 0, np.nan])


def test_without_a_formula_the_measured_map_stands_alone() -> None:
    figure = draw_norms(norms(1, 2, least=[math.nan] * 3, most=[math.nan] * 3), "run")
    assert len(figure.data) == 1
    assert "No formula" in figure.layout.title.subtitle.text


def test_a_layer_is_drawn_by_its_parameters_and_what_does_not_exist_is_refused() -> None:
    figure = draw_norms(norms(1, 2), "run", layer="block.0")
    assert list(figure.data[0].y) == NAMES[:2]
    assert list(figure.layout.yaxis.ticktext) == ["weight", "bias"]
    gradients = draw_norms(norms(1, 2), "run", of="gradients")
    np.testing.assert_allclose(10 ** np.array(gradients.data[0].z)[1], [1.0, 1.0])
    for wrong in ({"of": "update"}, {"layer": "block.2"}):
        with pytest.raises(UnknownParameter, match=r"(no norms of|no layer)"):
            draw_norms(norms(1), "run", **wrong)


def test_a_histogram_has_the_shares_of_the_powers_of_two() -> None:
    figure = draw_magnitudes(norms(1, 2), "run", "block.0", "updates")
    assert list(figure.data[0].y) == ["2^-10", "2^-9", "2^-8"]
    np.testing.assert_allclose(figure.data[0].z, [[0.75, 0.75], [np.nan, np.nan], [0.25, 0.25]])


def test_the_view_of_a_run_and_its_page_show_what_it_records_from_the_first_record_on(tmp_path: Path) -> None:
    run = start_run(tmp_path / "run")
    write_record(run.experiment, {"steps": 100, "tracking": {"norms_every": 5}})
    train(run, 1, 3)
    without = live(Run(start_run(tmp_path / "other").path))
    dashboard = live(Run(run.path))
    [plot] = dashboard._norms.box.children
    assert plot.layout.display == "none"
    assert not without._norms.box.children
    assert len(dashboard_of([Run(run.path)])["figures"]) == 2
    append_event(run.events, "norms", **event(5))
    eventually(lambda: "Updates of run" in plot.figure)
    assert plot.layout.display is None
    assert "Updates of run" in dashboard_of([Run(run.path)])["figures"][-1]
    end(run, "finished")
    eventually(lambda: not dashboard.following)
    assert 'alt="Updates of run' in dashboard.twin()[0], "a saved notebook has the map as a picture"
    without.close()


def test_a_record_whose_lists_differ_in_length_is_damaged_and_left_out(tmp_path: Path) -> None:
    run = RunDir(start_run(tmp_path / "run").path)
    append_event(run.events, "norms", **event(1))
    append_event(run.events, "norms", **event(2, updates=[1.0]))
    assert NormsTail(run.events).read().step.tolist() == [1]
    with pytest.raises(InvalidArgument, match=r"Launch it with tracking=wb\.Tracking\(norms_every=100\)"):
        wb.figures.norms(start_run(tmp_path / "none").path)
