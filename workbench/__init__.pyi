"""The public names of Workbench, listed once: `__init__.py` reads them from this file and imports each on first use."""

from . import data as data
from . import models as models
from . import sparsity as sparsity
from .api import compare as compare
from .api import contrast as contrast
from .api import coordinate_check as coordinate_check
from .api import exploration as exploration
from .api import launch as launch
from .api import live as live
from .api import pareto as pareto
from .api import partition as partition
from .api import pattern as pattern
from .api import prepare as prepare
from .api import reproduce as reproduce
from .api import share as share
from .api import show as show
from .api import summary as summary
from .api import timeline as timeline
from .api import tokenize as tokenize
from .api import what_if as what_if
from .cost.cluster import Cluster as Cluster
from .data._entropy import context_free as context_free
from .errors import WorkbenchError as WorkbenchError
from .experiment import Evaluate as Evaluate
from .experiment import Experiment as Experiment
from .experiment import Samples as Samples
from .figures.seed_bands_view import seed_bands as seed_bands
from .figures.sweep_view import best_so_far as best_so_far
from .figures.sweep_view import heat_map as heat_map
from .figures.sweep_view import parallel_coordinates as parallel_coordinates
from .grids.grid import Grid as Grid
from .grids.grid import grid as grid
from .measure.calibration import calibrate as calibrate
from .measure.local_cluster import local_cluster as local_cluster
from .models._scaling import scaling as scaling
from .planning.explanation import explain as explain
from .planning.from_experiment import graph as graph
from .planning.from_experiment import plan as plan
from .planning.from_experiment import profile as profile
from .planning.from_experiment import search as search
from .planning.layer_flops import layer_flops as layer_flops
from .planning.plan import Plan as Plan
from .runs.doctor import doctor as doctor
from .runs.plateau import left_plateau as left_plateau
from .runs.plateau import stop_on_plateau as stop_on_plateau
from .runs.registry import list_runs as list_runs
from .runs.registry import load_run as load_run
from .runs.run import Run as Run
from .sweeps.rules import diverged as diverged
from .sweeps.start import sweep as sweep
from .sweeps.sweep import Sweep as Sweep
from .sweeps.sweep import load_sweep as load_sweep

__all__: list[str]
__version__: str
