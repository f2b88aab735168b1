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

import sys
from typing import Any

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def _register_displays() -> None:
    """Let plans and contrasts at the end of a notebook cell show figures, and sweeps a table that updates."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        return

    def display_plan(plan: Any) -> None:
        from IPython.display import display

        from workbench.figures.plan_view import plan_mimebundle

        display(plan_mimebundle(plan), raw=True)

    def display_contrast(contrast: Any) -> None:
        from workbench.figures.contrast_view import show_contrast

        show_contrast(contrast)

    def display_coordinates(check: Any) -> None:
        from IPython.display import display

        from workbench.figures.coordinate_view import coordinate_check

        display(coordinate_check(check))

    def display_sweep(sweep: Any) -> None:
        from workbench.widgets.live_sweep import show_sweep

        show_sweep(sweep)

    def display_measured(measured: Any) -> None:
        from workbench.widgets.live_grid import show_grid

        show_grid(measured)

    displays = shell.display_formatter.ipython_display_formatter
    displays.for_type_by_name("workbench.planning.plan", "Plan", display_plan)
    displays.for_type_by_name("workbench.analysis.contrast", "Contrast", display_contrast)
    displays.for_type_by_name("workbench.analysis.seed_contrast", "SeedContrast", display_contrast)
    displays.for_type_by_name("workbench.analysis.coordinates", "CoordinateCheck", display_coordinates)
    if hasattr(shell, "kernel"):
        displays.for_type_by_name("workbench.sweeps.sweep", "Sweep", display_sweep)
        displays.for_type_by_name("workbench.sweeps.measured", "MeasuredGrid", display_measured)


_register_displays()
