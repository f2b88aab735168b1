"""The public names of the room, listed once."""

from .grid import Cell as Cell
from .grid import Grid as Grid
from .grid import grid as grid
from .measuring import MeasuredCell as MeasuredCell
from .measuring import MeasuredGrid as MeasuredGrid
from .measuring import load_grid as load_grid
