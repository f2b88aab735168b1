"""Runs together: what differs between them, their distance from a baseline, their notebook, what is lost with them."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.base.errors import InvalidArgument, WorkbenchError
from workbench.base.units import gib, many
from workbench.record.rundir import RunDir, parsed, read_file
from workbench.runs.run import Run

MOST_ROWS = 200
"""Most settings that are listed of runs that differ."""


def notebook_of(run: RunDir, folder: Path) -> str | None:
    """Return the notebook that launched a run, relative to the server's `folder`; None if it is not below it."""
    # Neither the checksum nor a path object is worth its time here, of hundreds of runs at once.
    launched_by, root = None, f"{folder}{os.sep}"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        launched_by = parsed(read_file(run.environment)).get("notebook")
    for path in (launched_by, str(run.notebook)):
        with contextlib.suppress(OSError, ValueError):
            if not isinstance(path, str) or not path.endswith(".ipynb"):
                continue
            inside = os.path.normpath(os.path.join(folder, path))
            if inside.startswith(root) and os.path.isfile(inside):
                return inside.removeprefix(root).replace(os.sep, "/")
    return None


def what_differs(runs: Sequence[Run]) -> dict[str, Any]:
    """Return everything in experiments, plans and environments of runs that is not equal in all of them.

    `names` are those of the runs, and `rows` pairs of a dotted name and the values in words. Raises `InvalidArgument`
    for fewer than two runs.
    """
    from workbench.analysis.contrast import setting_differences
    from workbench.analysis.seed_contrast import described_runs

    if len(runs) < 2:
        raise InvalidArgument("One run does not differ from itself. Tick two or more.")
    described = [
        {**facts, "environment": run.environment} for facts, run in zip(described_runs(runs), runs, strict=True)
    ]
    rows = setting_differences(described)
    return {"names": [run.name for run in runs], "rows": rows[:MOST_ROWS], "left_out": len(rows[MOST_ROWS:])}


def difference_from(baseline: Run, run: Run) -> dict[str, Any]:
    """Return by how much the end of a run's loss lies above that of the baseline at equal tokens, as the page shows it.

    `value` is None and `words` say why where the losses do not compare. `words` have half of the 90 % interval of the
    noise along the curves, `low` to `high`, and `said` is the whole verdict.
    """
    from workbench.analysis.contrast import contrast_curves, with_margin
    from workbench.analysis.curve import curves_of

    try:
        compared = contrast_curves(curves_of([baseline, run]))
    except WorkbenchError as error:
        return {"value": None, "words": "–", "said": str(error).partition("\n")[0]}
    if compared.incomparable or not compared.differences:
        return {"value": None, "words": "–", "said": compared.incomparable or "They have no step in common."}
    [found] = compared.differences
    value, low, high = (float(each[-1]) for each in (found.value, found.low, found.high))
    if not math.isfinite(value):
        return {"value": None, "words": "–", "said": "The loss is not finite."}
    is_known = math.isfinite(low) and math.isfinite(high)
    ends = {"low": low, "high": high} if is_known else {}
    words = with_margin(value, (high - low) / 2, "+") if is_known else f"{value:+.3g}"
    said = f"{found.loss} at equal tokens, minus that of {baseline.name}: {found.describe()}"
    return {"value": value, "words": words, "said": said, **ends}


def what_is_lost(runs: Sequence[Run]) -> dict[str, Any]:
    """Return whether runs `may` be deleted, and in `words` how many they are and what is lost with them, or why not."""
    size, checkpoints, training = 0, 0, 0
    for run in runs:
        training += not run.status.final or run.alive
        checkpoints += len(run.checkpoints)
        for folder, _, files in os.walk(run.path):
            for name in files:
                with contextlib.suppress(OSError):
                    size += os.lstat(Path(folder, name)).st_size
    some = many(len(runs), "run")
    if training:
        left = "1 of them still trains" if training == 1 else f"{training} of them still train"
        return {"may": False, "words": f"{some} cannot be deleted: {left}. Stop what trains first."}
    held = f"{many(checkpoints, 'checkpoint')}, curves, logs and notes, {gib(size)} in all"
    return {"may": True, "words": f"{some} will be deleted from this disk. {held}, are lost. What W&B has stays there."}
