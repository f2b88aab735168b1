"""The public names of the room, listed once."""

from .bisecting import Bisection as Bisection
from .doctor import doctor as doctor
from .records.history import History as History
from .records.summary import Summary as Summary
from .records.summary import summary as summary
from .start import debug as debug
from .start import prepare as prepare
from .start import tokenize as tokenize
from .status import Checkpoint as Checkpoint
from .status import Status as Status
