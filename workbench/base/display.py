"""Output of a terminal or a notebook beside values and figures: words while a call lasts, tables, and errors.

`waiting` says what a long call is doing, while it lasts longer than a second; the words are gone when it returns. A
notebook shows them below the cell, in place; a terminal as one line of stderr; where neither is, nothing is shown.
"""

from __future__ import annotations

import contextlib
import contextvars
import html
import json
import linecache
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from workbench.base.units import duration

SHOWN_AFTER_S = 1.0
"""Seconds of waiting before anything is shown."""
EVERY_S = 0.5
"""Seconds between two pictures."""
LOOK_S = 2.0
"""Seconds between two looks of a caller that has a table to show."""
Say = Callable[[str], None]
"""A function that replaces the detail of the words: it only stores them, so that a fast loop may call it each time."""
Look = Callable[[], tuple[str, str]]
"""A function that returns the detail of the words, and HTML to show below them in a notebook."""


class _Wait:
    """The words of one call, to which what it calls adds its own."""

    details = ""


_CURRENT: contextvars.ContextVar[_Wait | None] = contextvars.ContextVar("current wait", default=None)


@contextlib.contextmanager
def waiting(words: str, look: Look | None = None) -> Iterator[Say]:
    """Show what the calls inside are doing; yield a function that says the detail.

    Inside another `waiting`, the words become a detail of that one. Only the main thread shows anything.

    Args:
        words: what is done, as a phrase without a capital: `"planning bert"`.
        look: function that another thread calls every other second for the detail, and for a table in a notebook.
    """
    outer = _CURRENT.get()
    if outer is not None:
        before = outer.details

        def say(detail: str) -> None:
            outer.details = f"{words}: {detail}"

        outer.details = words
        try:
            yield say
        finally:
            outer.details = before
        return
    is_notebook = hasattr(_shell(), "kernel")
    shows = is_notebook or (sys.stderr is not None and sys.stderr.isatty())  # a file would keep every line
    if not shows or threading.current_thread() is not threading.main_thread():
        yield lambda _: None
        return
    # An export redirects what it writes to stderr: the words go on to the terminal.
    wait, ended, began, terminal = _Wait(), threading.Event(), time.monotonic(), sys.stderr
    handles = list[Any]()  # of the output in the notebook

    def paint(line: str, page: str) -> None:
        if not is_notebook:
            terminal.write("\r\x1b[2K" + line[: shutil.get_terminal_size().columns - 1])
            terminal.flush()
            return
        from IPython.display import display

        bundle = {"text/plain": line, "text/html": page}
        if handles:
            handles[0].update(bundle, raw=True)
        else:
            handles.append(display(bundle, raw=True, display_id=True))

    def show() -> None:
        if ended.wait(SHOWN_AFTER_S):
            return
        table = ""
        while True:
            with contextlib.suppress(OSError, ValueError):  # a file that is just being replaced
                if look is not None:  # otherwise the words are those of the thread that works
                    wait.details, table = look()
            # Such as "Planning bert for 8 × H100: capturing the model (12 s)".
            detail = f": {wait.details}" if wait.details else ""
            line = f"{words[:1].upper()}{words[1:]}{detail} ({duration(time.monotonic() - began)})"
            paint(line, f'<small class="workbench-waiting">{html.escape(line)}</small>{table}')
            if ended.wait(EVERY_S if look is None else LOOK_S):
                break
        paint("", "")

    context = contextvars.copy_context()  # a kernel finds the cell of an output by its context
    thread = threading.Thread(target=context.run, args=(show,), daemon=True)
    token = _CURRENT.set(wait)
    thread.start()
    try:
        yield lambda detail: setattr(wait, "details", detail)
    finally:
        _CURRENT.reset(token)
        ended.set()
        thread.join()


def _shell() -> Any:
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


# Tables of words, as aligned lines for a terminal, and as HTML with every cell escaped.

STYLE = "text-align:left;vertical-align:top;padding:2px 10px"


Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Titles of the columns, and the rows."""


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


# Errors as a notebook shows them: the sentence, the user's own lines, and the whole traceback folded below. A cell's
# code has the name of a temporary file in tracebacks. Here it has the number of the cell, and in the processes of a run
# also its text.

CELLS = "cells.json"
"""File of a run's code with the cells that define it: name and text by the file name that Python knows."""
_INSTALLED = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]), "<frozen", "<string>")
_SENT: dict[str, str] = {}
"""Names of the cells of the kernel that launched this process."""
_FRAME = re.compile(r'(?:File "([^"]+)"|(Cell In\[\d+\])), line (\d+), in (\S+)\n( +\S.*\n)?')


def cell_name(file: str) -> str | None:
    """Return `"Cell In[3]"` for the file name of a cell's code, None for other files."""
    shell = _shell()
    if shell is None:
        return _SENT.get(file)
    named = shell.compile.format_code_name(file)
    return None if named is None else " ".join(named)


def place(file: str, line: int) -> str:
    """Return where a line stands: `"Cell In[3], line 16"` or `"model.py:16"`."""
    cell = cell_name(file)
    return f"{cell}, line {line}" if cell else f"{file}:{line}"


def sent_cells(pickles: Iterable[bytes]) -> bytes:
    """Return the content of `CELLS`: those cells whose code was pickled, and no others."""
    code = b"".join(pickles)
    files = [file for file in linecache.cache if cell_name(file) and file.encode() in code]
    return json.dumps({file: [cell_name(file), "".join(linecache.getlines(file))] for file in files}).encode()


def know_cells(file: Path) -> None:
    """Let tracebacks of this process quote the cells in a file that `sent_cells` wrote, if it is there."""
    try:
        cells = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return
    for name, (cell, text) in cells.items():
        _SENT[name] = cell
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def formatted(error: BaseException) -> str:
    """Return the traceback of an exception as Python writes it, with cells by their numbers."""
    text = "".join(traceback.format_exception(error))
    return re.sub(r'File "([^"]+)"(?=, line)', lambda match: cell_name(match[1]) or match[0], text)


def in_notebook(error: BaseException) -> list[str]:
    """Return the lines that IPython prints for an error, and fold its whole traceback below the cell's outputs."""
    shell, whole = _shell(), formatted(error)
    if not hasattr(shell, "kernel"):  # in a terminal nothing can be folded
        return list(shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__))

    def show(_: Any) -> None:
        from IPython.display import display

        shell.events.unregister("post_run_cell", show)
        folded = f"<details><summary>the whole traceback</summary><pre>{html.escape(whole)}</pre></details>"
        display({"text/plain": whole, "text/html": folded}, raw=True)

    if not hasattr(error, "is_folded"):  # a kernel asks for these lines twice
        error.is_folded = True  # type: ignore[attr-defined]
        shell.events.register("post_run_cell", show)
    sentence = str(error).partition("\n\n")[0]
    frames = dict[str, None]()  # the message of a failed run holds those of its ranks, and its log too
    for file, cell, line, function, quoted in _FRAME.findall(whole):
        if cell or not file.startswith(_INSTALLED):  # the user's own
            where = "" if function == "<module>" else f", in {function}"
            frames[f"\x1b[36m{cell or file}, line {line}\x1b[39m{where}\n    {quoted.strip()}"] = None
    return [f"\x1b[31m{type(error).__name__}\x1b[39m: {sentence}", *(["", *frames] if frames else [])]
