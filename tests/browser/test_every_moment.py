"""What a user sees of figures at the moments that are easily forgotten: hidden tabs, dark themes, dead kernels."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import lab
import nbformat
import numpy as np
from bs4 import BeautifulSoup
from nbconvert import HTMLExporter
from PIL import Image
from test_live_sweep import CELL, SHORT, sweep  # noqa: F401

from tests.patience import Gate, eventually
from workbench.analysis.curve import Curve
from workbench.figures.curves_view import loss_curves
from workbench.figures.figure import mimebundle
from workbench.sweeps.sweep import Sweep

CELLS = (
    CELL,
    "import sys\nsys.path.insert(0, {tests!r})\n"
    "from tests.distributed.test_sweeps import experiment, DEVICE, LINK\n"
    "pair = wb.Cluster(DEVICE, 2, 2, LINK, LINK)\nwb.what_if(experiment(), pair)",
    "from tests.patience import eventually\neventually(lambda: open({gate!r}).read())\nwb.plan(experiment(), pair)",
    "wb.compare([{run!r}])",
    "wb.live([{run!r}])",
)
NAME = "moments.ipynb"
SHOWN = ".jp-RenderedPlotly:visible, .jupyter-widgets .js-plotly-plot:visible"
LEAST_CONTRAST = 4.5
FIGURES = 5
"""Number of figures in a notebook of which a window shows two."""


def pixels(figure: Any) -> np.ndarray:
    """Return what the screen shows of an element, as numbers of shape (height, width, 3)."""
    figure.scroll_into_view_if_needed()
    lab.frames(figure.page)
    return np.asarray(Image.open(io.BytesIO(figure.screenshot())).convert("RGB"), dtype=float)


def marks(figure: Any) -> int:
    """Return the number of pixels in which a figure differs from its background."""
    seen = pixels(figure)
    return int((np.abs(seen - np.median(seen, axis=(0, 1))).max(axis=2) > 40).sum())


def luminance(seen: np.ndarray) -> np.ndarray:
    share = seen / 255
    linear = np.where(share <= 0.03928, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return np.asarray(linear @ [0.2126, 0.7152, 0.0722])


def contrast_of_text(page: Any, figure: Any) -> dict[str, float]:
    """Return the contrast of each text in a figure: of its strongest pixels to the most frequent ones around them."""
    figure.scroll_into_view_if_needed()
    lab.wait_until_still(page)
    where = """graph => [...graph.querySelectorAll('.main-svg text')].map(text => [text.textContent,
        text.getBoundingClientRect()]).map(([words, box]) => [words, box.left, box.top, box.right, box.bottom])"""
    boxes, taken = figure.evaluate(where), page.screenshot()
    whole = np.asarray(Image.open(io.BytesIO(taken)).convert("RGB"), dtype=float)
    found = {}
    for words, left, top, right, bottom in boxes:
        seen = luminance(whole[max(0, int(top)) : int(bottom) + 1, max(0, int(left)) : int(right) + 1])
        if words.strip() and seen.size > 20:
            paper = float(np.median(seen))
            ends = [
                (max(paper, end) + 0.05) / (min(paper, end) + 0.05) for end in (float(seen.min()), float(seen.max()))
            ]
            found[words] = round(max(ends), 2)
    return found


def test_figures_are_right_in_hidden_tabs_in_the_dark_after_a_restart_and_in_the_saved_notebook(
    lab_page: Any,
    server: lab.Server,
    sweep: tuple[Sweep, Gate],  # noqa: F811
    start: Any,
    picture: Any,
) -> None:
    page, shown_now, (started, gate) = lab_page, server.root / "shown-now", sweep
    shown_now.write_text("")
    names = {"path": str(started.path), "tests": str(Path(__file__).parents[2]), "gate": str(shown_now)}
    gate.open(SHORT - 1)
    run = start("training")
    run.advance(200)
    lab.write_notebook(server.root / NAME, [cell.format(**names, run=run.path) for cell in CELLS])
    lab.write_notebook(server.root / "other.ipynb", ["1 + 1"])
    lab.open_notebook(page, server, NAME)
    lab.start_all(page)
    page.locator(".jupyter-widgets .js-plotly-plot").first.wait_for()

    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:open', {path: 'other.ipynb'}).then(() => 1)")
    page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell", has_text="1 + 1").wait_for()
    gate.open(SHORT)
    shown_now.write_text("now")
    page.wait_for_function(
        """() => [...window.jupyterapp.shell.widgets('main')].some(panel => panel.context?.path === 'moments.ipynb'
            && panel.content.widgets.every(({model}) => model.executionCount && model.executionState !== 'running'))""",
    )
    started.stop(wait=True)
    page.wait_for_function(f"""() => {{
        const panel = [...window.jupyterapp.shell.widgets('main')].find(({{context}}) => context?.path === '{NAME}');
        const outputs = panel.content.widgets[0].model.sharedModel.getOutputs();
        return JSON.stringify(outputs).includes('runs have ended, not at work');
    }}""")  # which are hidden
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:open', {path: 'moments.ipynb'}).then(() => 1)")
    page.get_by_text("runs have ended, not at work").first.wait_for()
    figures = page.locator(SHOWN)

    def are_drawn() -> bool:
        return all(marks(figures.nth(index)) > 1500 for index in range(figures.count()))

    # two of the sweep, one of the sliders and of the plan, one compared, two of the dashboard
    eventually(lambda: figures.count() == 7 and are_drawn(), figures.count)
    page.locator(".jp-RenderedPlotly:visible").first.scroll_into_view_if_needed()
    picture(page, "moments-after-hidden")

    names = page.locator(".jupyter-widgets .js-plotly-plot").evaluate_all("all => all.map(node => node.ariaLabel)")
    assert names
    names += page.locator(".jp-RenderedPlotly").evaluate_all("all => all.map(node => node.ariaLabel)")
    assert not {"Figure", "", None} & set(names), names

    lab.change_theme(page, "Dark")
    weak: dict[int, dict[str, float]] = {}
    for index in range(figures.count()):
        figures.nth(index).scroll_into_view_if_needed()
        figures.nth(index).locator(".main-svg").first.wait_for()
        figure = figures.nth(index)
        eventually(lambda figure=figure: pixels(figure)[4, 4].max() < 40, lambda index=index: f"{index} is light")
        found = contrast_of_text(page, figure)
        weak[index] = {words: value for words, value in found.items() if value < LEAST_CONTRAST}
        picture(page, f"moments-dark-{index}")
    assert not any(weak.values()), weak
    lab.change_theme(page, "Light")

    def saved() -> list[Any]:
        lab.save(page)
        cells = json.loads((server.root / NAME).read_text())["cells"]
        bundles = [output["data"] for cell in cells for output in cell["outputs"] if "data" in output]
        return [bundle for bundle in bundles if "application/vnd.plotly.v1+json" in bundle]

    eventually(lambda: len(saved()) == 7)  # a twin is empty for the moment in which its figure is replaced
    plots = saved()
    assert all(len(bundle["image/png"]) > 5000 for bundle in plots)
    converted, _ = HTMLExporter().from_filename(str(server.root / NAME))
    assert len(BeautifulSoup(converted, "html.parser").select(".jp-RenderedImage img")) == 7

    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart().then(() => 1)")
    lab.wait_for_kernel(page)
    page.locator("code", has_text="wb.live(").last.wait_for()
    page.locator("code", has_text="wb.live(").last.scroll_into_view_if_needed()
    # every widget without its kernel has an icon of a broken link
    eventually(lambda: page.locator(".jupyter-widgets-disconnected:visible").count() == 0)
    eventually(lambda: page.get_by_role("button", name="Stop").locator("visible=true").count() == 0)
    picture(page, "moments-restarted")
    eventually(are_drawn)
    page.evaluate(
        """() => document.body.insertAdjacentHTML('beforeend', '<div class="workbench-saved-last" id="planted">'
            + '<p><code id="theirs">wb.live(exit())</code></p> <p><code id="ours">wb.live([])</code></p></div>')"""
    )
    page.locator("#ours + button").wait_for()
    assert page.locator("#theirs + button").count() == 0, "a stranger's notebook may name any call"
    page.evaluate("() => document.querySelector('#planted').remove()")
    page.get_by_role("button", name="Attach").last.click()
    page.get_by_role("button", name="Stop").last.wait_for()
    page.locator(".jupyter-widgets .js-plotly-plot path.js-line").last.wait_for(state="attached")
    lab.wait_until_still(page)
    picture(page, "moments-attached-again")


def test_every_figure_of_a_saved_notebook_is_dark_also_below_the_window_and_in_the_active_cell(
    lab_page: Any, server: lab.Server, picture: Any
) -> None:
    page = lab_page
    steps = np.arange(1.0, 200.0)
    curve = Curve("run", {"step": steps, "loss": 4 + 3 / steps, "tokens": 64 * steps})
    lab.write_notebook(server.root / "saved.ipynb", ["loss_curves([curve])"] * FIGURES)
    notebook = nbformat.read(server.root / "saved.ipynb", 4)
    for cell in notebook.cells:
        cell.outputs = [nbformat.v4.new_output("display_data", data=mimebundle(loss_curves([curve])))]
    nbformat.write(notebook, server.root / "saved.ipynb")
    lab.open_notebook(page, server, "saved.ipynb")
    lab.change_theme(page, "Dark")
    for index in range(FIGURES):
        page.evaluate(
            """async index => {
                const notebook = window.jupyterapp.shell.currentWidget.content;
                notebook.activeCellIndex = index;
                await notebook.scrollToItem(index, 'start');
                notebook.mode = 'command';
                notebook.activeCell.node.focus();
            }""",
            index,
        )
        page.keyboard.press("Escape")  # the focus of a user of the keyboard is outlined
        figure = page.locator(f".jp-Cell[data-windowed-list-index='{index}'] .jp-RenderedPlotly")
        figure.locator(".main-svg").first.wait_for()
        seen = pixels(figure)
        paper, plot = seen[4, 4], np.median(seen[len(seen) // 3 : len(seen) // 2, 200:-200], axis=(0, 1))
        assert paper.tolist() == plot.tolist() == [17, 17, 17], f"figure {index}: the theme's background"
    picture(page, "saved-dark")
    lab.change_theme(page, "Light")
