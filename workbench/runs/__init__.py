"""Runs: launching without blocking the kernel, the handle of a run, its history, tracking, the registry."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.runs.doctor import Report as Report
    from workbench.runs.doctor import doctor as doctor
    from workbench.runs.launching.launcher import check_plan as check_plan
    from workbench.runs.launching.launcher import launch as launch
    from workbench.runs.records.history import History as History
    from workbench.runs.records.history import HistoryTail as HistoryTail
    from workbench.runs.run import Checkpoint as Checkpoint
    from workbench.runs.run import Run as Run
    from workbench.runs.run import RunTable as RunTable
    from workbench.runs.run import Status as Status
    from workbench.runs.run import load_run as load_run
    from workbench.runs.run import runs as runs

_HOME = {
    "Report": "doctor",
    "doctor": "doctor",
    "History": "records.history",
    "HistoryTail": "records.history",
    "check_plan": "launching.launcher",
    "launch": "launching.launcher",
    "Checkpoint": "run",
    "Run": "run",
    "RunTable": "run",
    "Status": "run",
    "load_run": "run",
    "runs": "run",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a name's module when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
