"""The public names of the room, listed once."""

from .grid import Grid as Grid
from .grid import MeasuredGrid as MeasuredGrid
from .grid import load_grid as load_grid
from .grid import verdict as verdict
from .rules import diverged as diverged
from .sweep import Sweep as Sweep
from .sweep import load_sweep as load_sweep
