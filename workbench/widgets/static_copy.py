"""Static copies of widgets: ordinary outputs of the same cell, which a saved notebook shows when the kernel is gone.

A widget lives as long as its kernel. A notebook that is saved meanwhile holds only the widget's id, which JupyterLab
shows as an error when no kernel knows it, and GitHub not at all. Therefore ordinary outputs stand below each widget: a
piece of HTML and up to two figures with a PNG beside them, updated while the widget changes. As long as the widget
lives, a style that it contains hides them; where it does not, a style in the static copy hides the widget's error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets
from IPython.display import display

WIDGET_CLASS, COPY_CLASS = "workbench-live", "workbench-saved"
"""CSS classes of a widget with a static copy, and of the copy's HTML."""
EMPTY: Mapping[str, str] = {"text/html": "", "text/plain": ""}
"""MIME bundle of an output that shows nothing."""

STATIC_COPY_S = 30.0
"""Seconds between two updates of a static copy, for a notebook that is saved while its widget changes."""

_CHILD = ".jp-OutputArea-child"
_COPY = f"{_CHILD}:has(.{WIDGET_CLASS}) + {_CHILD}:has(.{COPY_CLASS})"
HIDE_COPY = (
    f"<style>{_COPY}, {_COPY} + {_CHILD}, {_COPY} + {_CHILD} + {_CHILD} {{ display: none; }} "
    f".{WIDGET_CLASS} .widget-html-content {{ min-width: 0; }}</style>"
)
"""Style in the widget that hides the three outputs below it and lets the widget's texts end in an ellipsis."""
HIDE_DEAD_WIDGET = (
    f"<style>{_CHILD}:has(+ {_CHILD} .{COPY_CLASS}) "
    "> .jp-OutputArea-output.jupyter-widgets:not(:has(*)) { display: none; }</style>"
)
"""Style in the static copy that hides a widget above it which shows nothing but an error."""


def copy_hider() -> widgets.HTML:
    """Return an invisible child for a widget that hides the widget's static copy."""
    return widgets.HTML(HIDE_COPY, layout={"display": "none"})


class DisplayedWidget:
    """One display of a widget in the running cell, with its static copy below: a piece of HTML and up to two figures.

    A figure is a MIME bundle such as `workbench.figures.pages.mimebundle_with_picture` returns.
    """

    def __init__(self, widget: widgets.DOMWidget, html: str, *figures: Mapping[str, Any] | None) -> None:
        widget.add_class(WIDGET_CLASS)
        self._bundle = {**widget._repr_mimebundle_(), **EMPTY}
        self._widget = display(self._bundle, raw=True, display_id=True)
        self._copy = [display(bundle, raw=True, display_id=True) for bundle in _copy_bundles(html, figures)]

    def update(self, html: str, *figures: Mapping[str, Any] | None) -> None:
        """Replace the contents of the static copy."""
        for output, bundle in zip(self._copy, _copy_bundles(html, figures), strict=True):
            output.update(bundle, raw=True)

    def leave_copy(self, html: str, *figures: Mapping[str, Any] | None) -> None:
        """Remove the widget from the page, so that the updated static copy shows."""
        self.update(html, *figures)
        self._widget.update(dict(EMPTY), raw=True)

    def restore(self) -> None:
        """Show the widget again after `leave_copy`."""
        self._widget.update(self._bundle, raw=True)


class StaticCopies:
    """The displays of one widget with their static copies; one thread updates them while another displays."""

    def __init__(self, widget: widgets.DOMWidget, contents: Callable[[], tuple[Any, ...]]) -> None:
        self._widget, self._contents = widget, contents
        self._displays: list[DisplayedWidget] = []
        self._lock = threading.Lock()  # a display that comes while the last copy is written must keep the last one
        self._left = False
        self._next_at = 0.0

    def display(self) -> None:
        """Display the widget in the running cell, or its last copy if the copies have been left."""
        with self._lock:
            contents = self._contents()
            shown = DisplayedWidget(self._widget, *contents)
            self._displays.append(shown)
            if self._left:
                shown.leave_copy(*contents)

    def update(self) -> None:
        """Bring the copies up to date, unless that was done less than `STATIC_COPY_S` seconds ago."""
        with self._lock:
            if self._displays and time.monotonic() >= self._next_at:
                self._next_at = time.monotonic() + STATIC_COPY_S
                contents = self._contents()
                for shown in self._displays:
                    shown.update(*contents)

    def leave(self) -> None:
        """Remove the widget from the page, so that the updated copies show."""
        with self._lock:
            self._left, contents = True, self._contents()
            for shown in self._displays:
                shown.leave_copy(*contents)


def _copy_bundles(html: str, figures: Sequence[Mapping[str, Any] | None]) -> list[dict[str, Any]]:
    """Return always three outputs, because the styles above count them."""
    text = {"text/html": f'<div class="{COPY_CLASS}">{HIDE_DEAD_WIDGET}{html}</div>', "text/plain": ""}
    first, second = (*figures, None, None)[:2]
    return [text, dict(first or EMPTY), dict(second or EMPTY)]
