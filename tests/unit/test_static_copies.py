"""Static copies of widgets: what a saved notebook holds, whichever thread wrote last."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets
import pytest

from workbench.widgets import static_copy
from workbench.widgets.static_copy import StaticCopies


class Output:
    """One output of a cell, as `IPython.display.display` returns it, with all that it has shown."""

    def __init__(self, bundle: Any) -> None:
        self.shown = [bundle["text/html"]]

    def update(self, bundle: Any, **_: Any) -> None:
        self.shown.append(bundle["text/html"])


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[Output]:
    """Return the outputs that are displayed, four for each widget: the widget, its HTML, and two figures."""
    made: list[Output] = []

    def display(bundle: Any, **_: Any) -> Output:
        made.append(Output(bundle))
        return made[-1]

    monkeypatch.setattr(static_copy, "display", display)
    return made


def test_a_widget_that_is_displayed_after_its_end_shows_its_last_copy(outputs: list[Output]) -> None:
    copies = StaticCopies(widgets.VBox(), lambda: (f"state {len(outputs)}",))
    copies.leave()
    copies.display()
    assert "state 0" in outputs[1].shown[-1]
    assert len(outputs[0].shown) == 2, "the widget is replaced by an empty output"


def test_copies_are_updated_at_most_every_half_minute_and_always_at_the_end(
    outputs: list[Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, state = [100.0], ["begun"]
    monkeypatch.setattr(static_copy.time, "monotonic", lambda: now[0])
    copies = StaticCopies(widgets.VBox(), lambda: (state[0],))
    copies.display()
    copies.update()
    state[0], now[0] = "later", 129.0
    copies.update()
    assert all("begun" in text for text in outputs[1].shown)
    now[0] = 130.0
    copies.update()
    assert "later" in outputs[1].shown[-1]
    state[0] = "ended"
    copies.leave()
    assert "ended" in outputs[1].shown[-1]
