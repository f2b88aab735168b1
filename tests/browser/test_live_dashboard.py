"""The dashboard in a real JupyterLab in a real browser, over runs of real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lab
import pytest
from nbconvert import HTMLExporter

SMALL_RUN = Path(__file__).with_name("small_run.py")
LIVE_CELL = """
from workbench.runs.registry import load_run
from workbench.widgets import live
live([load_run(path) for path in {paths!r}])
"""
LAYOUT = "document.querySelector('.js-plotly-plot')._fullLayout"
POINTS = """() => {
    const graph = document.querySelector('.js-plotly-plot');
    return graph && graph.data ? graph.data.filter(t => t.meta === 'line').map(t => t.y ? t.y.length : 0) : [];
}"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Start a small run and wait for its first events; runs that are left are ended after the test."""
    processes = []

    def launch(name: str, steps: int, seconds_per_step: float = 0.02, fail_at: int | None = None) -> str:
        directory = tmp_path / name
        arguments = [str(directory), str(steps), str(seconds_per_step), *([str(fail_at)] if fail_at else [])]
        environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
        processes.append(subprocess.Popen([sys.executable, str(SMALL_RUN), *arguments], env=environment))
        while not (directory / "events.jsonl").exists():
            assert processes[-1].poll() is None
            time.sleep(0.05)
        return str(directory)

    yield launch
    for process in processes:
        process.terminate()
        process.wait(10)


def wait_for_points(page: Any, at_least: int) -> None:
    page.wait_for_function(f"() => {{ const n = ({POINTS})(); return n.length && Math.max(...n) >= {at_least}; }}")


def outputs(path: Path, cell: int) -> list[dict[str, Any]]:
    return [output.get("data", {}) for output in json.loads(path.read_text())["cells"][cell]["outputs"]]


@pytest.mark.representative
def test_curves_grow_stop_stops_and_the_saved_notebook_keeps_a_plain_figure(
    lab_page: Any, server: lab.Server, start: Any, picture: Any
) -> None:
    page = lab_page
    first, second = start("long", 5000), start("failing", 5000, fail_at=250)
    lab.write_notebook(server.root / "live.ipynb", [LIVE_CELL.format(paths=[first, second]), "6 * 7"])
    lab.open_notebook(page, server, "live.ipynb")
    lab.run_all(page)
    wait_for_points(page, 30)
    points = max(page.evaluate(POINTS))
    picture(page, "live-growing")
    wait_for_points(page, points + 20)

    page.locator("span", has_text="shapes <b>4</b> and 5 differ").first.wait_for()
    picture(page, "live-failed")
    assert not (Path(first) / "STOP").exists()
    page.get_by_role("button", name="Stop").first.click()
    page.locator(".jp-Notebook").get_by_text("stopped", exact=True).or_(
        page.locator(".jp-Notebook").get_by_text("stopped, step")
    ).first.wait_for()
    assert (Path(first) / "STOP").exists()

    page.wait_for_selector(".jupyter-widgets", state="detached")
    page.wait_for_selector(".jp-RenderedPlotly .main-svg, .jp-OutputArea .js-plotly-plot .main-svg")

    def saved() -> list[dict[str, Any]]:
        lab.save(page)
        return outputs(server.root / "live.ipynb", 0)

    lab.eventually(lambda: len(saved()) == 4, saved)
    picture(page, "live-ended")
    widget, states, curves, panels = saved()
    assert not any(widget.values())
    assert "shapes &lt;b&gt;4&lt;/b&gt; and 5 differ" in "".join(states["text/html"])
    assert "application/vnd.plotly.v1+json" in curves
    assert "application/vnd.plotly.v1+json" in panels
    assert page.refused == []


def test_a_notebook_saved_while_runs_train_shows_their_curves_without_its_kernel(
    lab_page: Any, server: lab.Server, start: Any, picture: Any
) -> None:
    page, name = lab_page, "saved.ipynb"
    cells = [f"from workbench.widgets import live_widget\nlive_widget.TWIN_S = 0.5\n{LIVE_CELL}", "6 * 7"]
    lab.write_notebook(server.root / name, [cells[0].format(paths=[start("training", 5000)]), cells[1]])
    lab.open_notebook(page, server, name)
    lab.run_all(page)
    wait_for_points(page, 30)
    assert page.locator(".workbench-saved").first.is_hidden()
    picture_of_it = "() => document.querySelector('.jp-RenderedPlotly img')?.src.length > 5000"
    page.wait_for_function(picture_of_it)
    lab.save(page)
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown().then(() => 1)")
    page.goto("about:blank")

    lab.open_notebook(page, server, name)  # a new kernel, which knows no widget
    page.locator(".workbench-saved").first.wait_for()
    page.locator(".jp-RenderedPlotly").first.wait_for()
    page.wait_for_function(picture_of_it)
    page.get_by_text("Error displaying widget").first.wait_for(state="hidden")
    assert "training" in page.locator(".workbench-saved b").all_inner_texts()
    picture(page, "saved-without-kernel")

    converted, _ = HTMLExporter().from_filename(str(server.root / name))
    (server.root / "saved.html").write_text(converted)
    page.context.set_offline(True)
    page.goto((server.root / "saved.html").as_uri())
    shown = page.locator(".jp-RenderedImage img").first
    assert shown.evaluate("image => image.decode().then(() => image.naturalWidth)") == 860
    assert page.get_by_text("Error").count() == 0


def test_a_dashboard_survives_kernel_restart_and_reload_and_keeps_the_users_zoom(
    lab_page: Any, server: lab.Server, start: Any, picture: Any
) -> None:
    page = lab_page
    directory = start("survivor", 5000, seconds_per_step=0.06)
    lab.write_notebook(server.root / "restart.ipynb", [LIVE_CELL.format(paths=[directory])])
    lab.open_notebook(page, server, "restart.ipynb")
    lab.run_all(page)
    wait_for_points(page, 20)
    before = max(page.evaluate(POINTS))
    lab.restart_kernel(page)
    lab.run_all(page)
    wait_for_points(page, before + 20)

    lab.save(page)
    page.goto("about:blank")
    lab.open_notebook(page, server, "restart.ipynb")  # the kernel goes on
    wait_for_points(page, before + 40)
    page.wait_for_timeout(1500)  # the second drawing is over
    drag_over_plot(page)
    zoomed = page.evaluate("() => document.querySelector('.js-plotly-plot').layout.xaxis.range.slice()")
    points = max(page.evaluate(POINTS))
    wait_for_points(page, points + 40)
    picture(page, "live-zoomed")
    after = page.evaluate("() => document.querySelector('.js-plotly-plot').layout.xaxis.range.slice()")
    assert after == pytest.approx(zoomed)
    drag_over_plot(page, down=0.3)
    zoomed_y = page.evaluate(f"() => String({LAYOUT}.yaxis.range)")
    page.locator(".jupyter-widgets select").first.select_option(label="step")
    ended = f"y => {LAYOUT}.xaxis.autorange && String({LAYOUT}.yaxis.range) !== y"
    page.wait_for_function(ended, arg=zoomed_y)  # choosing an axis ends the zoom of both


def test_stop_answers_while_a_cell_runs(lab_page: Any, server: lab.Server, start: Any) -> None:
    page = lab_page
    directory = start("busy", 5000)
    lab.write_notebook(
        server.root / "busy.ipynb",
        [LIVE_CELL.format(paths=[directory]), "import time\nfor _ in range(4000):\n    time.sleep(0.1)"],
    )
    lab.open_notebook(page, server, "busy.ipynb")
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")
    wait_for_points(page, 20)
    points = max(page.evaluate(POINTS))
    wait_for_points(page, points + 20)
    page.get_by_role("button", name="Stop").first.click()
    page.locator(".jp-Notebook").get_by_text("stopped", exact=True).or_(
        page.locator(".jp-Notebook").get_by_text("stopped, step")
    ).first.wait_for()
    assert (Path(directory) / "STOP").exists()
    assert page.locator(".jp-InputPrompt").nth(1).inner_text() == "[*]:"


def drag_over_plot(page: Any, down: float = 0.0) -> None:
    """Zoom by dragging over the left half of the plot, and down by a share of its height."""
    box = page.locator(".js-plotly-plot .nsewdrag").first.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.1 * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.3 * box["width"], middle, steps=4)
    page.mouse.move(box["x"] + 0.5 * box["width"], middle + down * box["height"], steps=4)
    page.mouse.up()
    page.wait_for_function(f"() => !{LAYOUT}.xaxis.autorange")
    page.wait_for_timeout(300)
