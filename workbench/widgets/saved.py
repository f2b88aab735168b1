"""What a saved notebook shows where a widget was: its static twin, in outputs of the same cell.

A widget lives while its kernel does. A notebook that is saved meanwhile holds the widget's id alone, which JupyterLab
shows as an error when no kernel knows it, and GitHub not at all. So below each widget stand ordinary outputs, a piece
of HTML and a figure with a PNG beside it, brought up to date as the widget goes on. While the widget lives, a style
that it brings hides them; where it does not, a style in the twin hides its error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets as widgets
from IPython.display import display

WIDGET_CLASS, TWIN_CLASS = "workbench-live", "workbench-saved"
NOTHING: Mapping[str, str] = {"text/html": "", "text/plain": ""}

_CHILD = ".jp-OutputArea-child"
_TWIN = f"{_CHILD}:has(.{WIDGET_CLASS}) + {_CHILD}:has(.{TWIN_CLASS})"
HIDE_TWIN = (
    f"<style>{_TWIN}, {_TWIN} + {_CHILD}, {_TWIN} + {_CHILD} + {_CHILD} {{ display: none; }} "
    f".{WIDGET_CLASS} .widget-html-content {{ min-width: 0; }}</style>"
)
"""In the widget: hides the three outputs below it; and lets its texts end in an ellipsis."""
HIDE_DEAD_WIDGET = (
    f"<style>{_CHILD}:has(+ {_CHILD} .{TWIN_CLASS}) "
    "> .jp-OutputArea-output.jupyter-widgets:not(:has(*)) { display: none; }</style>"
)
"""In the twin: hides a widget above that has nothing but an error in it."""


def hides_its_twin() -> widgets.HTML:
    """A child for a widget with a twin: it takes no room."""
    return widgets.HTML(HIDE_TWIN, layout={"display": "none"})


class Shown:
    """One showing of a widget with its twin below, a piece of HTML and up to two figures, in the cell that runs now.

    A figure is a bundle as `workbench.figures.pages.pictured` makes it.
    """

    def __init__(self, widget: widgets.DOMWidget, html: str, *figures: Mapping[str, Any] | None) -> None:
        widget.add_class(WIDGET_CLASS)
        self._bundle = {**widget._repr_mimebundle_(), **NOTHING}
        self._widget = display(self._bundle, raw=True, display_id=True)
        self._twin = [display(bundle, raw=True, display_id=True) for bundle in _bundles(html, figures)]

    def update(self, html: str, *figures: Mapping[str, Any] | None) -> None:
        """Bring the twin up to date."""
        for output, bundle in zip(self._twin, _bundles(html, figures), strict=True):
            output.update(bundle, raw=True)

    def leave(self, html: str, *figures: Mapping[str, Any] | None) -> None:
        """Take the widget away: the twin shows, in a saved notebook too."""
        self.update(html, *figures)
        self._widget.update(dict(NOTHING), raw=True)

    def come_back(self) -> None:
        """Show the widget again, where it had left."""
        self._widget.update(self._bundle, raw=True)


def _bundles(html: str, figures: Sequence[Mapping[str, Any] | None]) -> list[dict[str, Any]]:
    """Three outputs, however many figures there are: the styles count them."""
    words = {"text/html": f'<div class="{TWIN_CLASS}">{HIDE_DEAD_WIDGET}{html}</div>', "text/plain": ""}
    first, second = (*figures, None, None)[:2]
    return [words, dict(first or NOTHING), dict(second or NOTHING)]
