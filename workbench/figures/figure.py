"""Figures that can be saved and shared: as a picture, vectors with text, a table of their data, or an offline page.

Below the figure come the pages of figures; those of notebooks are `workbench.notebooks.pages`.
"""

from __future__ import annotations

import base64
import csv
import html
import io
import json
import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import plotly.io
from plotly.subplots import make_subplots

from workbench.base.arguments import Magnification, Pixels, checked_arguments
from workbench.base.errors import DataError, InvalidArgument
from workbench.figures import theme

PLOTLY_MIME = "application/vnd.plotly.v1+json"
NOTEBOOK_PX = 860
"""Width of a notebook's column: JupyterLab cuts a wider picture off."""
HIGHEST_PX = 20_000
"""Largest height of the picture of a figure in a notebook, whose author may have written any number."""
DRAWN = ("scatter", "bar", "heatmap", "parcoords")
"""Types of traces that a static twin can show."""
SUFFIXES = (".png", ".svg", ".pdf", ".csv")
"""Endings of the files that `save` writes."""
MOST_PIXELS = 200_000_000
"""Pixels of the largest PNG that is drawn, which takes 0.8 GB."""
VECTORS = {"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "workbench"}
"""Settings of matplotlib for files whose text stays text, and which are equal for equal figures."""
ROLES = {"raw": "value", "line": "curve", "end": "last value", "nan": "not finite", "evaluation": "held out"}
"""Words in a table for the points of a trace, by its `meta`."""
_settings = threading.Lock()  # matplotlib has one set of settings for all threads


class Figure(go.Figure):
    """A Plotly figure that looks as all figures of this package, and that can be saved."""

    def laid_out(self, **layout: Any) -> Figure:
        """Set the look that all figures share, and other fields of the layout.

        `height` and `margin` are those with a title and a subtitle of one line each; the figure grows for more lines.
        """
        self.update_layout(template=theme.TEMPLATE, **layout)
        if title := layout.get("title"):
            lines = [str(part.get("text", "")).count("<br>") for part in (title, title.get("subtitle", {}))]
            more = round((theme.TITLE_PX * lines[0] + theme.FONT_PX * lines[1]) * theme.LINE_SPACING)
            self.layout.height += more
            self.layout.margin.t = (self.layout.margin.t or theme.TEMPLATE.layout.margin.t) + more
        return self

    def without_values(self, words: str) -> Figure:
        """Show words in the place of values, of which there are none yet: plotly.js would draw axes from -1 to 4."""
        self.update_xaxes(range=[0, 1], showticklabels=False, type="linear")
        self.update_yaxes(range=[0, 1], showticklabels=False, type="linear")
        self.add_annotation(theme.in_the_middle(words))
        return self

    def with_legend_below(self, height: int, main: str, words: str) -> Figure:
        """Set the layout of a figure with a legend in rows below it, which come on top of the height."""
        names = [trace.name for trace in self.data if trace.showlegend is not False]
        below = theme.height_below(names)
        title, margin = theme.title(main, words), {"t": 88, "b": below}
        return self.laid_out(height=height + below, title=title, margin=margin, legend=theme.LEGEND_BELOW)

    def _ipython_display_(self) -> None:
        """Show the figure in JupyterLab or VS Code with its PNG beside it; elsewhere, as in Colab, as Plotly does."""
        from IPython.display import display
        from plotly.io import renderers

        chosen = renderers.default
        if chosen in renderers and renderers[chosen] is renderers["plotly_mimetype"]:
            display(mimebundle(self), raw=True)
        else:
            super()._ipython_display_()

    def save(self, path: str | Path, width: Pixels = theme.ASSUMED_WIDTH_PX, scale: Magnification = 2.0) -> Path:
        """Write the figure as a file; see `workbench.figures.save`."""
        return save(self, path, width, scale)


def subplots(*numbers: int, **options: Any) -> Figure:
    """Return a figure with rows and columns of plots; the arguments are those of Plotly's `make_subplots`."""
    figure: Figure = make_subplots(*numbers, figure=Figure(), **options)
    return figure


@checked_arguments
def save(
    figure: go.Figure, path: str | Path, width: Pixels = theme.ASSUMED_WIDTH_PX, scale: Magnification = 2.0
) -> Path:
    """Write a figure to a file whose name ends in `.png`, `.svg`, `.pdf` or `.csv`, and return its path.

    An SVG or a PDF has its text as text. A CSV has one row for each point, with columns named after the axes. No
    browser is needed; a figure with a trace of a type that this package does not draw needs kaleido and Chrome.

    Args:
        figure: the figure; the menus in it are left out.
        path: the file to write; folders above it are made.
        width: width in pixels, from 1 to 10,000; the figure has its own height.
        scale: pixels of a PNG for each pixel of the figure, from 0.1 to 20.

    Raises `InvalidArgument` for another ending, and for a PNG of more than 200 million pixels, and `DataError` if the
    file cannot be written.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in SUFFIXES:
        raise InvalidArgument(
            f"{target.name!r} does not end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}. "
            "Choose one of these endings; wb.figures.save_html writes an interactive page."
        )
    if suffix == ".png" and (pixels := width * (figure.layout.height or width) * scale**2) > MOST_PIXELS:
        raise InvalidArgument(
            f"A PNG with width={width:,} and scale={scale:g} has {pixels / 1e6:,.0f} million pixels, and at most "
            f"{MOST_PIXELS / 1e6:,.0f} million are drawn. Give less of either, or an .svg, which has no pixels."
        )
    if suffix != ".csv":
        return written(target, picture(figure, suffix[1:], width, scale))
    rows = [row for trace in figure.data if trace.visible in (None, True) for row in _rows(figure, trace)]
    names = dict.fromkeys(name for row in rows for name in row)
    shown = [name for name in names if any(row.get(name) not in (None, "") for row in rows)]
    table = io.StringIO()
    writer = csv.DictWriter(table, shown, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return written(target, table.getvalue().encode())


def written(target: Path, content: bytes) -> Path:
    """Write a file, with the folders above it, and return its path; raise `DataError` if it cannot be written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    except OSError as error:
        raise DataError(
            f"{target!s:.300} cannot be written: {error.strerror}. Give a path in a folder that you may write to."
        ) from None
    return target


def has_twin(figure: go.Figure) -> bool:
    """Return True if a picture of a figure needs no browser.

    Traces of other types need one, and traces that leave their colours or the places of their cells to Plotly.
    """
    for trace in figure.data:
        if trace.type == "heatmap":
            given = all(part is not None for part in (trace.colorscale, trace.x, trace.y))
        elif trace.type == "parcoords":
            given = trace.line.colorscale is not None
        elif trace.type in DRAWN:
            colors = trace.marker.color
            given = isinstance(colors, str | None) or all(isinstance(color, str) for color in colors)
        else:
            given = False
        if not given:
            return False
    return True


def mimebundle(figure: go.Figure, with_picture: bool = True) -> dict[str, Any]:
    """Return the figure as JupyterLab stores and draws it, whatever plotly's default renderer is, with its PNG.

    JupyterLab shows the PNG until the pointer comes, so that a figure has its size and its marks in a tab that is
    hidden while it arrives, where plotly.js would draw it 0 pixels high. GitHub, a viewer, an e-mail or a paper shows
    the PNG without a script.
    """
    static = {"image/png": base64.b64encode(picture(figure)).decode()} if with_picture and has_twin(figure) else {}
    config = {PLOTLY_MIME: {**json.loads(figure.to_json()), "config": dict(theme.CONFIG)}}
    return {**config, **static, "text/plain": accessible_name(config[PLOTLY_MIME]["layout"])}


def page_json(figure: go.Figure, **config: Any) -> str:
    """Return a figure as JSON for the page (`plot.js`): data, layout, name for screen readers, options of plotly.js.

    `config` holds options that override those of `theme.CONFIG`.
    """
    value = json.loads(figure.to_json())
    return json.dumps({**value, "config": {**theme.CONFIG, **config}, "name": accessible_name(value["layout"])})


def accessible_name(layout: Mapping[str, Any]) -> str:
    """Return what a screen reader says of a figure with this layout: its title, or those of its panels or axes."""
    axes = [layout.get(axis, {}).get("title") for axis in ("yaxis", "xaxis")]
    given = [layout.get("title"), *axes, *layout.get("annotations", ())]
    texts = [part.get("text", "") if isinstance(part, Mapping) else part for part in given]
    title, y, x, *panels = (html.unescape(re.sub(r" ?(<[^>]*>)+", " ", str(text or ""))).strip() for text in texts)
    return title or (" over ".join(filter(None, (y, x))) if y else ", ".join(panels)) or x or "Figure"


def picture(figure: go.Figure, form: str = "png", width: int = NOTEBOOK_PX, scale: float = 1.0) -> bytes:
    """Return a figure as `png`, `svg` or `pdf`; raise `DataError` where that needs a browser and there is none."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    from workbench.figures.twin import Twin

    if not has_twin(figure):
        try:
            return bytes(figure.to_image(format=form, width=width, height=figure.layout.height, scale=scale))
        except Exception as error:  # kaleido and its browser fail in a dozen classes, some of them private
            words = str(error.args[0] if error.args else error).strip() or type(error).__name__
            raise DataError(
                f"No picture could be drawn: {words.splitlines()[0].rstrip('.')}. "
                "Run `pip install kaleido`, install Chrome or Chromium, and point BROWSER_PATH at it if it is not "
                "found; save_html needs neither."
            ) from error
    file, twin = io.BytesIO(), Twin(figure, width).draw()
    if form == "png":
        twin.set_dpi(72 * scale)
        canvas = FigureCanvasAgg(twin)
        canvas.draw()
        # Without transparency and less compressed than by `savefig`: as many bytes in less time.
        Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3]).save(file, form, compress_level=3)
        return file.getvalue()
    date = {"svg": "Date", "pdf": "CreationDate"}[form]
    with _settings, rc_context(VECTORS):
        twin.savefig(file, format=form, metadata={date: None})
    # A machine without matplotlib may lack DejaVu Sans; Verdana has the same widths.
    fonts = b"'DejaVu Sans'", b"'DejaVu Sans', Verdana, sans-serif"
    return file.getvalue().replace(*fonts) if form == "svg" else file.getvalue()


def picture_html(figure: go.Figure) -> str:
    """Return a figure as a picture in HTML, as figures of a notebook look before the pointer comes."""
    data, said = (
        base64.b64encode(picture(figure)).decode(),
        html.escape(accessible_name(figure.layout.to_plotly_json())),
    )
    return f'<img class="workbench-figure" alt="{said}" src="data:image/png;base64,{data}">'


def _rows(figure: go.Figure, trace: Any) -> Iterator[dict[str, Any]]:
    """Yield the points of a trace by the names of their columns."""
    from workbench.figures.twin_panel import item_of, text_of, words_of

    if trace.type == "parcoords":
        columns = {}
        for axis in trace.dimensions:  # words in place of numbers, where the axis has them
            words = {} if axis.ticktext is None else dict(zip(axis.tickvals, axis.ticktext, strict=True))
            columns[text_of(str(axis.label))[0]] = [words.get(value, value) for value in axis.values]
        yield from (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        return
    x_name, y_name = _axis_name(figure, trace, 0), _axis_name(figure, trace, 1)
    x, y = words_of(trace.x), words_of(trace.y)
    if trace.type == "heatmap":
        value = text_of(trace.colorbar.title.text or "value")[0]
        for row, column in np.ndindex(len(y), len(x)):
            cell = {x_name: x[column], y_name: y[row], value: _finite(trace.z[row][column])}
            words = trace.text if trace.hovertext is None else trace.hovertext
            if words is not None:
                cell["note"] = text_of(str(words[row][column] or ""))[0].replace("\n", ", ")
            yield cell
        return
    if trace.type not in ("scatter", "bar"):
        return
    x = range(len(y if y is not None else ())) if x is None else x
    y = range(len(x)) if y is None else y
    role = ROLES.get(str(trace.meta), str(trace.meta or ""))
    along = x_name if trace.type == "bar" and trace.orientation == "h" else y_name
    for at in range(len(x)):
        row = {"series": text_of(trace.name or "")[0], "shows": role, x_name: _finite(x[at]), y_name: _finite(y[at])}
        if trace.type == "bar" and trace.base is not None:
            row[f"{along}, from"] = start = float(item_of(trace.base, at))
            row[along] = start + float(row[along] or 0)
        for name, spread in ((x_name, getattr(trace, "error_x", None)), (y_name, getattr(trace, "error_y", None))):
            if spread is not None and spread.array is not None and spread.visible is not False:
                below = spread.array if spread.arrayminus is None else spread.arrayminus
                row |= {f"{name}, low": row[name] - below[at], f"{name}, high": row[name] + spread.array[at]}
        yield row


def _finite(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and np.isnan(value)) else value


def _axis_name(figure: go.Figure, trace: Any, which: int) -> str:
    """Return an axis' title, or that of its panel, or that of the axis in another panel above or below it."""
    from workbench.figures.twin_panel import text_of

    letter, other = "xy"[which], "yx"[which]
    names = [str(trace[f"{letter}axis"] or letter), str(trace[f"{other}axis"] or other)]
    axis, across = (figure.layout[f"{name[0]}axis{name[1:]}"] for name in names)
    title = axis.title.text
    if not title and which == 1:
        (left, right), top = across.domain or (0.0, 1.0), (axis.domain or (0.0, 1.0))[1]
        above = (n for n in figure.layout.annotations if n.yref == "paper" and left <= n.x <= right)
        title = next((note.text for note in above if abs(note.y - top) < 0.02), None)
    if not title and which == 0:
        below = (other for other in figure.select_xaxes() if other.domain == axis.domain)
        title = next((other.title.text for other in below if other.title.text), None)
    return text_of(title or letter)[0].replace("\n", ", ")


# Pages of figures: one HTML file that opens offline. Its policy lets the browser run the page's own scripts, which bear
# a number that nobody could know before, and fetch nothing.


def new_nonce() -> str:
    """Return a number for the scripts of one page, which nobody can have written into its texts."""
    return secrets.token_urlsafe(16)


def policy(nonce: str) -> str:
    """Return the tag that lets a page run the scripts of this number, fetch nothing and send nothing."""
    allowed = f"script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
    rules = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    return (
        f'<meta http-equiv="Content-Security-Policy" content="{rules}">'
        '<meta http-equiv="x-dns-prefetch-control" content="off">'
    )


WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
TWIN_CLASS = "workbench-saved"
"""Class of the static twin of a live view, which a saved notebook shows in its place."""
HIDE_DEAD_WIDGET = (
    f"<style>.jp-OutputArea-child:has(+ .jp-OutputArea-child .{TWIN_CLASS}) "
    "> .jp-OutputArea-output.jupyter-widgets:not(:has(*)) { display: none; }</style>"
)
"""Style in the static twin that hides a widget above it which shows nothing but an error."""
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


def figure_html(figure: go.Figure | Mapping[str, Any], nonce: str) -> str:
    """Return a `<div>` that draws the figure on a page that has loaded plotly.js, with a name for screen readers.

    `nonce` is the number that the page's policy asks of scripts.
    """
    value = figure if isinstance(figure, go.Figure) else {k: figure[k] for k in ("data", "layout") if k in figure}
    layout = figure.layout.to_plotly_json() if isinstance(figure, go.Figure) else figure.get("layout", {})
    options = {"full_html": False, "include_plotlyjs": False, "include_mathjax": False, "validate": False}
    drawn = plotly.io.to_html(value, config={**theme.CONFIG, "responsive": True}, **options)
    drawn = drawn.replace("<script", f'<script nonce="{nonce}"')  # its JSON writes `<` as \\u003c
    try:
        name = accessible_name(layout)
    except (AttributeError, TypeError):  # the layout of a stranger may hold anything
        name = "Figure"
    return f'<div role="figure" aria-label="{html.escape(name)}">{drawn}</div>'


@checked_arguments
def save_html(
    figures: go.Figure | Sequence[go.Figure | str], path: str | Path, title: str = "Workbench", text: str = ""
) -> Path:
    """Write figures below one another as one self-contained page, which fetches nothing when it opens.

    Args:
        figures: one figure or several. A `str` among them is inserted as HTML, and a page of these alone is small: it
            has no script.
        path: the file to write; its folder must exist.
        title: heading of the page.
        text: a paragraph above the figures; it is escaped.

    Returns the path.

    Examples:
        >>> drawn = wb.figures.timeline(wb.plan(experiment))
        >>> wb.figures.save_html([drawn, "<p>One device.</p>"], "plan.html", title="Plan").name
        'plan.html'
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
