"""Words about what a long call is doing, shown while it lasts longer than a second, and gone when it returns.

A notebook shows it below the cell, in place; a terminal as one line of stderr; where neither is, nothing is shown.
"""

from __future__ import annotations

import contextlib
import contextvars
import html
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator

from workbench.units import duration

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
Paint = Callable[[str, str], None]
"""A function that shows text, or HTML in its place where that is shown; two empty strings clear it."""


class _Wait:
    """The words of one call and of what it calls."""

    def __init__(self, words: str, look: Look | None) -> None:
        self.details, self._words, self._look = "", words, look
        self._began = time.monotonic()

    def line(self) -> str:
        """Return `"Planning bert for 8 × H100: capturing the model (12 s)"`."""
        detail = f": {self.details}" if self.details else ""
        return f"{self._words[:1].upper()}{self._words[1:]}{detail} ({duration(time.monotonic() - self._began)})"

    def show_in(self, paint: Paint, ended: threading.Event) -> None:
        """Show the words from their second second on until the call has ended."""
        if ended.wait(SHOWN_AFTER_S):
            return
        table = ""
        while True:
            with contextlib.suppress(OSError, ValueError):  # a file that is just being replaced
                self.details, table = (self.details, "") if self._look is None else self._look()
            paint(self.line(), f'<small class="workbench-waiting">{html.escape(self.line())}</small>{table}')
            if ended.wait(EVERY_S if self._look is None else LOOK_S):
                break
        paint("", "")


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
    paint = _paint() if threading.current_thread() is threading.main_thread() else None
    if paint is None:
        yield lambda _: None
        return
    wait, ended = _Wait(words, look), threading.Event()
    context = contextvars.copy_context()  # a kernel finds the cell of an output by its context
    thread = threading.Thread(target=context.run, args=(wait.show_in, paint, ended), daemon=True)
    token = _CURRENT.set(wait)
    thread.start()
    try:
        yield lambda detail: setattr(wait, "details", detail)
    finally:
        _CURRENT.reset(token)
        ended.set()
        thread.join()


def _paint() -> Paint | None:
    """Return how this process shows a line that changes; None where it would leave a trail in a file."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if hasattr(shell, "kernel"):
        return _notebook()
    return _terminal if sys.stderr is not None and sys.stderr.isatty() else None


def _terminal(line: str, _: str) -> None:
    sys.stderr.write("\r\x1b[2K" + line[: shutil.get_terminal_size().columns - 1])
    sys.stderr.flush()


def _notebook() -> Paint:
    from IPython.display import DisplayHandle, display

    handles = list[DisplayHandle]()

    def paint(line: str, page: str) -> None:
        bundle = {"text/plain": line, "text/html": page}
        if handles:
            handles[0].update(bundle, raw=True)
        else:
            handles.append(display(bundle, raw=True, display_id=True))

    return paint
