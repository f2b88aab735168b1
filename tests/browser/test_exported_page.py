"""An exported page in a browser without a network: it draws, responds to the pointer and switches its axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from workbench.analysis.curve import Curve
from workbench.figures.curves_view import loss_curves
from workbench.figures.pages import save_html
from workbench.figures.panels_view import panels

LAST_X = """() => {
    const lines = document.querySelector('.js-plotly-plot')._fullData.filter(trace => trace.meta === 'line');
    return lines.map(trace => trace.x[trace.x.length - 1]);
}"""


def curve(name: str, steps: int) -> Curve:
    step = np.arange(1, steps + 1)
    loss = 4 + 6 * np.exp(-step / 200)
    return Curve(name, {"step": step, "tokens": step * 8192, "flops": step * 1e15, "loss": loss})


def test_an_exported_page_is_interactive_without_a_network(page: Any, tmp_path: Path, picture: Any) -> None:
    path = save_html(loss_curves([curve("a", 2000), curve("b", 900)]), tmp_path / "page.html", title="Shared")
    asked: list[str] = []
    errors: list[str] = []
    page.context.set_offline(True)
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector(".js-plotly-plot .main-svg")
    assert page.evaluate(LAST_X) == [16.384, 7.3728]

    box = page.locator(".js-plotly-plot .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.6 * box["height"])
    page.get_by_text("Tokens (M):").wait_for()
    assert (page.locator(".hoverlayer").text_content() or "").count("loss") == 2
    picture(page, "exported-hover")

    page.locator(".updatemenu-header").first.click()
    page.locator(".updatemenu-dropdown-button", has_text="FLOPs").click()
    page.wait_for_function(f"() => ({LAST_X})()[0] === 2")
    page.locator(".updatemenu-button", has_text="log loss").click()
    page.wait_for_function("() => document.querySelector('.js-plotly-plot').layout.yaxis.type === 'log'")
    picture(page, "exported-flops-log")
    assert asked == [path.as_uri()]
    assert errors == []


def test_no_title_lies_under_the_buttons_of_a_narrow_figure(page: Any, tmp_path: Path, picture: Any) -> None:
    shown = [curve("a", 2000), curve("b", 900)]
    long = "A comparison whose title is longer than a narrow figure has room for"
    path = save_html([loss_curves(shown, title=long), panels(shown, [{}, {}])], tmp_path / "page.html")
    page.set_viewport_size({"width": 500, "height": 1000})
    page.goto(path.as_uri())
    for index in range(2):
        figure = page.locator(".js-plotly-plot").nth(index)
        figure.hover()
        figure.locator(".modebar-btn").first.wait_for()
        covered = figure.evaluate(
            """node => {
                const boxes = query => [...node.querySelectorAll(query)].map(part => part.getBoundingClientRect());
                return boxes('.main-svg text').filter(text => boxes('.modebar-btn').some(button =>
                    text.left < button.right && button.left < text.right
                    && text.top < button.bottom && button.top < text.bottom)).length;
            }"""
        )
        assert covered == 0
    picture(page, "exported-narrow")
