"""Static twins: what a saved notebook holds, whichever thread wrote last; and the thread that updates a widget."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ipywidgets as widgets
import pytest

from tests.patience import eventually
from workbench.widgets import live_widget
from workbench.widgets.live_widget import LiveWidget, StaticTwins


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

    monkeypatch.setattr(live_widget, "display", display)
    return made


def test_a_widget_that_is_displayed_after_its_end_shows_its_last_twin(outputs: list[Output]) -> None:
    twins = StaticTwins(widgets.VBox(), lambda: (f"state {len(outputs)}",))
    twins.leave()
    twins.display()
    assert "state 0" in outputs[1].shown[-1]
    assert outputs[0].shown == [""], "no widget, but an empty output"


def test_twins_are_updated_at_most_every_half_minute_and_always_at_the_end(
    outputs: list[Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, state = [100.0], ["begun"]
    monkeypatch.setattr(live_widget.time, "monotonic", lambda: now[0])
    twins = StaticTwins(widgets.VBox(), lambda: (state[0],))
    twins.display()
    twins.update()
    state[0], now[0] = "later", 129.0
    twins.update()
    assert all("begun" in text for text in outputs[1].shown)
    now[0] = 130.0
    twins.update()
    assert "later" in outputs[1].shown[-1]
    state[0] = "ended"
    twins.leave()
    assert "ended" in outputs[1].shown[-1]
    shown = len(outputs[1].shown)
    twins.leave()
    assert len(outputs[1].shown) == shown, "what has not changed is not sent again"


class Counting(LiveWidget):
    """A widget that counts its updates, and ends at one of them, or fails from one on."""

    def __init__(self, last: int = 10**9, broken: int = 10**9) -> None:
        super().__init__(0.01)
        self.count, self.last, self.broken = 0, last, broken
        self.pauses, wait = list[float](), self._wake.wait  # in s, between two updates
        self._wake.wait = lambda pause_s: (self.pauses.append(pause_s), wait(pause_s))[1]  # type: ignore[method-assign]
        self.follow()

    def update(self) -> bool:
        self.count += 1
        if self.count >= self.broken:
            raise OSError("no <such> file")
        return self.count >= self.last

    def twin(self) -> tuple[Any, ...]:
        return (f"count {self.count}",)


def test_a_live_widget_ends_with_what_it_follows_and_can_follow_again(outputs: list[Output]) -> None:
    class Resumable(Counting):
        def remains(self) -> dict[str, Any]:
            return {"text/html": "resume", "text/plain": ""}

    widget = Resumable(last=3)
    widget.twins.display()
    eventually(lambda: not widget.following)
    assert widget.count == 3
    assert "count 3" in outputs[1].shown[-1]
    widget.last = 6
    widget.twins.restore()
    widget.follow()
    eventually(lambda: not widget.following)
    assert "count 6" in outputs[1].shown[-1]


@pytest.mark.parametrize("has_page", [True, False])
def test_a_last_state_between_two_cells_is_sent_again_where_no_page_has_received_it(
    outputs: list[Output], has_page: bool
) -> None:
    widget = Counting()
    widget.twins.display()
    widget.cell_ends()
    if has_page:
        widget._view_count = 1  # as the page sets it
    widget.last = 0
    eventually(lambda: not widget.following)
    if has_page:
        widget._view_count = 0
    shown = len(outputs[1].shown)
    widget.cell_begins()
    assert len(outputs[1].shown) - shown == (0 if has_page else 1)
    assert f"count {widget.count}" in outputs[1].shown[-1]


def test_a_live_widget_ends_when_it_is_closed_or_the_page_has_closed_its_comm() -> None:
    for end in (LiveWidget.close, widgets.VBox.close):
        widget = Counting()
        eventually(lambda widget=widget: widget.count > 1)
        end(widget)
        eventually(lambda widget=widget: not widget.following)


def test_a_live_widget_that_cannot_update_says_why() -> None:
    widget = Counting(broken=2)
    eventually(lambda: not widget.following)
    assert "(OSError: no &lt;such&gt; file). The runs go on" in widget.note.value


def test_a_live_widget_that_no_page_shows_is_updated_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_widget, "UNSEEN_FACTOR", 1e6)
    widget = Counting()
    eventually(lambda: len(widget.pauses) > 1)
    assert widget.pauses[1] >= 1e4
    assert widget.count == 1
    widget._view_count = 1  # as the page sets it
    eventually(lambda: widget.count > 3)
    widget.close()


def test_a_process_ends_after_the_update_that_its_live_widgets_have_begun() -> None:
    script = """
import threading, time
from workbench.widgets import live_widget

live_widget.EXIT_S, begun = 300, threading.Event()

class Slow(live_widget.LiveWidget):
    def update(self):
        begun.set()
        self._closed.wait()
        time.sleep(0.5)  # clock: an end that does not wait comes before
        print("updated", flush=True)
    def twin(self):
        return ("",)

widget = Slow(0.01)
widget.follow()
begun.wait()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.splitlines()) == (0, ["updated"]), ended.stderr


def test_an_output_is_emptied_before_it_gets_another_figure(outputs: list[Output]) -> None:
    """Plotly's renderer in JupyterLab draws the first figure of an output, and ignores the next ones."""
    figures = [{live_widget.PLOTLY_MIME: {"data": number}, "text/html": f"figure {number}"} for number in (1, 2)]
    twins = StaticTwins(widgets.VBox(), lambda: ("", figures[0]))
    twins.display()
    figures.pop(0)
    twins.leave()
    assert outputs[2].shown == ["figure 1", "", "figure 2"]


def test_a_figure_that_has_not_changed_is_not_sent_again_with_another_state(outputs: list[Output]) -> None:
    """A notebook that ends between the two messages of a figure would keep neither the old nor the new one."""
    state = ["begun"]
    figure = {live_widget.PLOTLY_MIME: {"data": 1}, "text/html": "figure"}
    twins = StaticTwins(widgets.VBox(), lambda: (state[0], dict(figure)))
    twins.every_s = 0
    twins.display()
    twins.update()
    sent = list(outputs[2].shown)
    state[0] = "later"
    twins.update()
    assert "later" in outputs[1].shown[-1]
    assert outputs[2].shown == sent
