"""The public names of the room, listed once."""

from .dashboard import Live as Live
from .dashboard import LiveSweep as LiveSweep
from .dashboard import live as live
from .what_if import WhatIf as WhatIf
