"""The table of runs and the what-if panel without a browser."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from cost_values import layered_profile as profile
from test_figures_live import checkpoint, end, eventually, start_run, train

from workbench.cost.cluster import Cluster
from workbench.figures.pages import plotly_js
from workbench.planning.search import what_if
from workbench.rundir import RunDir, append_event
from workbench.runs.records.follow import progress_line
from workbench.runs.registry import list_runs
from workbench.runs.run import Run
from workbench.widgets import LiveTable, WhatIf, live
from workbench.widgets.plot import Plot, growing_plot
from workbench.widgets.run_row import STATE_COLORS


def cells(table: LiveTable) -> list[str]:
    """Return the HTML of each run's row."""
    rows = table.children[1:-3]
    return ["".join(str(cell.value) for cell in row.children[:-2]) for row in rows]


def buttons(table: LiveTable, row: int = 0) -> list[Any]:
    return list(table.children[1 + row].children[-2:])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    running, stopped = start_run(tmp_path / "running <1>"), start_run(tmp_path / "stopped")
    train(running, 1, 10)
    train(stopped, 1, 20)
    checkpoint(stopped, 20)
    end(stopped, "stopped", "Stopped at step 20 of 100.")
    return tmp_path


def row_of(table: LiveTable, name: str) -> int:
    return next(index for index, text in enumerate(cells(table)) if name in text)


def test_the_table_follows_runs_and_shows_those_that_start(folder: Path) -> None:
    table = LiveTable(list_runs(folder), refresh_s=0.05)
    assert "running &lt;1&gt;" in cells(table)[row_of(table, "running")]
    assert "10 of 100" in cells(table)[row_of(table, "running &lt;")]
    train(RunDir(folder / "running <1>"), 11, 30)
    eventually(lambda: "30 of 100" in cells(table)[row_of(table, "running &lt;")])
    start_run(folder / "new")
    eventually(lambda: len(cells(table)) == 3)
    table.close()
    eventually(lambda: not table.following)


def test_the_buttons_of_a_row_stop_resume_and_attach(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resumed = []
    monkeypatch.setattr(Run, "resume", lambda run: resumed.append(run.name))
    table = LiveTable(list_runs(folder), refresh_s=0.05)
    attach, stop = buttons(table, row_of(table, "running &lt;"))
    stop.click()
    eventually((folder / "running <1>" / "STOP").exists)
    _, resume = buttons(table, row_of(table, ">stopped<"))
    assert resume.description == "Resume"
    resume.click()
    eventually(lambda: resumed == ["stopped"])
    attach.click()
    [dashboard] = table.children[-1].children
    assert dashboard.following
    dashboard.close()
    table.close()


def test_the_panel_shows_what_the_planner_answers_for_the_sliders() -> None:
    costs, cluster = profile(), Cluster.of("h200", gpus=4)
    panel = WhatIf(costs, cluster, global_batch=64, seq_len=128)
    assert panel.plan == what_if(costs, cluster, global_batch=64, seq_len=128, gpus=4)
    shown, rehearsed = (json.loads(text)["data"] for text in (panel.children[-1].figure, panel.children[-1].rehearsal))
    assert len(json.dumps(rehearsed)) > len(json.dumps(shown)), "the picture with most in it"
    panel.gpus.value = 8
    eventually(lambda: panel.plan is not None and panel.plan.cluster.gpus == 8)
    panel.micro_batch.value = 2
    eventually(lambda: panel.plan is not None and panel.plan.micro_batch == 2)
    eventually(lambda: "8 × H200" in panel.children[-2].value)
    figure = json.loads(panel.children[-1].figure)
    assert "text" not in figure["layout"]["title"]  # the heading stands above
    assert len(figure["data"]) > 2


def test_where_nothing_fits_the_planners_sentence_stands_in_the_panel() -> None:
    panel = WhatIf(profile(), Cluster.of("h200", gpus=4), global_batch=64, seq_len=128)
    panel.memory_gib.value = 0.1
    eventually(lambda: panel.plan is None)
    assert "GiB" in panel.children[-2].value
    eventually(lambda: not json.loads(panel.children[-1].figure)["data"])  # nor does an earlier plan stand below it
    panel.memory_gib.value = panel.memory_gib.max
    eventually(lambda: panel.plan is not None and "data parallel" in panel.children[-2].value)


def test_of_many_moves_of_a_slider_the_last_one_is_shown() -> None:
    panel = WhatIf(profile(), Cluster.of("h200", gpus=4), global_batch=64, seq_len=128)
    for gpus in (1, 2, 4, 8, 16, 32):
        panel.gpus.value = gpus
    eventually(lambda: panel.plan is not None and panel.plan.cluster.gpus == 32)
    time.sleep(0.2)
    assert panel.plan is not None
    assert panel.plan.cluster.gpus == 32


def test_plots_send_plotly_js_once_for_a_kernel_and_load_it_outside_of_their_module() -> None:
    first, second = Plot(), growing_plot(go.Figure())
    assert len(first._esm) < 20_000, "anywidget allows the module of a widget two seconds to load"
    assert first.library is second.library
    assert first.get_state(["library"]) == {"library": f"IPY_MODEL_{first.library.model_id}"}
    assert gzip.decompress(first.library.packed).decode() == plotly_js()
    first.library.close()
    renewed = Plot().library
    assert renewed.comm is not None
    assert Plot().library is renewed


def test_a_run_that_trained_on_after_its_loss_was_lost_is_no_green_finished_run(tmp_path: Path) -> None:
    run = start_run(tmp_path / "lost")
    train(run, 1, 3)
    append_event(run.events, "step", step=4, loss=float("nan"), seconds=2.0, tokens=4000, step_ms=500.0)
    end(run, "finished")
    table = list_runs(tmp_path)
    assert "finished, not finite" in repr(table)
    assert "finished, not finite" in progress_line(table[0].row())
    live_table, dashboard = LiveTable(table), live(table[0])
    for shown in (cells(live_table)[0], dashboard.twin()[0]):
        assert "not finite" in shown
        assert STATE_COLORS["failed"] in shown
        assert STATE_COLORS["finished"] not in shown
    live_table.close()
    dashboard.close()
