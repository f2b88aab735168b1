"""The measurements of a run as NumPy columns, read from its events."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from workbench.columns import COLUMNS
from workbench.errors import suggestion
from workbench.events import DataEvaluationEvent, EvaluationEvent, Event, SamplesEvent, SparsityEvent, StartEvent
from workbench.runs.records.event_lines import LOGGED, EventBlock, columns_of, number, recent_steps
from workbench.runs.records.kept_blocks import read_blocks
from workbench.runs.records.patterns import Patterns, patterns_of
from workbench.runs.records.text_samples import TextSamples
from workbench.tables import html_table

Column = NDArray[np.float64]
_TIME, _SECONDS = LOGGED.index("time"), LOGGED.index("seconds")
_SAMPLE_ROWS = 4  # time, device, share, used_bytes
_FIRST_ROOM = 1024  # columns
GOING_ON = ("running", "stalled")
"""States of a run whose devices are sampled for it."""


LAST_STEPS = 20
"""Number of last logged steps over which the final loss is averaged."""


def final_loss(losses: Sequence[float | None] | Column) -> float:
    """Return the loss that a training ended with, wherever one is printed: the mean of its last 20 logged losses.

    It is NaN without a logged step, and not finite if one of the 20 is not.
    """
    last = np.array(losses[-LAST_STEPS:], dtype=np.float64)  # None becomes NaN
    return float(last.mean()) if len(last) else math.nan


class History:
    """The logged steps of a run: read-only float64 columns of equal length, in order of `step`, NaN where unknown.

    `history.loss` and `history["loss"]` are the same column; `workbench.columns.COLUMNS` describes each. `tokens`,
    `samples`, `flops`, `seconds` and `gpu_hours` count from the start of training, over all devices and over every
    resumption.

    `begins_after` is the step that the first logged one follows: 0, or that of a checkpoint; None if it is not known.
    """

    def __init__(self, columns: Mapping[str, Column], begins_after: int | None = None) -> None:
        self._columns = dict(columns)
        self._begins_after = begins_after

    def __getattr__(self, name: str) -> Column:
        if name.startswith("_") or name not in self._columns:
            raise AttributeError(f"A history has no column {name!r}. {suggestion(name, COLUMNS)}")
        return self._columns[name]

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self]

    def __len__(self) -> int:
        return len(self.step)

    def __repr__(self) -> str:
        if not len(self):
            return "History(no step yet)"
        missing = f", {self.missing:,} missing" if self.missing else ""
        return (
            f"History({len(self):,} steps to step {self.step[-1]:.0f}{missing}, "
            f"loss {self.loss[0]:.4g} → {final_loss(self.loss):.4g})"
        )

    def _repr_html_(self) -> str:
        shown = {name: column[np.isfinite(column)] for name, column in self._columns.items() if name != "time"}
        rows = [
            (name, *(f"{value:.5g}" for value in (known[0], known[-1], known.min(), known.max())))
            for name, known in shown.items()
            if len(known)
        ]
        return html.escape(repr(self)) + html_table(("column", "first", "last", "least", "greatest"), rows)

    @property
    def missing(self) -> int:
        """Return the number of steps that should be logged before or between others, and are not."""
        distances = np.diff(self.step, prepend=self.step[:1] if self._begins_after is None else self._begins_after)
        if not len(distances):
            return 0
        usual = float(np.median(distances[1:] if len(distances) > 1 else distances))
        return int(sum(distance // usual - 1 for distance in distances if distance > usual))


EVALUATED = ("step", "loss", "tokens", "samples", "flops", "seconds", "eval_seconds")
"""The figures of an `evaluation` event that become columns, in this order."""


@dataclass(frozen=True, eq=False)
class Evaluations:
    """The held-out losses of a run: float64 columns of equal length, in order of `step`, which begins at 0.

    `evaluations["accuracy"]` is the column of a metric of the experiment.
    """

    step: Column
    eval_loss: Column
    tokens: Column
    samples: Column
    flops: Column
    seconds: Column
    """Training time so far, without evaluations."""
    eval_seconds: Column
    """Time that the evaluation took."""
    gpu_hours: Column
    metrics: Mapping[str, Column] = field(default_factory=dict)
    """The experiment's own metrics by name, NaN where an evaluation has none."""

    @property
    def perplexity(self) -> Column:
        """The exponential of the loss."""
        return np.asarray(np.exp(self.eval_loss))

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, name: str) -> Column:
        return np.asarray(self.metrics[name] if name in self.metrics else getattr(self, name))


@dataclass(frozen=True, eq=False)
class Utilization:
    """Samples of how busy a run's devices were while it trained: one sample of one device a row, in order of time."""

    device_type: str
    """`cuda`, `cpu`, or empty before the first sample."""
    names: tuple[str, ...]
    """Names of the devices: `"GPU 0"`, or in a multi-node run `"node 1, GPU 0"`."""
    time: Column
    """Unix seconds."""
    device: Column
    """Position in `names`."""
    share: Column
    """Utilisation from 0 to 1: time in which a kernel ran on a GPU, or cores that the run's processes used on a CPU."""
    used_bytes: Column
    """Memory in use on the device by any process; on a CPU, resident memory of the run's processes."""

    def __len__(self) -> int:
        return len(self.time)


class _Table:
    """A matrix that grows by columns; arrays that were handed out never change."""

    def __init__(self, rows: int) -> None:
        self._values = np.empty((rows, _FIRST_ROOM))
        self.length = 0

    def view(self) -> Column:
        columns = self._values[:, : self.length]
        columns.flags.writeable = False
        return columns

    def reserve(self, columns: int) -> None:
        """Make room for so many more columns without growing in between."""
        if self.length + columns > self._values.shape[1]:
            grown = np.empty((len(self._values), self.length + columns))
            grown[:, : self.length] = self._values[:, : self.length]
            self._values = grown

    def append(self, *rows: Column) -> None:
        """Append columns, given as matrices of some of their rows, from the first row on."""
        count, first = rows[0].shape[1], 0
        if self.length + count > self._values.shape[1]:
            self.reserve(max(count, self.length))
        for part in rows:
            self._values[first : first + len(part), self.length : self.length + count] = part
            first += len(part)
        self.length += count

    def insert(self, column: Column) -> None:
        """Insert a column in the order of the first row, unless one with the same value there exists."""
        at = int(np.searchsorted(self.view()[0], column[0]))
        if self.view()[0, at] != column[0]:
            self._values = np.insert(self._values[:, : self.length], at, column, axis=1)
            self.length += 1

    def cut(self, length: int) -> None:
        if length < self.length:
            self._values = self._values[:, :length].copy()  # columns handed out earlier keep their rows
            self.length = length


class HistoryTail:
    """A reader of a growing `events.jsonl`; each `read()` costs only what has arrived since the last one.

    After `read()`, `events` holds that call's new events except steps, device samples and `actions`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._steps, self._samples = _Table(len(LOGGED) + 1), _Table(_SAMPLE_ROWS)
        self._devices, self._training = 1, False
        self._started_at = set[float]()
        self._before = (0.0, 0.0)  # seconds and device-hours at the last start
        self._begins_after: int | None = None  # the step of the checkpoint that the first step kept follows
        self._device_type, self._names = "", dict[str, int]()
        self._evaluations: dict[int, list[float]] = {}
        self._on_data: dict[str, dict[int, list[float]]] = {}
        self._metrics: dict[int, Mapping[str, float | None]] = {}
        self._texts: dict[int, SamplesEvent] = {}
        self._patterns: dict[int, SparsityEvent] = {}
        self.events: list[Event] = []

    def read(self) -> History:
        """Return the history so far; arrays that were handed out earlier never change."""
        self.events = []
        for block in read_blocks(self._path, self._offset):
            self._offset += block.num_bytes
            self._take(block)
        columns = dict(zip((*LOGGED, "gpu_hours"), self._steps.view(), strict=True))
        return History({name: columns[name] for name in COLUMNS}, self._begins_after)

    @property
    def utilization(self) -> Utilization:
        """Return how busy the devices were, as far as `read()` has come."""
        return Utilization(self._device_type, tuple(self._names), *self._samples.view())

    @property
    def evaluations(self) -> Evaluations:
        """Return the held-out losses, as far as `read()` has come."""
        steps = sorted(self._evaluations)
        rows = [self._evaluations[step] for step in steps]
        computed = [self._metrics.get(step, {}) for step in steps]
        names = dict.fromkeys(name for values in computed for name in values)
        metrics = {name: np.array([number(values.get(name)) for values in computed]) for name in names}
        return replace(_evaluations_of(rows), metrics=metrics)

    def evaluations_on(self, data: str) -> Evaluations:
        """Return the losses on data that `run.evaluate` was given, by its name, as far as `read()` has come."""
        rows = [row for _, row in sorted(self._on_data.get(data, {}).items())]
        return _evaluations_of(rows)

    @property
    def texts(self) -> TextSamples:
        """Return the samples of text, as far as `read()` has come."""
        return TextSamples(tuple(self._texts[step] for step in sorted(self._texts)))

    @property
    def patterns(self) -> Patterns:
        """Return the patterns of sparse weights, as far as `read()` has come."""
        return patterns_of([self._patterns[step] for step in sorted(self._patterns)])

    def _take(self, block: EventBlock) -> None:
        if block.steps.shape[1] and not self._steps.length:
            bytes_left = self._path.stat().st_size - self._offset
            self._steps.reserve(int(block.steps.shape[1] * (1 + 1.05 * bytes_left / block.num_bytes)))
        taken = sampled = 0
        for line, steps_before, event in block.others:
            if event["type"] == "evaluation":
                self._evaluations[int(event["step"])] = self._evaluated(event)
                self._metrics[int(event["step"])] = event.get("metrics") or {}
            elif event["type"] == "data_evaluation":
                self._on_data.setdefault(event["data"], {})[int(event["step"])] = self._evaluated(event)
            elif event["type"] == "samples":
                self._texts[int(event["step"])] = event
            elif event["type"] == "sparsity":
                self._patterns[int(event["step"])] = event
            elif event["type"] == "start":
                self._append(block.steps[:, taken:steps_before])
                taken, sampled = steps_before, self._append_samples(block, sampled, line)
                self._restart(event)
            elif event["type"] == "end" or (event["type"] == "status" and event["state"] not in GOING_ON):
                sampled = self._append_samples(block, sampled, line)
                self._training = False
            self.events.append(event)
        self._append(block.steps[:, taken:])
        self._append_samples(block, sampled)

    def _restart(self, event: StartEvent) -> None:
        """Drop the steps that the new attempt repeats: those after its checkpoint, or all in a fresh start."""
        if event["time"] in self._started_at:  # the line stands in the file twice
            return
        self._started_at.add(event["time"])
        devices = event.get("devices")
        self._devices = devices if isinstance(devices, int) else len(devices or ()) or int(event.get("world") or 1)
        self._training = True
        resumed = resumed_step(event.get("resumed_from"))
        self._forget_after(resumed)
        if not self._steps.length:
            self._begins_after = resumed
        self._evaluations = {step: row for step, row in self._evaluations.items() if resumed and step <= resumed}
        self._texts = {step: event for step, event in self._texts.items() if resumed and step <= resumed}
        self._patterns = {step: event for step, event in self._patterns.items() if resumed and step <= resumed}
        seconds, hours = self._steps.view()[[_SECONDS, -1]]
        finite = np.flatnonzero(np.isfinite(hours))
        self._before = (float(seconds[finite[-1]]), float(hours[finite[-1]])) if len(finite) else (0.0, 0.0)
        last = self._steps.view()[_TIME, -1] if self._steps.length else -np.inf
        self._samples.cut(int(np.searchsorted(self._samples.view()[0], last, side="right")))

    def _evaluated(self, event: EvaluationEvent | DataEvaluationEvent) -> list[float]:
        before_s, before_h = self._before
        gpu_hours = before_h + (event["seconds"] - before_s) * self._devices / 3600
        return [*(number(event.get(name)) for name in EVALUATED), gpu_hours]

    def _append(self, steps: Column) -> None:
        """Append steps; those whose numbers do not rise were repeated without a `start` and replace earlier ones.

        A line that stands in the wrong place is older than the line before it. It fills a gap or says nothing new.
        """
        repeats = np.flatnonzero(np.diff(steps[0]) <= 0) + 1
        for rising in np.split(steps, repeats, axis=1) if len(repeats) else [steps]:
            if not rising.shape[1]:
                continue
            before_s, before_h = self._before
            hours = before_h + (rising[_SECONDS] - before_s) * self._devices / 3600
            while rising.shape[1] and self._is_misplaced(rising[:, 0]):
                self._steps.insert(np.append(rising[:, 0], hours[0]))
                rising, hours = rising[:, 1:], hours[1:]
            if rising.shape[1]:
                self._forget_after(int(np.ceil(rising[0, 0])) - 1)
                self._steps.append(rising, hours[None])

    def _is_misplaced(self, row: Column) -> bool:
        """Return True for a step that is neither after the last one nor written later than that."""
        if not self._steps.length:
            return False
        last = self._steps.view()[:, -1]
        return bool(row[0] <= last[0] and row[_TIME] <= last[_TIME])

    def _forget_after(self, step: int) -> None:
        self._steps.cut(int(np.searchsorted(self._steps.view()[0], step, side="right")))

    def _append_samples(self, block: EventBlock, first: int, line: float = math.inf) -> int:
        """Append a block's samples of devices from `first` on up to a line, and return the index of the next.

        Those before the first step of an attempt, or after its last, are left out.
        """
        end = int(np.searchsorted(block.samples[0], line))
        if self._training and end > first:
            self._device_type = block.device_type
            samples = block.samples[1:, first:end].copy()
            codes = samples[1].astype(int)
            names = {code: block.names[code] for code in np.flatnonzero(np.bincount(codes)).tolist()}
            known = {code: self._names.setdefault(name, len(self._names)) for code, name in names.items()}
            samples[1] = np.array([known.get(code, 0) for code in range(len(block.names))])[codes]
            self._samples.append(samples)
        return end


def latest_events(path: Path, offset: int = 0, steps: int = 0) -> tuple[list[Event], int, int]:
    """Return the events from `offset` on without device samples, `actions` and all but the last `steps` steps.

    The second value is the offset to go on from, the third one the number of damaged lines. The steps come last.
    """
    events, start, damaged = list[Event](), offset, 0
    for block in read_blocks(path, offset, with_columns=False):
        offset += block.num_bytes
        events += [event for _, _, event in block.others]
        damaged += block.damaged
    return [*events, *(recent_steps(path, start, offset, steps) if steps else ())], offset, damaged


def read_history(path: Path) -> History:
    """Return the history in an `events.jsonl`; empty where there is none yet."""
    return HistoryTail(path).read()


def read_tail(path: Path) -> HistoryTail:
    """Return a reader that has read all of an `events.jsonl`."""
    tail = HistoryTail(path)
    tail.read()
    return tail


def resumed_step(value: str | int | None) -> int:
    """Return the step of `resumed_from`: a checkpoint's path (`.../step-00000400`), a step, or None for a new start."""
    return int(value.rpartition("step-")[2]) if isinstance(value, str) else int(value or 0)


def _evaluations_of(rows: Sequence[Sequence[float]]) -> Evaluations:
    return Evaluations(*columns_of(rows, len(EVALUATED) + 1))
