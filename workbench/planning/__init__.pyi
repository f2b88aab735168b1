"""The public names of the room, listed once."""

from .data_supply import DataSupply as DataSupply
from .data_supply import data_supply as data_supply
from .explanation import Explanation as Explanation
from .explanation import explain as explain
from .profiling import graph as graph
from .profiling import profile as profile
from .table import Plans as Plans
