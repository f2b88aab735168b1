"""What a run has measured, as NumPy columns, read from its events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.runs.records import history_cache as history_file
from workbench.runs.records.event_lines import (
    MEASURED,
    RECENT_BYTES,
    blocks,
    events_but_steps,
    number,
    parsed,
    recent_steps,
)

Column = NDArray[np.float64]
RECENT_STEPS = 20
"""Of the latest steps, the events themselves are kept beside the columns."""
WORTH_KEEPING_BYTES = 2**20
"""Of events that were parsed: less is parsed again as quickly."""
KEEP_AGAIN_BYTES = 64 * 2**20
_TIME, _SECONDS = MEASURED.index("time"), MEASURED.index("seconds")
_SAMPLE = ("time", "device", "share", "used_bytes")
_FIRST_ROOM = 1024  # columns


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


@dataclass(frozen=True, eq=False)
class Utilization:
    """How busy a run's devices were while it trained: one sample of one device a row, in order of time."""

    kind: str
    """`cuda`, `cpu`, or empty before the first sample."""
    names: tuple[str, ...]
    """Of the devices that `device` counts: `"GPU 0"`, or with several nodes `"node 1, GPU 0"`."""
    time: Column
    """Unix seconds."""
    device: Column
    """Position in `names`."""
    share: Column
    """0 to 1: of the time in which a kernel ran on a GPU; of the node's cores that the run's processes kept busy."""
    used_bytes: Column
    """Of the device's memory, by whoever uses it; resident memory of the run's processes on a CPU."""

    def __len__(self) -> int:
        return len(self.time)


class _Table:
    """Rows by name, columns that arrive; arrays that were handed out never change."""

    def __init__(self, rows: int, values: Column | None = None) -> None:
        self._values = np.empty((rows, _FIRST_ROOM)) if values is None else values
        self.length = 0 if values is None else values.shape[1]

    def view(self) -> Column:
        found = self._values[:, : self.length]
        found.flags.writeable = False
        return found

    def reserve(self, columns: int) -> None:
        """Have room for so many more without growing in between."""
        if self.length + columns > self._values.shape[1]:
            grown = np.empty((len(self._values), self.length + columns))
            grown[:, : self.length] = self._values[:, : self.length]
            self._values = grown

    def append(self, columns: Column) -> None:
        count = columns.shape[1]
        if self.length + count > self._values.shape[1]:
            self.reserve(max(count, self.length))
        self._values[:, self.length : self.length + count] = columns
        self.length += count

    def cut(self, length: int) -> None:
        if length < self.length:
            self._values = self._values[:, :length].copy()  # columns handed out earlier keep their rows
            self.length = length


class HistoryTail:
    """Reads a growing `events.jsonl`; a tick costs what has arrived since the last one.

    After `read()`, `events` holds that call's new events but steps, samples of devices and `actions`, for whoever shows
    more than curves. What a first call has read is kept beside the events (`history_file`) for the next to open them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset: int | None = None
        self._kept_to = 0
        self._steps, self._samples = _Table(len(MEASURED) + 1), _Table(len(_SAMPLE))
        self._devices, self._training = 1, False
        self._before = (0.0, 0.0)  # seconds and GPU-hours at the start of this stretch
        self._kind, self._names = "", dict[str, int]()
        self._others: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []

    def read(self) -> History:
        """The history so far. Arrays that were handed out earlier never change."""
        self.events = self._open() if self._offset is None else []
        assert self._offset is not None
        for block in blocks(self._path, self._offset):
            self._offset += len(block)
            self._take(block)
        if self._offset - self._kept_to >= (KEEP_AGAIN_BYTES if self._kept_to else WORTH_KEEPING_BYTES):
            self._keep()
        return History(**dict(zip((*MEASURED, "gpu_hours"), self._steps.view(), strict=True)))

    @property
    def utilization(self) -> Utilization:
        """How busy the devices were, as far as `read()` has come."""
        return Utilization(self._kind, tuple(self._names), *self._samples.view())

    def _open(self) -> list[dict[str, Any]]:
        """Take up what was kept; returns the events that came with it."""
        self._offset = 0
        kept = history_file.load(self._path)
        if kept is None:
            return []
        state = kept.state
        self._offset = self._kept_to = kept.offset
        self._steps = _Table(len(MEASURED) + 1, kept.tables["steps"])
        self._samples = _Table(len(_SAMPLE), kept.tables["samples"])
        self._devices, self._training, self._kind = state["devices"], state["training"], state["kind"]
        self._before = (state["before"][0], state["before"][1])
        self._names = {name: index for index, name in enumerate(state["names"])}
        self._others = list(state["events"])
        return list(self._others)

    def _keep(self) -> None:
        assert self._offset is not None
        state = {
            "devices": self._devices,
            "before": self._before,
            "training": self._training,
            "kind": self._kind,
            "names": list(self._names),
            "events": self._others,
            "recent": _last_steps(self._path, self._offset),
        }
        tables = {"steps": self._steps.view(), "samples": self._samples.view()}
        history_file.save(self._path, self._offset, state, tables)
        self._kept_to = self._offset  # also where nothing can be written: do not try at every tick

    def _take(self, block: bytes) -> None:
        found = parsed(block)
        if found.steps.shape[1] and not self._steps.length:
            bytes_left = self._path.stat().st_size - (self._offset or 0)
            self._steps.reserve(int(found.steps.shape[1] * (1 + 1.05 * bytes_left / len(block))))
        taken = 0
        for steps_before, event in found.others:
            if event["type"] == "device":
                self._sample(event)
                continue
            if event["type"] == "start":
                self._append(found.steps[:, taken:steps_before])
                taken = steps_before
                self._restart(event)
            elif event["type"] == "end" or (event["type"] == "status" and event["state"] != "running"):
                self._training = False
            self._others.append(event)
            self.events.append(event)
        self._append(found.steps[:, taken:])

    def _restart(self, event: Mapping[str, Any]) -> None:
        """A resumed run repeats the steps after its checkpoint; a fresh start repeats them all."""
        self._devices, self._training = _device_count(event), True
        self._forget_after(_resumed_step(event.get("resumed_from")))
        seconds, hours = self._steps.view()[[_SECONDS, -1]]
        known = np.flatnonzero(np.isfinite(hours))
        self._before = (float(seconds[known[-1]]), float(hours[known[-1]])) if len(known) else (0.0, 0.0)
        last = self._steps.view()[_TIME, -1] if self._steps.length else -np.inf
        self._samples.cut(int(np.searchsorted(self._samples.view()[0], last, side="right")))

    def _append(self, steps: Column) -> None:
        """Steps that do not rise were repeated without a `start`: each such turn replaces what it repeats."""
        turns = np.flatnonzero(np.diff(steps[0]) <= 0) + 1
        for rising in np.split(steps, turns, axis=1) if len(turns) else [steps]:
            if not rising.shape[1]:
                continue
            self._forget_after(int(np.ceil(rising[0, 0])) - 1)
            self._steps.append(np.concatenate([rising, self._gpu_hours(rising[_SECONDS])[None]]))

    def _gpu_hours(self, seconds: Column) -> Column:
        """Each stretch counts with the devices that it ran on."""
        before_s, before_h = self._before
        return np.asarray(before_h + (seconds - before_s) * self._devices / 3600)

    def _forget_after(self, step: int) -> None:
        self._steps.cut(int(np.searchsorted(self._steps.view()[0], step, side="right")))

    def _sample(self, event: Mapping[str, Any]) -> None:
        """Samples from before the first step of an attempt, or from after its last, say nothing of the training."""
        if not self._training:
            return
        self._kind = str(event["kind"])
        prefix = f"node {event['node']}, " if event.get("node") is not None else ""
        codes = [self._names.setdefault(f"{prefix}{name}", len(self._names)) for name in event["names"]]
        columns = [[event["time"]] * len(codes), codes, map(number, event["shares"]), map(number, event["used_bytes"])]
        self._samples.append(np.array([list(values) for values in columns], dtype=np.float64))


def _last_steps(path: Path, offset: int) -> list[dict[str, Any]]:
    """The latest step events of the first `offset` bytes."""
    begin = max(0, offset - RECENT_BYTES)
    with path.open("rb") as file:
        file.seek(begin)
        return recent_steps(file.read(offset - begin), RECENT_STEPS)


def latest(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Every event from `offset` on but samples of devices and `actions`, and of the steps only the last ones.

    Also returns the offset to go on from. What `HistoryTail` kept is not parsed again.
    """
    kept = history_file.load(path, with_tables=False) if offset == 0 else None
    events, steps = [], list[dict[str, Any]]()
    if kept is not None:
        events, steps, offset = list(kept.state["events"]), list(kept.state["recent"]), kept.offset
    for block in blocks(path, offset):
        offset += len(block)
        events += [event for event in events_but_steps(block) if event["type"] != "device"]
        steps = [*steps, *recent_steps(block, RECENT_STEPS)][-RECENT_STEPS:]
    return [*events, *steps], offset


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
