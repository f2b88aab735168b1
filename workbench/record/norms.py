"""Norms of weights, gradients and updates of a run by parameter and step, as NumPy columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.base.display import html_table
from workbench.base.errors import InvalidArgument, UnknownParameter, suggestion
from workbench.record.columns import NORMS
from workbench.record.event_log import resumed_step
from workbench.record.rundir import EventTail, parse_event, type_prefix

Table = NDArray[np.float64]
BIAS = 127
"""Bin of a record's histogram whose elements have a magnitude in [1, 2): the exponent of 1 in the bits of fp32."""
BINS = (-60, 20)
"""First binary exponent of a histogram of all steps, and the end; elements beyond are counted at the ends."""


@dataclass(frozen=True, eq=False)
class Norms:
    """The norms of a run: tables of S recorded steps and P parameters, NaN where a step does not train a parameter.

    `norms["updates"]` and `norms.updates` are the same table.
    """

    step: Table
    """Numbers of the recorded steps, from 1."""
    tokens: Table
    parameters: tuple[str, ...]
    layers: tuple[str, ...]
    """Layer of each parameter: the block of the model that reads it first."""
    elements: Table
    """Number of elements of each parameter."""
    weights: Table = field(repr=False)
    """Norm of each parameter before the update."""
    gradients: Table = field(repr=False)
    """Norm of its gradient before clipping."""
    updates: Table = field(repr=False)
    """Norm of what the update added to it, with the decay."""
    least: Table = field(repr=False)
    """Norm of the update that the optimiser lets expect where gradients are independent from step to step; NaN where no
    formula says so (user-defined optimisers)."""
    most: Table = field(repr=False)
    """Norm that it lets expect where gradients are the same in every step."""
    spent_s: Table = field(repr=False)
    """Seconds that each record took, which count as time of no step."""
    _histograms: tuple[Any, ...] = field(repr=False, default=())

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, name: str) -> Table:
        known = (*NORMS, "least", "most")
        if name not in known:
            raise UnknownParameter(f"Norms have no table {name!r}. {suggestion(name, known)}")
        return np.asarray(getattr(self, name))

    def __repr__(self) -> str:
        if not len(self):
            return "Norms(none recorded)"
        return (
            f"Norms({len(self.parameters):,} parameters in {len(set(self.layers)):,} layers, {len(self):,} steps to "
            f"step {self.step[-1]:,.0f}, {float(np.mean(self.spent_s)):.3g} s a record)"
        )

    def _repr_html_(self) -> str:
        if not len(self):
            return repr(self)
        rows, by_layer = [], self.by_layer()
        for place, name in enumerate(by_layer.parameters):
            last = [float(table[-1, place]) for table in (by_layer.weights, by_layer.gradients, by_layer.updates)]
            expected = [float(table[-1, place]) / last[0] for table in (by_layer.least, by_layer.most)]
            between = "" if math.isnan(expected[0]) else " to ".join(f"{each:.3g}" for each in expected)
            rows.append((name, *(f"{each:.4g}" for each in last), f"{last[2] / last[0]:.3g}", between))
        head = ("layer", "weight", "gradient", "update", "update / weight", "expected")
        return html_table(head, rows)

    def by_layer(self) -> Norms:
        """Return the norms of whole layers: roots of the sums of squares of their parameters."""
        names = list(dict.fromkeys(self.layers))
        members = [np.array([layer == name for layer in self.layers]) for name in names]

        def folded(table: Table) -> Table:
            # A layer of which a step trains some parameters has the norms of these; one of which it trains none is NaN.
            parts = [table[:, each] for each in members]
            columns = [np.where(np.isnan(part).all(1), np.nan, np.sqrt(np.nansum(part**2, 1))) for part in parts]
            return np.array(columns, dtype=np.float64).reshape(len(names), len(self)).T

        return Norms(
            step=self.step,
            tokens=self.tokens,
            parameters=tuple(names),
            layers=tuple(names),
            elements=np.array([self.elements[each].sum() for each in members]),
            **{name: folded(self[name]) for name in (*NORMS, "least", "most")},
            spent_s=self.spent_s,
            _histograms=self._histograms,
        )

    def histogram(self, of: str, layer: str) -> Table:
        """Return the elements of a layer by magnitude: one row a recorded step, one column a binary exponent.

        Column k holds the elements whose magnitude lies in [2**(k - 60), 2**(k - 59)); smaller ones, but for zeros, are
        in the first column, and larger ones in the last.

        Args:
            of: `weights`, `gradients` or `updates`.
            layer: a name of `layers`.

        Raises `UnknownParameter` for another table or layer.
        """
        if of not in NORMS:
            raise UnknownParameter(f"There is no histogram of {of!r}. {suggestion(of, NORMS)}")
        if layer not in self.layers:
            raise UnknownParameter(f"There is no layer {layer!r}. {suggestion(layer, set(self.layers))}")
        low, end = BINS
        counted = np.zeros((len(self), end - low))
        for row, histograms in enumerate(self._histograms):
            for each in histograms:
                if each["layer"] == layer and each["of"] == of:
                    exponents = np.clip(each["first"] - BIAS + np.arange(len(each["counts"])), low, end - 1) - low
                    np.add.at(counted[row], exponents, each["counts"])
        return counted


class NormsTail:
    """A reader of a growing log; each `read()` parses only the records that have arrived since the last one."""

    def __init__(self, path: Path) -> None:
        """`path` is that of `events.jsonl`."""
        self._events = EventTail(path)
        self._found: dict[int, Mapping[str, Any]] = {}
        self._read: Norms | None = None

    def read(self) -> Norms:
        """Return the norms so far. A new attempt repeats the steps after its checkpoint, whose records are dropped."""
        for line in self._events.lines():
            if not line.startswith((type_prefix("norms"), type_prefix("start"))):
                continue
            event: Any = parse_event(line)
            if event is None:
                continue
            self._read = None
            if event["type"] == "norms":
                self._found[int(event["step"])] = event
            else:
                resumed = resumed_step(event.get("resumed_from"))
                self._found = {step: each for step, each in self._found.items() if step <= resumed}
        if self._read is None:
            self._read = norms_of([self._found[step] for step in sorted(self._found)])
        return self._read


def norms_of(events: Sequence[Mapping[str, Any]]) -> Norms:
    """Return the tables of events that are in order of their steps; parameters are those of the last one."""
    last: Mapping[str, Any] = events[-1] if events else {"parameters": [], "layers": [], "elements": []}
    alike = [event for event in events if event["parameters"] == last["parameters"]]

    def table(name: str) -> Table:
        values = [event[name] for event in alike]
        return np.array(values, dtype=np.float64).reshape(len(alike), len(last["parameters"]))

    def column(name: str) -> Table:
        return np.array([event[name] for event in alike], dtype=np.float64)

    return Norms(
        step=column("step"),
        tokens=column("tokens"),
        parameters=tuple(last["parameters"]),
        layers=tuple(last["layers"]),
        elements=np.array(last["elements"], dtype=np.float64),
        **{name: table(name) for name in (*NORMS, "least", "most")},
        spent_s=column("spent_s"),
        _histograms=tuple(event["histograms"] for event in alike),
    )


def read_norms(path: Path, name: str) -> Norms:
    """Return the norms of a run by its `events.jsonl`; raise `InvalidArgument` with its `name` if there are none."""
    found = NormsTail(path).read()
    if not len(found):
        raise InvalidArgument(
            f"{name} has recorded no norms. Launch it with tracking=wb.Tracking(norms_every=100), or any other number "
            "of steps between two records."
        )
    return found
