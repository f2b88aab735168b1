"""Pages and pictures to share: one HTML file that opens offline, a PNG, or a notebook that shows without a kernel."""

from __future__ import annotations

import base64
import copy
import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import plotly.io

from workbench.arguments import checked_arguments
from workbench.errors import DataError, first_line
from workbench.figures import theme
from workbench.figures.figure import NOTEBOOK_PX, accessible_name, picture, written
from workbench.figures.figure import PLOTLY_MIME as PLOTLY_MIME
from workbench.figures.sanitizing import harmless_page, new_nonce, policy

WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{policy}
<title>{title}</title>
<style>
body {{ font-family: {font}; color: {ink}; background: white; margin: 2rem auto; max-width: 1100px; padding: 0 1rem; }}
figure {{ margin: 0 0 2rem 0; }}
</style>
{script}
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""
NO_ALTERNATIVE = "No description has been provided for this image"
"""Words that nbconvert gives to those who cannot see a picture."""
ANSWER = "answer"
"""Tag of cells whose outputs stand first on the page of a notebook."""
FOLDED = "folded.html.j2"
FOLDING = """{%- extends 'lab/index.html.j2' -%}
{%- block input_group -%}
{%- if cell.source -%}<details><summary>code</summary>{{ super() }}</details>{%- endif -%}
{%- endblock input_group -%}
"""
"""Template of a page that shows a cell's code when its reader asks for it."""


def figure_html(figure: go.Figure | Mapping[str, Any], nonce: str) -> str:
    """Return a `<div>` that draws the figure on a page that has loaded plotly.js, with a name for screen readers.

    `nonce` is the number that the page's policy asks of scripts.
    """
    value = figure if isinstance(figure, go.Figure) else {k: figure[k] for k in ("data", "layout") if k in figure}
    layout = figure.layout.to_plotly_json() if isinstance(figure, go.Figure) else figure.get("layout", {})
    options = {"full_html": False, "include_plotlyjs": False, "include_mathjax": False, "validate": False}
    drawn = plotly.io.to_html(value, config={**theme.CONFIG, "responsive": True}, **options)
    drawn = drawn.replace("<script", f'<script nonce="{nonce}"')  # its JSON writes `<` as \\u003c
    return f'<div role="figure" aria-label="{html.escape(accessible_name(layout))}">{drawn}</div>'


@checked_arguments
def save_html(
    figures: go.Figure | Sequence[go.Figure | str], path: str | Path, title: str = "Workbench", text: str = ""
) -> Path:
    """Write figures below one another as one self-contained page, which fetches nothing when it opens.

    A `str` among `figures` is inserted as HTML, and a page of these alone is small: it has no script. `text` is plain
    text above the figures.
    """
    parts = [figures] if isinstance(figures, go.Figure) else list(figures)
    nonce = new_nonce()
    drawn = [part if isinstance(part, str) else f"<figure>{figure_html(part, nonce)}</figure>\n" for part in parts]
    body = "".join(drawn)
    if text:
        body = f'<p style="white-space: pre-line">{html.escape(text)}</p>\n{body}'
    has_figure = not all(isinstance(part, str) for part in parts)
    script = f'<script nonce="{nonce}">{plotly_js()}</script>' if has_figure else ""
    shown = {"title": html.escape(title), "policy": policy(nonce), "script": script, "body": body}
    page = PAGE.format(font=theme.FONT_FAMILY, ink=theme.INK, **shown)
    return written(Path(path), page.encode())


def plotly_js() -> str:
    """Return the source of plotly.js, 4.5 MB, from the installed plotly."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def notebook_to_html(notebook_path: str | Path, html_path: str | Path) -> Path:
    """Turn an executed notebook into one self-contained page with live figures, the answer first and the code folded.

    Below the title come the outputs of cells tagged `answer`, text before figures, then the notebook as it is.
    Figures stay interactive through a single embedded plotly.js. Widgets need a kernel: the HTML or picture stored
    beside a widget takes its place, and its state is left out. The rest of what a cell holds is sanitised after it was
    rendered, and the page's policy forbids its scripts but plotly.js, and everything that would be fetched.

    Raises `DataError` if the file is no notebook.
    """
    from jinja2 import DictLoader
    from nbconvert import HTMLExporter

    notebook = read_notebook(Path(notebook_path))
    notebook.cells = [*_opening(notebook), *notebook.cells]
    nonce, figures = new_nonce(), list[Any]()
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        _make_static(output, nonce, figures)
    exporter = HTMLExporter(extra_loaders=[DictLoader({FOLDED: FOLDING})], template_file=FOLDED)
    exporter.embed_images = True
    for url in ("require_js_url", "jquery_url", "mathjax_url", "mermaid_js_url", "jupyter_widgets_base_url"):
        if exporter.has_trait(url):
            setattr(exporter, url, "")
    resources = {"metadata": {"name": Path(notebook_path).stem}}
    try:
        page, _ = exporter.from_notebook_node(notebook, resources)
    except OSError:  # a text names a picture that cannot be read, such as a folder
        exporter.embed_images = False
        page, _ = exporter.from_notebook_node(notebook, resources)
    page = _with_alternatives(harmless_page(page))
    for number, figure in enumerate(figures):
        page = page.replace(_place(nonce, number), figure_html(figure, nonce), 1)
    script = f'<script nonce="{nonce}">{plotly_js()}</script>' if figures else ""
    page = page.replace("<head>", f"<head>{policy(nonce)}{script}", 1)
    return written(Path(html_path), page.encode())


def _with_alternatives(page: str) -> str:
    """Say in which section a picture stands, in place of nbconvert's sentence that it has no description."""
    section = "this notebook"

    def told(found: re.Match[str]) -> str:
        nonlocal section
        if found["heading"] is None:
            return f'alt="Picture in {html.escape(section)}"'
        section = html.unescape(re.sub("<[^>]*>|¶", "", found["heading"])).strip()
        return found[0]

    return re.sub(rf'<h[1-6][^>]*>(?P<heading>.*?)</h[1-6]>|alt="{NO_ALTERNATIVE}"', told, page, flags=re.DOTALL)


def _place(nonce: str, number: int) -> str:
    """Return the HTML in whose place a figure is put, once the page around it was sanitised."""
    return f'<div id="figure-{nonce}-{number}"></div>'


def _opening(notebook: Any) -> list[Any]:
    """Take the title from a notebook, and return it with the outputs of the cells that hold the answer."""
    answers = [cell for cell in notebook.cells if ANSWER in cell.metadata.get("tags", ()) and cell.get("outputs")]
    answers.sort(key=lambda cell: any(PLOTLY_MIME in output.get("data", {}) for output in cell.outputs))
    if not answers:
        return []
    opening = [copy.deepcopy(cell) for cell in answers]
    for cell in opening:
        cell.source = ""
    first = notebook.cells[0]
    if first.cell_type == "markdown" and first.source.startswith("# "):
        title = copy.deepcopy(first)
        title.source, _, first.source = first.source.partition("\n")
        opening.insert(0, title)
    for number, cell in enumerate(opening):
        cell.id = f"opening-{number}"  # a notebook has no two cells with one name
    return opening


def _make_static(output: Any, nonce: str, figures: list[Any]) -> None:
    """Leave one representation in the output that a page can show: the place of a figure, which joins `figures`."""
    data = output.get("data", {})
    figure = data.get(PLOTLY_MIME)
    if _is_figure(figure):
        output["data"] = {"text/html": _place(nonce, len(figures))}
        figures.append(figure)
    elif WIDGET_MIME in data:
        static = {key: value for key, value in data.items() if key in ("text/html", "image/png")}
        output["data"] = static or {"text/plain": "(a widget: it shows while its notebook's kernel runs)"}


def _is_figure(value: Any) -> bool:
    """Return True for JSON of a Plotly figure; the notebook of a stranger may hold anything in its place."""
    if not isinstance(value, Mapping) or not isinstance(value.get("layout", {}), Mapping):
        return False
    traces = value.get("data")
    return isinstance(traces, list) and all(isinstance(trace, Mapping) for trace in traces)


def read_notebook(path: Path) -> Any:
    """Return the notebook in a file without the state of its widgets; raise `DataError` if the file is no notebook."""
    import nbformat

    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except FileNotFoundError:
        raise DataError(f"There is no notebook {path}. Give the path of an .ipynb file.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Give the path of an .ipynb file.") from None
    # nbformat fails in its own ways on JSON that is no notebook, such as `{}`, or is nested too deeply
    except (nbformat.ValidationError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise DataError(
            f"{path} is not a notebook ({first_line(error)[:200]}). Give the path of an .ipynb file."
        ) from None
    notebook.metadata.pop("widgets", None)
    return notebook


def finish_notebook(notebook_path: str | Path) -> None:
    """Rewrite an executed notebook for those who only read it: without its widgets, and with a picture of each figure.

    The state of widgets is megabytes that only the notebook's kernel could show.
    """
    import nbformat

    path = Path(notebook_path)
    notebook = read_notebook(path)
    for cell in notebook.cells:
        if "outputs" in cell:
            cell["outputs"] = [o for o in cell["outputs"] if WIDGET_MIME not in o.get("data", {})]
    add_pictures(notebook)
    nbformat.write(notebook, path)


def add_pictures(notebook: Any) -> str:
    """Put a PNG beside each Plotly figure of a notebook, which shows without a script.

    The figures of this package are drawn without a browser; one with a trace of another type needs kaleido and a
    Chrome or Chromium. Returns why a figure has no picture; an empty string if all have one.
    """
    reason = ""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    for data in (output["data"] for output in outputs if _is_figure(output.get("data", {}).get(PLOTLY_MIME))):
        if "image/png" not in data:
            figure = decoded({key: data[PLOTLY_MIME].get(key, {}) for key in ("data", "layout")})
            try:
                drawn = picture(go.Figure(figure, skip_invalid=True), "png", NOTEBOOK_PX)
                data["image/png"] = base64.b64encode(drawn).decode()
            except DataError as error:
                reason = str(error)
    return reason


def decoded(value: Any) -> Any:
    """Return Plotly's JSON with its base64 columns as lists."""
    if isinstance(value, Mapping):
        if "bdata" in value:
            column = np.frombuffer(base64.b64decode(value["bdata"]), value["dtype"])
            shape = [int(size) for size in str(value.get("shape", len(column))).split(",")]
            return column.reshape(shape).tolist()
        return {key: decoded(item) for key, item in value.items()}
    return [decoded(item) for item in value] if isinstance(value, list) else value
