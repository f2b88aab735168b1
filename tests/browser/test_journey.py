"""What a researcher does in a day, in a real JupyterLab: from the launcher's template to a page for a colleague."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lab
import pytest

from workbench.figures import notebook_to_html
from workbench.rundir import FINAL_STATES, read_events
from workbench.runs import runs as runs_in

REPOSITORY = Path(__file__).parents[2]
STEPS = 1500
"""More than pass until the test presses Stop."""
AFTER_THE_STOP = 10


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[lab.Server]:
    """A JupyterLab whose launcher has the templates, and whose runs are stopped in the end."""
    runs = tmp_path / "runs"
    environment = {"PYTHONPATH": str(REPOSITORY), "WORKBENCH_RUNS": str(runs), "OMP_NUM_THREADS": "1"}
    home = os.environ.get("WORKBENCH_HOME")
    templates = tmp_path / "lab" / ".jupyter" / "data" / "notebook_templates" / "workbench"
    templates.parent.mkdir(parents=True)
    shutil.copytree(REPOSITORY / "templates", templates)
    with lab.jupyterlab(tmp_path / "lab", {**environment, **({"WORKBENCH_HOME": home} if home else {})}) as server:
        yield server
        for run in runs_in(runs):
            run.stop()
        for run in runs_in(runs):
            run.wait(60)


def set_parameters(page: Any, **values: Any) -> None:
    """Append assignments to the notebook's parameters cell."""
    page.evaluate(
        """(lines) => {
            const panel = window.jupyterapp.shell.currentWidget;
            const cell = panel.content.widgets.find(w => (w.model.getMetadata('tags') || []).includes('parameters'));
            cell.model.sharedModel.setSource(cell.model.sharedModel.getSource() + '\\n' + lines);
        }""",
        "\n".join(f"{name} = {value!r}" for name, value in values.items()),
    )


def start_all(page: Any) -> None:
    """Run every cell without waiting for them; again, if a kernel that was still connecting took none."""
    page.evaluate(
        """async () => {
            const cells = window.jupyterapp.shell.currentWidget.content.widgets.filter(w => w.model.type === 'code');
            const taken = cell => cell.model.executionState === 'running' || cell.model.executionCount !== null;
            for (let turn = 0; turn < 3; turn++) {
                window.jupyterapp.commands.execute('notebook:run-all-cells');
                for (let i = 0; i < 200; i++) {
                    await new Promise(done => setTimeout(done, 50));
                    if (cells.some(taken)) return;
                }
            }
            throw new Error('the kernel took no cell');
        }"""
    )


def show_cell(page: Any, text: str) -> None:
    """Scroll to the cell whose source holds `text`: JupyterLab keeps only visible cells in the page."""
    page.evaluate(
        """(text) => {
            const content = window.jupyterapp.shell.currentWidget.content;
            const index = content.widgets.findIndex(w => w.model.sharedModel.getSource().includes(text));
            content.activeCellIndex = index;
            return content.scrollToCell(content.widgets[index], 'start').then(() => 1);
        }""",
        text,
    )


def points(graph: str) -> str:
    """Script: how many values the longest curve of a graph shows; each step is one, up to two thousand."""
    return f"""() => {{
        const graph = {graph};
        const raw = graph && graph._fullData ? graph._fullData.filter(t => t.meta === 'raw' && t.x) : [];
        return Math.max(0, ...raw.map(t => t.x.length));
    }}"""


LIVE = "document.querySelector('.jupyter-widgets .js-plotly-plot')"


def wait_for_step(page: Any, step: int, timeout_s: float = 120) -> None:
    page.wait_for_function(f"() => ({points(LIVE)})() >= {step}", timeout=1000 * timeout_s)


def stop_button(page: Any) -> Any:
    return page.locator(".jupyter-widgets").get_by_role("button", name=re.compile("Stop$"))


def eventually(truth: Any, timeout_s: float = 60, explain: Any = lambda: "") -> None:
    deadline = time.monotonic() + timeout_s
    while not truth():
        assert time.monotonic() < deadline, f"it did not come true in time {explain()!r}"
        time.sleep(0.1)


def open_template(page: Any, server: lab.Server, name: str) -> None:
    """From JupyterLab's launcher, by its Template card."""
    page.goto(f"{server.url}/lab?token={server.token}&reset", timeout=60_000)
    page.locator(".jp-LauncherCard", has_text="Template").first.click(timeout=60_000)
    dialog = page.locator(".jp-Dialog")
    dialog.wait_for()
    dialog.locator("select").first.select_option(label="workbench")
    options = dialog.locator("select").last
    wanted = options.locator("option", has_text=name).first
    options.select_option(value=wanted.get_attribute("value"))
    dialog.get_by_role("button", name="GO").click()
    lab.wait_for_kernel(page)


@pytest.mark.skipif(not os.environ.get("WORKBENCH_TEST_ALL"), reason="WORKBENCH_TEST_ALL runs it")
@pytest.mark.timeout(900)
def test_from_the_launcher_to_a_page_for_a_colleague(
    page: Any, workplace: lab.Server, tmp_path: Path, picture: Any
) -> None:
    server, folder = workplace, tmp_path / "runs"
    open_template(page, server, "bert_scaling")
    set_parameters(page, steps=STEPS, global_batch=8, seq_len=32, runs_folder=str(folder))
    start_all(page)

    show_cell(page, "wb.live(runs)")
    page.locator(LIVE_BADGE, has_text="running").first.wait_for(timeout=150_000)
    show_cell(page, "wb.live(runs)")
    wait_for_step(page, 30)
    seen = page.evaluate(points(LIVE))
    wait_for_step(page, seen + 20)  # the curve grows while the cell below still waits
    page.wait_for_timeout(500)
    picture(page, "lab-training")
    for pressed in (1, 2):  # the one that trains, and the one that waits for its devices
        stop_button(page).first.click()
        eventually(lambda pressed=pressed: stop_button(page).count() == 2 - pressed, 30)
    eventually(lambda: all(run.status.final for run in runs_in(folder)), 120, lambda: runs_in(folder))
    stopped = next(run for run in runs_in(folder) if run.checkpoints)
    reached = stopped.summary()["step"]
    assert stopped.status.state == "stopped"
    page.get_by_role("button", name="Resume").first.wait_for(timeout=30_000)
    picture(page, "lab-stopped")

    lab.write_notebook(server.root / "again.ipynb", [f"import workbench as wb\nwb.live(wb.load_run({stopped.name!r}))"])
    lab.open_notebook(page, server, "again.ipynb")  # another kernel, which launched nothing
    lab.run_all(page)
    page.get_by_role("button", name="Resume").first.click(timeout=60_000)
    wait_for_step(page, reached + AFTER_THE_STOP)
    lab.restart_kernel(page)
    lab.run_all(page)
    wait_for_step(page, reached + AFTER_THE_STOP + 10)
    page.wait_for_timeout(500)
    picture(page, "lab-resumed")
    marks = page.evaluate(f"() => Array.from({LIVE}._fullData.find(t => t.meta === 'mark').customdata)")
    assert f"resumed at step {reached:,}" in marks
    stop_button(page).first.click()
    eventually(lambda: stopped.status.final, 120)
    page.wait_for_selector(".jp-RenderedPlotly .main-svg", timeout=30_000)
    lab.save(page)
    assert_each_step_once(stopped)
    share_and_hover(page, server.root / "again.ipynb", tmp_path, picture)


LIVE_BADGE = ".jupyter-widgets span"


def assert_each_step_once(run: Any) -> None:
    steps = list(run.history().step)
    assert steps == list(range(1, len(steps) + 1))
    assert [e["state"] for e in read_events(run.directory.events) if e["type"] == "status"][-1] in FINAL_STATES


def share_and_hover(page: Any, notebook: Path, folder: Path, picture: Any) -> None:
    """The page that a colleague opens: no network, and a point answers the pointer."""
    shared = notebook_to_html(notebook, folder / "shared.html")
    assert "plotly" in json.dumps(json.loads(notebook.read_text())["cells"][0]["outputs"][0]["data"])
    page.context.set_offline(True)
    page.goto(shared.as_uri())
    page.wait_for_selector(".js-plotly-plot .main-svg")
    box = page.locator(".js-plotly-plot .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.7 * box["height"])
    page.get_by_text("Tokens (").first.wait_for(timeout=10_000)
    assert "loss" in (page.locator(".hoverlayer").first.text_content() or "")
    picture(page, "shared-offline")
