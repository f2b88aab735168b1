"""HTML from elsewhere made harmless: what a page keeps of it, and the policy under which a browser opens the page.

Both hold at once. The sanitiser works on the HTML that a browser would get, after Markdown was rendered, and keeps the
tags, attributes, styles and addresses of a list. The policy lets the browser run the page's own scripts, which bear a
number that nobody could know before, and fetch nothing.
"""

from __future__ import annotations

import functools
import html
import re
import secrets
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any

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
    if not runs_something(_rendered(text)):
        return text
    cleaned = harmless_html(text)
    return harmless_html(_rendered(text)) if runs_something(_rendered(cleaned)) else cleaned


def _rendered(markdown: str) -> str:
    from nbconvert.filters import markdown2html

    return str(markdown2html(markdown))


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


def new_nonce() -> str:
    """Return a number for the scripts of one page, which nobody can have written into its texts."""
    return secrets.token_urlsafe(16)


def policy(nonce: str, evaluates: bool = False) -> str:
    """Return the tag that lets a page run the scripts of this number, fetch nothing and send nothing.

    `evaluates` lets them make functions of text, which plotly.js does to draw by WebGL.
    """
    scripts = f"'nonce-{nonce}'" + (" 'unsafe-eval'" if evaluates else "")
    rules = f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
    return (
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"{rules}; base-uri 'none'; form-action 'none'\">"
        '<meta http-equiv="x-dns-prefetch-control" content="off">'
    )


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
