"""A researcher's day in a real JupyterLab: from the launcher's card to a page for a colleague."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lab
import pytest

from tests.patience import PATIENCE_S, eventually
from workbench.notebooks.pages import notebook_to_html
from workbench.record.event_log import read_events
from workbench.record.rundir import FINAL_STATES
from workbench.runs.launching.processes import rank_records
from workbench.runs.registry import list_runs

STEPS = 100_000
"""Number of steps that no machine finishes before the test presses Stop."""


@pytest.fixture
def folder(server: lab.Server) -> Iterator[Path]:
    """Return the folder of the runs that the server's kernels launch; runs that are left are stopped after the test."""
    runs = server.root / "runs"
    yield runs
    for run in list_runs(runs):
        run.stop()
    for run in list_runs(runs):
        run.wait(PATIENCE_S)


def is_running(page: Any, text: str) -> bool:
    """Return True if the kernel runs the cell whose source holds `text`."""
    cell = f"{lab.CELLS}.find(w => w.model.sharedModel.getSource().includes(text))"
    return bool(page.evaluate(f"(text) => {cell}.model.executionState === 'running'", text))


LIVE = "document.querySelector('.jupyter-widgets .js-plotly-plot')"
REMEMBER_PROGRESS = """() => {
  window.progress = [];
  new MutationObserver(() => {
    const line = document.querySelector('.workbench-progress');
    if (!line || window.progress.at(-1)?.words === line.textContent) return;
    const place = line.getBoundingClientRect();
    const area = document.querySelector('.jp-WindowedPanel-outer').getBoundingClientRect();
    const inView = place.top >= area.top && place.bottom <= area.bottom;
    window.progress.push({ words: line.textContent, inView });
  }).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""
"""Keeps all that the line of progress says, and whether it was in view: its words may be gone before a test looks."""


def stop_buttons(page: Any) -> Any:
    return page.locator(".jupyter-widgets").get_by_role("button", name=re.compile("^Stop "))


def lower_priority(folder: Path) -> None:
    """Lower the priority of the training ranks: the test waits for the browser and the kernel on the same cores.

    By four levels, which leave them 0.4 of another process's share; by ten, which leave a tenth, they may not come to
    ten steps within the test's patience where all cores are busy.
    """
    for run in list_runs(folder):
        for record in rank_records(run.directory):
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, record["pid"], min(19, os.getpriority(os.PRIO_PROCESS, 0) + 4))


def start_with_parameters(page: Any, title: str, **values: Any) -> None:
    """Start a template with other parameters, by the last card of the launcher's section."""
    page.locator(lab.CARD, has_text="Change parameters").click()
    page.locator(".jp-Dialog select").select_option(label=title)
    page.get_by_role("button", name="Ok").click()
    for name, value in values.items():
        page.locator(f"#workbench-{name}").fill(str(value))
    page.get_by_role("button", name="Start").click()


def assert_progress_was_told(page: Any) -> None:
    """Check what the cell of the curve said before the curve was there: which cell ran, in view, from first to last."""
    told = page.evaluate("window.progress")
    first = told[0]["words"]
    assert re.match(r"starting the kernel|cell \d+ of \d+", first), f"a kernel may be there at once: {first}"
    cells = [int(found[1]) for each in told if (found := re.match(r"cell (\d+) of \d+: \w", each["words"]))]
    assert len(set(cells)) > 2, f"it says which cell runs, unless that is over at once: {told}"
    assert cells == sorted(cells), told
    assert told[-1]["inView"], told
    assert page.locator(".workbench-progress").count() == 0


@pytest.mark.representative
def test_from_the_launcher_to_a_page_for_a_colleague(
    lab_page: Any, server: lab.Server, folder: Path, tmp_path: Path, picture: Any
) -> None:
    page = lab_page
    lab.open_launcher(page, server)
    picture(page.locator(".jp-Launcher-section", has_text="Workbench"), "lab-cards")
    page.evaluate(REMEMBER_PROGRESS)
    (kernel,) = eventually(lambda: lab.prepared_kernels(server))
    page.locator(lab.CARD, has_text="Scaled BERT").click()  # one click makes, opens and runs a notebook
    page.wait_for_function("() => window.progress.length")
    notebook = "window.jupyterapp.shell.currentWidget?.content"
    page.wait_for_function(f"() => {notebook}?.widgets?.some(({{model}}) => model.executionCount)")
    assert page.title().startswith("bert_scaling")
    used = page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.id")
    assert used == kernel, "the notebook has the kernel that was prepared while the cards were shown"
    assert not list(server.root.glob("Untitled*"))
    page.goto("about:blank")
    lab.end_kernels(server)
    for run in list_runs(folder):
        run.kill()

    lab.open_launcher(page, server)
    lab.stop_clock(page)
    page.locator(lab.CARD, has_text="Which learning rate").click(button="right")  # a card's menu has its own form
    page.get_by_role("menuitem", name="Change parameters").click()
    assert page.locator("#workbench-learning_rates").input_value() == "[1e-3, 6e-3]"
    page.wait_for_function("() => document.activeElement.id === 'workbench-corpus'")  # the first field
    page.get_by_role("button", name="Cancel").click()
    start_with_parameters(page, "Scaled BERT against BERT-Large", steps="many", global_batch=8, seq_len=32)
    page.get_by_role("alert").get_by_text("Experiment.steps='many' is not a whole number.").wait_for()
    assert page.locator("#workbench-seq_len").input_value() == "32"
    page.wait_for_function("() => document.activeElement.id === 'workbench-steps'")  # the field that is refused
    picture(page.locator(".jp-Dialog-content"), "lab-parameters")
    page.evaluate(REMEMBER_PROGRESS)
    page.locator("#workbench-steps").fill(str(STEPS))
    page.get_by_role("button", name="Start").click()

    page.locator(".jupyter-widgets span", has_text="running").first.wait_for()
    lower_priority(folder)
    lab.wait_for_curve(page)
    picture(page, "lab-first-curve")
    assert_progress_was_told(page)
    lab.wait_for_step(page, 30)
    lab.wait_for_step(page, page.evaluate(lab.STEPS)[-1] + 20)  # the curve grows while the cell below still waits
    assert is_running(page, "run.wait()")
    eventually(lambda: page.evaluate(lab.DRAWN) > 10)  # it is still in view
    picture(page, "lab-training")

    for left in (1, 0):  # the run that trains, and the one that waits for its devices
        stop_buttons(page).first.click()
        eventually(lambda left=left: stop_buttons(page).count() == left)
    eventually(lambda: all(run.status.final for run in list_runs(folder)), lambda: list_runs(folder))
    stopped = max((run for run in list_runs(folder) if run.checkpoints), key=lambda run: run.row()["step"])
    reached = stopped.row()["step"]
    assert stopped.status.state == "stopped"
    page.get_by_role("button", name="Resume").first.wait_for()
    picture(page, "lab-stopped")

    lab.write_notebook(server.root / "again.ipynb", [f"import workbench as wb\nwb.live(wb.load_run({stopped.name!r}))"])
    lab.open_notebook(page, server, "again.ipynb")  # another kernel, which launched nothing
    lab.run_all(page)
    page.get_by_role("button", name="Resume").first.click()
    lab.wait_for_step(page, reached + 10)
    lower_priority(folder)
    lab.restart_kernel(page)
    lab.run_all(page)
    lab.wait_for_step(page, reached + 20)
    picture(page, "lab-resumed")
    marks = page.evaluate(f"() => Array.from({LIVE}._fullData.find(t => t.meta === 'mark').customdata)")
    assert f"resumed at step {reached:,}" in marks

    stop_buttons(page).first.click()
    eventually(lambda: stopped.status.final)
    page.locator(".jp-RenderedPlotly").first.hover()
    page.wait_for_selector(".jp-RenderedPlotly .main-svg")
    lab.save(page)
    assert_each_step_once(stopped)
    assert page.refused == []
    share_and_hover(page, server.root / "again.ipynb", tmp_path, picture)


def assert_each_step_once(run: Any) -> None:
    steps = list(run.history().step)
    assert steps == list(range(1, len(steps) + 1))
    assert [e["state"] for e in read_events(run.directory.events) if e["type"] == "status"][-1] in FINAL_STATES


def share_and_hover(page: Any, notebook: Path, folder: Path, picture: Any) -> None:
    """Open the exported page without a network, and check that a point responds to the pointer."""
    shared = notebook_to_html(notebook, folder / "shared.html")
    assert "plotly" in json.dumps(json.loads(notebook.read_text())["cells"][0]["outputs"])
    page.context.set_offline(True)
    page.goto(shared.as_uri())
    page.wait_for_selector(".js-plotly-plot .main-svg")
    lab.wait_until_still(page)
    box = page.locator(".js-plotly-plot .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.7 * box["height"])
    page.get_by_text("Tokens (").first.wait_for()
    assert "loss" in (page.locator(".hoverlayer").first.text_content() or "")
    picture(page, "shared-offline")
