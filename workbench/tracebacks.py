"""Errors as a notebook shows them: the sentence, the user's own lines, and the whole traceback folded below.

A cell's code has the name of a temporary file in tracebacks. Here it has the number of the cell, and in the processes
of a run also its text.
"""

from __future__ import annotations

import html
import json
import linecache
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

CELLS = "cells.json"
"""File of a run's code with the cells that define it: name and text by the file name that Python knows."""
_INSTALLED = (sys.prefix, sys.base_prefix, str(Path(__file__).parent), "<frozen", "<string>")
_SENT: dict[str, str] = {}
"""Names of the cells of the kernel that launched this process."""
_FRAME = re.compile(r'(?:File "([^"]+)"|(Cell In\[\d+\])), line (\d+), in (\S+)\n( +\S.*\n)?')


def _shell() -> Any:
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


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
    frames = list(
        dict.fromkeys(_frames(whole))
    )  # the message of a failed run holds those of its ranks, and its log too
    return [f"\x1b[31m{type(error).__name__}\x1b[39m: {sentence}", *(["", *frames] if frames else [])]


def _frames(text: str) -> Iterator[str]:
    """Yield the user's own frames of a traceback, each as two lines."""
    for file, cell, line, function, quoted in _FRAME.findall(text):
        if cell or not file.startswith(_INSTALLED):
            where = "" if function == "<module>" else f", in {function}"
            yield f"\x1b[36m{cell or file}, line {line}\x1b[39m{where}\n    {quoted.strip()}"
