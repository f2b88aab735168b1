"""The dashboard in a real JupyterLab in a real browser, over runs whose files grow when the test says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lab
import pytest
from nbconvert import HTMLExporter
from small_run import SmallRun

from tests.patience import eventually

LIVE_CELL = """
from workbench.runs.registry import load_run
from workbench.widgets import live, live_widget
live_widget.TWIN_S = 0.5
live([load_run(path) for path in {paths!r}], x={x!r})
"""
LAYOUT = "document.querySelector('.js-plotly-plot')._fullLayout"
Start = Callable[[str], SmallRun]


def live_cell(*runs: SmallRun, x: str = "tokens") -> str:
    return LIVE_CELL.format(paths=[run.path for run in runs], x=x)


def advance(page: Any, to: int, *runs: SmallRun) -> None:
    """Let runs take all steps up to this one, and wait until the page shows them, though no other follows."""
    for run in runs:
        run.advance(to)
    lab.wait_for_step(page, to)


def outputs(path: Path, cell: int) -> list[dict[str, Any]]:
    return [output.get("data", {}) for output in json.loads(path.read_text())["cells"][cell]["outputs"]]


def wait_until_stopped(page: Any) -> None:
    notebook = page.locator(".jp-Notebook")
    notebook.get_by_text("stopped", exact=True).or_(notebook.get_by_text("stopped, step")).first.wait_for()


@pytest.mark.representative
def test_curves_grow_stop_stops_and_the_saved_notebook_keeps_a_plain_figure(
    lab_page: Any, server: lab.Server, start: Start, picture: Any
) -> None:
    page, long, failing = lab_page, start("long"), start("failing")
    lab.write_notebook(server.root / "live.ipynb", [live_cell(long, failing), "6 * 7"])
    lab.open_notebook(page, server, "live.ipynb")
    lab.run_all(page)
    advance(page, 30, long, failing)
    picture(page, "live-growing")
    advance(page, 50, long, failing)

    failing.fail()
    page.locator("span", has_text="shapes <b>4</b> and 5 differ").first.wait_for()
    picture(page, "live-failed")
    assert not long.run.stop_file.exists()
    page.get_by_role("button", name="Stop").first.click()
    long.stop_when_asked()
    wait_until_stopped(page)

    page.wait_for_selector(".jupyter-widgets", state="detached")
    page.wait_for_selector(".jp-RenderedPlotly .main-svg, .jp-OutputArea .js-plotly-plot .main-svg")

    def saved() -> list[dict[str, Any]]:
        lab.save(page)
        return outputs(server.root / "live.ipynb", 0)

    eventually(lambda: len(saved()) == 4, saved)
    picture(page, "live-ended")
    widget, states, curves, panels = saved()
    assert not any(widget.values())
    assert "shapes &lt;b&gt;4&lt;/b&gt; and 5 differ" in "".join(states["text/html"])
    assert "application/vnd.plotly.v1+json" in curves
    assert "application/vnd.plotly.v1+json" in panels
    assert page.refused == []


def test_a_screen_reader_is_told_which_run_a_button_stops_how_far_it_is_and_what_a_slider_stands_at(
    lab_page: Any, server: lab.Server, start: Start, picture: Any
) -> None:
    page, runs = lab_page, [start("first"), start("<b>second")]
    sliders = """
import workbench as wb
model = wb.models.gpt2(hidden_size=16, num_layers=2, num_heads=2, vocab_size=300, max_positions=32)
data = wb.data.corpus("demo", vocab_size=300)
wb.what_if(wb.Experiment(model=model, data=data, seq_len=16, global_batch=8), wb.Cluster.of("h200", gpus=8))
"""
    lab.write_notebook(server.root / "told.ipynb", [live_cell(*runs), sliders])
    lab.open_notebook(page, server, "told.ipynb")
    lab.run_all(page)
    advance(page, 40, *runs)
    for run in runs:
        page.get_by_role("button", name=f"Stop {Path(run.path).name}: write a checkpoint").wait_for()
        bar = page.get_by_role("progressbar", name=f"steps of {Path(run.path).name}")
        eventually(lambda bar=bar: 0 < int(bar.get_attribute("aria-valuenow")) <= 100)  # its curve is drawn later
    smoothing = page.get_by_role("slider", name="smoothing")
    assert smoothing.get_attribute("aria-valuetext") == "1.0%"
    smoothing.focus()
    smoothing.press("ArrowRight")
    eventually(lambda: smoothing.get_attribute("aria-valuetext") == "1.5%")
    gpus = page.get_by_role("slider", name="GPUs")
    eventually(lambda: gpus.get_attribute("aria-valuetext") == "8")
    gpus.focus()
    gpus.press("ArrowRight")
    eventually(lambda: gpus.get_attribute("aria-valuetext") == "16")
    assert page.get_by_role("slider", name="micro-batch").get_attribute("aria-valuetext") == "auto"
    assert page.locator('.jupyter-widgets [title="null"]').count() == 0
    picture(page, "live-told")


def test_a_dashboard_survives_restart_and_reload_keeps_the_users_zoom_and_leaves_its_curves_without_a_kernel(
    lab_page: Any, server: lab.Server, start: Start, picture: Any
) -> None:
    page, name, run = lab_page, "survivor.ipynb", start("survivor")
    lab.write_notebook(server.root / name, [live_cell(run), "6 * 7"])
    lab.open_notebook(page, server, name)
    lab.run_all(page)
    advance(page, 20, run)
    lab.restart_kernel(page)
    lab.run_all(page)
    advance(page, 40, run)
    assert page.locator(".workbench-saved").first.is_hidden()

    def pictures() -> list[str]:
        lab.save(page)
        return [data["image/png"] for data in outputs(server.root / name, 0) if len(data.get("image/png", "")) > 5000]

    eventually(lambda: len(pictures()) == 2)  # a twin is empty for the moment in which its figure is replaced
    converted, _ = HTMLExporter().from_filename(str(server.root / name))
    (server.root / "saved.html").write_text(converted)

    page.goto("about:blank")
    lab.open_notebook(page, server, name)  # the kernel goes on
    advance(page, 60, run)
    drag_over_plot(page)
    zoomed = page.evaluate("() => document.querySelector('.js-plotly-plot').layout.xaxis.range.slice()")
    advance(page, 100, run)
    picture(page, "live-zoomed")
    after = page.evaluate("() => document.querySelector('.js-plotly-plot').layout.xaxis.range.slice()")
    assert after == pytest.approx(zoomed)
    drag_over_plot(page, down=0.3)
    zoomed_y = page.evaluate(f"() => String({LAYOUT}.yaxis.range)")
    page.locator(".jupyter-widgets select").first.select_option(label="step")
    ended = f"y => {LAYOUT}.xaxis.autorange && String({LAYOUT}.yaxis.range) !== y"
    page.wait_for_function(ended, arg=zoomed_y)  # choosing an axis ends the zoom of both

    lab.save(page)
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown().then(() => 1)")
    page.goto("about:blank")

    lab.open_notebook(page, server, name)  # a new kernel, which knows no widget
    page.locator(".workbench-saved").first.wait_for()
    page.locator(".jp-RenderedPlotly").first.wait_for()
    page.wait_for_function("() => document.querySelector('.jp-RenderedPlotly img')?.src.length > 5000")
    page.get_by_text("Error displaying widget").first.wait_for(state="hidden")
    assert "survivor" in page.locator(".workbench-saved b").all_inner_texts()
    picture(page, "saved-without-kernel")
    page.context.set_offline(True)
    page.goto((server.root / "saved.html").as_uri())
    shown = page.locator(".jp-RenderedImage img").first
    assert shown.evaluate("image => image.decode().then(() => image.naturalWidth)") == 860
    assert page.get_by_text("Error").count() == 0


@pytest.mark.usefixtures("busy")
def test_each_step_is_shown_and_stop_answers_while_a_cell_runs_and_all_cores_are_busy(
    lab_page: Any, server: lab.Server, start: Start, picture: Any
) -> None:
    page, run = lab_page, start("busy")
    blocks = "import threading\nthreading.Event().wait()"
    lab.write_notebook(server.root / "busy.ipynb", [live_cell(run, x="step"), blocks])
    lab.open_notebook(page, server, "busy.ipynb")
    lab.start_all(page)
    for step in range(1, 11):  # each before the next is written
        advance(page, step, run)
    advance(page, 200, run)
    assert page.evaluate(lab.STEPS) == list(range(1, 201)), "none is lost"
    picture(page, "live-busy-machine")
    page.get_by_role("button", name="Stop").first.click()
    run.stop_when_asked()
    wait_until_stopped(page)
    assert page.locator(".jp-InputPrompt").nth(1).inner_text() == "[*]:"
    assert page.refused == []


def drag_over_plot(page: Any, down: float = 0.0) -> None:
    """Zoom by dragging over the left half of the plot, and down by a share of its height."""
    lab.wait_until_still(page)
    box = page.locator(".js-plotly-plot .nsewdrag").first.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.1 * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.3 * box["width"], middle, steps=4)
    page.mouse.move(box["x"] + 0.5 * box["width"], middle + down * box["height"], steps=4)
    page.mouse.up()
    page.wait_for_function(f"() => !{LAYOUT}.xaxis.autorange")
