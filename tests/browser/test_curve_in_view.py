"""The cell tagged `curve` stays in view when all cells are run, until the user scrolls, and counts down to its turn."""

from __future__ import annotations

import random
from typing import Any
from urllib.parse import quote

import lab
import nbformat
import pytest

from workbench.notebooks.countdown import Parts, slowness, told_progress

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
    const {Parts, slowness, toldProgress, usual} = await import(address);
    const left = ({ended, stated, later, heard, now}) => {
        const parts = new Parts(0);
        for (const [words, since] of heard) parts.hear(words, since);
        return [parts.left(ended, stated, later, now), ...parts.took];
    };
    return {
        factors: cases.map(({ended}) => slowness(ended)),
        left: cases.map(left),
        told: words.map(toldProgress),
        usual: [[], [180], [3, 180], [3, 180, 4], [3, 4, 180, 5]].map(usual),
    };
}"""


def left_here(ended: Any, stated: Any, later: Any, heard: Any, now: float) -> list[float]:
    """Return what the shell says of the seconds left, and the parts of a cell that have ended."""
    parts = Parts(0.0)
    for words, since in heard:
        parts.hear(words, since)
    return [parts.left(ended, stated, later, now), *parts.took]


def test_the_page_counts_down_as_the_shell_does_and_forgets_a_wait_that_happened_once(page: Any) -> None:
    draws, cases = random.Random(0), list[dict[str, Any]]()

    def seconds() -> float:
        return draws.choice([0.0, 2.0, 5.0, 100.0])

    for _ in range(300):
        now, heard, percent = 0.0, list[tuple[str, float]](), 0
        for _ in range(draws.randrange(12)):
            now, percent = now + draws.expovariate(0.1), percent + draws.randrange(40)
            told = draws.choice(["", f": step {percent} of 500 ({percent}%)", f": {percent} of 500 runs have ended"])
            call = draws.choice(["Waiting for a", "Waiting for a", "Waiting for b", "Planning a"])
            heard.append(draws.choice([(f"{call}{told} ({now:.1f} s)", now)] * 5 + [("", now)]))
        ended = [(seconds(), draws.expovariate(0.05)) for _ in range(draws.randrange(4))]
        stated = draws.choice([seconds(), [seconds() for _ in range(draws.randrange(4))]])
        later = [seconds() for _ in range(draws.randrange(3))]
        now += draws.expovariate(0.2)
        cases.append({"ended": ended, "stated": stated, "later": later, "heard": heard, "now": now})
    words = ["Waiting for a: running, step 1,200 of 1,500 (80%) (1 min 05 s)", "Sweeping: 3 of 4 runs (950 ms)"]
    words += ["Planning: 2 of 0 (3.0 s)", "Planning: weighing plans for 4 × H200 (3.0 s)", "", "12% (2 h 05 min)"]
    seen = page.evaluate(SAME, [SCRIPT.read_text(), cases, words])
    assert seen["factors"] == pytest.approx([slowness(each["ended"]) for each in cases])
    for each, said in zip(cases, seen["left"], strict=True):
        assert said == pytest.approx(left_here(**each)), each
    assert [each and tuple(each) for each in seen["told"]] == list(map(told_progress, words))
    assert seen["usual"] == [0, 180, 3, 4, 4]
