"""One run as a dashboard sees it, read incrementally. Nothing of this module is a widget; one thread owns a reader."""

from __future__ import annotations

import contextlib
import html
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from workbench.analysis.curve import Curve, Look, Mark
from workbench.base.errors import RunFailed
from workbench.base.units import time_left
from workbench.record.event_log import Status, mark_step
from workbench.record.history import (
    END_SHARE,
    SETTLING_STEPS,
    Evaluations,
    History,
    HistoryTail,
    TextSamples,
    Utilization,
    last_held_out,
    recent_pace,
    settled_median,
)
from workbench.record.rundir import read_record
from workbench.runs.launching.processes import Processes, run_failed
from workbench.runs.loss_basis import LossBasis, read_loss_basis, why_not_compared
from workbench.runs.registry import data_wait
from workbench.runs.run import Run, progress_words, step_text
from workbench.runs.status import status_of
from workbench.sweeps.queue import Group, Setting

SHOWN_WAIT = 0.02
"""Share of the time that a run waits for data from which its line of facts says so."""
STATUS_S = 0.5
"""Seconds between two looks at which processes are alive; events are read each time."""

STATE_COLORS = {
    "queued": "#6B7280",
    "starting": "#9A6B00",
    "running": "#0072B2",
    "stalled": "#A04000",
    "finished": "#00785A",
    "stopped": "#5B6472",
    "failed": "#B3261E",
}
"""Colour of a run's state, in notebooks and in the sidebar."""


def state_color(words: str) -> str:
    """Return the colour of a state in words (`state_in_words`); a loss that is not finite has that of a failure."""
    return STATE_COLORS.get(words.rpartition(", ")[2], STATE_COLORS["failed"])


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment."""

    name: str
    status: Status
    steps: int | None
    """Number of steps that the experiment asks for."""
    history: History
    phase: str
    """The phase that rank 0 finished last before its first step (`capture`, `build`, ...), or empty."""
    failure: RunFailed | None
    marks: tuple[Mark, ...] = ()
    """Checkpoints and resumptions."""
    memory: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """The latest `memory` event of each rank."""
    resumable: bool = False
    """True if the run ended early and left a checkpoint."""
    utilization: Utilization | None = None
    """Samples of how busy the run's devices were."""
    evaluations: Evaluations | None = None
    """The held-out losses."""
    basis: LossBasis | None = None
    """The facts on which its losses depend; None if they are unknown."""
    texts: TextSamples = field(default_factory=TextSamples)
    """Samples of the text that the model writes."""
    look: Look | None = None
    """The look of its curves; None are the colours of its place among the others."""

    @property
    def step(self) -> int:
        """The last logged step; 0 before the first one."""
        return int(self.history.step[-1]) if len(self.history) else 0

    @property
    def progress(self) -> float:
        """The finished share of all steps, from 0 to 1."""
        return min(1.0, self.step / self.steps) if self.steps else 0.0

    @cached_property
    def training_loss(self) -> float:
        """The training loss at its end so far; NaN before the first step."""
        return self.history.final_loss

    @cached_property
    def eta_s(self) -> float | None:
        """Seconds of training left at the speed of the last minutes; None before two steps, when stalled or ended."""
        if self.status.final or self.status.state == "stalled" or self.steps is None or len(self.history) < 2:
            return None
        count = math.ceil(END_SHARE * len(self.history)) + SETTLING_STEPS
        seconds, step = (self.history.last(name, count) for name in ("seconds", "step"))
        per_step = recent_pace(seconds, step)
        return per_step * (self.steps - float(step[-1])) if math.isfinite(per_step) else None

    @property
    def facts(self) -> str:
        """`"3 min left · step 812 of 2,000 · loss 4.31 · 82.1 k tokens/s · MFU 41 %"`, as far as known.

        A narrow window cuts the end off, so the time left comes first.
        """
        if not len(self.history):
            return f"{self.phase} done, first step to come" if self.phase else "no step yet"
        speeds = {name: settled_median(self.history.settled(name)) for name in ("tokens_per_s", "mfu")}
        row: Any = {name: value if math.isfinite(value) else None for name, value in speeds.items()}
        row |= {"step": self.step, "steps": self.steps}
        row["training_loss"], row["eval_loss"] = self.training_loss, last_held_out(self.evaluations)
        parts = [f"step {step_text(row)}", *progress_words(row)]
        waiting = data_wait(self.history)
        if waiting >= SHOWN_WAIT:
            parts.append(f"waiting for data {waiting:.0%}")
        if self.eta_s is not None:
            parts.insert(0, f"{time_left(self.eta_s)} left")
        return " · ".join(parts)

    @property
    def curve(self) -> Curve:
        """The run as figures take it."""
        return Curve(self.name, self.history, self.marks, self.evaluations, self.basis, self.look)

    @property
    def failure_html(self) -> str:
        """The worker's error with its traceback folded below; empty for a run that did not fail."""
        if self.failure is None:
            return ""
        first, _, rest = str(self.failure).partition("\n")
        traceback = html.escape(rest.strip())
        folded = f"<details><summary>traceback</summary><pre>{traceback}</pre></details>" if traceback else ""
        return f"<b>{html.escape(self.name)}</b>: <span>{html.escape(first)}</span>{folded}"


AVERAGED_FROM = 0.9
"""Least share of the steps of the farthest seed of a setting from which a run is averaged with it."""


@dataclass(frozen=True)
class Fold:
    """Runs of a sweep, of a grid, or seeds of one recipe, as one row and in one colour."""

    group: Group
    members: tuple[int, ...]
    """Places of the runs among those of the view."""
    settings: Mapping[Setting, tuple[int, ...]]
    """Runs that differ in their seed alone, by their other labels."""
    averaged: frozenset[int]
    """Runs whose mean stands for their setting: those that have come about as far as the farthest of it."""
    best: Setting | None
    """The setting of the lowest loss, the mean over its seeds; None without a loss, or if the losses do not compare."""
    words: str
    """The best setting with its loss in words, or that the losses do not compare; empty without a loss."""

    @classmethod
    def of(cls, members: Mapping[int, Group], snapshots: Sequence[Snapshot]) -> Fold:
        """Return the fold of runs of one group by their places."""
        settings: dict[Setting, tuple[int, ...]] = {}
        for index, group in members.items():
            settings[group.setting] = (*settings.get(group.setting, ()), index)
        begun = {index: snapshots[index] for index in members if snapshots[index].step}
        held_out = {index: last_held_out(snapshot.evaluations) for index, snapshot in begun.items()}
        is_held_out = bool(begun) and None not in held_out.values()
        found = held_out if is_held_out else {index: snapshot.training_loss for index, snapshot in begun.items()}
        losses = {index: loss for index, loss in found.items() if loss is not None and math.isfinite(loss)}
        means, averaged = dict[Setting, float](), set[int]()
        for setting, runs in settings.items():
            least = AVERAGED_FROM * max(snapshots[index].step for index in runs)
            far = [index for index in runs if index in losses and snapshots[index].step >= least]
            if far:
                means[setting] = sum(losses[index] for index in far) / len(far)
            averaged |= set(far) if len(far) > 1 else set()
        best, words = min(means, key=lambda setting: means[setting], default=None), ""
        if why_not_compared([snapshots[index].basis for index in losses], is_held_out):
            best, words = None, "their losses do not compare"
        fold = cls(group, tuple(members), settings, frozenset(averaged), best, words)
        if best is None:
            return fold
        seeds = len(averaged.intersection(settings[best]))
        words = f"best {fold.named(best)}: " if len(settings) > 1 else ""
        words += f"{'held-out loss' if is_held_out else 'loss'} {means[best]:.4g}"
        return replace(fold, words=f"{words}, mean of {seeds} seeds" if seeds else words)

    def named(self, setting: Setting) -> str:
        """Return what tells a setting from the others of the group."""
        first = next(iter(self.settings))
        varied = {name for each in self.settings for name, value in each if (name, value) not in first}
        return " · ".join(f"{name} {value}" for name, value in setting if name in varied) or self.group.name

    @property
    def entry(self) -> str:
        """The words of the fold in a legend."""
        if len(self.settings) > 1 and self.best is not None:
            return f"{self.group.name}: best of {len(self.settings)}, {self.named(self.best)}"
        return f"{self.group.name}: {len(self.members)} {'seeds' if len(self.settings) == 1 else 'runs'}"


def folds_of(snapshots: Sequence[Snapshot], groups: Sequence[Group | None]) -> list[Fold]:
    """Return the folds of runs by their groups, with what is best of each by now."""
    members: dict[str, dict[int, Group]] = {}
    for index, group in enumerate(groups):
        if group is not None:
            members.setdefault(group.id, {})[index] = group
    return [Fold.of(each, snapshots) for each in members.values()]


def with_looks(snapshots: Sequence[Snapshot], folds: Sequence[Fold]) -> list[Snapshot]:
    """Return the snapshots as they are drawn: those of a fold in its colour, of which the best setting stands out."""
    of = {index: fold.group.id for fold in folds for index in fold.members}
    numbers: dict[int | str, int] = {}
    looks = [Look(numbers.setdefault(of.get(index, index), len(numbers))) for index in range(len(snapshots))]
    for fold in folds:
        leading = fold.members if fold.best is None else fold.settings[fold.best]
        named = next((index for index in leading if index in fold.averaged), leading[0])
        for setting, runs in fold.settings.items():
            repeated = fold.named(setting) if len(runs) > 1 else None
            for index in runs:
                entry, is_best = fold.entry if index == named else "", setting == fold.best
                looks[index] = Look(looks[index].index, entry, True, is_best, repeated, index in fold.averaged)
    return [
        each if each.look == look else replace(each, look=look) for each, look in zip(snapshots, looks, strict=True)
    ]


def panel_inputs(
    snapshots: Sequence[Snapshot],
) -> tuple[list[Curve], list[Mapping[int, Mapping[str, Any]]], list[Utilization | None]]:
    """Return what the figures of a dashboard draw: the curve, the peak memory and the utilisation of each run."""
    return [s.curve for s in snapshots], [s.memory for s in snapshots], [s.utilization for s in snapshots]


class RunReader:
    """Reads one run through a tail of its own, so that no other reader of the run interferes."""

    def __init__(self, path: Path) -> None:
        self.run = Run(path)
        self._directory = self.run.directory
        self._tail, self._stamp = HistoryTail(self._directory.events), ""
        self._marks: tuple[Mark, ...] = ()
        self._starts = -1
        self._steps: int | None = None
        self._looked_at = -math.inf

    @cached_property
    def _basis(self) -> LossBasis | None:
        return read_loss_basis(self._directory)

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.run.name

    def read(self) -> Snapshot:
        """Return the present state; a final one has all its steps."""
        self._stamp = self._directory.log_stamp  # before the events are read: what comes meanwhile is news
        before, is_due = self._tail.state, time.monotonic() - self._looked_at >= STATUS_S
        there = Processes.of(self._directory) if is_due else None
        history, state = self._tail.read(), self._tail.state
        if there is None and (state.status != before.status or state.starts != before.starts):
            there = Processes.of(self._directory)
            history, state = self._tail.read(), self._tail.state  # what those that left have written last
        if there is not None:
            self._status, self._looked_at = status_of(self._directory, state, there), time.monotonic()
            if self._status.final:  # steps that were written while the events were read
                history, state = self._tail.read(), self._tail.state
        if len(state.starts) != self._starts:  # a new attempt may be asked for another number of steps
            self._starts, self._steps = len(state.starts), None
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                self._steps = int(read_record(self._directory.experiment)["steps"])
        if state.marks != before.marks:
            self._marks = tuple(map(_mark, state.marks))
        status = self._status
        step = int(history.step[-1]) if len(history) else 0
        ended_early = status.final and self._steps is not None and step < self._steps
        checkpoints = (int(mark.step) for mark in reversed(self._marks) if mark.type == "checkpoint")
        return Snapshot(
            name=self.name,
            status=status,
            steps=self._steps,
            history=history,
            phase="" if state.phase is None else state.phase["name"],
            failure=run_failed(self._directory, status.message) if status.state == "failed" else None,
            marks=self._marks,
            memory=state.memory,
            resumable=ended_early and any(self._directory.checkpoint(at).is_dir() for at in checkpoints),
            utilization=self._tail.utilization,
            evaluations=self._tail.evaluations,
            basis=self._basis,
            texts=self._tail.texts,
        )

    def has_grown(self) -> bool:
        """Return True if events were written since the last `read`."""
        return self._directory.log_stamp != self._stamp


def _mark(event: Mapping[str, Any]) -> Mark:
    """Return a mark as figures draw it."""
    step = mark_step(event)
    if event["type"] == "start":
        return Mark("resume", step, f"resumed at step {step:,}")
    if event["type"] == "checkpoint":
        return Mark("checkpoint", step, f"checkpoint at step {step:,}")
    did = "update skipped" if event.get("to") is None else f"rewound to step {event['to']:,}"
    words = f"spike at step {step:,}: loss {event['loss']:.4g}, norm {event['grad_norm']:.4g}, {did}"
    return Mark("spike", step, words)
