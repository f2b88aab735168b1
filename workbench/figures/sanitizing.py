"""HTML of others without what a browser would run: scripts, handlers of events, frames and foreign styles."""

from __future__ import annotations

import functools
from typing import Any

TAGS = (
    *("a", "abbr", "b", "blockquote", "br", "caption", "center", "code", "col", "colgroup", "dd", "del", "details"),
    *("div", "dl", "dt", "em", "figcaption", "figure", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "img", "kbd"),
    *("li", "mark", "ol", "p", "pre", "progress", "q", "s", "samp", "small", "span", "strong", "sub", "summary", "sup"),
    *("table", "tbody", "td", "tfoot", "th", "thead", "tr", "tt", "u", "ul", "var"),
)
ATTRIBUTES = {
    "*": ["class", "style", "title", "align", "colspan", "rowspan", "width", "height", "scope"],
    "a": ["href"],
    "img": ["src", "alt"],
    "progress": ["value", "max"],
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


@functools.cache
def _cleaner() -> Any:
    from nbconvert.preprocessors.sanitize import SanitizeHTML

    return SanitizeHTML(tags=list(TAGS), attributes=ATTRIBUTES, styles=list(STYLES), strip=True)


def harmless_html(text: str) -> str:
    """Return HTML, or Markdown, with the tags, attributes and styles that only format a text, and no others.

    Works on bleach, by way of nbconvert. The content of a script stays as text, which no browser runs.
    """
    # `>` alone begins no tag, and Markdown needs it for quotations.
    return str(_cleaner().sanitize_html_tags(text)).replace("&gt;", ">")
