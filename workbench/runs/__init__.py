"""Runs: launching without blocking the kernel, the handle of a run, its history, tracking, the registry."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.runs.doctor import Report as Report
    from workbench.runs.doctor import doctor as doctor
    from workbench.runs.records.history import History as History
    from workbench.runs.records.history import HistoryTail as HistoryTail
    from workbench.runs.registry import RunTable as RunTable
    from workbench.runs.registry import list_runs as list_runs
    from workbench.runs.registry import load_run as load_run
    from workbench.runs.run import Run as Run
    from workbench.runs.status import Checkpoint as Checkpoint
    from workbench.runs.status import Status as Status

_HOME = {
    "Report": "doctor",
    "doctor": "doctor",
    "History": "records.history",
    "HistoryTail": "records.history",
    "RunTable": "registry",
    "list_runs": "registry",
    "load_run": "registry",
    "Run": "run",
    "Checkpoint": "status",
    "Status": "status",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a name's module when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
