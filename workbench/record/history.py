"""The measurements of a run as NumPy columns, read from its events."""

from __future__ import annotations

import contextlib
import html
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.base.display import STYLE, html_table
from workbench.base.errors import InvalidArgument, UnknownParameter, suggestion
from workbench.base.units import HOUR
from workbench.record.columns import COLUMNS
from workbench.record.event_log import FREQUENT, Noted, RunState, resumed_step
from workbench.record.events import (
    SamplesEvent,
    SparsityEvent,
    StartEvent,
    TextSample,
)
from workbench.record.rundir import EventTail, parse_event, type_prefix
from workbench.record.step_table import GrowingTable, StepTable

Column = NDArray[np.float64]
_SAMPLE_ROWS = 4  # time, device, share, used_bytes
_SAMPLED = tuple(map(type_prefix, FREQUENT))
GOING_ON = ("running", "stalled")
"""States of a run whose devices are sampled for it."""


END_WIDTH = 0.01
"""Width of the average at the end of a training loss, as a share of the steps so far; that of curves by default."""
END_SHARE = 0.1
"""Share of the steps so far, at their end, that the average reads: ten widths."""


def final_loss(steps: Sequence[float] | Column, losses: Sequence[float | None] | Column) -> float:
    """Return the training loss at the end of a run so far, wherever one is printed, drawn, sorted or judged.

    It is the average of the logged losses with weights `exp(-distance / width)`, where the width is a hundredth of the
    steps so far: the end of the smoothed curve. NaN and infinite losses carry no weight, but the last loss is returned
    as it is if it is not finite. Without a logged step the result is NaN.

    Args:
        steps: the logged steps in rising order, or the tokens or any other cost at them; only the last tenth is read.
        losses: the loss at each of them; None is NaN.
    """
    if not len(steps):
        return math.nan
    last = float(steps[-1])
    first = int(np.searchsorted(np.asarray(steps, dtype=np.float64), (1 - END_SHARE) * last, side="right"))
    first = min(first, len(steps) - 1)
    at, loss = np.array(steps[first:], dtype=np.float64), np.array(losses[first:], dtype=np.float64)
    known = np.isfinite(loss)
    if not known[-1] or last <= 0:
        return float(loss[-1])
    weights = np.exp((at[known] - last) / (END_WIDTH * last))
    return float(weights @ loss[known] / weights.sum())


PACE_S = 300.0
"""Training time, in seconds, over which the speed is taken that tells the time left."""


def recent_pace(seconds: Sequence[float] | Column, steps: Sequence[float] | Column) -> float:
    """Return the training time of a step over the last `PACE_S` seconds, in seconds; NaN for fewer than two steps.

    Args:
        seconds: training time at some last steps, in rising order.
        steps: their numbers.
    """
    known = np.asarray(seconds, dtype=np.float64)
    if len(known) < 2:
        return math.nan
    first = min(int(np.searchsorted(known, known[-1] - PACE_S)), len(known) - 2)
    return float((known[-1] - known[first]) / max(1.0, float(steps[-1]) - float(steps[first])))


SETTLING_STEPS = 10
"""First logged steps that no speed counts: they compile, allocate and fill caches."""
SPEED_STEPS = 4096
"""Largest number of last logged steps over which a speed is taken: those of a block of the log."""


def settled_steps(count: int) -> int:
    """Return how many of the last of `count` logged steps tell a run's speed, wherever one is printed.

    The speed (tokens/s, step time, MFU, waiting for data) is the median over them: all but the first
    `SETTLING_STEPS`, or the first half of fewer, and at most `SPEED_STEPS`.
    """
    return min(count - min(SETTLING_STEPS, count // 2), SPEED_STEPS)


def settled_median(values: Column) -> float:
    """Return the median of the finite ones of these values of settled steps; NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan


class History:
    """The logged steps of a run: read-only float64 columns of equal length, in order of `step`, NaN where unknown.

    `history.loss` and `history["loss"]` are the same column; `workbench.record.columns.COLUMNS` describes each. Those
    that user-defined code logs by `workbench.log_scalar` follow; `scalars` names them. `tokens`, `samples`, `flops`,
    `seconds` and `gpu_hours` count from the start of training, over all devices and over every resumption.

    `begins_after` is the step that the first logged one follows: 0, or that of a checkpoint; None if it is not known.
    """

    def __init__(self, columns: Mapping[str, Column], begins_after: int | None = None) -> None:
        if lacking := {"step", "loss"} - set(columns):
            raise InvalidArgument(
                f"A History of a run has columns step and loss, and {' and '.join(sorted(lacking))} "
                f"{'is' if len(lacking) == 1 else 'are'} missing. run.history() reads that of a run."
            )
        self._columns = columns
        self._begins_after = begins_after

    def __getattr__(self, name: str) -> Column:
        if name.startswith("_"):  # also before there are columns, when a history is copied
            raise AttributeError(name)
        if name not in self._columns:
            raise AttributeError(f"A history has no column {name!r}. {suggestion(name, self._columns)}")
        return self._columns[name]

    def __getitem__(self, name: str) -> Column:
        if name not in self._columns:
            raise UnknownParameter(f"A history has no column {name!r}. {suggestion(name, self._columns)}")
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
        losses = f"loss {self.loss[0]:.4g} → {self.final_loss:.4g}"
        damaged = "".join(f"; damaged: {place}" for place in getattr(self._columns, "damaged", ()))
        return f"History({len(self):,} steps to step {self.step[-1]:.0f}{missing}, {losses}{damaged})"

    def _repr_html_(self) -> str:
        shown = {name: column[np.isfinite(column)] for name, column in self._columns.items() if name != "time"}
        rows = [
            (name, *(f"{value:.5g}" for value in (known[0], known[-1], known.min(), known.max())))
            for name, known in shown.items()
            if len(known)
        ]
        return html.escape(repr(self)) + html_table(("column", "first", "last", "least", "greatest"), rows)

    def last(self, name: str, count: int = 1) -> Column:
        """Return the last values of a column, at most `count`; of a long run, the rest of it need not be read."""
        if isinstance(self._columns, _Steps):
            return self._columns.last(name, count)
        return self[name][-count:]

    def settled(self, name: str) -> Column:
        """Return a column at the steps that tell the run's speed (`settled_steps`)."""
        return self.last(name, settled_steps(len(self)))

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the columns that user-defined code has logged, in order of their first appearance."""
        return tuple(name for name in self if name not in COLUMNS)

    @property
    def final_loss(self) -> float:
        """Return the training loss at the end so far (`final_loss`); of a long run, the rest of it is not read."""
        count = math.ceil(END_SHARE * len(self)) + 1
        return final_loss(self.last("step", count), self.last("loss", count))

    @property
    def missing(self) -> int:
        """Return the number of steps that should be logged before or between others, and are not."""
        distances = np.diff(self.step, prepend=self.step[:1] if self._begins_after is None else self._begins_after)
        if not len(distances):
            return 0
        usual = float(np.median(distances[1:] if len(distances) > 1 else distances))
        return int(sum(distance // usual - 1 for distance in distances if distance > usual))


def columns_of(rows: Sequence[Sequence[float]], width: int) -> Column:
    """Return rows as the columns of a matrix with `width` rows, also if there are none."""
    return np.array(rows, dtype=np.float64).reshape(-1, width).T


def number(value: Any) -> float:
    """Return a figure as a float, NaN if it is unknown."""
    return float("nan") if value is None else float(value)


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
        known = [*(one.name for one in fields(self) if one.name != "metrics"), "perplexity", *self.metrics]
        if name not in known:
            raise UnknownParameter(f"Evaluations have no column {name!r}. {suggestion(name, known)}")
        return np.asarray(self.metrics[name] if name in self.metrics else getattr(self, name))


def last_held_out(evaluations: Any) -> float | None:
    """Return the held-out loss after the most steps; None before the first evaluation after a step.

    `evaluations` holds the columns `step` and `eval_loss`, as `Evaluations` does, or is None.
    """
    if evaluations is None or not len(evaluations["step"]) or evaluations["step"][-1] <= 0:
        return None
    return float(evaluations["eval_loss"][-1])


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


@dataclass(frozen=True, eq=False)
class Patterns:
    """The patterns of a run: float64 columns of equal length, in order of `step`, which begins at 0.

    There is one row before the first step and one after each update; a dense run has none.
    """

    step: Column
    tokens: Column
    flops: Column
    """FLOPs so far, without the products of absent blocks."""
    seconds: Column
    prune_ratio: Column
    """Share of the present blocks that an update at this step prunes."""
    present: Column
    """Share of the blocks of all sparse weights that are present."""
    explored: Column
    """Share of the blocks that are or once were present."""
    moved: Column
    """Share of the present blocks that the last update replaced."""
    weight: str
    """Name of the weight that `pictures` show; empty for a dense run."""
    pictures: tuple[NDArray[np.bool_], ...]
    """Upper left corner of that weight's pattern at each row: True for a block that is present."""

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, name: str) -> Column:
        return np.asarray(getattr(self, name))

    def __repr__(self) -> str:
        if not len(self):
            return "Patterns(none: the weights are dense)"
        return (
            f"Patterns({100 * self.present[-1]:.3g} % of the blocks present, {len(self) - 1:,} updates, "
            f"{100 * self.explored[-1]:.3g} % explored)"
        )


def patterns_of(events: Sequence[SparsityEvent]) -> Patterns:
    """Return the columns of events that are in order of their steps."""

    def column(values: Sequence[float]) -> Column:
        return np.array(values, dtype=np.float64)

    return Patterns(
        step=column([event["step"] for event in events]),
        tokens=column([event["tokens"] for event in events]),
        flops=column([event["flops"] for event in events]),
        seconds=column([event["seconds"] for event in events]),
        prune_ratio=column([event["prune_ratio"] for event in events]),
        present=column([event["present"] / event["blocks"] for event in events]),
        explored=column([event["explored"] / event["blocks"] for event in events]),
        moved=column([event["moved"] / max(1, event["present"]) for event in events]),
        weight=events[0]["weight"] if events else "",
        pictures=tuple(np.array([[block == "#" for block in row] for row in event["pattern"]]) for event in events),
    )


SHOWN_STEPS = 5
"""Number of steps that the table of a notebook shows: the first, the last, and some between."""


@dataclass(frozen=True, repr=False)
class TextSamples:
    """Samples of text of one run, in order of the step after which they were written."""

    events: tuple[SamplesEvent, ...] = field(repr=False, default=())

    @property
    def steps(self) -> list[int]:
        """Return the steps after which samples were written."""
        return [event["step"] for event in self.events]

    def at(self, step: float) -> SamplesEvent | None:
        """Return the last samples that were written at or before a step; None if there are none."""
        return next((event for event in reversed(self.events) if event["step"] <= step), None)

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[SamplesEvent]:
        return iter(self.events)

    def __getitem__(self, index: int) -> SamplesEvent:
        return self.events[index]

    def __repr__(self) -> str:
        if not self.events:
            return "TextSamples(none yet)"
        written = ((event["step"], each) for event in self.events for each in event["samples"])
        return "\n".join(f"step {step:,}: {sample['prompt']} | {answer(sample)}" for step, sample in written)

    def _repr_html_(self) -> str:
        last = len(self.events) - 1
        shown = sorted({round(index * last / (SHOWN_STEPS - 1)) for index in range(SHOWN_STEPS)}) if last >= 0 else []
        return table_html([self.events[index] for index in shown])


def answer(sample: TextSample) -> str:
    """Return what the model wrote: a text, or the tokens for each mask with their probabilities in percent."""
    if "masks" not in sample:
        return sample.get("text", "")
    guesses = (", ".join(f"{token} {probability:.1%}" for token, probability in mask) for mask in sample["masks"])
    return "; ".join(guesses)


def table_html(events: list[SamplesEvent]) -> str:
    """Return a table of samples for a notebook; a rising step from top to bottom."""
    rows = [(f"{event['step']:,}", sample["prompt"], answer(sample)) for event in events for sample in event["samples"]]
    if not rows:
        return "no samples yet"
    return html_table(("step", "prompt", "what the model wrote"), rows, f"{STYLE};white-space:pre-wrap")


# Reading the log


class _Attempt(NamedTuple):
    """Seconds and GPU-hours before a start of a run, and its devices, from which the GPU-hours of its steps follow."""

    seconds: float = 0.0
    gpu_hours: float = 0.0
    devices: int = 1

    def hours(self, seconds: Column | float) -> Any:
        return self.gpu_hours + (seconds - self.seconds) * self.devices / HOUR


class _Span(NamedTuple):
    """Consecutive rows of the table, written by one attempt, whose steps rise."""

    first: int
    end: int
    attempt: _Attempt


class _Steps(Mapping[str, Column]):
    """The columns of a run's steps in order: spans of its table, read when they are asked for.

    Immutable, so that whoever has it finds the same steps later; those that it grows into share what was read.
    """

    def __init__(
        self, table: StepTable, spans: Sequence[_Span] = (), read: dict[str, GrowingTable] | None = None
    ) -> None:
        self._table, self._spans, self._read = table, tuple(spans), {} if read is None else read
        self.count = sum(span.end - span.first for span in spans)
        """Number of steps."""

    def __iter__(self) -> Iterator[str]:
        return iter((*COLUMNS, *(name for name in self._table.names if name not in COLUMNS)))

    def __contains__(self, name: object) -> bool:
        return name in COLUMNS or name in self._table.names

    def __len__(self) -> int:
        return len(list(iter(self)))

    @property
    def damaged(self) -> tuple[str, ...]:
        """Places that differ from what was written, as far as they were read."""
        return tuple(self._table.damaged)

    def __getitem__(self, name: str) -> Column:
        if name not in self:
            raise KeyError(name)
        with self._table.lock:  # threads draw what another one follows
            read, start = self._read.setdefault(name, GrowingTable(1)), 0
            for span in self._spans:
                if start + span.end - span.first > read.length:
                    read.append(self._values(name, span, span.first + read.length - start)[None])
                start += span.end - span.first
            return read.view()[0, : self.count]

    def last(self, name: str, count: int) -> Column:
        """Return the last values of a column, at most `count`; the rest of it is not read."""
        if name in self._read:
            return self[name][-count:]
        parts = list[Column]()
        for span in reversed(self._spans):
            if count > 0:
                parts.append(self._values(name, span, max(span.first, span.end - count)))
                count -= len(parts[-1])
        return np.concatenate([np.empty(0), *reversed(parts)])

    def _values(self, name: str, span: _Span, first: int) -> Column:
        if name == "gpu_hours":
            return np.asarray(span.attempt.hours(self._table.column("seconds", first, span.end)))
        return self._table.column(name, first, span.end)

    def grown(self, span: _Span, steps: Column) -> _Steps:
        """Return these steps and those of a span, whose column `step` was read."""
        with self._table.lock:
            read = self._read.setdefault("step", GrowingTable(1))
            if read.length == self.count:
                read.append(steps[None])
        *before, last = self._spans or (span._replace(end=span.first),)
        joins = last.end == span.first and last.attempt is span.attempt
        return _Steps(
            self._table, [*before, last._replace(end=span.end)] if joins else [*self._spans, span], self._read
        )

    def cut(self, length: int) -> _Steps:
        """Return the first `length` steps."""
        kept = list[_Span]()
        for span in self._spans:
            if length > 0:
                kept.append(span._replace(end=min(span.end, span.first + length)))
            length -= span.end - span.first
        return _Steps(self._table, kept)


class _Samples:
    """The samples of devices, parsed when somebody asks for them: in a long run, most lines of `events.jsonl`."""

    def __init__(self) -> None:
        self._lines = list[bytes]()
        self._rows, self._names, self._device_type = GrowingTable(_SAMPLE_ROWS), dict[str, int](), ""

    def add(self, line: bytes) -> None:
        self._lines.append(line)

    def columns(self) -> Utilization:
        """Return all samples; one that names no device or no utilisation says nothing."""
        rows, lines = list[tuple[float, ...]](), self._lines
        self._lines = []
        for line in lines:
            event: Any = parse_event(line)
            with contextlib.suppress(AttributeError, KeyError, OverflowError, TypeError, ValueError):
                prefix = f"node {event['node']}, " if event.get("node") is not None else ""
                values = zip(event["names"], event["shares"], event["used_bytes"], strict=True)
                found = [(f"{prefix}{name}", number(share), number(used)) for name, share, used in values]
                at, self._device_type = float(event["time"]), event["device_type"]
                rows += [(at, self._names.setdefault(n, len(self._names)), share, used) for n, share, used in found]
        self._rows.append(columns_of(rows, _SAMPLE_ROWS))
        return Utilization(self._device_type, tuple(self._names), *self._rows.view())

    def cut_after(self, moment: float) -> None:
        """Forget the samples after a moment."""
        self._rows.cut(int(np.searchsorted(self.columns().time, moment, side="right")))


class HistoryTail:
    """A reader of a growing log; each `read()` costs only what has arrived since the last one."""

    def __init__(self, path: Path) -> None:
        """`path` is that of `events.jsonl`, beside which the table of the steps lies."""
        self.state = RunState()
        """State of the run by its events so far, without the steps and the samples of devices, which become columns."""
        self._events, self._table = EventTail(path), StepTable(path.parent)
        self._steps, self._samples, self._rows = _Steps(self._table), _Samples(), 0
        self._attempts, self._training = [_Attempt()], False
        self._begins_after: int | None = None  # the step of the checkpoint that the first step kept follows
        self._evaluated: tuple[Any, Evaluations] = (None, self._columns_of({}))

    def read(self) -> History:
        """Return the history so far; arrays that were handed out earlier never change."""
        rows = self._table.refresh()  # before the events, so that the `start` of each of these rows is read
        fresh = list[Mapping[str, Any]]()
        for line in self._events.lines():
            event = None if line.startswith(_SAMPLED) else parse_event(line)
            if event is None or event["type"] == "device":
                self._events.damaged += not line.startswith(_SAMPLED) and event is None
                if self._training and line.startswith(_SAMPLED[0]):
                    self._samples.add(line)
                continue
            fresh.append(event)
            if event["type"] == "start":
                before = event.get("rows", 0)
                if before > rows:
                    rows = min(before, self._table.refresh())
                self._append(min(before, rows))
                self.state, fresh = self.state.after(fresh), []
                if len(self.state.starts) == len(self._attempts):  # else the line stands in the file twice
                    self._restart(event)
            elif event["type"] == "end" or (event["type"] == "status" and event["state"] not in GOING_ON):
                self._training = False
        self._append(rows)
        state = self.state.after(fresh)
        self.state = replace(state, offset=self._events.offset, damaged=self._events.damaged)
        return History(self._steps, self._begins_after)

    @property
    def utilization(self) -> Utilization:
        """Return how busy the devices were, as far as `read()` has come."""
        return self._samples.columns()

    @property
    def evaluations(self) -> Evaluations:
        """Return the held-out losses, as far as `read()` has come."""
        found = self.state.evaluations
        if self._evaluated[0] is found:  # a live view asks several times a second
            return self._evaluated[1]
        computed = [found[step].event.get("metrics") or {} for step in sorted(found)]
        names = dict.fromkeys(name for values in computed for name in values)
        metrics = {name: np.array([number(values.get(name)) for values in computed]) for name in names}
        self._evaluated = found, replace(self._columns_of(found), metrics=metrics)
        return self._evaluated[1]

    def evaluations_on(self, data: str) -> Evaluations:
        """Return the losses on data that `run.evaluate` was given, by its name, as far as `read()` has come."""
        return self._columns_of({step: noted for (name, step), noted in self.state.on_data.items() if name == data})

    def _columns_of(self, found: Mapping[int, Noted]) -> Evaluations:
        rows = list[Sequence[float]]()
        for _, (event, attempt) in sorted(found.items()):
            figures = {name: number(event.get(name)) for name in EVALUATED}
            rows.append([*figures.values(), self._attempts[attempt].hours(figures["seconds"])])
        return Evaluations(*columns_of(rows, len(EVALUATED) + 1))

    @property
    def texts(self) -> TextSamples:
        """Return the samples of text, as far as `read()` has come."""
        return TextSamples(tuple(noted.event for _, noted in sorted(self.state.texts.items())))

    @property
    def patterns(self) -> Patterns:
        """Return the patterns of sparse weights, as far as `read()` has come."""
        return patterns_of([noted.event for _, noted in sorted(self.state.patterns.items())])

    def _restart(self, event: StartEvent) -> None:
        """Drop the steps that the new attempt repeats: those after its checkpoint, or all in a fresh start."""
        devices = event.get("devices")
        count = devices if isinstance(devices, int) else len(devices or ()) or int(event.get("world") or 1)
        self._training = True
        resumed = resumed_step(event.get("resumed_from"))
        self._forget_after(resumed)
        if not self._steps.count:
            self._begins_after = resumed
        seconds, hours = self._steps["seconds"], self._steps["gpu_hours"]
        last = np.flatnonzero(np.isfinite(hours))[-1:]
        before = (float(seconds[last[0]]), float(hours[last[0]])) if len(last) else (0.0, 0.0)
        self._attempts.append(_Attempt(*before, count))
        self._samples.cut_after(self._last("time") if self._steps.count else -math.inf)

    def _append(self, end: int) -> None:
        """Append the rows up to `end` that are not lost.

        Those whose numbers do not rise were repeated without a `start` and replace earlier ones.
        """
        before, self._rows = self._rows, max(self._rows, end)
        for first, until in self._table.held(before, self._rows):
            steps = self._table.column("step", first, until)
            edges = np.flatnonzero(~(steps[1:] > steps[:-1])) + 1  # also before and after a row that is lost, a NaN
            for low, high in itertools.pairwise([0, *edges.tolist(), len(steps)]):
                if low < high and np.isfinite(steps[low]):
                    self._forget_after(int(np.ceil(steps[low])) - 1)
                    span = _Span(first + low, first + high, self._attempts[-1])
                    self._steps = self._steps.grown(span, steps[low:high])

    def _last(self, name: str) -> float:
        return float(self._steps.last(name, 1)[0])

    def _forget_after(self, step: int) -> None:
        if self._steps.count and self._last("step") > step:
            self._steps = self._steps.cut(int(np.searchsorted(self._steps["step"], step, side="right")))


def read_tail(path: Path) -> HistoryTail:
    """Return a reader that has read all of an `events.jsonl`."""
    tail = HistoryTail(path)
    tail.read()
    return tail
