"""The rows that a tracker gets of a run: its events, folded as the history is, and their names there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.record.columns import wandb_name
from workbench.record.event_log import LogTail, resumed_step
from workbench.record.events import EvaluationEvent, NormsEvent, SamplesEvent, StepEvent
from workbench.record.history import answer
from workbench.record.norms import norms_of
from workbench.record.rundir import FINAL_STATES, RunDir, read_json

LARGEST_EXPONENT = 700.0
"""Loss from which the perplexity exceeds the largest float64."""
MOST_LAYERS = 32
"""Largest number of layers whose norms a tracker gets; of more, these are spread evenly from the first to the last."""
_NOT_METRICS = ("type", "step", "time", "scalars")

RowEvent = StepEvent | EvaluationEvent | SamplesEvent | NormsEvent


@dataclass(frozen=True)
class Row:
    """The metrics and texts that one event adds to the row of a step, in which evaluations and norms stand too."""

    step: int
    metrics: Mapping[str, Any]
    samples: tuple[tuple[int, str, str], ...] = ()
    """Texts that the model wrote: the step, the prompt, and what it wrote."""
    opened_s: float | None = field(default=None, compare=False)
    """Unix time of the row if this event opens it, else None."""


class RowTail:
    """A reader of the events that become rows of a tracker, as they arrive: each once, in the order of their rows.

    What has arrived when it is made is `backlog`, in which the attempts so far are folded into one sequence: a
    resumption replaces what came after its checkpoint. A resumption that replaces rows which were returned before makes
    the reader outdated: nothing more comes from it, and a new one folds anew.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._tail = LogTail(run.events)
        self._waiting: list[tuple[int, RowEvent]] = []
        self._started_at: set[float] = set()
        self._last, self._returned = -1, -1  # steps of the last row so far, and of the last one that was returned
        self._last_step = -1  # that of the last `step` event
        self.times: dict[int, float] = {}
        """Time of each row so far, by its step."""
        self.resumptions: set[int] = set()
        """Steps from which the training went on although later ones had been logged."""
        self.ended = self.is_outdated = False
        self.backlog = self.read()

    def read(self) -> list[Row]:
        """Return what has arrived since the last call."""
        for event in self._tail.read():
            if event["type"] == "status":
                self.ended = event["state"] in FINAL_STATES
                if event["state"] == "queued" and self._run.resume.exists():
                    self._go_back(int(read_json(self._run.resume)["step"]))
            elif event["type"] == "start":
                if event["time"] not in self._started_at:  # else the line stands in the file twice
                    self._started_at.add(event["time"])
                    self._go_back(resumed_step(event.get("resumed_from")))
            elif event["type"] == "step":
                if event["step"] <= self._last_step:  # repeated without a `start`
                    self._go_back(event["step"] - 1)
                self._last_step = event["step"]
                self._add(event["step"], event)
            elif event["type"] == "evaluation" or event["type"] == "samples" or event["type"] == "norms":
                self._add(max(event["step"], self._last), event)
        if self.is_outdated:
            return []
        waiting, self._waiting = self._waiting, []
        self._returned = self._last
        return [self._row(step, event) for step, event in waiting]

    def _row(self, step: int, event: RowEvent) -> Row:
        opened_s = event["time"] if event["time"] == self.times[step] else None
        if event["type"] == "step":
            figures = {**event, **(event.get("scalars") or {})}
            known = {key: value for key, value in figures.items() if key not in _NOT_METRICS and value is not None}
            return Row(step, {wandb_name(key): value for key, value in known.items()}, opened_s=opened_s)
        if event["type"] == "evaluation":
            return Row(step, _evaluated(event), opened_s=opened_s)
        if event["type"] == "norms":
            return Row(step, _norms(event), opened_s=opened_s)
        texts = tuple((event["step"], sample["prompt"], answer(sample)) for sample in event["samples"])
        return Row(step, {}, texts, opened_s)

    def _add(self, step: int, event: RowEvent) -> None:
        self.times.setdefault(step, event["time"])
        self._last = max(self._last, step)
        self._waiting.append((step, event))

    def _go_back(self, step: int) -> None:
        if step >= self._last:
            return
        self.resumptions.add(step)
        self.times = {known: time_s for known, time_s in self.times.items() if known <= step}
        self._waiting = [row for row in self._waiting if row[0] <= step]
        self._last, self._last_step = max(self.times, default=-1), min(self._last_step, step)
        self.is_outdated |= step < self._returned


def _norms(event: NormsEvent) -> dict[str, float]:
    """Return the norms of layers: of weights, of gradients, and of updates as shares of the weights'."""
    found = norms_of([event]).by_layer()
    with np.errstate(divide="ignore", invalid="ignore"):
        tables = {
            "weight_norms": found.weights,
            "gradient_norms": found.gradients,
            "updates_per_weight": found.updates / found.weights,
        }
    names, most = found.parameters, min(MOST_LAYERS, len(found.parameters))
    shown = sorted({round(float(at)) for at in np.linspace(0, len(names) - 1, most)}) if names else []
    return {f"{of}/{names[at]}": float(table[0, at]) for of, table in tables.items() for at in shown}


def _evaluated(evaluation: EvaluationEvent) -> dict[str, float]:
    """Return the metrics of an evaluation, whose x axis is the step that was evaluated."""
    loss = evaluation["loss"]
    perplexity = math.exp(loss) if loss < LARGEST_EXPONENT else math.inf
    own = {f"eval/{name}": value for name, value in evaluation.get("metrics", {}).items() if value is not None}
    return {"eval/loss": loss, "eval/perplexity": perplexity, "eval/step": evaluation["step"], **own}
