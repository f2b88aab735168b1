"""The log of a run, `events.jsonl` and the table of its steps: read as it grows, and folded into one state.

Lines that differ from what was written are counted and left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from workbench.base.display import facts_html
from workbench.record.events import (
    AlertEvent,
    CheckpointEvent,
    DataUseEvent,
    EndEvent,
    Event,
    MemoryEvent,
    PhaseEvent,
    SpikeEvent,
    StartEvent,
    StepEvent,
    TrackingEvent,
)
from workbench.record.rundir import FINAL_STATES, EventTail
from workbench.record.step_table import StepTable, latest_steps

FREQUENT = ("device", "actions", "norms")
"""Types of events of which a long run has many, and which say nothing of its state."""


class LogTail:
    """A reader of a growing log: events and steps, each once, in the order in which they were written."""

    def __init__(self, path: Path) -> None:
        """`path` is that of `events.jsonl`, beside which the table of the steps lies."""
        self._events, self._table, self._rows = EventTail(path), StepTable(path.parent), 0

    def read(self) -> list[Event]:
        """Return what has arrived since the last call."""
        # All events that were written before these rows are read below. A later row may follow an event that is not,
        # and waits for the next call unless it is older than the last event that is.
        known = self._table.refresh()
        events = self._events.read()
        starts = [event.get("rows", 0) for event in events if event["type"] == "start"]
        if events:
            until = self._table.refresh()
            for low, high in self._table.held(max(known, self._rows)):
                later = np.flatnonzero(self._table.column("time", low, high) > events[-1]["time"])
                if len(later):
                    until = low + int(later[0])
                    break
            known = min(max(known, *starts, until), len(self._table))
        rows, whole = list[StepEvent](), [np.empty(0, dtype=np.int64)]
        for low, high in self._table.held(self._rows, known):
            rows += self._table.events(low, high)
            whole.append(low + np.flatnonzero(~np.isnan(self._table.column("step", low, high))))
        limits = [int(np.searchsorted(np.concatenate(whole), limit)) for limit in (*starts, known)]
        self._rows = known
        return list(_merged(events, rows, limits))


def _merged(events: Sequence[Any], rows: Sequence[Any], limits: list[int]) -> Iterator[Event]:
    """Yield events and rows by their times; `limits` are the numbers of rows before each `start`, and of all."""
    at, begun = 0, -1
    for event in events:
        if event["type"] == "start":
            begun = limits.pop(0)
            yield from rows[at:begun]
            at = max(at, begun)
            yield event
            continue
        # Rows of the next attempt follow its start, whatever the clocks say. A start may stand there twice.
        limit = min((limit for limit in limits if limit > begun), default=len(rows))
        while at < limit and (rows[at]["time"] or 0) <= event["time"]:
            yield rows[at]
            at += 1
        yield event
    yield from rows[at:]


def read_events(path: Path) -> list[Event]:
    """Return every event and every step so far."""
    return LogTail(path).read()


# The state of a run, folded from its events


RECENT_STEPS = 2
"""Number of latest steps of a state: the last one, and the distance of two."""


@dataclass(frozen=True)
class Status:
    """A run's state (queued, starting, running, stalled, finished, stopped or failed), with a message for people."""

    state: str
    message: str = ""
    time: float = 0.0
    """Unix seconds of the last change."""

    @property
    def final(self) -> bool:
        """Return True if the run has ended."""
        return self.state in FINAL_STATES

    def __str__(self) -> str:
        return f"{self.state}: {self.message}" if self.message else self.state

    def _repr_html_(self) -> str:
        return facts_html(self.state, [("", self.message)] if self.message else [])


class Noted(NamedTuple):
    """An event, and the attempt that wrote it."""

    event: Any
    attempt: int
    """Number of starts before it."""


@dataclass(frozen=True)
class RunState:
    """The state of a run, as the first `offset` bytes of its events tell it.

    This is the one place that knows what a later event makes of earlier ones: a new attempt repeats all steps after its
    checkpoint, and forgets what was said of them. Immutable, because several threads may read through one `Run`.
    """

    status: Status | None = None
    starts: tuple[float, ...] = ()
    """Times of the starts, one an attempt."""
    start: StartEvent | None = None
    phase: PhaseEvent | None = None
    end: EndEvent | None = None
    steps: tuple[StepEvent, ...] = ()
    """The latest steps, at most `RECENT_STEPS`; none in a `HistoryTail`, which has them all."""
    evaluations: Mapping[int, Noted] = field(default_factory=dict)
    """Evaluations on held-out samples, by the number of completed steps."""
    on_data: Mapping[tuple[str, int], Noted] = field(default_factory=dict)
    """Evaluations on data that `run.evaluate` was given, by the data's name and the number of completed steps."""
    texts: Mapping[int, Noted] = field(default_factory=dict)
    patterns: Mapping[int, Noted] = field(default_factory=dict)
    data_use: DataUseEvent | None = None
    """Samples that were read of each source of a mixture, up to the last checkpoint or the end."""
    memory: Mapping[int, MemoryEvent] = field(default_factory=dict)
    """Latest `memory` event of each rank, in the last attempt that measured any: the number of `memory_attempt`."""
    memory_attempt: int = 0
    marks: tuple[CheckpointEvent | SpikeEvent | StartEvent, ...] = ()
    """Checkpoints, spikes and resumptions, in order."""
    problems: tuple[str, ...] = ()
    """Sentences about checkpoints that failed, and about code that draws without a seed, since the last launch."""
    alerts: tuple[AlertEvent, ...] = ()
    """Alerts since the last start, in order."""
    tracking: tuple[TrackingEvent, ...] = ()
    """Every report of the recorder."""
    offset: int = 0
    damaged: int = 0
    """Lines of the events that differ from what was written, and were skipped."""
    rows: int = 0
    """Most steps that an event says were logged before it, by all attempts."""

    @property
    def evaluation(self) -> Mapping[str, Any] | None:
        """Return the `evaluation` event after the most steps; None before the first step."""
        last = max(self.evaluations, default=0)
        return dict(self.evaluations[last].event) if last > 0 else None

    def after(self, events: Sequence[Mapping[str, Any]]) -> RunState:
        """Return the state after further events."""
        if not events:
            return self
        fields = vars(self).items()
        now: Any = SimpleNamespace(**{name: list(v) if isinstance(v, tuple) else copy(v) for name, v in fields})
        for event in events:
            event_type, noted = event["type"], Noted(event, len(now.starts))
            now.rows = max(now.rows, event.get("rows", 0))
            if event_type in _BY_STEP:
                getattr(now, _BY_STEP[event_type])[int(event["step"])] = noted
            elif event_type == "data_evaluation":
                now.on_data[event["data"], int(event["step"])] = noted
            elif event_type in _IN_ORDER:
                getattr(now, _IN_ORDER[event_type]).append(event)
            elif event_type in ("phase", "data_use", "end"):
                setattr(now, event_type, event)
            elif event_type == "memory":
                if now.memory_attempt != len(now.starts):  # the last attempt's stay until this one has measured its own
                    now.memory, now.memory_attempt = {}, len(now.starts)
                now.memory[int(event["rank"])] = event
            elif event_type == "checkpoint_problem":
                training = now.status is not None and now.status.state == "running"
                failed = f"The checkpoint of step {event['step']} could not be written: "
                now.problems.append((failed if training else "") + event["message"])
            elif event_type == "code_problem":
                now.problems.append(event["message"])
            elif event_type == "status":
                now.status = Status(event["state"], event.get("message", ""), event["time"])
                if event["state"] in ("queued", "starting"):
                    now.end, now.problems = None, []
            elif event_type == "start" and event["time"] not in now.starts:  # else the line stands in the file twice
                _restart(now, event)
        changed: Any = {name: tuple(v) if isinstance(v, list) else v for name, v in vars(now).items()}
        return RunState(**changed)


_BY_STEP = {"evaluation": "evaluations", "samples": "texts", "sparsity": "patterns"}
_IN_ORDER = {"checkpoint": "marks", "spike": "marks", "tracking": "tracking", "alert": "alerts"}
"""Fields of a state that hold the events of a type, all or the latest of each step."""
UNREAD = RunState()
"""The state before the first event."""


def _restart(now: Any, start: Mapping[str, Any]) -> None:
    """Let a new attempt begin: what was said of steps after its checkpoint, of all in a fresh start, is forgotten."""
    now.starts.append(start["time"])
    now.start, resumed_from, now.alerts = start, start.get("resumed_from"), []
    step = resumed_step(resumed_from)
    for name in _BY_STEP.values():
        setattr(now, name, {at: noted for at, noted in getattr(now, name).items() if step and at <= step})
    now.marks = [*(mark for mark in now.marks if mark_step(mark) <= step), start] if resumed_from else []
    if now.problems and resumed_from:
        now.problems[-1] += f" Training goes on from {Path(str(resumed_from)).name}."
    if now.status is not None and not now.status.final:  # the supervisor reports the new state a moment later
        now.status = Status("running", "", start["time"])


def mark_step(mark: Mapping[str, Any]) -> int:
    """Return the step of a mark; that of a resumption is the checkpoint's."""
    return resumed_step(mark.get("resumed_from")) if mark["type"] == "start" else int(mark["step"])


def resumed_step(value: str | int | None) -> int:
    """Return the step of `resumed_from`: a checkpoint's path (`.../step-00000400`), a step, or None for a new start."""
    return int(value.rpartition("step-")[2]) if isinstance(value, str) else int(value or 0)


def read_state(path: Path, seen: RunState = UNREAD) -> RunState:
    """Return the state of the run with these events; `seen` is an earlier one, after which only new events are read."""
    steps = tuple(latest_steps(path.parent, RECENT_STEPS))  # before the events, so that the `start` of each is read
    tail = EventTail(path, seen.offset)
    state = seen.after(tail.read(without=FREQUENT))
    return replace(state, offset=tail.offset, damaged=seen.damaged + tail.damaged, steps=steps)
