"""Runs of a sweep and seeds of a recipe, folded into one row and one colour, of which the best stands out."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.logs import append_event
from tests.patience import eventually
from workbench.figures import theme
from workbench.figures.curves_view import loss_curves
from workbench.figures.figure import picture
from workbench.lab.handlers import dashboard_of
from workbench.record.history import final_loss
from workbench.record.rundir import RunDir, this_process, write_json, write_record
from workbench.record.step_table import log_steps
from workbench.runs.run import Run
from workbench.sweeps.queue import QueueDir, groups_of
from workbench.widgets import dashboard as dashboard_module
from workbench.widgets import live
from workbench.widgets.dashboard import rows_html
from workbench.widgets.run_reader import Fold, RunReader, Snapshot, folds_of, with_looks

STEPS, TOKENS = 40, 100
RATES = (1e-4, 1e-3, 1e-2)
LOSSES = {1e-4: 4.0, 1e-3: 3.0, 1e-2: 5.0}


def noisy(rate: float, seed: int, step: int) -> float:
    return LOSSES[rate] + 2 / step + 0.1 * math.sin(step * (seed + 1)) + 0.05 * seed


def write_member(path: Path, rate: float, seed: int, steps: int = STEPS, **described: Any) -> Run:
    path.mkdir(parents=True)
    run, state = RunDir(path), "finished" if steps == STEPS else "running"
    write_record(run.experiment, {"name": "m", "steps": STEPS, "learning_rate": rate, "seed": seed, **described})
    write_record(run.environment, {})
    write_json(run.launcher, {"supervisor": this_process()})
    append_event(run.events, "start", devices=["cpu"], world=1, resumed_from=None)
    counted = {"samples": 1.0, "flops": 1e9, "step_ms": 1.0, "tokens_per_s": 2.0}
    rows: list[dict[str, Any]] = [
        {"step": s, "loss": noisy(rate, seed, s), "time": 1e9 + s, "tokens": TOKENS * s, "seconds": s, **counted}
        for s in range(1, steps + 1)
    ]
    log_steps(path, rows)
    append_event(run.events, "status", state=state, message="")
    return Run(path)


def swept(folder: Path, rates: Sequence[float] = RATES, seeds: int = 3, steps: int = STEPS) -> list[Run]:
    """Return the runs of a sweep over rates; the last seed of the last rate has taken so many steps."""
    folder.mkdir()
    write_json(folder / "sweep.json", {"axes": {"learning_rate": list(rates)}})
    entries = [{"choices": {"learning_rate": at}, "seed": s} for at in range(len(rates)) for s in range(seeds)]
    write_json(folder / "queue.json", entries)
    queue = QueueDir(folder)
    taken = {len(entries) - 1: steps}
    return [
        write_member(queue.run(e), rates[e.choices["learning_rate"]], e.seed, taken.get(e.index, STEPS))
        for e in queue.queue()
    ]


def folded(runs: Sequence[Run]) -> tuple[list[Snapshot], list[Fold]]:
    snapshots = [RunReader(run.path).read() for run in runs]
    folds = folds_of(snapshots, groups_of(runs))
    return with_looks(snapshots, folds), folds


def lines_of(figure: Any) -> list[Any]:
    return [trace for trace in figure.data if trace.meta == "line"]


def test_of_a_sweep_all_curves_have_one_hue_and_the_lowest_loss_alone_is_in_full_colour(tmp_path: Path) -> None:
    snapshots, [fold] = folded(swept(tmp_path / "rates", seeds=1))
    assert fold.words.startswith("best learning_rate 0.001: loss 3.")
    figure = loss_curves([each.curve for each in snapshots], smoothing=0.0)
    colors = [trace.line.color for trace in lines_of(figure)]
    blue = theme.series_color(0)
    assert colors == [theme.pale(blue, 0.55), blue, theme.pale(blue, 0.55)]
    assert [trace.name for trace in figure.data if trace.showlegend] == ["rates: best of 3, learning_rate 0.001"]
    [end] = [trace for trace in figure.data if trace.meta == "end"]
    assert end.marker.color == blue
    assert {trace.legendgroup for trace in figure.data} == {"0"}, "one click hides the sweep"
    for trace, snapshot in zip(lines_of(figure), snapshots, strict=True):
        assert trace.hovertemplate.startswith(snapshot.name), "in dark letters, whatever the colour of the curve"
    assert picture(figure)[:4] == b"\x89PNG"


@pytest.mark.parametrize("x", ["step", "tokens"])
def test_seeds_are_a_mean_in_a_band_that_equals_the_mean_over_their_losses(tmp_path: Path, x: str) -> None:
    snapshots, [fold] = folded(swept(tmp_path / "rates"))
    figure = loss_curves([each.curve for each in snapshots], x=x, smoothing=0.0)
    losses = np.array([[noisy(1e-3, seed, step) for step in range(1, STEPS + 1)] for seed in range(3)])
    [best] = [trace for trace in lines_of(figure) if trace.showlegend]
    assert best.y == pytest.approx(losses.mean(axis=0))
    assert list(best.x) == pytest.approx([(TOKENS / 1000 if x == "tokens" else 1) * s for s in range(1, STEPS + 1)])
    [band] = [trace for trace in figure.data if trace.fill == "toself"]
    assert band.y == pytest.approx([*losses.max(axis=0), *losses.min(axis=0)[::-1]])
    assert len(lines_of(figure)) == 3, "the runs themselves are not drawn beside the means of their settings"
    [end] = [trace for trace in figure.data if trace.meta == "end"]
    finals = [final_loss(range(1, STEPS + 1), list(of_seed)) for of_seed in losses]
    assert end.y[0] == pytest.approx(np.mean(finals))
    assert fold.words == f"best learning_rate 0.001: loss {np.mean(finals):.4g}, mean of 3 seeds"


def test_a_seed_that_is_far_behind_is_a_thin_line_beside_the_mean_of_the_others(tmp_path: Path) -> None:
    snapshots, [fold] = folded(swept(tmp_path / "rates", rates=(1e-2, 1e-3), steps=STEPS // 2))
    assert fold.averaged == frozenset(range(5)), "the last is half as far as the two others of its setting"
    figure = loss_curves([each.curve for each in snapshots], smoothing=0.0)
    assert fold.words.endswith("mean of 2 seeds")
    assert sorted(len(trace.x) for trace in lines_of(figure)) == [STEPS // 2, STEPS, STEPS]
    [behind] = [trace for trace in lines_of(figure) if len(trace.x) == STEPS // 2]
    assert behind.line.color == theme.pale(theme.series_color(0), 0.55)


def test_losses_that_do_not_compare_have_no_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.widgets.run_reader.why_not_compared", lambda *_: "They differ in their data.")
    snapshots, [fold] = folded(swept(tmp_path / "rates", seeds=1))
    assert (fold.best, fold.words) == (None, "their losses do not compare")
    assert not any(snapshot.look and snapshot.look.best for snapshot in snapshots)


def test_menus_move_the_mean_with_its_axis_and_its_smoothing(tmp_path: Path) -> None:
    snapshots, _ = folded(swept(tmp_path / "rates"))
    curves = [each.curve for each in snapshots]
    figure, steps = loss_curves(curves, x="tokens"), loss_curves(curves, x="step")
    menus = {menu.buttons[0].label: menu.buttons for menu in figure.layout.updatemenus}
    [to_step] = [button for button in menus["x: step"] if button.label == "x: step"]
    for moved, drawn in zip(to_step.args[0]["x"], steps.data, strict=True):
        assert [float(value) for value in moved] == pytest.approx(list(map(float, drawn.x)), rel=1e-5)
    [wider] = [button for button in menus["smoothing 0 %"] if button.label == "smoothing 10 %"]
    heights, places = wider.args[0]["y"], wider.args[1]
    again = loss_curves(curves, x="tokens", smoothing=0.1)
    for at, values in zip(places, heights, strict=True):
        assert [float(value) for value in values] == pytest.approx(list(map(float, again.data[at].y)), abs=2e-5)


def test_many_runs_are_folded_until_their_arrow_is_pressed_and_few_are_not(tmp_path: Path) -> None:
    runs = swept(tmp_path / "rates", steps=STEPS // 2)
    dashboard = live(runs)
    [row] = dashboard.children[0].children
    assert "9 runs of a sweep: 8 finished, 1 running" in row.children[-1].value
    assert row.children[0].tooltip == "Show the 9 runs of rates"
    assert len([trace for trace in dashboard.figure.data if trace.showlegend]) == 1
    row.children[0].click()
    eventually(lambda: len(dashboard.children[0].children) == 10)
    eventually(lambda: len([trace for trace in dashboard.figure.data if trace.showlegend]) == 9)
    starred = [box for box in dashboard.children[0].children[1:] if "★" in box.children[0].value]
    assert len(starred) == 3, "the seeds of the best setting"
    dashboard.children[0].children[0].children[0].click()
    eventually(lambda: len(dashboard.children[0].children) == 1)
    dashboard.close()
    few = live(runs[6:])
    assert len(few.children[0].children) == 4, "their row, and one of each"
    few.close()


def test_all_runs_of_a_group_stop_after_a_second_click_and_none_after_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_module, "SURE_S", math.inf)
    runs = swept(tmp_path / "rates", steps=STEPS // 2)
    dashboard = live(runs)
    [row] = dashboard.children[0].children
    stop = next(child for child in row.children[1:] if type(child).__name__ == "Button")
    stop.click()
    assert stop.description == "Stop 1?"
    assert not any(run.directory.stop_file.exists() for run in runs)
    stop.click()
    assert [run.directory.stop_file.exists() for run in runs] == [False] * 8 + [True]
    dashboard.close()


def test_the_page_of_a_group_in_the_sidebar_is_folded_and_three_ticked_runs_are_not(tmp_path: Path) -> None:
    runs = swept(tmp_path / "rates")
    for shown, entries in ((runs, 1), (runs[:3], 3)):
        loss = json.loads(dashboard_of(shown)["figures"][0])
        assert sum(trace["showlegend"] for trace in loss["data"]) == entries


def test_a_saved_notebook_keeps_the_rows_of_a_group_folded_below_its_own(tmp_path: Path) -> None:
    snapshots, folds = folded(swept(tmp_path / "rates", seeds=1))
    page = rows_html(snapshots, [snapshot.name for snapshot in snapshots], folds)
    head, _, members = page.partition("</summary>")
    assert head.count("<details>") == 1
    assert "best learning_rate 0.001" in head
    assert all(snapshot.name in members for snapshot in snapshots)
