"""The public names of the room, listed once."""

from .rules import Diverged as Diverged
from .rules import diverged as diverged
from .start import sweep as sweep
from .sweep import Sweep as Sweep
from .sweep import load_sweep as load_sweep
