"""The four verbs that a service which tracks runs is asked for; each service is a class in a file of its own.

A tracker stands in the recorder, a process beside the training, and speaks of one run. Whatever a service lacks of a
run stands in the run's events, so that a tracker may write a run anew when its rows no longer hold.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from workbench.record.rundir import RunDir, read_object
from workbench.runs.tracking.rows import Row, RowTail

CLASSES = {
    "wandb": "workbench.runs.tracking.wandb_tracker:WandbTracker",
    "trackio": "workbench.runs.tracking.trackio_tracker:TrackioTracker",
}
"""Class of each service, by its name in `Tracking.tracker`."""
SHOWN_STEPS = 5
"""Number of missing steps that a message lists."""


class Opened(NamedTuple):
    """The result of `Tracker.open`."""

    words: str
    """The address at which a person finds the run, and what became of rows there that no longer held."""
    held: int
    """Number of rows, from the first, that the service has already."""


class Tracker(Protocol):
    """One run at one service."""

    title: ClassVar[str]
    """The service's name for people."""

    def __init__(self, run: RunDir) -> None: ...

    def refusal(self) -> str:
        """Return why nothing can be delivered from the user's process, with the way out; empty if it can."""

    def obstacle(self) -> str:
        """Return why the recorder would deliver nothing from this process; empty if it would try."""

    def destination(self) -> str:
        """Return the address to which the environment points, without secrets; empty for the service's usual one."""

    def open(self, tail: RowTail, config: Mapping[str, Any], offline: bool) -> Opened:
        """Begin or go on with the run, whose settings stand in `tracker.json`; end a session that is open.

        `tail.backlog` holds the rows so far. Where the service has others, they are replaced, or the run goes on as
        one of its own in the same group. `offline` asks no server. Raises if the service does not answer.
        """

    def log(self, row: Row) -> None:
        """Hand on a row; rows come in the order of their steps. Does not wait until it is stored."""

    def attach(self, files: Mapping[str, Mapping[str, Path]], facts: Mapping[str, float]) -> None:
        """Attach files, each by its name within an artifact of a type, and figures of the whole run."""

    def confirm(self, tail: RowTail, ended_well: bool) -> None:
        """End the run there. Raise unless the service has every row; the message names the steps that it lacks."""


def tracker_of(run: RunDir) -> Tracker:
    """Return the tracker of a run; runs from before there were several are at W&B."""
    name = read_object(run.tracker).get("tracker", "wandb")
    module, _, cls = CLASSES[name if name in CLASSES else "wandb"].partition(":")
    tracker: Tracker = getattr(importlib.import_module(module), cls)(run)
    return tracker


def lacks(steps: set[int], there: set[int], expected: int, has: int) -> RuntimeError:
    """Return the error of a service that has `has` of `expected` rows, those of the steps `there` of `steps`."""
    missing = sorted(steps - there)
    shown = ", ".join(f"{step:,}" for step in missing[:SHOWN_STEPS])
    more = f" and {len(missing) - SHOWN_STEPS:,} more" if len(missing) > SHOWN_STEPS else ""
    dropped = f"; it dropped {shown}{more}" if missing else ""
    return RuntimeError(f"the server has {has:,} of {expected:,} steps{dropped}")
