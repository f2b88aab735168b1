"""The progress of runs as lines of text, for a shell, a batch job, or a notebook that runs unattended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from workbench.rundir import FINAL_STATES
from workbench.runs.registry import row_or_reason
from workbench.runs.run import Run, progress_words
from workbench.runs.status import RunRow, state_in_words
from workbench.units import time_left

POLL_S = 0.2


class Follower:
    """A reporter of runs that prints only what is new since its last line about each run."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._due = time.monotonic() + every_s
        self.reported: dict[str, tuple[str, str, int]] = {}
        """State, message and step in the last line of each run, by its path."""

    def lines(self, runs: Sequence[Run]) -> Iterator[str]:
        """Yield a line for each run that changed its state; every `every_s` seconds also for each that made steps."""
        steps_are_due = time.monotonic() >= self._due
        if steps_are_due:
            self._due = time.monotonic() + self._every_s
        for run in runs:
            row = row_or_reason(run)
            now, before = (row["state"], row["message"], row["step"]), self.reported.get(row["path"])
            if before is None or now[:2] != before[:2] or (steps_are_due and now != before):
                self.reported[row["path"]] = now
                yield progress_line(row)


def follow(runs: Sequence[Run], every_s: float = 5.0) -> Iterator[str]:
    """Yield a line when a run changes its state, and every `every_s` seconds while it makes steps; end with the runs.

    Only the runs' directories are read, so that any number of followers cost the training nothing.
    """
    follower = Follower(every_s)
    while True:
        yield from follower.lines(runs)
        if all(follower.reported.get(str(run.path), ("",))[0] in FINAL_STATES for run in runs):
            return
        time.sleep(POLL_S)


def progress_line(row: RunRow) -> str:
    """Return `"09:41:07  bert-1  running  40 of 300 (13%)  loss 6.5  82.1 k tokens/s  MFU 41.0%  2 min left"`."""
    parts = [time.strftime("%H:%M:%S"), row["name"]]
    parts.append(state_in_words(row["state"], row["step"], row["training_loss"]))
    if row["steps"]:
        parts.append(f"{row['step']:,} of {row['steps']:,} ({row['step'] / row['steps']:.0%})")
    parts += progress_words(row)
    if row["eta_s"] is not None:
        parts.append(f"{time_left(row['eta_s'])} left")
    if row["message"] and row["state"] != "finished":
        parts.append(row["message"])
    return "  ".join(parts)
