"""Tables of words: as aligned lines for a terminal, and as HTML with every cell escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

STYLE = "text-align:left;vertical-align:top;padding:2px 10px"


class Html(str):
    """HTML for a cell, which is not escaped: whoever makes one escapes what is in it."""

    __slots__ = ()


def text_table(rows: Iterable[Sequence[str]]) -> str:
    """Return the rows as lines whose columns are two spaces apart."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


def facts_html(title: str, facts: Iterable[tuple[str, str]]) -> str:
    """Return a title and a table of names and values, all escaped, as notebooks show a value."""
    return f"<b>{html.escape(title)}</b>{html_table((), facts)}"


def html_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    style: str = STYLE,
    row_styles: Iterable[str] = (),
    attributes: str = "",
) -> str:
    """Return an HTML table in which every cell is escaped unless it is `Html`.

    Args:
        head: titles of the columns; it may be empty.
        rows: the cells.
        style: style of every cell.
        row_styles: a style for each row; by default none has one.
        attributes: attributes of the table, as HTML.
    """

    def line(tag: str, cells: Sequence[str], look: str = "") -> str:
        words = (cell if isinstance(cell, Html) else html.escape(cell) for cell in cells)
        row = "".join(f"<{tag} style={style!r}>{word}</{tag}>" for word in words)
        return f"<tr style={look!r}>{row}</tr>" if look else f"<tr>{row}</tr>"

    titles = f"<thead>{line('th', head)}</thead>" if head else ""
    looks = iter(row_styles)
    body = "".join(line("td", row, next(looks, "")) for row in rows)
    return f"<table {attributes}>".replace(" >", ">") + f"{titles}<tbody>{body}</tbody></table>"
