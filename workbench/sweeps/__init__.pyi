"""The public names of the room, listed once."""

from .grid import Cell as Cell
from .grid import Grid as Grid
from .grid import grid as grid
from .measured import MeasuredCell as MeasuredCell
from .measured import MeasuredGrid as MeasuredGrid
from .measured import load_grid as load_grid
from .rules import Diverged as Diverged
from .rules import diverged as diverged
from .start import sweep as sweep
from .sweep import Sweep as Sweep
from .sweep import load_sweep as load_sweep
