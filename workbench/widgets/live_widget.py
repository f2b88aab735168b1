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
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
from IPython import get_ipython
from IPython.display import display
from traitlets import MetaHasTraits

from workbench.errors import in_words
from workbench.figures.figure import PLOTLY_MIME, mimebundle

# Static twins of widgets: ordinary outputs of the same cell, which a saved notebook shows when the kernel is gone.

WIDGET_CLASS, TWIN_CLASS, ROWS_CLASS = "workbench-live", "workbench-saved", "workbench-rows"
"""CSS classes of a widget with a static twin, of the twin's HTML, and of what a widget in its place shows already."""
EMPTY: Mapping[str, str] = {"text/html": "", "text/plain": ""}
"""MIME bundle of an output that shows nothing."""
TWIN_S = 30.0
"""Seconds between two updates of a static twin, for a notebook that is saved while its widget changes."""

_CHILD = ".jp-OutputArea-child"
_DEAD = ".jupyter-widgets-disconnected"
_TWIN = f"{_CHILD}:has(.{WIDGET_CLASS}:not({_DEAD})) + {_CHILD}:has(.{TWIN_CLASS})"
HIDE_TWIN = (
    f"<style>{_TWIN}, {_TWIN} + {_CHILD}, {_TWIN} + {_CHILD} + {_CHILD}, {_CHILD}:has(.{WIDGET_CLASS}{_DEAD}) "
    "{ visibility: hidden; height: 0; min-height: 0; margin: 0; padding: 0; overflow: hidden; pointer-events: none; } "
    f".{WIDGET_CLASS} .widget-html-content {{ min-width: 0; }}</style>"
)
"""Style in the widget that hides the three outputs below it, or the widget itself once its kernel has ended."""
HIDE_ROWS = (
    f"<style>{_CHILD}:has(.{WIDGET_CLASS}-rows:not({_DEAD})) + {_CHILD} .{ROWS_CLASS}, .{WIDGET_CLASS}-rows{_DEAD} "
    "{ display: none; }</style>"
)
"""Style in what remains of a widget, of the class `workbench-live-rows`, that hides its rows in the twin below."""
HIDE_DEAD_WIDGET = (
    f"<style>{_CHILD}:has(+ {_CHILD} .{TWIN_CLASS}) "
    "> .jp-OutputArea-output.jupyter-widgets:not(:has(*)) { display: none; }</style>"
)
"""Style in the static twin that hides a widget above it which shows nothing but an error."""
_LAST = f"{_CHILD}:has(.{TWIN_CLASS}-last)"
GREY_LAST_STATE = (
    f"<style>{_LAST} + {_CHILD}, {_LAST} + {_CHILD} + {_CHILD}, .{TWIN_CLASS}-last + * "
    "{ filter: grayscale(0.8); opacity: 0.7; }</style>"
)
"""Style in the static twin of a widget that has not ended."""


class StaticTwins:
    """The displays of one widget with their static twins; one thread updates them while another displays.

    `contents` returns a piece of HTML and up to two figures as MIME bundles; `remains` the bundle that takes the
    widget's place at its end. `again` is the call that shows the widget anew, by default its cell.
    """

    def __init__(
        self,
        widget: widgets.DOMWidget,
        contents: Callable[[], tuple[Any, ...]],
        remains: Callable[[], Mapping[str, Any]] = lambda: EMPTY,
        again: str = "",
    ) -> None:
        widget.add_class(WIDGET_CLASS)
        self._widget, self._contents, self._remains = widget, contents, remains
        self._again = again
        self._displays: list[list[Any]] = []
        self._lock = threading.Lock()  # a display that comes while the last twin is written must keep the last one
        self._left = False
        self._bundles: list[dict[str, Any]] = []
        self._next_at = 0.0
        self.every_s = TWIN_S

    def display(self) -> None:
        """Display the widget in the running cell, or its last twin if the widget has ended."""
        with self._lock:
            bundle = dict(self._remains()) if self._left else {**self._widget._repr_mimebundle_(), **EMPTY}
            self._bundles = []  # the displays before this one may hold an earlier state
            shown = [bundle, *self._twin()]
            self._displays.append([display(each, raw=True, display_id=True) for each in shown])

    def hasten(self) -> None:
        """Bring the twins up to date with the next `update`, however soon that is."""
        self._next_at = 0.0

    def update(self) -> None:
        """Bring the twins up to date, unless that was done less than `every_s` seconds ago."""
        with self._lock:
            if self._displays and time.monotonic() >= self._next_at:
                self._next_at = time.monotonic() + self.every_s
                self._show()

    def leave(self) -> None:
        """Remove the widget from the page, so that the updated twins show."""
        with self._lock:
            self._left = True
            self._show()
            for widget, *_ in self._displays:
                widget.update(dict(self._remains()), raw=True)

    def restore(self) -> None:
        """Show the widget again after `leave`."""
        with self._lock:
            self._left = False
            for widget, *_ in self._displays:
                widget.update({**self._widget._repr_mimebundle_(), **EMPTY}, raw=True)

    def _show(self) -> None:
        before, self._bundles = self._bundles, self._twin()
        for _, *outputs in self._displays:
            for output, bundle, old in zip(outputs, self._bundles, before or [{}] * len(outputs), strict=True):
                if bundle == old:  # a figure is replaced in two messages, between which a notebook may end
                    continue
                if PLOTLY_MIME in bundle:
                    output.update(dict(EMPTY), raw=True)
                output.update(bundle, raw=True)

    def _twin(self) -> list[dict[str, Any]]:
        """Return always three outputs, because the styles above count them."""
        shown, *figures = self._contents()
        if not self._left:
            how = f"<code>{html.escape(self._again)}</code>" if self._again else "this cell again"
            said = f"The last state before the kernel ended. To attach to the present one, run {how}"
            shown = f'{GREY_LAST_STATE}<div class="{TWIN_CLASS}-last"><b>{said}</b></div><div>{shown}</div>'
        text = {"text/html": f'<div class="{TWIN_CLASS}">{HIDE_DEAD_WIDGET}{shown}</div>', "text/plain": ""}
        first, second = (*figures, None, None)[:2]
        return [text, dict(first or EMPTY), dict(second or EMPTY)]


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
