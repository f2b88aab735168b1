"""Exported pages open offline: one plotly.js, nothing to fetch, nothing of the user's text as markup."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import plotly.graph_objects as go
import pytest
from bs4 import BeautifulSoup
from figure_values import curve, plan

import workbench as wb
from workbench.base.errors import DataError
from workbench.figures.curves_view import loss_curves
from workbench.figures.figure import PLOTLY_MIME, WIDGET_MIME, mimebundle, save, save_html
from workbench.figures.panels_view import panels
from workbench.figures.plan_view import show_plan
from workbench.notebooks.pages import notebook_to_html

FETCHES = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)\s*=[^>]*>", re.IGNORECASE)
PLOTLY_BANNER = re.compile(r"\* plotly\.js v\d")


def markup(page: str) -> str:
    """The page without what its scripts contain: those hold addresses as text."""
    return re.sub(r"(<script\b[^>]*>).*?(</script>)", r"\1\2", page, flags=re.DOTALL)


def assert_opens_offline(page: str) -> None:
    assert FETCHES.findall(markup(page)) == []
    assert not re.search(r"@import|url\(\s*['\"]?https?:", markup(page))
    assert not re.search(r"""\bimport\s*\(\s*['"]|\bimport\b[^;]*\bfrom\s+['"]https?:""", page)


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    """Executed by hand: two figures, a widget with and one without a fallback, and widget state."""
    value = nbformat.v4.new_notebook(metadata={"widgets": {"application/vnd.jupyter.widget-state+json": {"state": {}}}})
    outputs = [
        {PLOTLY_MIME: loss_curves([curve("a")]).to_plotly_json()},
        {PLOTLY_MIME: show_plan(plan(2, 8, 4)).to_plotly_json()},
        {WIDGET_MIME: {"model_id": "0"}, "text/html": "<p>as it stood</p>", "text/plain": "Live(…)"},
        {WIDGET_MIME: {"model_id": "1"}, "text/plain": "FigureWidget({...})"},
    ]
    value.cells = [nbformat.v4.new_markdown_cell("# Title")]
    for data in outputs:
        cell = nbformat.v4.new_code_cell("show()")
        cell.outputs = [nbformat.v4.new_output("display_data", data=data)]
        value.cells.append(cell)
    path = tmp_path / "run.ipynb"
    text = nbformat.writes(nbformat.from_dict(_plain(value)))
    path.write_text(text)
    return path


def _plain(value: object) -> object:
    """Arrays as lists, as a saved notebook holds them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def test_a_page_embeds_plotly_once_and_fetches_nothing(tmp_path: Path) -> None:
    figures = [loss_curves([curve("a"), curve("b", seed=1)]), "<p>words</p>", show_plan(plan())]
    page = save_html(figures, tmp_path / "deep" / "page.html", title="Two <runs>").read_text()
    assert_opens_offline(page)
    assert len(PLOTLY_BANNER.findall(page)) == 1
    assert page.count("Plotly.newPlot(") >= 2
    assert "<title>Two &lt;runs&gt;</title>" in page


def test_lines_above_the_figures_stay_lines(tmp_path: Path) -> None:
    page = save_html(show_plan(plan()), tmp_path / "page.html", text="a plan\n  stage 0 <b>").read_text()
    assert '<p style="white-space: pre-line">a plan\n  stage 0 &lt;b&gt;</p>' in page


def test_a_figure_on_a_page_has_its_title_as_its_name_for_screen_readers(tmp_path: Path) -> None:
    figure = loss_curves([curve("a")], title='Loss of "a" & b')
    page = save_html(figure, tmp_path / "page.html").read_text()
    assert (
        BeautifulSoup(page.partition("<body>")[2], "html.parser").find(role="figure")["aria-label"] == 'Loss of "a" & b'
    )
    assert mimebundle(figure)["text/plain"] == 'Loss of "a" & b'
    assert mimebundle(panels([curve("a")]))["text/plain"].startswith("Tokens/s, ")


def test_a_run_cannot_close_the_script_that_draws_it(tmp_path: Path) -> None:
    page = save_html(loss_curves([curve("</script><script>alert(1)</script>")]), tmp_path / "page.html").read_text()
    assert "<script>alert(1)" not in page


def test_a_notebook_becomes_one_page_with_live_figures(notebook: Path, tmp_path: Path) -> None:
    page = notebook_to_html(notebook, tmp_path / "out" / "run.html").read_text()
    assert_opens_offline(page)
    assert len(PLOTLY_BANNER.findall(page)) == 1
    assert len(re.findall(r'class="plotly-graph-div"', page)) == 2


def test_a_page_begins_with_the_answer_and_folds_the_code(tmp_path: Path) -> None:
    figure = nbformat.v4.new_output("display_data", mimebundle(loss_curves([curve("a")])))
    words = nbformat.v4.new_output("execute_result", {"text/plain": "the larger one is lower"}, execution_count=2)
    cells = [
        nbformat.v4.new_markdown_cell("# Which is lower\n\nTwo models."),
        nbformat.v4.new_code_cell("train()", outputs=[nbformat.v4.new_output("stream", text="trained")]),
        nbformat.v4.new_code_cell("draw(1 < 2)", outputs=[figure], metadata={"tags": ["answer"]}),
        nbformat.v4.new_code_cell("conclude()", outputs=[words], metadata={"tags": ["answer"]}),
    ]
    path = tmp_path / "answer.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    page = notebook_to_html(path, tmp_path / "answer.html").read_text()
    assert_opens_offline(page)
    body = page[page.rindex("<body") :]
    shown = ["Which is lower</h1>", "the larger one is lower", "Plotly.newPlot(", "Two models.", "trained"]
    places = [body.index(each.replace("</h1>", "")) for each in shown]
    assert places == sorted(places)
    assert len(set(re.findall(r'id="([^"]+)" class="plotly-graph-div"', body))) == 2, "each has a place of its own"
    assert body.count("<details><summary>code</summary>") == 3
    assert "<details open" not in body


def test_a_page_of_words_alone_has_no_script_and_is_small(tmp_path: Path) -> None:
    page = save_html(["<p>words</p>"], tmp_path / "page.html")
    assert "<script" not in page.read_text()
    assert page.stat().st_size < 50_000


def test_code_is_coloured_and_names_of_languages_run_nothing(tmp_path: Path) -> None:
    attack = '"><script>alert(1)</script><p class="'
    sources = ("x = '</div><script>alert(2)</script>'", "%%bash\nls", "y")
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[-1].metadata["magics_language"] = attack
    for name in ("ipython3", attack):
        language = {"name": "python", "pygments_lexer": name}
        path = tmp_path / "code.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"language_info": language}), path)
        page = notebook_to_html(path, tmp_path / "code.html").read_text()
        assert_opens_offline(page)
        assert "<script>alert" not in page
        code = BeautifulSoup(page.partition("<body")[2], "html.parser").select("pre")
        assert [each.get_text().strip() for each in code] == [*sources]
        assert code[0].select("span.n")[0].get_text() == "x", "a name"


def test_widgets_leave_their_fallback_and_no_state(notebook: Path, tmp_path: Path) -> None:
    page = notebook_to_html(notebook, tmp_path / "run.html").read_text()
    assert "<p>as it stood</p>" in page
    assert "a widget: it shows while" in page
    assert "widget-state+json" not in page
    assert "widget-view+json" not in page


def test_exporting_leaves_the_notebook_as_it_was(notebook: Path, tmp_path: Path) -> None:
    before = notebook.read_bytes()
    notebook_to_html(notebook, tmp_path / "run.html")
    assert notebook.read_bytes() == before


def test_a_file_that_is_no_notebook_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not JSON")
    with pytest.raises(DataError, match=r"notes\.txt is not a notebook"):
        notebook_to_html(path, tmp_path / "notes.html")


CELL = {"cell_type": "code", "id": "a", "metadata": {}, "source": "x", "execution_count": None, "outputs": []}
NO_NOTEBOOKS = {
    "an empty object": "{}",
    "a list": "[]",
    "cells that are a number": {"cells": 5},
    "a cell that is a number": {"cells": [5]},
    "a cell of no type": {"cells": [{**CELL, "cell_type": "x"}]},
    "a cell without outputs": {"cells": [{name: CELL[name] for name in ("cell_type", "id", "metadata")}]},
    "an output without data": {"cells": [{**CELL, "outputs": [{"output_type": "display_data"}]}]},
    "a kernel that is a number": {"metadata": {"kernelspec": 5}},
    "a version to come": {"nbformat": 9},
    "nested too deeply": "[" * 100_000,
    "bytes": "\x00",
}


@pytest.mark.parametrize("what", NO_NOTEBOOKS)
def test_json_that_is_no_notebook_is_refused_with_a_sentence(tmp_path: Path, what: str) -> None:
    content, path = NO_NOTEBOOKS[what], tmp_path / "theirs.ipynb"
    whole = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": []}
    path.write_text(content if isinstance(content, str) else json.dumps({**whole, **content}))
    for read in (lambda: notebook_to_html(path, tmp_path / "a.html"), lambda: wb.share(path, to=tmp_path / "to")):
        with pytest.raises(DataError, match=r"theirs\.ipynb is not a notebook .* Give the path of an \.ipynb file\."):
            read()


@pytest.mark.parametrize("figure", [5, {"data": 5}, {"data": [5]}, {"data": [], "layout": 7}, []])
def test_what_stands_in_place_of_a_figure_leaves_the_page(tmp_path: Path, figure: object) -> None:
    odd = {"output_type": "display_data", "metadata": {}, "data": {PLOTLY_MIME: figure, "text/plain": "no figure"}}
    picture = {"cell_type": "markdown", "id": "b", "metadata": {}, "source": "![a](.) <img src='.'>"}
    value = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"workbench": 5}}
    path = tmp_path / "theirs.ipynb"
    path.write_text(json.dumps({**value, "cells": [{**CELL, "outputs": [odd]}, picture]}))
    assert "no figure" in wb.share(path, to=tmp_path / "to").page.read_text()


def test_a_pie_without_a_browser_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="install Chrome or Chromium"):
        save(go.Figure(go.Pie(values=[1, 2])), tmp_path / "picture.png")
