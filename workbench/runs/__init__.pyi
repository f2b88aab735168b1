"""The public names of the room, listed once."""

from .environment import doctor as doctor
from .registry import History as History
from .registry import Summary as Summary
from .registry import summary as summary
from .run import debug as debug
from .run import prepare as prepare
from .run import tokenize as tokenize
from .status import Checkpoint as Checkpoint
from .status import Status as Status
