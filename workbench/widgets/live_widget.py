"""A widget that follows something: one daemon thread updates it, and a static twin stands below each of its displays.

The thread is the only writer of the widget. It ends with what it follows, when the widget is closed, and when the page
has closed the widget's comm. It must not print: its output would land in whichever cell runs.
"""

from __future__ import annotations

import atexit
import html
import threading
import time
import weakref
from abc import ABCMeta, abstractmethod
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
from IPython import get_ipython
from traitlets import MetaHasTraits

from workbench.errors import in_words
from workbench.figures.figure import mimebundle
from workbench.widgets.static_twin import EMPTY, HIDE_TWIN, StaticTwins

REST_FACTOR = 3.0
"""Smallest ratio of the thread's rest to the kernel's computation while it drew: the kernel has other work."""
LAST_TRIES = 5
"""Number of failed updates in a row after which a widget gives up: files may be moved while they are read."""
LOOK_S = 0.025
"""Seconds between two looks for news, each of which costs microseconds."""
IDLE_FACTOR = 3.0
"""Ratio of the time between two updates without news, in which only states of processes change, to that with news."""
UNSEEN_FACTOR = 10.0
"""Factor by which the time between two updates is longer while no page shows the widget, as in `workbench execute`."""
EXIT_S = 10.0
"""Longest time that the end of the process, or of a cell, waits for an update."""
_following: weakref.WeakSet[LiveWidget] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """End the threads before the interpreter does: it aborts if it stops one inside a C++ library."""
    for widget in list(_following):
        widget.stop()


class _Abstract(ABCMeta, MetaHasTraits):
    """Lets a widget have abstract methods."""


class LiveWidget(widgets.VBox, metaclass=_Abstract):
    """A column of widgets that updates itself. `close()` ends it; the runs go on.

    `again` is the call that shows it anew after a restart of the kernel, where that is not its cell's.

    A subclass draws in `update`, says in `twin` what stands in a saved notebook, and calls `follow` when it is made.
    """

    def __init__(self, every_s: float, again: str = "", **options: Any) -> None:
        super().__init__(_view_count=0, **options)  # with a number instead of None the page counts the widget's views
        self.observe(lambda _: self.wake(), names="_view_count")
        self._in_a_hurry = False
        self.note, self.hider = widgets.HTML(), widgets.HTML(HIDE_TWIN, layout={"display": "none"})
        self.twins = StaticTwins(self, self.twin, self.remains, again)
        self._every_s = every_s
        self._wake, self._closed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def update(self) -> bool:
        """Draw what is new; return True if nothing more will come."""

    @abstractmethod
    def twin(self) -> tuple[Any, ...]:
        """Return what a saved notebook shows: HTML, and up to two MIME bundles of figures."""

    def has_news(self) -> bool:
        """Return True if an update would draw something new. It is asked often, so it must cost microseconds."""
        return True

    def is_over(self) -> bool:
        """Return True if what is followed has ended, so that the next update is the last."""
        return False

    def remains(self) -> dict[str, Any]:
        """Return the MIME bundle of what stands above the twin at the end, in place of the widget."""
        return dict(EMPTY)

    def bundle(self, figure: go.Figure) -> dict[str, Any]:
        """Return a figure for the twin.

        While a cell waits for the widget to show there is no picture: loading matplotlib takes a third of a second, and
        the next update adds it.
        """
        return mimebundle(figure, with_picture=not self._in_a_hurry)

    @property
    def following(self) -> bool:
        """True while the widget updates itself."""
        return self._thread is not None and self._thread.is_alive()

    def follow(self) -> None:
        """Update the widget from now on; at once if it is updated already."""
        if self.following:
            self.wake()
            return
        if (shell := get_ipython()) is not None:  # a cell such as sweep.wait() may have waited for the end
            shell.events.register("post_run_cell", self._on_cell_end)
        self._thread = threading.Thread(target=self._follow, name=f"workbench-{type(self).__name__}", daemon=True)
        self._thread.start()
        _following.add(self)

    def wake(self) -> None:
        """Update the widget at once."""
        self._wake.set()

    def _on_cell_end(self, _: Any) -> None:
        thread = self._thread
        if thread is not None and thread.is_alive():
            self.wake()
            if not self._view_count and self.is_over():  # a notebook that is executed is saved after its last cell
                thread.join(EXIT_S)
        elif (shell := get_ipython()) is not None:
            shell.events.unregister("post_run_cell", self._on_cell_end)

    def stop(self) -> None:
        """Stop updating, and wait for an update that has begun."""
        self._closed.set()
        self.wake()
        if self._thread is not None:
            self._thread.join(EXIT_S)

    def close(self) -> None:
        """Stop updating and remove the widget from the page; the runs go on."""
        self._closed.set()
        self.wake()
        super().close()

    def _follow(self) -> None:
        pause_s, failures = self._every_s, 0
        while True:
            is_news = self._await_news(pause_s)
            self._wake.clear()
            if self._closed.is_set() or self.comm is None:
                return
            started, computed = time.monotonic(), time.process_time()
            try:
                if self.update():
                    self.twins.leave()
                    return
                self.twins.update()
            except Exception as error:  # a widget that no longer updates must say so
                failures += 1
                if failures == LAST_TRIES:
                    reason = html.escape(in_words(error))
                    self.note.value = f"<b>This view stopped updating</b> ({reason}). The runs go on; show it again."
                    return
            else:
                failures = 0
            # Waiting for a busy machine is no computation: to rest for it too would let the figures fall behind.
            work_s = min(time.monotonic() - started, time.process_time() - computed)
            pause_s = max(self._rarity * self._every_s if is_news else 0.0, REST_FACTOR * work_s)

    @property
    def _rarity(self) -> float:
        return 1.0 if self._view_count else UNSEEN_FACTOR

    def _await_news(self, pause_s: float) -> bool:
        """Wait for a pause and then for news, or until the widget is woken; return False if nothing came for long."""
        is_news = self._wake.wait(pause_s) or self.has_news()
        until = time.monotonic() + IDLE_FACTOR * self._rarity * self._every_s
        while not is_news and time.monotonic() < until:
            is_news = self._wake.wait(LOOK_S * self._rarity) or self.has_news()
        return is_news

    def _ipython_display_(self) -> None:
        self._in_a_hurry = self.following
        self.twins.display()
        self._in_a_hurry = False
        self.twins.hasten()  # an update meanwhile was in a hurry, too
        self.wake()


def respond_while_busy(*controls: widgets.Widget) -> None:
    """Let controls respond while a cell runs; their callbacks then run in another thread than the cell's.

    JupyterLab addresses a widget's messages to a subshell of the kernel for this reason, and ipykernel 7.1 to 7.3
    deliver them there. ipykernel 7.4 delivers them to the shell that last published for the widget, which is the main
    one and busy. Where it does so, the address that JupyterLab wrote is restored.
    """
    for control in controls:
        if hasattr(control.comm, "_reply_subshell_for"):
            control.comm._reply_subshell_for = lambda _data, address: address
