"""Static twins of widgets: ordinary outputs of the same cell, which a saved notebook shows when the kernel is gone.

A widget lives as long as its kernel. A notebook that is saved meanwhile holds only the widget's id, which JupyterLab
shows as an error when no kernel knows it, and GitHub not at all. Therefore ordinary outputs stand below each widget: a
piece of HTML and up to two figures with a PNG beside them, updated while the widget changes. As long as the widget
lives, a style that it contains hides them; where it does not, a style in the twin hides the widget's error. When its
kernel has ended, ipywidgets marks every part of the widget as disconnected: the style then hides the widget instead,
and the twin shows its last state, greyed, with the call that shows the present one.

Two things of Plotly's renderer for JupyterLab matter here. It draws a figure when it arrives and does not learn that
it is shown later: hidden outputs therefore keep their width, without which (`display: none`) no cells and overlapping
labels are drawn. And it ignores every figure after its first: an output is emptied before it gets another one.
"""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets
from IPython.display import display

from workbench.figures.figure import PLOTLY_MIME

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
