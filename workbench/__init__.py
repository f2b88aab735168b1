"""Workbench: plan, launch, watch and compare the training of unmodified PyTorch models.

    import workbench as wb

    large  = wb.Experiment(model=wb.models.bert_large(), data=wb.data.corpus("demo"), steps=400)
    scaled = large.replace(model=wb.models.bert(hidden_size=1920, num_layers=54, num_heads=30))
    plan   = wb.plan(scaled)
    runs   = [wb.launch(large), wb.launch(scaled, plan=plan)]
    wb.live(runs)

The public names stand in `__init__.pyi`. Each is imported when it is first used, so that `import workbench` imports
neither torch nor any other heavy library.
"""

import importlib
import sys
from functools import partial
from typing import Any

from workbench.base import COMMANDS
from workbench.base.errors import lazy_names

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

_DISPLAYS = {
    "workbench.planning.plan:Plan": "workbench.figures.plan_view:plan_mimebundle",
    "workbench.analysis.contrast:Contrast": "workbench.figures.run_views:contrast_report",
    "workbench.analysis.parity:Parity": "workbench.figures.run_views:show_parity",
    "workbench.analysis.seed_contrast:SeedContrast": "workbench.figures.run_views:contrast_report",
    "workbench.sweeps.sweep:Sweep": "workbench.widgets.dashboard:show_queue",
    "workbench.sweeps.grid:MeasuredGrid": "workbench.widgets.dashboard:show_queue",
}
"""Function for each class that shows its values at the end of a notebook cell, or returns what is to be shown."""


COMMANDS["show"] = ("workbench.cli", "show")


def _display(function: str, value: Any) -> None:
    from IPython.display import display

    module, _, name = function.partition(":")
    shown = getattr(importlib.import_module(module), name)(value)
    if shown is not None:
        display(shown, raw=isinstance(shown, dict))


def _register_displays() -> None:
    """Let plans and contrasts at the end of a notebook cell show figures, and sweeps a table that updates."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    for shown, function in _DISPLAYS.items() if shell is not None else ():
        if hasattr(shell, "kernel") or ".widgets." not in function:
            displays = shell.display_formatter.ipython_display_formatter
            displays.for_type_by_name(*shown.split(":"), partial(_display, function))


_register_displays()
