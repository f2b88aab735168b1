"""A sweep in a real JupyterLab in a real browser: real supervisors and launchers; only the training is pretended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lab
import pytest

import workbench as wb
from tests.distributed.test_sweeps import HERE, experiment, prepare
from tests.patience import GATE, PATIENCE_S, Gate, eventually
from workbench.sweeps.sweep import Sweep

CELL = """
from workbench.widgets import live_widget
live_widget.TWIN_S = 1
import workbench as wb
wb.sweeps.load_sweep({path!r})
"""
GRAPHS = "[...document.querySelectorAll('.jupyter-widgets .js-plotly-plot')].filter(graph => graph.data)"
CELLS_FILLED = (
    f"{GRAPHS}.find(g => g.data[0]?.type === 'heatmap')?.data[0].hovertext.flat().filter(word => word).length"
)
REACHED = f"Math.max(...{GRAPHS}.find(g => g.data[0]?.type === 'scatter')?._fullData.flatMap(t => [...t.x]) ?? [0])"
"""Greatest position of a curve; the number of its points grows to the most that are drawn."""
DRAWN = """[...document.querySelectorAll('.js-plotly-plot')]
    .filter(graph => graph.getBoundingClientRect().width > 300 && graph.getBoundingClientRect().height > 200)
    .map(graph => graph.querySelectorAll('.heatmaplayer image, .scatterlayer path.js-line').length)"""
"""Marks that every visible figure has drawn: neither data that it holds, nor a figure of no size."""
SHORT, LONG = 60, 100
"""Steps of the runs: the gate opens to the end of the short ones only."""
TOKENS_PER_STEP = 4 * 8  # of the stand-in worker


@pytest.fixture
def sweep(server: lab.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Sweep, Gate]]:
    """Start a sweep of two rates and two lengths, and return it with the gate of its runs, which is closed."""
    gate = Gate(tmp_path / "gate")
    monkeypatch.setenv("WORKBENCH_HOME", str(server.root / "home"))
    monkeypatch.setenv(GATE, str(gate.file))
    prepare(monkeypatch.setattr)
    monkeypatch.syspath_prepend(str(HERE))
    rates, lengths = [1e-3, 2e-3], [SHORT, LONG]
    started = wb.sweep(experiment(), learning_rate=rates, steps=lengths, directory=tmp_path / "sweep")
    yield started, gate
    started.stop(wait=True)
    for run in started.runs:
        run.wait(PATIENCE_S)


def wait_for(page: Any, truth: str) -> None:
    page.wait_for_function(f"() => {truth}")


def test_a_sweep_grows_while_it_runs_and_a_run_is_stopped_from_its_table(
    lab_page: Any, server: lab.Server, sweep: tuple[Sweep, Gate], picture: Any
) -> None:
    page, (started, gate) = lab_page, sweep
    lab.write_notebook(server.root / "sweep.ipynb", [CELL.format(path=str(started.path)), "6 * 7"])
    lab.open_notebook(page, server, "sweep.ipynb")
    lab.run_all(page)
    gate.open(40)
    wait_for(page, f"{GRAPHS}.some(graph => graph.layout.xaxis?.title?.text?.includes('(k)'))")  # a unit that stays
    wait_for(page, f"{REACHED} === 40 * {TOKENS_PER_STEP} / 1000")
    gate.open(SHORT - 1)
    wait_for(page, f"{REACHED} === {SHORT - 1} * {TOKENS_PER_STEP} / 1000")
    wait_for(page, f"{CELLS_FILLED} === 0")
    page.get_by_text(re.compile("0 of 4 runs have ended")).first.wait_for()
    other = Gate(Path(f"{gate.file}-0002"), open_to=SHORT - 1)  # of the other short run, which begins when one ends
    gate.open(LONG - 1)
    wait_for(page, f"{CELLS_FILLED} >= 1")
    page.get_by_role("cell", name="1 finished").first.wait_for()
    picture(page, "sweep-growing")

    row = page.locator(".jupyter-widgets.widget-hbox", has_text=f"steps {LONG}").filter(has=page.get_by_role("button"))
    row.get_by_role("button", name="Stop").first.click()
    page.get_by_role("cell", name="1 stopped").first.wait_for()
    [stopped] = [run for run in started.runs if run.status.state == "stopped"]
    assert stopped.experiment.steps == LONG
    lab.change_theme(page, "Dark")
    other.open()
    wait_for(page, f"{CELLS_FILLED} >= 3")  # the second short run has ended too, so that it has a curve
    picture(page, "sweep-dark")
    page.locator(".jupyter-widgets .js-plotly-plot").last.scroll_into_view_if_needed()  # not the hidden static twin
    picture(page, "sweep-dark-results")
    lab.change_theme(page, "Light")
    eventually(lambda: all(run.row()["step"] for run in started.runs))
    started.stop()
    page.wait_for_function("() => !document.querySelector('.jupyter-widgets .js-plotly-plot')")
    page.get_by_text(re.compile("runs have ended, not at work")).first.wait_for()
    wait_for(page, f"{DRAWN}.length === 2")
    picture(page, "sweep-ended")
    heat_map, curves = page.evaluate(f"() => {DRAWN}")
    assert heat_map > 0, "the cells of the heat map are an image"
    assert curves >= 4, "the lines of all four runs, not those of the first picture"
    assert page.refused == []
