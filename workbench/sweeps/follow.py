"""The progress of a sweep as lines of text, for a shell."""

from __future__ import annotations

import time
from collections.abc import Iterator

from workbench.runs.records.follow import Follower
from workbench.sweeps.queue import POLL_S
from workbench.sweeps.sweep import Sweep


def follow(sweep: Sweep, every_s: float = 5.0) -> Iterator[str]:
    """Yield a line when a run changes its state or ends, and every `every_s` seconds for runs that make steps.

    Ends when the supervisor of the sweep has left.
    """
    follower, ended = Follower(every_s), len(sweep.results())
    while True:
        alive = sweep.alive  # asked before the last look at the runs
        yield from follower.lines(sweep.runs)
        if len(sweep.results()) > ended:
            ended = len(sweep.results())
            best = sweep.rows()[0]
            values = ", ".join(f"{name} {value}" for name, value in best.values.items())
            yield sweep.headline() + ("" if best.mean is None else f"; best so far {best.mean:.4g} with {values}")
        if not alive:
            return
        time.sleep(POLL_S)
