"""The public names of the room, listed once."""

from .explanation import Explanation as Explanation
from .explanation import explain as explain
from .planner import Plans as Plans
from .planner import graph as graph
from .planner import profile as profile
from .runnable import DataSupply as DataSupply
from .runnable import data_supply as data_supply
