"""The figures that compare runs in JupyterLab's main area, with each run labelled by what differs."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from workbench.analysis.contrast import setting_differences
from workbench.analysis.curve import Curve
from workbench.errors import RunNotFound, WorkbenchError
from workbench.experiment import values_by_name
from workbench.runs.records.history import read_tail
from workbench.runs.records.summary import measurements
from workbench.runs.run import Run
from workbench.runs.status import read_progress

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


def failures_of(runs: Sequence[Run]) -> str:
    """Return why those runs failed that did, each with the root exception, where it arose and a remedy."""
    errors = [(run.name, run.error()) for run in runs]
    return "\n\n".join(f"{name}: {error}" for name, error in errors if error is not None)


def figures_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the dashboard of runs as figures in JSON: loss curves, and panels of speed, devices and memory.

    Of a single run with a plan, what was predicted beside what was measured follows.
    """
    from workbench.figures.curves_view import loss_curves
    from workbench.figures.panels_view import panel_names, panels
    from workbench.figures.prediction_view import prediction

    tails = [read_tail(run.directory.events) for run in runs]
    named = zip(labels_by_difference(runs), tails, strict=True)
    curves = [Curve(name, tail.read(), evaluations=tail.evaluations) for name, tail in named]
    peaks = [read_progress(run.directory).memory for run in runs]
    usage = [tail.utilization for tail in tails]
    title = runs[0].name if len(runs) == 1 else f"Loss of {len(runs)} runs"
    figures = [loss_curves(curves, title=title)]
    if panel_names(curves, peaks, usage):
        figures.append(panels(curves, peaks, usage=usage))
    if len(runs) == 1:
        with contextlib.suppress(WorkbenchError):  # it has no plan, or one that this version cannot read
            figures.append(prediction(runs[0].plan, measurements(runs[0]), "Predicted and measured"))
    return [json.loads(figure.to_json()) for figure in figures]
