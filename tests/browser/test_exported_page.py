"""An exported page in a browser without a network: it draws, responds to the pointer and fits into narrow windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import workbench as wb
from tests.unit.figure_values import plan
from tests.unit.test_grids import AXES, EXPERIMENT, SMALL
from workbench.analysis.curve import Curve
from workbench.figures.contrast_view import contrast
from workbench.figures.curves_view import loss_curves
from workbench.figures.pages import save_html
from workbench.figures.panels_view import panels
from workbench.figures.plan_view import partition, show_plan
from workbench.figures.timeline_view import timeline

LAST_X = """() => {
    const lines = document.querySelector('.js-plotly-plot')._fullData.filter(trace => trace.meta === 'line');
    return lines.map(trace => trace.x[trace.x.length - 1]);
}"""

UNREADABLE = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap((graph, at) => {
    const edge = graph.getBoundingClientRect(), found = [], lines = [];
    for (const text of graph.querySelectorAll('.main-svg text')) {
        const parts = text.querySelectorAll('tspan.line');
        for (const line of parts.length ? parts : [text]) {
            const box = line.getBoundingClientRect();
            if (!box.width || !line.textContent.trim()) continue;
            if (box.left < edge.left - 1 || box.right > edge.right + 1 || box.bottom > edge.bottom + 1)
                found.push(`${at} cut: ${line.textContent}`);
            lines.push([line.textContent, box, text]);
        }
    }
    lines.forEach(([one, a, of], index) => lines.slice(index + 1).forEach(([other, b, text]) => {
        const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const along = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (of !== text && across > 1 && along > 3) found.push(`${at}: ${one} on ${other}`);
    }));
    return found;
})"""
"""Script that returns the words that are cut off, or lie on other words, by the number of their figure."""


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


def test_no_words_of_a_figure_are_cut_or_lie_on_others_in_narrow_and_wide_windows(
    page: Any, tmp_path: Path, picture: Any
) -> None:
    sweep = wb.sweeps.load_sweep(Path(__file__).parents[2] / "benchmarks" / "results" / "gpt-sweep")
    many = [curve(f"a-run-whose-name-is-far-too-long-for-a-legend-{number:02d}", 400) for number in range(12)]
    many[-1].columns["loss"][300:] = 1e9  # one has diverged
    large = plan(16, 98, 64, model="bert-1920x54-of-a-long-name")
    shown = [
        *(draw(value) for value in (plan(4), large) for draw in (show_plan, partition)),
        timeline(plan(4)),
        *(loss_curves(curves) for curves in (many[:2], many)),
        panels(many[:2], [{}, {}]),
        *(draw(sweep) for draw in (wb.figures.heat_map, wb.figures.best_so_far, wb.figures.seed_bands)),
        contrast(wb.contrast(sweep)),
        wb.figures.heat_map(wb.grid(EXPERIMENT, SMALL, **AXES)),
        wb.figures.scaling_efficiency([plan(1), plan(1, data=2)]),
    ]
    path = save_html(shown, tmp_path / "page.html")
    unreadable = {}
    for width in (500, 760, 1100):
        page.set_viewport_size({"width": width, "height": 1000})
        page.goto(path.as_uri())
        page.wait_for_function(f"() => document.querySelectorAll('.main-svg .infolayer').length >= {len(shown)}")
        page.wait_for_timeout(500)
        picture(page, f"exported-{width}")
        unreadable[width] = page.evaluate(UNREADABLE)
    assert not any(unreadable.values()), unreadable
