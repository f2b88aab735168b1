"""The what-if panel and the widgets of figures without a browser."""

from __future__ import annotations

import gc
import gzip
import json
from pathlib import Path

import plotly.graph_objects as go
from cost_values import layered_profile as profile
from test_figures_live import alive, end, start_run, train

from tests.logs import append_event
from tests.patience import eventually
from workbench.cost.hardware import Cluster
from workbench.figures.figure import plotly_js
from workbench.planning.search import what_if
from workbench.runs.registry import list_runs, progress_line
from workbench.widgets import WhatIf, live
from workbench.widgets.live_widget import Plot, growing_plot
from workbench.widgets.run_reader import STATE_COLORS


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
    panel.close()


def test_where_nothing_fits_the_planners_sentence_stands_in_the_panel() -> None:
    panel = WhatIf(profile(), Cluster.of("h200", gpus=4), global_batch=64, seq_len=128)
    panel.memory_gib.value = 0.1
    eventually(lambda: panel.plan is None and "GiB" in panel.children[-2].value)
    eventually(lambda: not json.loads(panel.children[-1].figure)["data"])  # nor does an earlier plan stand below it
    panel.memory_gib.value = panel.memory_gib.max
    eventually(lambda: panel.plan is not None and "data parallel" in panel.children[-2].value)
    panel.close()


def test_of_many_moves_of_a_slider_the_last_one_is_shown() -> None:
    panel = WhatIf(profile(), Cluster.of("h200", gpus=4), global_batch=64, seq_len=128)
    for gpus in (1, 2, 4, 8, 16, 32):
        panel.gpus.value = gpus
    eventually(lambda: panel.plan is not None and panel.plan.cluster.gpus == 32)
    panel.wake()
    eventually(lambda: not panel._is_moving)
    assert panel.plan is not None
    assert panel.plan.cluster.gpus == 32
    eventually(lambda: "The batch is too small for 32 devices" in panel.children[-2].value)  # once the sliders rest
    panel.close()


def test_nothing_of_a_panel_is_alive_once_nobody_shows_it_and_its_last_plan_is_kept_by_who_closed_it() -> None:
    def view() -> WhatIf:
        return WhatIf(profile(), Cluster.of("h200", gpus=4), global_batch=64, seq_len=128)

    assert alive(view, times=2) == (0, 0, 0)
    panel = view()
    panel.gpus.value = 8
    panel.close()
    assert panel.plan is not None
    eventually(lambda: not panel.following)
    assert gc.isenabled()


def test_plots_send_plotly_js_once_for_a_kernel_and_load_it_outside_of_their_module() -> None:
    first, second = Plot(), growing_plot(go.Layout(), [])
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
    dashboard = live(table[0])
    shown = dashboard.twin()[0]
    assert "not finite" in shown
    assert STATE_COLORS["failed"] in shown
    assert STATE_COLORS["finished"] not in shown
    dashboard.close()


def test_a_dashboard_has_news_when_its_run_writes_an_event(tmp_path: Path) -> None:
    run = start_run(tmp_path / "news")
    train(run, 1, 3)
    dashboard = live(run.path)
    dashboard.stop()
    dashboard.update()
    assert not dashboard.has_news()
    train(run, 4, 4)
    assert dashboard.has_news()
    dashboard.update()
    assert not dashboard.has_news()
    assert "step 4" in dashboard.twin()[0]
    dashboard.close()
