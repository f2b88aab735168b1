"""Tables of words: as aligned lines for a terminal, and as HTML with every cell escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

STYLE = "text-align:left;vertical-align:top;padding:2px 10px"


def text_table(rows: Iterable[Sequence[str]]) -> str:
    """Return the rows as lines whose columns are two spaces apart."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], style: str = STYLE) -> str:
    """Return an HTML table; `head` may be empty, and `style` is that of every cell."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag} style={style!r}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    titles = f"<thead>{line('th', head)}</thead>" if head else ""
    return f"<table>{titles}<tbody>{''.join(line('td', row) for row in rows)}</tbody></table>"
