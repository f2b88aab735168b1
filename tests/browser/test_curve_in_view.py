"""The cell tagged `curve` stays in view when all cells are run, until the user scrolls, and counts down to its turn."""

from __future__ import annotations

import random
from typing import Any
from urllib.parse import quote

import lab
import nbformat
import pytest

from workbench.notebooks.countdown import seconds_left, slowness, told_progress

NAME = "<img src=x onerror='window.harmed=1'>.ipynb"
TALL = "from IPython.display import HTML\nHTML('<div class=tall style=\"height: 700px\">drawn</div>')"
TOP = """() => {
    const panel = window.jupyterapp.shell.currentWidget;
    const cell = panel.content.widgets.find(w => (w.model.getMetadata('tags') || []).includes('curve'));
    return cell.node.getBoundingClientRect().top - panel.content.node.getBoundingClientRect().top;
}"""
SEVERAL_LOOKS_MS = 1000
"""Delay in ms of a timer that comes after three looks of `curve.js`, each of which scrolls while it holds the curve."""


def test_run_all_stays_at_the_curve_until_the_user_scrolls(lab_page: Any, server: lab.Server, picture: Any) -> None:
    page = lab_page
    path = server.root / NAME
    lab.write_notebook(path, [TALL, TALL, "HTML('<b id=the-curve>curve</b>')", *["1"] * 40])
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[2].metadata["tags"] = ["curve"]
    nbformat.write(notebook, path)
    lab.open_notebook(page, server, quote(NAME))
    lab.stop_clock(page)
    lab.run_all(page)
    page.wait_for_function(f"() => Math.abs(({TOP})()) < 40")
    lab.later_timers(page, SEVERAL_LOOKS_MS)
    assert abs(page.evaluate(TOP)) < 40
    picture(page, "lab-curve-in-view")

    box = page.locator("#the-curve").bounding_box()
    page.mouse.move(box["x"], box["y"])
    page.mouse.wheel(0, -600)
    page.wait_for_function(f"() => ({TOP})() > 300")
    lab.later_timers(page, SEVERAL_LOOKS_MS)
    assert page.evaluate(TOP) > 300, "nothing scrolls back"
    assert page.evaluate("() => window.harmed === undefined")


SCRIPT = lab.EXTENSION / "labextensions" / "workbench" / "static" / "countdown.js"
SAME = """async ([script, cases, words]) => {
    const address = 'data:text/javascript,' + encodeURIComponent(script);
    const {slowness, cellLeft, toldProgress, usual} = await import(address);
    return {
        factors: cases.map(({expected, took}) => slowness(expected, took)),
        left: cases.map(({expected, took, running, told}) =>
            cellLeft(slowness(expected, took), expected[took.length], running, told)),
        told: words.map(toldProgress),
        usual: [[], [180], [3, 180], [3, 180, 4], [3, 4, 180, 5]].map(usual),
    };
}"""


def test_the_page_counts_down_as_the_shell_does_and_forgets_a_wait_that_happened_once(page: Any) -> None:
    draws, cases = random.Random(0), list[dict[str, Any]]()
    for _ in range(200):
        expected = [draws.choice([0.0, 2.0, 5.0, 100.0]) for _ in range(draws.randrange(1, 6))]
        took = [draws.expovariate(0.05) for _ in expected[1:]]
        told = draws.choice([None, [draws.random(), draws.expovariate(0.05)]])
        cases.append({"expected": expected, "took": took, "running": draws.expovariate(0.02), "told": told})
    words = ["Waiting for a: running, step 1,200 of 1,500 (80%) (1 min 05 s)", "Sweeping: 3 of 4 runs (950 ms)"]
    words += ["Planning: 2 of 0 (3.0 s)", "Planning: weighing plans for 4 × H200 (3.0 s)", "", "12% (2 h 05 min)"]
    seen = page.evaluate(SAME, [SCRIPT.read_text(), cases, words])
    assert seen["factors"] == pytest.approx([slowness(each["expected"], each["took"]) for each in cases])
    assert seen["left"] == pytest.approx([seconds_left(*each.values()) for each in cases])
    assert [each and tuple(each) for each in seen["told"]] == list(map(told_progress, words))
    assert seen["usual"] == [0, 180, 3, 4, 4]
