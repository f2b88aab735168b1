"""Pages and pictures to send to somebody: one HTML file that opens offline, or a PNG."""

from __future__ import annotations

import base64
import html
import json
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import plotly.io

from workbench.errors import DataError
from workbench.figures import theme
from workbench.figures._picture import WIDTH_PX, curves_png

PLOTLY_MIME = "application/vnd.plotly.v1+json"
WIDGET_MIME = "application/vnd.jupyter.widget-view+json"

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font-family: {font}; color: {ink}; background: white; margin: 2rem auto; max-width: 1100px; padding: 0 1rem; }}
figure {{ margin: 0 0 2rem 0; }}
</style>
<script>{plotly}</script>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def mimebundle(figure: go.Figure) -> dict[str, Any]:
    """The figure as JupyterLab stores and draws it, whatever plotly's default renderer is."""
    return {PLOTLY_MIME: {**json.loads(figure.to_json()), "config": dict(theme.CONFIG)}}


def pictured(figure: go.Figure) -> dict[str, Any]:
    """The same for a figure of curves, with a PNG beside it for where no script runs: GitHub, a viewer, an e-mail."""
    picture = curves_png(figure)
    static = {} if picture is None else {"image/png": base64.b64encode(picture).decode()}
    return {**mimebundle(figure), **static, "text/plain": ""}


def figure_html(figure: go.Figure | Mapping[str, Any]) -> str:
    """A `<div>` that draws the figure on a page which has plotly.js already."""
    value = (
        figure if isinstance(figure, go.Figure) else {key: figure[key] for key in ("data", "layout") if key in figure}
    )
    return str(
        plotly.io.to_html(
            value,
            full_html=False,
            include_plotlyjs=False,
            include_mathjax=False,
            validate=False,
            config=theme.CONFIG,
        )
    )


def save_html(
    figures: go.Figure | Sequence[go.Figure | str], path: str | Path, title: str = "Workbench", text: str = ""
) -> Path:
    """Write figures below one another as one self-contained page; nothing is fetched when it opens.

    A `str` among `figures` is inserted as HTML (`plan_html`, a table); `text` is plain, in lines, above all.
    """
    parts = [figures] if isinstance(figures, go.Figure) else list(figures)
    body = "".join(part if isinstance(part, str) else f"<figure>{figure_html(part)}</figure>\n" for part in parts)
    paragraph = f'<p style="white-space: pre-line">{html.escape(text)}</p>\n' if text else ""
    page = PAGE.format(
        title=html.escape(title),
        font=theme.FONT_FAMILY,
        ink=theme.INK,
        plotly=plotly_js(),
        body=paragraph + body,
    )
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")
    return target


def plotly_js() -> str:
    """The library's source, 4.5 MB, out of the installed plotly."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def notebook_to_html(notebook_path: str | Path, html_path: str | Path) -> Path:
    """Turn an executed notebook into one self-contained page with live figures.

    Plotly figures stay interactive over a single embedded plotly.js. Widgets need a kernel: what they show
    falls back to the HTML or picture stored beside them, and their state is left out. No script, style or
    font is fetched.

    Raises `DataError` if the file is no notebook.
    """
    from nbconvert import HTMLExporter

    notebook = read_notebook(Path(notebook_path))
    drawn = sum(_make_static(output) for cell in notebook.cells for output in cell.get("outputs", []))
    exporter = HTMLExporter()
    exporter.embed_images = True
    for url in ("require_js_url", "jquery_url", "mathjax_url", "mermaid_js_url", "jupyter_widgets_base_url"):
        if exporter.has_trait(url):
            setattr(exporter, url, "")
    resources = {"metadata": {"name": Path(notebook_path).stem}}
    page, _ = exporter.from_notebook_node(notebook, resources)
    page = _without_remote_scripts(page)
    if drawn:
        page = page.replace("<head>", f"<head><script>{plotly_js()}</script>", 1)
    target = Path(html_path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")
    return target


def without_widgets(notebook_path: str | Path) -> None:
    """Rewrite an executed notebook without what only its kernel could show: widgets and their state (megabytes)."""
    import nbformat

    path = Path(notebook_path)
    notebook = read_notebook(path)
    for cell in notebook.cells:
        if "outputs" in cell:
            cell["outputs"] = [o for o in cell["outputs"] if WIDGET_MIME not in o.get("data", {})]
    nbformat.write(notebook, path)


def add_pictures(notebook: Any, width: int = WIDTH_PX) -> tuple[int, str]:
    """Put beside each Plotly figure of a notebook what shows where no script runs: a PNG, or else a table.

    Returns the number of figures, and why there are tables instead of pictures ("" if there are pictures).
    """
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    bare = [o["data"] for o in outputs if PLOTLY_MIME in o.get("data", {}) and "image/png" not in o["data"]]
    try:
        for data, picture in zip(bare, _pngs([data[PLOTLY_MIME] for data in bare], width), strict=True):
            data["image/png"] = picture
    except DataError as error:
        left = [data for data in bare if not _drawn_without_browser(data)]
        for data in left:
            data.setdefault("text/html", figure_table(data[PLOTLY_MIME]))
        return len(bare), str(error) if left else ""
    return len(bare), ""


def _drawn_without_browser(data: dict[str, Any]) -> bool:
    """Add the PNG of a figure of curves; False for any other figure, and without Pillow."""
    figure = data[PLOTLY_MIME]
    if "xaxis2" in figure.get("layout", {}) or not any(trace.get("meta") == "line" for trace in figure.get("data", [])):
        return False
    value = go.Figure({key: _decoded(figure[key]) for key in ("data", "layout") if key in figure}, skip_invalid=True)
    picture = curves_png(value)
    if picture is not None:
        data["image/png"] = base64.b64encode(picture).decode()
    return picture is not None


def _decoded(value: Any) -> Any:
    """Plotly's JSON with its base64 columns as lists."""
    if isinstance(value, Mapping):
        if "bdata" in value:
            return np.frombuffer(base64.b64decode(value["bdata"]), value["dtype"]).tolist()
        return {key: _decoded(item) for key, item in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def _pngs(figures: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """Base64 of each figure's PNG, drawn by one browser. Raises `DataError` without one."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{index}.png" for index in range(len(figures))]
        values = [
            go.Figure({"data": f.get("data", []), "layout": f.get("layout", {})}, skip_invalid=True) for f in figures
        ]
        heights = [value.layout.height for value in values]
        if files:
            _draw(lambda: plotly.io.write_images(values, files, format="png", width=width, height=heights), folder)
        return [base64.b64encode(file.read_bytes()).decode() for file in files]


def figure_table(figure: Mapping[str, Any]) -> str:
    """A figure's traces as an HTML table: points, and the first, last, least and greatest value of each."""
    rows = [_trace_row(trace) for trace in figure.get("data", []) if trace.get("type", "scatter") in ("scatter", "bar")]
    head = "".join(f"<th>{name}</th>" for name in ("trace", "points", "first", "last", "least", "greatest"))
    title = figure.get("layout", {}).get("title", {})
    caption = html.escape(re.sub(r"<[^>]*>", " ", str(title.get("text", "") if isinstance(title, Mapping) else title)))
    return f"<table><caption>{caption}</caption><tr>{head}</tr>{''.join(rows)}</table>"


def _trace_row(trace: Mapping[str, Any]) -> str:
    values = _numbers(trace.get("y"))
    ends = [values[0], values[-1], min(values), max(values)] if values else []
    cells = [html.escape(str(trace.get("name", ""))), f"{len(values):,}", *(f"{value:.5g}" for value in ends)]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _numbers(column: Any) -> list[float]:
    """A trace's column, also where plotly packed it as base64."""
    if isinstance(column, Mapping) and "bdata" in column:
        column = np.frombuffer(base64.b64decode(column["bdata"]), column["dtype"]).tolist()
    numbers = [value for value in column or () if isinstance(value, int | float)]
    return [value for value in numbers if math.isfinite(value)]


def read_notebook(path: Path) -> Any:
    """The notebook in a file, without the state of its widgets. Raises `DataError` if the file is no notebook."""
    import nbformat

    try:
        notebook = nbformat.read(path, as_version=4)
    except FileNotFoundError:
        raise DataError(f"There is no notebook {path}. Give the path of an .ipynb file.", path=str(path)) from None
    except (nbformat.reader.NotJSONError, json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise DataError(
            f"{path} is not a notebook ({error}). Give the path of an .ipynb file.", path=str(path)
        ) from None
    notebook.metadata.pop("widgets", None)
    return notebook


def _make_static(output: Any) -> bool:
    """Leave one form in the output that a page can show; True if that is a Plotly figure."""
    data = output.get("data", {})
    figure = data.get(PLOTLY_MIME)
    if figure is not None:
        output["data"] = {"text/html": figure_html(figure)}
        return True
    if WIDGET_MIME in data:
        kept = {key: value for key, value in data.items() if key in ("text/html", "image/png")}
        output["data"] = kept or {"text/plain": "(a widget: it shows while its notebook's kernel runs)"}
    return False


SWITCHED_OFF = re.compile(
    r'<script[^>]*\bsrc=""[^>]*>\s*</script>'
    r'|<script type="module">(?:(?!</script>).)*mermaid(?:(?!</script>).)*</script>',
    re.DOTALL,
)
"""nbconvert's `<script src="">` for what was switched off (a browser would fetch the page itself), and its
loader of Mermaid diagrams, which knows addresses of its own."""


def _without_remote_scripts(page: str) -> str:
    return SWITCHED_OFF.sub("", page)


def save_png(figure: go.Figure, path: str | Path, width: int = theme.ASSUMED_WIDTH_PX, scale: float = 2.0) -> Path:
    """Write a PNG `width` × `scale` pixels wide; needs kaleido and a Chrome or Chromium.

    Raises `DataError` with what to install where either is missing.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    height = figure.layout.height
    _draw(lambda: figure.write_image(target, format="png", width=width, height=height, scale=scale), str(target))
    return target


def _draw(draw: Callable[[], None], path: str) -> None:
    try:
        draw()
    except Exception as error:  # kaleido and its browser fail in a dozen classes, some of them private
        raise DataError(
            f"No picture could be drawn: {_first_sentence(error)}. "
            "Run `pip install kaleido`, install Chrome or Chromium, and point BROWSER_PATH at it if it is not found; "
            "save_html needs neither.",
            path=path,
        ) from error


def _first_sentence(error: Exception) -> str:
    """Of an error's words, which some pass as several arguments."""
    words = str(error.args[0] if error.args else error).strip()
    return (words or type(error).__name__).splitlines()[0].rstrip(".")
