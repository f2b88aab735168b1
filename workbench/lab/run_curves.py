"""The figure that compares runs in JupyterLab's main area, with each run labelled by what differs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from workbench.analysis.contrast import setting_differences
from workbench.analysis.curve import Curve
from workbench.errors import RunNotFound
from workbench.experiment import values_by_name
from workbench.runs.run import Run

MOST_SETTINGS = 3
"""Largest number of settings in a label."""


def labels_by_difference(runs: Sequence[Run]) -> list[str]:
    """Return a label for each run, such as `"learning_rate 0.001, seed 2"`; no two are alike.

    Runs that differ in too many settings, or in none, are called by their names.
    """
    try:
        differences = setting_differences([values_by_name(run.config) for run in runs])
    except (RunNotFound, AttributeError, TypeError, ValueError):  # the files of a run may hold anything
        differences = ()
    told = [(name, values) for name, values in differences if name not in ("name", "tags")]
    names = [run.name for run in runs]
    if not 0 < len(told) <= MOST_SETTINGS:
        return names
    labels = [", ".join(f"{name} {values[index]}" for name, values in told) for index in range(len(runs))]
    count = Counter(labels)
    return [label if count[label] == 1 else f"{label} ({name})" for label, name in zip(labels, names, strict=True)]


def sizes_of_events(runs: Sequence[Run]) -> list[int]:
    """Return the size of each run's events, by which a page knows whether a figure is still the newest."""
    return [run.directory.events.stat().st_size if run.directory.events.exists() else 0 for run in runs]


def figure_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the loss curves of runs as a plotly figure in JSON."""
    from workbench.figures.curves_view import loss_curves

    named = zip(labels_by_difference(runs), runs, strict=True)
    curves = [Curve(name, run.history(), evaluations=run.evaluations()) for name, run in named]
    title = runs[0].name if len(runs) == 1 else f"Loss of {len(runs)} runs"
    figure: dict[str, Any] = json.loads(loss_curves(curves, title=title).to_json())
    return figure
