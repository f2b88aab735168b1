"""The sidebar of runs in JupyterLab, without a kernel: a thousand runs, search, comparison of ticked rows, stopping."""

from __future__ import annotations

import io
import math
import os
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lab
import numpy as np
import pytest
from PIL import Image

from tests.logs import append_event
from tests.patience import PATIENCE_S, eventually
from workbench.record.rundir import RunDir, this_process, write_json, write_record
from workbench.record.step_table import log_steps

HOSTILE = "<img src=x onerror=document.title='hacked'>"
pytestmark = pytest.mark.usefixtures("runs")
ROW = ".wb-run"
LINES = ".wb-plot:nth-of-type(4) .scatterlayer .trace path.js-line"


def write_run(path: Path, age_s: float, state: str = "finished", rate: float = 1e-4, diverges: bool = False) -> RunDir:
    run = RunDir(path)
    path.mkdir(parents=True)
    steps, now = 60, time.time()
    begun = now - age_s
    write_record(run.experiment, {"name": "small", "steps": 2 * steps, "learning_rate": rate, "seed": 0})
    write_record(run.environment, {})
    write_json(
        run.launcher, {"supervisor": this_process() if state == "running" else {"pid": 2**22 + 1, "created": 0.0}}
    )
    append_event(run.events, "start", devices=["cpu"], world=1, resumed_from=None, time=begun)
    rows = []
    for step in range(1, steps + 1):
        loss = 2 - 0.2 * math.log10(rate) + 4 * math.exp(-step / 15) + 0.05 * math.sin(7 * step)
        loss *= 1.5 ** (step - 40) if diverges and step > 40 else 1.0
        counted = {"tokens": step * 1000, "samples": step, "flops": step * 1e9, "seconds": step / 2}
        speed = {"step_ms": 500.0, "tokens_per_s": 2000.0, "learning_rate": rate, "grad_norm": 1.0}
        rows.append({"step": step, "loss": loss, "time": begun + step, **counted, **speed})
    log_steps(run.path, rows)
    append_event(run.events, "status", state=state, message="", time=begun + steps)
    os.utime(run.experiment, (begun, begun))
    return run


@pytest.fixture(scope="module")
def runs(server: lab.Server) -> Iterator[Path]:
    """Let the server's folder hold a thousand runs."""
    with lab.own_runs(server) as folder:
        for number in range(995):
            write_run(folder / f"old-{number:03d}", 10_000 + number)
        write_run(folder / "rate-small", 50, rate=1e-4)
        write_run(folder / "rate-large", 40, rate=1e-3)
        write_run(folder / "rate-too-large", 30, rate=1.0, diverges=True)
        write_run(folder / HOSTILE, 20)
        write_run(folder / "going", 10, state="running")
        yield folder


def open_sidebar(page: Any, server: lab.Server) -> None:
    """Open JupyterLab and the sidebar, and wait for the first rows."""
    page.goto(f"{server.url}/lab?token={server.token}&reset")
    page.wait_for_selector(".jp-Launcher")
    page.locator('[data-id="workbench-runs"]').click()
    page.wait_for_selector(f"{ROW} .wb-sparkline polyline")


def search(page: Any, words: str) -> str:
    """Search for words; return what the list says of the number once the page has heard of them, without a wait."""
    return page.evaluate(
        """words => {
            const field = document.querySelector('.wb-search');
            field.value = words;
            field.dispatchEvent(new Event('input'));
            return document.querySelector('.wb-count').textContent;
        }""",
        words,
    )


def find(page: Any, words: str) -> Any:
    page.fill(".wb-search", words)
    return page.locator(ROW)


def test_a_thousand_runs_open_and_are_searched_at_once(lab_page: Any, server: lab.Server, picture: Any) -> None:
    asked: list[str] = []
    lab_page.on("request", lambda request: "/workbench/run" in request.url and asked.append(request.url))
    open_sidebar(lab_page, server)
    lab_page.get_by_text("1000 runs").wait_for()
    assert search(lab_page, "old-07") == "10 runs, 990 not shown"
    assert lab_page.locator(ROW).count() == 10
    find(lab_page, "")
    assert lab_page.locator(ROW).count() < 60, "only rows in view are in the page"
    assert all("/runs?since=" in url for url in asked), "no row is asked for alone"
    picture(lab_page, "runs-sidebar")


def test_a_fault_of_one_module_leaves_the_others(lab_page: Any, server: lab.Server) -> None:
    broken = {"content_type": "text/javascript", "body": "export default () => { throw Error('planted'); }"}
    lab_page.route("**/workbench/static/launcher.js", lambda route: route.fulfill(**broken))
    open_sidebar(lab_page, server)
    assert "Workbench goes without launcher.js: Error: planted" in lab_page.said
    assert lab_page.locator(lab.CARD).count() == 0


def test_a_browser_asks_for_changed_modules_whose_names_stay_when_workbench_is_upgraded(server: lab.Server) -> None:
    for name in ("remoteEntry.js", "sidebar.js", "sidebar.css"):
        address = f"{server.url}/lab/extensions/workbench/static/{name}?token={server.token}"
        with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
            assert answer.headers["Cache-Control"] == "no-cache"


def test_ticked_runs_are_compared_in_both_themes_and_a_diverged_one_flattens_none(
    lab_page: Any, server: lab.Server, picture: Any
) -> None:
    open_sidebar(lab_page, server)
    rows = find(lab_page, "rate-")
    for index in range(3):
        rows.nth(index).locator(".wb-tick").check()
    lab_page.locator(".wb-compare").click()
    lab_page.locator(LINES).nth(2).wait_for(state="attached")
    legend = lab_page.locator(".wb-plot .legendtext").all_text_contents()
    assert sorted(legend) == ["learning_rate 0.0001", "learning_rate 0.001", "learning_rate 1.0"]
    ticks = lab_page.locator(".wb-plot:nth-of-type(4) .ytick text").all_text_contents()
    assert max(float(tick) for tick in ticks) < 100, ticks
    assert "diverges" in lab_page.locator(".wb-plot").first.inner_text()
    titles = " ".join(lab_page.locator(".wb-plot").nth(1).locator(".annotation-text").all_text_contents())
    assert "tokens/s" in titles.lower(), titles
    picture(lab_page, "lab-runs")
    lab.change_theme(lab_page, "Dark")
    dark = "() => getComputedStyle(document.querySelector('.wb-plot .main-svg')).backgroundColor.match(/\\d+/g)[0] < 60"
    lab_page.wait_for_function(dark)
    picture(lab_page, "lab-runs-dark")
    for plot in lab_page.locator(".wb-plot").all():
        seen = Image.open(io.BytesIO(plot.screenshot())).convert("L")
        assert np.median(np.asarray(seen)) < 60, "most of a figure is its ground, which is that of the theme"
    lab.change_theme(lab_page, "Light")


def test_a_row_that_changes_keeps_the_focus_of_the_keyboard_and_no_button_of_it_is_cut(
    lab_page: Any, server: lab.Server, runs: Path
) -> None:
    open_sidebar(lab_page, server)
    row = find(lab_page, "going")
    row.locator(".wb-tick").focus()
    lab_page.keyboard.press("Space")
    lab_page.locator(".wb-bulk").get_by_role("button", name="Delete these runs from the disk: 1 ticked").wait_for()
    counted = {"loss": 2.5, "tokens": 61_000, "seconds": 31.0, "step_ms": 500.0, "tokens_per_s": 2000.0}
    append_event(RunDir(runs / "going").events, "step", step=61, **counted)
    row.get_by_text("61 of 120").wait_for()
    focused = "() => [document.activeElement.className, document.activeElement.closest('.wb-run')?.dataset.path]"
    assert lab_page.evaluate(focused) == ["wb-tick", str(runs / "going")]
    lab_page.keyboard.press("Tab")
    assert lab_page.evaluate(focused) == ["wb-name", str(runs / "going")]
    right = "node => node.getBoundingClientRect().right"
    assert row.locator(".wb-actions button").last.evaluate(right) < row.evaluate(right)


def test_a_row_stops_its_run_keeps_its_note_and_reads_no_html(
    lab_page: Any, server: lab.Server, runs: Path, picture: Any
) -> None:
    open_sidebar(lab_page, server)
    row = find(lab_page, "going")
    row.hover()
    row.get_by_role("button", name="Write a checkpoint").click()
    row.get_by_text("Stopping").wait_for()
    eventually((runs / "going" / "STOP").exists)
    row = find(lab_page, "onerror")
    assert row.locator(".wb-name").text_content() == HOSTILE
    row.locator(".wb-sparkline").dblclick()
    lab_page.locator(LINES).first.wait_for(state="attached")
    row.hover()
    row.get_by_role("button", name="Note about").click()
    lab_page.locator(".jp-Dialog input").fill("<b>look</b> again")
    lab_page.locator(".jp-Dialog .jp-mod-accept").click()
    row.get_by_text("<b>look</b> again").wait_for()
    row.hover()
    row.get_by_role("button", name="Hide").click()
    lab_page.get_by_text("None of 1000 runs matches.").wait_for()
    find(lab_page, "")
    lab_page.get_by_title("Move to the main area").click()
    lab_page.locator(".lm-DockPanel .wb-run").first.wait_for()
    lab_page.reload()
    lab_page.locator(".lm-DockPanel .wb-run").first.wait_for()
    lab_page.get_by_text("999 runs, 1 not shown").wait_for()
    picture(lab_page, "runs-in-main-area")
    assert "hacked" not in lab_page.title()
    assert lab_page.locator(".wb-run img, .wb-curves img").count() == 0
    assert lab_page.refused == []
