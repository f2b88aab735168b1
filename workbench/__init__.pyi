"""The public names of everyday, listed once: `__init__.py` reads them from this file and imports each on first use.

All others are in the modules that stand here, by purpose; each has a list of its own.
"""

from . import analysis as analysis
from . import data as data
from . import figures as figures
from . import measure as measure
from . import models as models
from . import planning as planning
from . import runs as runs
from . import sparsity as sparsity
from . import sweeps as sweeps
from .analysis.bisection import bisect as bisect
from .analysis.parity import parity as parity
from .analysis.seed_contrast import contrast as contrast
from .cost.hardware import Cluster as Cluster
from .experiment import Checkpoints as Checkpoints
from .experiment import Evaluation as Evaluation
from .experiment import Experiment as Experiment
from .experiment import Optimizer as Optimizer
from .experiment import Samples as Samples
from .experiment import Tracking as Tracking
from .figures.run_views import compare as compare
from .figures.run_views import show as show
from .notebooks.sharing import reproduce as reproduce
from .notebooks.sharing import share as share
from .planning.plan import Plan as Plan
from .planning.planner import plan as plan
from .planning.planner import search as search
from .record.columns import log_scalar as log_scalar
from .runs.registry import list_runs as list_runs
from .runs.registry import load_run as load_run
from .runs.run import Run as Run
from .runs.run import launch as launch
from .sweeps.grid import grid as grid
from .sweeps.sweep import sweep as sweep
from .widgets.dashboard import live as live
from .widgets.what_if import what_if as what_if

__all__: list[str]
__version__: str
