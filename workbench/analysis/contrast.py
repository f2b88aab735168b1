"""Comparison of runs at equal cost, and of their settings."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.analysis.comparison import TIMED_AXES, Difference, Standing, difference, standings
from workbench.analysis.curve import X_AXES, Curve, check_axis, column, evaluations_of
from workbench.analysis.noise import Scatter
from workbench.tables import html_table
from workbench.units import gib

LEAST_EVALUATIONS = 5
"""Smallest number of held-out losses of each run from which they are compared in place of training losses."""
ADVICE = "To tell recipes apart, train each with three seeds or more, or give scatter=, such as scatter=wb.list_runs()."
"""The way out where one seed each cannot tell."""
IGNORED_SETTINGS = (
    *("candidates", "prediction", "stages", "block_names", "signature", "flops_per_step"),
    *("load_average", "time", "started", "command", "directory", "executable", "name", "run"),
)
"""Keys that are no settings: results of a search, facts that follow from the model, when and where a run started."""


@dataclass(frozen=True)
class Contrast:
    """Comparison of runs and of their settings; a notebook shows it as a figure and tables."""

    names: tuple[str, ...]
    standings: tuple[Standing, ...]
    differences: tuple[Difference, ...]
    """Difference of each other run to the first."""
    settings: tuple[tuple[str, tuple[str, ...]], ...]
    """Settings that differ, as (dotted name, one value per run), from experiments, plans and environments."""

    def __repr__(self) -> str:
        lines = [str(standing) for standing in self.standings]
        lines += [item.describe() for item in self.differences]
        lines += [f"{name}: {' | '.join(values)}" for name, values in self.settings]
        return "\n".join([*lines, *self._advice()])

    def _advice(self) -> list[str]:
        """Return what would tell the recipes apart, if one seed each cannot."""
        return (
            [ADVICE] if any(item.scatter is None and item.axis not in TIMED_AXES for item in self.differences) else []
        )

    def to_html(self) -> str:
        """Return standings and settings as HTML tables, every name escaped."""
        rows = list[tuple[str, ...]]()
        for item in self.standings:
            losses = (item.losses[name].describe() for name in self.names)
            axis = X_AXES[item.axis]
            rows.append((axis.label, axis.describe(item.at), *losses, item.verdict))
        page = html_table(("at equal", "", *self.names, "verdict"), rows)
        sentences = [f"{item.describe()}." for item in self.differences]
        notes = [*sentences, *self._advice()]
        page += "".join(f"<p>{html.escape(note)}</p>" for note in notes)
        if not self.settings:
            return f"{page}<p>Their experiments, plans and environments agree.</p>"
        settings = html_table(("what differs", *self.names), ((name, *values) for name, values in self.settings))
        return f"{page}{settings}"


def contrast(
    curves: Sequence[Curve],
    described: Sequence[Mapping[str, Any]] = (),
    x: str = "tokens",
    scatter: Scatter | None = None,
) -> Contrast:
    """Compare runs at equal cost, each run with the first over `x`, and list the settings that differ.

    The held-out losses are compared if every run has at least `LEAST_EVALUATIONS` of them, else the training losses.

    `described` holds nested JSON for every run: its experiment, plan and environment. `scatter` says how far seeds move
    the ends of other runs; without it no run is called lower.
    """
    check_axis(x)
    first, *others = curves = compared_curves(curves)
    known = None if scatter is None else scatter.of_others()
    return Contrast(
        tuple(curve.name for curve in curves),
        standings(curves, known),
        tuple(difference(other, first, x, scatter=known) for other in others),
        setting_differences(described),
    )


def compared_curves(curves: Sequence[Curve], least: int = LEAST_EVALUATIONS) -> Sequence[Curve]:
    """Return the held-out losses of the runs if each has at least `least` of them, else the curves as they are."""
    held_out = [evaluations_of(curve) for curve in curves]
    enough = [curve for curve in held_out if curve is not None and len(column(curve, "step")) >= least]
    return enough if len(enough) == len(curves) else curves


def setting_differences(described: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return every leaf of nested descriptions that is not equal in all of them, as (dotted name, values)."""
    settings = [described_settings(item) for item in described]
    rows = []
    for name in dict.fromkeys(name for item in settings for name in item):
        values = tuple(item.get(name, "–") for item in settings)
        if len(set(values)) > 1:
            rows.append((name, values))
    return tuple(rows)


def described_settings(described: Mapping[str, Any]) -> dict[str, str]:
    """Return every leaf of a nested description that is not None, as a dotted name and a short text."""
    return {name: _in_words(name, value) for name, value in _flattened(described).items() if value is not None}


def _flattened(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, item in value.items():
        if key in IGNORED_SETTINGS:
            continue
        if isinstance(item, Mapping) and item:
            leaves |= _flattened(item, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = item
    return leaves


def _in_words(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int | float):
        return gib(value)
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 4:
        return f"{len(value)} items"
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
