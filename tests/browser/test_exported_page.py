"""An exported page in a browser without a network: it draws, responds to the pointer and fits into narrow windows."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lab
import nbformat
import numpy as np
import plotly.graph_objects as go
import pytest

import workbench as wb
from tests.unit.figure_values import plan
from tests.unit.test_grids import AXES, EXPERIMENT, SMALL
from workbench.analysis.curve import Curve
from workbench.figures.curves_view import loss_curves
from workbench.figures.figure import PLOTLY_MIME, save_html
from workbench.figures.panels_view import panels
from workbench.figures.plan_view import draw_partition, show_plan
from workbench.figures.run_views import draw_contrast
from workbench.figures.timeline_view import draw_timeline
from workbench.notebooks.pages import notebook_to_html

LAST_X = """() => {
    const lines = document.querySelector('.js-plotly-plot')._fullData.filter(trace => trace.meta === 'line');
    return lines.map(trace => trace.x[trace.x.length - 1]);
}"""
RANGES = """() => {
    const {xaxis, yaxis} = document.querySelector('.js-plotly-plot')._fullLayout;
    return [[...xaxis.range], [...yaxis.range]];
}"""
"""Script that returns the ranges that the x axis and the y axis show."""
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


@pytest.mark.representative
def test_an_exported_page_is_interactive_without_a_network(page: Any, tmp_path: Path, picture: Any) -> None:
    path = save_html(loss_curves([curve("a", 2000), curve("b", 900)]), tmp_path / "page.html", title="Shared")
    asked: list[str] = []
    errors: list[str] = []
    page.context.set_offline(True)
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector(".js-plotly-plot .main-svg")
    lab.wait_until_still(page)
    assert page.evaluate(LAST_X) == [16.384, 7.3728]

    box = page.locator(".js-plotly-plot .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.6 * box["height"])
    page.get_by_text("Tokens (M):").wait_for()
    assert (page.locator(".hoverlayer").text_content() or "").count("loss") == 2
    picture(page, "exported-hover")

    whole = page.evaluate(RANGES)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 0.9 * box["height"], steps=4)
    page.mouse.up()
    page.wait_for_function(
        f"whole => ({RANGES})().every((range, at) => String(range) !== String(whole[at]))", arg=whole
    )
    page.locator(".updatemenu-header").first.click()
    page.locator(".updatemenu-dropdown-button", has_text="FLOPs").click()
    page.wait_for_function(f"() => ({LAST_X})()[0] === 2")
    (low, high), y_range = page.evaluate(RANGES)
    assert low < 0.1 < 1.9 < high, "choosing an axis ends the zoom"
    assert y_range == whole[1], "of both axes"
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
        *(draw(value) for value in (plan(4), large) for draw in (show_plan, draw_partition)),
        draw_timeline(plan(4)),
        *(loss_curves(curves) for curves in (many[:2], many)),
        panels(many[:2], [{}, {}]),
        *(draw(sweep) for draw in (wb.figures.heat_map, wb.figures.best_so_far, wb.figures.seed_bands)),
        draw_contrast(wb.contrast(sweep)),
        wb.figures.heat_map(wb.grid(EXPERIMENT, SMALL, **AXES)),
        wb.figures.scaling_efficiency([plan(1), plan(1, data=2)]),
    ]
    path = save_html(shown, tmp_path / "page.html")
    unreadable = {}
    for width in (500, 760, 1100):
        page.set_viewport_size({"width": width, "height": 1000})
        page.goto(path.as_uri())
        page.wait_for_function(f"() => document.querySelectorAll('.main-svg .infolayer').length >= {len(shown)}")
        lab.wait_until_still(page)
        picture(page, f"exported-{width}")
        unreadable[width] = page.evaluate(UNREADABLE)
    assert not any(unreadable.values()), unreadable


@pytest.fixture
def asked_of() -> Iterator[tuple[str, list[str]]]:
    """Return the address of a server on this machine, and the paths that it was asked for."""
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", paths
    server.shutdown()
    server.server_close()


RAN = "document.title='ran'"
SCRIPTS = (
    f"[a](javascript:{RAN})",
    f"[a](java&#115;cript:{RAN})",
    f"[a](vbscript:{RAN})",
    f"[a](data:text/html,<script>{RAN}</script>)",
    f"[a][1]\n\n[1]: JavaScript:{RAN}",
    f'<a href="java&#10;script:{RAN}">a</a>',
    f'<svg><a xlink:href="javascript:{RAN}"><text y="20">a</text></a></svg>',
    f'<img src="x" onerror="{RAN}"><details ontoggle="{RAN}" open>a</details>',
    f"<style><img src=x onerror={RAN}></style><math><mi xlink:href=javascript:{RAN}>a</mi></math>",
    f'<iframe srcdoc="<script>parent.{RAN}</script>"></iframe><script>{RAN}</script>',
)
"""Markdown of a stranger that runs a script when the page opens, or when it is clicked."""


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
"""A picture as notebooks store it."""


def click_all_links(page: Any) -> None:
    """Click every link of a page, then one that leads to `#end`: a page follows links in the order of the clicks."""
    for link in page.locator("a:not(.modebar-btn)").all():
        link.dispatch_event("click")
    page.evaluate("() => Object.assign(document.createElement('a'), {href: '#end'}).click()")
    page.wait_for_function("() => location.hash === '#end'")
    lab.later_timers(page, 100)


def test_a_stranger_s_notebook_becomes_a_page_that_runs_and_fetches_nothing(
    page: Any, tmp_path: Path, asked_of: tuple[str, list[str]]
) -> None:
    address, paths = asked_of
    fetched = (
        f"![a]({address}/markdown.png)",
        f'<img src="{address}/img.png"><video src="{address}/video"></video><link rel=stylesheet href="{address}/css">',
        f'<div style="background: url({address}/style.png)">a</div><style>@import url({address}/import);</style>',
        f'<object data="{address}/object"></object><meta http-equiv="refresh" content="0; url={address}/refresh">',
        f"<base href='{address}/'><img src='relative.png'><style>p {{ background: url('{address}/css.png') }}</style>",
    )
    loss = go.Figure(go.Scatter(y=[3, 2, 1], text=[f"<a href='javascript:{RAN}'>a</a>"] * 3, mode="text"))
    loss.add_layout_image(source=f"{address}/layout.png", x=0, y=1, sizex=1, sizey=1)
    drawn = [loss, go.Figure(go.Scattergl(y=[3, 2, 1])), go.Figure(go.Surface(z=[[1, 2], [3, 4]]))]
    fetching = [go.Figure(go.Scattermap(lat=[0], lon=[0]), {"map": {"style": f"{address}/map.json"}})]
    drawing = {"image/png": PIXEL, "text/plain": ""}  # without a picture, a browser would be started to draw it
    outputs = [{PLOTLY_MIME: each.to_plotly_json(), **drawing} for each in [*drawn, *fetching]]
    outputs += [
        {mime: text, "text/plain": ""} for mime in ("text/markdown", "text/html") for text in (*SCRIPTS, *fetched)
    ]
    shown = [nbformat.v4.new_output("display_data", data=data) for data in outputs]
    cells = [nbformat.v4.new_markdown_cell(text) for text in (*SCRIPTS, *fetched)]
    notebook = nbformat.v4.new_notebook(cells=[*cells, nbformat.v4.new_code_cell("a", outputs=shown)])
    path, executed, made = (tmp_path / name for name in ("theirs.ipynb", "executed/theirs.html", "shared/theirs.html"))
    path.write_text(nbformat.writes(nbformat.from_dict(plain(notebook))))
    wb.share(path, to=made.parent)
    notebook_to_html(path, executed)
    assert paths == []

    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    control = tmp_path / "control.html"
    control.write_text(f'<img src="{address}/control.png"><a href="javascript:void({RAN})">a</a>')
    page.goto(control.as_uri())
    click_all_links(page)
    assert page.title() == "ran", "without sanitiser and policy, a click runs the script"
    assert paths == ["/control.png"]

    for each in (made, executed):
        page.goto(each.as_uri())
        page.wait_for_function("() => document.querySelectorAll('.js-plotly-plot .main-svg .infolayer').length >= 3")
        assert page.locator("a:not(.modebar-btn)").count() >= len(SCRIPTS)
        page.locator("details summary").first.click()
        click_all_links(page)
        assert (page.title(), page.url.partition("#")[0], dialogs) == ("theirs", each.as_uri(), [])
        assert paths == ["/control.png"]


def plain(value: Any) -> Any:
    """Return a notebook's JSON with lists in place of arrays."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray) else value
