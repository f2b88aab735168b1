"""What a run has measured, as NumPy columns, read from its events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.rundir import EventTail

Column = NDArray[np.float64]
_MEASURED = (
    "step",
    "loss",
    "learning_rate",
    "grad_norm",
    "step_ms",
    "tokens",
    "samples",
    "flops",
    "seconds",
    "tokens_per_s",
    "mfu",
    "time",
)
_FIRST_ROOM = 1024  # rows


@dataclass(frozen=True, eq=False)
class History:
    """One row a logged step, in order of `step`; read-only float64 columns of equal length, NaN where unknown.

    `tokens`, `samples`, `flops`, `seconds` and `gpu_hours` count from the start of training, over all
    devices and over every resumption.
    """

    step: Column
    loss: Column
    learning_rate: Column
    grad_norm: Column
    step_ms: Column
    tokens: Column
    samples: Column
    flops: Column
    seconds: Column
    """Training time: neither start-up nor the pause before a resumption."""
    gpu_hours: Column
    """`seconds` times devices, in hours."""
    tokens_per_s: Column
    mfu: Column
    time: Column
    """Unix seconds."""

    def __len__(self) -> int:
        return len(self.step)

    def __repr__(self) -> str:
        if not len(self):
            return "History(no step yet)"
        return (
            f"History({len(self):,} steps to step {self.step[-1]:.0f}, loss {self.loss[0]:.4g} → {self.loss[-1]:.4g})"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(column.name for column in fields(self))

    def __getitem__(self, name: str) -> Column:
        return np.asarray(getattr(self, name))


class HistoryTail:
    """Reads a growing `events.jsonl`; a tick costs what has arrived since the last one.

    After `read()`, `events` holds that call's new events of every type, for whoever shows more than curves.
    """

    def __init__(self, path: Path) -> None:
        self._events = EventTail(path)
        self._table = np.empty((len(_MEASURED) + 1, _FIRST_ROOM))
        self._rows = 0
        self._devices = 1
        self.events: list[dict[str, Any]] = []

    def read(self) -> History:
        """The history so far. Arrays that were handed out earlier never change."""
        self.events = self._events.read()
        for event in self.events:
            if event["type"] == "start":
                self._restart(event)
            elif event["type"] == "step":
                self._append(event)
        return self._history()

    def _restart(self, event: Mapping[str, Any]) -> None:
        """A resumed run repeats the steps after its checkpoint; a fresh start repeats them all."""
        self._devices = _device_count(event)
        self._forget_after(_resumed_step(event.get("resumed_from")))

    def _append(self, event: Mapping[str, Any]) -> None:
        if self._rows and event["step"] <= self._table[0, self._rows - 1]:
            self._forget_after(int(event["step"]) - 1)
        if self._rows == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.empty_like(self._table)], axis=1)
        row = [_number(event.get(name)) for name in _MEASURED]
        self._table[:, self._rows] = [*row, self._gpu_hours(row[_MEASURED.index("seconds")])]
        self._rows += 1

    def _gpu_hours(self, seconds: float) -> float:
        """Each stretch counts with the devices that it ran on."""
        before_s, before_h = 0.0, 0.0
        if self._rows:
            before_s, before_h = self._table[[_MEASURED.index("seconds"), -1], self._rows - 1]
        return float(before_h + (seconds - before_s) * self._devices / 3600)

    def _forget_after(self, step: int) -> None:
        keep = int(np.searchsorted(self._table[0, : self._rows], step, side="right"))
        if keep < self._rows:
            self._table = self._table.copy()  # columns handed out earlier keep their rows
            self._rows = keep

    def _history(self) -> History:
        view = self._table[:, : self._rows]
        view.flags.writeable = False
        columns = dict(zip((*_MEASURED, "gpu_hours"), view, strict=True))
        return History(**columns)


def read_history(path: Path) -> History:
    """The history in an `events.jsonl`; empty where there is none yet."""
    return HistoryTail(path).read()


def _device_count(event: Mapping[str, Any]) -> int:
    devices = event.get("devices")
    if isinstance(devices, int):
        return devices
    return len(devices) if devices else int(event.get("world") or 1)


def _resumed_step(value: Any) -> int:
    """The step of `start`'s `resumed_from`: a checkpoint's path (`…/step-00000400`), a step, or None."""
    if isinstance(value, str):
        return int(value.rpartition("step-")[2])
    return int(value or 0)


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)
