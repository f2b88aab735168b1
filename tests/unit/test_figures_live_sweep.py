"""The widget of a sweep without a browser: table, buttons, heat map and curves follow the sweep's directory."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_figures_live import alive, end, start_run, train

import workbench as wb
from tests.logs import append_event
from tests.patience import eventually
from workbench.figures.sweep_view import draw_seed_bands, read_losses
from workbench.record.rundir import RunDir, read_json, this_process, write_json, write_record
from workbench.sweeps.queue import Entry, QueueDir, Result
from workbench.sweeps.sweep import Sweep
from workbench.widgets import LiveSweep
from workbench.widgets.dashboard import show_queue


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Return a sweep of two rates and two seeds, whose first two runs train and whose supervisor is this process."""
    directory = QueueDir(tmp_path / "sweep <1>")
    settings = {"experiment": {"evaluation": None}, "axes": {"learning_rate": [1e-3, 1e-4]}, "stop": None}
    settings |= {"sampler": "grid", "trials": None, "seeds": [0, 1], "packing": {"why": "Because."}}
    write_json(directory.settings_file, settings)
    write_json(directory.supervisor, this_process())
    directory.write_queue([Entry(0, {"learning_rate": at}, seed) for seed in range(2) for at in range(2)])
    for entry in directory.queue()[:2]:
        train(begin(directory, entry), 1, 10)
    return wb.sweeps.load_sweep(directory.path)


def begin(directory: QueueDir, entry: Entry) -> RunDir:
    run = start_run(directory.run(entry))
    write_record(run.experiment, {"steps": 100, "name": "sweep", "seed": entry.seed})
    return run


def finish(sweep: Sweep, index: int, objective: float) -> None:
    entry = sweep.directory.queue()[index]
    end(RunDir(sweep.directory.run(entry)), "finished")
    sweep.directory.write_result(entry, Result("finished", objective, 100, 1.0))


def drawn(plot: Any) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = json.loads(plot.figure)["data"]
    return traces


def test_table_heat_map_and_curves_grow_while_the_sweep_runs(sweep: Sweep) -> None:
    widget = LiveSweep(sweep, refresh_s=0.02)
    assert "Sweep sweep &lt;1&gt;: 0 of 4 runs have ended, at work" in widget._head.value
    assert len(widget._at_work.children) == 2
    assert [trace["meta"] for trace in drawn(widget._curves)] == ["other", "other"]
    finish(sweep, 0, 4.5)
    eventually(lambda: len(widget._at_work.children) == 1)
    eventually(lambda: drawn(widget._heat_map)[0]["text"] == [["", "4.5"]])
    eventually(lambda: [trace["meta"] for trace in drawn(widget._curves)] == ["band", "mean", "other"])
    assert ">4.5</td>" in widget._table.value
    train(begin(sweep.directory, sweep.directory.queue()[2]), 1, 10)
    eventually(lambda: len(widget._at_work.children) == 2)
    finish(sweep, 1, 3.5)
    finish(sweep, 2, 4.7)
    eventually(lambda: 0 < widget._table.value.find("3.5") < widget._table.value.find("4.6"))
    assert widget.following
    sweep.directory.supervisor.unlink()
    eventually(lambda: not widget.following)
    assert "not at work" in widget._head.value


def test_files_that_cannot_be_read_for_a_moment_do_not_end_the_view_and_lasting_ones_are_told(sweep: Sweep) -> None:
    widget = LiveSweep(sweep, refresh_s=0.02)
    file, looks, update = sweep.directory.queue_file, Counter[str](), widget.update
    queue = file.read_text()

    def counted() -> bool:
        try:
            ended = update()
        except Exception:
            looks["failed"] += 1
            if looks["failed"] == 1:  # it is whole again before the next look
                file.write_text(queue)
            raise
        looks["went well"] += looks["failed"] > 0
        return ended

    widget.update = counted  # type: ignore[method-assign]
    file.write_text("{")
    eventually(lambda: looks["went well"] > 1)
    assert widget.following
    assert not widget.note.value
    file.write_text("{")
    eventually(lambda: not widget.following)
    assert "This view stopped updating" in widget.note.value


def test_the_button_of_a_run_asks_that_run_alone_to_stop(sweep: Sweep) -> None:
    widget = LiveSweep(sweep, refresh_s=0.02)
    stop = widget._at_work.children[1].children[1]
    assert stop.description == "Stop"
    stop.click()
    first, second = (RunDir(run.path) for run in sweep.runs)
    eventually(second.stop_file.exists)
    assert not first.stop_file.exists()
    end(second, "stopped", "Stopped at step 10 of 100.")
    eventually(lambda: len(widget._at_work.children) == 1)
    widget.close()
    eventually(lambda: not widget.following)


@pytest.mark.parametrize("way", ["closed", "forgotten"])
def test_nothing_of_the_view_of_a_sweep_is_alive_once_nobody_shows_it(sweep: Sweep, way: str) -> None:
    def view() -> LiveSweep:
        widget = LiveSweep(sweep, refresh_s=0.02)
        if way == "closed":
            widget.close()
        return widget

    assert alive(view, times=2) == (0, 0, 0)


def test_a_sweep_that_has_ended_is_shown_without_a_widget(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(sweep, 0, 4.5)
    sweep.directory.supervisor.unlink()
    shown: list[Any] = []
    monkeypatch.setattr("workbench.widgets.dashboard.display", lambda value, **_: shown.append(value))
    show_queue(sweep)
    table, heat_map, curves = shown
    assert "1 of 4 runs have ended, not at work" in table.data
    assert heat_map["application/vnd.plotly.v1+json"]["data"][0]["type"] == "heatmap"
    assert [trace["meta"] for trace in curves["application/vnd.plotly.v1+json"]["data"]] == ["band", "mean", "other"]


def test_a_sweep_without_a_loss_says_so_and_one_that_evaluates_draws_training_losses_until_it_has(
    sweep: Sweep,
) -> None:
    """Plotly draws axes from -1 to 6 where there is nothing to draw, and one evaluation is no line."""
    settings = read_json(sweep.directory.settings_file)
    write_json(sweep.directory.settings_file, settings | {"experiment": {"evaluation": {"every": 5, "metrics": None}}})
    for entry in sweep.directory.queue()[:2]:
        run = RunDir(sweep.directory.run(entry))
        write_record(run.experiment, {"steps": 100, "name": "sweep", "seed": entry.seed, "evaluation": {"every": 5}})
    again = wb.sweeps.load_sweep(sweep.path)
    rows = again.rows()
    nothing: Any = {"tokens": np.empty(0), "loss": np.empty(0)}
    figure = draw_seed_bands(again, rows, lambda run: (nothing, read_losses(run)[1]))
    assert not figure.data
    assert [note.text for note in figure.layout.annotations] == ["no run has a loss yet"]
    assert figure.layout.xaxis.range == figure.layout.yaxis.range == (0, 1)
    figure = draw_seed_bands(again, rows)
    assert {trace.meta for trace in figure.data} == {"other"}
    assert figure.layout.yaxis.title.text == "Training loss"
    for entry in sweep.directory.queue()[:2]:
        figures = {"flops": 1.0, "seconds": 1.0, "samples": 1, "evaluated": 8, "eval_seconds": 0.1}
        append_event(RunDir(sweep.directory.run(entry)).events, "evaluation", step=5, tokens=5, loss=4.25, **figures)
    figure = draw_seed_bands(again, rows)
    assert figure.layout.yaxis.title.text == "Held-out loss"
    assert [(list(trace.y), trace.mode) for trace in figure.data] == [([4.25], "lines+markers")] * 2


def test_a_sweep_of_one_configuration_has_no_map_of_one_cell(sweep: Sweep) -> None:
    settings = read_json(sweep.directory.settings_file)
    write_json(sweep.directory.settings_file, settings | {"axes": {"learning_rate": [1e-3]}})
    sweep.directory.write_queue([entry for entry in sweep.directory.queue() if entry.choices["learning_rate"] == 0])
    alone = wb.sweeps.load_sweep(sweep.path)
    widget = LiveSweep(alone, refresh_s=0.02)
    assert len(alone.rows()) == 1
    assert widget._heat_map.layout.display == "none"
    assert len(widget.twin()) == 2, "a table and curves"
    widget.close()
