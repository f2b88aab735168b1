"""Pages and pictures to share: one HTML file that opens offline, a PNG, or a notebook that shows without a kernel."""

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
from workbench.figures.browserless_png import WIDTH_PX, figure_png

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
REMOTE_SCRIPTS = re.compile(
    r'<script[^>]*\bsrc=""[^>]*>\s*</script>'
    r'|<script type="module">(?:(?!</script>).)*mermaid(?:(?!</script>).)*</script>',
    re.DOTALL,
)
"""Scripts of nbconvert that would fetch something.

A browser fetches the page itself for the `<script src="">` of a library that was switched off, and the loader of
Mermaid diagrams knows addresses of its own.
"""


def mimebundle(figure: go.Figure) -> dict[str, Any]:
    """Return the figure as JupyterLab stores and draws it, whatever plotly's default renderer is."""
    return {PLOTLY_MIME: {**json.loads(figure.to_json()), "config": dict(theme.CONFIG)}}


def mimebundle_with_picture(figure: go.Figure) -> dict[str, Any]:
    """Return the same with a PNG, which GitHub, a viewer, an e-mail or a paper shows without a script.

    A figure that JupyterLab draws on an open page needs none: JupyterLab would show the picture until the pointer
    comes, and stores a picture of its own.
    """
    picture = figure_png(figure)
    static = {} if picture is None else {"image/png": base64.b64encode(picture).decode()}
    return {**mimebundle(figure), **static, "text/plain": ""}


def figure_html(figure: go.Figure | Mapping[str, Any]) -> str:
    """Return a `<div>` that draws the figure on a page that has loaded plotly.js."""
    value = figure if isinstance(figure, go.Figure) else {k: figure[k] for k in ("data", "layout") if k in figure}
    options = {"full_html": False, "include_plotlyjs": False, "include_mathjax": False, "validate": False}
    return str(plotly.io.to_html(value, config=theme.CONFIG, **options))


def save_html(
    figures: go.Figure | Sequence[go.Figure | str], path: str | Path, title: str = "Workbench", text: str = ""
) -> Path:
    """Write figures below one another as one self-contained page, which fetches nothing when it opens.

    A `str` among `figures` is inserted as HTML (such as `plan_html`); `text` is plain text above the figures.
    """
    parts = [figures] if isinstance(figures, go.Figure) else list(figures)
    body = "".join(part if isinstance(part, str) else f"<figure>{figure_html(part)}</figure>\n" for part in parts)
    if text:
        body = f'<p style="white-space: pre-line">{html.escape(text)}</p>\n{body}'
    escaped = html.escape(title)
    page = PAGE.format(title=escaped, font=theme.FONT_FAMILY, ink=theme.INK, plotly=plotly_js(), body=body)
    return _write_page(page, path)


def _write_page(page: str, path: str | Path) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")
    return target


def plotly_js() -> str:
    """Return the source of plotly.js, 4.5 MB, from the installed plotly."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def notebook_to_html(notebook_path: str | Path, html_path: str | Path) -> Path:
    """Turn an executed notebook into one self-contained page with live figures.

    Figures stay interactive through a single embedded plotly.js. Widgets need a kernel: the HTML or picture stored
    beside a widget takes its place, and its state is left out. No script, style or font is fetched.

    Raises `DataError` if the file is no notebook.
    """
    from nbconvert import HTMLExporter

    notebook = read_notebook(Path(notebook_path))
    num_figures = sum(_make_static(output) for cell in notebook.cells for output in cell.get("outputs", []))
    exporter = HTMLExporter()
    exporter.embed_images = True
    for url in ("require_js_url", "jquery_url", "mathjax_url", "mermaid_js_url", "jupyter_widgets_base_url"):
        if exporter.has_trait(url):
            setattr(exporter, url, "")
    page, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": Path(notebook_path).stem}})
    page = REMOTE_SCRIPTS.sub("", page)
    if num_figures:
        page = page.replace("<head>", f"<head><script>{plotly_js()}</script>", 1)
    return _write_page(page, html_path)


def _make_static(output: Any) -> bool:
    """Leave one representation in the output that a page can show; return True if it is a Plotly figure."""
    data = output.get("data", {})
    figure = data.get(PLOTLY_MIME)
    if figure is not None:
        output["data"] = {"text/html": figure_html(figure)}
    elif WIDGET_MIME in data:
        static = {key: value for key, value in data.items() if key in ("text/html", "image/png")}
        output["data"] = static or {"text/plain": "(a widget: it shows while its notebook's kernel runs)"}
    return figure is not None


def read_notebook(path: Path) -> Any:
    """Return the notebook in a file without the state of its widgets; raise `DataError` if the file is no notebook."""
    import nbformat

    try:
        notebook = nbformat.read(path, as_version=4)
    except FileNotFoundError:
        raise DataError(f"There is no notebook {path}. Give the path of an .ipynb file.", path=str(path)) from None
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. Give the path of an .ipynb file.", path=str(path)
        ) from None
    except (nbformat.reader.NotJSONError, json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise DataError(
            f"{path} is not a notebook ({error}). Give the path of an .ipynb file.", path=str(path)
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


def add_pictures(notebook: Any, width: int = WIDTH_PX) -> str:
    """Put beside each Plotly figure of a notebook what shows without a script: a PNG, or else a table.

    The figures of this package are drawn without a browser; one with a trace of another type needs kaleido and a
    Chrome or Chromium. Returns the reason for tables instead of pictures; an empty string if there are none.
    """
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    bare = [o["data"] for o in outputs if PLOTLY_MIME in o.get("data", {}) and "image/png" not in o["data"]]
    figures = [_decoded({key: data[PLOTLY_MIME].get(key, {}) for key in ("data", "layout")}) for data in bare]
    pictures: list[bytes | None] = [figure_png(go.Figure(figure, skip_invalid=True), width) for figure in figures]
    missing = [index for index, picture in enumerate(pictures) if picture is None]
    reason = ""
    try:
        drawn = _browser_pngs([figures[index] for index in missing], width)
        for index, png in zip(missing, drawn, strict=True):
            pictures[index] = png
    except DataError as error:
        reason = str(error)
    for data, figure, picture in zip(bare, figures, pictures, strict=True):
        if picture is None:
            data.setdefault("text/html", figure_table(figure))
        else:
            data["image/png"] = base64.b64encode(picture).decode()
    return reason


def _decoded(value: Any) -> Any:
    """Return Plotly's JSON with its base64 columns as lists."""
    if isinstance(value, Mapping):
        if "bdata" in value:
            column = np.frombuffer(base64.b64decode(value["bdata"]), value["dtype"])
            shape = [int(size) for size in str(value.get("shape", len(column))).split(",")]
            return column.reshape(shape).tolist()
        return {key: _decoded(item) for key, item in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def _browser_pngs(figures: Sequence[Mapping[str, Any]], width: int) -> list[bytes]:
    """Return the PNG of each figure, all drawn by one browser; raise `DataError` without a browser."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{index}.png" for index in range(len(figures))]
        values = [go.Figure(figure, skip_invalid=True) for figure in figures]
        heights = [value.layout.height for value in values]
        if files:
            _draw(lambda: plotly.io.write_images(values, files, format="png", width=width, height=heights), folder)
        return [file.read_bytes() for file in files]


def figure_table(figure: Mapping[str, Any]) -> str:
    """Return an HTML table of a figure's traces: number of points; first, last, least and greatest value."""
    names = ("trace", "points", "first", "last", "least", "greatest")
    rows = ["".join(f"<th>{name}</th>" for name in names)]
    for trace in figure["data"]:
        if trace.get("type", "scatter") in ("scatter", "bar"):
            numbers = [value for value in trace.get("y") or () if isinstance(value, int | float)]
            values = [value for value in numbers if math.isfinite(value)]
            ends = [values[0], values[-1], min(values), max(values)] if values else []
            cells = [html.escape(str(trace.get("name", ""))), f"{len(values):,}", *(f"{value:.5g}" for value in ends)]
            rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    title = figure["layout"].get("title", {})
    caption = html.escape(re.sub(r"<[^>]*>", " ", str(title.get("text", "") if isinstance(title, Mapping) else title)))
    return f"<table><caption>{caption}</caption>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def save_png(figure: go.Figure, path: str | Path, width: int = theme.ASSUMED_WIDTH_PX, scale: float = 2.0) -> Path:
    """Write a PNG that is `width` × `scale` pixels wide; this needs kaleido and a Chrome or Chromium.

    Raises `DataError` with what to install if either is missing.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    height = figure.layout.height
    _draw(lambda: figure.write_image(target, format="png", width=width, height=height, scale=scale), str(target))
    return target


def _draw(draw: Callable[[], None], path: str) -> None:
    try:
        draw()
    except Exception as error:  # kaleido and its browser fail in a dozen classes, some of them private.
        words = str(error.args[0] if error.args else error).strip() or type(error).__name__
        raise DataError(
            f"No picture could be drawn: {words.splitlines()[0].rstrip('.')}. "
            "Run `pip install kaleido`, install Chrome or Chromium, and point BROWSER_PATH at it if it is not found; "
            "save_html needs neither.",
            path=path,
        ) from error
