"""The cell tagged `curve` stays in view when all cells are run, until the user scrolls."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import lab
import nbformat

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
