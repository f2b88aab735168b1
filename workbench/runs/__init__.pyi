"""The public names of the room, listed once."""

from .records.history import History as History
from .records.history import HistoryTail as HistoryTail
from .registry import RunTable as RunTable
from .registry import list_runs as list_runs
from .registry import load_run as load_run
from .run import Run as Run
from .status import Checkpoint as Checkpoint
from .status import Status as Status
