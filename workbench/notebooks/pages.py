"""Pages of notebooks: one HTML file that opens offline, and a notebook that shows its figures without a kernel.

HTML from elsewhere is made harmless in two ways that hold at once. The sanitiser works on the HTML that a browser would
get, after Markdown was rendered, and keeps the tags, attributes, styles and addresses of a list. The policy of a page
(`workbench.figures.figure.policy`) lets the browser run the page's own scripts, and fetch nothing.
"""

from __future__ import annotations

import base64
import copy
import functools
import html
import json
import re
import urllib.parse
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from workbench.base.errors import DataError, first_line, in_words
from workbench.figures.figure import (
    HIGHEST_PX,
    NOTEBOOK_PX,
    PLOTLY_MIME,
    WIDGET_MIME,
    Figure,
    figure_html,
    new_nonce,
    picture,
    plotly_js,
    policy,
    written,
)

TAGS = (
    *("a", "abbr", "b", "blockquote", "br", "caption", "center", "code", "col", "colgroup", "dd", "del", "details"),
    *("div", "dl", "dt", "em", "figcaption", "figure", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "img", "input"),
    *("kbd", "li", "main", "mark", "ol", "p", "pre", "progress", "q", "s", "samp", "small", "span", "strong", "sub"),
    *("summary", "sup", "table", "tbody", "td", "tfoot", "th", "thead", "tr", "tt", "u", "ul", "var"),
)
ATTRIBUTES: Mapping[str, frozenset[str]] = {
    "*": frozenset(
        {"class", "style", "title", "align", "colspan", "rowspan", "width", "height", "scope", "id", "role"}
        | {"aria-label", "data-mime-type"}
    ),
    "a": frozenset({"href"}),
    "img": frozenset({"src", "alt"}),
    "input": frozenset({"type", "checked", "disabled"}),
    "ol": frozenset({"start"}),
    "progress": frozenset({"value", "max"}),
}
STYLES = (
    *("background-color", "border", "border-bottom", "border-collapse", "border-left", "border-radius"),
    *("border-right", "border-top", "color", "display", "flex", "flex-wrap", "float", "font-family", "font-size"),
    *("font-style", "font-variant-numeric", "font-weight", "gap", "height", "line-height", "margin", "margin-bottom"),
    *("margin-left", "margin-right", "margin-top", "max-height", "max-width", "min-width", "opacity", "overflow"),
    *("padding", "padding-bottom", "padding-left", "padding-right", "padding-top", "text-align", "text-decoration"),
    *("vertical-align", "white-space", "width"),
)
"""Properties of CSS that change only how the element looks."""
LINK = re.compile(r"(?:https?|mailto):|[^:]*\Z", re.IGNORECASE)
"""Addresses that a link may have: of the web, of mail, and relative ones."""
EMBEDDED = re.compile(r"data:image/[\w.+-]+[;,]", re.IGNORECASE)
"""Addresses of pictures that a page holds itself, in which no script runs."""
ATTACHMENT = re.compile(r"""\battachment:([^\s()"'<>\\]*)""")
"""Address of a picture that is attached to a cell of Markdown, with its name."""
RUNNING_TAGS = frozenset(
    {"script", "iframe", "object", "embed", "form", "button", "link", "meta", "base", "style", "svg", "math"}
    | {"template", "frame", "frameset", "applet", "audio", "video", "source", "textarea", "select", "portal"}
)
"""Tags that may run something, or load something from elsewhere."""
STYLE = re.compile(r"<style\b[^>]*>([^<]*)</style\s*>", re.IGNORECASE)
LOADING_STYLE = re.compile(r"@import|url\s*\(|\\", re.IGNORECASE)
UNSHOWN = re.compile(r"<(script|style|template|noscript|iframe|title|textarea)\b[^>]*>.*?</\1\s*>", re.I | re.DOTALL)
"""Elements whose content no browser shows as text."""


def harmless_html(text: str) -> str:
    """Return HTML, or Markdown, with the tags, attributes, styles and addresses that only format a text.

    A picture of another address stays as its alternative text.
    """
    # `>` alone begins no tag, and Markdown needs it for quotations.
    return str(_cleaner().clean(UNSHOWN.sub("", text))).replace("&gt;", ">")


def harmless_markdown(text: str) -> str:
    """Return Markdown that runs nothing once it is rendered; a text that runs nothing stays as it is."""
    try:
        if not runs_something(_rendered(text)):
            return text
        cleaned = harmless_html(text)
        return harmless_html(_rendered(text)) if runs_something(_rendered(cleaned)) else cleaned
    except Exception:  # nbconvert cannot render it, as where it names an attachment by entities
        return f"<pre>{html.escape(text)}</pre>"


def _rendered(markdown: str) -> str:
    from nbconvert.filters import markdown2html

    return str(markdown2html(ATTACHMENT.sub("data:image/png;base64,", markdown)))


def _with_attachments(markdown: str, attachments: Mapping[str, Any]) -> str:
    """Return Markdown that holds the pictures attached to its cell; nbconvert raises an error for one that is lost."""

    def address(found: re.Match[str]) -> str:
        attached = attachments.get(urllib.parse.unquote(found[1]), attachments.get(found[1]))
        types = attached if isinstance(attached, Mapping) else {}
        for mime, content in types.items():
            if mime.startswith("image/"):
                return f"data:{mime};base64,{re.sub(r'[^A-Za-z0-9+/=]', '', ''.join(content))}"
        return f"lost-{found[0]}"

    return ATTACHMENT.sub(address, markdown)


def harmless_page(page: str) -> str:
    """Return a page without scripts, and with a body as `harmless_html` has it.

    Its own style sheets stay; those of the body are put behind them, if they load nothing.
    """
    before, begin, rest = page.partition("<body")
    start, _, body = rest.partition(">")
    body, _, after = body.rpartition("</body>")
    styles = [style for style in STYLE.findall(body) if not LOADING_STYLE.search(style)]
    head = UNSHOWN.sub(lambda match: "" if match[1].lower() == "script" else match[0], before)
    head = head.replace("</head>", "".join(f"<style>{style}</style>" for style in styles) + "</head>", 1)
    return f"{head}{begin}{start}>{_cleaner().clean(UNSHOWN.sub('', body))}</body>{after}"


def runs_something(text: str) -> bool:
    """Return True for HTML with a tag, an attribute or an address that may run something in a browser."""
    finder = _RunningParts()
    finder.feed(text)
    finder.close()
    return finder.found


class _RunningParts(HTMLParser):
    found = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        addresses = [value or "" for name, value in attrs if name in ("href", "src", "action", "xlink:href")]
        is_kept = all(_is_link(value) or EMBEDDED.match(value) for value in addresses)
        handles = any(name.startswith("on") or name in ("srcdoc", "formaction") for name, _ in attrs)
        self.found = self.found or tag in RUNNING_TAGS or handles or not is_kept


def _is_link(value: str) -> bool:
    """Return True for the address of a link; browsers skip spaces and control characters, and read entities."""
    seen = re.sub(r"[\x00-\x20\x7f-\xa0\u2028\u2029\ufffd]", "", html.unescape(value))
    return LINK.match(seen) is not None


def _is_kept(tag: str, name: str, value: str) -> bool:
    """Return True for an attribute that the sanitiser keeps."""
    if name not in ATTRIBUTES["*"] and name not in ATTRIBUTES.get(tag, ()):
        return False
    checks = {"href": _is_link(value), "src": EMBEDDED.match(html.unescape(value)) is not None}
    return bool(checks.get(name, tag != "input" or name != "type" or value == "checkbox"))


@functools.cache
def _cleaner() -> Any:
    from bleach.css_sanitizer import CSSSanitizer
    from bleach.sanitizer import Cleaner

    styles = CSSSanitizer(allowed_css_properties=STYLES)
    protocols = {"http", "https", "mailto", "data"}  # `_is_kept` leaves `data:` to pictures
    return Cleaner(tags=TAGS, attributes=_is_kept, protocols=protocols, strip=True, css_sanitizer=styles)


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
    from nbconvert.filters.highlight import Highlight2HTML

    notebook = read_notebook(Path(notebook_path))
    notebook.cells = [*_opening(notebook), *notebook.cells]
    nonce, figures, codes = new_nonce(), list[Any](), list[str]()

    def place(kind: str, number: int | str) -> str:
        """Return what stands for a figure or for code until the page around it was sanitised, which takes long."""
        return f'<div id="{kind}-{nonce}-{number}"></div>'

    # Of each output one representation stays: the place of a figure, or what is stored beside a widget.
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        data = output.get("data", {})
        if _is_figure(data.get(PLOTLY_MIME)):
            output["data"] = {"text/html": place("figure", len(figures))}
            figures.append(data[PLOTLY_MIME])
        elif WIDGET_MIME in data:
            static = {key: value for key, value in data.items() if key in ("text/html", "image/png")}
            output["data"] = static or {"text/plain": "(a widget: it shows while its notebook's kernel runs)"}
    language = notebook.metadata.get("language_info", {})
    highlight = Highlight2HTML(pygments_lexer=_known(language.get("pygments_lexer", language.get("name"))))

    def highlighted(source: str, metadata: Mapping[str, Any]) -> str:
        codes.append(highlight(source, language=_known(metadata.get("magics_language"))))
        return place("code", len(codes) - 1)

    exporter = HTMLExporter(
        extra_loaders=[DictLoader({FOLDED: FOLDING})], template_file=FOLDED, filters={"highlight_code": highlighted}
    )
    exporter.embed_images = True
    for url in ("require_js_url", "jquery_url", "mathjax_url", "mermaid_js_url", "jupyter_widgets_base_url"):
        if exporter.has_trait(url):
            setattr(exporter, url, "")
    resources = {"metadata": {"name": Path(notebook_path).stem}}
    for cell in (cell for cell in notebook.cells if cell.cell_type == "markdown"):
        cell.source = _with_attachments(cell.source, cell.get("attachments", {}))
    try:
        page, _ = exporter.from_notebook_node(notebook, resources)
    except OSError:  # a text names a picture that cannot be read, such as a folder
        exporter.embed_images = False
        page, _ = exporter.from_notebook_node(notebook, resources)
    section = "this notebook"

    def described(found: re.Match[str]) -> str:
        nonlocal section
        if found["heading"] is None:
            return f'alt="Picture in {html.escape(section)}"'
        section = html.unescape(re.sub("<[^>]*>|¶", "", found["heading"])).strip()
        return found[0]

    # A picture is described by the section that it stands in, where nbconvert says that it has no description.
    headings_and_pictures = rf'<h[1-6][^>]*>(?P<heading>.*?)</h[1-6]>|alt="{NO_ALTERNATIVE}"'
    page = re.sub(headings_and_pictures, described, harmless_page(page), flags=re.DOTALL)
    drawn = {"figure": lambda number: figure_html(figures[number], nonce), "code": codes.__getitem__}
    page = re.sub(place("(figure|code)", r"(\d+)"), lambda found: drawn[found[1]](int(found[2])), page)
    script = f'<script nonce="{nonce}">{plotly_js()}</script>' if figures else ""
    page = page.replace("<head>", f"<head>{policy(nonce)}{script}", 1)
    return written(Path(html_path), page.encode())


def _known(language: Any) -> str | None:
    """Return the name of a language that a notebook gives, None for what is no name; pygments does not escape it."""
    return language if isinstance(language, str) and re.fullmatch(r"[\w+.#-]+", language) else None


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


def finished_notebook(path: Path) -> Any:
    """Return an executed notebook for those who only read it: without its widgets, and with a picture of each figure.

    The state of widgets is megabytes that only the notebook's kernel could show. Empty outputs go too: lines of
    progress leave them at their end, and each would be a gap.
    """
    notebook = read_notebook(path)
    for cell in notebook.cells:
        if "outputs" in cell:
            cell["outputs"] = [
                output
                for output in cell["outputs"]
                if "data" not in output or (any(output["data"].values()) and WIDGET_MIME not in output["data"])
            ]
    add_pictures(notebook)
    return notebook


def notebook_text(notebook: Any) -> str:
    """Return a notebook as nbformat writes it, but with each figure on one line.

    With a line for each number, as nbformat has it, figures are twice as long, and most of the time goes into them.
    """
    import nbformat

    figures, mark = list[str](), new_nonce()

    def in_short(output: Any) -> Any:
        data = output.get("data", {})
        if PLOTLY_MIME not in data:
            return output
        figures.append(json.dumps(data[PLOTLY_MIME], ensure_ascii=False, sort_keys=True))
        return nbformat.from_dict({**output, "data": {**data, PLOTLY_MIME: f"{mark}-{len(figures) - 1}"}})

    short = copy.copy(notebook)
    short.cells = [
        nbformat.from_dict({**cell, "outputs": [*map(in_short, cell.outputs)]}) if cell.get("outputs") else cell
        for cell in notebook.cells
    ]
    return re.sub(f'"{mark}-(\\d+)"', lambda found: figures[int(found[1])], str(nbformat.writes(short)))


def add_pictures(notebook: Any) -> str:
    """Put a PNG beside each Plotly figure of a notebook, which shows without a script.

    The figures of this package are drawn without a browser; one with a trace of another type needs kaleido and a
    Chrome or Chromium. Returns which figures have no picture and why; an empty string if all have one.
    """
    reasons = dict[str, None]()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    for data in (output["data"] for output in outputs if _is_figure(output.get("data", {}).get(PLOTLY_MIME))):
        if "image/png" not in data:
            try:
                figure = decoded({key: data[PLOTLY_MIME].get(key, {}) for key in ("data", "layout")})
                shown = Figure(figure, skip_invalid=True)
                if (shown.layout.height or 0) > HIGHEST_PX:
                    raise ValueError(f"it is {shown.layout.height:,.0f} pixels high")
                data["image/png"] = base64.b64encode(picture(shown, "png", NOTEBOOK_PX)).decode()
            except DataError as error:
                reasons[f"Figures that only a browser draws have no picture beside them. {error}"] = None
            except Exception as error:  # the figure of a stranger may hold anything
                reasons[f"A figure is damaged and has no picture beside it: {in_words(error)}."] = None
    return " ".join(reasons)


def decoded(value: Any) -> Any:
    """Return Plotly's JSON with its base64 columns as lists."""
    if isinstance(value, Mapping):
        if "bdata" in value:
            column = np.frombuffer(base64.b64decode(value["bdata"], validate=True), value["dtype"])
            shape = [int(size) for size in str(value.get("shape", len(column))).split(",")]
            return column.reshape(shape).tolist()
        return {key: decoded(item) for key, item in value.items()}
    return [decoded(item) for item in value] if isinstance(value, list) else value
