"""The log of a run as its processes write it, for tests that stand in for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.record import rundir
from workbench.record.step_table import log_step, num_logged


def append_event(events: Path, type: str, /, **fields: Any) -> None:
    """Append an event as a run does: a step to its table, starts and states with the number of rows before them."""
    if type == "step":
        log_step(events.parent, **fields)
    else:
        rows = {"rows": num_logged(events.parent)} if type in ("start", "status") else {}
        rundir.append_event(events, type, **{**rows, **fields})
