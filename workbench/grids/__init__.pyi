"""The public names of the room, listed once."""

from .grid import Cell as Cell
from .grid import Grid as Grid
from .grid import grid as grid
