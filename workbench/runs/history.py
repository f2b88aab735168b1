"""The measurements of a run as NumPy columns, read from its events."""

from __future__ import annotations

import html
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.columns import COLUMNS
from workbench.display import STYLE, html_table
from workbench.errors import suggestion
from workbench.events import (
    SamplesEvent,
    SparsityEvent,
    StartEvent,
    TextSample,
)
from workbench.runs.event_log import (
    LOGGED,
    EventBlock,
    KeptSteps,
    Noted,
    RunState,
    columns_of,
    number,
    read_blocks,
    resumed_step,
)

Column = NDArray[np.float64]
_ROWS = {name: row for row, name in enumerate((*LOGGED, "gpu_hours"))}
_STEP, _TIME, _SECONDS, _GPU_HOURS = (_ROWS[name] for name in ("step", "time", "seconds", "gpu_hours"))
_SAMPLE_ROWS = 4  # time, device, share, used_bytes
_FIRST_ROOM = 1024  # columns
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


class History:
    """The logged steps of a run: read-only float64 columns of equal length, in order of `step`, NaN where unknown.

    `history.loss` and `history["loss"]` are the same column; `workbench.columns.COLUMNS` describes each. Those that
    user-defined code logs by `workbench.log_scalar` follow; `scalars` names them. `tokens`, `samples`, `flops`,
    `seconds` and `gpu_hours` count from the start of training, over all devices and over every resumption.

    `begins_after` is the step that the first logged one follows: 0, or that of a checkpoint; None if it is not known.
    """

    def __init__(self, columns: Mapping[str, Column], begins_after: int | None = None) -> None:
        self._columns = columns
        self._begins_after = begins_after

    def __getattr__(self, name: str) -> Column:
        if name.startswith("_") or name not in self._columns:
            raise AttributeError(f"A history has no column {name!r}. {suggestion(name, self)}")
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
            f"loss {self.loss[0]:.4g} → {self.final_loss:.4g})"
        )

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
        if isinstance(self._columns, _RunColumns):
            return self._columns.last(name, count)
        return self[name][-count:]

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


# Reading the events


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

    def cut(self, length: int) -> None:
        if length < self.length:
            self._values = self._values[:, :length].copy()  # columns handed out earlier keep their rows
            self.length = length


class _Attempt(NamedTuple):
    """Seconds and GPU-hours before a start of a run, and its devices, from which the GPU-hours of its steps follow."""

    seconds: float = 0.0
    gpu_hours: float = 0.0
    devices: int = 1

    def hours(self, seconds: Column | float) -> Any:
        return self.gpu_hours + (seconds - self.seconds) * self.devices / 3600


class _KeptPart(NamedTuple):
    """Some consecutive steps of one attempt that are kept beside the events."""

    steps: KeptSteps
    first: int
    end: int
    attempt: _Attempt

    scalars: tuple[str, ...] = ()

    def row(self, row: int | str) -> Column:
        """Return a figure by its row, or a scalar by its name."""
        if row == _GPU_HOURS:
            return np.asarray(self.attempt.hours(self.row(_SECONDS)))
        if isinstance(row, str):
            if row not in self.scalars:
                return np.full(self.end - self.first, math.nan)
            row = len(LOGGED) + self.scalars.index(row)
        return self.steps[row][self.first : self.end]


class _Steps:
    """The steps of a run in order: first kept ones, of which a row is read when it is asked for, then those in memory.

    Steps are only added, so that whoever remembers a length finds the same steps later; `without` returns another
    object.
    """

    def __init__(
        self,
        kept: Sequence[_KeptPart] = (),
        memory: Column | None = None,
        scalars: Mapping[str, Column] = MappingProxyType({}),
    ) -> None:
        self._kept, self._num_kept = list(kept), sum(part.end - part.first for part in kept)
        self._memory, self._read = _Table(len(_ROWS)), dict[int | str, _Table]()
        self._scalars: dict[str, _Table] = {}
        """Scalars of the steps in memory, NaN where a step has none."""
        self._lock = threading.Lock()  # threads draw what another one follows
        if memory is not None:
            self._memory.append(memory)
            self._append_scalars(scalars)

    def __len__(self) -> int:
        return self._num_kept + self._memory.length

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of all scalars."""
        return tuple(dict.fromkeys((*(name for part in self._kept for name in part.scalars), *self._scalars)))

    def row(self, row: int | str, length: int | None = None) -> Column:
        """Return one row, by default of all steps; a scalar goes by its name."""
        if not self._kept:
            return self._in_memory(row)[:length]
        with self._lock:
            if row not in self._read:
                self._read[row] = _Table(1)
                self._read[row].reserve(len(self))
            read, start = self._read[row], 0
            for part in self._kept:
                if start >= read.length:
                    read.append(part.row(row)[None])
                start += part.end - part.first
            read.append(self._in_memory(row)[None, read.length - start :])
            return read.view()[0, :length]

    def last(self, row: int | str, count: int, length: int) -> Column:
        """Return the last values of a row of the first `length` steps, at most `count`."""
        in_memory = length - self._num_kept
        if self._kept and in_memory < count:
            part = self._kept[-1]
            if row not in {_STEP, *self._read} and in_memory == 0 and part.end - part.first >= count:
                return part.row(row)[-count:]
            return self.row(row, length)[-count:]
        return self._in_memory(row)[max(0, in_memory - count) : in_memory]

    def _in_memory(self, row: int | str) -> Column:
        if isinstance(row, str) and row not in self._scalars:
            return np.full(self._memory.length, math.nan)
        return np.asarray(self._scalars[row].view()[0] if isinstance(row, str) else self._memory.view()[row])

    def reserve(self, steps: int) -> None:
        self._memory.reserve(steps)

    def append(self, steps: Column, hours: Column, scalars: Mapping[str, Column]) -> None:
        self._memory.append(steps, hours[None])
        self._append_scalars(scalars)

    def _append_scalars(self, scalars: Mapping[str, Column]) -> None:
        """Let scalars follow the steps in memory, of which these are the last."""
        for name in {**self._scalars, **scalars}:
            table = self._scalars.setdefault(name, _Table(1))
            new = scalars.get(name, np.empty(0))
            missing = self._memory.length - table.length - len(new)
            table.append(np.concatenate([np.full(missing, math.nan), new])[None])

    def keep(self, part: _KeptPart) -> bool:
        """Append kept steps; return False if steps in memory come before them."""
        if self._memory.length:
            return False
        self._kept.append(part)
        self._num_kept += part.end - part.first
        return True

    def without(self, length: int) -> _Steps:
        """Return the first `length` steps."""
        kept, left = list[_KeptPart](), length
        for part in self._kept:
            if left > 0:
                kept.append(part._replace(end=min(part.end, part.first + left)))
            left -= part.end - part.first
        left = max(0, left)
        scalars = {name: table.view()[0, :left] for name, table in self._scalars.items()}
        return _Steps(kept, self._memory.view()[:, :left], scalars)

    def with_inserted(self, step: Column, scalars: Mapping[str, float]) -> _Steps:
        """Return all steps in memory and one more in its place, unless one of this number exists."""
        at = int(np.searchsorted(self.row(_STEP), step[_STEP]))
        if self.row(_STEP)[at] == step[_STEP]:
            return self
        names = dict.fromkeys((*self.scalars, *scalars))
        own = {name: np.insert(self.row(name), at, scalars.get(name, math.nan)) for name in names}
        return _Steps(memory=np.insert([self.row(row) for row in _ROWS.values()], at, step, axis=1), scalars=own)


class _RunColumns(Mapping[str, Column]):
    """The columns of the first `length` steps of a run."""

    def __init__(self, steps: _Steps) -> None:
        self._steps, self._length = steps, len(steps)
        self._rows: dict[str, int | str] = {name: _ROWS[name] for name in COLUMNS}
        self._rows |= {name: name for name in steps.scalars}

    def __getitem__(self, name: str) -> Column:
        return self._steps.row(self._rows[name], self._length)

    def last(self, name: str, count: int) -> Column:
        return self._steps.last(self._rows[name], count, self._length)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class HistoryTail:
    """A reader of a growing `events.jsonl`; each `read()` costs only what has arrived since the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.state = RunState()
        """State of the run by its events so far, without the steps and the samples of devices, which become columns."""
        self._steps, self._samples = _Steps(), _Table(_SAMPLE_ROWS)
        self._attempts, self._training = [_Attempt()], False
        self._begins_after: int | None = None  # the step of the checkpoint that the first step kept follows
        self._device_type, self._names = "", dict[str, int]()
        self._evaluated: tuple[Any, Evaluations] = (None, self._columns_of({}))

    def read(self) -> History:
        """Return the history so far; arrays that were handed out earlier never change."""
        for block in read_blocks(self._path, self.state.offset):
            self._take(block)
        return History(_RunColumns(self._steps), self._begins_after)

    @property
    def utilization(self) -> Utilization:
        """Return how busy the devices were, as far as `read()` has come."""
        return Utilization(self._device_type, tuple(self._names), *self._samples.view())

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
        rows = [
            [*(number(event.get(name)) for name in EVALUATED), self._attempts[attempt].hours(event["seconds"])]
            for _, (event, attempt) in sorted(found.items())
        ]
        return Evaluations(*columns_of(rows, len(EVALUATED) + 1))

    @property
    def texts(self) -> TextSamples:
        """Return the samples of text, as far as `read()` has come."""
        return TextSamples(tuple(noted.event for _, noted in sorted(self.state.texts.items())))

    @property
    def patterns(self) -> Patterns:
        """Return the patterns of sparse weights, as far as `read()` has come."""
        return patterns_of([noted.event for _, noted in sorted(self.state.patterns.items())])

    def _take(self, block: EventBlock) -> None:
        end = self.state.offset + block.num_bytes
        if isinstance(block.steps, np.ndarray) and block.steps.shape[1] and not len(self._steps):
            bytes_left = self._path.stat().st_size - end
            self._steps.reserve(int(block.steps.shape[1] * (1 + 1.05 * bytes_left / block.num_bytes)))
        taken = sampled = 0
        fresh = list[Mapping[str, Any]]()
        for line, steps_before, event in block.others:
            fresh.append(event)
            if event["type"] == "start":
                self._append(block.steps, taken, steps_before, block.scalars)
                taken, sampled = steps_before, self._append_samples(block, sampled, line)
                self.state, fresh = self.state.after(fresh), []
                if len(self.state.starts) == len(self._attempts):  # else the line stands in the file twice
                    self._restart(event)
            elif event["type"] == "end" or (event["type"] == "status" and event["state"] not in GOING_ON):
                sampled = self._append_samples(block, sampled, line)
                self._training = False
        self._append(block.steps, taken, block.steps.shape[1], block.scalars)
        self._append_samples(block, sampled)
        state = self.state.after(fresh)
        self.state = replace(state, offset=end, damaged=state.damaged + block.damaged)

    def _restart(self, event: StartEvent) -> None:
        """Drop the steps that the new attempt repeats: those after its checkpoint, or all in a fresh start."""
        devices = event.get("devices")
        count = devices if isinstance(devices, int) else len(devices or ()) or int(event.get("world") or 1)
        self._training = True
        resumed = resumed_step(event.get("resumed_from"))
        self._forget_after(resumed)
        if not len(self._steps):
            self._begins_after = resumed
        hours = self._steps.row(_GPU_HOURS)
        finite = np.flatnonzero(np.isfinite(hours))
        before = (float(self._steps.row(_SECONDS)[finite[-1]]), float(hours[finite[-1]])) if len(finite) else (0.0, 0.0)
        self._attempts.append(_Attempt(*before, count))
        last = self._last(_TIME) if len(self._steps) else -np.inf
        self._samples.cut(int(np.searchsorted(self._samples.view()[0], last, side="right")))

    def _append(self, steps: Column | KeptSteps, first: int, end: int, names: tuple[str, ...]) -> None:
        """Append steps, whose last rows are the scalars `names`.

        Those whose numbers do not rise were repeated without a `start` and replace earlier ones. A line that stands in
        the wrong place is older than the line before it. It fills a gap or says nothing new.
        """
        if first == end:
            return
        numbers = steps[_STEP][first:end]
        repeats = np.flatnonzero(np.diff(numbers) <= 0) + 1
        rises = not len(repeats) and (not len(self._steps) or numbers[0] > self._last(_STEP))
        part = _KeptPart(steps, first, end, self._attempts[-1], names) if isinstance(steps, KeptSteps) else None
        if part is not None and rises and self._steps.keep(part):
            return
        matrix = steps if isinstance(steps, np.ndarray) else np.array([steps[row] for row in range(steps.shape[0])])
        for every in np.split(matrix[:, first:end], repeats, axis=1):
            rising, scalars = every[: len(LOGGED)], every[len(LOGGED) :]
            hours = self._attempts[-1].hours(rising[_SECONDS])
            # A line in the wrong place is neither of a later step than the last one nor written later than that.
            while (
                rising.shape[1]
                and len(self._steps)
                and all(rising[row, 0] <= self._last(row) for row in (_STEP, _TIME))
            ):
                own = dict(zip(names, scalars[:, 0].tolist(), strict=True))
                self._steps = self._steps.with_inserted(np.append(rising[:, 0], hours[0]), own)
                rising, hours, scalars = rising[:, 1:], hours[1:], scalars[:, 1:]
            if rising.shape[1]:
                self._forget_after(int(np.ceil(rising[_STEP, 0])) - 1)
                self._steps.append(rising, hours, dict(zip(names, scalars, strict=True)))

    def _last(self, row: int) -> float:
        return float(self._steps.last(row, 1, len(self._steps))[0])

    def _forget_after(self, step: int) -> None:
        if len(self._steps) and self._last(_STEP) > step:
            self._steps = self._steps.without(int(np.searchsorted(self._steps.row(_STEP), step, side="right")))

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


def read_tail(path: Path) -> HistoryTail:
    """Return a reader that has read all of an `events.jsonl`."""
    tail = HistoryTail(path)
    tail.read()
    return tail
