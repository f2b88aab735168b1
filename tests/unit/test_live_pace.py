"""How soon a live view draws what is new: by the period of its feed, however long the machine lets it wait."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from tests.patience import Clock
from workbench.widgets import live_widget

EVERY_S, WORK_S, KEPT_WAITING_S = 0.1, 0.2, 20.0


class BusyMachine(Clock):
    """A clock on whose machine a drawing takes a hundred times longer than its computation."""

    computed_s = 0.0

    def process_time(self) -> float:
        return self.computed_s

    def compute(self, seconds: float) -> None:
        self.computed_s += seconds
        self.now += KEPT_WAITING_S


class Waking:
    """Takes the place of the event that wakes a view: it notes each pause, and returns at once."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        return False

    def set(self) -> None: ...

    def clear(self) -> None: ...


class View(live_widget.LiveWidget):
    def __init__(self, machine: BusyMachine, work_s: list[float]) -> None:
        self.machine, self.work_s = machine, work_s
        super().__init__(EVERY_S)
        self._view_count, self._wake = 1, Waking()

    def update(self) -> bool:
        self.machine.compute(self.work_s.pop(0))
        return not self.work_s

    def twin(self) -> tuple[Any, ...]:
        return ("",)


def test_a_view_rests_for_its_own_computation_and_not_for_what_a_busy_machine_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = BusyMachine()
    monkeypatch.setattr(live_widget, "time", machine)
    view = View(machine, [0.0, 0.001, WORK_S, 0.0])
    view._follow(weakref.ref(view))
    assert view._wake.pauses == pytest.approx([EVERY_S, EVERY_S, EVERY_S, live_widget.REST_FACTOR * WORK_S])
