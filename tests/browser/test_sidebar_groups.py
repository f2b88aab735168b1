"""Runs that belong together in JupyterLab's sidebar: one row, a baseline, what differs, and their end at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lab
import pytest
from test_runs_sidebar import LINES, ROW, find, open_sidebar, write_run

from tests.logs import append_event
from tests.patience import eventually
from workbench.record.rundir import RunDir, read_record, write_record

pytestmark = pytest.mark.usefixtures("runs")
GROUP, MEMBER = ".wb-group", ".wb-member"
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
"""What a notebook names so that JupyterLab opens it without asking for a kernel."""


def write_seed(path: Path, seed: int, age_s: float, **how: Any) -> RunDir:
    run = write_run(path, age_s, rate=1e-3 * 1.1**seed, **how)
    described = {**read_record(run.experiment), "name": "bert-tiny", "learning_rate": 1e-3, "seed": seed}
    at = run.experiment.stat().st_mtime
    write_record(run.experiment, {name: value for name, value in described.items() if name != "crc32_of_record"})
    os.utime(run.experiment, (at, at))
    return run


@pytest.fixture
def runs(server: lab.Server) -> Iterator[Path]:
    """Let the server's folder hold four seeds of a recipe, of which one trains, and two other runs."""
    with lab.own_runs(server) as folder:
        (server.root / "study.ipynb").write_text(
            json.dumps({"cells": [], "metadata": {"kernelspec": KERNEL}, "nbformat": 4, "nbformat_minor": 5})
        )
        for seed in range(4):
            state = "running" if seed == 3 else "finished"
            run = write_seed(folder / f"bert-tiny-{seed}", seed, 100 - seed, state=state)
            write_record(run.environment, {"notebook": str(server.root / "study.ipynb")})
        (folder / "bert-tiny-0" / "checkpoints" / "step-00000060").mkdir(parents=True)
        write_run(folder / "rate-small", 50, rate=1e-4)
        write_run(folder / "rate-large", 40, rate=1e-2)
        yield folder


def accept(page: Any) -> str:
    """Accept the dialog; return what it said."""
    said: str = page.locator(".jp-Dialog-body").inner_text()
    page.locator(".jp-Dialog-footer button").last.click()
    page.locator(".jp-Dialog").wait_for(state="detached")
    return said


def test_seeds_are_one_row_that_unfolds_links_its_notebook_and_ends_all_at_once(
    lab_page: Any, server: lab.Server, runs: Path, picture: Any
) -> None:
    open_sidebar(lab_page, server)
    group = lab_page.locator(GROUP)
    group.get_by_text("4 seeds: 1 running, 3 finished").wait_for()
    assert lab_page.locator(ROW).count() == 3
    assert lab_page.locator(".wb-count").first.inner_text() == "6 runs"
    said = group.locator(".wb-said")
    assert " ± " in said.inner_text(), "a mean with half of the range"
    assert said.evaluate("node => node.scrollWidth - node.clientWidth") <= 0, "neither number is cut"
    assert group.locator(".wb-sparkline polygon").count() == 1
    picture(lab_page, "run-groups-folded")
    group.get_by_role("button", name="Show the runs").focus()
    lab_page.keyboard.press("Enter")
    lab_page.locator(MEMBER).nth(3).wait_for()
    is_open = lab_page.evaluate("() => document.activeElement.getAttribute('aria-expanded')")
    assert is_open == "true", "the arrow keeps the focus"
    names = lab_page.locator(f"{MEMBER} .wb-name").all()
    in_order = sorted(names, key=lambda each: each.bounding_box()["y"])
    assert [each.text_content() for each in in_order] == ["seed 3", "seed 2", "seed 1", "seed 0"], "newest first"
    assert [each.text_content() for each in names] == [each.text_content() for each in in_order], "so do the keys"
    picture(lab_page, "run-groups")
    lab.change_theme(lab_page, "Dark")
    picture(lab_page, "run-groups-dark")
    lab.change_theme(lab_page, "Light")

    group.hover()
    group.get_by_role("button", name="Delete these runs").click()
    lab_page.get_by_text("1 of them still trains").wait_for()
    accept(lab_page)
    group.hover()
    group.get_by_role("button", name="Write checkpoints").click()
    lab_page.get_by_text("1 of 4 runs trains").wait_for()
    picture(lab_page, "run-groups-stop")
    accept(lab_page)
    eventually((runs / "bert-tiny-3" / "STOP").exists)
    assert not (runs / "bert-tiny-2" / "STOP").exists()

    group.hover()
    group.get_by_role("button", name="Open study.ipynb").click()
    lab_page.locator(".jp-NotebookPanel").wait_for()
    lab_page.locator(".jp-Dialog").wait_for(state="detached")


def test_ticked_runs_tell_what_differs_and_are_archived_and_deleted_after_a_question(
    lab_page: Any, server: lab.Server, runs: Path, picture: Any
) -> None:
    open_sidebar(lab_page, server)
    rows = find(lab_page, "rate-")
    for index in range(2):
        rows.nth(index).locator(".wb-tick").check()
    lab_page.get_by_role("button", name="Everything in which").click()
    table = lab_page.locator(".wb-differs")
    table.wait_for()
    cells = table.locator("tr").filter(has_text="learning_rate").locator("td").all_text_contents()
    assert cells == ["experiment.learning_rate", "0.01", "0.0001"]
    picture(lab_page, "runs-differ")
    accept(lab_page)
    bulk = lab_page.locator(".wb-bulk")
    bulk.get_by_role("button", name="Delete").click()
    lab_page.get_by_text("2 runs will be deleted").wait_for()
    lab_page.locator(".jp-Dialog .jp-mod-reject").click()
    assert (runs / "rate-small").exists()
    bulk.get_by_role("button", name="Hide these runs").click()
    assert "Nothing is deleted" in accept(lab_page)
    lab_page.get_by_text("None of 6 runs matches.").wait_for()
    assert json.loads((runs / "rate-small" / "labels.json").read_text())["archived"]
    bulk.get_by_role("button", name="Delete").click()
    assert "0 checkpoints, curves, logs and notes" in accept(lab_page)
    eventually(lambda: not (runs / "rate-small").exists() and not (runs / "rate-large").exists())
    eventually(lambda: not [path for path in runs.iterdir() if path.name.startswith(".")])
    find(lab_page, "")
    lab_page.get_by_text("4 runs", exact=True).wait_for()


def test_a_pinned_baseline_comes_first_is_drawn_beside_every_run_and_all_say_how_far_they_are_from_it(
    lab_page: Any, server: lab.Server, picture: Any
) -> None:
    open_sidebar(lab_page, server)
    row = find(lab_page, "rate-small")
    row.hover()
    row.get_by_role("button", name="Pin rate-small").click()
    find(lab_page, "rate-large")
    assert lab_page.locator(f"{ROW} .wb-name").first.text_content() == "baseline rate-small"
    other = lab_page.locator(ROW).filter(has_text="rate-large")
    other.get_by_text("Δ -0.4").wait_for()
    other.locator(".wb-name").click()
    lab_page.locator(LINES).nth(1).wait_for(state="attached")
    legend = lab_page.locator(".wb-plot .legendtext").all_text_contents()
    assert any("(baseline)" in name for name in legend), legend
    lab_page.get_by_title("Move to the main area").click()
    lab_page.locator(".lm-DockPanel .wb-run").first.wait_for()
    find(lab_page, "")
    lab_page.locator(".wb-header").filter(has_text="From baseline").wait_for()
    picture(lab_page, "runs-with-baseline")
    lab.change_theme(lab_page, "Dark")
    picture(lab_page, "runs-with-baseline-dark")
    lab.change_theme(lab_page, "Light")
    lab_page.get_by_title("Move back to the side").click()


def test_the_browser_tells_who_has_asked_for_it_that_a_loss_stays_and_that_a_run_has_failed(
    lab_page: Any, server: lab.Server, runs: Path
) -> None:
    lab_page.add_init_script(
        "window.told = []; window.Notification = class { static permission = 'default';"
        "static async requestPermission() { return this.permission = 'granted'; }"
        "constructor(title, {body}) { window.told.push(`${title}: ${body}`); } };"
    )
    open_sidebar(lab_page, server)
    find(lab_page, "bert-tiny-3")
    lab_page.locator(MEMBER).wait_for()
    told = "() => window.told.join('; ')"
    going = RunDir(runs / "bert-tiny-3")
    append_event(
        going.events, "alert", alert="plateau", message="Up to step 60 the loss has changed by 0 only.", step=60
    )
    lab_page.get_by_text("Up to step 60").wait_for(state="attached")
    assert lab_page.evaluate(told) == "", "nobody has asked yet"
    lab_page.get_by_label("notices").check()
    append_event(going.events, "alert", alert="plateau", message="Up to step 90 it has as well.", step=90)
    lab_page.wait_for_function("() => window.told.length == 1")
    append_event(going.events, "status", state="failed", message="rank 0: the <b>disk</b> is full")
    lab_page.wait_for_function("() => window.told.length == 2")
    assert lab_page.evaluate(told) == (
        "bert-tiny-3: Up to step 90 it has as well.; bert-tiny-3: failed. rank 0: the <b>disk</b> is full"
    )
