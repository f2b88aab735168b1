"""Workbench: plan, launch, watch and compare the training of unmodified PyTorch models.

    import workbench as wb

    large  = wb.Experiment(model=wb.models.bert_large(), data=wb.data.corpus("demo"), steps=400)
    scaled = large.replace(model=wb.models.bert(hidden_size=1920, num_layers=54, num_heads=30))
    plan   = wb.plan(scaled)
    runs   = [wb.launch(large), wb.launch(scaled, plan=plan)]
    wb.live(runs)

Names are imported when they are first used: `import workbench` imports neither torch nor any other heavy library.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench import data, models
    from workbench.api import (
        calibrate,
        capture,
        clone,
        compare,
        contrast,
        doctor,
        export,
        launch,
        live,
        load_plan,
        load_run,
        partition,
        plan,
        prepare,
        reproduce,
        resume,
        runs,
        search,
        share,
        show,
        slurm,
        stop,
        summary,
        sync,
        timeline,
        wait,
        what_if,
    )
    from workbench.cost.cluster import Cluster
    from workbench.errors import WorkbenchError
    from workbench.experiment import Experiment
    from workbench.measure.local_cluster import local_cluster
    from workbench.planning.plan import Plan
    from workbench.runs import Run

__version__ = "0.1.0"

_HOMES = {
    "Experiment": "workbench.experiment",
    "Cluster": "workbench.cost.cluster",
    "Plan": "workbench.planning.plan",
    "local_cluster": "workbench.measure.local_cluster",
    "Run": "workbench.runs",
    "WorkbenchError": "workbench.errors",
    **dict.fromkeys(
        (
            "calibrate",
            "capture",
            "clone",
            "compare",
            "contrast",
            "doctor",
            "export",
            "kill",
            "launch",
            "live",
            "load_plan",
            "load_run",
            "partition",
            "plan",
            "prepare",
            "reproduce",
            "resume",
            "runs",
            "search",
            "share",
            "show",
            "slurm",
            "stop",
            "summary",
            "sync",
            "timeline",
            "wait",
            "what_if",
        ),
        "workbench.api",
    ),
}
_ROOMS = ("data", "models")

__all__ = [
    "Cluster",
    "Experiment",
    "Plan",
    "Run",
    "WorkbenchError",
    "calibrate",
    "capture",
    "clone",
    "compare",
    "contrast",
    "data",
    "doctor",
    "export",
    "kill",
    "launch",
    "live",
    "load_plan",
    "load_run",
    "local_cluster",
    "models",
    "partition",
    "plan",
    "prepare",
    "reproduce",
    "resume",
    "runs",
    "search",
    "share",
    "show",
    "slurm",
    "stop",
    "summary",
    "sync",
    "timeline",
    "wait",
    "what_if",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"workbench.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'workbench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `wb.capture` and `wb.runs` the verbs: importing the rooms of the same names would replace them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def _register_displays() -> None:
    """In a notebook, let a `Plan` at the end of a cell show itself as its pictures, and `wb.runs()` as a live table."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None:
        return

    def by(name: str) -> Callable[[Any], None]:
        return lambda value: getattr(importlib.import_module("workbench.api"), name)(value)

    shows = shell.display_formatter.ipython_display_formatter
    shows.for_type_by_name("workbench.planning.plan", "Plan", by("display_plan"))
    if hasattr(shell, "kernel"):
        shows.for_type_by_name("workbench.runs.run", "RunTable", by("display_runs"))


_register_displays()
